"""A request in force: this process is hooked, the launcher checks everything once and refuses in one line."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.exported_configs.identity.mismatch import Policy, compare_models, refuse
from kvtuner.precision import NO_WINDOW
from kvtuner.runtime_loader.model_check import calibrated_positions
from kvtuner.runtime_loader.sglang.compat.differences import answer_as_transformers, refuse_ordered_channels
from kvtuner.runtime_loader.sglang.compat.hooks import check_alone
from kvtuner.runtime_loader.sglang.compat.lmcache import check_lmcache
from kvtuner.runtime_loader.sglang.compat.model import has_index, keeps_states, model_config_of, reading_both_ways
from kvtuner.runtime_loader.sglang.compat.processes import (
    decide,
    on_ready,
    on_resolution,
    on_scheduler,
    resolved,
)
from kvtuner.runtime_loader.sglang.compat.releases import release_rules
from kvtuner.runtime_loader.sglang.loaded_request import LoadedRequest, identity_of_model
from kvtuner.runtime_loader.sglang.options.option_refusals import (
    has_adapters,
    refuse_beside_other_layers,
    refuse_beside_per_channel,
    refuse_flags,
    refuse_of_images,
    refuse_of_index,
    refuse_of_latents,
    refuse_place_of_index,
)
from kvtuner.runtime_loader.sglang.options.option_rules import (
    INDEX_BACKEND,
    INDEX_KERNELS,
    METADATA_BACKEND,
    ROLES,
    backend_rules,
)
from kvtuner.runtime_loader.sglang.process_state import PROFILE_KEY, READS_KEY, WINDOW_KEY, process_state, refusing
from kvtuner.runtime_loader.sglang.request import ALLOW_FLAG, STRICT_FLAG

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.runtime_loader.sglang.request import ServingRequest

logger: Final = logging.getLogger("kvtuner")


def activate(request: ServingRequest) -> None:
    """Prepare this process, a launcher or a scheduler, to serve a request."""
    release_rules()
    loaded, state = LoadedRequest.of(request), process_state()
    state.hook_once("resolution", lambda: on_resolution(_choose_backend, _check))
    state.hook_once("scheduler", lambda: on_scheduler(_start_scheduler, _of_replicas))
    state.loaded_request, state.checked_digest = loaded, None


def _choose_backend(server_args: Any) -> None:
    state = process_state()
    if state.loaded_request is None:
        return
    state.hook_once("ready", lambda: on_ready(_compare_digests))
    if state.loaded_request.request.hicache_only:
        return
    with refusing():
        indexed = has_index(model_config_of(server_args))
        backend = INDEX_BACKEND if indexed else METADATA_BACKEND
        for rule in (*backend_rules(backend), *(INDEX_KERNELS if indexed else ())):
            chosen = getattr(server_args, rule.name)  # what the user asked for, whatever SGLang made of it
            if chosen not in (None, *rule.works):
                works = next(filter(None, rule.works), None)
                remedy = f"{rule.remedy}, or use {rule.flag} {works}" if works else rule.remedy
                raise ServingError(f"{rule.flag} {chosen} cannot read a packed KV pool; {remedy}")
        decide(server_args, attention_backend=backend)
        if server_args.disaggregation_mode == "decode" and server_args.disaggregation_decode_retraction_backup is None:
            # SGLang would choose a host pool of rows of one width.
            decide(server_args, disaggregation_decode_retraction_backup="cpu_tensor")


def _compare_digests(schedulers: list[dict[str, Any]]) -> None:
    state = process_state()
    if state.loaded_request is None:
        return
    with refusing():
        for number, introduction in enumerate(schedulers):
            digest = introduction.get(PROFILE_KEY)
            # A scheduler that did not load the plugin would serve unquantized without knowing it.
            if digest is None:
                raise ServingError(
                    f"scheduler {number} does not serve the profile: its process did not load SGLang's plugin kvtuner;"
                    " install kvtuner where the server runs, and unset SGLANG_PLUGINS or name kvtuner in it"
                )
            if state.checked_digest is None:
                raise ServingError("SGLang resolved its arguments before the profile was asked for; ask for it first")
            if digest != state.checked_digest:
                raise ServingError(
                    f"scheduler {number} serves {digest}, but the launcher checked {state.checked_digest}: the"
                    " file changed meanwhile; start again"
                )


def _of_replicas(schedulers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all replicas say, key by key; of digests that differ, all of them, which the launcher refuses."""
    digests = [introduction.get(PROFILE_KEY) for introduction in schedulers]
    if not digests or None in digests:
        return {}
    return {
        PROFILE_KEY: ", ".join(sorted(set(filter(None, digests)))),
        **{key: schedulers[0][key] for key in (READS_KEY, WINDOW_KEY)},
    }


def _check(server_args: Any) -> None:
    state = process_state()
    if state.loaded_request is None:
        return
    with refusing():
        check_alone()
        arguments = resolved(server_args)
        model_config = model_config_of(server_args)
        if has_index(model_config):  # first, since SGLang has chosen options by the GPU
            refuse_place_of_index(_capability(arguments.device), release_rules())
        _refuse_options(arguments, state.loaded_request.request, model_config)
        # From here on ``auto`` is a file, which schedulers read by their environment.
        state.loaded_request = loaded = state.loaded_request.chosen_for(model_config)
        profile = loaded.profile(model_config)
        refuse_ordered_channels(model_config.hf_config.architectures[0], arguments)
        if profile.tuned_geometry().is_latent:
            refuse_of_latents(arguments, hicache_only=loaded.request.hicache_only)
            if has_index(model_config):
                refuse_of_index(arguments)
            _check_reader_of_latents(arguments.device)
        has_readers = profile.geometry.num_shared_layers > 0
        if keeps_states(model_config):
            refuse_beside_other_layers(arguments, "layers that keep a state")
        elif has_readers:
            refuse_beside_other_layers(arguments, "layers that read another layer's keys")
        elif profile.tuned_geometry().layer_ids is not None:
            refuse_beside_other_layers(arguments, "layers with a window")
        if profile.has_per_channel_keys:
            has_other_layers = (
                has_readers or keeps_states(model_config) or profile.tuned_geometry().layer_ids is not None
            )
            refuse_beside_per_channel(
                arguments, profile.defaults.k.group_size, hicache_only=loaded.request.hicache_only,
                has_other_layers=has_other_layers,
            )  # fmt: skip
        profile.row_shape(arguments.tp_size // arguments.attn_dp_size)  # refuses heads that cannot be split so
        if arguments.speculative_algorithm is not None and profile.window.num_tokens:
            raise ServingError(
                f"--speculative-algorithm {arguments.speculative_algorithm} does not work with an exact window"
                f" ({profile.window}): copies of drafts that are not accepted would stay; drop it, or serve a profile"
                " without a window"
            )
        both_ways = reading_both_ways(model_config)
        if both_ways:
            refuse_of_images(arguments, profile.window if "full" in both_ways else NO_WINDOW)
        _check_lower_tiers(arguments)
        state.checked_digest = profile.digest
        if loaded.request.uniform is None:
            logger.info("kvtuner: serving %s", loaded.request.profile)
            if has_adapters(arguments):
                _judge_adapters(strict=loaded.request.strict)
            _compare_models(loaded.request, profile, model_config)


def _capability(device: str) -> tuple[int, int] | None:
    import torch  # as below

    return torch.cuda.get_device_capability(device) if torch.device(device).type == "cuda" else None


def _check_reader_of_latents(device: str) -> None:
    # Imported here because a launcher does without attention; this one is to refuse before weights are loaded.
    import torch

    from kvtuner.runtime_loader.attention_backends import BACKEND_VARIABLE, latent_backend

    latent_backend(torch.device(device), os.environ.get(BACKEND_VARIABLE) or None)


def _refuse_options(arguments: Any, request: ServingRequest, model_config: Any) -> None:
    backend = INDEX_BACKEND if has_index(model_config) else METADATA_BACKEND
    refuse_flags(arguments, hicache_only=request.hicache_only, metadata_backend=backend, release=release_rules())


def _check_lower_tiers(arguments: Any) -> None:
    # Last, since nobody is to install or configure what is refused anyway.
    if arguments.enable_lmcache:
        check_lmcache()
    if arguments.enable_hierarchical_cache and arguments.hicache_storage_backend is not None:
        # Imported here because a server without storage does without SGLang's cache controllers.
        from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import extra_config
        from kvtuner.runtime_loader.sglang.hicache.checked_storage import check_storage

        check_storage(arguments.hicache_storage_backend, extra_config(arguments.hicache_storage_backend_extra_config))


def _compare_models(request: ServingRequest, profile: Profile, model_config: Any) -> None:
    # Once, in the launcher: schedulers would log it again for every rank.
    mismatches = compare_models(
        profile.model,
        identity_of_model(model_config),
        Policy(request.strict, request.allow_derived, STRICT_FLAG, ALLOW_FLAG),
        positions=calibrated_positions(profile),
        context_length=model_config.context_len,
    )
    refuse(mismatches)
    for mismatch in mismatches:
        log = logger.warning if mismatch.severity == "warning" else logger.info
        log("kvtuner: %s", mismatch.text)


def _judge_adapters(*, strict: bool) -> None:
    """Say that answers of an adapter, a fine-tune that comes with its requests, were not measured."""
    unmeasured = "the profile was measured without adapters (LoRA)"
    if strict:
        raise ServingError(f"{unmeasured}; drop --enable-lora and --lora-paths, or drop {STRICT_FLAG}")
    logger.warning("kvtuner: %s; merge one into the model to measure it by kvtuner eval", unmeasured)


def _start_scheduler(server_args: Any) -> None:
    loaded = process_state().loaded_request
    if loaded is None:
        return
    with refusing():
        check_alone()
        # Imported here because only a scheduler needs pools and attention.
        from kvtuner.runtime_loader.sglang.scheduler import install_hooks

        arguments = resolved(server_args)
        model_config = model_config_of(server_args)
        _refuse_options(arguments, loaded.request, model_config)  # again: some are decided after all resolution hooks
        _check_lower_tiers(arguments)
        answer_as_transformers(model_config)
        if loaded.request.hicache_only:
            # Otherwise SGLang, by write_back, gives up host pages whose device copy, read back from them, would be
            # quantized again.
            os.environ["SGLANG_HICACHE_SKIP_HOST_DUPLICATE_RECLAIM"] = "1"
        install_hooks(
            packed=not loaded.request.hicache_only,
            indexed=has_index(model_config),
            tiers=arguments.enable_hierarchical_cache,
            transfers=arguments.disaggregation_mode in ROLES,
            lmcache=arguments.enable_lmcache,
        )
