"""What this process serves, from the request to the pool: set up once, refused in one line."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtuner.cache_kind import refuse_other_caches
from kvtuner.errors import KVTunerError, ServingError
from kvtuner.exported_configs.identity.mismatch import Policy, compare, refuse
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import choose
from kvtuner.exported_configs.sharing.reference import FileReference, check_digest, parse_reference
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.model_check import calibrated_positions, check_model
from kvtuner.runtime_loader.sglang.compat import args as seam
from kvtuner.runtime_loader.sglang.compat.hooks import check_alone
from kvtuner.runtime_loader.sglang.compat.model import model_config_of, refuse_other_pools
from kvtuner.runtime_loader.sglang.compat.processes import on_ready, on_scheduler
from kvtuner.runtime_loader.sglang.compat.versions import check_version
from kvtuner.runtime_loader.sglang.option_rules import refuse_flags
from kvtuner.runtime_loader.sglang.profile_location import budget_of, is_auto, pin_of, pinned
from kvtuner.runtime_loader.sglang.request import ALLOW_FLAG, PROFILE_VARIABLE, REQUEST_VARIABLE, STRICT_FLAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtuner.exported_configs.profile.evidence import ModelIdentity
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.runtime_loader.sglang.request import Attend, ServingRequest

PROFILE_KEY: Final = "kvtuner_profile"
"""Under which a scheduler tells its launcher, and a server at `/server_info` everybody, the digest that it serves."""
READS_KEY: Final = "kvtuner_reads"
"""Under which it tells what a chunk reads of itself: ``fresh``, ``cache``, or ``below`` where the device is exact."""

logger: Final = logging.getLogger("kvtuner")


@dataclass(frozen=True, slots=True)
class Serving:
    """A request with its profile at hand.

    Attributes:
        request: what was asked for.
        loaded: the profile of a request that names one.
    """

    request: ServingRequest
    loaded: Profile | None

    @property
    def attend(self) -> Attend:
        """What a chunk reads of itself."""
        return self.request.attend

    def profile(self, model_config: Any) -> Profile:
        """The profile to serve a model with, of the same geometry.

        Args:
            model_config: SGLang's.

        Raises:
            UnsupportedModelError: a model without a plain KV cache.
            ProfileError: a profile of another model.
            PrecisionError: uniform flags that this model's heads cannot have.
        """
        config = model_config.hf_config
        refuse_other_caches(config, context_length=model_config.context_len)
        refuse_other_pools(model_config)
        if self.loaded is not None:
            check_model(self.loaded, config)
            return self.loaded
        uniform = self.request.uniform
        assert uniform is not None
        return uniform_profile(
            ModelGeometry.from_config(config),
            PrecisionPair(uniform.nbits_key, uniform.nbits_value),
            _identity(model_config),
            k_group_size=uniform.q_group_size,
            v_group_size=uniform.q_group_size,
            symmetric=not uniform.asym,
        )


_active: Serving | None = None
_checked_digest: str | None = None
_hooked: set[str] = set()


def active() -> Serving:
    """What this process serves.

    Raises:
        ServingError: nothing was asked for.
    """
    if _active is None:
        raise ServingError("no profile is active in this process")
    return _active


def activate(request: ServingRequest) -> None:
    """Prepare this process, a launcher or a scheduler, to serve a request.

    Raises:
        KVTunerError: an SGLang that does not fit, or a profile that cannot be read.
    """
    global _active, _checked_digest
    check_version()
    loaded = _load(request)
    _once("resolution", lambda: seam.on_resolution(_choose_backend, _check))
    _once("scheduler", lambda: on_scheduler(_start_scheduler))
    _active, _checked_digest = Serving(request, loaded), None


def _load(request: ServingRequest) -> Profile | None:
    """The profile that a request names; None of one that is built for the model, or chosen for it."""
    if request.profile is None:
        return None
    if is_auto(request.profile):
        if request.signed_by is not None:
            raise ServingError(
                f"--kvtuner-profile {request.profile} and a required signature exclude each other: the catalogue comes"
                " with kvtuner and is not signed apart from it; drop one of them"
            )
        return None
    named = parse_reference(request.profile)
    assert isinstance(named, FileReference)  # by `locate`
    if request.signed_by is None:
        profile = load_profile(named.path)
    else:
        from kvtuner.exported_configs.signing.signatures import SignerIdentity, load_verified

        profile = load_verified(named.path, SignerIdentity.parse(request.signed_by))
    check_digest(profile.digest, named.digest, str(named.path))
    return profile


def _choose(request: ServingRequest, model: ModelIdentity) -> Serving:
    """Serve the catalogue's profile for a model in place of ``auto``, here and in the processes that this one starts.

    Raises:
        ProfileError: the catalogue has none, or not the one that was pinned.
    """
    global _active
    assert request.profile is not None
    path = choose(model, budget_of(request.profile))
    profile = load_profile(path)
    check_digest(profile.digest, pin_of(request.profile), request.profile)
    request = replace(request, profile=pinned(str(path), profile.digest))
    if os.environ.get(REQUEST_VARIABLE):
        request.to_environment(os.environ)
    else:
        os.environ[PROFILE_VARIABLE] = request.profile or ""
    _active = Serving(request, profile)
    return _active


def _once(name: str, hook: Callable[[], None]) -> None:
    if name not in _hooked:
        hook()
        _hooked.add(name)


def exchange(serving: Serving | None) -> Serving | None:
    """Let this process serve something else, or nothing, from now on; gives what it served until now."""
    global _active
    before, _active = _active, serving
    return before


def _choose_backend(server_args: Any) -> None:
    if _active is None:
        return
    _once("ready", lambda: on_ready(_hear))
    if _active.request.hicache_only:
        return
    with refusing():
        for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
            chosen = getattr(server_args, name)  # what the user asked for, whatever SGLang made of it
            if chosen not in (None, "triton"):
                flag = f"--{name.replace('_', '-')}"
                raise ServingError(f"{flag} {chosen} cannot read a packed KV pool; drop it, or use {flag} triton")
        seam.decide(server_args, attention_backend="triton")


def _hear(schedulers: list[dict[str, Any]]) -> None:
    """A scheduler that did not load the plugin would serve unquantized, and knows nothing of it."""
    if _active is None:
        return
    with refusing():
        for number, said in enumerate(schedulers):
            if PROFILE_KEY not in said:
                raise ServingError(
                    f"scheduler {number} does not serve the profile: its process did not load SGLang's plugin kvtuner;"
                    " install kvtuner where the server runs, and unset SGLANG_PLUGINS or name kvtuner in it"
                )
            if _checked_digest is None:
                raise ServingError("SGLang resolved its arguments before the profile was asked for; ask for it first")
            if said[PROFILE_KEY] != _checked_digest:
                raise ServingError(
                    f"scheduler {number} serves {said[PROFILE_KEY]}, but the launcher checked {_checked_digest}: the"
                    " file changed meanwhile; start again"
                )


def _check(server_args: Any) -> None:
    global _checked_digest
    if _active is None:
        return
    with refusing():
        check_alone()
        arguments = seam.resolved(server_args)
        _refuse(arguments)
        serving = active()
        model_config = model_config_of(server_args)
        if serving.request.profile is not None and is_auto(serving.request.profile):
            serving = _choose(serving.request, _identity(model_config))
        profile = serving.profile(model_config)
        profile.row_shape(arguments.tp_size // arguments.attn_dp_size)  # refuses heads that cannot be split so
        _checked_digest = profile.digest
        if serving.request.uniform is None:
            logger.info("kvtuner: serving %s", serving.request.profile)
            _compare(serving.request, profile, model_config)


def _refuse(arguments: Any) -> None:
    refuse_flags(arguments, hicache_only=active().request.hicache_only)
    if arguments.enable_hierarchical_cache and arguments.hicache_storage_backend is not None:
        # Not above: what a server without storage does not need.
        from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import extra_config
        from kvtuner.runtime_loader.sglang.hicache.checked_storage import check_storage

        check_storage(arguments.hicache_storage_backend, extra_config(arguments.hicache_storage_backend_extra_config))


def _compare(request: ServingRequest, profile: Profile, model_config: Any) -> None:
    """Say once, in the launcher, what differs between the profile's model and the served one.

    Raises:
        ProfileError: what differs too much.
    """
    policy = Policy(request.strict, request.allow_derived, STRICT_FLAG, ALLOW_FLAG)
    mismatches = compare(
        profile.model,
        _identity(model_config),
        policy,
        positions=calibrated_positions(profile),
        context_length=model_config.context_len,
    )
    refuse(mismatches)
    for each in mismatches:
        log = logger.warning if each.severity == "warning" else logger.info
        log("kvtuner: %s", each.text)


def _identity(model_config: Any) -> ModelIdentity:
    """The model that SGLang serves."""
    return identity_of(
        model_config.hf_config,
        id=model_config.model_path,
        revision=model_config.revision,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantized_by=model_config.quantization,
        files=model_config.model_path,
    )


def _start_scheduler(server_args: Any) -> None:
    if _active is None:
        return
    with refusing():
        check_alone()
        # Imports what only a scheduler needs: its pools and attention.
        from kvtuner.runtime_loader.sglang.scheduler import install

        arguments = seam.resolved(server_args)
        _refuse(arguments)  # again: some are decided after all resolution hooks
        below = active().request.hicache_only
        if below:
            # Otherwise SGLang, by write_back, gives up host pages whose device copy, read back from them, would be
            # quantized again.
            os.environ["SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM"] = "1"
        install(packed=not below, tiers=arguments.enable_hierarchical_cache)


@contextmanager
def refusing() -> Iterator[None]:
    """End a launched server with one line where its profile cannot be served; an engine's process gets the error.

    Around our own code only: an error of SGLang's own is SGLang's to report.
    """
    try:
        yield
    except (KVTunerError, ImportError) as error:
        if _active is not None and not _active.request.from_launcher:
            raise
        raise SystemExit(f"kvtuner: {error}") from None
