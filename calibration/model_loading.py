"""Loads a model to calibrate, and refuses by name a model without a KV cache of the supported kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtuner.errors import PrecisionError, UnsupportedModelError
from kvtuner.exported_configs.identity.model_identity import (
    DEMO,
    architecture_of,
    config_sha256,
    identity_of,
    max_positions,
    public_name,
    rope_sha256,
    weight_quantization,
)
from kvtuner.precision import SEARCHED_BITS, check_group_size
from kvtuner.progress.transformers_output import quiet_transformers
from kvtuner.run_folder import sha256_of
from kvtuner.supported_models import read_cache_geometry, refuse_other_models

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from kvtuner.exported_configs.profile.records import ModelIdentity
    from kvtuner.geometry import ModelGeometry
    from kvtuner.layer_geometry import CacheGeometry

DEMO_MODEL = Path(__file__).parent / "demo" / "model"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model, and how to load it.

    Attributes:
        model: hub id, folder, or ``demo``.
        revision: branch, tag or commit on the hub.
        device: ``auto`` (all GPUs with accelerate, else the first; the CPU without any) or a torch device.
        dtype: ``auto`` (the checkpoint's on a GPU, float32 on a CPU) or a torch dtype's name.
        trust_remote_code: run code that comes with the checkpoint.
        context_length: tokens that will be served; the configuration's maximum by default.
        stream: leave the decoder layers in the model's files, and load each when it is needed.
        ranks: processes of this process group that hold the model together, a part of its weights each.
    """

    model: str
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    context_length: int | None = None
    stream: bool = False
    ranks: int = 1

    @property
    def path(self) -> str:
        """The path or id that transformers loads."""
        return str(DEMO_MODEL) if self.model == DEMO else self.model

    @property
    def name(self) -> str:
        """The hub id, or the last part of a folder: what may be written into a profile."""
        return DEMO if self.model == DEMO else public_name(self.model)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The facts of a model that its configuration alone gives, and the number of tokens that will be served.

    Attributes:
        geometry: The layers that are tuned.
        cache: What all layers cache, as far as the configuration says.
    """

    config: PretrainedConfig
    geometry: ModelGeometry
    context_length: int
    cache: CacheGeometry

    @property
    def architecture(self) -> str:
        """Class named by the checkpoint, such as Qwen2ForCausalLM."""
        return architecture_of(self.config)

    @property
    def settings_sha256(self) -> str:
        """Hash of all that the configuration decides of a measurement: what run folders are bound to."""
        parts = (config_sha256, rope_sha256, weight_quantization, max_positions)
        return sha256_of([part(self.config) for part in parts])

    def identity(self, source: ModelSource, dtype: str, tokenizer: Any = None) -> ModelIdentity:
        """The model as profiles and results record it.

        Raises:
            ProfileError: A dtype that no profile can hold.
        """
        return identity_of(
            self.config, id=source.model, revision=source.revision, dtype=dtype, tokenizer=tokenizer, files=source.path
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be traced."""

    source: ModelSource
    shape: ModelShape
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def weights_sha256(self) -> str:
        """Fingerprint of the weights."""
        from kvtuner.calibration.forward.streamed_layers import streamed_layers_of
        from kvtuner.calibration.weights_hash import fingerprint  # brings torch, which names and shapes do not need

        streamed = streamed_layers_of(self.model)
        return fingerprint(self.model.state_dict(), None if streamed is None else streamed.read)

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, such as float32 or bfloat16."""
        return str(self.model.dtype).removeprefix("torch.")


def read_config(source: ModelSource) -> PretrainedConfig:
    """Read a model's configuration as it is.

    Raises:
        UnsupportedModelError: Unknown model, or a revision of a folder.
    """
    from transformers import AutoConfig

    if source.model.startswith(("/", ".", "~")) and not Path(source.path).exists():
        raise UnsupportedModelError(f"model folder {source.model} does not exist; give a folder or a hub id")
    if source.revision is not None and Path(source.path).exists():  # transformers ignores it
        raise UnsupportedModelError(
            f"--revision {source.revision} needs a model on the hub, but {source.model} lies on this machine;"
            " leave it out"
        )
    config: PretrainedConfig = _from_pretrained(AutoConfig, source)
    return config


def read_shape(source: ModelSource) -> ModelShape:
    """Read and check a model's configuration; loads no weights.

    Raises:
        UnsupportedModelError: Unknown model, or one that has no KV cache of the supported kind.
        GeometryError: A configuration that does not tell its heads.
        PrecisionError: A head_dim that cannot be packed.
    """
    config = read_config(source)
    text = config.get_text_config(decoder=True)
    refuse_other_models(config)
    auto_class_of(config, source.model)
    cache = read_cache_geometry(config, context_length=source.context_length)
    geometry = cache.tuned()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    longest = longest if longest and longest > 0 else None  # XLNet's -1 is no limit
    context_length = source.context_length or longest
    if not context_length:
        raise UnsupportedModelError(f"{source.model} does not say its context; give --context-length")
    if context_length < 1:
        raise UnsupportedModelError(f"--context-length must be positive, but is {context_length}")
    if longest and context_length > longest:
        raise UnsupportedModelError(
            f"--context-length {context_length} exceeds the {longest} positions of {source.model}"
        )
    try:
        for head_dim, bits in [(each, bits) for bits in SEARCHED_BITS for each in geometry.channels.values()]:
            check_group_size(head_dim, bits, head_dim)
    except PrecisionError as error:
        raise PrecisionError(f"{error}; serve this model without a profile, such as in fp8") from error
    return ModelShape(config, geometry, context_length, cache)


def auto_class_of(config: PretrainedConfig, name: str) -> Any:
    """The class by which transformers loads a model's decoder, alone or with what reads images beside it.

    Raises:
        UnsupportedModelError: There is none; the name is what the user calls the model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    own = getattr(config, "auto_map", None) or {}
    reader = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if reader is not None and architecture_of(config) == reader:
        return AutoModelForImageTextToText
    if config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in own:
        return AutoModelForCausalLM
    if reader is not None:
        return AutoModelForImageTextToText
    raise UnsupportedModelError(
        f"{name} is a {config.model_type!r}, which transformers does not load as a decoder of text, alone or beside"
        " what reads images: models of sound alone, and encoders, are not supported"
    )


def load_model(source: ModelSource, shape: ModelShape | None = None) -> LoadedModel:
    """Load weights and tokenizer, with the attention hook switched on.

    Raises:
        UnsupportedModelError: Weights or tokenizer missing, a dtype or device that is not there or too small, no
            attention hook.
    """
    from kvtuner.calibration.forward.attention_hook import register_hook

    shape = shape or read_shape(source)
    tokenizer = load_tokenizer(source)
    with quiet_transformers():
        model = _load_weights(source, shape)
        model.eval().requires_grad_(False)
        name = type(model).__name__
        if model._can_set_attn_implementation():
            try:
                model.set_attn_implementation(_implementations(model.config, register_hook()))
            except ValueError as error:
                raise UnsupportedModelError(f"{name} refuses another attention implementation: {error}") from error
    if model.config._attn_implementation != register_hook():
        raise UnsupportedModelError(f"{name} does not go through transformers' AttentionInterface; it has no hook")
    return LoadedModel(source, shape, model, tokenizer)


def _implementations(config: PretrainedConfig, name: str) -> dict[str, str]:
    """The attention implementation of that name for a model and its decoder; what reads images keeps its own."""
    text = config.get_text_config(decoder=True)
    parts = {part: own for part in config.sub_configs if (own := getattr(config, part, None)) is not None}
    is_decoder = {part: own.get_text_config(decoder=True) is text for part, own in parts.items()}
    return {"": name, **{part: name if is_decoder[part] else parts[part]._attn_implementation for part in parts}}


def load_processor(source: ModelSource) -> ProcessorMixin:
    """What makes tokens and pixels of text with images.

    Raises:
        UnsupportedModelError: There is none.
    """
    from transformers import AutoProcessor, ProcessorMixin

    processor = _from_pretrained(AutoProcessor, source)
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise UnsupportedModelError(
            f"{source.model} has no processor of images, but the data holds images; give --data of text alone"
        )
    return processor


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer alone.

    Raises:
        UnsupportedModelError: There is none.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _from_pretrained(AutoTokenizer, source)
    return tokenizer


def _from_pretrained(kind: Any, source: ModelSource) -> Any:
    with quiet_transformers():
        try:
            return kind.from_pretrained(
                source.path, revision=source.revision, trust_remote_code=source.trust_remote_code
            )
        except Exception as error:  # transformers, the hub and remote code raise anything: all of it is "cannot load"
            raise _unknown(source, error) from error


def _load_weights(source: ModelSource, shape: ModelShape) -> PreTrainedModel:
    import torch

    from kvtuner.calibration.placement.devices import device_map_of, dtype_of, placement_of
    from kvtuner.calibration.placement.sharded_model import load_sharded, refuse_sharding
    from kvtuner.calibration.placement.streamed_model import load_streamed, refuse_streaming

    if source.stream:
        refuse_streaming(shape.config, source.model)
    if source.ranks > 1:
        refuse_sharding(shape.config, source.model)
    is_quantized = getattr(shape.config, "quantization_config", None) is not None
    placement, dtype = placement_of(source.device), dtype_of(source)
    device_map = device_map_of(placement)
    if is_quantized and device_map is None and placement != "cpu":
        raise UnsupportedModelError(
            f"{source.model} is quantized, and such weights are loaded to {placement} by accelerate alone;"
            " pip install accelerate"
        )
    auto_class = auto_class_of(shape.config, source.model)
    given: dict[str, Any] = {"revision": source.revision, "trust_remote_code": source.trust_remote_code, "dtype": dtype}
    layers = len(shape.cache.layers)
    try:
        if source.stream:
            place = "cuda:0" if placement == "auto" else placement
            model, info = load_streamed(auto_class, source.path, shape.config, layers, place, **given)
        elif source.ranks > 1:
            model, info = load_sharded(auto_class, source, shape.config, layers, **given)
        else:
            given |= {"device_map": device_map, "output_loading_info": True}
            model, info = auto_class.from_pretrained(source.path, **given)
            if device_map is None and placement != "cpu":
                model.to(torch.device(placement))
    except UnsupportedModelError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        raise UnsupportedModelError(
            f"{source.model} does not fit into the GPU's free memory; free some, or give --device auto with accelerate"
            " installed (all GPUs, then the CPU), --device cpu or --dtype bfloat16"
        ) from error
    except Exception as error:
        raise _unknown(source, error) from error
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModelError(
            f"{source.model} lacks {len(missing)} weights that its configuration asks for, such as {missing[0]}"
        )
    return model


def _unknown(source: ModelSource, error: Exception) -> UnsupportedModelError:
    from kvtuner.exported_configs.sharing.hub_client import unfetched_reason

    reason = unfetched_reason(error.__cause__) or " ".join(str(error).split())
    if "trust_remote_code" in reason:
        reason = "it brings code of its own; read that code, then allow it with --trust-remote-code"
    reason = reason if len(reason) <= 300 else reason[:297] + "..."
    return UnsupportedModelError(f"cannot load model {source.model!r}: {reason}")
