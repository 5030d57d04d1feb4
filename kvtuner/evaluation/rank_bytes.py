"""The bytes of a configuration on the ranks that will serve it. Knows nothing of budgets or measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtuner.precision import PrecisionPair, RowShape, bytes_per_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.geometry import ModelGeometry


@dataclass(frozen=True, slots=True)
class ServingRanks:
    """The rows of a tensor-parallel rank and the layers of each pipeline stage.

    Bytes are those of the fullest rank, which limits how many tokens fit.
    """

    shape: RowShape
    stages: tuple[range, ...]

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        *,
        k_group_size: int | None = None,
        v_group_size: int | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
    ) -> ServingRanks:
        """The ranks that `Budget.constraint` keeps a budget on.

        Raises:
            GeometryError: ranks that the model cannot be split over.
        """
        shape = geometry.row_shape(tp_size=tp_size, k_group_size=k_group_size, v_group_size=v_group_size)
        return cls(shape, tuple(geometry.layers_of_stage(rank, pp_size) for rank in range(pp_size)))

    def bytes_per_token(self, pairs: Sequence[PrecisionPair]) -> int:
        """The stored bytes of one token of a configuration."""
        return max(bytes_per_token(pairs[stage.start : stage.stop], self.shape) for stage in self.stages)

    def bf16_bytes_per_token(self) -> int:
        """The bytes of one token of the unquantized cache."""
        return self.bytes_per_token([PrecisionPair(16, 16)] * self.stages[-1].stop)
