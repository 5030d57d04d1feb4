"""The releases of SGLang that tests ran on, and what the older of them lack or cannot do."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from packaging.version import Version

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.options.option_rules import OptionRule, ReleaseRules

NEWEST: Final = "0.5.23"
"""The release that the image, the pages and most tests take."""

ACCEPTED: Final = {
    "0.5.22": ReleaseRules(
        absent=frozenset({"enable_amd_monokernel", "enable_nvidia_megakernel", "get_device_pool_infos"}),
        refused=(
            OptionRule(
                "dp_size",
                (None, 1),
                "replicas of this SGLang do not tell the launcher what they serve",
                remedy=f"drop it, or install sglang {NEWEST}",
            ),
            OptionRule(
                "speculative_algorithm",
                (None,),
                "drafts were tested with a newer SGLang alone",
                remedy=f"drop it, or install sglang {NEWEST}",
            ),
        ),
        remedy_of_index=f"install sglang {NEWEST}",
    ),
    NEWEST: ReleaseRules(),
}
"""The releases that are served with, oldest first; a release without a row is refused."""


def release_rules() -> ReleaseRules:
    """Return what is special in the SGLang that is installed; refuse one that no test ran on."""
    installed = version("sglang")
    found = Version(installed)
    rules = None if found.is_prerelease else ACCEPTED.get(found.base_version)
    if rules is None:
        raise ServingError(
            f"this kvtuner serves with sglang {' or '.join(ACCEPTED)}, but {installed} is installed; install one of"
            " those, or a newer kvtuner"
        )
    return rules
