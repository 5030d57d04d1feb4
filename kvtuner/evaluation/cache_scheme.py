"""Schemes to store a model's cache: their size, their simulation, their transformers cache and SGLang's flags.

A new scheme is a child of `CacheScheme` in a module of its own, and a line in `scheme_registry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from transformers import DynamicCache

from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.errors import OptionError
from kvtuner.exported_configs.profile.build import write_profile
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.exported_configs.sharing.serve_command import page_flags
from kvtuner.precision import (
    NATIVE_BITS,
    SIDES,
    WHOLE_HEADS,
    PrecisionPair,
    RowShape,
    ScaleLayout,
    bytes_per_token,
    copy_bytes,
    mean_bits,
)
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.model_check import check_model
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.supported_models import refuse_own_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry
    from kvtuner.precision import ExactWindow
    from kvtuner.read_plan_names import ReadPlanName
    from kvtuner.search_spaces.budget import Constraint

SYMMETRIC: Final = "-symmetric"
KEYS_PER_CHANNEL: Final = "-per-channel"
UNQUANTIZED: Final = (None, "auto", REFERENCE, "bfloat16")
"""SGLang's names of a cache in the model's dtype."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheScheme:
    """A scheme to store a cache; by itself, packed rows of a configuration that no profile holds yet.

    Rows are those of the whole model. The key says everything that decides results besides the model and what is asked.
    Specifications simulate each layer; layers without one are exact. The profile, if there is one, says how rows are
    stored.
    """

    name: str
    pairs: tuple[PrecisionPair, ...]
    rows: RowShape
    key: str
    specs: Mapping[int, LayerSpec] = field(default_factory=dict)
    has_transforms: bool = False
    profile: Profile | None = None

    @property
    def mean_bits(self) -> float:
        """Payload bits of a cached element, scales not counted."""
        return float(mean_bits(self.pairs, self.rows))

    @property
    def effective_bits(self) -> float:
        """Stored bits of a cached element, with its scales."""
        elements = len(self.pairs) * self.rows.num_kv_heads * self.rows.channels
        return 8 * self.bytes_per_token / elements

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of a token on one rank that holds all heads."""
        return self._layer_bytes(range(len(self.pairs)), self.rows)

    def bytes_on(self, ranks: RankLayout) -> int:
        """Stored bytes of a token on the fullest of several ranks."""
        return max(self._layer_bytes(stage, ranks.shape) for stage in ranks.stages)

    def keeps(self, constraint: Constraint) -> bool:
        """Whether every pipeline stage keeps a budget."""
        if constraint.budget.kind == "mean_bits":
            return constraint.is_met(self.pairs)
        stages = enumerate(constraint.stages)
        return all(
            self._layer_bytes(layers, constraint.shape)
            <= constraint.cap(stage) + sum(constraint.uncopied(self.pairs[layer]) for layer in layers)
            for stage, layers in stages
        )

    def cache(self, config: Any, read_plan: ReadPlanName, context_length: int) -> Any:
        """An empty transformers cache that stores by this scheme, and can hold so many tokens.

        Raises:
            UnsupportedModelError: Layers whose cache is not one key and value per token and head.
            ProfileError: The profile belongs to another model.
            OptionError: The scheme is only simulated, or only served.
        """
        raise OptionError(f"no cache here stores {self.name}; leave it out, or out of recall, needles and tasks")

    def server_flags(self, folder: Path) -> tuple[str, ...]:
        """SGLang's flags for this scheme; a file that the server reads, if there must be one, goes to the folder.

        Raises:
            RunFolderError: The file cannot be written.
            OptionError: The scheme is only simulated.
        """
        raise OptionError(f"no server stores {self.name}, which is only simulated; leave it out of --against")

    def contradiction(self, kv_cache_dtype: str | None, digest: str | None) -> str | None:
        """Report what a server that was named like this scheme stores instead; None where it stores this.

        The server states its cache's dtype, as SGLang names it, and the digest of the profile that it serves.
        """
        return None

    def _layer_bytes(self, layers: range, rows: RowShape) -> int:
        return bytes_per_token(self.pairs[layers.start : layers.stop], rows)


class UnquantizedScheme(CacheScheme):
    """The cache in the model's own dtype, which everything is compared with."""

    @classmethod
    def of(cls, geometry: ModelGeometry) -> Self:
        """The scheme for a model."""
        pairs = (PrecisionPair(NATIVE_BITS, NATIVE_BITS),) * geometry.num_layers
        return cls(name=REFERENCE, pairs=pairs, rows=geometry.row_shape(), key="exact")

    def cache(self, config: Any, read_plan: ReadPlanName, context_length: int) -> Any:
        """Transformers' own cache."""
        return DynamicCache(config=config)

    def server_flags(self, folder: Path) -> tuple[str, ...]:
        """No flags: this is SGLang's default."""
        return ()

    def contradiction(self, kv_cache_dtype: str | None, digest: str | None) -> str | None:
        """Report a quantized cache."""
        return "its cache is quantized" if digest or kv_cache_dtype not in UNQUANTIZED else None


class Fp8Scheme(CacheScheme):
    """Uniform fp8 as SGLang serves it: a byte for each element, neither scales nor padding."""

    @classmethod
    def of(cls, geometry: ModelGeometry) -> Self:
        """The scheme for a model."""
        spec, pairs = QuantSpec(8, fp8=True), (PrecisionPair(8, 8),) * geometry.num_layers
        specs = {layer: LayerSpec(spec, spec) for layer in geometry.ids}
        return cls(name=FP8, pairs=pairs, rows=geometry.row_shape(), key=FP8, specs=specs)

    def cache(self, config: Any, read_plan: ReadPlanName, context_length: int) -> Any:
        """A cache that rounds to fp8."""
        return KVTunerCache.fp8(config, read_plan, context_length=context_length)

    def server_flags(self, folder: Path) -> tuple[str, ...]:
        """SGLang's own flag."""
        return ("--kv-cache-dtype", "fp8_e4m3")

    def contradiction(self, kv_cache_dtype: str | None, digest: str | None) -> str | None:
        """Report a cache of another dtype."""
        return None if "fp8" in str(kv_cache_dtype) else f"its cache is {kv_cache_dtype}"

    def _layer_bytes(self, layers: range, rows: RowShape) -> int:
        return len(layers) * rows.num_kv_heads * rows.channels


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfileScheme(CacheScheme):
    """Rows packed as a profile says, which may have a file already."""

    profile: Profile
    file: Path | None = None

    @classmethod
    def of(cls, name: str, profile: Profile, file: Path | None = None) -> Self:
        """The scheme of a profile; `ProfileError` where layers differ in their shape."""
        rows, layers = profile.row_shape(), profile.tuned_geometry().ids
        specs = {
            layer: LayerSpec(profile.quant_spec(layer, "k"), profile.quant_spec(layer, "v"), profile.window)
            for layer in layers
        }
        return cls(
            name=name,
            pairs=profile.tuned_pairs,
            rows=rows,
            key=profile.digest,
            specs=specs,
            has_transforms=any(profile.transform_name(layer, side) != "none" for layer in layers for side in SIDES),
            profile=profile,
            file=file,
        )

    @property
    def effective_bits(self) -> float:
        """The bits that the profile states, which are rounded."""
        return float(self.profile.budget.effective_bits)

    def cache(self, config: Any, read_plan: ReadPlanName, context_length: int) -> Any:
        """A cache that packs rows as the profile says."""
        refuse_own_cache(config)
        check_model(self.profile, config, context_length=context_length)
        return KVTunerCache.from_profile_unchecked(self.profile, config, read_plan)

    def server_flags(self, folder: Path) -> tuple[str, ...]:
        """The flags of the profile's file, which is written to the folder where there is none yet."""
        file = self.file or folder / f"{self.name}.json"
        if self.file is None:
            write_profile(file, self.profile)
        return ("--kvtuner-profile", str(file.absolute()), *page_flags(self.profile))


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The rows of a tensor-parallel rank and the layers of each pipeline stage.

    Bytes are those of the fullest rank, which limits how many tokens fit.
    """

    shape: RowShape
    stages: tuple[range, ...]

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        k_layout: ScaleLayout = WHOLE_HEADS,
        v_layout: ScaleLayout = WHOLE_HEADS,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
    ) -> RankLayout:
        """The ranks that a budget is kept on; `GeometryError` for ranks that the model cannot be split over."""
        shape = geometry.row_shape(k_layout, v_layout, tp_size=tp_size)
        return cls(shape, tuple(geometry.layers_of_stage(rank, pp_size) for rank in range(pp_size)))

    def bytes_per_token(self, pairs: Sequence[PrecisionPair]) -> int:
        """The stored bytes of one token of a configuration."""
        return max(bytes_per_token(pairs[stage.start : stage.stop], self.shape) for stage in self.stages)

    def window_bytes(self, pairs: Sequence[PrecisionPair], window: ExactWindow) -> int:
        """The bytes of one request's exact copies."""
        native = self.shape.pair_bytes(PrecisionPair(NATIVE_BITS, NATIVE_BITS))
        layers = [copy_bytes(pair, native) for pair in pairs]
        return window.num_tokens * max(sum(layers[stage.start : stage.stop]) for stage in self.stages)

    def bf16_bytes_per_token(self) -> int:
        """The bytes of one token of the unquantized cache."""
        return self.bytes_per_token([PrecisionPair(16, 16)] * self.stages[-1].stop)
