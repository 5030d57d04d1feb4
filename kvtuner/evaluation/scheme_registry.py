"""The schemes that a user can name, made for a model once they are named: registered ones, and uniform pairs of bits.

A new scheme is a child of `CacheScheme` in a module of its own, and a line here (docs/architecture.md). Knows nothing
of how a scheme stores a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtuner.errors import OptionError, PrecisionError
from kvtuner.evaluation.cache_scheme import (
    KEYS_PER_CHANNEL,
    SYMMETRIC,
    CacheScheme,
    Fp8Scheme,
    ProfileScheme,
    UnquantizedScheme,
)
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME
from kvtuner.exported_configs.scheme_names import BEST_UNIFORM, FP8, REFERENCE
from kvtuner.precision import KIVI_TOKENS, NATIVE_BITS, NO_WINDOW, WHOLE_HEADS, ExactWindow, PrecisionPair, ScaleLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry

_FACTORIES: Final[dict[str, Callable[[ModelGeometry], CacheScheme]]] = {}


def register_scheme(name: str, make: Callable[[ModelGeometry], CacheScheme]) -> None:
    """Add a scheme under a name that a user gives; the factory makes it for a model of a geometry."""
    assert name not in _FACTORIES, f"there is a scheme {name} already"
    _FACTORIES[name] = make


def named_scheme(text: str, shape: ModelShape) -> CacheScheme:
    """The scheme that a word names: a registered one, or a uniform pair such as ``K8V8`` or ``K4V4-symmetric``.

    A pair is without transforms, and asymmetric and per token where it does not say otherwise; keys of
    ``K4V4-per-channel`` are stored as by KIVI. `PrecisionError` for any other word, and `OptionError` for such latents.
    """
    if text in _FACTORIES:
        return _FACTORIES[text](shape.geometry)
    is_symmetric, is_per_channel = text.endswith(SYMMETRIC), text.endswith(KEYS_PER_CHANNEL)
    word = text.removesuffix(SYMMETRIC).removesuffix(KEYS_PER_CHANNEL)
    try:
        pair = PrecisionPair.parse(word)
    except PrecisionError as error:
        raise PrecisionError(f"{text} is no scheme to store a cache, such as fp8 or K8V8: {error}") from error
    if NATIVE_BITS in (pair.k_bits, pair.v_bits) and pair.k_bits == pair.v_bits:
        raise PrecisionError(f"{text} is the unquantized cache, which everything is compared with anyway")
    if is_per_channel and shape.geometry.is_latent:
        raise OptionError(f"{text} is of keys, but this model caches latents; leave it out")
    identity = identity_of(shape.config, id="model", revision=None, dtype="bfloat16")
    profile = uniform_profile(
        shape.cache,
        pair,
        identity,
        k_layout=ScaleLayout(KIVI_TOKENS, granularity="per_channel") if is_per_channel else WHOLE_HEADS,
        symmetric=is_symmetric,
        window=ExactWindow(KIVI_TOKENS) if is_per_channel else NO_WINDOW,
    )
    name = f"{pair}{KEYS_PER_CHANNEL if is_per_channel else ''}{SYMMETRIC if is_symmetric else ''}"
    return ProfileScheme.of(name, profile)


def named_schemes(
    names: Sequence[str],
    shape: ModelShape,
    profile: Profile,
    file: Path | None = None,
    best_uniform: CacheScheme | None = None,
) -> list[CacheScheme]:
    """The schemes that words name, each once.

    `PROFILE_SCHEME` names the profile, `BEST_UNIFORM` the scheme that is given, others what `named_scheme` knows.
    """
    schemes: list[CacheScheme] = []
    for name in names:
        if name == BEST_UNIFORM and best_uniform is not None:
            schemes.append(best_uniform)
        elif name == PROFILE_SCHEME:
            schemes.append(ProfileScheme.of(name, profile, file))
        else:
            schemes.append(named_scheme(name, shape))
    full_names = [scheme.name for scheme in schemes]
    if twice := [name for name in full_names if full_names.count(name) > 1]:
        raise PrecisionError(f"{twice[0]} is asked twice; name every scheme once, {REFERENCE} is there anyway")
    return schemes


register_scheme(REFERENCE, UnquantizedScheme.of)
register_scheme(FP8, Fp8Scheme.of)
