"""mu and lambda after some steps of Adam on the divergence: the part of `judge_search.py` that needs gradients.

The codes of a step are held fixed; scale and minimum are the fitted line through them, through which gradients flow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvtuner.calibration.forward.attention_hook import hooked
from kvtuner.calibration.forward.read_plan import AttentionCall, attend, attend_by_plan
from kvtuner.calibration.forward.simulator import LayerSpec, read_back
from kvtuner.grid_fit import MAX_GAIN
from kvtuner.quant import QuantSpec, Transform, hadamard
from kvtuner.transforms import MAX_LAMBDA, MIN_LAMBDA
from kvtuner.tuner.objective import layer_specs

if TYPE_CHECKING:
    from kvtuner.calibration.forward.trace import Trace
    from kvtuner.calibration.sensitivity import LayerConstants, SensitivityTable
    from kvtuner.calibration.workbench import Workbench
    from kvtuner.search_spaces.space import Configuration

NUM_STEPS: Final = 32
LEARNING_RATE: Final = 0.02
"""The step of the logarithm of lambda, and of mu in standard deviations of its channel."""


@dataclass
class MovedKeys:
    """One layer's key transform with constants that move.

    Attributes:
        spec: The storage as it is.
        mu_shift: What is added to mu, in units of `unit`; [num_kv_heads, head_dim].
        log_shift: What is added to the logarithm of lambda.
        unit: The span of keys around their mean that a shift of 1 is worth.
    """

    spec: QuantSpec
    unit: Tensor
    mu_shift: Tensor
    log_shift: Tensor

    @classmethod
    def of(cls, spec: QuantSpec, unit: Tensor) -> MovedKeys:
        """Constants that have not moved."""
        return cls(spec, unit, *(torch.zeros_like(unit).requires_grad_() for _ in range(2)))

    @property
    def shifts(self) -> list[Tensor]:
        """What moves."""
        kind = self.spec.transform.kind
        return [shift for shift, moves in ((self.mu_shift, kind.centered), (self.log_shift, kind.balanced)) if moves]

    def constants(self) -> tuple[Tensor | None, Tensor | None]:
        """The constants mu and lambda, float32, with gradients; None where the transform has none."""
        transform = self.spec.transform
        mu = None if transform.mu is None else transform.mu.float() + self.mu_shift * self.unit
        if transform.lam is None:
            return mu, None
        return mu, (transform.lam.float() * self.log_shift.exp()).clamp(MIN_LAMBDA, MAX_LAMBDA)

    def rounded(self) -> Transform:
        """The transform with the constants as a profile holds them."""
        mu, lam = (None if x is None else x.detach().half() for x in self.constants())
        return Transform(self.spec.transform.kind, mu, lam)

    def read(self, keys: Tensor) -> Tensor:
        """Keys [batch, num_kv_heads, tokens, head_dim] as they are read, with gradients by the shifts."""
        mu, lam = self.constants()
        channels = keys.shape[-1]
        rotation = hadamard(torch.eye(channels)) if self.spec.transform.kind.hadamard else None
        y = keys.transpose(1, 2).float()
        y = y if mu is None else y - mu
        y = y if lam is None else y / lam
        y = y if rotation is None else y @ rotation
        with torch.no_grad():
            stored = self.rounded().apply(keys.transpose(1, 2))
            quantized = replace(self.spec, transform=Transform()).quantize(stored)
        y = line_through(y, quantized.codes.float())
        y = y if rotation is None else y @ rotation
        y = y if lam is None else y * lam
        y = y if mu is None else y + mu
        return y.transpose(1, 2)


def line_through(y: Tensor, codes: Tensor) -> Tensor:
    """What is read of `codes` with the line of `grid_fit` through `y`, one group a head."""
    mean, middle = y.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
    from_mean, from_middle = y - mean, codes - middle
    covariance = (from_mean * from_middle).sum(-1, keepdim=True).clamp_min(1e-12)
    least_squares = covariance / from_middle.square().sum(-1, keepdim=True).clamp_min(1e-12)
    slope = torch.minimum(from_mean.square().sum(-1, keepdim=True) / covariance, least_squares * MAX_GAIN)
    return mean + slope * from_middle


def refined_constants(
    bench: Workbench, table: SensitivityTable, configuration: Configuration, *, together: bool
) -> tuple[dict[int, LayerConstants], int]:
    """The constants of every layer after refinement on the calibrate split, and the number of layers that keep theirs.

    Each layer moves alone, with nothing else quantized, or all move together under the whole configuration. What does
    not lower the KL of the select split is dropped, by layer or altogether.
    """
    specs = dict(layer_specs(configuration, table, bench.options.quant))
    traces = [(bench.chain.trace(b.input_ids, b.position_ids), b) for b in bench.batches("calibrate")]
    moving = {}
    for layer, spec in specs.items():
        if spec.k is not None and (spec.k.transform.kind.centered or spec.k.transform.kind.balanced):
            moving[layer] = MovedKeys.of(spec.k, key_spread(bench, traces[0][0], layer))
    select = bench.simulator("select", reuse=True)
    kept: list[int] = []
    if together:
        _descend(bench, [trace for trace, _ in traces], specs, moving)
        moved = {layer: replace(spec, k=_moved_spec(moving, layer, spec)) for layer, spec in specs.items()}
        kept = list(moving) if select.kl(moved) < select.kl(specs) else []
    else:
        for layer, keys in moving.items():
            _descend(bench, [trace for trace, _ in traces], {layer: LayerSpec(k=keys.spec)}, {layer: keys})
            alone = LayerSpec(k=replace(keys.spec, transform=keys.rounded()))
            if select.kl({layer: alone}) < select.kl({layer: LayerSpec(k=keys.spec)}):
                kept.append(layer)
    constants = dict(table.constants)
    for layer in kept:
        transform = moving[layer].rounded()
        name = "lam_centered" if transform.kind.centered else "lam"
        changed: dict[str, Any] = {} if transform.lam is None else {name: transform.lam}
        constants[layer] = replace(
            constants[layer], **changed, **({} if transform.mu is None else {"mu": transform.mu})
        )
    return constants, len(kept)


def read_through(spec: QuantSpec | None, x: Tensor) -> Tensor:
    """Keys or values as they are read back, with the gradient of what is not quantized."""
    with torch.no_grad():
        error = read_back(spec, x) - x.float()
    return x.float() + error


def key_spread(bench: Workbench, trace: Trace, layer: int) -> Tensor:
    """The standard deviation of each key channel, [num_kv_heads, head_dim]."""
    spread: list[Tensor] = []

    def hook(_: int, call: AttentionCall) -> Tensor:
        spread.append(call.k.float().std(dim=(0, 2)))
        return attend(call)

    with torch.no_grad(), hooked(hook):
        bench.chain.run_layer(layer, trace.residual[layer], trace.calls[layer])
    return spread[0]


def _moved_spec(moving: dict[int, MovedKeys], layer: int, spec: LayerSpec) -> QuantSpec | None:
    return replace(moving[layer].spec, transform=moving[layer].rounded()) if layer in moving else spec.k


def _descend(bench: Workbench, traces: list[Trace], specs: dict[int, LayerSpec], moving: dict[int, MovedKeys]) -> None:
    """Some steps of Adam on the KL of one sequence after another."""
    chain, plan, start = bench.chain, bench.plan, min(specs)
    optimizer = torch.optim.Adam([s for keys in moving.values() for s in keys.shifts], lr=LEARNING_RATE)
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, NUM_STEPS)

    def hook(layer_id: int, call: AttentionCall) -> Tensor:
        spec = specs.get(layer_id)
        if spec is None or spec.is_exact:
            return attend(call)
        k = moving[layer_id].read(call.k) if layer_id in moving else read_through(spec.k, call.k)
        return attend_by_plan(call, plan, k, read_through(spec.v, call.v))

    for step in range(NUM_STEPS):
        trace = traces[step % len(traces)]
        with torch.no_grad():
            exact = chain.logits(trace.final[:, plan.split :]).log_softmax(-1)
        hidden = trace.residual[start].detach()
        with torch.enable_grad(), hooked(hook):
            for layer_id in range(start, len(chain.layers)):
                hidden = chain.run_layer(layer_id, hidden, trace.calls[layer_id])
            other = chain.logits(chain.finish(hidden)[:, plan.split :]).log_softmax(-1)
        loss = (exact.exp() * (exact - other)).sum(-1).mean()
        optimizer.zero_grad()
        for shift, gradient in zip(
            (s for keys in moving.values() for s in keys.shifts),
            torch.autograd.grad(loss, [s for keys in moving.values() for s in keys.shifts]),
            strict=True,
        ):
            shift.grad = gradient
        optimizer.step()
        rates.step()
