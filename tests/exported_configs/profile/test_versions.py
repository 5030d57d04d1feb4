"""Tests of the first version that can hold a profile: building, moving constants and loading decide it alike."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import dump_profile, place_constants
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ExactWindow, ScaleLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile.build import LayerQuantization
    from kvtuner.exported_configs.profile.profile import Profile

SHORT = ScaleLayout(32, 16)


@pytest.mark.parametrize(
    ("changes", "layer", "refusal"),
    [
        ({}, {}, None),
        ({"symmetric": True}, {"k_bits": 2}, None),
        ({}, {"k_bits": 16, "k_group_size": 16}, None),  # of 16 bits nothing is grouped
        ({}, {"k_bits": 3}, "schema_version 1 has no layers of 3 bits, version 2 has"),
        ({}, {"v_group_size": 16}, "layers[0].v.group_size: schema_version 1 has none"),
        ({"fit": "least_squares"}, {}, "defaults.k.fit: schema_version 1 has none"),
        ({"v_layout": SHORT}, {}, "defaults.v.word_bits: schema_version 1 has none"),
        ({"window": ExactWindow(0, 4)}, {}, "sinks: schema_version 1 has none"),
    ],
)
def test_whatever_the_first_version_lacks_makes_the_second_and_is_refused_in_the_first(
    make_profile: Callable[..., Profile],
    choices: tuple[LayerQuantization, ...],
    changes: Any,
    layer: Any,
    refusal: str | None,
) -> None:
    profile = make_profile(layers=[replace(choices[0], **layer), *choices[1:]], **changes)
    assert profile.schema_version == (1 if refusal is None else 2)
    in_file = place_constants(profile, "file")
    assert in_file.schema_version == 2
    assert dump_profile(place_constants(in_file, "inline")) == dump_profile(profile)
    if refusal is not None:
        document = json.loads(dump_profile(profile)) | {"schema_version": 1}
        if "least_squares" not in changes.values():
            for side in document["defaults"].values():
                del side["fit"]
        with pytest.raises(ProfileError, match=re.escape(f"{refusal}; export the profile again")):
            load_profile(json.dumps(document).encode())
