"""The bytes of a model's weights, counted where its checkpoint lies: a folder, the hub's cache, or the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.errors import HubError, UnsupportedModelError
from kvtuner.exported_configs.identity.checkpoint_size import checkpoint_bytes, float32_bytes
from kvtuner.exported_configs.identity.model_identity import checkpoint_folder, is_hub_id
from kvtuner.exported_configs.sharing.hub_checkpoint import hub_checkpoint_bytes

if TYPE_CHECKING:
    from kvtuner.calibration.model_loading import ModelShape, ModelSource

GIVE_WEIGHTS = "give the bytes of its weights, such as --weights 14GiB"


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The bytes of all weights as they are stored and as a server holds them, and where that is from."""

    stored_bytes: int
    served_bytes: int
    origin: str


def served_weights(source: ModelSource, shape: ModelShape, given_bytes: int | None) -> ServedWeights:
    """The weights of a model: as given, or counted.

    Raises:
        UnsupportedModelError: There are no safetensors files, or they cannot be read.
        HubError: The hub cannot be asked.
    """
    if given_bytes is not None:
        return ServedWeights(given_bytes, given_bytes, "given by --weights")
    stored = _counted(source)
    if stored is None:
        raise UnsupportedModelError(f"{source.model} has no safetensors files that can be counted; {GIVE_WEIGHTS}")
    wide = _float32_bytes(source, shape, stored)
    if wide:  # SGLang serves them in 16 bits
        return ServedWeights(stored, stored - wide // 2, "from safetensors files in float32, served in 16 bits")
    return ServedWeights(stored, stored, "counted from safetensors files")


def _float32_bytes(source: ModelSource, shape: ModelShape, stored: int) -> int:
    """The bytes of tensors of 32 bits, by their headers; of files that are not here by the configuration."""
    folder = checkpoint_folder(source.path, source.revision)
    counted = None if folder is None else float32_bytes(folder)
    if counted is not None:
        return counted
    return stored if str(getattr(shape.config, "dtype", None)).removeprefix("torch.") == "float32" else 0


def _counted(source: ModelSource) -> int | None:
    folder = checkpoint_folder(source.path, source.revision)
    stored = None if folder is None else checkpoint_bytes(folder)
    if stored is not None or Path(source.path).exists() or not is_hub_id(source.model):
        return stored
    try:
        return hub_checkpoint_bytes(source.model, source.revision)
    except HubError as error:
        raise HubError(f"{error}; or {GIVE_WEIGHTS}") from error
