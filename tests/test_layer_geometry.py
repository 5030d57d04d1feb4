"""The shape of a cache layer by layer: what a kind is, what contradicts it, and who takes only layers alike."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtuner.errors import GeometryError
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import MAX_WINDOW, CacheGeometry, LayerGeometry, LayerKind
from kvtuner.precision import ScaleLayout

FULL, LATENT, NOTHING = (LayerKind.parse(text) for text in ("full", "latent", "none"))


@pytest.mark.parametrize(
    "text", ["full", "latent", "none", "window:1", f"window:{MAX_WINDOW}", "shared:0", "shared:17"]
)
def test_kind_is_read_and_written_alike(text: str) -> None:
    assert str(LayerKind.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "Full", "full ", "full:1", "window", "window:", "window:0", "window:01", "window:-1", "window:1.0", "shared",
     "window:\u0661", f"window:{MAX_WINDOW + 1}", "window:" + "9" * 5000, "none:0", "latent:2", "sliding"],
)  # fmt: skip
def test_other_text_is_no_kind(text: str) -> None:
    with pytest.raises(GeometryError) as refused:
        LayerKind.parse(text)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("kind", "counts", "message"),
    [
        ("full", (8, 2, 64, 0, 0), "v_head_dim must be positive, but is 0"),
        ("full", (8, 2, 64, 64, 16), "only a latent has rotary channels beside it"),
        ("full", (8, 2, 64, 64, 0, 16), "only a latent has keys of an index beside it, but kind full has index_dim=16"),
        ("latent", (16, 1, 512, 0, 64, -1), "index_dim must be at least 0, but is -1"),
        ("window:64", (8, 3, 64, 64, 0), "num_attention_heads 8 is no multiple of num_kv_heads 3"),
        ("window:64", (8, 2, 64, 64, -1), "rope_dim must be at least 0, but is -1"),
        ("latent", (16, 2, 512, 0, 64), "a latent is one key head without values"),
        ("latent", (16, 1, 512, 512, 64), "a latent is one key head without values"),
        ("latent", (16, 1, 0, 0, 64), "head_dim must be positive, but is 0"),
        ("none", (8, 2, 64, 64, 0), "a layer of kind none stores nothing, but has heads"),
        ("shared:0", (0, 0, 0, 0, 1), "a layer of kind shared:0 stores nothing, but has heads"),
    ],
)
def test_counts_that_contradict_a_kind_are_refused(kind: str, counts: tuple[int, ...], message: str) -> None:
    with pytest.raises(GeometryError, match=re.escape(message)):
        LayerGeometry(LayerKind.parse(kind), *counts)


def test_layer_shares_the_cache_of_an_earlier_owner_only() -> None:
    full, nothing = LayerGeometry(FULL, 8, 2, 64, 64), LayerGeometry(NOTHING)
    shared = [LayerGeometry(LayerKind("shared", source)) for source in range(4)]
    geometry = CacheGeometry((nothing, full, shared[1], shared[1]))
    assert (geometry.num_shared_layers, geometry.num_readers()) == (2, {1: 2})
    assert CacheGeometry((full, full)).num_readers() == {}
    for layers in [(nothing, full, shared[0]), (nothing, full, shared[2]), (full, shared[0], shared[1]), (shared[0],)]:
        with pytest.raises(GeometryError, match="no earlier layer of that id has a cache of its own"):
            CacheGeometry(layers)
    with pytest.raises(GeometryError, match="there is nothing to store"):
        CacheGeometry((nothing, nothing))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (LayerGeometry(NOTHING), "layer 2 has kind none"),
        (LayerGeometry(LayerKind("window", 128), 8, 2, 64, 64), "layer 2 has kind window:128"),
        (LayerGeometry(LATENT, 16, 1, 512, 0, 64), "layer 2 has kind latent"),
        (LayerGeometry(FULL, 8, 2, 64, 128), "layer 2 has other heads or channels"),
    ],
)
def test_layers_alike_are_one_geometry_and_the_first_other_one_is_named(other: LayerGeometry, named: str) -> None:
    full = LayerGeometry(FULL, 8, 2, 64, 64)
    assert CacheGeometry((full,) * 3).alike() == ModelGeometry(3, 8, 2, 64, 64)
    with pytest.raises(GeometryError, match=rf"^{named}, and only models whose layers are all full and alike"):
        CacheGeometry((full, full, other, full)).alike()
    if other.kind != FULL:
        with pytest.raises(GeometryError, match=r"^layer 0 has kind"):
            CacheGeometry((other, full)).alike()


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 3))
def test_rows_of_a_layer_are_those_of_the_same_uniform_model(heads: int, tp_size: int, layers: int) -> None:
    layer = LayerGeometry(FULL, heads, heads, 64, 32)
    uniform, layouts = ModelGeometry(layers + 1, heads, heads, 64, 32), (ScaleLayout(32), ScaleLayout(16))
    try:
        wanted = uniform.row_shape(*layouts, tp_size=tp_size)
    except GeometryError as error:
        with pytest.raises(GeometryError, match=re.escape(str(error))):
            layer.row_shape(*layouts, tp_size=tp_size)
    else:
        assert layer.row_shape(*layouts, tp_size=tp_size) == wanted
