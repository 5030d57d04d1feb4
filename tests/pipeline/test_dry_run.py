"""The dry run of a search: what it says of rows that padding makes as long as those of more bits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fixture_types import ModelFolder, RunCommand

ONE_HEAD_OF_80: Mapping[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80}


@pytest.mark.parametrize(
    ("changes", "flags", "padded"),
    [
        # 3 bits of 80 channels are 30 bytes and a word of 4, 4 bits 40 and 4: keys and values of 3 layers take 48
        (ONE_HEAD_OF_80, ("--budget", "3.5bit", "288B/token"), [["K4V4", "K3V3", 288]]),
        (ONE_HEAD_OF_80, ("--budget", "4bit", "4.8bpe"), []),
        # on each of two ranks one head of 32: 8 and 4, 12 and 4: rows of 16
        (
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
            ("--budget", "2.5bit", "6bit", "--tp-size", "2"),
            [["K3V3", "K2V2", 96]],
        ),
    ],
)
def test_a_budget_of_bits_names_the_bytes_that_hold_a_wider_uniform(
    run: RunCommand, model_folder: ModelFolder, changes: Mapping[str, Any], flags: tuple[str, ...], padded: list[Any]
) -> None:
    asked = ("search", "--model", model_folder(num_hidden_layers=3, **changes), *flags, "--dry-run")
    status, out, error = run(*asked, "--json")
    assert status == 0, error
    first, second = json.loads(out)["budgets"]
    assert [[*wider.values()] for wider in first["padded"]] == padded and second["padded"] == []
    text = run(*asked)[1]
    for wider, name, stored in padded:
        assert f"budget {flags[1]}: {wider} takes the {stored} bytes of {name}, whose rows are padded more;" in text
        assert f" --budget {stored}B/token holds it" in text
    assert text.count(" holds it") == len(padded)
