"""The attention of a model's queries that read an exact window, each its own. Knows nothing of rows or caches.

A chunk of several tokens reads near tokens exactly and the others from rows, and which those are differs by token. So a
cache gives attention both, ``[copies of the newest tokens | all tokens as rows give them back]``, and the mask decides.
A negative offset of keys says how many copies there are. An index that selects the tokens to read scores each of them
once, and is given a mask without copies. Registered with AttentionInterface and AttentionMaskInterface, so no model
code is patched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvtuner.supported_models import INDICES, SINKS, has_indexes, refuse_other_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

WINDOW_ATTENTION = "kvtuner_window"


def register_window_attention() -> str:
    """Register the attention and mask functions; idempotent. Returns the implementation's name."""
    AttentionInterface.register(WINDOW_ATTENTION, _attention)
    AttentionMaskInterface.register(WINDOW_ATTENTION, _mask)
    return WINDOW_ATTENTION


def has_sinks(model: torch.nn.Module) -> bool:
    """Whether some layer's attention has sinks, which transformers' models keep as a weight of that name."""
    return any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters())


def num_copies(num_queries: int, residual_length: int) -> int:
    """The newest tokens that the queries of a chunk may read exactly, those before the first token included."""
    return residual_length - 1 + num_queries


@dataclass(frozen=True, slots=True, eq=False)
class IndexedMask:
    """The mask of queries that read copies too, [batch, 1, queries, kv_length]; an index reads its mask of tokens.

    Attributes:
        read: The mask by which each token is read once.
        tokens: The mask of tokens without copies, [batch, 1, queries, tokens].
    """

    read: Tensor
    tokens: Tensor

    def __getitem__(self, place: Any) -> Tensor:
        return self.tokens[place]

    def to(self, device: torch.device | str | int, **_: Any) -> IndexedMask:
        """The same on another device, where a layer lies that is called with it."""
        return IndexedMask(self.read.to(device), self.tokens.to(device))

    def of_selected(self, indices: Tensor) -> Tensor:
        """The mask by which queries read, once, those of the tokens [batch, queries, selected] that an index gives."""
        num_tokens = self.tokens.shape[-1]
        selected = self.tokens.new_zeros(*indices.shape[:2], num_tokens).scatter_(-1, indices.long(), True)
        tokens = torch.arange(num_tokens - self.read.shape[-1], num_tokens, device=indices.device)
        tokens = torch.where(tokens < 0, tokens + num_tokens, tokens)
        return selected[..., tokens.clamp(min=0)].unsqueeze(1) & self.read


def _mask(
    *, kv_length: int, kv_offset: int, mask_function: MaskFunction, attention_mask: Tensor | None, **rest: Any
) -> Tensor | IndexedMask | None:
    """The mask [batch, 1, queries, kv_length] of transformers' own function, by which each token is read once."""
    tokens = None
    if kv_offset < 0 and has_indexes(rest["config"]):
        plain = rest | {"kv_length": kv_length + kv_offset, "kv_offset": 0, "attention_mask": attention_mask}
        tokens = sdpa_mask(**plain, mask_function=mask_function)
    if kv_offset < 0:
        # Early releases of transformers 5 give the positions of the queries.
        num_queries = rest["q_length"] if "q_length" in rest else len(rest["cache_position"])
        residual_length, num_tokens = 1 - kv_offset - num_queries, kv_length + kv_offset
        mask_function = _each_once(_with_padding(mask_function, attention_mask), residual_length, num_tokens)
        attention_mask = None
    rest |= {"kv_length": kv_length, "kv_offset": kv_offset, "allow_is_causal_skip": False}
    mask: Tensor | None = sdpa_mask(**rest, mask_function=mask_function, attention_mask=attention_mask)
    return mask if mask is None or tokens is None else IndexedMask(mask, tokens)


def _with_padding(mask_function: MaskFunction, attention_mask: Tensor | None) -> MaskFunction:
    if attention_mask is None:
        return mask_function
    is_token = attention_mask.bool()
    return lambda batch, head, query, token: mask_function(batch, head, query, token) & is_token[batch, token]


def _each_once(mask_function: MaskFunction, residual_length: int, num_tokens: int) -> MaskFunction:
    """A mask of keys from a negative index on, which are copies of the newest tokens, and all tokens' from 0 on."""

    def reads(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_copy = key < 0
        token = torch.where(is_copy, key + num_tokens, key)
        is_near = token > query - residual_length
        return (token >= 0) & (is_copy == is_near) & mask_function(batch, head, query, token.clamp(min=0))

    return reads


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | IndexedMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    sinks, indices = rest.pop(SINKS, None), rest.pop(INDICES, None)
    if indices is not None and isinstance(attention_mask, Tensor):  # no copies: tokens alone
        attention_mask = IndexedMask(attention_mask, attention_mask)
    if isinstance(attention_mask, IndexedMask):
        attention_mask = attention_mask.of_selected(indices)
    refuse_other_attention(f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})", rest)
    if softcap is None and sinks is None:
        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)[0]
        return output, None
    assert attention_mask is not None
    group = query.shape[1] // key.shape[1]
    products = query @ repeat_kv(key, group).mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = products if softcap is None else softcap * torch.tanh(products / softcap)
    # The query of a padding token reads no key: of infinities its sum would be NaN, and spoil what others read of it.
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1)
    else:  # one more token of each head, without a value
        beside = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, beside), dim=-1).softmax(-1)[..., :-1]
    return (weights @ repeat_kv(value, group)).transpose(1, 2).contiguous(), None
