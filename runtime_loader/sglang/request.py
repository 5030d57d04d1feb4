"""The request to serve a profile, as it travels to a server's processes.

Imports nothing heavy: every SGLang start runs it. The launcher's flags become one environment variable that spawned
schedulers inherit; each of them reads the profile itself, ranks compare its digest, and the launcher hears it from each
before it serves.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import PrecisionError, ServingError
from kvtuner.precision import PACKED_BITS, ExactWindow, Granularity
from kvtuner.read_plan_names import ATTENDS, Attend

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

PROFILE_VARIABLE: Final = "KVTUNER_PROFILE"
ATTEND_VARIABLE: Final = "KVTUNER_ATTEND"
SIGNATURE_VARIABLE: Final = "KVTUNER_REQUIRE_SIGNATURE"
REQUEST_VARIABLE: Final = "KVTUNER_SERVING"
STRICT_FLAG: Final = "--kvtuner-strict"
ALLOW_FLAG: Final = "--kvtuner-allow-derived"
OWN_STORAGES: Final = ("juicefs", "lmcache")
"""Names that SGLang's parser does not know: one works, one is refused with the reason."""
_SWITCHES: Final = {
    "hicache_only": "leave the device pool as it is, and store by the profile what moves to host and storage",
    "strict": "refuse a model that differs in anything from the one that was searched, in what is otherwise warned of",
    "allow_derived": "serve a fine-tune, or another configuration of the same geometry, with a warning",
}
"""The help of the switches of profiles, by their fields: strict is --kvtuner-strict and KVTUNER_STRICT."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """The uniform flags, spelled as the launcher spells them."""

    nbits_key: int = 4
    nbits_value: int = 4
    asym: bool = False
    q_group_size: int = 64
    residual_length: int = 0
    sinks: int = 0
    axis_key: int = 0

    @property
    def k_granularity(self) -> Granularity:
        """The granularity of keys."""
        return "per_channel" if self.axis_key else "per_token"


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """The profile to serve and how, by the arguments of `engine`.

    Attributes:
        profile: The name of a profile, its path once it is located; None with `uniform`.
        uniform: The widths of a profile that is built for the model.
        from_launcher: Whether flags asked for it: a refusal then ends the process in one line.
    """

    profile: str | None
    uniform: Uniform | None = None
    attend: Attend = "fresh"
    from_launcher: bool = False
    hicache_only: bool = False
    strict: bool = False
    allow_derived: bool = False
    signed_by: str | None = None

    def __post_init__(self) -> None:
        if self.strict and self.allow_derived:
            raise ServingError(f"{STRICT_FLAG} and {ALLOW_FLAG} exclude each other; drop one of them")
        if self.hicache_only and self.attend != "fresh":
            raise ServingError(
                "--kvtuner-attend is a choice of packed device pools; with one in the model's dtype a chunk reads"
                " itself exactly: drop it"
            )

    def to_environment(self, environ: MutableMapping[str, str]) -> None:
        """Leave the request for the processes that this one starts."""
        environ[REQUEST_VARIABLE] = json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ServingRequest | None:
        """Return the launcher's request, or the one that the user's own variables make; None without either."""
        stored = environ.get(REQUEST_VARIABLE)
        # The launcher's request is first: the user's variables are inherited by schedulers too.
        if stored:
            try:
                fields = json.loads(stored)
                uniform, attend = fields.pop("uniform"), _attend({ATTEND_VARIABLE: fields.pop("attend")})
                return cls(**fields, uniform=Uniform(**uniform) if uniform else None, attend=attend)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ServingError(f"{REQUEST_VARIABLE} cannot be read ({error}); unset it") from error
        path = environ.get(PROFILE_VARIABLE)
        if not path:
            return None
        switches: dict[str, Any] = {name: _is_set(environ, name) for name in _SWITCHES}
        return cls(path, attend=_attend(environ), signed_by=environ.get(SIGNATURE_VARIABLE) or None, **switches)


def _attend(environ: Mapping[str, str]) -> Attend:
    attend = environ.get(ATTEND_VARIABLE) or "fresh"
    if attend not in ATTENDS:
        raise ServingError(f"{ATTEND_VARIABLE} must be one of {', '.join(ATTENDS)}, not {attend!r}")
    return attend


def _variable(switch: str) -> str:
    return f"KVTUNER_{switch.upper()}"


def _is_set(environ: Mapping[str, str], switch: str) -> bool:
    text = environ.get(_variable(switch)) or "0"
    if text not in ("0", "1"):
        raise ServingError(f"{_variable(switch)} must be 0 or 1, not {text!r}")
    return text == "1"


def _flag(switch: str) -> str:
    return f"--kvtuner-{switch.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser, and to its own flags our storages and one more name."""
    group = parser.add_argument_group("kvtuner", "per-layer quantized KV cache")
    group.add_argument(
        "--kvtuner-profile",
        metavar="PROFILE",
        help="serve the KV cache at this profile's per-layer precision: a file, a run folder,"
        " owner/name[@revision][:path] of the hub, catalogue:name, or auto[:BUDGET] for the catalogue's profile of the"
        f" served model; #sha256:... pins its digest (also: {PROFILE_VARIABLE})",
    )
    group.add_argument(
        "--kvtuner-require-signature",
        metavar="IDENTITY",
        help="serve the profile only if it is signed by key:PUBLIC.pem, chain:ROOT.pem or sigstore:NAME,ISSUER (also:"
        f" {SIGNATURE_VARIABLE})",
    )
    group.add_argument(
        "--kvtuner-attend",
        choices=ATTENDS,
        help="what a chunk of new tokens reads of itself: its exact keys and values (fresh, the default), or what was"
        " stored, which makes answers independent of chunks and cache hits (cache)",
    )
    for flags in UNIFORM_FLAGS:
        group.add_argument(flags.switch, action="store_true", help=flags.what)
        for name, how in _WIDTHS.items():
            group.add_argument(flags.flag(name), **how)
    for name, what in _SWITCHES.items():
        text = f"with --kvtuner-profile: {what} (also: {_variable(name)}=1)"
        group.add_argument(_flag(name), action="store_true", help=text)
    parser.add_argument(
        "--hicache-storage-backend-config",
        dest="hicache_storage_backend_extra_config",
        default=argparse.SUPPRESS,
        help="the same as --hicache-storage-backend-extra-config",
    )
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and action.choices is not None:
            action.choices = [*action.choices, *OWN_STORAGES]


@dataclass(frozen=True, slots=True)
class UniformFlags:
    """Flags that ask for the same widths in every layer, named by a prefix; all others need `switch`."""

    switch: str
    prefix: str
    what: str
    hicache_only: bool

    def flag(self, name: str) -> str:
        """Return one of these flags, such as ``--kvtuner-nbits-key`` for nbits_key."""
        return f"--{self.prefix}-{name.replace('_', '-')}"

    def options(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the flags that the user set, by the names of `_WIDTHS`."""
        prefix = self.prefix.replace("-", "_")
        values = {name: getattr(args, f"{prefix}_{name}") for name in _WIDTHS}
        return {name: value for name, value in values.items() if value is not None}


UNIFORM_FLAGS: Final = (
    UniformFlags("--enable-kvtuner-quant", "kvtuner", "without a profile: the same bits in every layer", False),
    UniformFlags(
        "--enable-kvtuner-hicache",
        "kvtuner-hicache",
        "without a profile: leave the device pool as it is, and store at the same bits in every layer what moves to"
        " host and storage; needs --enable-hierarchical-cache",
        True,
    ),
)

_WIDTHS: Final[dict[str, dict[str, Any]]] = {
    "nbits_key": {"type": int, "choices": PACKED_BITS, "help": "uniform bits of keys (default 4)"},
    "nbits_value": {"type": int, "choices": PACKED_BITS, "help": "uniform bits of values (default 4)"},
    "asym": {
        "nargs": "?",
        "const": "true",
        "choices": ("true", "false"),
        "help": "asymmetric quantization (default false: symmetric)",
    },
    "axis_key": {"type": int, "help": "0: per token (default); 1: per channel, as KIVI's keys"},
    "axis_value": {"type": int, "help": "0: per token (default); 1, per channel, is refused"},
    "q_group_size": {"type": int, "help": "channels per scale, of keys per channel tokens (default 64)"},
    "residual_length": {
        "type": int,
        "help": "last tokens of a request that are also kept exactly (default 0; with keys per channel their group)",
    },
    "sinks": {"type": int, "help": "first tokens of a request that are also kept exactly (default 0)"},
}


def request_of_flags(args: argparse.Namespace, environ: Mapping[str, str]) -> ServingRequest | None:
    """Return what flags, or else the user's variables, ask for, None if nothing; `ServingError` if it cannot be."""
    flags = _uniform_flags(args)
    path = None if flags else args.kvtuner_profile or environ.get(PROFILE_VARIABLE) or None
    switches = {name: _set_by(args, environ, name) for name in _SWITCHES}
    signed_by = args.kvtuner_require_signature or environ.get(SIGNATURE_VARIABLE) or None
    signature = "--kvtuner-require-signature" if args.kvtuner_require_signature else SIGNATURE_VARIABLE
    of_profiles = next(filter(None, switches.values()), signature if signed_by else "")
    if flags is None and path is None:
        _refuse_without_a_profile(args, of_profiles)
        return None
    if flags is not None and of_profiles:
        raise ServingError(f"{of_profiles} needs --kvtuner-profile, not {flags.switch}; drop one of them")
    fields: dict[str, Any] = {name: bool(source) for name, source in switches.items()}
    if flags is not None:
        fields["hicache_only"] = flags.hicache_only
    attend = args.kvtuner_attend or _attend(environ)
    uniform = _uniform(flags, flags.options(args)) if flags else None
    return ServingRequest(path, uniform, attend, from_launcher=True, signed_by=signed_by, **fields)


def _uniform_flags(args: argparse.Namespace) -> UniformFlags | None:
    switches: list[str] = ["--kvtuner-profile"] if args.kvtuner_profile else []
    flags = None
    for candidate in UNIFORM_FLAGS:
        options = candidate.options(args)
        if getattr(args, candidate.switch.removeprefix("--").replace("-", "_")):
            switches.append(candidate.switch)
            flags = candidate
        elif options:
            raise ServingError(f"{candidate.flag(min(options))} needs {candidate.switch}; add it, or drop the flag")
    if len(switches) > 1:
        raise ServingError(f"{switches[0]} and {switches[1]} exclude each other; drop one of them")
    return flags


def _set_by(args: argparse.Namespace, environ: Mapping[str, str], switch: str) -> str:
    # The flag or variable that sets the switch, to be named in a refusal.
    if getattr(args, f"kvtuner_{switch}"):
        return _flag(switch)
    return f"{_variable(switch)}=1" if _is_set(environ, switch) else ""


def _refuse_without_a_profile(args: argparse.Namespace, of_profiles: str) -> None:
    if args.kvtuner_attend:
        raise ServingError("--kvtuner-attend needs --kvtuner-profile or --enable-kvtuner-quant; add one")
    if of_profiles:
        raise ServingError(f"{of_profiles} needs --kvtuner-profile; add it, or leave this out")
    storage = getattr(args, "hicache_storage_backend", None)
    if storage in OWN_STORAGES:
        raise ServingError(
            f"--hicache-storage-backend {storage} is for quantized pages: add --kvtuner-profile or"
            " --enable-kvtuner-hicache, or use --hicache-storage-backend file"
        )


def _uniform(flags: UniformFlags, options: dict[str, Any]) -> Uniform:
    _check_axes(flags, options)
    for name in ("residual_length", "sinks"):
        if flags.hicache_only and options.get(name):
            raise ServingError(
                f"{flags.flag(name)} {options[name]} would keep tokens of a page apart from it; the device pool holds"
                f" what was not moved exactly as it is; {flags.flag(name)} 0 works"
            )
    try:
        ExactWindow(options.get("residual_length", 0), options.get("sinks", 0))
    except PrecisionError as error:
        raise ServingError(f"{flags.flag('residual_length')} and {flags.flag('sinks')}: {error}") from None
    return Uniform(asym=options.pop("asym", "false") == "true", **options)


def _check_axes(flags: UniformFlags, options: dict[str, Any]) -> None:
    """Refuse axes that do not work, and give keys per channel the exact tokens that they need."""
    axis, flag = options.pop("axis_value", 0), flags.flag("axis_value")
    if axis != 0:
        raise ServingError(f"{flag} {axis}: values are stored per token, as by KIVI; {flag} 0 works")
    axis, flag = options.get("axis_key", 0), flags.flag("axis_key")
    if axis not in (0, 1):
        raise ServingError(f"{flag} must be 0, per token, or 1, per channel, not {axis}")
    if axis and flags.hicache_only:
        raise ServingError(f"{flag} 1: what moves to host and storage is stored per token; {flag} 0 works")
    group = options.get("q_group_size", Uniform().q_group_size)
    if axis and options.setdefault("residual_length", group) < group:
        raise ServingError(
            f"{flag} 1 keeps tokens exactly until their group of {group} is full:"
            f" {flags.flag('residual_length')} must be {group} or more, not {options['residual_length']}"
        )
