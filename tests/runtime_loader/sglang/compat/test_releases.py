"""Releases of SGLang: those that tests ran on, what the older ones lack, and every other one refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat import releases
from kvtuner.runtime_loader.sglang.compat.releases import ACCEPTED, NEWEST, release_rules
from kvtuner.runtime_loader.sglang.options.option_refusals import refuse_flags
from kvtuner.runtime_loader.sglang.options.option_rules import METADATA_BACKEND, RULES, backend_rules

OLDER = [release for release in ACCEPTED if release != NEWEST]


def arguments(**values: object) -> SimpleNamespace:
    """Return arguments of which all rules of every server are content, but for these."""
    works = {rule.name: rule.works[-1] for rule in (*backend_rules(METADATA_BACKEND), *RULES) if "." not in rule.name}
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))
    plain = {"device": "cpu", "dp_size": 1, "nnodes": 1, "cuda_graph_config": graphs, "disaggregation_mode": None}
    off = {"enable_hierarchical_cache": False, "enable_lora": False, "enable_lmcache": False}
    return SimpleNamespace(**{**works, **plain, **off, **values})


@pytest.mark.parametrize("build", ["{}", "{}.post1", "{}+cu130", "{}.post2+local"])
@pytest.mark.parametrize("release", ACCEPTED)
def test_a_release_and_its_builds(release: str, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "version", lambda _: build.format(release))
    assert release_rules() is ACCEPTED[release]


@pytest.mark.parametrize("other", ["0.5.21", "0.5.24", "0.5.23rc1", "0.5.23.dev4+g1234", "0.5.2", "0.5.230", "1.5.23"])
def test_a_release_that_no_test_ran_on(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "version", lambda _: other)
    with pytest.raises(ServingError) as refusal:
        release_rules()
    assert all(name in str(refusal.value) for name in (*ACCEPTED, f"but {other} is installed", "install one of those"))


def test_the_newest_has_and_does_all() -> None:
    assert list(ACCEPTED)[-1] == NEWEST
    assert not ACCEPTED[NEWEST].absent and not ACCEPTED[NEWEST].refused


@pytest.mark.parametrize("release", OLDER)
def test_an_option_that_a_release_does_not_have_is_no_fault_there(release: str) -> None:
    absent = ACCEPTED[release].absent & {rule.name for rule in RULES}
    assert absent
    for name in absent:
        without = arguments()
        delattr(without, name)
        refuse_flags(without, {}, release=ACCEPTED[release])
        with pytest.raises(ServingError, match=f"no option {name}"):
            refuse_flags(without, {})


@pytest.mark.parametrize(
    ("release", "option"), [(release, rule.name) for release in OLDER for rule in ACCEPTED[release].refused]
)
def test_what_a_release_cannot_do_is_refused_by_name(release: str, option: str) -> None:
    asked = {"dp_size": 2, "speculative_algorithm": "NGRAM"}[option]
    beside = {"cuda_graph_config": SimpleNamespace(**{each: SimpleNamespace(backend="disabled") for each in PHASES})}
    drafts = {"speculative_ngram_external_sam_budget": 0, "speculative_draft_kv_cache_dtype": None, "pp_size": 1}
    fine = {**beside, **drafts, "enable_multi_layer_eagle": False, "speculative_adaptive": False}
    refuse_flags(arguments(**{**fine, option: asked}), {})
    refuse_flags(arguments(**fine), {}, release=ACCEPTED[release])
    with pytest.raises(ServingError, match=f"{asked} does not work with a packed KV pool: .*; drop it, or install"):
        refuse_flags(arguments(**{**fine, option: asked}), {}, release=ACCEPTED[release])


PHASES = ("prefill", "decode")
