"""The shipped demo model: small, complete, and one for which the precision of the KV cache matters."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from kvtuner.calibration.batches import batches
from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.demo.outliers import add_outliers
from kvtuner.calibration.demo.tasks import addition_lines, recall_problem
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator, quantized_attention
from kvtuner.calibration.kl import Reference, compare, following
from kvtuner.calibration.model_loading import DEMO_MODEL, LoadedModel, ModelSource, load_model
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.calibration.workbench import CalibrationOptions, Workbench
from kvtuner.cli import main
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ProfileOf

    from kvtuner.read_plan_names import ReadPlanName

OPTIONS = CalibrationOptions()


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model(ModelSource("demo", device="cpu"))


def test_the_demo_model_is_complete_and_under_8_megabytes() -> None:
    files = {file.name: file.stat().st_size for file in DEMO_MODEL.iterdir()}
    assert files.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert sum(files.values()) < 8_000_000


def test_the_demo_model_is_what_sglang_expects_of_qwen2(demo: LoadedModel) -> None:
    geometry = demo.shape.geometry
    assert demo.shape.architecture == "Qwen2ForCausalLM"
    assert geometry.num_attention_heads * geometry.head_dim == demo.model.config.hidden_size == 256
    assert (geometry.head_dim, geometry.num_kv_heads, demo.shape.context_length) == (64, 2, 8192)


def test_every_token_of_the_demo_tokenizer_has_an_embedding(demo: LoadedModel) -> None:
    """AutoTokenizer adds Qwen2's end token to a Qwen2 checkpoint that has it under another name."""
    tokenizer: Any = demo.tokenizer
    config = demo.model.config
    assert len(tokenizer) == config.vocab_size == demo.model.get_input_embeddings().num_embeddings
    assert tokenizer.eos_token_id == config.eos_token_id == demo.model.generation_config.eos_token_id
    assert tokenizer.encode("x<|endoftext|>") == [config.bos_token_id, *tokenizer.encode("x")[1:], config.eos_token_id]


def test_the_demo_corpus_is_enough_for_the_default_search_of_a_larger_vocabulary(demo: LoadedModel) -> None:
    source = CorpusSource(num_sequences=(40, 40, 80), sequence_length=512)
    corpus = load_corpus(source, demo.tokenizer)
    assert [len(ids) for ids in corpus.splits.values()] == [40, 40, 80]


def test_generated_tasks_are_true() -> None:
    rng = random.Random(3)
    for line in addition_lines(rng, 50).splitlines():
        left, right = line.split("=")
        assert sum(map(int, left.split("+"))) == int(right)
    problem = recall_problem(rng, 20, 30)
    table = dict(line.split(":") for line in problem.prompt.splitlines()[:-1])
    assert len(table) == 20
    answers = problem.answered.removeprefix(problem.prompt).splitlines()
    assert len(answers) == 30
    assert all(table[key] == value for key, value in (line.split(":") for line in answers))


@pytest.mark.slow
def test_recall_is_whole_unquantized_and_by_the_profile_and_lost_at_two_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--levels recall --against K2V2 --lengths 256 --problems 12 --questions 5 --seed 1 --json"
    assert main(["eval", "catalogue:demo-4bit", "--model", "demo", "--out", str(tmp_path), *flags.split()]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    match = {result["subject"]: result["mean"] for result in cell["results"]}
    assert min(match["bf16"], match["profile"]) >= 0.90
    assert match["bf16"] - match["K2V2"] >= 0.20


@pytest.mark.slow
def test_the_twin_with_outlier_channels_is_the_same_function_and_breaks_plain_four_bits(demo: LoadedModel) -> None:
    twin = load_model(ModelSource("demo", device="cpu"))
    add_outliers(twin.model, factor=32.0, pairs_per_head=3, seed=0)
    ids = load_corpus(CorpusSource(num_sequences=(2, 1, 2)), demo.tokenizer).splits["calibrate"]
    with torch.no_grad():
        wanted, found = (m.model(ids[:1, :128]).logits for m in (demo, twin))
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    kl = {}
    for name, loaded in (("demo", demo), ("twin", twin)):
        bench = Workbench.prepare(loaded, load_corpus(CorpusSource(num_sequences=(2, 1, 2)), loaded.tokenizer), OPTIONS)
        constants = measure_constants(bench.chain, bench.batches("calibrate"))
        plan = ReadPlan.of("decode", 512)
        simulator = Simulator(bench.chain, batches(ids, 8192, offsets="random", seed=0), plan)
        for transform in ("none", "centered+balanced+hadamard"):
            specs = {
                layer: LayerSpec(QuantSpec(4, constant.transform("k", transform)), QuantSpec(4))
                for layer, constant in constants.items()
            }
            kl[name, transform] = simulator.kl(specs)
    assert kl["twin", "none"] > 5 * kl["demo", "none"], kl
    assert kl["twin", "centered+balanced+hadamard"] < 1.5 * kl["demo", "centered+balanced+hadamard"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "cache"])
def test_the_host_agrees_with_the_tuners_simulation(
    name: ReadPlanName, demo: LoadedModel, profile_of: ProfileOf
) -> None:
    corpus = load_corpus(CorpusSource(num_sequences=(2, 3, 2)), demo.tokenizer)
    bench = Workbench.prepare(demo, corpus, OPTIONS)
    constants = measure_constants(bench.chain, bench.batches("calibrate"))
    names = ("hadamard", "centered+balanced+hadamard", "balanced", "none")
    layers = [
        LayerQuantization(
            k, v, constant.transform("k", names[layer % 4]), constant.transform("v", "none" if v == 16 else "hadamard")
        )
        for layer, (constant, (k, v)) in enumerate(zip(constants.values(), [(4, 2), (2, 4), (8, 16)] * 3, strict=True))
    ]
    specs = {
        layer: LayerSpec(
            QuantSpec(choice.k_bits, choice.k_transform),
            None if choice.v_bits == 16 else QuantSpec(choice.v_bits, choice.v_transform),
        )
        for layer, choice in enumerate(layers)
    }
    plan = ReadPlan.of(name, 512)
    simulator = Simulator(bench.chain, bench.batches("select", "small"), plan)
    profile = profile_of(demo.model.config, layers)
    apart, own, agree = [], [], []
    for item in simulator.prepare():
        simulated = bench.chain.run(item.embedded, item.calls, item.prompt.before(quantized_attention(specs, plan)))
        simulated = simulated[:, plan.split - item.prompt.num_tokens :]
        cache = KVTunerCache.from_profile(profile, demo.model.config, read_plan=name)
        ids = item.batch.input_ids
        with torch.no_grad():
            chunks = [
                demo.model.model(part, past_key_values=cache)
                for part in ids.tensor_split([plan.split], dim=1)
                if part.numel()
            ]
        hosted = chunks[-1].last_hidden_state
        between = compare(bench.chain, Reference(bench.chain, simulated), hosted, following(ids, plan.split))
        apart.append(between.kl)
        agree.append(between.agree)
        own.append(compare(bench.chain, item.reference, simulated, following(ids, plan.split)).kl)
    kl, own_kl = torch.cat(apart).mean(), torch.cat(own).mean()
    assert own_kl > 0.05, "a profile that loses nothing shows nothing"
    assert kl <= 0.02 * own_kl + 1e-6
    assert torch.cat(agree).mean() >= 0.995


def test_the_demo_model_is_of_the_size_and_dtype_that_is_said() -> None:
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert 3_500_000 < sum(tensor.numel() for tensor in tensors.values()) < 4_500_000
