"""``kvtuner eval``: a file beside the profile whose figures are those of other code, shown, resumed, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.exported_configs.load import load_profile
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

pytestmark = pytest.mark.slow

FEW = ("--lengths", "40,70", "--problems", "3", "--questions", "2", "--samples", "2")


@pytest.fixture
def evaluate(run: Any, finished: Path, model_folder: Any, corpus_file: Path, tmp_path: Path) -> Any:
    """Evaluate a copy of the finished search's profile; status, JSON or text, stderr and the profile's path."""
    profile = tmp_path / "profile.json"
    if not profile.exists():
        shutil.copy(finished / "profile.json", profile)

    def call(*flags: str, as_json: bool = True) -> tuple[int, Any, str, Path]:
        words = (
            "eval",
            profile,
            "--model",
            model_folder("llama-gqa"),
            "--data",
            corpus_file,
            "--out",
            tmp_path / "out",
        )
        status, out, err = run(*words, *flags, *(["--json"] if as_json else []))
        return status, json.loads(out) if as_json and not status else out, err, profile

    return call


def results(found: Any, level: str, measure: str) -> dict[tuple[int | None, int], dict[str, Any]]:
    return {
        (cell["num_tokens"], cell["position"]): {result["subject"]: result for result in cell["results"]}
        for cell in found["cells"]
        if (cell["level"], cell["measure"]) == (level, measure)
    }


def test_figures_are_those_of_the_cache_itself(
    evaluate: Any, model_folder: Any, corpus_file: Path, load_tiny: Any
) -> None:
    """KL, agreement and likelihood from logits of transformers' own attention over a packed cache."""
    status, found, _, path = evaluate("--levels", "likelihood", "--read-plan", "cache")
    assert status == 0
    profile, loaded = load_profile(path), load_tiny("llama-gqa")
    source = CorpusSource(str(corpus_file), sequence_length=64, num_sequences=(2, 2, 3))
    ids = load_corpus(source, loaded.tokenizer).splits["report"]
    with torch.no_grad():
        exact = loaded.model(ids).logits.double().log_softmax(-1)
        cache = KVTunerCache.from_profile(profile, loaded.shape.config, "cache")
        quantized = loaded.model(ids, past_key_values=cache).logits.double().log_softmax(-1)
    kl = (exact.exp() * (exact - quantized)).sum(-1).mean()
    agree = (exact.argmax(-1) == quantized.argmax(-1)).double().mean()
    nll = -quantized[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    for measure, expected in (("kl_nats_per_token", kl), ("top1_agreement", agree), ("nll_nats_per_token", nll)):
        mine = results(found, "likelihood", measure)[64, 0]["profile"]
        assert mine["mean"] == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
        assert mine["low"] <= mine["mean"] <= mine["high"]
    assert set(results(found, "likelihood", "kl_nats_per_token")[64, 0]) == {"profile", "fp8", "K8V8"}
    against = {
        each["other"]: each
        for each in results(found, "likelihood", "nll_nats_per_token")[64, 0]["profile"]["differences"]
    }
    base = float(-exact[:, :-1].gather(-1, ids[:, 1:, None]).mean())
    assert against["bf16"]["mean"] == pytest.approx(float(nll) - base, abs=1e-5)


def test_the_file_stands_beside_the_profile_and_is_shown(evaluate: Any, run: Any) -> None:
    status, found, _, path = evaluate(*FEW)
    assert status == 0
    file = Path(found.pop("evaluation"))
    assert file.parent == path.parent
    assert json.loads(file.read_text()) == found
    assert found["profile_digest"] == load_profile(path).digest
    assert found["data"]["is_unseen"] is True
    assert str(path.parent) not in file.read_text(), "no paths of this machine"
    levels = ["likelihood"] * 6 + ["recall"] * 2 + ["needle"] * 2 + ["arithmetic"] * 2
    assert [cell["level"] for cell in found["cells"]] == levels
    assert all(cell["flag"] == "floor" for cell in found["cells"] if cell["measure"] == "accuracy"), "it knows nothing"
    assert len(found["samples"]) == 2
    assert [each["subject"] for each in found["samples"][0]["outputs"]] == ["bf16", "profile", "fp8", "K8V8"]
    shown = run("show", path)[1]
    assert "not seen by the search" in shown
    assert "this tells little of its cache" in shown
    assert json.loads(run("show", path, "--json")[1])["evaluations"] == [found]
    other = json.loads(path.read_text())
    assert other["digest"] == found["profile_digest"]


def test_what_was_asked_is_not_asked_again(evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtuner.calibration.simulate import Simulator
    from kvtuner.evaluation.offline import Offline

    levels = ("--levels", "likelihood,recall", *FEW)
    first = evaluate(*levels)[1]

    def unwanted(*_: Any, **__: Any) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(Simulator, "measure", unwanted)
    monkeypatch.setattr(Offline, "answers", unwanted)
    assert evaluate(*levels)[1] == first
    with pytest.raises(AssertionError, match="asked again"):
        evaluate(*levels, "--seed", "5", "--out", "other")


def test_an_interrupted_evaluation_goes_on(evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtuner.evaluation.offline import Offline

    levels = ("--levels", "recall,arithmetic", *FEW)
    whole, asked = Offline.answers, []

    def interrupted(self: Any, *arguments: Any, **more: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 20:
            raise KeyboardInterrupt
        return whole(self, *arguments, **more)

    monkeypatch.setattr(Offline, "answers", interrupted)
    status, _, err, _ = evaluate(*levels)
    assert status == 130
    assert "run the same command again to resume" in err
    assert evaluate(*levels)[0] == 0
    assert len(asked) < 20 + (2 + 2) * 4 * 3 - 15, "what was finished before was not asked again"


def test_a_damaged_or_foreign_evaluation_is_not_shown_as_this_profiles(evaluate: Any, run: Any) -> None:
    _, found, _, path = evaluate("--levels", "arithmetic", *FEW)
    file = Path(found["evaluation"])
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "profile_digest": "sha256:" + "0" * 64}))
    assert json.loads(run("show", path, "--json")[1])["evaluations"] == []
    for change, said in (
        ({"cells": "none"}, "cells"),
        ({"extra": 1}, "unknown field"),
        ({"evaluation_version": 2}, "evaluation_version must be 1"),
        ({"subjects": []}, "none of the subjects"),
    ):
        file.write_text(json.dumps({**document, **change}))
        status, _, err = run("show", path)
        assert status == 2
        assert said in err


def test_refusals(evaluate: Any, run: Any, model_folder: Any, tmp_path: Path) -> None:
    for flags, said in (
        (("--against", "K3V3"), "K3V3"),
        (("--against", "K16V16"), "compared with anyway"),
        (("--levels", "vibes"), "'vibes' is none of likelihood"),
        (("--problems", "1"), "at least 2"),
        (("--lengths", "99999"), "does not fit the context"),
        (("--model", str(model_folder("head-dim-80"))), "has num_layers 3, but this model has 2"),
    ):
        status, _, err, _ = evaluate(*flags, as_json=False)
        assert status == 2, flags
        assert said in err
    status, _, err = run("eval", tmp_path / "nothing.json")
    assert status == 2
    assert "cannot be read" in err


def test_intervals_are_those_of_numpy(evaluate: Any) -> None:
    """Resamples of the same seed, over per-sequence sums that the journal keeps."""
    _, found, _, path = evaluate("--levels", "likelihood")
    records = [json.loads(line) for line in (path.parent / "out" / "validation.jsonl").read_text().splitlines()]
    sums = {(record["key"], record["offsets"]): record["sums"] for record in records}
    mine, fp8 = sums[found["profile_digest"], "small"], sums["fp8", "small"]
    drawn = np.random.default_rng(0).integers(0, 3, (2000, 3))
    differences = (np.array(mine["kl"]) - np.array(fp8["kl"]))[drawn].sum(1) / np.array(mine["count"])[drawn].sum(1)
    result = results(found, "likelihood", "kl_nats_per_token")[64, 0]["profile"]
    stated = next(each for each in result["differences"] if each["other"] == "fp8")
    assert (stated["low"], stated["high"]) == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])), rel=1e-4)
