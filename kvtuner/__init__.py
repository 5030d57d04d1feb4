"""Layer-wise mixed-precision KV cache: searched offline, loaded at serving time.

The names in `__all__` are the Python interface; each is imported when it is first used, so that this import is
light. See docs/python.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.load import load_profile
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.python_interface import calibrate, evaluate, plan, search
    from kvtuner.runtime_loader.engine.generation import SamplingParameters
    from kvtuner.runtime_loader.engine.local_engine import LocalEngine
    from kvtuner.runtime_loader.sglang import engine
    from kvtuner.runtime_loader.transformers_cache import KVTunerCache

__version__ = "0.1.0"
__all__ = [
    "KVTunerCache",
    "LocalEngine",
    "Profile",
    "SamplingParameters",
    "calibrate",
    "engine",
    "evaluate",
    "load_profile",
    "plan",
    "search",
]

_MODULES: Final = {
    "KVTunerCache": "kvtuner.runtime_loader.transformers_cache",
    "LocalEngine": "kvtuner.runtime_loader.engine.local_engine",
    "Profile": "kvtuner.exported_configs.profile.profile",
    "SamplingParameters": "kvtuner.runtime_loader.engine.generation",
    "calibrate": "kvtuner.pipeline.python_interface",
    "engine": "kvtuner.runtime_loader.sglang",
    "evaluate": "kvtuner.pipeline.python_interface",
    "load_profile": "kvtuner.exported_configs.profile.load",
    "plan": "kvtuner.pipeline.python_interface",
    "search": "kvtuner.pipeline.python_interface",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
