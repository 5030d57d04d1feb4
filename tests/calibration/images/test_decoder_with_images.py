"""What calibration runs beside images, exactly and quantized, is transformers' own forward with the pixels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tiny.image_readers import READERS
from torch import nn
from torch.nn.functional import kl_div
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_outputs import BaseModelOutput

from kvtuner.calibration.candidate_pass import CandidateMeasurement
from kvtuner.calibration.forward.parallel_sequences import run_in_parallel
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.calibration.images.decoder_with_images import run_decoder
from kvtuner.calibration.images.sequence_images import SequenceImages
from kvtuner.calibration.isolated.forwards import spec_of
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.errors import CorpusError, UnsupportedModelError
from kvtuner.precision import ExactWindow
from kvtuner.quant import QuantSpec, Transform
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.workbench import Workbench

HADAMARD = Transform(TransformKind.parse("hadamard"))
SPECS = {
    1: LayerSpec(QuantSpec(4, HADAMARD), QuantSpec(2)),
    2: LayerSpec(QuantSpec(3), QuantSpec(4, HADAMARD)),
}


class Oracle:
    """Attention of transformers' eager form with its own mask, in float64, that reads quantized keys and values.

    Tokens from the split on read everything as stored, but what the window keeps for their row; under ``hit`` they
    read the tokens before the split so alone.
    """

    def __init__(self, specs: dict[int, LayerSpec], plan: ReadPlan, window: ExactWindow) -> None:
        self.specs, self.plan, self.window = specs, plan, window

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        group, tokens = query.shape[1] // key.shape[1], key.shape[2]
        spec = self.specs.get(module.layer_idx, LayerSpec())
        rows, places = torch.arange(tokens)[:, None], torch.arange(tokens)
        recent = self.window.residual_length
        # Tokens of an image after a row are as exact to it as its own, which a window of sinks alone does not keep.
        near = torch.where(places > rows, torch.tensor(recent > 0), rows - places < recent)
        is_exact = (rows < self.plan.split) | near | (places < self.window.sinks)
        if self.plan.name == "hit":
            is_exact |= places >= self.plan.split
        stored = [
            x if side is None else side.simulate(x.transpose(1, 2)).transpose(1, 2)
            for side, x in ((spec.k, key), (spec.v, value))
        ]
        (k, v), (stored_k, stored_v) = (
            [x.double().repeat_interleave(group, dim=1) for x in pair] for pair in ((key, value), stored)
        )
        q = query.double() * scaling
        scores = torch.where(is_exact, q @ k.mT, q @ stored_k.mT) + attention_mask
        weights = scores.softmax(-1)
        output = (weights * is_exact) @ v + (weights * ~is_exact) @ stored_v
        return output.transpose(1, 2).to(query.dtype), None


def host_logits(
    folder: Path, kind: str, batch: Batch, specs: dict[int, LayerSpec] | None = None, window: ExactWindow | None = None,
    plan: ReadPlan | None = None, **changes: Any,
) -> Tensor:  # fmt: skip
    """The logits of transformers' own model of all tokens and pixels; its vision tower computes as it always does."""
    AttentionInterface.register("oracle", Oracle(specs or {}, plan or ReadPlan("cache", 0), window or ExactWindow()))
    AttentionMaskInterface.register("oracle", eager_mask)
    host = getattr(transformers, f"{kind}ForConditionalGeneration").from_pretrained(folder, dtype=torch.float32)
    host.set_attn_implementation({"": "eager", "text_config": "oracle", "vision_config": "eager"})
    assert batch.images is not None
    with torch.no_grad():
        logits: Tensor = host(input_ids=batch.input_ids, **{**batch.images.inputs, **changes}, use_cache=False).logits
    return logits


def batch_with_image(bench: Workbench, plan: ReadPlan) -> Batch:
    """The sequence at first positions with images before and behind the plan's split, as far as there is one."""

    def around(batch: Batch) -> int:
        spans = batch.images.spans if batch.images else ()
        return min(len(spans), 2) + any(start > plan.split for start, _ in spans)

    return max(bench.batches("calibrate", "small"), key=around)


def test_exact_logits_are_those_of_the_model_with_its_pixels(
    kind: str, bench_of: Callable[..., Workbench], reader_folder: Callable[[str], Path]
) -> None:
    bench = bench_of(kind)
    for batch in bench.batches("calibrate", "small"):
        expected = host_logits(reader_folder(kind), kind, batch)
        trace = bench.chain.trace(batch.input_ids, batch.position_ids, images=batch.images)
        torch.testing.assert_close(bench.chain.logits(trace.final), expected, rtol=1e-4, atol=2e-5)
    spoiled = {"pixel_values": torch.zeros_like(batch_with_image(bench, bench.plan).images.inputs["pixel_values"])}
    batch = batch_with_image(bench, bench.plan)
    expected, without = (host_logits(reader_folder(kind), kind, batch, **changes) for changes in ({}, spoiled))
    assert (expected - without).abs().max() > 1e-2, "the pixels must matter to the comparison"


@pytest.mark.parametrize(
    ("plan", "window"),
    [
        ("decode", ExactWindow()),
        ("decode", ExactWindow(5, 2)),
        ("cache", ExactWindow()),
        ("cache", ExactWindow(5, 2)),
        ("cache", ExactWindow(0, 2)),
        ("hit", ExactWindow(5, 2)),
    ],
    ids=["decode", "decode-window", "cache", "cache-window", "cache-sinks", "hit-window"],
)
def test_simulated_logits_are_those_of_the_model_that_reads_quantized(
    kind: str, plan: Any, window: ExactWindow, bench_of: Callable[..., Workbench],
    reader_folder: Callable[[str], Path],
) -> None:  # fmt: skip
    bench = bench_of(kind, read_plan=plan)
    batch = batch_with_image(bench, bench.plan)
    own = batch.own_plan(bench.plan)
    specs = {layer: replace(spec, window=window) for layer, spec in SPECS.items()}
    expected = host_logits(reader_folder(kind), kind, batch, specs, window, own)
    exact = host_logits(reader_folder(kind), kind, batch)
    places = batch.scored_places(bench.plan)
    log_p, log_q = (x[0, places].double().log_softmax(-1) for x in (exact, expected))
    simulator = bench.simulator("calibrate", "small")
    place = [b.index for b in simulator.batches].index(batch.index)
    scores = simulator.measure(specs, places=[place])
    assert scores.counts.tolist() == [len(places)]
    kl = kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    assert kl.mean() > 3e-5, "the profile must change something"
    # A difference of 1e-7 in keys may flip a code, which a few tokens then read.
    torch.testing.assert_close(scores.kl[0].mean(), kl.mean(), rtol=2e-2, atol=1e-7)
    is_close = (scores.kl[0] - kl).abs() <= 2e-2 * kl + 1e-7
    assert is_close.double().mean() > 0.9


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_positions_of_images_are_the_models_own_moved_by_the_offset(
    kind: str, bench_of: Callable[..., Workbench], reader_folder: Callable[[str], Path]
) -> None:
    bench = bench_of(kind)
    small, large = (
        max(bench.batches("calibrate", offsets), key=lambda b: len(b.images.spans)) for offsets in ("small", "large")
    )
    heard: list[Tensor] = []
    handle = bench.chain.decoder.rotary_emb.register_forward_pre_hook(lambda module, args: heard.append(args[1]))
    finals = [bench.chain.trace(b.input_ids, b.position_ids, images=b.images).final for b in (small, large)]
    handle.remove()
    offset = int(large.position_ids[0, 0])
    model = bench.loaded.model.model
    expected, _ = model.get_rope_index(small.input_ids, **{
        name: small.images.inputs[name] for name in ("mm_token_type_ids", "image_grid_thw")
    })  # fmt: skip
    assert offset > 300
    assert len({tuple(row.tolist()) for row in expected[:, 0]}) == 3, "the rows must differ beside an image"
    for moved, position_ids in zip((0, offset), heard, strict=True):
        assert torch.equal(position_ids, expected + moved)
    # Attention is relative: only rounding tells the two apart, while consecutive positions are another text.
    torch.testing.assert_close(*finals, rtol=1e-3, atol=1e-3)
    exact = host_logits(reader_folder(kind), kind, small)
    wrong = host_logits(reader_folder(kind), kind, small, position_ids=small.position_ids)
    assert (exact - wrong).abs().max() > 1e-2


def test_images_of_gemma_3_see_all_of_themselves_and_no_later_token(bench_of: Callable[..., Workbench]) -> None:
    bench = bench_of("Gemma3")
    batch = batch_with_image(bench, bench.plan)
    calls: dict[int, Any] = {}

    def hook(layer_id: int, call: Any) -> Tensor:
        calls[layer_id] = call
        rows = torch.arange(call.k.shape[2])
        scores = (call.grouped_query() @ call.k.float().unsqueeze(2).mT * call.scaling).masked_fill(
            call.hidden(rows, rows), float("-inf")
        )
        return (scores.softmax(-1) @ call.v.float().unsqueeze(2)).flatten(1, 2)

    bench.chain.trace(batch.input_ids, batch.position_ids, hook, images=batch.images)
    types = batch.images.inputs["token_type_ids"][0]
    rows = torch.arange(len(types))
    is_image = types == 1
    runs = (is_image & ~torch.cat((torch.tensor([False]), is_image[:-1]))).cumsum(0) * is_image
    together = (runs[:, None] == runs) & is_image & is_image[:, None]
    assert torch.equal(~calls[1].hidden(rows, rows), (rows <= rows[:, None]) | together)
    assert calls[1].ends(rows).max() == len(rows)
    assert bool((calls[1].ends(rows) > rows + 1).any())


@pytest.mark.parametrize("kind", READERS)
def test_fisher_scores_at_four_bits_are_nearly_the_isolated_kl_of_the_scored_tokens(
    kind: str, bench_of: Callable[..., Workbench]
) -> None:
    bench = bench_of(kind, num_draws=64)
    batches = [max(bench.batches("calibrate"), key=lambda b: len(b.images.spans))]
    constants = measure_constants(bench.chain, batches)
    measurement = CandidateMeasurement(bench.chain, constants, bench.plan, bench.options.quant, 64, seed=0)
    measurement.run(batches)
    simulator = bench.simulator("calibrate")
    place = [b.index for b in simulator.batches].index(batches[0].index)
    fisher = kl = 0.0
    for candidate, scores in measurement.scores().items():
        if candidate.bits == 4 and candidate.transform == "none":
            spec = spec_of(candidate, constants, bench.options.quant)
            kl += float(simulator.measure({candidate.layer: spec}, places=[place]).mean_kl)
            fisher += scores.fisher
    # The second order, with 64 draws of labels.
    assert 0.6 < fisher / kl < 1.6


def test_a_model_that_changes_its_layers_inputs_otherwise_than_by_adding_is_refused(
    bench_of: Callable[..., Workbench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of("Qwen3VL")
    decoder = type(bench.chain.decoder)
    add = decoder._deepstack_process

    def multiply(self: Any, hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
        return hidden * (1 + add(self, torch.zeros_like(hidden), places, features))

    monkeypatch.setattr(decoder, "_deepstack_process", multiply)
    with pytest.raises(UnsupportedModelError, match="one by one beside images gives another result"):
        bench_of("Qwen3VL")


@pytest.mark.parametrize("kind", ["Gemma3", "Qwen3VL"])
def test_sequences_that_run_beside_each_other_give_what_each_gives_alone(
    kind: str, bench_of: Callable[..., Workbench]
) -> None:
    bench = bench_of(kind)
    own = [*bench.batches("calibrate", "small"), *bench.batches("report", "large")]

    def final(batch: Batch) -> Tensor:
        return bench.chain.trace(batch.input_ids, batch.position_ids, images=batch.images).final

    for alone, beside in zip(map(final, own), run_in_parallel(final, own, 3), strict=True):
        assert torch.equal(alone, beside)


def test_another_thread_may_end_its_sequence_while_one_begins() -> None:
    own = get_ident()

    class Decoder(nn.Module):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> BaseModelOutput:
            return BaseModelOutput(last_hidden_state=position_ids)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder()

        def forward(self, input_ids: Tensor, **_: Any) -> None:
            self.decoder(input_ids=input_ids, position_ids=input_ids)
            with ThreadPoolExecutor(1) as pool:  # torch has taken its hooks by when another thread removes this one's
                pool.submit(self.decoder, input_ids, input_ids).result()

    model = Model()
    model.decoder.register_forward_pre_hook(
        lambda module, _: None if get_ident() == own else module._forward_pre_hooks_with_kwargs.clear()
    )
    ids = torch.arange(4)[None]
    final = run_decoder(model, model.decoder, ids, ids + 7, SequenceImages(4, {}, ()))
    assert torch.equal(final, ids + 7)


def test_several_sequences_at_once_are_refused(bench_of: Callable[..., Workbench]) -> None:
    with pytest.raises(CorpusError, match="--batch-size runs on text alone, but the data holds images"):
        bench_of("Gemma3", batch_size=2)
