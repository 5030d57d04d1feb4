"""Runs at the start of every Python process with this folder on its PYTHONPATH, SGLang's own children included.

Without a GPU there is no torchvision that fits a CPU build of torch everywhere, and SGLang imports it for images only:
an empty one takes its place. It stays hidden from `importlib.util.find_spec`, so that transformers still knows that it
is not there.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

EMPTY = "torchvision"


class EmptyModule(ModuleType):
    """A module whose every name is there and whose every function refuses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "functional":  # the name of modules
            value: Any = importlib.import_module(f"{self.__name__}.{name}")
        elif name == "InterpolationMode":
            value = enum.Enum(name, "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")
        else:

            def value(*args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError(f"{self.__name__}.{name}: torchvision is not installed")

        setattr(self, name, value)
        return value


class EmptyFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `EMPTY` and all below it, last of all finders: a real one wins."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """An empty module, but not for who only asks whether it is there."""
        if fullname.partition(".")[0] != EMPTY or _is_probe():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        """The module."""
        module = EmptyModule(spec.name)
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: it is a package without files."""
        module.__path__ = []


def _is_probe() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_filename == "<frozen importlib.util>":
            return True
        frame = frame.f_back
    return False


sys.meta_path.append(EmptyFinder())
