"""Mutated profiles: nothing but `ProfileError` escapes, and what is accepted says exactly what the file says."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile.profile import Profile

    Document = dict[str, Any]

BOUNDED = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
HOSTILE_LITERALS = [
    *("null", "true", "false", "0", "-0", "1", "2", "3", "4", "4.0", "8", "16", "24", "48", "-1", "1024", "1025"),
    *("0.5", "1e-400", "1e999", "NaN", "-Infinity", "1" + "0" * 400, str(2**63), str(2**64)),
    *('""', '"none"', '"hadamard"', '"balanced"', '"per_channel"', '"per_token"', '"AAAA"', '"\\ud800"', '"\\u0000"'),
    *("[]", "{}", "[[]]", "[1, 2]", '{"bits": 16}', '{"bits": 4, "transform": "none"}', "[" * 15 + "]" * 15),
]


def containers(node: Any) -> list[Any]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    nested = [inner for child in children for inner in containers(child)]
    return [node, *nested] if isinstance(node, dict | list) and node else nested


def mutate(draw: st.DataObject, document: Document, marks: dict[str, str]) -> None:
    """Change one place of the document; literals that JSON cannot carry stand in as marks."""
    container = draw.draw(st.sampled_from(containers(document)))
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    key = draw.draw(st.sampled_from(keys))
    action = draw.draw(st.sampled_from(["replace", "replace", "copy", "delete", "swap", "insert"]))
    mark = f"mark {len(marks)}"
    if action == "delete":
        del container[key]
    elif action == "swap":
        other = draw.draw(st.sampled_from(keys))
        container[key], container[other] = container[other], container[key]
    elif action == "copy":
        container[key] = copy.deepcopy(draw.draw(st.sampled_from(containers(document))))
    elif isinstance(container, list) and action == "insert":
        container.insert(key, mark)
    else:
        container[key if action == "replace" else draw.draw(st.sampled_from(["transform", "mu", "x"]))] = mark
    marks[mark] = draw.draw(st.sampled_from(HOSTILE_LITERALS))


def as_text(document: Document, marks: dict[str, str]) -> str:
    text = json.dumps(document)
    for mark, literal in marks.items():
        text = text.replace(f'"{mark}"', literal)
    return text


def normal(node: Any) -> Any:
    """A document as `dump_profile` would word it: 6 digits, no absent options."""
    if isinstance(node, dict):
        identity = {"rope_sha256", "weight_quantization", "tokenizer_sha256", "max_positions", "checkpoint_sha256"}
        absent = {"transform", "mu", "lambda", "command", *identity}
        return {name: normal(value) for name, value in node.items() if not (name in absent and value is None)}
    if isinstance(node, list):
        return [normal(item) for item in node]
    return float(f"{node:.6g}") if isinstance(node, float) else node


def check_usable(profile: Profile) -> None:
    """What the serving side relies on to size and address its pool."""
    geometry = profile.to_geometry()
    assert len(profile.layers) == geometry.num_layers
    assert 0 < profile.bytes_per_token(profile.budget.tp_size) <= profile.bytes_per_token()
    for number, pair in enumerate(profile.pairs):
        for side, bits, head_dim in (("k", pair.k_bits, geometry.head_dim), ("v", pair.v_bits, geometry.v_head_dim)):
            spec = profile.quant_spec(number, side)  # type: ignore[arg-type]  # "k" or "v" from the tuple
            assert (spec is None) == (bits == 16)
            if spec is not None:
                x = torch.linspace(-1, 1, geometry.num_kv_heads * head_dim).reshape(1, -1, head_dim)
                x = x.expand(spec.token_group, -1, -1)
                assert torch.isfinite(spec.simulate(x)).all()


def load_or_refuse(data: bytes) -> Profile | None:
    try:
        return load_profile(data)
    except ProfileError as error:
        assert str(error).isprintable() and len(str(error)) < 500
        return None


@BOUNDED
@given(draw=st.data())
def test_mutated_document_is_refused_or_means_what_it_says(
    pristine: Document, per_channel: Profile, reseal: Callable[[Document], Document], draw: st.DataObject
) -> None:
    documents = [pristine, json.loads(dump_profile(per_channel))]
    document, marks = copy.deepcopy(draw.draw(st.sampled_from(documents))), {}
    for _ in range(draw.draw(st.integers(1, 3))):
        mutate(draw, document, marks)
    text = as_text(document, marks)
    if draw.draw(st.booleans()):
        try:
            text = json.dumps(reseal(json.loads(text)))
        except (AttributeError, KeyError, TypeError, ValueError):
            assume(False)
    accepted = load_or_refuse(text.encode("utf-8", "surrogatepass"))
    if accepted is not None:
        assert json.loads(dump_profile(accepted)) == normal(json.loads(text))
        check_usable(accepted)


@BOUNDED
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 8), st.binary(max_size=4)), min_size=1, max_size=4
    )
)
def test_mutated_bytes_are_refused_or_store_the_same(profile: Profile, edits: list[tuple[float, int, bytes]]) -> None:
    data = dump_profile(profile)
    for place, removed, inserted in edits:
        start = int(place * len(data))
        data = data[:start] + inserted + data[start + removed :]
    accepted = load_or_refuse(data)
    if accepted is not None:
        assert (accepted.digest, accepted.geometry, accepted.pairs) == (profile.digest, profile.geometry, profile.pairs)


@BOUNDED
@given(data=st.binary(max_size=64) | st.text(alphabet='[]{}",:\\ue0123456789.-+eEnulltruefas \n').map(str.encode))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProfileError):
        load_profile(data)
