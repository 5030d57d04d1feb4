"""What kernels read of a layer with packed latents, and the settings of the one that reads these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.precision import NATIVE_BITS, WIDEST_PACKED_BITS
from kvtuner.runtime_loader.kernels.latents.decode_latents import decode_latents
from kvtuner.runtime_loader.kernels.launch import LayerSides
from kvtuner.runtime_loader.kernels.launch_settings import WIDE, DecodeLaunch

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.kernels.kernel_side import Facts, KernelSide

FRESH_LATENTS: Final = {"TILE": 16, "TOKENS": 16}
"""The pairs of query and head, and the tokens, of a program that attends to new ones, in 53 KiB of shared memory."""
MOST_LATENT_CHANNELS: Final = 512
INTERPRETED_LATENTS: Final = DecodeLaunch(
    tokens=32, warps=2, stages=1, asm=False, min_split=32, resident=1, tile=WIDE
)  # fmt: skip
"""The settings in Triton's interpreter: small blocks, so that short requests have several."""
_LARGE: Final = DecodeLaunch(tokens=128, warps=8, stages=3, asm=True, resident=1, tile=WIDE)
_SMALL: Final = DecodeLaunch(tokens=64, warps=4, stages=3, asm=True, resident=1, tile=WIDE)
_NATIVE: Final = DecodeLaunch(tokens=32, warps=2, stages=2, asm=True, resident=1, tile=WIDE)
_KIB: Final = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_120": 99}
"""The shared memory of a program (CUDA C++ Programming Guide, technical specifications)."""


def latent_launch(arch: str, bits: int) -> DecodeLaunch:
    """The settings of an architecture for latents of 512 channels: two blocks ahead where its shared memory holds them.

    They were compiled and counted (benchmarks/sass.py --latents), and never ran.

    Raises:
        ServingError: There are no settings for the architecture.
    """
    if arch == "interpreter":
        return INTERPRETED_LATENTS
    kib = _KIB.get(arch)
    if kib is None:
        raise ServingError(
            f"the kernel of latents has no settings for {arch}, only for {', '.join(_KIB)}; serve without a profile"
        )
    if bits == NATIVE_BITS:
        return _NATIVE
    if bits == WIDEST_PACKED_BITS:  # a block of 128 tokens is 80 KiB with rotary channels, beside queries and weights
        return _LARGE if kib > 200 else _SMALL if kib > 100 else replace(_SMALL, stages=2)
    return _LARGE if kib > 100 else _SMALL


@dataclass(frozen=True, slots=True)
class LatentSides(LayerSides):
    """What kernels read of a layer with latents, which are keys and values.

    Attributes:
        rotary: The rotary channels beside latents, in the dtype that their queries have, which lie behind a latent's.
    """

    rotary: KernelSide

    @classmethod
    def of(cls, latents: KernelSide, rotary: KernelSide) -> LatentSides:
        """Both parts of a layer."""
        return cls(latents, latents, rotary)

    @property
    def fresh(self) -> dict[str, int]:
        """See `LayerSides.fresh`."""
        return FRESH_LATENTS

    @property
    def exact_facts(self) -> Facts:
        """See `LayerSides.exact_facts`."""
        beside = {"ROTARY_DIM": self.rotary.head_dim, "ROTARY_PADDED": self.rotary.units(1)}
        return {**LayerSides(self.keys, self.values).exact_facts, **beside}

    @property
    def copies_options(self) -> dict[str, int]:
        """See `LayerSides.copies_options`."""
        return {"num_warps": 4, "num_stages": 2}

    def exact(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `LayerSides.exact`: latents are given as keys, and rotary channels as values."""
        return k, k, v

    def attend_rows(
        self, grid: tuple[int, ...], q: Tensor, queries: Tensor, q_indptr: Tensor, batch: tuple[Any, ...],
        launch: DecodeLaunch, options: Facts,
    ) -> None:  # fmt: skip
        """See `LayerSides.attend_rows`."""
        rotary_q = q[..., self.keys.head_dim :]
        decode_latents[grid](
            queries, queries.stride(0), queries.stride(1), rotary_q, rotary_q.stride(0), rotary_q.stride(1), q_indptr,
            self.keys.rows, self.keys.words, self.rotary.rows, *batch, **options,
            **latent_facts(self.keys, self.rotary, q.shape[1], launch),
        )  # fmt: skip


def latent_facts(latents: KernelSide, rotary: KernelSide, num_heads: int, launch: DecodeLaunch) -> Facts:
    """The constants of `decode_latents`, but for what a call changes, as `decode_facts`."""
    return {
        "HEADS": num_heads, "TILE": launch.tile, "TOKENS": launch.tokens, "MIN_SPLIT": launch.min_split,
        "WARPS": launch.warps, "ROW": latents.row, "DIM": latents.head_dim, "BITS": latents.bits,
        "GROUPS": latents.groups, "UNITS": latents.units(1), "WORD": latents.word_bits, "ROTARY_ROW": rotary.row,
        "ROTARY_DIM": rotary.head_dim, "ROTARY_PADDED": rotary.units(1), "ASM": launch.asm,
        "DEPENDENT": launch.dependent,
    }  # fmt: skip
