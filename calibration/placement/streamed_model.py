"""Loads a model whose decoder layers stay in its files. Knows nothing of calibration."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import torch

from kvtuner.calibration.forward.decoder_layers import find_decoder_layers
from kvtuner.calibration.forward.streamed_layers import StreamedLayers
from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def refuse_streaming(config: PretrainedConfig, name: str) -> None:
    """Refuse to stream what cannot be.

    Raises:
        UnsupportedModelError: Quantized weights, or no accelerate; the name is what the user calls the model.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{name} is quantized, and such weights are made ready as a whole when they are loaded; leave --stream out"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise UnsupportedModelError("--stream reads layers by accelerate; pip install accelerate")


def load_streamed(
    auto_class: Any, path: str, config: PretrainedConfig, num_layers: int, device: str, **arguments: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with all but its decoder layers on `device`, and what transformers says of the loading.

    Weights that transformers changes when it loads them, such as those of experts, lie in a temporary folder.

    Raises:
        UnsupportedModelError: The model has no list of so many decoder layers.
    """
    with torch.device("meta"):
        skeleton = auto_class.from_config(config, trust_remote_code=arguments["trust_remote_code"])
    place = _device_map(skeleton, num_layers, device)
    del skeleton
    changed = tempfile.mkdtemp(prefix="kvtuner-weights-")
    try:
        model, info = auto_class.from_pretrained(
            path, device_map=place, offload_folder=changed, output_loading_info=True, **arguments
        )
    except BaseException:
        shutil.rmtree(changed)
        raise
    weakref.finalize(model, shutil.rmtree, changed)
    found = find_decoder_layers(model, num_layers)
    assert found is not None
    StreamedLayers(model, list(found[1]), torch.device(device))
    return model, info


def _device_map(skeleton: PreTrainedModel, num_layers: int, device: str) -> dict[str, str]:
    found = find_decoder_layers(skeleton, num_layers)
    if found is None:
        raise UnsupportedModelError(f"{type(skeleton).__name__} has no list of {num_layers} decoder layers")
    layers = next(name for name, module in skeleton.named_modules() if module is found[1])
    place = {layers: "disk"}

    def put(module: torch.nn.Module, prefix: str) -> None:
        own = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        # Buffers that no file holds have no place in a map of devices, by which transformers loads files.
        in_files = [name for name in own if name not in module._non_persistent_buffers_set]
        place.update({prefix + name: device for name in in_files})
        for name, child in module.named_children():
            if layers.startswith(f"{prefix}{name}."):
                put(child, f"{prefix}{name}.")
            elif prefix + name != layers:
                place[prefix + name] = device

    put(skeleton, "")
    return place
