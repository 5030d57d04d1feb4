"""Runs a model as if its KV cache were quantized, and measures its predictions. Knows no search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtuner.calibration.forward.continuation import PROMPT_BYTES, Prompt, prompt_bytes, run_prompt
from kvtuner.calibration.forward.parallel_sequences import num_workers, run_sequences
from kvtuner.calibration.forward.read_plan import AttentionCall, ReadPlan, attend, attend_by_plan
from kvtuner.calibration.forward.shared_layers import SharedLayers
from kvtuner.calibration.kl import KEPT_BYTES, Reference, TokenScores, compare, divergence, following
from kvtuner.calibration.vocabulary_sample import logits_to_compare
from kvtuner.precision import NO_WINDOW, ExactWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.attention_hook import AttentionHook
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.forward.trace import LayerCall
    from kvtuner.calibration.kl import LogitSource
    from kvtuner.quant import QuantSpec

REUSE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """The quantization by which one layer is simulated; None keeps a side in the served dtype.

    A latent stands as keys, and the rotary channels beside it as values. The window's tokens are kept exactly beside
    the rows.

    Only an object equals itself: configurations that share layers share their objects.
    """

    k: QuantSpec | None = None
    v: QuantSpec | None = None
    window: ExactWindow = NO_WINDOW

    @property
    def is_exact(self) -> bool:
        """Whether nothing is quantized."""
        return self.k is None and self.v is None


def read_back(spec: QuantSpec | None, x: Tensor) -> Tensor:
    """Keys or values x [batch, num_kv_heads, tokens, head_dim] as they are read back, float32 in model space."""
    if spec is None:
        return x.to(torch.float32)
    return spec.simulate(x.transpose(1, 2)).transpose(1, 2)


def read_back_by(spec: LayerSpec, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """A layer's keys and values as they are read back, or as they are made of a latent that is."""
    if call.latent is None:
        return read_back(spec.k, call.k), read_back(spec.v, call.v)
    rope = None if spec.v is None else read_back(spec.v, call.latent.rope)
    keys, values = call.latent.expanded(read_back(spec.k, call.latent.rows), rope)
    return keys.to(torch.float32), values.to(torch.float32)


def quantized_attention(specs: Mapping[int, LayerSpec | None], plan: ReadPlan) -> AttentionHook:
    """A hook that stores the layers of `specs` as they say, and all others exactly; readers of a layer read it so."""

    def hook(layer_id: int, call: AttentionCall) -> Tensor:
        spec = specs.get(layer_id)
        if spec is None or spec.is_exact:
            return attend(call)
        return attend_by_plan(call, plan, *read_back_by(spec, call), spec.window)

    return hook


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch with everything that its simulated runs share.

    Attributes:
        batch: The token ids and positions.
        prompt: The tokens that run only once.
        embedded: The input of the first layer for the other tokens, [batch, rows, hidden_size].
        calls: The other arguments of the layers, which share one call's tensors.
        head: The logits over which runs are compared.
        reference: The exact final hidden states of the scored tokens, [batch, scored tokens, hidden_size].
        shared: The outputs of first layers that configurations may share.
    """

    batch: Batch
    prompt: Prompt
    embedded: Tensor
    calls: Sequence[LayerCall]
    head: LogitSource
    reference: Reference
    shared: SharedLayers


class Simulator:
    """Measures quantized caches on a fixed set of sequences.

    Keeps two hidden states per token (the embedding and the exact final state), what the layers are called with
    besides, which they share: the encoding of the positions, tokens' own inputs to each layer (Gemma), the keys and
    values of the first sequences' prompts, `PROMPT_BYTES` at most, and the log-probabilities of a small vocabulary,
    `KEPT_BYTES` at most. With `reuse` also what layers put out under the last configurations.
    """

    def __init__(
        self,
        chain: DecoderChain,
        batches: Iterable[Batch],
        plan: ReadPlan,
        *,
        reuse: bool = False,
        estimates: bool = False,
    ) -> None:
        """Measure on `batches`, over each of which the exact model runs when it is first needed.

        With `reuse` the first layers that a configuration has in common with one that was measured do not run again;
        the results are the same. It takes up to `REUSE_BYTES`. With `estimates` the KL of a model whose vocabulary is
        large is estimated from a sample of it, and its other scores are NaN.
        """
        self.chain = chain
        self.plan = plan
        self.num_at_once = num_workers(chain.model)
        self.batches = list(batches)
        self._kept_limit = KEPT_BYTES // len(self.batches)
        self._estimates = estimates
        self._reuse_limit = REUSE_BYTES // len(self.batches) if reuse else 0
        self._prepared: dict[int, PreparedBatch] = {}

    @property
    def prepared_batches(self) -> Collection[int]:
        """The places of the batches that the exact model has run over."""
        return self._prepared.keys()

    def prepare(self, places: Sequence[int] | None = None) -> list[PreparedBatch]:
        """The batches at some places, of all by default, with what their runs share.

        Raises:
            NonFiniteActivationError: The model gives NaN or infinity; names the layer.
        """
        places = range(len(self.batches)) if places is None else places
        missing = [place for place in places if place not in self._prepared]
        for place, item in zip(missing, run_sequences(self.chain.model, self._prepare, missing), strict=True):
            self._prepared[place] = item
        return [self._prepared[place] for place in places]

    def _prepare(self, place: int) -> PreparedBatch:
        batch, split = self.batches[place], self.plan.split
        # Whether a prompt is kept, which rounds otherwise, must not depend on what else was prepared.
        before = sum(prompt_bytes(self.chain, other, split) for other in self.batches[:place])
        prompt, trace = run_prompt(self.chain, batch, split, PROMPT_BYTES - before)
        final = batch.scored(trace.final, self.plan).clone()
        head = logits_to_compare(self.chain, final, batch.index) if self._estimates else self.chain
        reference, shared = Reference(head, final, self._kept_limit), SharedLayers(self._reuse_limit)
        # What a layer hands on is that of each run.
        calls = [call.without_handed() for call in trace.calls]
        return PreparedBatch(batch, prompt, trace.residual[0], calls, head, reference, shared)

    def measure(
        self,
        specs: Mapping[int, LayerSpec],
        on_batch: Callable[[int], None] | None = None,
        *,
        places: Sequence[int] | None = None,
    ) -> TokenScores:
        """Scores of the sequences of all batches, or of those at some places.

        Layers that are not in `specs` stay exact. `on_batch` is called with the number of tokens after each batch.
        """
        layers = [specs.get(layer_id) for layer_id in range(len(self.chain.layers))]

        def score(item: PreparedBatch) -> TokenScores:
            final = self._final(item, layers)
            if item.head is not self.chain:
                return TokenScores.of_kl(divergence(item.head, item.reference, final))
            next_ids = item.batch.scored(following(item.batch.input_ids, 0), self.plan)
            return compare(self.chain, item.reference, final, next_ids)

        parts = []
        items = self.prepare(places)
        for item, part in zip(items, run_sequences(self.chain.model, score, items), strict=True):
            parts.append(part)
            if on_batch is not None:
                on_batch(item.batch.num_tokens)
        return TokenScores.joined(parts)

    def broken_layer(self, specs: Mapping[int, LayerSpec], *, places: Sequence[int] | None = None) -> int | None:
        """The first layer that puts out NaN or infinity, None if none does; runs all layers for it."""
        broken: list[int] = []

        def look(layer_id: int, hidden: Tensor) -> None:
            if not bool(torch.isfinite(hidden).all()):
                broken.append(layer_id - 1)

        for item in self.prepare(places):
            hook = item.prompt.before(quantized_attention(specs, item.batch.own_plan(self.plan)))
            final = self.chain.run(item.embedded, item.calls, hook, on_input=look)
            look(len(self.chain.layers), final)
        return min(broken, default=None)

    def _final(self, item: PreparedBatch, layers: Sequence[LayerSpec | None]) -> Tensor:
        """Final hidden states of the scored tokens, [batch, scored tokens, hidden_size]."""
        if all(spec is None or spec.is_exact for spec in layers):
            return item.reference.final
        hook = item.prompt.before(quantized_attention(dict(enumerate(layers)), item.batch.own_plan(self.plan)))
        start, hidden = item.shared.longest(layers)
        hidden = item.embedded if hidden is None else hidden
        inputs: dict[int, Tensor] = {}
        # Beyond a layer whose keys later ones read, a hidden state is not all that those need.
        room = min(item.shared.room_for(hidden), self.chain.cache.first_read_by_others)

        def keep(layer_id: int, hidden: Tensor) -> None:
            # Nor is it for a layer that reads by the index of one before it.
            is_enough = not item.calls[layer_id].handed or self.chain.cache.layers[layer_id].index_dim > 0
            if layer_id <= room and is_enough:
                inputs[layer_id] = hidden

        final = self.chain.run(hidden, item.calls, hook, start=start, on_input=keep)
        item.shared.keep(layers, inputs)
        return item.batch.scored(final, self.plan)

    def kl(self, specs: Mapping[int, LayerSpec]) -> float:
        """Mean KL per scored token, nats."""
        scores = self.measure(specs)
        return float(scores.kl.sum() / scores.counts.sum())
