"""What the layers of a profile take: bytes, bits and elements, where layers differ. Knows nothing of files."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from kvtuner.exported_configs.profile.field_types import round_figure
from kvtuner.exported_configs.profile.geometry_record import GeometryRecord
from kvtuner.exported_configs.profile.layer_storage import Defaults, LayerRecord
from kvtuner.precision import NATIVE_BITS, WHOLE_HEADS, copy_bytes


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What one token takes in all layers: the bytes of a rank and, over all heads, payload bits and elements.

    Native bytes are those of an unquantized token, copied ones those of a token in an exact window.

    A layer with a window does not count beside others: past its window a token takes no more of it.
    """

    num_bytes: int
    num_native_bytes: int
    num_copied_bytes: int
    payload_bits: int
    num_elements: int

    @classmethod
    def of(cls, geometry: GeometryRecord, defaults: Defaults, layers: Sequence[LayerRecord], tp_size: int = 1) -> Self:
        """The sizes on one of `tp_size` ranks; `GeometryError` where heads cannot be split among them."""
        owners = geometry.owners()
        growing = geometry.growing()
        num_bytes = num_native_bytes = num_copied_bytes = payload_bits = num_elements = 0
        for entry in layers:
            if entry.layer not in growing:
                owners[entry.layer].row_shape(WHOLE_HEADS, WHOLE_HEADS, tp_size=tp_size)
                continue
            layer, pair = owners[entry.layer], entry.pair
            shape = defaults.layer_shape(layer, entry, tp_size)
            rope_bits = NATIVE_BITS * layer.rope_dim
            v_bytes = 0 if entry.v is None else shape.v_bytes(pair.v_bits)
            num_bytes += shape.k_bytes(pair.k_bits) + v_bytes + rope_bits // 8
            native_bytes = shape.k_bytes(NATIVE_BITS) + shape.v_bytes(NATIVE_BITS) + rope_bits // 8
            num_native_bytes += native_bytes
            num_copied_bytes += copy_bytes(pair, native_bytes)
            payload = pair.k_bits * layer.head_dim + pair.v_bits * layer.v_head_dim
            payload_bits += layer.num_kv_heads * payload + rope_bits
            num_elements += layer.num_elements
        return cls(num_bytes, num_native_bytes, num_copied_bytes, payload_bits, num_elements)

    @property
    def mean_bits(self) -> Fraction:
        """The payload bits per element."""
        return Fraction(self.payload_bits, self.num_elements)

    @property
    def effective_bits(self) -> Fraction:
        """The stored bits per element, of sizes on one rank that holds all heads."""
        return Fraction(8 * self.num_bytes, self.num_elements)

    def reached_figures(self) -> dict[str, float]:
        """The figures of a `BudgetRecord` that follow from the layers."""
        return {
            "mean_bits": round_figure(float(self.mean_bits)),
            "effective_bits": round_figure(float(self.effective_bits)),
            "bytes_per_token": self.num_bytes,
        }
