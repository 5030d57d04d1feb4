"""The device and the dtype that a model is loaded with, by what the user and this machine say. Loads nothing."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvtuner.calibration.model_loading import ModelSource


def placement_of(device: str) -> str:
    """The device of a model: a torch device, or ``auto`` where accelerate spreads it over all of them.

    Raises:
        UnsupportedModelError: It is no torch device, or a GPU that is not there.
    """
    if device != "auto":
        try:
            kind = torch.device(device).type
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"--device {device!r} is no torch device; use auto, cpu, cuda or cuda:N"
            ) from error
        if kind == "cuda" and not torch.cuda.is_available():
            raise UnsupportedModelError(f"--device {device} was asked for, but torch sees no GPU; use --device cpu")
        return device
    if not torch.cuda.is_available():
        return "cpu"
    return "auto" if importlib.util.find_spec("accelerate") else "cuda:0"


def device_map_of(placement: str) -> str | dict[str, str] | None:
    """The device map for accelerate; None where it is not needed or not installed."""
    if placement == "auto":
        return placement
    return {"": placement} if placement != "cpu" and importlib.util.find_spec("accelerate") else None


def dtype_of(source: ModelSource) -> torch.dtype | str:
    """The dtype that weights are loaded in, or ``auto`` for that of the checkpoint.

    Raises:
        UnsupportedModelError: The user names another one than those that are measured.
    """
    if source.dtype == "auto":
        return "auto" if torch.cuda.is_available() and source.device != "cpu" else torch.float32
    dtype = getattr(torch, source.dtype, None)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedModelError(f"--dtype must be auto, float32, float16 or bfloat16, not {source.dtype!r}")
    assert isinstance(dtype, torch.dtype)
    return dtype
