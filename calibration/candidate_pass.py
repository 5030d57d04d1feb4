"""The second pass: all candidates of a layer at once, without accumulating error and without keeping activations.

Per batch the exact residual stream is kept at layer boundaries; layers are then re-run one at a time from the last to
the first, each with the gradients of R losses under labels sampled from the model, and all candidates of the layer are
scored on its exact queries, keys and values. Memory is one layer plus the residual stream.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtuner.calibration.candidates.exact_part import (
    ExactPart,
    exact_part_of,
    outputs_beside,
    probabilities_beside,
    read_values,
)
from kvtuner.calibration.candidates.layer_gradients import LayerGradients
from kvtuner.calibration.forward.read_plan import AttentionCall, ReadPlan, probabilities
from kvtuner.calibration.row_sample import RowSample, sample_rows
from kvtuner.calibration.sensitivity import Candidate, CandidateScores, LayerConstants
from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import PrecisionPair, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.quant import Transform

SCORES_IN_FLIGHT = 1 << 23  # float32 attention scores of all widths: 32 MiB, and several temporaries of that size
MAX_SPAN = 128  # tokens between a block's first and last row: early rows see few keys that causality hides from them
TINY = 1e-12  # keeps the relative error of a zero finite


@dataclass
class CandidateMeasurement:
    """The errors of all candidates of all layers, summed over sequences: within a batch first, then over batches."""

    chain: DecoderChain
    constants: Mapping[int, LayerConstants]
    plan: ReadPlan
    options: QuantizationOptions
    num_draws: int
    seed: int
    with_pairs: bool = False
    sums: dict[Candidate, dict[str, float]] = field(default_factory=dict)
    pair_sums: dict[tuple[int, PrecisionPair], float] = field(default_factory=dict)
    num_sequences: int = 0
    num_scored: int = 0
    """The predictions of each sequence of a batch that are scored."""

    def run(self, batches: Iterable[Batch], on_layer: Callable[[int], None] | None = None) -> None:
        """Measure all batches; `on_layer` is called with the number of tokens after each layer."""
        for batch in batches:
            self.merge(self.of_batch(batch, on_layer))

    def of_batch(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> CandidateMeasurement:
        """The measurement of one batch alone, under the same settings."""
        sequences, plan = batch.input_ids.shape[0], batch.own_plan(self.plan)
        scored = len(batch.scored_places(plan))
        part = replace(self, plan=plan, sums={}, pair_sums={}, num_sequences=sequences, num_scored=scored)
        part._measure_batch(batch, on_layer)
        return part

    def merge(self, part: CandidateMeasurement) -> None:
        """Count the sequences of another measurement too."""
        for candidate, errors in part.sums.items():
            sums = self.sums.setdefault(candidate, dict.fromkeys(errors, 0.0))
            for name, value in errors.items():
                sums[name] += value
        for key, value in part.pair_sums.items():
            self.pair_sums[key] = self.pair_sums.get(key, 0.0) + value
        self.num_sequences += part.num_sequences

    def to_record(self) -> dict[str, Any]:
        """The sums as plain JSON values."""
        return {
            "sums": [[*astuple(candidate), errors] for candidate, errors in self.sums.items()],
            "pairs": [[layer, str(pair), value] for (layer, pair), value in self.pair_sums.items()],
            "sequences": self.num_sequences,
        }

    def merge_record(self, record: Mapping[str, Any]) -> None:
        """Count the sequences of what `to_record` gave of another measurement."""
        sums = {Candidate(*place): errors for *place, errors in record["sums"]}
        pairs = {(layer, PrecisionPair.parse(pair)): value for layer, pair, value in record["pairs"]}
        self.merge(replace(self, sums=sums, pair_sums=pairs, num_sequences=record["sequences"]))

    def _measure_batch(self, batch: Batch, on_layer: Callable[[int], None] | None) -> None:
        trace = self.chain.trace(batch.input_ids, batch.position_ids, images=batch.images)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + batch.index)
        places = batch.scored_places(self.plan)
        gradients = LayerGradients.of_labels(self.chain, trace, places, self.num_draws, generator)
        tuned = self.chain.geometry.ids
        for layer_id in reversed(range(tuned[0], len(self.chain.layers))):
            owner = self.chain.cache.owner_of(layer_id)
            if owner not in tuned:
                gradients.pass_layer(layer_id)
                continue
            call, by_attended = gradients.attention_of(layer_id, self.plan.split)
            with torch.no_grad():
                self._score_layer(layer_id, call, by_attended, generator)
            if on_layer is not None and owner == layer_id:
                on_layer(batch.num_tokens)

    def scores(self) -> dict[Candidate, CandidateScores]:
        """The means over all sequences, without isolated KL."""
        n = self.num_sequences
        return {
            candidate: CandidateScores(**{score: total / n for score, total in sums.items()})
            for candidate, sums in self.sums.items()
        }

    def pairs(self) -> dict[tuple[int, PrecisionPair], float]:
        """The paper's e_o of pairs without transforms."""
        return {key: value / self.num_sequences for key, value in self.pair_sums.items()}

    def _score_layer(self, layer_id: int, call: AttentionCall, gradients: Tensor, generator: torch.Generator) -> None:
        """Score the candidates of what a layer reads on its exact attention of some tokens, which `generator` draws.

        The gradients are those by the attention output, [draws, batch, num_heads, scored tokens, v_head_dim].
        """
        if not bool(torch.isfinite(gradients).all()):
            raise NonFiniteActivationError(
                f"layer {layer_id}: its gradients hold NaN or infinity; try --dtype float32 or bfloat16"
            )
        # Scaled before squaring, so that small gradients do not underflow; only ratios of importance count.
        largest = gradients.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        importance = (gradients / largest).square().sum(dim=(0, 1, 2, -1))
        rows = sample_rows(importance, self.plan.split, generator)
        gradients = gradients[..., (rows.tokens - self.plan.split).to(gradients.device), :]
        for keys, values in self._read_together(layer_id, call):
            first = 0
            while first < len(rows.tokens):
                last = self._end_of_block(call, rows.tokens, first)
                self._score_rows(layer_id, call, gradients[..., first:last, :], keys, values, rows, slice(first, last))
                first = last

    def _read_together(
        self, layer_id: int, call: AttentionCall
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Keys and values as read back by transform: all at once, or those of a latent under one transform at a time.

        The keys and values of all heads that are made of latents take many times as much as the latents.
        """
        if call.latent is None:
            yield dict(self._readings(layer_id, "k", call.k)), dict(self._readings(layer_id, "v", call.v))
            return
        for name, latents in self._readings(layer_id, "k", call.latent.rows):
            keys, values = call.latent.expanded(latents)
            yield {name: keys.float()}, {name: values.float()}

    def _end_of_block(self, call: AttentionCall, tokens: Tensor, first: int) -> int:
        """Rows [first, end) are scored together: near each other, and few enough to hold all their widths."""
        near = int(torch.searchsorted(tokens, tokens[first] + MAX_SPAN))
        per_row = call.q.shape[0] * call.q.shape[1] * call.k.shape[2] * len(self.options.widths)
        return min(near, first + max(1, SCORES_IN_FLIGHT // per_row))

    def _readings(self, layer_id: int, side: Side, exact: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Keys or values as read back under each transform, [widths, batch, num_kv_heads, tokens, head_dim] float32."""
        owner = self.chain.cache.owner_of(layer_id)
        heads_last = exact.transpose(1, 2)
        exact = exact.to(torch.float32)
        for name in self.options.transform_names(side):
            transform: Transform = self.constants[owner].transform(side, name)
            stored = transform.apply(heads_last)
            quantized = self.options.quantize(side, stored)
            read = transform.invert(torch.stack([codes.dequantize() for codes in quantized])).transpose(2, 3)
            read = self.plan.mix(exact.expand_as(read), read, self.options.window).contiguous()
            if layer_id == owner:  # once, however many layers read it
                self._add(layer_id, side, name, "e_self", exact.shape[0] * _relative_errors(exact, read).mean(dim=1))
            yield name, read

    def _score_rows(
        self,
        layer_id: int,
        call: AttentionCall,
        gradients: Tensor,
        keys: dict[str, Tensor],
        values: dict[str, Tensor],
        rows: RowSample,
        block: slice,
    ) -> None:
        """Score the attention of a block of `rows`."""
        tokens = rows.tokens[block].to(call.q.device)
        visible = slice(None, call.end(int(rows.tokens[block][-1])))
        # q: [batch, num_kv_heads, group, rows, head_dim]; g: the same with draws before it and v_head_dim channels.
        q = call.grouped_query(tokens)
        v = call.v[:, :, visible].float()
        g = gradients.unflatten(2, (call.k.shape[1], -1))
        exact_k = call.k[:, :, visible].float()
        exact_a = probabilities(call, q, exact_k, tokens)
        exact_o = read_values(exact_a, v)
        exact = exact_part_of(self.options.window, call, q, tokens, exact_k, v)
        weights, sequences = rows.weights[block].to(exact_o.device), call.k.shape[0]
        share = sequences / float(rows.weights.sum())
        # The (row, key) pairs of all blocks, so that a mean does not depend on how rows are cut into blocks.
        num_read = (rows.weights * call.num_read(rows.tokens)).sum()
        num_probabilities = exact_a.shape[1] * exact_a.shape[2] * float(num_read)

        def add_outputs(side: Side, name: str, read_o: Tensor) -> None:
            self._add(layer_id, side, name, "e_o", share * (_relative_errors(exact_o, read_o) @ weights))
            delta = (read_o - exact_o).unsqueeze(1)
            directional = (g * delta).sum(dim=(3, 4, -1))  # [widths, draws, batch, rows]
            fisher = 0.5 * directional.square().mean(dim=(1, 2)) @ weights
            self._add(layer_id, side, name, "fisher", sequences / self.num_scored * fisher)

        for name in keys:
            read_a = probabilities_beside(call, q, keys[name][..., visible, :], tokens, exact)
            if call.latent is None:
                add_outputs("k", name, read_values(read_a, v))
            else:
                add_outputs("k", name, outputs_beside(read_a, values[name][..., visible, :], exact))
            if self.with_pairs and name == "none":
                read_v = values[name][..., visible, :]
                self._score_pairs(layer_id, (read_a, read_v, exact), exact_o, share * weights)
            differences = (
                read_a.sub_(exact_a).abs_().sum(dim=(1, 2, 3, -1))
            )  # [widths, rows]; read_a is not needed again
            self._add(layer_id, "k", name, "e_a", differences @ weights / num_probabilities)
        for name in values if call.latent is None else ():
            # Widths side by side in the channels: one product reads them all.
            read_v = torch.cat(tuple(values[name][..., visible, :]), dim=-1)
            read_o = outputs_beside(exact_a, read_v, exact).unflatten(-1, (len(self.options.widths), -1))
            add_outputs("v", name, read_o.movedim(-2, 0))

    def _score_pairs(
        self, layer_id: int, readings: tuple[Tensor, Tensor, ExactPart | None], exact_o: Tensor, shares: Tensor
    ) -> None:
        read_a, values, exact = readings
        for k_index, k_bits in enumerate(self.options.widths):
            read_o = torch.stack([outputs_beside(read_a[k_index], read_v, exact) for read_v in values])
            errors = _relative_errors(exact_o, read_o) @ shares
            for v_bits, error in zip(self.options.widths, errors.tolist(), strict=True):
                key = (self.chain.cache.owner_of(layer_id), PrecisionPair(k_bits, v_bits))
                self.pair_sums[key] = self.pair_sums.get(key, 0.0) + error

    def _add(self, layer_id: int, side: Side, transform: str, score: str, by_width: Tensor) -> None:
        """Add the errors that a layer sees to those of the candidates of the layer whose cache it reads."""
        owner = self.chain.cache.owner_of(layer_id)
        for bits, value in zip(self.options.widths, by_width.tolist(), strict=True):
            candidate = Candidate(owner, side, bits, transform)
            sums = self.sums.setdefault(candidate, {"e_self": 0.0, "e_a": 0.0, "e_o": 0.0, "fisher": 0.0})
            sums[score] += value


def _relative_errors(exact: Tensor, read: Tensor) -> Tensor:
    """Mean of |x - x'| / |x|, the paper's e_k, e_v and e_o, of each width and row [widths, ..., rows, channels]."""
    errors = (read - exact).abs_() / exact.abs().clamp_min(TINY)
    return errors.mean(dim=(*range(1, errors.ndim - 2), -1))
