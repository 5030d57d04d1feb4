"""Vectors of profiles whose layers differ in kinds, heads, channels or groups. `make_vectors` writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind
from kvtuner.precision import ScaleLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtuner.exported_configs.profile.profile import Profile

    Document = dict[str, Any]

NAMES = ("gaps", "windows", "two-geometries", "latents", "indexes")
COUNTS = ("num_attention_heads", "num_kv_heads", "head_dim", "v_head_dim", "rope_dim", "index_dim")
MOST_LAYERS = 4096
FULL, LATENT, NOTHING = (LayerKind(name) for name in ("full", "latent", "none"))


def window(tokens: int) -> LayerKind:
    return LayerKind("window", tokens)


def profiles(make: Callable[..., Profile], transform: Callable[..., Any]) -> dict[str, Profile]:
    """The valid ones, by name; `make` builds a profile, `transform` one by name, heads and channels."""
    nothing = LayerGeometry(NOTHING)
    attention = LayerGeometry(FULL, 4, 2, 32, 32)
    local, wide = LayerGeometry(window(1024), 8, 4, 16, 16), LayerGeometry(FULL, 8, 1, 64, 64)
    latent = LayerGeometry(LATENT, 16, 1, 64, 0, 16)
    rotated = transform("hadamard", 1, 64)
    groups = {"k_group_size": 64, "v_group_size": 64}
    sixteen, thirty_two = (dict.fromkeys(("k_layout", "v_layout"), ScaleLayout(size)) for size in (16, 32))
    return {
        # Layers 3, 7 and 11 of a hybrid: the others have linear attention.
        "gaps": make(
            CacheGeometry(((nothing,) * 3 + (attention,)) * 3),
            [
                LayerQuantization(4, 2, transform("centered+hadamard", 2, 32)),
                LayerQuantization(16, 8),
                LayerQuantization(8, 4, transform("hadamard", 2, 32)),
            ],
            **thirty_two,
        ),
        "windows": make(
            CacheGeometry((LayerGeometry(window(128), 8, 2, 32, 32), LayerGeometry(FULL, 8, 2, 32, 32)) * 2),
            [LayerQuantization(4, 4), LayerQuantization(4, 2)] * 2,
            **thirty_two,
            fit="least_squares",
        ),
        # Layers 4 and 5 read what 2 and 3 cached.
        "two-geometries": make(
            CacheGeometry(
                (
                    *(local, local, local, wide),
                    *(LayerGeometry(LayerKind("shared", 2)), LayerGeometry(LayerKind("shared", 3))),
                )
            ),
            [
                LayerQuantization(8, 4),
                LayerQuantization(4, 2, transform("balanced", 4, 16)),
                LayerQuantization(16, 16),
                LayerQuantization(2, 4, transform("centered+balanced+hadamard", 1, 64), rotated, **groups),
            ],
            **sixteen,
            budget=AskedBudget("by hand", tp_size=4, pp_size=4),
        ),
        "latents": make(
            CacheGeometry((latent, latent, LayerGeometry(LATENT, 16, 1, 64, 0, 0), latent)),
            [
                LayerQuantization(4, None, rotated),
                LayerQuantization(2, None, transform("centered", 1, 64), k_group_size=16),
                LayerQuantization(8, None, rotated),
                LayerQuantization(16, None),
            ],
            **thirty_two,
        ),
        # Layers 1 and 3 read what the indexes of 0 and 2 select.
        "indexes": make(
            CacheGeometry((LayerGeometry(LATENT, 16, 1, 64, 0, 16, 24), latent) * 2),
            [LayerQuantization(4, None, rotated), LayerQuantization(2, None)] * 2,
            **thirty_two,
        ),
    }


def hashed_geometry(geometry: Document) -> Document:
    """What the digest covers of a geometry in a file, as whoever forges a profile would write it."""
    unsaid: Document = {"kind": "full", "rope_dim": 0, "index_dim": 0}
    extra = (*unsaid, "exceptions")
    shape = {name: value for name, value in geometry.items() if name not in extra}
    stated = {name: geometry[name] for name in extra if geometry.get(name) is not None}
    if all(unsaid.get(name) == value for name, value in stated.items()):
        return shape
    usual = {**unsaid, **shape, **stated}
    named: dict[Any, Document] = {}
    for exception in geometry.get("exceptions") or ():
        change = {name: value for name, value in exception.items() if name != "layers" and value is not None}
        named |= dict.fromkeys(exception["layers"], change)
    is_empty = [str(change.get("kind", "full")).startswith(("none", "shared")) for change in named.values()]
    layers: list[Document] = []
    total = geometry["num_layers"] + sum(is_empty)
    if total > MOST_LAYERS:
        raise ValueError(f"{total} layers would fill the memory, and no reader accepts them")
    for number in range(total):
        full = {**{name: usual.get(name) for name in (*COUNTS, "kind")}, **named.get(number, {})}
        empty = str(full["kind"]).startswith(("none", "shared"))
        full = {name: value for name, value in full.items() if name != "index_dim" or value != 0}
        layers.append({"kind": full["kind"]} if empty else full)
    return {"layers": layers}


def invalid(documents: dict[str, Document], changed: Callable[..., Document]) -> Iterator[tuple[str, bool, Document]]:
    """Name of the broken rule, whether rows or addresses depend on it, and the document."""
    first, gaps, windows, two, latents, indexes = (documents[name] for name in ("example", *NAMES))
    other = "geometry.exceptions.0"
    yield (
        "exceptions-before-their-version",
        True,
        changed(first, "geometry.exceptions", [{"layers": [0], "kind": "window:64"}]),
    )
    yield "kind-before-its-version", True, changed(first, "geometry.kind", "full")
    yield "rope-dim-before-its-version", True, changed(first, "geometry.rope_dim", 0)
    yield "index-dim-before-its-version", True, changed(first, "geometry.index_dim", 0)
    yield "group-of-its-own-before-its-version", True, changed(first, "layers.0.v.group_size", 8)
    yield "exceptions-empty", False, changed(windows, "geometry.exceptions", [])
    yield "exception-without-layers", True, changed(windows, f"{other}.layers", [])
    yield "exception-of-an-unknown-field", True, changed(windows, f"{other}.heads", 2)
    yield (
        "exception-that-differs-in-nothing",
        True,
        changed(windows, "geometry.exceptions", [{"layers": [1]}, {"layers": [3], "kind": "full"}]),
    )
    yield "exception-as-the-others", True, changed(windows, f"{other}.head_dim", 32)
    heads = {"num_attention_heads": 8}
    all_layers = [{"layers": [0, 2], **heads}, {"layers": [1, 3], "kind": "full", **heads}]
    excepted = changed(windows, "geometry.exceptions", all_layers)
    yield "geometry-of-no-layer-breaks-its-rules", True, changed(excepted, "geometry.num_attention_heads", 7)
    yield "exception-out-of-order", True, changed(windows, f"{other}.layers", [3, 1])
    yield "exception-twice-in-one", True, changed(windows, f"{other}.layers", [1, 1, 3])
    yield "layer-in-two-exceptions", True, changed(two, "geometry.exceptions.1.layers", [3, 4])
    yield "exception-beyond-the-model", True, changed(windows, f"{other}.layers", [1, 4])
    yield "exception-of-a-negative-layer", True, changed(windows, f"{other}.layers", [-1, 1])
    yield "exception-layer-as-float", True, changed(windows, f"{other}.layers", [1.0, 3])
    yield "kind-unknown", True, changed(windows, f"{other}.kind", "sliding")
    yield "kind-without-its-number", True, changed(windows, f"{other}.kind", "window")
    yield "kind-with-a-number-too-many", True, changed(windows, f"{other}.kind", "none:1")
    yield "window-of-no-tokens", True, changed(windows, f"{other}.kind", "window:0")
    yield "window-with-a-leading-zero", True, changed(windows, f"{other}.kind", "window:064")
    yield "window-too-long", True, changed(windows, f"{other}.kind", f"window:{2**31}")
    yield "kind-of-all-layers-stores-nothing", True, changed(windows, "geometry.kind", "none")
    yield "nothing-stored-with-heads", True, changed(gaps, f"{other}.num_kv_heads", 1)
    yield "layer-where-nothing-is-stored", True, changed(gaps, "layers.0.layer", 2)
    yield "layer-of-a-gap-missing", True, changed(gaps, "layers", gaps["layers"][:2])
    yield "layers-counted-with-gaps", True, changed(gaps, "geometry.num_layers", 12)
    yield "shared-with-a-later-layer", True, changed(two, "geometry.exceptions.1.kind", "shared:5")
    yield "shared-with-a-sharing-layer", True, changed(two, "geometry.exceptions.2.kind", "shared:4")
    yield "shared-layers-not-counted", True, changed(two, "geometry.num_shared_layers", 1)
    yield "heads-of-a-layer-do-not-divide", True, changed(two, f"{other}.num_kv_heads", 3)
    yield "array-of-the-usual-shape", True, changed(two, f"{other}.head_dim", 32)
    yield "ranks-do-not-divide-one-layer", False, changed(two, "budget.tp_size", 3)
    yield "native-with-a-group", True, changed(two, "layers.2.v.group_size", 16)
    yield "group-of-its-own-does-not-divide", True, changed(two, "layers.3.k.group_size", 48)
    yield "group-of-its-own-zero", True, changed(two, "layers.3.k.group_size", 0)
    yield "rope-dim-of-keys", True, changed(windows, "geometry.rope_dim", 16)
    yield "index-dim-of-keys", True, changed(windows, "geometry.index_dim", 16)
    yield "index-dim-negative", True, changed(indexes, f"{other}.index_dim", -24)
    yield "latent-with-values", True, changed(latents, "layers.0.v", {"bits": 4})
    yield "latent-with-channels-of-values", True, changed(latents, "geometry.v_head_dim", 64)
    yield "latent-of-two-heads", True, changed(latents, "geometry.num_kv_heads", 2)
    yield "values-absent", True, changed(two, "layers.0.v", ...)
    yield "value-channels-of-none", True, changed(first, "geometry.v_head_dim", 0)
    yield "rotary-bytes-not-counted", False, changed(latents, "budget.bytes_per_token", 0)
