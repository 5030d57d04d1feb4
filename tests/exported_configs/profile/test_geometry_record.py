"""Profiles whose layers differ: their record is compact and strict, and version 1 stays as it is."""

from __future__ import annotations

import hashlib
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats import FORMATS
from kvtuner.exported_configs.formats.conversion import write
from kvtuner.exported_configs.profile.build import (
    AskedBudget,
    LayerQuantization,
    build_profile,
    dump_profile,
    of_whole_model,
)
from kvtuner.exported_configs.profile.geometry_record import GeometryRecord
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind
from kvtuner.precision import PrecisionPair, ScaleLayout, bytes_per_token, effective_bits, mean_bits

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile

VECTORS = Path(__file__).resolve().parents[3] / "exported_configs" / "vectors" / "valid"
BY_LAYER = ("gaps", "windows", "two-geometries", "latents", "indexes")
MODEL = json.loads((VECTORS / "uniform.json").read_bytes())["model"]


def vector(name: str) -> Profile:
    return load_profile(VECTORS / f"{name}.json")


def random_geometry(seed: int) -> CacheGeometry:
    """Up to 24 layers of all kinds, of two shapes each, at least one of which owns a cache."""
    draw = random.Random(seed)
    layers: list[LayerGeometry] = []
    owners: list[int] = []
    for number in range(draw.randint(1, 24)):
        kind = draw.choice(["full", "full", "window", "latent", "none", "shared"])
        if kind == "shared" and owners:
            layers.append(LayerGeometry(LayerKind("shared", draw.choice(owners))))
        elif kind in ("none", "shared") and number:
            layers.append(LayerGeometry(LayerKind("none")))
        else:
            owners.append(number)
            heads = draw.choice([1, 2])
            if kind == "latent":
                layers.append(
                    LayerGeometry(LayerKind("latent"), 4, 1, 32, 0, draw.choice([0, 16]), draw.choice([0, 8]))
                )
            else:
                own = LayerKind("window", draw.choice([64, 128])) if kind == "window" else LayerKind()
                layers.append(LayerGeometry(own, 4, heads, 32, draw.choice([16, 32])))
    return CacheGeometry(tuple(layers))


def built(geometry: CacheGeometry | ModelGeometry, **changes: Any) -> Profile:
    owners = (
        [layer for layer in geometry.layers if layer.kind.owns_cache] if isinstance(geometry, CacheGeometry) else []
    )
    layers = [LayerQuantization(4, None if layer.kind.name == "latent" else 8) for layer in owners]
    arguments = {
        "k_layout": ScaleLayout(16),
        "v_layout": ScaleLayout(16),
        "symmetric": False,
        "budget": AskedBudget("by hand"),
    }
    model = ModelIdentity.model_validate(MODEL)
    return build_profile(geometry=geometry, model=model, **{"layers": layers, **arguments, **changes})


@pytest.mark.parametrize("seed", range(40))
def test_random_geometry_is_what_was_written_and_stated_once(seed: int) -> None:
    geometry = random_geometry(seed)
    profile = built(geometry)
    again = load_profile(dump_profile(profile))
    assert again == profile and dump_profile(again) == dump_profile(profile)
    if again.geometry.is_by_layer:
        assert again.schema_version == 2 and again.geometry.by_layer() == geometry
    exceptions = again.geometry.exceptions or ()
    stated = [json.dumps(exception.model_dump(exclude={"layers"})) for exception in exceptions]
    assert len(set(stated)) == len(stated)
    assert [entry.layer for entry in again.layers] == list(geometry.owners)


@pytest.mark.parametrize("seed", range(20))
def test_two_ways_to_write_one_geometry_have_one_digest(seed: int) -> None:
    """Another geometry for all, with exceptions for the rest, hashes the same."""
    geometry = random_geometry(seed)
    document = json.loads(dump_profile(built(geometry)))
    counts = ("num_attention_heads", "num_kv_heads", "head_dim", "v_head_dim", "rope_dim", "index_dim")
    usual = {
        "kind": "window:77",
        "num_attention_heads": 5,
        "num_kv_heads": 5,
        "head_dim": 3,
        "v_head_dim": 7,
        "rope_dim": 0,
        "index_dim": 0,
    }
    exceptions = []
    for number, layer in enumerate(geometry.layers):
        own = {
            "kind": str(layer.kind),
            **({name: getattr(layer, name) for name in counts} if layer.kind.owns_cache else {}),
        }
        exceptions.append({"layers": [number], **{name: x for name, x in own.items() if x != usual[name]}})
    size = {name: document["geometry"][name] for name in ("num_layers", "num_shared_layers")}
    rewritten = GeometryRecord.model_validate({**size, **usual, "exceptions": exceptions})
    assert rewritten.by_layer() == geometry
    if built(geometry).geometry.is_by_layer:
        assert rewritten.hashed() == built(geometry).geometry.hashed()


def test_layers_alike_are_written_in_version_1_whatever_they_are_built_from() -> None:
    layer = LayerGeometry(LayerKind(), 4, 2, 32, 16)
    by_layer, uniform = built(CacheGeometry((layer,) * 3)), ModelGeometry(3, 4, 2, 32, 16)
    layers = [LayerQuantization(4, 8)] * 3
    assert dump_profile(by_layer) == dump_profile(built(uniform, layers=layers))
    assert by_layer.schema_version == 1 and by_layer.to_geometry() == uniform


def test_files_of_version_1_are_dumped_byte_for_byte_as_they_were_read() -> None:
    """Those that this repository wrote, those of the catalogue among them."""
    catalogue = VECTORS.parents[1] / "profiles"
    names = [path for path in [*VECTORS.glob("*.json"), *catalogue.glob("*bit.json")] if "nulls" not in path.stem]
    firsts = [path for path in names if json.loads(path.read_bytes())["schema_version"] == 1]
    assert len(firsts) >= 8
    for path in firsts:
        if path.stem != "order-and-space":
            assert dump_profile(load_profile(path)) == path.read_bytes(), path.name


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_layers_alike_are_those_of_the_one_byte_formula(seed: int) -> None:
    draw = random.Random(seed)
    heads, layers = draw.choice([1, 2, 3, 8]), draw.randint(1, 6)
    geometry = ModelGeometry(layers, heads * 2, heads, 64, 32)
    pairs = [PrecisionPair(draw.choice([2, 4, 8, 16]), draw.choice([2, 4, 8, 16])) for _ in range(layers)]
    chosen = [LayerQuantization(pair.k_bits, pair.v_bits) for pair in pairs]
    profile = built(geometry, layers=chosen, k_layout=ScaleLayout(32), v_layout=ScaleLayout(32))
    rows = geometry.row_shape(k_layout=ScaleLayout(32), v_layout=ScaleLayout(32))
    assert profile.row_shape() == rows and profile.bytes_per_token() == bytes_per_token(pairs, rows)
    assert (profile.mean_bits, profile.effective_bits) == (mean_bits(pairs, rows), effective_bits(pairs, rows))
    assert profile.bf16_bytes_per_token() == geometry.bf16_bytes_per_token()


def test_latent_takes_the_bytes_of_one_row_and_its_rotary_channels() -> None:
    """The sum by hand is 32 bytes of 64 codes and 8 of two groups, padded to 48, and 32 of 16 rotary channels."""
    latent = LayerGeometry(LayerKind("latent"), 16, 1, 64, 0, 16)
    profile = built(CacheGeometry((latent,)), k_layout=ScaleLayout(32), layers=[LayerQuantization(4, None)])
    assert profile.bytes_per_token() == profile.bytes_per_token(16) == 48 + 32
    assert profile.bf16_bytes_per_token() == 2 * (64 + 16)
    assert profile.mean_bits == Fraction(64 * 4 + 16 * 16, 80) and profile.effective_bits == 8 * 80 / 80
    assert profile.pairs == (PrecisionPair(4, 4),)
    assert profile.quant_spec(0, "v") is None and profile.transform_name(0, "v") == "none"


@pytest.mark.parametrize("name", BY_LAYER)
def test_whoever_takes_layers_alike_only_refuses_the_first_other_one_by_name(name: str) -> None:
    profile = vector(name)
    first = {"gaps": "0 has kind none", "windows": "0 has kind window:128"}
    first |= {
        "two-geometries": "0 has kind window:1024",
        "latents": "0 has kind latent",
        "indexes": "0 has kind latent",
    }
    callers = [profile.to_geometry, lambda: profile.check_model(object())]  # type: ignore[arg-type]  # refused before it is read
    callers += [lambda name=name: write(profile, name) for name in FORMATS]
    for call in callers:
        with pytest.raises(ProfileError, match=f"^layer {first[name]}, and only models whose layers"):
            call()


@pytest.mark.parametrize(
    ("name", "layers"), [("gaps", (3, 7, 11)), ("windows", (1, 3)), ("two-geometries", (3,)), ("latents", None)]
)
def test_full_layers_among_others_are_those_that_rows_are_stored_of(name: str, layers: tuple[int, ...] | None) -> None:
    profile = vector(name)
    if layers is None:
        with pytest.raises(ProfileError, match=r"^layer 2 has other heads or channels than layer 0"):
            profile.tuned_geometry()
        return
    assert profile.tuned_geometry().ids == layers
    assert len(profile.tuned_pairs) == len(layers)
    assert list(profile.geometry.growing()) == list(layers)
    if name == "gaps":
        assert profile.row_shape().num_kv_heads == 2
        return
    with pytest.raises(ProfileError, match=r"^layers\[0\] stores K\dV\d and does not read all tokens.*give it 16 bits"):
        profile.row_shape()


def test_a_window_takes_bytes_of_its_tokens_alone() -> None:
    full, local = (LayerGeometry(LayerKind.parse(kind), 4, 2, 32, 16) for kind in ("full", "window:64"))
    native = 2 * 2 * (32 + 16)
    geometry = CacheGeometry((local, full, LayerGeometry(LayerKind("none")), local))
    assert geometry.window_bytes(1000) == 2 * 64 * native
    assert geometry.window_bytes(10) == 2 * 10 * native
    assert geometry.window_bytes(1000, tp_size=2) == 64 * native
    tuned = geometry.tuned()
    assert (tuned.ids, tuned.num_layers, tuned.head_dim, tuned.v_head_dim) == ((1,), 1, 32, 16)
    whole, layers = of_whole_model(geometry, [LayerQuantization(4, 2)])
    profile = built(whole, layers=layers)
    assert [str(pair) for pair in profile.pairs] == ["K16V16", "K4V2", "K16V16"]
    assert profile.bytes_per_token() == tuned.row_shape().pair_bytes(PrecisionPair(4, 2))
    assert (profile.mean_bits, profile.bf16_bytes_per_token()) == (Fraction(4 * 32 + 2 * 16, 48), native)
    # Where every layer has a window, all of them are counted.
    only = built(CacheGeometry((local,)), layers=[LayerQuantization(16, 16)])
    assert only.bytes_per_token() == native


def test_groups_of_a_layer_are_stored_and_refused_where_one_group_is_needed() -> None:
    layers = [
        LayerQuantization(4, 4),
        LayerQuantization(4, 4, v_group_size=16),
        LayerQuantization(16, 16, k_group_size=8),
    ]
    geometry = ModelGeometry(3, 4, 2, 32, 32)
    profile = built(geometry, layers=layers, k_layout=ScaleLayout(32), v_layout=ScaleLayout(32))
    spec = profile.quant_spec(1, "v")
    assert profile.schema_version == 2 and spec is not None and spec.group_size == 16
    assert profile.layers[2].k.group_size is None
    with pytest.raises(ProfileError, match=r"layers\[1\].v has groups of 16, and other layers of 32"):
        profile.row_shape()
    same = built(
        geometry,
        layers=[LayerQuantization(4, 4, k_group_size=32)] * 3,
        k_layout=ScaleLayout(32),
        v_layout=ScaleLayout(32),
    )
    assert same.schema_version == 1


def test_hostile_exceptions_are_refused_in_no_time() -> None:
    """A thousand exceptions of a thousand layers each fit into the largest file."""
    document = json.loads((VECTORS / "windows.json").read_bytes())
    ids = list(range(1024))
    document["geometry"] |= {
        "kind": "full",
        "exceptions": [{"layers": ids, "kind": f"window:{n + 1}"} for n in range(1024)],
    }
    document["digest"] = "sha256:" + hashlib.sha256(b"").hexdigest()
    with pytest.raises(ProfileError, match="some layer stands in two"):
        load_profile(json.dumps(document).encode())
