"""One forward of a transformers model on the tokens of many requests side by side. Knows nothing of scheduling.

The model computes norms, projections, positions and logits; its attention goes to a `StepAttention`. Registered with
AttentionInterface and AttentionMaskInterface, so no model code is patched, and sequences are never padded.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvtuner.errors import UnsupportedModelError
from kvtuner.runtime_loader.packed_attention import ScoreScaling
from kvtuner.supported_models import refuse_other_attention

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvtuner.runtime_loader.engine.paged_pool import PagedPool
    from kvtuner.runtime_loader.engine.step_attention import StepAttention
    from kvtuner.runtime_loader.engine.step_batch import StepBatch

ENGINE_ATTENTION: Final = "kvtuner_engine"


@dataclass(frozen=True, slots=True)
class _Attending:
    """The step that a model runs, and who attends."""

    step: StepBatch
    attention: StepAttention

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: ScoreScaling) -> Tensor:
        """Attention of all tokens of the step, [tokens, num_heads, v_head_dim]."""
        outputs, first = [], 0
        for part in self.step.parts:
            attend = self.attention.decode if part.is_decoding else self.attention.prefill
            of_part = slice(first, first := first + len(part.new_slots))
            outputs.append(attend(layer, q[of_part], k[of_part], v[of_part], part, scores))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


_attending: Final[ContextVar[_Attending | None]] = ContextVar("kvtuner_engine_step", default=None)


class ModelRunner:
    """A model whose attention is an engine's, until it is closed."""

    def __init__(self, model: PreTrainedModel, pool: PagedPool, attention: StepAttention) -> None:
        AttentionInterface.register(ENGINE_ATTENTION, _attention)
        AttentionMaskInterface.register(ENGINE_ATTENTION, _no_mask)
        self._model, self._pool, self._step_attention = model, pool, attention
        self._before = model.config._attn_implementation
        try:
            model.set_attn_implementation(ENGINE_ATTENTION)
        except ValueError as error:
            raise UnsupportedModelError(f"{type(model).__name__} refuses another attention: {error}") from error
        if model.config._attn_implementation != ENGINE_ATTENTION:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not go through transformers' AttentionInterface, so that no engine can"
                " store its keys; run it with its own cache"
            )
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, step: StepBatch) -> Tensor:
        """The logits of the tokens that the step keeps, float32 [kept, vocab_size]; to be called in inference mode."""
        self._pool.forget_former_requests()
        selects = self._selects_logits and step.kept is not None
        selected = {"logits_to_keep": step.kept} if selects else {}
        reset = _attending.set(_Attending(step, self._step_attention))
        try:
            output = self._model(step.input_ids, position_ids=step.positions, use_cache=False, **selected)
        finally:
            _attending.reset(reset)
        logits: Tensor = output.logits[0]
        return (logits if selects or step.kept is None else logits[step.kept]).float()

    def close(self) -> None:
        """Give the model the attention back that it had."""
        self._model.set_attn_implementation(self._before)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    layer: int | None = getattr(module, "layer_idx", None)
    where = f"layer {'?' if layer is None else layer} ({type(module).__name__})"
    attending = _attending.get()
    if attending is None:
        raise UnsupportedModelError(f"{where} belongs to an engine; close that before the model is run by itself")
    if layer is None or attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{where} has no number, masks keys by itself or is not causal: run it without")
    refuse_other_attention(where, rest)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attending.attend(layer, q, k, v, ScoreScaling(scale, softcap or 0.0)).unsqueeze(0), None
