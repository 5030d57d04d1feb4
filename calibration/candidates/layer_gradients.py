"""The gradients of sampled losses, layer by layer from the last to the first: each layer runs anew from its input.

Memory is one layer, the gradients by its input, and those by keys and values that later layers read of an earlier one.
Knows nothing of candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtuner.calibration.forward.attention_hook import hooked
from kvtuner.calibration.forward.finite_check import check_finite
from kvtuner.calibration.forward.read_plan import AttentionCall, attend
from kvtuner.calibration.placement.sharded_weights import is_sharded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.forward.trace import Trace


@dataclass(slots=True)
class LayerGradients:
    """The gradients of some losses by the output of the layer that comes next, one after the other backwards.

    Attributes:
        by_output: The gradients of each loss, [batch, tokens, hidden_size].
    """

    chain: DecoderChain
    trace: Trace
    by_output: list[Tensor]
    _by_states: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """The gradients of each loss by keys and values of a layer, by its id, through the later layers that read them."""

    @classmethod
    def of_labels(
        cls, chain: DecoderChain, trace: Trace, places: Tensor, num_draws: int, generator: torch.Generator
    ) -> LayerGradients:
        """Gradients of so many losses under labels drawn from the model, summed over the tokens at some places."""
        last = len(chain.layers) - 1
        with torch.no_grad():
            hidden = chain.run_layer_exactly(last, trace.residual[last], trace.calls[last])
        check_finite(last, outputs=hidden)
        if hidden.device.type != "cpu":  # probabilities of a whole vocabulary stay where they are
            generator = torch.Generator(hidden.device).manual_seed(generator.initial_seed())
        gradients = [torch.zeros_like(hidden) for _ in range(num_draws)]
        step = max(1, chain.rows_in_flight() // hidden.shape[-3])
        for rows in places.to(hidden.device).split(step):
            leaf = hidden[..., rows, :].detach().requires_grad_()
            final = chain.finish(leaf)
            by_final = _label_gradients(chain, final.detach(), num_draws, generator)
            for draw, (gradient, by_label) in enumerate(zip(gradients, by_final, strict=True)):
                (g,) = torch.autograd.grad(final, leaf, by_label, retain_graph=draw + 1 < num_draws)
                gradient[..., rows, :] = g.to(gradient.dtype)
        return cls(chain, trace, gradients)

    def pass_layer(self, layer_id: int) -> None:
        """Go back over a layer whose attention nobody asks for."""
        self._go_back(layer_id, None)

    def attention_of(self, layer_id: int, start: int) -> tuple[AttentionCall, Tensor]:
        """Go back over a layer; returns its exact attention, without gradients, and the gradients by its output.

        They are of the tokens from `start` on, float32 [losses, batch, num_heads, tokens - start, v_head_dim].
        """
        call, by_attended = self._go_back(layer_id, start)
        assert call is not None
        latent = None if call.latent is None else call.latent.detached()
        detached = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach(), latent=latent)
        return detached, torch.stack(by_attended)

    def _go_back(self, layer_id: int, start: int | None) -> tuple[AttentionCall | None, list[Tensor]]:
        """Put the gradients by a layer's input in place of those by its output.

        Returns the layer's attention, where it has one, and with a start the gradients by what that gives.
        """
        is_reader = self.chain.cache.owner_of(layer_id) != layer_id
        attention: list[tuple[AttentionCall, Tensor]] = []

        def hook(_: int, call: AttentionCall) -> Tensor:
            if is_reader:  # another layer's keys and values, which are not made of this one's input
                call = replace(call, k=call.k.detach().requires_grad_(), v=call.v.detach().requires_grad_())
            output = attend(call)
            attention.append((call, output))
            return output

        leaf = self.trace.residual[layer_id].detach().requires_grad_()
        with torch.enable_grad(), hooked(hook):
            output = self.chain.run_layer(layer_id, leaf, self.trace.calls[layer_id])
        outputs, wanted = [output], [leaf]
        read_later = self._by_states.pop(layer_id, None)
        if read_later is not None:
            outputs += [attention[0][0].k, attention[0][0].v]
        if is_reader:
            wanted += [attention[0][0].k, attention[0][0].v]
        if start is not None:
            wanted.append(attention[0][1])
        by_attended, by_states = [], []
        for draw, gradient in enumerate(self.by_output):
            given = [gradient, *(read_later[draw] if read_later else ())]
            found = torch.autograd.grad(
                outputs,
                wanted,
                [g.to(x.device, x.dtype) for g, x in zip(given, outputs, strict=True)],
                retain_graph=draw + 1 < len(self.by_output),
            )
            self.by_output[draw] = found[0]
            if start is not None:
                by_attended.append(found[-1][:, :, start:].to(torch.float32))
            if is_reader:
                by_states.append((found[1].to(torch.float32), found[2].to(torch.float32)))
        if is_reader:
            self._add_by_states(self.chain.cache.owner_of(layer_id), by_states)
        self.chain.count.add(backward_layer_tokens=len(self.by_output) * leaf.shape[-3] * leaf.shape[-2])
        return attention[0][0] if attention else None, by_attended

    def _add_by_states(self, owner: int, by_states: list[tuple[Tensor, Tensor]]) -> None:
        known = self._by_states.get(owner)
        if known is not None:
            by_states = [(k + more_k, v + more_v) for (k, v), (more_k, more_v) in zip(known, by_states, strict=True)]
        self._by_states[owner] = by_states


def _label_gradients(
    chain: DecoderChain, final: Tensor, num_draws: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Gradients of -log p[label] by final hidden states [batch, rows, hidden_size], of labels drawn from p by row.

    The gradient by the logits is p less one at the label. What p gives is the same for all draws, so a plain matrix
    reads the whole vocabulary twice and not once more for each draw.
    """
    leaf = final.requires_grad_()
    logits = chain.logits(leaf)
    p = logits.detach().softmax(dim=-1)  # [batch, rows, vocab_size]
    p_by_row = p.flatten(0, 1).to(generator.device)
    labels = torch.multinomial(p_by_row, num_draws, replacement=True, generator=generator).to(p.device)
    if not chain.has_rows_of_tokens or is_sharded(chain.head):
        for draw in range(num_draws):
            index = labels[:, draw].reshape(*p.shape[:-1], 1)
            by_logits = p.scatter_add(-1, index, torch.full_like(index, -1.0, dtype=p.dtype))
            yield torch.autograd.grad(logits, leaf, by_logits, retain_graph=draw + 1 < num_draws)[0]
        return
    (expected,) = torch.autograd.grad(logits, leaf, p)
    for draw in range(num_draws):
        of_labels = chain.logits(leaf.flatten(0, 1), labels[:, draw]).diagonal()  # [batch * rows]
        yield expected - torch.autograd.grad(of_labels.sum(), leaf)[0]
