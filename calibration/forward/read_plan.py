"""The read plans: what reads quantized keys and values, and the attention that follows. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.quant import saturated

if TYPE_CHECKING:
    from kvtuner.calibration.forward.latents import LatentRows
    from kvtuner.calibration.forward.seen_tokens import SeenTokens, SelectedTokens
    from kvtuner.read_plan_names import ReadPlanName

ROWS_AT_A_TIME = 128  # under a mask: all rows at once would read the keys that causality hides from the early ones


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reading of a sequence around its split.

    Attributes:
        name: ``decode``: tokens from the split on read everything quantized, their own keys and values included,
            earlier ones are exact among themselves. ``hit``: tokens from the split on read the prefix quantized and are
            exact within themselves. ``cache``: every token reads everything quantized.
        split: The first token that reads quantized keys and values; 0 for ``cache``.
    """

    name: ReadPlanName
    split: int

    @classmethod
    def of(cls, name: ReadPlanName, sequence_length: int) -> ReadPlan:
        """The plan that the tuner measures: the first quarter is the prompt (half for ``hit``)."""
        return cls(name, {"decode": sequence_length // 4, "hit": sequence_length // 2, "cache": 0}[name])

    def mix(self, exact: Tensor, quantized: Tensor, window: ExactWindow = NO_WINDOW) -> Tensor:
        """Keys or values [..., tokens, head_dim] as tokens from the split on read them, the last token at the latest.

        Under a window earlier tokens read more of them exactly: `attend_by_plan` does.
        """
        tokens = exact.shape[-2]
        last = min(self.split if self.name == "hit" else tokens, max(tokens - window.residual_length, 0))
        first = min(window.sinks, last)
        if (first, last) == (0, tokens):
            return quantized
        return torch.cat((exact[..., :first, :], quantized[..., first:last, :], exact[..., last:, :]), dim=-2)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one layer's attention; positions are encoded, and `softcap` is the logit cap.

    Attributes:
        q: The queries [batch, num_heads, rows, head_dim] of the last tokens, usually of all.
        k: The keys [batch, num_kv_heads, tokens, head_dim].
        v: The values [batch, num_kv_heads, tokens, v_head_dim].
        seen: The tokens that a query sees where the layer has a window, or where images see all of themselves; None
            where it sees all before it.
        sinks: The score of each query head that takes part in its softmax as one more token without a value,
            [num_heads]; None where there are no such attention sinks.
        latent: The latents that keys and values were made of; None where keys and values are cached themselves.
        selected: The tokens that an index selects for each query; None where it selects all, or there is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    softcap: float | None = None
    seen: SeenTokens | None = None
    sinks: Tensor | None = None
    latent: LatentRows | None = None
    selected: SelectedTokens | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the scores are scaled products and nothing else takes part in the softmax."""
        return self.softcap is None and self.sinks is None

    def hidden(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Whether each of `tokens` is hidden from the query of each token in `rows`, bool [rows, tokens].

        It is [batch, 1, rows, tokens] where an index selects others in each sequence.
        """
        own = self.own_seen
        hidden = tokens > rows.unsqueeze(-1) if own is None else ~own.seen(rows, tokens)
        if self.selected is None:
            return hidden
        return hidden | self.selected.hidden(rows - self.first, tokens, self.k.shape[2])

    @property
    def sees_all_before(self) -> bool:
        """Whether every query sees its own token, all before it and no other."""
        return self.own_seen is None and self.selected is None

    @property
    def own_seen(self) -> SeenTokens | None:
        """The tokens that a query sees where they are not all before it and no other."""
        seen = self.seen
        return None if seen is None or (seen.size >= self.k.shape[2] and seen.ends is None) else seen

    @property
    def is_causal(self) -> bool:
        """Whether no query sees a token after its own."""
        return self.seen is None or self.seen.ends is None

    def ends(self, rows: Tensor) -> Tensor:
        """The number of first tokens that hold all that the query of each token in `rows` and those before it see."""
        ends = None if self.seen is None else self.seen.ends
        return rows + 1 if ends is None else ends[rows].clamp(max=self.k.shape[2])

    def num_read(self, rows: Tensor) -> Tensor:
        """The number of tokens that the query of each token in `rows` reads, those outside of a window among them.

        An index selects others only where fewer tokens are seen than it selects.
        """
        ends = self.ends(rows)
        return ends if self.selected is None else ends.clamp(max=self.selected.indices.shape[-1])

    def end(self, row: int) -> int:
        """The `ends` of one row."""
        return row + 1 if self.is_causal else int(self.ends(torch.tensor(row)))

    @property
    def first(self) -> int:
        """The token of the first query."""
        return self.k.shape[2] - self.q.shape[2]

    def grouped_query(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Queries at `rows` of q, float32 [batch, num_kv_heads, heads per KV head, rows, head_dim]."""
        grouped: Tensor = self.q[:, :, rows].to(torch.float32).unflatten(1, (self.k.shape[1], -1))
        return grouped


def probabilities(call: AttentionCall, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Causal attention probabilities in float32, [..., num_kv_heads, group, rows, tokens], scaled as `call` says.

    Queries q are [..., num_kv_heads, group, rows, head_dim] of the tokens `rows`, keys k [..., num_kv_heads, tokens,
    head_dim].
    """
    return causal_softmax(call, attention_scores(call, q, k), rows)


def attention_scores(call: AttentionCall, q: Tensor, k: Tensor) -> Tensor:
    """Scaled and capped scores in float32 of the queries and keys of `probabilities`, without its mask."""
    # The queries of a group are rows of one matrix: matmul would copy the keys for each of them.
    scores: Tensor = ((q * call.scaling).flatten(-3, -2) @ k.transpose(-1, -2)).unflatten(-2, q.shape[-3:-1])
    return scores if call.softcap is None else torch.tanh(scores / call.softcap) * call.softcap


def causal_softmax(call: AttentionCall, scores: Tensor, rows: Tensor) -> Tensor:
    """Probabilities of scores [..., num_kv_heads, group, rows, tokens], which are overwritten.

    A row sees what the call says: no token after its own but of its image, nor one outside of a window.
    """
    hidden = call.hidden(rows, torch.arange(scores.shape[-1], device=rows.device)).unsqueeze(-3)
    # Adding -inf where it is hidden: several times faster than masked_fill_ on a CPU.
    return _softmax(call, scores.add_(_additive(hidden, torch.float32).to(scores.device)))


def _softmax(call: AttentionCall, scores: Tensor) -> Tensor:
    """Probabilities of masked scores [..., num_kv_heads, group, rows, tokens], beside the call's sinks."""
    if call.sinks is None:
        weights: Tensor = scores.softmax(dim=-1)
        return weights
    sinks = call.sinks.to(torch.float32).unflatten(0, (call.k.shape[1], -1))[..., None, None]
    beside = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1).softmax(dim=-1)
    return beside[..., :-1]


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: attention on a CPU would have to make it of a mask of booleans."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def reads_exactly(window: ExactWindow, rows: Tensor, keys: Tensor) -> Tensor:
    """Whether the query of each token in `rows` reads the exact copies of the tokens `keys`, [rows, keys].

    A token after the query's own, of its image, is as near as its own.
    """
    distance = (rows.unsqueeze(-1) - keys).clamp(min=0)
    return (distance < window.residual_length) | (keys < window.sinks)


def attend(
    call: AttentionCall, k: Tensor | None = None, v: Tensor | None = None, *, start: int | None = None
) -> Tensor:
    """Causal attention of the tokens from `start` on, by default of all that have a query.

    Keys and values to read instead of the call's own are [batch, num_kv_heads, tokens, channels].

    Returns:
        In the queries' dtype, [batch, num_heads, tokens - start, v_head_dim].
    """
    dtype = call.q.dtype
    k = call.k if k is None else saturated(k, dtype)
    v = call.v if v is None else saturated(v, dtype)
    start = call.first if start is None else start
    if not call.is_plain:
        late = torch.arange(start, k.shape[2], device=k.device)
        weights = probabilities(call, call.grouped_query(late - call.first), k.to(torch.float32), late)
        return (weights @ v.to(torch.float32).unsqueeze(2)).flatten(1, 2).to(dtype)
    if start == 0 and call.sees_all_before:
        return _attend_rows(call, k, v, slice(None), None)
    tokens, blocks = k.shape[2], []
    for first in range(start, tokens, ROWS_AT_A_TIME):
        last = min(first + ROWS_AT_A_TIME, tokens)
        end = call.end(last - 1)
        # What is added to the scores: attention on a CPU would have to make it of a mask of booleans.
        if not call.sees_all_before:
            places = torch.arange(end, device=k.device)
            mask = _additive(call.hidden(places[first:last], places), dtype)
        else:
            mask = torch.full((last - first, last), float("-inf"), dtype=dtype, device=k.device).triu_(first + 1)
        rows = slice(first - call.first, last - call.first)
        blocks.append(_attend_rows(call, k[:, :, :end], v[:, :, :end], rows, mask))
    return torch.cat(blocks, dim=2)


def _attend_rows(call: AttentionCall, k: Tensor, v: Tensor, rows: slice, mask: Tensor | None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        call.q[:, :, rows],
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=call.scaling,
        enable_gqa=call.q.shape[1] != k.shape[1],
    )


def attend_beside_window(call: AttentionCall, k: Tensor, v: Tensor, window: ExactWindow, *, start: int) -> Tensor:
    """Attention of the tokens from `start` on that read `k` and `v`, but the window's tokens from the call's own.

    Tokens after a query's own, of its image, are as exact as its own.

    A block of rows reads two runs of keys in one softmax, under a mask that lets a row see each token once: those that
    any of its rows reads back, then those that any reads exactly. Both are little longer than the keys themselves.

    Keys, values and the result are those of `attend`.
    """
    dtype, tokens = call.q.dtype, call.k.shape[2]
    k, v, blocks = saturated(k, dtype), saturated(v, dtype), []
    mask_dtype = dtype if call.is_plain else torch.float32
    for first in range(start, tokens, ROWS_AT_A_TIME):
        last = min(first + ROWS_AT_A_TIME, tokens)
        end = call.end(last - 1)
        read, *exact = _runs(window, first, last, end)
        block_k = torch.cat((k[:, :, read], *(call.k[:, :, run] for run in exact)), dim=2)
        block_v = torch.cat((v[:, :, read], *(call.v[:, :, run] for run in exact)), dim=2)
        block = slice(first - call.first, last - call.first)
        mask = _mask_beside_window(window, first, last, end, call.is_causal, mask_dtype, k.device)
        if not call.sees_all_before:
            places = torch.arange(end, device=k.device)
            at = torch.cat([places[run] for run in (read, *exact)])
            mask = mask + _additive(call.hidden(places[first:last], at), mask_dtype)
        blocks.append(_attend_masked(call, block_k, block_v, block, mask))
    return torch.cat(blocks, dim=2)


def _runs(window: ExactWindow, first: int, last: int, end: int) -> tuple[slice, slice, slice]:
    """The keys of a block of rows: those that any row reads back, then the sinks and the last ones that any reads.

    The rows see none from `end` on.
    """
    # Tokens from `packed` on are exact to all rows, and those before `near` but the sinks to none.
    packed = near = end
    if window.residual_length:
        packed, near = max(last - window.residual_length, 0), max(first + 1 - window.residual_length, 0)
    return slice(window.sinks, packed), slice(0, min(window.sinks, near)), slice(near, end)


# All layers of all sequences of one length ask for the same few masks; of long sequences they would take too much.
@lru_cache(maxsize=8)
def _mask_beside_window(
    window: ExactWindow, first: int, last: int, end: int, is_causal: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What is added to the scores of a block of rows over the keys of its `_runs`, [rows, keys]."""
    with torch.inference_mode(False):  # whoever asks next may need gradients
        rows, places = torch.arange(first, last, device=device), torch.arange(end, device=device)
        read, *runs = (places[run] for run in _runs(window, first, last, end))
        exact = torch.cat(runs)
        hidden = torch.cat((reads_exactly(window, rows, read), ~reads_exactly(window, rows, exact)), dim=-1)
        if is_causal:
            hidden |= torch.cat((read, exact)) > rows.unsqueeze(-1)
        return _additive(hidden, dtype)


def _attend_masked(call: AttentionCall, k: Tensor, v: Tensor, rows: slice, mask: Tensor) -> Tensor:
    """Attention of `rows` of the queries over keys of which some are hidden by a mask that is added, [rows, keys].

    The mask may be [batch, 1, rows, keys].
    """
    if call.is_plain:
        return _attend_rows(call, k, v, rows, mask)
    scores = attention_scores(call, call.grouped_query(rows), k.to(torch.float32))
    weights = _softmax(call, scores.add_(mask.unsqueeze(-3)))
    return (weights @ v.to(torch.float32).unsqueeze(2)).flatten(1, 2).to(call.q.dtype)


def attend_by_plan(
    call: AttentionCall, plan: ReadPlan, k: Tensor, v: Tensor, window: ExactWindow = NO_WINDOW
) -> Tensor:
    """Attention in which tokens from the split on read quantized `k` and `v` as the plan and the window say.

    The call is exact, with queries of the whole sequence or from the split on; `k` and `v` are float32 in model space.
    """
    assert call.first == 0 or call.first >= plan.split
    first = max(call.first, plan.split)
    k, v = plan.mix(call.k.float(), k), plan.mix(call.v.float(), v)
    if window.num_tokens:
        late = attend_beside_window(call, k, v, window, start=first)
    else:
        late = attend(call, k, v, start=first)
    if first == call.first:
        return late
    prefix = slice(None, plan.split)
    early = replace(call, q=call.q[:, :, prefix], k=call.k[:, :, prefix], v=call.v[:, :, prefix])
    return torch.cat((attend(early), late), dim=2)
