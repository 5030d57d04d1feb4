"""Sequences whose prompt runs once and is kept; the other tokens run as after a prefill.

Tokens before the split of a read plan see nothing quantized, so their keys and values are the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtuner.calibration.forward.read_plan import AttentionCall, attend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.attention_hook import AttentionHook
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.forward.latents import LatentRows
    from kvtuner.calibration.forward.trace import Trace

PROMPT_BYTES = 1 << 30
TOLERANCE = 0.05  # of the norm of final hidden states


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exact keys and values of the first tokens of a batch, of every layer with a cache by its id; empty if none is.

    They are [batch, num_kv_heads, tokens, head_dim], values with v_head_dim channels. Of layers with latents, these
    are kept too.
    """

    k: Mapping[int, Tensor] = field(default_factory=dict)
    v: Mapping[int, Tensor] = field(default_factory=dict)
    latents: Mapping[int, LatentRows] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return next(iter(self.k.values())).shape[2] if self.k else 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all keys and values, and of latents."""
        latents = [x for latent in self.latents.values() for x in (latent.rows, latent.rope)]
        return sum(x.numel() * x.element_size() for x in (*self.k.values(), *self.v.values(), *latents))

    def before(self, hook: AttentionHook) -> AttentionHook:
        """A hook that puts the prompt's keys and values before those that the model computes, and calls `hook`."""
        if not self.k:
            return hook

        def over_all_tokens(layer_id: int, call: AttentionCall) -> Tensor:
            k = torch.cat((self.k[layer_id], call.k), dim=2)
            v = torch.cat((self.v[layer_id], call.v), dim=2)
            latent = None if call.latent is None else call.latent.after(self.latents[layer_id])
            return hook(layer_id, replace(call, k=k, v=v, latent=latent))

        return over_all_tokens


NO_PROMPT = Prompt()


def prompt_bytes(chain: DecoderChain, batch: Batch, split: int) -> int:
    """Bytes of the keys and values of the first `split` tokens of a batch, and of latents."""
    dtype = next(chain.model.parameters()).dtype
    return batch.input_ids.shape[0] * split * chain.elements_per_token * max(2, dtype.itemsize)


def run_prompt(chain: DecoderChain, batch: Batch, split: int, limit: int = PROMPT_BYTES) -> tuple[Prompt, Trace]:
    """Run a batch exactly, keep its first `split` tokens, and trace the others after them.

    Nothing is kept, and all tokens are traced, where the keys and values would take more than `limit` bytes, where
    layers have a state besides them, where there are images, which models take with whole sequences alone, and where
    tokens run otherwise after a prompt than with it: another shape of a matrix product rounds otherwise, which adds up
    in many layers of bfloat16. All results are right; whole sequences take longer.

    Returns:
        The prompt, and the trace of the tokens that are not in it: [batch, tokens - prompt.num_tokens, hidden_size].

    Raises:
        NonFiniteActivationError: NaN or infinity; names the layer.
    """
    if split == 0 or chain.runs_prompts_again or batch.images is not None or prompt_bytes(chain, batch, split) > limit:
        trace = chain.trace(batch.input_ids, batch.position_ids, images=batch.images)
        trace.check_finite()
        return NO_PROMPT, trace
    k: dict[int, Tensor] = {}
    v: dict[int, Tensor] = {}
    latents: dict[int, LatentRows] = {}

    def keep(layer_id: int, call: AttentionCall) -> Tensor:
        if layer_id not in k:  # which several layers may read
            k[layer_id] = call.k[:, :, :split].clone()
            v[layer_id] = call.v[:, :, :split].clone()
        if call.latent is not None:
            latents[layer_id] = call.latent.first(split)
        return attend(call)

    whole = chain.trace(batch.input_ids, batch.position_ids, keep)
    whole.check_finite()
    expected = whole.final[:, split:]
    del whole
    prompt = Prompt(k, v, latents)
    trace = chain.trace(
        batch.input_ids[:, split:], batch.position_ids[:, split:], prompt.before(lambda _, call: attend(call))
    )
    difference = torch.linalg.vector_norm((trace.final - expected).float())
    if bool(difference <= TOLERANCE * torch.linalg.vector_norm(expected.float())):
        return prompt, trace
    del trace, expected
    return run_prompt(chain, batch, 0)
