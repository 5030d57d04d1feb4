"""Second moments of values and of what reads them: what the bases of `judge_grids.py` are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from judged_grids import Basis
from torch import Tensor

from kvtuner.calibration.forward.attention_hook import hooked
from kvtuner.calibration.forward.read_plan import AttentionCall, attend

if TYPE_CHECKING:
    from kvtuner.calibration.workbench import Workbench


@dataclass
class ValueMoments:
    """Second moments of a model's values and of what reads them, float64 by layer.

    Attributes:
        mean: The mean value, [num_kv_heads, head_dim].
        covariance: The covariance of values, [num_kv_heads, head_dim, head_dim].
        weights: What the output projection makes of a unit of each channel, like `covariance`.
        gradients: The second moment of the loss's gradient by the attention output, labels drawn from the model.
    """

    mean: list[Tensor]
    covariance: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]

    @classmethod
    def measure(cls, bench: Workbench) -> ValueMoments:
        """Measure them on the calibrate split."""
        heads, channels = bench.loaded.shape.geometry.num_kv_heads, bench.loaded.shape.geometry.v_head_dim
        layers = range(bench.loaded.shape.geometry.num_layers)
        values: list[list[Tensor]] = [[] for _ in layers]

        def hook(layer_id: int, call: AttentionCall) -> Tensor:
            values[layer_id].append(call.v.double().transpose(1, 2).flatten(0, 1))  # [tokens, heads, channels]
            return attend(call)

        gradients = GradientMoments.measure(bench)
        for batch in bench.batches("calibrate"):
            bench.chain.trace(batch.input_ids, batch.position_ids, hook)
        stacked = [torch.cat(parts) for parts in values]
        mean = [x.mean(0) for x in stacked]
        covariance = [torch.einsum("thd,the->hde", x - m, x - m) / len(x) for x, m in zip(stacked, mean, strict=True)]
        weights = []
        for layer in cast("Any", bench.chain.decoder).layers:
            by_head = layer.self_attn.o_proj.weight.detach().double().unflatten(1, (heads, -1, channels))
            weights.append(torch.einsum("ohgd,ohge->hde", by_head, by_head))
        return cls(mean, covariance, weights, gradients)

    def basis(self, layer: int, reader: str) -> Basis:
        """The basis of a layer's values."""
        second = {"weights": self.weights, "gradients": self.gradients}[reader]
        return Basis.between(self.mean[layer], self.covariance[layer], second[layer])


class GradientMoments:
    """The second moments of the gradients by attention outputs."""

    @staticmethod
    def measure(bench: Workbench) -> list[Tensor]:
        """One matrix [num_kv_heads, head_dim, head_dim] for each layer, of a mean token and query head."""
        chain, generator = bench.chain, torch.Generator().manual_seed(0)
        sums: dict[int, Tensor] = {}
        for batch in bench.batches("calibrate"):
            outputs: dict[int, Tensor] = {}

            def hook(layer_id: int, call: AttentionCall, outputs: dict[int, Tensor] = outputs) -> Tensor:
                outputs[layer_id] = attend(call)
                return outputs[layer_id]

            trace = chain.trace(batch.input_ids, batch.position_ids)
            hidden = trace.residual[0].detach().requires_grad_()
            with torch.enable_grad(), hooked(hook):
                for layer_id, call in enumerate(trace.calls):
                    hidden = chain.run_layer(layer_id, hidden, call)
                logits = chain.logits(chain.finish(hidden)).flatten(0, 1)
            labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            heads = chain.geometry.num_kv_heads
            for layer_id, gradient in enumerate(torch.autograd.grad(loss, list(outputs.values()))):
                g = gradient.double().unflatten(1, (heads, -1))
                sums[layer_id] = sums.get(layer_id, 0) + torch.einsum("bhgtd,bhgte->hde", g, g) / batch.num_tokens
        return [sums[layer_id] for layer_id in sorted(sums)]
