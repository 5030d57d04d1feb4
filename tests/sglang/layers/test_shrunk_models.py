"""Kinds of models by transformers' own defaults, made small: served packed by a real SGLang, or not run by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from served_layers.two_kinds import TRITON
from tiny.shrunk_models import ANSWERED_OTHERWISE, FAILING, SERVED, shrunk_model
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import Compare, CompareServed, MakeTokenizer, MixedProfile, ProfileOf, Prompts, Serve

OWN_FLAGS = {"olmo3": ("--json-model-override-args", '{"rope_theta": 500000.0}')}
ALWAYS = "smollm3"
"""The kind that is not of the full tests alone; SGLang runs transformers' code of it."""
LENGTHS = (5, 33, 1, 60)
"""The lengths of prompts, two of them beyond the windows."""


@pytest.fixture
def folder_of(tmp_path: Path, make_tokenizer: MakeTokenizer) -> Callable[[str], Path]:
    """`folder_of(kind)`: a saved model with its tokenizer."""

    def save(kind: str) -> Path:
        shrunk_model(kind).save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # GPTBigCode's own
@pytest.mark.parametrize(
    "kind", [ALWAYS, *(pytest.param(kind, marks=pytest.mark.full) for kind in SERVED if kind != ALWAYS)]
)
def test_a_served_kind_agrees_with_the_transformers_host(
    kind: str, folder_of: Callable[[str], Path], mixed_profile: MixedProfile, compare_served: CompareServed
) -> None:
    folder, flags = folder_of(kind), (*TRITON, *OWN_FLAGS.get(kind, ()))
    profile = mixed_profile(folder, by_kinds=True)
    agreement = compare_served(folder, profile, *flags, lengths=LENGTHS, num_tokens=20).agreement
    assert agreement.own > 1e-5
    assert agreement.is_near, agreement


@pytest.mark.full
@pytest.mark.parametrize(("kind", "reason"), FAILING.items())
def test_a_kind_that_fails_does_so_without_a_profile(
    kind: str, reason: str, folder_of: Callable[[str], Path], serve: Serve
) -> None:
    with pytest.raises(pytest.fail.Exception) as failure, serve(folder_of(kind), *TRITON) as server:
        server.generate([[5, 6, 7]], 2)
    assert reason in str(failure.value)


@pytest.mark.full
@pytest.mark.parametrize("kind", ANSWERED_OTHERWISE)
def test_other_answers_are_those_of_a_server_without_a_profile(
    kind: str, folder_of: Callable[[str], Path], profile_of: ProfileOf, serve: Serve, compare: Compare, prompts: Prompts
) -> None:
    folder = folder_of(kind)
    config = AutoConfig.from_pretrained(folder)
    native = profile_of(config, [LayerQuantization(16, 16)] * config.num_hidden_layers)
    with serve(folder, *TRITON) as server:
        agreement = compare(server, folder, native, prompts(*LENGTHS), 20)
    assert agreement.own == 0
    assert agreement.divergence > 0.01
