"""Round trips of random profiles, mutated files, and the table of formats."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.exported_configs.formats import FORMATS, PRESETS, readable, writable
from kvtuner.exported_configs.formats.conversion import ImportOptions, parse_map, read, write
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, dump_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import NO_WINDOW, ExactWindow, ScaleLayout
from kvtuner.quant import Transform
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile.profile import Profile

BOUNDED = settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
ROOT = Path(__file__).resolve().parents[3]
ROTATED = Transform(TransformKind.parse("hadamard"))


def test_every_format_has_a_reader_or_a_writer_and_known_options() -> None:
    flagged = {option.name for option in fields(ImportOptions) if "flag" in option.metadata}
    assert {option for form in FORMATS.values() for option in form.options or ()} == flagged
    assert set(FORMATS) - set(readable()) == {"vllm-skip-layers"} and set(writable()) == set(FORMATS)


def test_the_table_of_formats_needs_no_reader_of_yaml() -> None:
    script = "import sys, kvtuner.exported_configs.formats; sys.exit(bool({'yaml', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `build_profile`, often such that some format can say all of it."""
    head_dim, v_head_dim = draw(st.sampled_from([(64, 64), (128, 64), (32, 32), (80, 80)]))
    num_layers = draw(st.integers(1, 5))
    is_even, is_plain = draw(st.booleans()), draw(st.integers(0, 3)) > 0
    menu = draw(st.sampled_from([(16,), (8, 16), (2, 4, 8), (2, 4, 8, 16)]))
    layers = []
    for _ in range(num_layers):
        k_bits = draw(st.sampled_from(menu))
        v_bits = k_bits if is_even else draw(st.sampled_from(menu))
        transforms = [
            Transform() if bits == 16 or is_plain or draw(st.booleans()) else ROTATED for bits in (k_bits, v_bits)
        ]
        layers.append(LayerQuantization(k_bits, v_bits, *transforms))
    granularity = draw(st.sampled_from(["per_token", "per_token", "per_channel"]))
    is_packed = any(layer.k_bits != 16 or layer.v_bits != 16 for layer in layers)
    has_window = granularity == "per_channel" and is_packed and draw(st.booleans())
    return {
        "geometry": ModelGeometry(num_layers, 4, 2, head_dim, v_head_dim),
        "layers": layers,
        "k_layout": ScaleLayout(draw(st.sampled_from([head_dim, head_dim, 32, 64])), granularity=granularity),
        "v_layout": ScaleLayout(draw(st.sampled_from([v_head_dim, v_head_dim, 32, 64]))),
        "symmetric": draw(st.booleans()),
        "budget": AskedBudget("by hand"),
        "window": ExactWindow(32) if has_window else NO_WINDOW,
    }


def can_say(document: dict[str, Any], name: str) -> bool:
    """Whether a format says all that quantized layers have, worked out from the file's own fields."""
    geometry, defaults = document["geometry"], document["defaults"]
    dims = {"k": geometry["head_dim"], "v": geometry["v_head_dim"]}
    bits = [(layer["k"]["bits"], layer["v"]["bits"]) for layer in document["layers"]]
    # Every quantized side: (side, granularity, group, symmetric, transform).
    sides = {
        (side, defaults[side]["granularity"], defaults[side]["group_size"], defaults[side]["symmetric"],
         layer[side].get("transform", defaults[side]["transform"]))
        for layer in document["layers"] for side in "kv" if layer[side]["bits"] != 16
    }  # fmt: skip
    if any(side[4] != "none" for side in sides):
        return False
    exact = document.get("residual_length", 0)
    if exact and name != "kvtuner-yaml":
        return False
    plain = {("k", "per_token", dims["k"]), ("v", "per_token", dims["v"])}
    stored, symmetric = {side[:3] for side in sides}, {side[3] for side in sides}
    if name == "modelopt":
        return stored <= plain and symmetric <= {True} and set(bits) <= {(8, 8), (16, 16)}
    if not symmetric <= {False}:
        return False
    if name == "kvtuner-yaml":
        kivi = {("k", "per_channel", 32), ("v", "per_token", 32)}
        return (stored <= plain and not exact) or (stored <= kivi and exact == 32)
    if any(k != v for k, v in bits):
        return False
    if name == "ranges":
        return stored <= plain
    groups = {side[2] for side in stored}
    return all(side[1] == "per_token" for side in stored) and len(groups) <= 1 and groups <= {32, 64, 128}


@pytest.mark.slow
def test_what_a_format_can_say_comes_back_and_all_else_is_refused(make_profile: Callable[..., Profile]) -> None:
    seen = set()

    @BOUNDED
    @given(chosen=arguments())
    def translate_there_and_back(chosen: dict[str, Any]) -> None:
        try:
            profile = load_profile(dump_profile(make_profile(**chosen)))
        except (PrecisionError, ProfileError):  # groups that the heads cannot have, transforms of keys per channel
            return
        document = json.loads(dump_profile(profile))
        for name in sorted(set(readable()) & set(writable())):
            is_said = can_say(document, name)
            seen.add((name, is_said, any(pair.k_bits != 16 for pair in profile.pairs)))
            check(profile, name, is_said)

    translate_there_and_back()
    # The test is about something: every format sometimes says quantized layers, and sometimes cannot.
    assert {(name, is_said, True) for name in readable() for is_said in (True, False)} - seen == set()


def check(profile: Profile, name: str, is_said: bool) -> None:
    if not is_said:
        with pytest.raises(ProfileError, match=r"cannot say all of the profile: layer [0-4]: "):
            write(profile, name)
        return
    exported = write(profile, name)
    options = ImportOptions(scheme=next((name for name in PRESETS if f"--scheme {name}" in str(exported.notes)), None))
    returned, _ = read(exported.text.encode(), name, profile.to_geometry(), profile.model, options)
    assert returned.digest == profile.digest
    assert write(returned, name) == exported


SEEDS = {
    "kvtuner-yaml": b"0: {nbits_key: 8, nbits_value: 4}\n1: {nbits_key: 4, nbits_value: 2}\n",
    "modelopt": json.dumps({
        "quantization": {
            "kv_cache_quant_algo": "MIXED_PRECISION",
            "kv_cache_quantized_layers": {
                "model.layers.0.self_attn": {"quant_algo": "INT8"},
                "model.layers.1.self_attn": {"quant_algo": "FP8"},
            },
            "kv_cache_schema_version": 1,
        }
    }).encode(),
    "optiq": b'[{"layer_idx": 0, "bits": 4, "group_size": 64}, {"layer_idx": 1, "bits": 0}]',
    "ranges": b"kv_cache_per_layer_dtype:\n  0: bf16\n  1: 'int4'\n",
}  # fmt: skip
PIECES = [
    *(b"0", b"1", b"-1", b"4", b"8", b"16", b"4.0", b"1e9", b"true", b"null", b"~", b"0x1", b"0b_", b"1:5", b"NaN"),
    *(b"[", b"]", b"{", b"}", b":", b": ", b",", b"\n", b"  ", b"- ", b"? ", b"&a ", b"*a", b"!!int ", b"<<: ", b"'"),
    *(b'"', b"\\ud800", b"\xff", b"\x00", b"\xc2\x85", b"9" * 400, b"[" * 3000, b"2001-02-31", b"#", b"---\n", b"%"),
]


@pytest.mark.slow
@BOUNDED
@pytest.mark.parametrize("name", readable())
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 9), st.sampled_from(PIECES)), min_size=1, max_size=4
    )
)
def test_mutated_files_are_refused_or_give_a_profile(
    make_profile: Callable[..., Profile], name: str, edits: list[tuple[float, int, bytes]]
) -> None:
    data = SEEDS[name]
    for place, removed, inserted in edits:
        start = int(place * len(data))
        data = data[:start] + inserted + data[start + removed :]
    geometry = ModelGeometry(2, 4, 2, 64, 64)
    words = {"words": parse_map("FP8=8")} if "words" in FORMATS[name].options else {}
    options = ImportOptions(scheme="pertoken" if name == "kvtuner-yaml" else None, **words)
    try:
        profile, notes = read(data, name, geometry, make_profile().model, options)
    except ProfileError as error:
        assert str(error).isprintable() and len(str(error)) < 500
        return
    assert load_profile(dump_profile(profile)) == profile
    assert all(note.isprintable() for note in notes)


@pytest.mark.slow
@BOUNDED
@pytest.mark.parametrize("name", readable())
@given(data=st.binary(max_size=48) | st.text(alphabet='[]{}",:\\&*!<>?|-\n 0123abfnt', max_size=48).map(str.encode))
def test_arbitrary_bytes_are_refused_or_give_a_profile(
    make_profile: Callable[..., Profile], name: str, data: bytes
) -> None:
    geometry = ModelGeometry(2, 4, 2, 64, 64)
    options = ImportOptions(scheme="kivi" if name == "kvtuner-yaml" else None)
    try:
        read(data, name, geometry, make_profile().model, options)
    except ProfileError as error:
        assert str(error).isprintable() and len(str(error)) < 500
