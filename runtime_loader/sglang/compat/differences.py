"""What SGLang's code of a model answers otherwise than transformers': put right by hooks, or refused by name.

Hooks put Llama 4's order of channels right, and what Gemma 4 reads of images; other windows, rotary positions, channels
and images are refused. It knows configurations and options alone, no pools, and compares transformers' configuration
with the one that SGLang holds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError, UnsupportedModelError
from kvtuner.exported_configs.identity.model_identity import architecture_of
from kvtuner.layer_ranges import write_layers
from kvtuner.runtime_loader.sglang.process_state import process_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtuner.layer_geometry import CacheGeometry, KindName

BASES: Final = {
    "Exaone4ForCausalLM": 1e6,
    "ExaoneMoEForCausalLM": 1e6,
    "ExaoneMoeForCausalLM": 1e6,
    "GraniteMoeHybridForCausalLM": 1e4,
    "Olmo3ForCausalLM": 1e4,
    "Qwen3NextForCausalLM": 1e4,
}
"""The architectures whose rotary base SGLang reads from a field rope_theta alone, with the base it takes without one.

transformers 5 writes the base into rope_parameters only, by type of layer where there are several, and moves it there
from that field of a file.
"""
_BY_WORD: Final = ("Exaone4ForCausalLM",)
"""The architectures whose windows SGLang reads from a word in the configuration, not from its types of layers."""
LLAMA_4: Final = "Llama4ForConditionalGeneration"
"""The architecture of which each fourth layer in SGLang's code reads all tokens, and has no rotary positions."""
_LLAMA_4_ALONE: Final = "Llama4ForCausalLM"
"""The architecture of its decoder alone, whose channels SGLang rotates as if it had put them in another order."""
GEMMA_4: Final = "Gemma4ForConditionalGeneration"
"""The architecture whose full layers read images causally, in transformers' code."""
TEXT_ALONE: Final = """--json-model-override-args '{"language_model_only": true}'"""
"""The flag by which SGLang takes a model that reads images for one of text."""
_ALSO: Final = "SGLang reads it so without a profile too"
_OF_CHECKPOINTS: Final = (
    "auto", "bitsandbytes", "dummy", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "safetensors",
)  # fmt: skip
"""The load formats by which SGLang reads the tensors of a checkpoint, in the checkpoint's order of channels."""


def answer_as_transformers(model_config: Any) -> None:
    """Let SGLang's code of a model do what transformers' does, where a profile is served. Called before it is loaded.

    Of Llama 4 this is the order of channels, and of Gemma 4 what becomes of the padding of images, and whose tokens
    read one another.
    """
    architecture = model_config.hf_config.architectures[0]
    if architecture == LLAMA_4:
        process_state().hook_once(architecture, _keep_order_of_channels)
    if architecture == GEMMA_4 and model_config.is_multimodal:
        process_state().hook_once(architecture, _read_images_as_transformers)


def _keep_order_of_channels() -> None:
    """Load queries and keys in the order of channels that checkpoints and profiles have.

    SGLang puts pairs of channels that are rotated together half a head apart, and rotates such pairs; here neighbours
    stay neighbours and are rotated.
    """
    # Imported here, as below, because refusals do without SGLang.
    from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, check_named, install

    def as_they_are(original: Callable[..., Any], self: Any, name: str, loaded_weight: Tensor) -> tuple[str, Tensor]:
        return name, loaded_weight

    def of_neighbours(*arguments: Any, **options: Any) -> Any:
        return get_rope(*arguments, **{**options, "is_neox_style": False})

    loading = f"sglang.srt.models.mllama4.{LLAMA_4}.permute_qk_weight_for_rotary"
    install(loading, as_they_are, AROUND, "name", "loaded_weight")
    llama_4: Any = importlib.import_module("sglang.srt.models.llama4")
    check_named(f"{llama_4.__name__}.get_rope", "is_neox_style")
    get_rope = llama_4.get_rope
    # Of this module alone: SGLang's registry would hook the function in every module, and so rotate drafts as well.
    llama_4.get_rope = of_neighbours


def _read_images_as_transformers() -> None:
    """Leave padding out of the features of an image, and its tokens causal where the configuration does.

    SGLang adds the patches that pad an image to its first feature, and makes masks for all models of the kind.
    """
    from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, install

    def without_padding(original: Callable[..., None], self: Any, config: Any, **_: Any) -> None:
        original(self, config, mask_pad_before_pool=True)

    def as_configured(original: Callable[..., None], self: Any, *arguments: Any, **options: Any) -> None:
        if reads_in_windows_both_ways(self.config):
            original(self, *arguments, **options)

    pooler = "sglang.srt.models.gemma4_vision.Gemma4VisionPooler.__init__"
    install(pooler, without_padding, AROUND, "config", "mask_pad_before_pool")
    install(f"sglang.srt.models.gemma4_mm.{GEMMA_4}.prepare_attn_masks", as_configured, AROUND, "forward_batch")


def reads_in_windows_both_ways(config: Any) -> bool:
    """Whether the tokens of an image read one another in a Gemma 4, whose full layers are causal for all."""
    return bool(config.get_text_config(decoder=True).use_bidirectional_attention == "vision")


def refuse_ordered_channels(name: str, arguments: Any) -> None:
    """Refuse weights of a Llama 4 that SGLang may have put in its order of channels, by its resolved arguments.

    It does so as it loads a checkpoint, and not where weights are taken as a server had them.
    """
    if name != LLAMA_4:
        return
    cache = getattr(arguments, "weight_cache_mode", "off")  # which not every release has
    flags = {"--load-format": (arguments.load_format, _OF_CHECKPOINTS), "--weight-cache-mode": (cache, ("off",))}
    for flag, (value, works) in flags.items():
        if value not in works:
            raise ServingError(
                f"{flag} {value} does not work with a profile of {name}: the queries and keys of weights that another"
                " server had may have SGLang's order of channels; drop it"
            )


def refuse_other_positions(config: Any, served: Any) -> None:
    """Refuse a model to whose layers SGLang gives another rotary base, other windows, positions or order of channels.

    Its configuration is transformers' own, with what a server overrides, and `served` is the one that SGLang holds.
    """
    name = architecture_of(config)
    if name == _LLAMA_4_ALONE:
        raise UnsupportedModelError(
            f"SGLang's code for {name} rotates other channels than transformers, and loads no experts; serve a"
            f" checkpoint of {LLAMA_4}, as Meta's are, or serve it without a profile ({_ALSO})"
        )
    if name == LLAMA_4:
        _refuse_other_turns(config.get_text_config(decoder=True), name)
    if name not in BASES:
        return
    text = config.get_text_config(decoder=True)
    if getattr(text, "position_embedding_type", "rope") == "rope":
        _refuse_other_base(text, served, name)
    if name in _BY_WORD:
        _refuse_other_pattern(text, name)


def refuse_other_images(model_config: Any, geometry: CacheGeometry, both_ways: frozenset[KindName]) -> None:
    """Refuse a Gemma whose images SGLang, or packed layers, read otherwise than transformers.

    In layers of the kinds `both_ways` the tokens of an image read one another.
    """
    name, text = model_config.hf_config.architectures[0], model_config.hf_text_config
    windows = [layer.kind.number or 0 for layer in geometry.layers if layer.kind.name == "window"]
    if name == GEMMA_4 and text.hidden_size_per_layer_input and text.pad_token_id:
        raise UnsupportedModelError(
            f"SGLang's code for {GEMMA_4} gives features of images the layers' own inputs of token 0, and this model"
            f" has {text.pad_token_id} for its pad_token_id; serve its text, with {TEXT_ALONE}"
        )
    if both_ways == {"window"} and not windows:
        raise UnsupportedModelError(
            f"no layer of {GEMMA_4} has a window in a context of {model_config.context_len} tokens, so that all would"
            " read images causally, as its full layers do; serve a context that is longer than its windows, or its"
            f" text, with {TEXT_ALONE}"
        )
    tokens = getattr(model_config.hf_config, "mm_tokens_per_image", 0)
    if "full" in both_ways and windows and tokens > min(windows):
        raise UnsupportedModelError(
            f"an image of this {name} has {tokens} tokens, which read one another, and SGLang's windows of"
            f" {min(windows)} tokens cut later ones off too, without a profile as well; serve its text,"
            f" with {TEXT_ALONE}, or run it by KVTunerCache"
        )


def _refuse_other_turns(text: Any, name: str) -> None:
    """Refuse a Llama 4 whose full layers, rotary positions or experts come in other turns than in SGLang's code."""
    layers = range(text.num_hidden_layers)
    fourth = [layer for layer in layers if (layer + 1) % 4 == 0]
    step = text.interleave_moe_layer_step
    turns = {
        "layer_types": ([layer for layer in layers if text.layer_types[layer] == "full_attention"], fourth),
        "no_rope_layers": ([layer for layer in layers if not text.no_rope_layers[layer]], fourth),
        "moe_layers": (sorted(text.moe_layers), [layer for layer in layers if not step or (layer + 1) % step == 0]),
    }
    for field, (configured, read) in turns.items():
        if configured != read:
            named = f"layers {write_layers(configured)}" if configured else "no layer"
            raise UnsupportedModelError(
                f"{field} of this model names {named}, and SGLang's code for {name} takes"
                f" {write_layers(read) or 'none'}, whatever it says: it answers this model otherwise than"
                " transformers, without a profile too; run it by KVTunerCache"
            )


def _refuse_other_base(text: Any, served: Any, name: str) -> None:
    """Refuse a model whose rotary base is not the one that SGLang reads."""
    rotary = getattr(text, "rope_parameters", None) or {}
    by_type = {kind: part for kind, part in rotary.items() if isinstance(part, dict)}
    bases = {part["rope_theta"] for part in (by_type or {"": rotary}).values() if "rope_theta" in part}
    scaled = {kind: part["rope_type"] for kind, part in by_type.items() if part.get("rope_type") != "default"}
    if len(bases) > 1 or (scaled and not getattr(served, "rope_scaling", None)):
        what = f"bases {sorted(bases)}" if len(bases) > 1 else f"a rope_type of {scaled}"
        raise UnsupportedModelError(
            f"SGLang's code for {name} reads one rotary base and one rope_scaling, and no rope_parameters by type of"
            f" layer; this model has {what}; write rope_theta and rope_scaling into its config.json, as the hub's"
            f" checkpoints have them, or serve it without a profile ({_ALSO})"
        )
    base, read = next(iter(bases), None), getattr(served, "rope_theta", BASES[name])
    if base is not None and read != base:
        raise UnsupportedModelError(
            f"SGLang's code for {name} takes {read} for its rotary base, which is {base} by rope_parameters: it reads"
            f""" a field rope_theta alone; add --json-model-override-args '{{"rope_theta": {base}}}' ({_ALSO})"""
        )


def _refuse_other_pattern(text: Any, name: str) -> None:
    """Refuse a model whose layers with a window, or with rotary positions, are others by SGLang's own pattern."""
    configured = getattr(text, "sliding_window_pattern", None)
    pattern = configured or ""
    layers = "".join("L" if kind == "sliding_attention" else "G" for kind in text.layer_types)
    read = ""
    if isinstance(pattern, str):
        every = len(pattern) or 1
        read = "".join("L" if place % every else "G" for place in range(1, len(layers) + 1))
    if read != layers:
        raise UnsupportedModelError(
            f"SGLang's code for {name} reads sliding_window_pattern as a word, such as LLLG where each fourth layer has"
            f" no window; this model has {configured!r} in its place, and layers {layers}; write the word into its"
            f" config.json, as the hub's checkpoints have it ({_ALSO})"
        )
    if not pattern and text.sliding_window is not None:
        raise UnsupportedModelError(
            f"{name} has a sliding_window of {text.sliding_window} and no layer that has it: transformers gives rotary"
            f" positions to none of its layers, and SGLang, by {configured!r} for its sliding_window_pattern, to all;"
            ' write "sliding_window_pattern": "G" into its config.json where it was trained without them, and'
            f' "sliding_window": null where with them ({_ALSO})'
        )
