"""Ways to store a model's cache that are asked the same: unquantized, a profile, uniforms, fp8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from transformers import DynamicCache

from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.errors import PrecisionError
from kvtuner.evaluation.validation import FP8, Contestant, fp8_contestant, reference_contestant
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.precision import NATIVE_BITS, PrecisionPair
from kvtuner.runtime_loader.model_check import check_model
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.exported_configs.profile.evidence import ReadPlan
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry

REFERENCE: Final = "bf16"
SYMMETRIC: Final = "-symmetric"


@dataclass(frozen=True, slots=True)
class Subject:
    """A way to store the cache.

    Attributes:
        name: such as ``profile``, ``K8V8``, ``fp8``; the unquantized one is `REFERENCE`.
        profile: None for the unquantized cache and for fp8.
        contestant: how its teacher-forced scores are simulated.
        bytes_per_token: on one rank that holds all heads.
    """

    name: str
    profile: Profile | None
    contestant: Contestant
    bytes_per_token: int

    def cache(self, config: Any, read_plan: ReadPlan, context_length: int) -> Any:
        """An empty transformers cache that stores this way, for so many tokens.

        Raises:
            UnsupportedModelError: layers whose cache is not one key and value per token and head.
            ProfileError: the profile belongs to another model.
        """
        if self.profile is not None:
            check_model(self.profile, config, context_length=context_length)
            return KVTunerCache.stored_by(self.profile, read_plan)
        if self.name == FP8:
            return KVTunerCache.fp8(config, read_plan, context_length=context_length)
        return DynamicCache(config=config)


def of_profile(name: str, profile: Profile) -> Subject:
    """A profile."""
    layers = range(len(profile.pairs))
    specs = {layer: LayerSpec(profile.quant_spec(layer, "k"), profile.quant_spec(layer, "v")) for layer in layers}
    transforms = any(profile.transform_name(layer, side) != "none" for layer in layers for side in ("k", "v"))
    contestant = Contestant(name, transforms, profile.pairs, specs, profile.digest)
    return Subject(name, profile, contestant, profile.bytes_per_token())


def named(text: str, shape: ModelShape) -> Subject:
    """The way that a word names: ``bf16``, ``fp8``, or a uniform pair such as ``K8V8`` or ``K4V4-symmetric``.

    A pair is without transforms, and asymmetric where it does not say otherwise.

    Raises:
        PrecisionError: none of these.
    """
    geometry: ModelGeometry = shape.geometry
    if text == REFERENCE:
        return Subject(text, None, reference_contestant(geometry.num_layers), geometry.bf16_bytes_per_token())
    if text == FP8:
        half = geometry.bf16_bytes_per_token() // 2
        return Subject(text, None, fp8_contestant(geometry.num_layers), half)
    word, symmetric = text.removesuffix(SYMMETRIC), text.endswith(SYMMETRIC)
    try:
        pair = PrecisionPair.parse(word)
    except PrecisionError as error:
        raise PrecisionError(f"{text} is no way to store a cache, such as fp8 or K8V8: {error}") from error
    if NATIVE_BITS in (pair.k_bits, pair.v_bits) and pair.k_bits == pair.v_bits:
        raise PrecisionError(f"{text} is the unquantized cache, which everything is compared with anyway")
    identity = identity_of(shape.config, id="model", revision=None, dtype="bfloat16")
    name = f"{pair}{SYMMETRIC if symmetric else ''}"
    return of_profile(name, uniform_profile(geometry, pair, identity, symmetric=symmetric))
