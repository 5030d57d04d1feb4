"""Loading models, and the ones that are refused: one line that names the rule, whatever is wrong with them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import torch
import transformers

from kvtuner.calibration.model_loading import ModelSource, load_model, read_shape
from kvtuner.errors import KVTunerError, PrecisionError, UnsupportedModelError
from kvtuner.exported_configs.identity.model_identity import config_sha256

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import LoadTiny, MakeTokenizer, ModelFolder

DECODER = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def config_folder(path: Path, name: str, **values: Any) -> ModelSource:
    """A folder that holds a configuration alone."""
    getattr(transformers, f"{name}Config")(**values).save_pretrained(path)
    return ModelSource(str(path))


def edited_config(folder: Path, copy: Path, **values: Any) -> ModelSource:
    shutil.copytree(folder, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return ModelSource(str(copy))


def refusal(work: Callable[[], object], error: type[KVTunerError] = UnsupportedModelError) -> str:
    with pytest.raises(error) as caught:
        work()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_every_family_loads_with_the_geometry_of_its_weights(family: str, load_tiny: LoadTiny) -> None:
    loaded = load_tiny(family)
    geometry = loaded.shape.geometry
    attention = loaded.model.model.layers[0].self_attn
    fused = getattr(attention, "qkv_proj", None)
    rows = fused.weight.shape[0] if fused else sum(p.weight.shape[0] for p in (
        attention.q_proj, attention.k_proj, attention.v_proj
    ))  # fmt: skip
    heads = geometry.num_attention_heads + 2 * geometry.num_kv_heads
    assert rows == heads * geometry.head_dim
    assert len(loaded.model.model.layers) == geometry.num_layers
    assert loaded.shape.context_length == 512
    assert loaded.dtype_name == "float32"
    assert loaded.shape.architecture == type(loaded.model).__name__
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded.model.training


def test_the_families_cover_the_heads_that_differ_from_hidden_size(load_tiny: LoadTiny) -> None:
    assert load_tiny("head-dim-80").shape.geometry.head_dim == 80
    qwen3 = load_tiny("qwen3-qk-norm")
    assert qwen3.shape.geometry.head_dim * 4 != qwen3.model.config.hidden_size
    assert load_tiny("qwen2-bias").model.model.layers[0].self_attn.k_proj.bias.abs().mean() > 0.1
    assert load_tiny("mistral-no-window").shape.geometry.num_kv_heads == 1


def test_a_dtype_can_be_chosen(model_folder: ModelFolder) -> None:
    loaded = load_model(ModelSource(str(model_folder()), device="cpu", dtype="bfloat16"))
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.dtype_name == "bfloat16"


def test_a_context_can_be_shorter_than_the_models(model_folder: ModelFolder) -> None:
    assert read_shape(ModelSource(str(model_folder()), context_length=100)).context_length == 100


def test_the_name_of_a_folder_says_nothing_of_where_it_lies(model_folder: ModelFolder) -> None:
    folder = model_folder()
    assert ModelSource(str(folder)).name == "llama-gqa"
    assert ModelSource(str(folder / ".." / "llama-gqa")).name == "llama-gqa"
    assert ModelSource("Qwen/Qwen2.5-7B-Instruct").name == "Qwen/Qwen2.5-7B-Instruct"
    assert ModelSource("demo").name == "demo"


def test_the_config_hash_follows_the_shape_and_not_the_place_or_the_dtype(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder()
    first = read_shape(ModelSource(str(folder)))
    moved = read_shape(edited_config(folder, tmp_path / "moved", dtype="bfloat16", transformers_version="9.9.9"))
    assert moved.settings_sha256 == first.settings_sha256
    assert config_sha256(moved.config) == config_sha256(first.config)
    longer = read_shape(edited_config(folder, tmp_path / "longer", max_position_embeddings=1024))
    assert longer.settings_sha256 != first.settings_sha256
    assert config_sha256(longer.config) == config_sha256(first.config)  # it is the same network
    turned = read_shape(edited_config(folder, tmp_path / "turned", rope_parameters={"rope_theta": 7.0}))
    assert turned.settings_sha256 != first.settings_sha256
    wider = read_shape(edited_config(folder, tmp_path / "wider", intermediate_size=48))
    assert config_sha256(wider.config) != config_sha256(first.config)


def test_the_weights_hash_follows_the_weights_and_not_the_place(
    model_folder: ModelFolder, load_tiny: LoadTiny, tmp_path: Path
) -> None:
    shutil.copytree(model_folder(), tmp_path / "moved")
    first = load_tiny().weights_sha256
    assert load_model(ModelSource(str(tmp_path / "moved"), device="cpu")).weights_sha256 == first
    assert load_tiny(seed=1).weights_sha256 != first
    assert load_tiny().shape.settings_sha256 == load_tiny(seed=1).shape.settings_sha256


def test_the_weights_hash_sees_a_change_anywhere(make_model: Callable[..., Any], load_tiny: LoadTiny) -> None:
    loaded = replace(load_tiny(), model=make_model("llama-gqa"))
    seen = {loaded.weights_sha256}
    for parameter in loaded.model.parameters():
        with torch.no_grad():
            parameter.view(-1)[5] += 1e-3  # between the elements that a sample would take
        seen.add(loaded.weights_sha256)
    assert len(seen) == 1 + len(list(loaded.model.parameters()))


@pytest.fixture
def placed(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[str]]]:
    """Load onto a device that need not be there: `placed(folder, device, accelerate)` gives device_map and moves."""

    def load(folder: Path, device: str, *, accelerate: bool) -> tuple[Any, list[str]]:
        find, plain = importlib.util.find_spec, transformers.AutoModelForCausalLM.from_pretrained
        device_maps: list[Any] = []
        moves: list[str] = []

        def find_spec(name: str, package: str | None = None) -> Any:
            return (find("json") if accelerate else None) if name == "accelerate" else find(name, package)

        def from_pretrained(*_: Any, device_map: Any, **options: Any) -> Any:
            device_maps.append(device_map)
            loaded = plain(model_folder(), **options)
            loaded[0].to = lambda target: moves.append(str(target))
            return loaded

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
        load_model(ModelSource(str(folder), device=device))
        return device_maps[0], moves

    return load


@pytest.mark.parametrize(
    ("device", "accelerate", "device_map", "moves"),
    [
        ("xpu:1", True, {"": "xpu:1"}, []),
        ("xpu:1", False, None, ["xpu:1"]),
        ("cpu", True, None, []),
        ("cpu", False, None, []),
    ],
)
def test_weights_are_loaded_straight_to_the_device_where_accelerate_can(
    device: str, accelerate: bool, device_map: Any, moves: list[str], placed: Any, model_folder: ModelFolder
) -> None:
    assert placed(model_folder(), device, accelerate=accelerate) == (device_map, moves)


@pytest.mark.parametrize("device", ["xpu:1", "cpu"])
def test_quantized_weights_are_never_moved(device: str, placed: Any, model_folder: ModelFolder, tmp_path: Path) -> None:
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    source = edited_config(model_folder(), tmp_path / "quantized", quantization_config=quantization)
    assert placed(Path(source.model), device, accelerate=True)[1] == []
    if device == "cpu":
        return
    message = refusal(lambda: placed(Path(source.model), device, accelerate=False))
    assert "is quantized, and such weights are loaded to xpu:1 by accelerate alone; pip install accelerate" in message


def test_a_gpu_that_is_too_small_is_refused_with_the_way_out(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_pretrained(*_: object, **__: object) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    message = refusal(lambda: load_model(ModelSource(str(model_folder()), device="cpu")))
    assert "does not fit into the GPU's free memory" in message
    assert "--device auto" in message


@pytest.mark.parametrize(("is_offline", "asked", "tip"), [
    (True, "no hub is asked (HF_HUB_OFFLINE)", "fetch it first"),
    (False, "no hub answers", "With HF_HUB_OFFLINE=1 no hub is asked, nor waited for"),
])  # fmt: skip
def test_an_unknown_model_is_one_clear_line_at_once(
    monkeypatch: pytest.MonkeyPatch, is_offline: bool, asked: str, tip: str
) -> None:
    start = time.monotonic()
    shape_of = transformers.AutoConfig.from_pretrained  # offline, so that nothing waits

    def from_pretrained(*names: Any, **options: Any) -> Any:
        try:
            return shape_of(*names, **options)
        finally:
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    message = refusal(lambda: read_shape(ModelSource("nobody/no-such-model")))
    assert message.startswith(f"cannot load model 'nobody/no-such-model': {asked}")
    assert message.endswith(tip) and "give a folder" in message
    assert time.monotonic() - start < 30  # half a second, on a machine that has one to spare


def test_a_folder_that_does_not_exist_is_called_that(tmp_path: Path) -> None:
    assert "does not exist" in refusal(lambda: read_shape(ModelSource(str(tmp_path / "absent"))))
    assert "does not exist" in refusal(lambda: read_shape(ModelSource("./absent/model")))


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "{}", '{"model_type": "nonesuch"}', '{"model_type": "llama", "hidden_size": "many"}']
)
def test_a_folder_without_a_readable_configuration_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert refusal(lambda: read_shape(ModelSource(str(tmp_path)))).startswith("cannot load model")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00not a header at all"),
        ("model.safetensors", None),
        ("tokenizer.json", b"{"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    name: str, content: bytes | None, model_folder: ModelFolder, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder(), copy)
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    assert refusal(lambda: load_model(ModelSource(str(copy), device="cpu"))).startswith("cannot load model")


def test_a_checkpoint_cut_short_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder(), copy)
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert refusal(lambda: load_model(ModelSource(str(copy), device="cpu"))).startswith("cannot load model")


def test_weights_that_the_checkpoint_lacks_are_never_made_up(model_folder: ModelFolder, tmp_path: Path) -> None:
    source = edited_config(model_folder(), tmp_path / "copy", num_hidden_layers=4)
    message = refusal(lambda: load_model(source))
    assert "lacks 9 weights" in message
    assert "model.layers.3." in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "--dtype must be auto, float32, float16 or bfloat16, not 'int8'"),
        ({"dtype": "nn"}, "--dtype must be auto, float32, float16 or bfloat16, not 'nn'"),
        ({"device": "abacus"}, "--device 'abacus' is no torch device"),
        ({"device": "fpga"}, "cannot load model"),
    ],
)
def test_a_dtype_or_device_that_is_not_there_is_refused(
    changes: dict[str, str], message: str, model_folder: ModelFolder
) -> None:
    assert message in refusal(lambda: load_model(ModelSource(str(model_folder()), **{"device": "cpu", **changes})))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(model_folder: ModelFolder) -> None:
    message = refusal(lambda: load_model(ModelSource(str(model_folder()), device="cuda:0")))
    assert "torch sees no GPU; use --device cpu" in message


@pytest.mark.parametrize(
    ("length", "message"),
    [(513, "--context-length 513 exceeds the 512 positions"), (-4, "--context-length must be positive")],
)
def test_a_context_that_the_model_lacks_is_refused(length: int, message: str, model_folder: ModelFolder) -> None:
    assert message in refusal(lambda: read_shape(ModelSource(str(model_folder()), context_length=length)))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("Qwen4ExpText", {"num_hidden_layers": 4}, "indexed_attention in layer 3, which reads its tokens otherwise"),
        ("Qwen3Next", DECODER, "no layer with a KV cache"),
        ("Mamba", {}, "no layer with a KV cache"),
        ("Whisper", {}, "encoder-decoder"),
        ("EfficientNet", {}, "is a 'efficientnet'"),
        ("T5", {"num_layers": 2}, "encoder-decoder"),
        ("Llama", {**DECODER, "num_kv_shared_layers": 2}, "no layer of that type has keys of its own"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_asked_for(
    name: str, values: dict[str, object], message: str, tmp_path: Path
) -> None:
    source = config_folder(tmp_path, name, **values)
    assert message in refusal(lambda: read_shape(source))


def test_a_window_shorter_than_the_context_is_refused_and_says_how_to_serve(tmp_path: Path) -> None:
    source = config_folder(tmp_path, "Mistral", **DECODER, sliding_window=128)
    message = refusal(lambda: read_shape(source))
    assert "in all layers that have keys: a window of 128 tokens, shorter than the context of 512" in message
    assert "--context-length 128" in message
    assert read_shape(ModelSource(source.model, context_length=128)).context_length == 128


def test_layers_with_a_window_beside_full_ones_are_left_as_they_are(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    shape = read_shape(config_folder(tmp_path, "Qwen2", **{**DECODER, "num_hidden_layers": 4}, **windows))
    assert [str(layer.kind) for layer in shape.cache.layers] == ["full", "full", "window:64", "window:64"]
    assert shape.geometry.ids == (0, 1)


def test_a_window_that_no_layer_uses_is_no_window(tmp_path: Path) -> None:
    source = config_folder(tmp_path, "Qwen2", **DECODER, use_sliding_window=False, sliding_window=64)
    assert read_shape(source).context_length == 512


def test_a_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    assert read_shape(config_folder(tmp_path, "Mistral", **DECODER, sliding_window=512)).context_length == 512


def test_a_head_dim_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    source = config_folder(tmp_path, "Llama", **DECODER, head_dim=20)
    message = refusal(lambda: read_shape(source), PrecisionError)
    assert "head_dim 20 cannot be packed at 2 bits" in message
    assert message.endswith("serve this model without a profile, such as in fp8")


@pytest.mark.parametrize(("name", "width"), [("Bloom", "hidden_size"), ("XLNet", "d_model")])
def test_a_model_that_does_not_say_its_context_must_be_told(name: str, width: str, tmp_path: Path) -> None:
    source = config_folder(tmp_path, name, **{width: 64}, n_layer=2, n_head=4)
    assert "give --context-length" in refusal(lambda: read_shape(source))
    assert read_shape(ModelSource(source.model, context_length=64)).context_length == 64


def test_attention_without_the_hook_is_refused(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    config = transformers.FalconConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True
    )
    transformers.FalconForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    message = refusal(lambda: load_model(ModelSource(str(tmp_path), device="cpu")))
    assert message == ("FalconForCausalLM does not go through transformers' AttentionInterface; it has no hook")
