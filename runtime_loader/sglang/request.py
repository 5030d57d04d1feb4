"""What a server was asked to serve, as it travels to its processes. Imports nothing heavy: every SGLang start runs it.

The launcher's flags become one environment variable that spawned schedulers inherit; each of them reads the profile
itself, ranks compare its digest, and the launcher hears it from each before it serves.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from kvtuner.errors import ServingError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, MutableMapping

Attend = Literal["fresh", "cache"]

ATTENDS: Final = get_args(Attend)
PROFILE_VARIABLE: Final = "KVTUNER_PROFILE"
ATTEND_VARIABLE: Final = "KVTUNER_ATTEND"
REQUEST_VARIABLE: Final = "KVTUNER_SERVING"


@dataclass(frozen=True, slots=True)
class Uniform:
    """The uniform flags, spelled as the launcher spells them."""

    nbits_key: int = 4
    nbits_value: int = 4
    asym: bool = False
    q_group_size: int = 64


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """What to serve.

    Attributes:
        profile: path of a profile; None with `uniform`.
        uniform: widths of a profile that is built for the model.
        attend: whether a chunk reads itself exactly (``fresh``) or as it was stored (``cache``).
        from_launcher: asked for by flags: a refusal then ends the process in one line.
    """

    profile: str | None
    uniform: Uniform | None = None
    attend: Attend = "fresh"
    from_launcher: bool = False

    def to_environment(self, environ: MutableMapping[str, str]) -> None:
        """Leave the request for the processes that this one starts."""
        environ[REQUEST_VARIABLE] = json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ServingRequest | None:
        """The launcher's request, or the one that the user's own variables make; None without either.

        Raises:
            ServingError: a variable that says something else.
        """
        stored = environ.get(REQUEST_VARIABLE)
        if stored:
            try:
                fields = json.loads(stored)
                uniform, attend = fields.pop("uniform"), _attend({ATTEND_VARIABLE: fields.pop("attend")})
                return cls(**fields, uniform=Uniform(**uniform) if uniform else None, attend=attend)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ServingError(f"{REQUEST_VARIABLE} cannot be read ({error}); unset it") from error
        path = environ.get(PROFILE_VARIABLE)
        return cls(os.path.abspath(path), attend=_attend(environ)) if path else None


def _attend(environ: Mapping[str, str]) -> Attend:
    attend = environ.get(ATTEND_VARIABLE) or "fresh"
    if attend not in ATTENDS:
        raise ServingError(f"{ATTEND_VARIABLE} must be one of {', '.join(ATTENDS)}, not {attend!r}")
    return cast("Attend", attend)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser."""
    group = parser.add_argument_group("kvtuner", "per-layer quantized KV cache")
    group.add_argument(
        "--kvtuner-profile",
        metavar="PATH",
        help=f"serve the KV cache at this profile's per-layer precision (also: {PROFILE_VARIABLE})",
    )
    group.add_argument(
        "--kvtuner-attend",
        choices=ATTENDS,
        help="what a chunk of new tokens reads of itself: its exact keys and values (fresh, the default), or what was"
        " stored, which makes answers independent of chunks and cache hits (cache)",
    )
    group.add_argument(
        "--enable-kvtuner-quant", action="store_true", help="without a profile: the same bits in every layer"
    )
    widths = (2, 4, 8)
    group.add_argument("--kvtuner-nbits-key", type=int, choices=widths, help="uniform bits of keys (default 4)")
    group.add_argument("--kvtuner-nbits-value", type=int, choices=widths, help="uniform bits of values (default 4)")
    group.add_argument(
        "--kvtuner-asym", choices=("true", "false"), help="asymmetric quantization (default false: symmetric)"
    )
    group.add_argument("--kvtuner-axis-key", type=int, help="0: per token (default); 1, per channel, is refused")
    group.add_argument("--kvtuner-axis-value", type=int, help="0: per token (default); 1, per channel, is refused")
    group.add_argument("--kvtuner-q-group-size", type=int, help="channels per scale (default 64)")
    group.add_argument("--kvtuner-residual-length", type=int, help="0 (default); more is refused")


_UNIFORM_FLAGS: Final = {
    "kvtuner_nbits_key": "--kvtuner-nbits-key",
    "kvtuner_nbits_value": "--kvtuner-nbits-value",
    "kvtuner_asym": "--kvtuner-asym",
    "kvtuner_axis_key": "--kvtuner-axis-key",
    "kvtuner_axis_value": "--kvtuner-axis-value",
    "kvtuner_q_group_size": "--kvtuner-q-group-size",
    "kvtuner_residual_length": "--kvtuner-residual-length",
}


def request_of_flags(args: argparse.Namespace, environ: Mapping[str, str]) -> ServingRequest | None:
    """What the launcher's flags, and without them the user's variables, ask for; None if nothing.

    Raises:
        ServingError: flags that contradict each other or ask for what no pool can hold.
    """
    given = {name: getattr(args, name) for name in _UNIFORM_FLAGS if getattr(args, name) is not None}
    if given and not args.enable_kvtuner_quant:
        raise ServingError(f"{_UNIFORM_FLAGS[min(given)]} needs --enable-kvtuner-quant; add it, or drop the flag")
    if args.enable_kvtuner_quant and args.kvtuner_profile:
        raise ServingError("--enable-kvtuner-quant and --kvtuner-profile exclude each other; drop one of them")
    uniform = _uniform(given) if args.enable_kvtuner_quant else None
    path = args.kvtuner_profile or environ.get(PROFILE_VARIABLE)
    if uniform is None and not path:
        if args.kvtuner_attend:
            raise ServingError("--kvtuner-attend needs --kvtuner-profile or --enable-kvtuner-quant; add one")
        return None
    attend = args.kvtuner_attend or _attend(environ)
    profile = os.path.abspath(path) if uniform is None and path else None
    return ServingRequest(profile, uniform, attend, from_launcher=True)


def _uniform(given: dict[str, object]) -> Uniform:
    for name in ("kvtuner_axis_key", "kvtuner_axis_value"):
        if given.get(name, 0) != 0:
            flag = _UNIFORM_FLAGS[name]
            raise ServingError(
                f"{flag} {given[name]} is per-channel quantization, which needs tail pages that no pool has yet;"
                f" {flag} 0 works"
            )
    if given.get("kvtuner_residual_length", 0) != 0:
        raise ServingError(
            f"--kvtuner-residual-length {given['kvtuner_residual_length']} needs tail pages that no pool has yet;"
            " --kvtuner-residual-length 0 works"
        )
    fields = {
        name.removeprefix("kvtuner_"): value
        for name, value in given.items()
        if name not in ("kvtuner_axis_key", "kvtuner_axis_value", "kvtuner_residual_length", "kvtuner_asym")
    }
    return Uniform(asym=given.get("kvtuner_asym") == "true", **fields)  # type: ignore[arg-type]
