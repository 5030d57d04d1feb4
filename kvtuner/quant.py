"""THE numerics: transforms, and quantization on min-max and fitted grids, in plain torch.

Every host answers to this file: the tuner's simulation, the transformers cache, the serving pool and its kernels. All
arithmetic is IEEE float32, rounding half to even, without contraction. Knows nothing of models, layers or budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvtuner.errors import PrecisionError
from kvtuner.grid_fit import GroupIntegers, quantize_minmax
from kvtuner.precision import (
    FITTED_BITS,
    FP16_MAX,
    SHORT_WORD_BITS,
    WIDE_WORD_BITS,
    Fit,
    WordBits,
    check_group_size,
    check_token_group,
    used_word_bits,
)
from kvtuner.transforms import TRANSFORMS, TransformKind

if TYPE_CHECKING:
    from collections.abc import Sequence

FP8_E4M3_MAX: Final = 448.0
NAN_BITS: Final = 0x7E00
"""The bits of an fp16 minimum that marks a group that held NaN or infinity."""
StepFunction = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Transform:
    """A transform with its constants: ``k' = H((k - mu) / lambda)``.

    Attributes:
        kind: The transform's kind, which names the steps.
        mu: The mean key, fp16 [num_kv_heads, head_dim]; None unless `kind.centered`.
        lam: The design's lambda, fp16 [num_kv_heads, head_dim]; None unless `kind.balanced`.
    """

    kind: TransformKind = TRANSFORMS["none"]
    mu: Tensor | None = None
    lam: Tensor | None = None

    def __post_init__(self) -> None:
        for name, wanted, constant in (
            ("mu", self.kind.centered, self.mu),
            ("lambda", self.kind.balanced, self.lam),
        ):
            if wanted != (constant is not None):
                raise PrecisionError(f"transform {self.kind} {'needs' if wanted else 'has no'} {name}")
            if constant is not None and (constant.dtype != torch.float16 or constant.ndim != 2):
                raise PrecisionError(f"{name} must be float16 [num_kv_heads, head_dim], not {constant.dtype}")

    def apply(self, x: Tensor) -> Tensor:
        """Take keys or values [..., num_kv_heads, head_dim] to the space they are stored in, float32."""
        y = x.to(torch.float32)
        for name in self.kind.steps:
            y = STEPS[name].apply(y, self._constant(name, y.device))
        return y

    def invert(self, stored: Tensor) -> Tensor:
        """Take stored-space keys or values [..., num_kv_heads, head_dim] back to model space, float32."""
        y = stored.to(torch.float32)
        for name in reversed(self.kind.steps):
            y = STEPS[name].invert(y, self._constant(name, y.device))
        return y

    def apply_to_query(self, q: Tensor, num_kv_heads: int) -> Tensor:
        """``q' = H(lambda * q)``, so that ``q' . k'`` is ``q . (k - mu)``.

        Args:
            q: Queries [..., num_heads, head_dim]; head h reads KV head ``h * num_kv_heads // num_heads``.
            num_kv_heads: The number of heads of the keys.

        Returns:
            float32, same shape. The constant ``q . mu`` is the caller's: it cancels only among keys of one cache.
        """
        y = q.to(torch.float32)
        for name in self.kind.steps:
            constant = self._constant(name, y.device)
            if constant is not None:
                constant = constant.repeat_interleave(y.shape[-2] // num_kv_heads, dim=0)
            y = STEPS[name].apply_to_query(y, constant)
        return y

    def heads(self, start: int, stop: int) -> Transform:
        """The transform of KV heads [start, stop): what one tensor-parallel rank holds."""
        mu = None if self.mu is None else self.mu[start:stop]
        return Transform(self.kind, mu, None if self.lam is None else self.lam[start:stop])

    def _constant(self, step: str, device: torch.device) -> Tensor | None:
        constant = {"centered": self.mu, "balanced": self.lam}.get(step)
        return None if constant is None else constant.to(device, torch.float32)


@dataclass(frozen=True, slots=True)
class Step:
    """The arithmetic of one step of a transform, on float32 [..., num_heads, head_dim].

    Each function takes the tensor and the step's constant, float32 [num_heads, head_dim]; None where it has none. It is
    linear, but for a constant: readers sum values in stored space, and only then take the sum back.

    Attributes:
        apply: The step itself, on keys or values before they are quantized.
        invert: The way back, on keys or values after they are read.
        apply_to_query: The step on queries, whose products with stored keys must equal those with the keys, up to one
            number for each query.
    """

    apply: StepFunction
    invert: StepFunction
    apply_to_query: StepFunction


IDENTITY: Final = Transform()


def hadamard_block(head_dim: int) -> int:
    """Largest power of two that divides head_dim: 128 for 128, 16 for 80, 32 for 96."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Sylvester-Hadamard transform of the last dimension, in blocks of `hadamard_block` channels.

    Its own inverse. The butterfly runs h = 1, 2, 4, ... and is followed by one multiplication by float32(n ** -0.5);
    a host that sums in another order may flip codes.

    Args:
        x: [..., head_dim], read as float32.

    Returns:
        float32, same shape.
    """
    block = hadamard_block(x.shape[-1])
    if block == 1:
        return x.to(torch.float32, copy=True)
    # Pease's constant geometry (J. ACM 15, 1968): a stage adds neighbours and puts the sums before the differences,
    # which makes neighbours of the next stage's pairs. Channels first, so that it adds long contiguous rows.
    rows = x.reshape(-1, block)
    y = torch.empty((block, len(rows)), dtype=torch.float32, device=x.device).copy_(rows.t())
    other = torch.empty_like(y)
    pairs, other_pairs = (t.unflatten(0, (-1, 2)).unbind(1) for t in (y, other))
    halves, other_halves = y.chunk(2), other.chunk(2)
    for _ in range(block.bit_length() - 1):
        torch.add(*pairs, out=other_halves[0])
        torch.sub(*pairs, out=other_halves[1])
        y, pairs, halves, other, other_pairs, other_halves = other, other_pairs, other_halves, y, pairs, halves
    factor = torch.tensor(float(block) ** -0.5, dtype=torch.float32, device=x.device)
    return torch.mul(y.t(), factor, out=other.view(len(rows), block)).view(x.shape)


STEPS: Final = {
    "centered": Step(lambda x, mu: x - mu, lambda x, mu: x + mu, lambda q, _: q),
    # By 1 / lambda, an IEEE division: what every kernel is given.
    "balanced": Step(lambda x, lam: x * (torch.ones_like(lam) / lam), lambda x, lam: x * lam, lambda q, lam: q * lam),
    "hadamard": Step(lambda x, _: hadamard(x), lambda x, _: hadamard(x), lambda q, _: hadamard(q)),
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """Codes with their scale words; ``x' = code * scale + minimum``.

    Attributes:
        codes: uint8 [..., num_kv_heads, head_dim], one code per channel, not packed.
        scale: fp16 [..., num_kv_heads, num_groups].
        minimum: fp16 [..., num_kv_heads, num_groups]; NaN marks a group that held NaN or infinity. Float32 where words
            have 16 bits, which hold a zero point.
        bits: 2, 3, 4 or 8.
        word_bits: the bits of a scale word; 32 at 8 bits.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    word_bits: WordBits = WIDE_WORD_BITS

    def dequantize(self) -> Tensor:
        """Values in stored space, float32 [..., num_kv_heads, head_dim]."""
        groups = self.codes.unflatten(-1, (self.scale.shape[-1], -1)).to(torch.float32)
        values: Tensor = groups.mul_(self.scale.float().unsqueeze(-1)).add_(self.minimum.float().unsqueeze(-1))
        return values.flatten(-2)


def quantize(
    x: Tensor, bits: int, group_size: int | None = None, *, symmetric: bool = False, fit: Fit = "minmax",
    word_bits: WordBits = WIDE_WORD_BITS,
) -> Quantized:  # fmt: skip
    """Quantize per token, head and group of channels.

    Min-max grids, asymmetric: `minimum` is rounded down and `scale` up to fp16, so that every value lies inside the
    grid and errs by at most half a step, and what the sum rounds; beside zero points, which are rounded, the edges
    may lie a quarter of a step outside the grid. Symmetric: ``minimum = -2**(bits-1) * scale``, stored alike, so
    that no reader needs a mode; the scale is capped at 65504 / 2**(bits-1), beyond which values saturate. A group
    with NaN or infinity reads NaN.

    Fitted grids (`grid_fit`) are those of least squares, rescaled to be unbiased: outliers may saturate. Widths that
    are not fitted, and groups that cannot be (constant, tiny, or far from zero), have min-max grids.

    Args:
        x: [..., num_kv_heads, head_dim] in stored space (after `Transform.apply`).
        bits: 2, 3, 4 or 8.
        group_size: channels per scale; head_dim by default.
        symmetric: one grid around zero instead of [minimum, maximum].
        fit: how scale and minimum are chosen.
        word_bits: the bits of a scale word, whose grids differ; 8-bit codes have 32 whatever is asked.

    Raises:
        PrecisionError: `check_group_size` refuses the group size, or `GroupIntegers` to fit such a group.
    """
    return quantize_widths(x, (bits,), group_size, symmetric=symmetric, fit=fit, word_bits=word_bits)[0]


def quantize_widths(
    x: Tensor, widths: Sequence[int], group_size: int | None = None, *, symmetric: bool = False, fit: Fit = "minmax",
    word_bits: WordBits = WIDE_WORD_BITS,
) -> list[Quantized]:  # fmt: skip
    """`quantize` for each of `widths`: the same codes and words, with what widths share computed once."""
    head_dim = x.shape[-1]
    group_size = head_dim if group_size is None else group_size
    for bits in widths:
        check_group_size(head_dim, bits, group_size)
    groups = x.to(torch.float32).unflatten(-1, (head_dim // group_size, group_size))
    # On a CPU in a quarter of the time of aminmax. Of -0.0 and 0.0 a reduction takes either; adding 0.0 leaves 0.0.
    edges = torch.stack((groups.amin(dim=-1), groups.amax(dim=-1))) + 0.0
    finite = (edges * 0.0).sum(dim=0) == 0.0
    low, high = torch.where(finite, edges, 0.0).clamp_(-FP16_MAX, FP16_MAX).unbind()
    groups = groups.nan_to_num().clamp_(-FP16_MAX, FP16_MAX)
    fitted_widths = set(widths).intersection(FITTED_BITS) if fit == "least_squares" else ()
    integers = GroupIntegers(groups, low, high, symmetric=symmetric) if fitted_widths else None
    quantized = []
    for bits in widths:
        used = used_word_bits(bits, word_bits)
        minmax = partial(quantize_minmax, groups, low, high, bits, symmetric=symmetric, word_bits=used)
        if integers is not None and bits in fitted_widths:
            codes, scale, minimum = integers.fit(bits, used).completed(minmax)
        else:
            codes, scale, minimum = minmax()
        minimum = torch.where(finite, minimum, _not_a_number(minimum))
        if used == SHORT_WORD_BITS:
            scale = torch.where(finite, scale, torch.nan)
        quantized.append(Quantized(codes.to(torch.uint8).flatten(-2), scale, minimum, bits, used))
    return quantized


def _not_a_number(like: Tensor) -> Tensor:
    """NaN in the dtype of `like`; in fp16 with the same bits on every device, for they are stored."""
    nan = torch.tensor(torch.nan, dtype=torch.float32, device=like.device)
    if like.dtype != torch.float16:
        return nan
    return torch.tensor(NAN_BITS, dtype=torch.int16, device=like.device).view(torch.float16)


def by_channel(x: Tensor, token_group: int) -> Tensor:
    """Whole groups of tokens [..., tokens, num_kv_heads, head_dim] as [..., groups, num_kv_heads, head_dim, tokens]."""
    groups: Tensor = x.unflatten(-3, (x.shape[-3] // token_group, token_group)).movedim(-3, -1)
    return groups


def by_token(groups: Tensor) -> Tensor:
    """The way back from `by_channel`."""
    tokens: Tensor = groups.movedim(-1, -3).flatten(-4, -3)
    return tokens


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; fp16's largest number where the last step of a grid, or a Hadamard, goes beyond it."""
    return (x.clamp(-FP16_MAX, FP16_MAX) if dtype == torch.float16 else x).to(dtype)


def encode_fp8(x: Tensor) -> Tensor:
    """The fp8 baseline: e4m3fn with scale 1, saturating at 448, as SGLang serves it; float8_e4m3fn, same shape."""
    return x.to(torch.float32).clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_fp8(x: Tensor) -> Tensor:
    """The numbers that a reader of the fp8 baseline sees: float32, same shape."""
    return encode_fp8(x).to(torch.float32)


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """The storage of one side (keys or values) of one layer.

    Attributes:
        bits: 2, 3, 4 or 8.
        transform: applied before quantization and undone on reading.
        group_size: channels per scale; head_dim by default.
        symmetric: one grid around zero.
        fit: how scale and minimum are chosen.
        word_bits: the bits of a scale word; 8-bit codes have 32 whatever is asked.
        token_group: tokens of a channel that share a scale, in place of channels (KIVI, ICML 2024); 1 where none do.
        fp8: ignore all of the above and store e4m3fn (the baseline; `bits` must be 8).
    """

    bits: int
    transform: Transform = IDENTITY
    group_size: int | None = None
    symmetric: bool = False
    fit: Fit = "minmax"
    fp8: bool = False
    word_bits: WordBits = WIDE_WORD_BITS
    token_group: int = 1

    def __post_init__(self) -> None:
        if self.fp8 and self.bits != 8:
            raise PrecisionError(f"fp8 has 8 bits, not {self.bits}")
        if self.token_group > 1 and (self.transform, self.fit, self.word_bits) != (IDENTITY, "minmax", WIDE_WORD_BITS):
            raise PrecisionError("per-channel keys have no transform, min-max grids and words of 32 bits")

    def simulate(self, x: Tensor) -> Tensor:
        """The numbers that a reader of keys or values [..., num_kv_heads, head_dim] sees: float32, model space.

        Per channel they are [..., tokens, num_kv_heads, head_dim], of which a last group that is not full stays exact.
        """
        if self.fp8:
            return quantize_fp8(x)
        if self.token_group == 1:
            return self.transform.invert(self.quantize(x).dequantize())
        whole = x.shape[-3] // self.token_group * self.token_group
        groups, rest = x[..., :whole, :, :], x[..., whole:, :, :].to(torch.float32)
        return torch.cat((by_token(self.quantize(groups).dequantize()), rest), dim=-3)

    def quantize(self, x: Tensor) -> Quantized:
        """The codes and words of keys or values in model space, which fp8 has none of.

        Per channel they are as of `by_channel`, of whole groups of tokens [..., tokens, num_kv_heads, head_dim].
        """
        if self.token_group > 1:
            check_token_group(x.shape[-1], self.bits, self.token_group)
            return quantize(by_channel(x, self.token_group), self.bits, symmetric=self.symmetric)
        stored = self.transform.apply(x)
        return quantize(
            stored, self.bits, self.group_size, symmetric=self.symmetric, fit=self.fit, word_bits=self.word_bits
        )
