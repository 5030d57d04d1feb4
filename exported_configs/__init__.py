"""The profile file: format, digest, validation, sharing. Knows nothing of how it is searched or served.

The names in `__all__` are public; each is imported when it is first used, so that a server without a profile loads
none of it. `formats` has the files of other tools, `sharing` the hub, `signing` signatures, `identity` models.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.build import (
        AskedBudget,
        LayerQuantization,
        build_profile,
        dump_profile,
        uniform_profile,
    )
    from kvtuner.exported_configs.profile.load import load_profile
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity
    from kvtuner.exported_configs.sharing.reference import find_profile

__all__ = [
    "AskedBudget",
    "LayerQuantization",
    "ModelIdentity",
    "Profile",
    "build_profile",
    "dump_profile",
    "find_profile",
    "load_profile",
    "uniform_profile",
]

_MODULES: Final = {
    "AskedBudget": "profile.build",
    "LayerQuantization": "profile.build",
    "ModelIdentity": "profile.records",
    "Profile": "profile.profile",
    "build_profile": "profile.build",
    "dump_profile": "profile.build",
    "find_profile": "sharing.reference",
    "load_profile": "profile.load",
    "uniform_profile": "profile.build",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
