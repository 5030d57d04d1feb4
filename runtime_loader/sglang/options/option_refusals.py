"""What refuses options of SGLang by the tables of `option_rules`, in one line that names the way out."""

from __future__ import annotations

import os
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.options.option_rules import (
    CAPABILITY_OF_INDEX,
    DISAGGREGATION_RULES,
    HICACHE_RULES,
    IMAGE_RULES,
    INDEX_RULES,
    LATENT_RULES,
    LMCACHE_RULES,
    LORA_RULES,
    METADATA_BACKEND,
    NOTHING_SPECIAL,
    OTHER_LAYER_RULES,
    PER_CHANNEL_RULES,
    REPLICA_RULES,
    ROLES,
    RULES,
    SPECULATION_RULES,
    OptionRule,
    ReleaseRules,
    backend_rules,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtuner.precision import ExactWindow

VARIABLES: Final = {
    "SGLANG_USE_HND_KVCACHE": "rows hold all heads of a token",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "it sizes rows of one width",
    "SGLANG_DISAGG_STAGING_BUFFER": "it splits rows of one width by heads",
}


def refuse_flags(
    arguments: Any,
    environ: Mapping[str, str] = os.environ,
    *,
    hicache_only: bool = False,
    metadata_backend: str = METADATA_BACKEND,
    release: ReleaseRules = NOTHING_SPECIAL,
) -> None:
    """Refuse an option or variable that packed rows, on the device or below it alone, do not work with."""
    what = "a quantized host tier" if hicache_only else "a packed KV pool"
    if str(arguments.device).partition(":")[0] not in ("cuda", "cpu"):
        raise ServingError(
            f"there are no kernels for {arguments.device}: profiles run in SGLang on GPUs of NVIDIA, on a"
            " processor (examples/sglang_on_cpu), and on the transformers host; drop --kvtuner-profile"
        )
    every_rule = (rule for rule in (*backend_rules(metadata_backend), *RULES) if rule.name not in release.absent)
    rules = [rule for rule in (*every_rule, *release.refused) if not (hicache_only and rule.of_attention)]
    if getattr(arguments, "enable_hierarchical_cache", None):
        rules += HICACHE_RULES
    elif hicache_only:
        raise ServingError(
            "HiCache is not enabled, so KVTuner HiCache would not be used: add --enable-hierarchical-cache"
        )
    _refuse_options(arguments, rules, what)
    if arguments.speculative_algorithm is not None:
        _refuse_options(arguments, SPECULATION_RULES, f"speculative decoding on {what}")
    if arguments.dp_size > 1:
        _refuse_options(arguments, REPLICA_RULES, f"replicas of {what}")
    if arguments.enable_lmcache:
        _refuse_options(arguments, LMCACHE_RULES, f"LMCache on {what}")
    if arguments.disaggregation_mode in ROLES:
        _refuse_options(arguments, DISAGGREGATION_RULES, f"disaggregation of {what}")
    if has_adapters(arguments):
        _refuse_options(arguments, LORA_RULES, f"LoRA on {what}")
    for name, reason in VARIABLES.items():
        if environ.get(name, "").lower() in ("1", "true", "t", "yes", "y", "on"):
            raise ServingError(f"{name} does not work with {what}: {reason}; unset it")


def refuse_beside_other_layers(arguments: Any, others: str) -> None:
    """Refuse an option that a model does not work with that has `others` beside packed layers."""
    _refuse_options(arguments, OTHER_LAYER_RULES, f"a packed KV pool beside {others}")


def refuse_of_images(arguments: Any, window: ExactWindow) -> None:
    """Refuse what images do not work with whose tokens read one another, also later ones."""
    if window.num_tokens:
        raise ServingError(
            f"the tokens of an image read one another in this model, later ones too, which an exact window ({window})"
            " has no place for; serve a profile without a window, or the model's text alone"
        )
    _refuse_options(arguments, IMAGE_RULES, "images whose tokens read one another")


def refuse_of_latents(arguments: Any, *, hicache_only: bool) -> None:
    """Refuse an option that latents (MLA) do not work with, a host tier of theirs among them."""
    if hicache_only:
        raise ServingError(
            "latents (MLA) have no quantized host tier yet: drop --kvtuner-hicache-only, so that they are packed on the"
            " device"
        )
    _refuse_options(arguments, LATENT_RULES, "a packed pool of latents (MLA)")


def refuse_place_of_index(capability: tuple[int, int] | None, release: ReleaseRules = NOTHING_SPECIAL) -> None:
    """Refuse a GPU, by its compute capability, or a release of SGLang, on which no index selects from packed latents.

    The capability is None on a processor.
    """
    if release.remedy_of_index:
        raise ServingError(
            f"an index that selects from packed latents was tested with a newer SGLang alone; {release.remedy_of_index}"
        )
    if capability is not None and capability[0] != CAPABILITY_OF_INDEX:
        raise ServingError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}, and SGLang's sparse kernel and ours of"
            f" packed latents are both for {CAPABILITY_OF_INDEX}.0 alone (H100, H200); serve without a profile"
        )


def refuse_of_index(arguments: Any) -> None:
    """Refuse an option that latents do not work with of which an index selects what a query reads."""
    _refuse_options(arguments, INDEX_RULES, "latents that an index selects from")


def refuse_beside_per_channel(
    arguments: Any, token_group: int, *, hicache_only: bool = False, has_other_layers: bool = False
) -> None:
    """Refuse what keys per channel do not work with; pages must be whole groups of so many tokens.

    Of a model, `has_other_layers` says that layers have a window, keep a state or read another layer's keys.
    """
    if has_other_layers:
        raise ServingError(
            "keys per channel beside layers that have a window, keep a state or read another layer's keys were never"
            " tried; serve a profile of per_token keys"
        )
    if hicache_only:
        raise ServingError(
            "keys per channel are packed while a request holds them exactly, which below the device it does not; store"
            " keys per token there, or drop --kvtuner-hicache-only"
        )
    what = f"keys per channel of {token_group} tokens per scale"
    if arguments.page_size is None or arguments.page_size % token_group:
        raise ServingError(
            f"--page-size {arguments.page_size or 1} does not work with {what}, which requests share by whole groups;"
            f" add --page-size {token_group}, or a multiple of it"
        )
    _refuse_options(arguments, PER_CHANNEL_RULES, what)


def has_adapters(arguments: Any) -> bool:
    """Whether a server takes adapters (LoRA), which SGLang decides after the launcher's check."""
    if arguments.enable_lora is None:
        return bool(getattr(arguments, "lora_paths", None))
    return bool(arguments.enable_lora)


def _refuse_options(arguments: Any, rules: Iterable[OptionRule], what: str) -> None:
    for rule in rules:
        try:
            value = attrgetter(rule.name)(arguments)
        except AttributeError as error:
            raise ServingError(
                f"this SGLang has no option {rule.name}; install a version that kvtuner is tested with"
            ) from error
        if value not in rule.works and value not in ([], {}):
            shown = "" if value is True else f" {value}"
            raise ServingError(f"{rule.flag}{shown} does not work with {what}: {rule.reason}; {rule.remedy}")
