"""KVarN (arXiv 2606.03458, and the reference of `kvarn_store_tile_k` at huawei-csl/KVarN): tiles of equal variance.

After a Hadamard, a tile of 128 tokens of a head is divided by a scale of each token and one of each channel, which are
found by turns so that all rows and columns have one deviation; the most even of 16 rounds is kept. Then keys have a
grid of each channel and values one of each token. The first tile and the one that is not full stay in half precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.quant import hadamard

from .recipe import WORD_BITS, ExactTokens, Recipe, StoredSide, half

if TYPE_CHECKING:
    from torch import Tensor

SOURCE: Final = "arXiv 2606.03458"
TILE: Final = 128
ROUNDS: Final = 16
LEAST_LOG, LARGEST_LOG = -0.3, 10.0


def spread(tile: Tensor) -> Tensor:
    """How uneven the deviations of rows and columns are: the sum of both ratios of largest to least, [...]."""
    ratios = []
    for dim in (-1, -2):
        deviation = tile.std(dim=dim)
        ratios.append(deviation.amax(-1) / deviation.amin(-1).clamp_min(1e-8))
    return ratios[0] + ratios[1]


def even_scales(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of the rows [..., rows, 1] and the columns [..., 1, columns] that make a tile's deviations even."""
    rows, columns = (torch.zeros_like(tile.select(dim, 0).unsqueeze(dim)) for dim in (-1, -2))
    best = (rows.exp(), columns.exp())
    least = spread(tile)
    for _ in range(ROUNDS):
        columns = _more_even(columns, tile / columns.exp() / rows.exp(), dim=-2)
        rows = _more_even(rows, tile / columns.exp() / rows.exp(), dim=-1)
        found = spread(tile / columns.exp() / rows.exp())
        better = (found <= least)[..., None, None]
        best = (torch.where(better, rows.exp(), best[0]), torch.where(better, columns.exp(), best[1]))
        least = torch.minimum(least, found)
    return best


def _more_even(log_scale: Tensor, tile: Tensor, dim: int) -> Tensor:
    deviation = tile.std(dim=dim, keepdim=True).clamp(1e-3, 1e3)
    return (log_scale + deviation.log()).clamp(LEAST_LOG, LARGEST_LOG)


@dataclass(frozen=True, slots=True)
class EvenTiles:
    """A grid of each channel of a tile (keys), or of each token; tokens behind the last whole tile stay as they are."""

    width: int
    by_channel: bool
    tile: int = TILE

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        whole = x.shape[-2] // self.tile * self.tile
        tiles = hadamard(x[..., :whole, :]).unflatten(-2, (-1, self.tile))
        tiles = tiles.transpose(-1, -2) if self.by_channel else tiles
        stored = self._read_tiles(tiles)
        stored = stored.transpose(-1, -2) if self.by_channel else stored
        return torch.cat((hadamard(stored.flatten(-3, -2)), x[..., whole:, :].to(torch.float32)), dim=-2)

    def _read_tiles(self, tiles: Tensor) -> Tensor:
        rows, columns = even_scales(tiles)
        even = tiles / columns / rows
        low, high = even.amin(-1, keepdim=True), even.amax(-1, keepdim=True)
        top = 2**self.width - 1
        scale = ((high - low) / top).clamp_min(1e-10)
        codes = ((even - low) / scale).round().clamp(0, top)
        read: Tensor = (codes * half(rows * scale) + half(rows * low)) * half(columns)
        return read

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        rows, columns = (head_dim, self.tile) if self.by_channel else (self.tile, head_dim)
        return self.width + WORD_BITS * (2 * rows + columns) / (rows * columns)


def kvarn(num_layers: int, *, sinks: int = TILE, k_bits: int = 4, v_bits: int = 2) -> Recipe:
    """KVarN as it is shipped, K4V2 in tiles of 128; without sinks the first tile is quantized too."""
    exact = ExactTokens(sinks=sinks, tile=TILE)
    layer = (StoredSide(EvenTiles(k_bits, True), exact), StoredSide(EvenTiles(v_bits, False), exact))
    name = f"KVarN K{k_bits}V{v_bits}{'' if sinks else ', no sinks'}"
    return Recipe(name, "KVarN", SOURCE, (layer,) * num_layers)
