"""The identity of a model by its transformers configuration, as profiles record it. Knows nothing of servers.

The hash covers the fields that make the network, whatever release of transformers reads them and whoever serves it:
fields that the configuration's class knows and that differ from its defaults. Rotary parameters, positions and
quantized weights are recorded beside it, since they change without another network.
"""

import hashlib
import json
import math
import os.path
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvtuner.exported_configs.identity.checkpoint_hash import checkpoint_sha256
from kvtuner.exported_configs.profile.document import validated
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.run_folder import canonical_json, sha256_of

DEMO: Final = "demo"
"""The name of the model, and of the text, that come with kvtuner."""
MAX_MODEL_NAME: Final = 200
NO_QUANTIZATION: Final = "none"
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_SNAPSHOT: Final = re.compile(r"(?:^|/)models--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)")
_POSITIONS: Final = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length",
)  # fmt: skip
_ROTARY: Final = (
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
    "rotary_emb_base", "rotary_pct", "original_max_position_embeddings",
)  # fmt: skip
_WINDOWS: Final = ("sliding_window", "max_window_layers", "use_sliding_window")
_WEIGHTS: Final = ("quantization_config", "compression_config")
_NOT_OF_THE_NETWORK: Final = frozenset((
    *_POSITIONS, *_ROTARY, *_WEIGHTS,
    "architectures", "transformers_version", "auto_map", "dtype", "torch_dtype", "id2label", "label2id",
    "num_labels", "problem_type", "task_specific_params", "tokenizer_class", "finetuning_task",
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",
    "pretraining_tp", "initializer_range", "initializer_factor", "router_aux_loss_coef", "gradient_checkpointing",
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "chunk_size_feed_forward",
))  # fmt: skip
"""The fields of how a model is called, trained and generates, and of what is recorded beside the network."""
_PRIVATE_OR_TOKEN: Final = re.compile(r"_.*|.*_token_(id|ids|index)", re.DOTALL)


def identity_of(
    config: Any,
    *,
    id: str,
    revision: str | None,
    dtype: str,
    tokenizer: Any = None,
    quantized_by: str | None = None,
    files: str | None = None,
) -> ModelIdentity:
    """Build the identity of the model that a transformers configuration describes, as loaded or as SGLang holds it.

    The commit takes the place of a typed revision where the hub's cache or the path tells it. The id may be a path, and
    `files` is the folder or the hub id of the weights; neither they nor the tokenizer are recorded where they are None.
    `quantized_by` quantizes weights while they are loaded, where the configuration names no quantization. A dtype or a
    text that no profile can hold is a `ProfileError`.
    """
    folder = None if files is None else checkpoint_folder(files, revision)
    fields = {
        "id": public_name(id),
        "revision": getattr(config, "_commit_hash", None) or _commit(id, revision) or revision,
        "config_sha256": config_sha256(config),
        "architecture": architecture_of(config),
        "dtype": dtype,
        "rope_sha256": rope_sha256(config),
        "weight_quantization": weight_quantization(config) or quantized_by or NO_QUANTIZATION,
        "tokenizer_sha256": None if tokenizer is None else tokenizer_sha256(tokenizer),
        "max_positions": max_positions(config),
        "checkpoint_sha256": None if folder is None else checkpoint_sha256(folder),
    }
    return validated(ModelIdentity, fields, place="model")


def public_name(text: str) -> str:
    """A name in place of a path: its last part if it exists, or the hub id of a path in the hub's cache.

    A hub id stays as it is. The name is printable and short enough for a profile.
    """
    snapshot = _snapshot(text)
    path = _existing(text)
    name = text
    if snapshot:
        name = snapshot[1].replace("--", "/")
    elif path:
        name = os.path.basename(os.path.realpath(path))
    printable = "".join(c if c.isprintable() and c != "\\" else "_" for c in name).lstrip("./~ ")
    return printable[:MAX_MODEL_NAME].rstrip(" /") or "unnamed"


def is_hub_id(name: str) -> bool:
    """Whether a name looks like ``owner/name``."""
    return _HUB_ID.fullmatch(name) is not None


def architecture_of(config: Any) -> str:
    """The class that a checkpoint names, such as Qwen2ForCausalLM; the configuration's own where it names none."""
    return str((getattr(config, "architectures", None) or [type(config).__name__])[0])


def config_sha256(config: Any) -> str:
    """The hash of the fields that make the network."""
    return sha256_of(_network(config))


def rope_sha256(config: Any) -> str:
    """The hash of the rotary parameters; the same for all models without."""
    return sha256_of(_plain(_rotation(config.get_text_config(decoder=True))))


def weight_quantization(config: Any) -> str | None:
    """The method that quantized the checkpoint's weights, such as ``awq``; None where the configuration has none."""
    for part in (config, config.get_text_config(decoder=True)):
        for name in _WEIGHTS:
            quantization = getattr(part, name, None)
            if quantization:
                fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
                method = fields.get("quant_method") or "unnamed"
                return str(getattr(method, "value", method))
    return None


def max_positions(config: Any) -> int | None:
    """The number of positions of the model; None where its configuration has none."""
    text = config.get_text_config(decoder=True)
    positions = next((value for name in _POSITIONS if (value := getattr(text, name, None))), None)
    return None if positions is None else int(positions)


def tokenizer_sha256(tokenizer: Any) -> str:
    """The hash of the tokenizer and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [tokenizer.get_vocab(), tokenizer.get_added_vocab(), type(tokenizer).__name__]
    else:
        # The text also holds how the last call cut and padded.
        rules = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    text = json.dumps([rules, getattr(tokenizer, "chat_template", None)], sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _commit(model: str, revision: str | None) -> str | None:
    snapshot = _snapshot(model) or _SNAPSHOT.search(str(checkpoint_folder(model, revision)))
    return snapshot[2] if snapshot else None


def _snapshot(model: str) -> re.Match[str] | None:
    """The repository and the commit of a path into the hub's cache, as typed or after links and dots."""
    path = _existing(model)
    return _SNAPSHOT.search(os.path.realpath(path) if path else os.path.normpath(model)) or _SNAPSHOT.search(model)


def _existing(model: str) -> str | None:
    """The path of a file or a folder that exists; None for everything else, such as a text too long for a path."""
    path = os.path.expanduser(model)
    return path if os.path.exists(path) else None


def checkpoint_folder(model: str, revision: str | None) -> Path | None:
    """The folder of a path, or of a hub id in the hub's cache, without a request to the hub."""
    path = _existing(model)
    if path is not None:
        return Path(path) if os.path.isdir(path) else None
    if not is_hub_id(model):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # such as "a--b/c", which no repository is called
        return None
    return Path(file).parent if isinstance(file, str) else None


def _network(config: Any) -> dict[str, Any]:
    """The fields that make the network, those of nested configurations by their own defaults.

    A field that the class does not know cannot change the network that it builds: a newer transformers may give it a
    default, and SGLang keeps fields of its own there.
    """
    defaults = None if getattr(config, "has_no_defaults_at_init", False) else _plain(type(config)().to_dict())
    kept: dict[str, Any] = {"model_type": config.model_type}
    idle = _idle_windows(config, has_kinds=defaults is None or "layer_types" in defaults)
    for name, value in config.to_dict().items():
        part = vars(config).get(name)
        if name in idle or name in _NOT_OF_THE_NETWORK or _PRIVATE_OR_TOKEN.fullmatch(name):
            continue
        if defaults is not None and name not in defaults:
            continue
        if hasattr(part, "to_dict"):
            kept[name] = _network(part)
        elif name == "layer_types" and _is_full(value) and (defaults is None or _is_full(defaults[name])):
            continue  # as without: releases differ in which models list them
        elif defaults is None or name == "sliding_window" or not _is_default(_plain(value), defaults[name]):
            kept[name] = _plain(value)  # a window even if it is the default, since without it no layer slides
    return kept


def _is_default(value: Any, default: Any) -> bool:
    if (value is None or value is False) and (default is None or default is False):
        return True  # a switch that is off, in either spelling
    return canonical_json(value) == canonical_json(default)


def _idle_windows(config: Any, *, has_kinds: bool) -> tuple[str, ...]:
    """The fields of windows without effect: all where no layer slides, else those that only make the list of layers."""
    kinds = getattr(config, "layer_types", None) if has_kinds else None
    is_on = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", None) is not False
    if not is_on or not getattr(config, "sliding_window", None):
        return _WINDOWS
    return _WINDOWS[1:] if kinds else ()


def _is_full(layer_types: Any) -> bool:
    return set(layer_types or ()) <= {"full_attention"}


def _rotation(text: Any) -> dict[str, Any]:
    """The rotary parameters of all layers, or by kind of layer where kinds differ."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {kind: _one_rotation(own, text) for kind, own in parameters.items() if isinstance(own, dict)}
    local = getattr(text, "rope_local_base_freq", None)
    return kinds or {**_one_rotation(parameters, text), **({} if local is None else {"local_theta": local})}


def _one_rotation(parameters: Mapping[str, Any], text: Any) -> dict[str, Any]:
    rotation = {name: value for name, value in parameters.items() if value is not None}
    old = rotation.pop("type", None)  # its name in older files; SGLang writes both, and leaves a stale "default" in one
    if rotation.get("rope_type", "default") == "default":
        rotation["rope_type"] = old or "default"
    for name, older in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        value = rotation.get(name) or getattr(text, name, None) or getattr(text, older, None)
        if value is not None:
            rotation[name] = value
    if rotation.get("partial_rotary_factor") == 1:
        del rotation["partial_rotary_factor"]
    if rotation["rope_type"] not in ("default", "linear") and "original_max_position_embeddings" not in rotation:
        own = getattr(text, "original_max_position_embeddings", None)
        rotation["original_max_position_embeddings"] = own or max_positions(text)
    return rotation if "rope_theta" in rotation or parameters else {}


def _plain(value: Any) -> Any:
    """A value as JSON has it, a float that is a whole number as an integer."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value.is_integer() else value
    return value if isinstance(value, str | int | None) else str(value)
