"""A server that was asked for a profile and cannot serve it ends in one line, and never serves without it."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import transformers
from tiny.image_models import CAUSAL_IMAGES, KINDS
from tiny.served_images import save_image_model
from transformers import AutoConfig

from kvtuner.errors import ServingError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.sglang.compat.releases import release_rules
from kvtuner.runtime_loader.sglang.options.option_refusals import refuse_flags
from kvtuner.runtime_loader.sglang.request import ServingRequest, Uniform, add_flags, request_of_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import MakeTokenizer, ModelFolder, ProfileOf, Refused, RunProgram, SaveProfile


@pytest.fixture
def tiny(model_folder: ModelFolder) -> Path:
    return model_folder("llama-gqa")


@pytest.fixture
def fitting(tiny: Path, profile_of: ProfileOf, save_profile: SaveProfile) -> Path:
    path: Path = save_profile(profile_of(AutoConfig.from_pretrained(tiny), [LayerQuantization(4, 4)] * 3))
    return path


def test_a_missing_file(tiny: Path, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    assert refused(tiny, "--kvtuner-profile", str(path)).startswith(f"{path}: cannot be read (No such file")


def test_an_invalid_profile(tiny: Path, refused: Refused, fitting: Path, tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    path.write_text(fitting.read_text().replace('"bits": 4', '"bits": 8', 1))
    assert "the file was edited or damaged" in refused(tiny, "--kvtuner-profile", str(path))


def test_a_profile_of_another_model(model_folder: ModelFolder, refused: Refused, fitting: Path) -> None:
    other = model_folder("qwen2-bias")
    assert "has num_layers 3, but this model has 2" in refused(other, "--kvtuner-profile", str(fitting))


def test_a_model_with_windows(model_folder: ModelFolder, refused: Refused) -> None:
    windowed = model_folder("mistral-no-window", sliding_window=64)
    line = refused(windowed, "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16")
    assert "a window of 64 tokens, shorter than the context of 512" in line


OTHER_CACHES = {
    "no layer with a KV cache: there is nothing to tune": (
        "Qwen3Next",
        {"num_experts": 0, "linear_num_key_heads": 2},
    ),
}


@pytest.mark.parametrize("what", OTHER_CACHES)
def test_a_model_with_another_cache(what: str, refused: Refused, make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    family, fields = OTHER_CACHES[what]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=320, max_position_embeddings=512, **fields)
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    flags = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "16")
    assert what in refused(tmp_path, *flags)


def test_an_option_that_a_packed_pool_does_not_work_with(tiny: Path, refused: Refused, fitting: Path) -> None:
    flags = ("--enable-hierarchical-cache", "--hicache-mem-layout", "page_head")
    line = refused(tiny, "--kvtuner-profile", str(fitting), *flags)
    assert line.startswith("--hicache-mem-layout page_head does not work with a packed KV pool: it splits pages by")


def test_deterministic_inference(tiny: Path, refused: Refused, fitting: Path) -> None:
    asked = ("--enable-deterministic-inference", "--attention-backend", "triton")  # SGLang has none on a processor
    for flags in ((), ("--enable-hierarchical-cache", "--kvtuner-hicache-only")):
        line = refused(tiny, "--kvtuner-profile", str(fitting), *asked, *flags)
        what = "a quantized host tier" if flags else "a packed KV pool"
        assert line.startswith(
            f"--enable-deterministic-inference does not work with {what}: answers would still depend"
        )
        assert line.endswith("drop it")


def test_a_decoder_whose_queries_and_keys_sglang_rotates_otherwise(refused: Refused, model_folder: ModelFolder) -> None:
    line = refused(model_folder("llama4"), "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16")
    assert line.startswith("SGLang's code for Llama4ForCausalLM rotates other channels than transformers, and loads no")


def test_another_padding_than_sglangs_in_the_own_inputs_of_layers(
    refused: Refused, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    fields = replace(CAUSAL_IMAGES, text={**CAUSAL_IMAGES.text, "pad_token_id": 7})
    save_image_model("Gemma4", make_tokenizer(), tmp_path, fields)
    line = refused(tmp_path, "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16")
    assert "features of images the layers' own inputs of token 0, and this model has 7 for its pad_token_id" in line


def test_images_that_are_read_both_ways_in_windows_that_a_context_does_not_reach(
    refused: Refused, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    alike = {"global_head_dim": 16, "sliding_window": 512}
    fields = replace(KINDS["Gemma4"], text={**KINDS["Gemma4"].text, **alike})
    save_image_model("Gemma4", make_tokenizer(), tmp_path, fields)
    flags = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", "--disable-hybrid-swa-memory")
    line = refused(tmp_path, *flags)
    assert line.startswith("no layer of Gemma4ForConditionalGeneration has a window in a context of 512 tokens, so")
    assert """or its text, with --json-model-override-args '{"language_model_only": true}'""" in line


def test_images_that_are_read_both_ways_and_longer_than_windows(
    refused: Refused, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    fields = replace(KINDS["Gemma3"], text={**KINDS["Gemma3"].text, "sliding_window": 3})
    save_image_model("Gemma3", make_tokenizer(), tmp_path, fields)
    line = refused(tmp_path, "--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", "--enable-multimodal")
    assert line.startswith("an image of this Gemma3ForConditionalGeneration has 4 tokens, which read one another, and")
    assert "SGLang's windows of 3 tokens cut later ones off too" in line


def test_exact_windows_of_a_model_whose_images_are_read_both_ways(
    refused: Refused, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    save_image_model("Gemma3", make_tokenizer(), tmp_path)
    flags = ("--enable-kvtuner-quant", "--kvtuner-q-group-size", "16", "--kvtuner-residual-length", "32")
    line = refused(tmp_path, *flags, "--enable-multimodal")
    assert line.startswith("the tokens of an image read one another in this model, later ones too")
    assert line.endswith("serve a profile without a window, or the model's text alone")


def test_adapters_where_nothing_may_differ_from_what_was_measured(tiny: Path, refused: Refused, fitting: Path) -> None:
    line = refused(tiny, "--kvtuner-profile", str(fitting), "--kvtuner-strict", "--lora-paths", "one=/adapter")
    assert line.startswith("the profile was measured without adapters (LoRA); drop --enable-lora and --lora-paths")


@pytest.mark.usefixtures("drafts_work")
def test_adapters_beside_what_was_never_tried_with_them(tiny: Path, refused: Refused, fitting: Path) -> None:
    flags = ("--lora-paths", "one=/adapter", "--speculative-algorithm", "NGRAM")
    line = refused(tiny, "--kvtuner-profile", str(fitting), *flags)
    assert line.startswith("--speculative-algorithm NGRAM does not work with LoRA on a packed KV pool")
    line = refused(tiny, "--kvtuner-profile", str(fitting), *flags[:2], "--enable-hierarchical-cache")
    assert line.startswith("--enable-hierarchical-cache does not work with LoRA on a packed KV pool")


def test_what_this_release_of_sglang_cannot_do(tiny: Path, refused: Refused, fitting: Path) -> None:
    asked = {"dp_size": "2", "speculative_algorithm": "NGRAM"}
    for rule in release_rules().refused:
        line = refused(tiny, "--kvtuner-profile", str(fitting), rule.flag, asked[rule.name])
        assert line.startswith(f"{rule.flag} {asked[rule.name]} does not work with a packed KV pool: {rule.reason};")
        assert line.endswith(rule.remedy)


def test_an_attention_backend_that_cannot_read_packed_rows(tiny: Path, refused: Refused, fitting: Path) -> None:
    line = refused(tiny, "--kvtuner-profile", str(fitting), "--attention-backend", "torch_native")
    assert line.startswith("--attention-backend torch_native cannot read a packed KV pool")


@pytest.fixture
def other_plugin(tmp_path: Path) -> Callable[..., str]:
    """`other_plugin(source, name="aaa")`: a folder for the path, with a plugin of SGLang that loads in that order."""

    def write(source: str, name: str = "aaa") -> str:
        (tmp_path / "other_plugin.py").write_text(source)
        metadata = tmp_path / "other_plugin-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = other_plugin:register\n")
        return str(tmp_path)

    return write


def test_a_plugin_that_comes_later_for_the_same_target(
    tiny: Path, fitting: Path, refused: Refused, other_plugin: Callable[..., str]
) -> None:
    target = "sglang.srt.runtime_context.publish"
    path = other_plugin(HOOK.format(target=target), name="zzz")
    line = refused(tiny, extra_path=path, KVTUNER_PROFILE=str(fitting))
    assert line.startswith(f"another SGLang plugin hooks {target}")


LATE = """
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

def register():
    @register_resolution_hook("handle_other_validations")
    def late(server_args, previous):
        previous(server_args)
        declare_resolution(server_args, "late", enable_dynamic_chunking=True)
"""


def test_an_option_that_is_decided_after_the_launchers_check(
    tiny: Path, fitting: Path, refused: Refused, other_plugin: Callable[..., str]
) -> None:
    path = other_plugin(LATE, name="zzz")
    line = refused(tiny, extra_path=path, KVTUNER_PROFILE=str(fitting))
    assert line.startswith("--enable-dynamic-chunking does not work")


HOOK = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def register():
    HookRegistry.register("{target}", lambda original, *a, **k: original(*a, **k), HookType.AROUND)
"""


@pytest.mark.parametrize(
    "target",
    [
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
        "sglang.srt.runtime_context.publish",
    ],
)
def test_another_plugin_on_the_same_target(
    target: str, tiny: Path, fitting: Path, refused: Refused, other_plugin: Callable[..., str]
) -> None:
    path = other_plugin(HOOK.format(target=target))
    line = refused(tiny, "--kvtuner-profile", str(fitting), extra_path=path)
    assert line.startswith(f"another SGLang plugin hooks {target}")


RENAME = """
def register():
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    KVCacheConfigurator.renamed = KVCacheConfigurator._build_mha_kv_pool
    del KVCacheConfigurator._build_mha_kv_pool
"""


def test_a_hooked_function_that_is_gone(
    tiny: Path, fitting: Path, refused: Refused, other_plugin: Callable[..., str]
) -> None:
    line = refused(tiny, "--kvtuner-profile", str(fitting), extra_path=other_plugin(RENAME))
    assert line.startswith("this SGLang has no sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build")


def test_every_hooked_function_that_is_gone_or_takes_other_arguments(run_program: RunProgram) -> None:
    program = Path(__file__).parent / "programs" / "hooked_functions_program.py"
    done = run_program(str(program))
    assert done.returncode == 0, done.stderr[-3000:]


LOSE = """
def register():
    from sglang.srt.server_args import ServerArgs
    del ServerArgs.from_cli_args
"""


def test_flags_that_nobody_would_read_are_unknown_to_the_parser(
    tiny: Path, fitting: Path, refused: Refused, other_plugin: Callable[..., str]
) -> None:
    path = other_plugin(LOSE)
    line = refused(tiny, "--kvtuner-profile", str(fitting), extra_path=path, begins="sglang serve: error: ")
    assert line.startswith("unrecognized arguments: --kvtuner-profile")


@pytest.mark.parametrize("variable", ["KVTUNER_PROFILE", "KVTUNER_ATTEND"])
def test_the_variables_of_an_engine(variable: str, tiny: Path, fitting: Path, refused: Refused, tmp_path: Path) -> None:
    variables = {"KVTUNER_PROFILE": str(fitting), variable: str(tmp_path / "wrong")}
    line = refused(tiny, **variables)
    assert "cannot be read" in line if variable == "KVTUNER_PROFILE" else "must be one of fresh, cache" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--enable-kvtuner-quant", "--kvtuner-axis-key", "2"), "must be 0, per token, or 1, per channel, not 2"),
        (("--enable-kvtuner-quant", "--kvtuner-axis-value", "1"), "values are stored per token, as by KIVI"),
        (
            ("--enable-kvtuner-quant", "--kvtuner-axis-key", "1", "--kvtuner-residual-length", "32"),
            "--kvtuner-residual-length must be 64 or more, not 32",
        ),
        (("--enable-kvtuner-hicache", "--kvtuner-hicache-axis-key", "1"), "--kvtuner-hicache-axis-key 0 works"),
        (("--enable-kvtuner-quant", "--kvtuner-residual-length", "1025"), "within 0 and 1024 tokens, not 1025"),
        (("--enable-kvtuner-quant", "--kvtuner-sinks", "-1"), "sinks must be within 0 and 64 tokens, not -1"),
        (("--kvtuner-profile", "p.json", "--kvtuner-residual-length", "9"), "residual-length needs --enable-kvtuner-q"),
        (("--enable-kvtuner-hicache", "--kvtuner-hicache-sinks", "4"), "hicache-sinks 0 works"),
        (("--kvtuner-nbits-key", "4"), "--kvtuner-nbits-key needs --enable-kvtuner-quant"),
        (("--enable-kvtuner-quant", "--kvtuner-profile", "p.json"), "exclude each other"),
        (("--kvtuner-attend", "cache"), "--kvtuner-attend needs --kvtuner-profile or --enable-kvtuner-quant"),
        (("--enable-kvtuner-hicache", "--kvtuner-hicache-axis-value", "1"), "--kvtuner-hicache-axis-value 0 works"),
        (("--enable-kvtuner-hicache", "--kvtuner-hicache-residual-length", "128"), "hicache-residual-length 0 works"),
        (("--kvtuner-hicache-asym",), "--kvtuner-hicache-asym needs --enable-kvtuner-hicache"),
        (("--enable-kvtuner-hicache", "--kvtuner-nbits-key", "4"), "--kvtuner-nbits-key needs --enable-kvtuner-quant"),
        (("--enable-kvtuner-hicache", "--kvtuner-profile", "p.json"), "exclude each other"),
        (("--enable-kvtuner-hicache", "--enable-kvtuner-quant"), "exclude each other"),
        (("--enable-kvtuner-quant", "--kvtuner-hicache-only"), "--kvtuner-hicache-only needs --kvtuner-profile, not"),
        (("--kvtuner-hicache-only",), "--kvtuner-hicache-only needs --kvtuner-profile"),
        (("--kvtuner-hicache-only", "--kvtuner-profile", "p", "--kvtuner-attend", "cache"), "reads itself exactly"),
        (("--kvtuner-strict",), "--kvtuner-strict needs --kvtuner-profile; add it"),
        (("--kvtuner-allow-derived",), "--kvtuner-allow-derived needs --kvtuner-profile; add it"),
        (("--enable-kvtuner-quant", "--kvtuner-strict"), "--kvtuner-strict needs --kvtuner-profile, not --enable"),
        (("--enable-kvtuner-hicache", "--kvtuner-allow-derived"), "-derived needs --kvtuner-profile, not --enable"),
        (
            ("--kvtuner-profile", "p", "--kvtuner-strict", "--kvtuner-allow-derived"),
            "--kvtuner-strict and --kvtuner-allow-derived exclude each other; drop one of them",
        ),
        (("--hicache-storage-backend", "juicefs"), "juicefs is for quantized pages"),
        (("--hicache-storage-backend", "lmcache"), "lmcache is for quantized pages"),
    ],
)
def test_flags_that_contradict_each_other(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ServingError) as refusal:
        request_of_flags(parsed(*flags), {})
    assert message in str(refusal.value)


def parsed(*flags: str) -> Namespace:
    """Parse flags as SGLang's parser does."""
    parser = ArgumentParser()
    parser.add_argument("--hicache-storage-backend", choices=["file"])
    add_flags(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ((), {"KVTUNER_HICACHE_ONLY": "1"}, "KVTUNER_HICACHE_ONLY=1 needs --kvtuner-profile; add it"),
        (
            ("--enable-kvtuner-quant",),
            {"KVTUNER_HICACHE_ONLY": "1"},
            "needs --kvtuner-profile, not --enable-kvtuner-quant",
        ),
        ((), {"KVTUNER_PROFILE": "p", "KVTUNER_HICACHE_ONLY": "1", "KVTUNER_ATTEND": "cache"}, "reads itself exactly"),
        (("--kvtuner-profile", "p"), {"KVTUNER_HICACHE_ONLY": "yes"}, "must be 0 or 1, not 'yes'"),
        ((), {"KVTUNER_STRICT": "1"}, "KVTUNER_STRICT=1 needs --kvtuner-profile; add it"),
        (
            ("--enable-kvtuner-quant",),
            {"KVTUNER_ALLOW_DERIVED": "1"},
            "KVTUNER_ALLOW_DERIVED=1 needs --kvtuner-profile",
        ),
        (("--kvtuner-profile", "p"), {"KVTUNER_STRICT": "on"}, "KVTUNER_STRICT must be 0 or 1, not 'on'"),
        (("--kvtuner-profile", "p", "--kvtuner-strict"), {"KVTUNER_ALLOW_DERIVED": "1"}, "exclude each other"),
    ],
)
def test_variables_that_contradict_flags(flags: tuple[str, ...], variables: dict[str, str], message: str) -> None:
    with pytest.raises(ServingError) as refusal:
        request_of_flags(parsed(*flags), variables)
    assert message in str(refusal.value)


@pytest.mark.parametrize(("name", "field"), [("strict", "strict"), ("allow-derived", "allow_derived")])
def test_how_strictly_a_profile_is_taken_travels_to_schedulers(name: str, field: str) -> None:
    variable = f"KVTUNER_{field.upper()}"
    by_flag = request_of_flags(parsed("--kvtuner-profile", "/p", f"--kvtuner-{name}"), {})
    by_both = request_of_flags(parsed("--kvtuner-profile", "/p"), {variable: "1"})
    assert by_flag == by_both == ServingRequest("/p", from_launcher=True, **{field: True})
    environ: dict[str, str] = {}
    by_flag.to_environment(environ)
    assert ServingRequest.from_environment(environ) == by_flag
    by_variables = {"KVTUNER_PROFILE": "/p", variable: "1"}
    assert ServingRequest.from_environment(by_variables) == ServingRequest("/p", **{field: True})
    assert ServingRequest.from_environment({"KVTUNER_PROFILE": "/p", variable: "0"}) == ServingRequest("/p")


def test_the_seeds_flags_ask_for_what_they_say() -> None:
    flags = (
        "--enable-kvtuner-hicache", "--kvtuner-hicache-nbits-key", "8", "--kvtuner-hicache-nbits-value", "2",
        "--kvtuner-hicache-asym", "--kvtuner-hicache-q-group-size", "32", "--kvtuner-hicache-axis-key", "0",
        "--kvtuner-hicache-residual-length", "0", "--hicache-storage-backend-config", "{}",
    )  # fmt: skip
    args = parsed(*flags)
    request = request_of_flags(args, {})
    assert args.hicache_storage_backend_extra_config == "{}"
    assert request == ServingRequest(None, Uniform(8, 2, True, 32), "fresh", from_launcher=True, hicache_only=True)
    environ: dict[str, str] = {}
    request.to_environment(environ)
    assert ServingRequest.from_environment(environ) == request
    assert request_of_flags(parsed("--enable-kvtuner-hicache"), {}) == ServingRequest(
        None, Uniform(4, 4, False, 64), "fresh", from_launcher=True, hicache_only=True
    )
    by_variables = {"KVTUNER_PROFILE": "/p", "KVTUNER_HICACHE_ONLY": "1"}
    assert ServingRequest.from_environment(by_variables) == ServingRequest("/p", hicache_only=True)


@pytest.mark.usefixtures("drafts_work")
def test_drafts_beside_an_exact_window(
    tiny: Path, refused: Refused, profile_of: ProfileOf, save_profile: SaveProfile
) -> None:
    layers = [LayerQuantization(4, 4)] * 3
    windowed = save_profile(profile_of(AutoConfig.from_pretrained(tiny), layers, window=ExactWindow(4)))
    line = refused(tiny, "--kvtuner-profile", str(windowed), "--speculative-algorithm", "NGRAM")
    assert line.startswith("--speculative-algorithm NGRAM does not work with an exact window")


@pytest.mark.parametrize("device", ["xpu", "npu:0"])
def test_a_device_without_kernels(device: str) -> None:
    with pytest.raises(ServingError, match=f"no kernels for {device}"):
        refuse_flags(SimpleNamespace(device=device), {})


def test_an_implementation_that_there_is_not(tiny: Path, refused: Refused, fitting: Path) -> None:
    line = refused(tiny, "--kvtuner-profile", str(fitting), KVTUNER_ATTENTION="flash")
    assert line == "KVTUNER_ATTENTION=flash is no implementation of attention on cpu; unset it"


@pytest.mark.full
def test_kernels_on_a_processor_without_the_interpreter(tiny: Path, refused: Refused, fitting: Path) -> None:
    line = refused(tiny, "--kvtuner-profile", str(fitting), KVTUNER_ATTENTION="triton", TRITON_INTERPRET="0")
    assert "the Triton kernels do not run on cpu" in line


def test_a_profile_of_another_architecture(model_folder: ModelFolder, refused: Refused, fitting: Path) -> None:
    twin = model_folder("mistral-no-window", num_hidden_layers=3, num_key_value_heads=2)
    line = refused(twin, "--kvtuner-profile", str(fitting))
    assert "is for LlamaForCausalLM, but this model is MistralForCausalLM" in line


REGISTER = """
import sys
from sglang.srt.plugins.hook_registry import HookRegistry
before = set(sys.modules)
from kvtuner.runtime_loader.sglang.plugin import register
register()
print(sorted(HookRegistry._hooks))
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""


def test_without_a_profile_the_plugin_adds_its_flags_and_no_more(on_a_processor: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REGISTER], capture_output=True, text=True, timeout=300, env=on_a_processor
    )
    hooks, modules = done.stdout.splitlines()
    arguments = "sglang.srt.server_args.ServerArgs"
    assert hooks == str([f"{arguments}.add_cli_args", f"{arguments}.from_cli_args"])
    assert modules == "['kvtuner']"
