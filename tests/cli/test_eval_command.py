"""``kvtuner eval``: a file beside the profile whose figures are those of other code, shown, resumed, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.digest import hashed_content
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ExactWindow
from kvtuner.run_folder import sha256_of
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import Json, LoadTiny, ModelFolder, RunCommand

    Evaluate = Callable[..., tuple[int, Json, str, Path]]

pytestmark = pytest.mark.slow

QUESTIONS = ("--problems", "3", "--questions", "2")
TABLES = ("--lengths", "40,70", *QUESTIONS)
FEW = (*TABLES, "--samples", "2")


@pytest.fixture
def evaluate(run: RunCommand, finished: Path, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path) -> Evaluate:
    """Evaluate a copy of the finished search's profile; status, JSON or text, stderr and the profile's path."""
    profile = tmp_path / "profile.json"
    if not profile.exists():
        shutil.copy(finished / "profile.json", profile)

    def call(*flags: str, as_json: bool = True) -> tuple[int, Any, str, Path]:
        model, out_folder = model_folder("llama-gqa"), tmp_path / "out"
        arguments = ("eval", profile, "--model", model, "--data", corpus_file, "--out", out_folder)
        status, out, err = run(*arguments, *flags, *(["--json"] if as_json else []))
        return status, json.loads(out) if as_json and not status else out, err, profile

    return call


def results(evaluation: Json, level: str, measure: str) -> dict[tuple[int | None, int], dict[str, Any]]:
    return {
        (cell["num_tokens"], cell["position"]): {result["subject"]: result for result in cell["results"]}
        for cell in evaluation["cells"]
        if (cell["level"], cell["measure"]) == (level, measure)
    }


def differences(evaluation: Json, measure: str, position: int = 0) -> dict[str, Any]:
    (cell,) = (item for item in evaluation["cells"] if (item["measure"], item["position"]) == (measure, position))
    return {difference["other"]: difference for difference in cell["differences"]}


def before_answers(monkeypatch: pytest.MonkeyPatch, call: Callable[[str], None]) -> None:
    """Call something with a backend's name before each problem that it answers."""
    from kvtuner.evaluation.backends.engine_backend import EngineBackend
    from kvtuner.evaluation.backends.local_backend import LocalBackend

    def patched(whole: Callable[..., Any]) -> Callable[..., Any]:
        def answers(self: Any, *arguments: Any, **more: Any) -> Any:
            call(self.name)
            return whole(self, *arguments, **more)

        return answers

    for backend in (EngineBackend, LocalBackend):
        monkeypatch.setattr(backend, "answers", patched(backend.answers))


def test_figures_are_those_of_the_cache_itself(
    evaluate: Evaluate, model_folder: ModelFolder, corpus_file: Path, load_tiny: LoadTiny
) -> None:
    """KL, agreement and likelihood from logits of transformers' own attention over a packed cache."""
    status, evaluation, _, path = evaluate("--levels", "likelihood", "--read-plan", "cache")
    assert status == 0
    profile, loaded = load_profile(path), load_tiny("llama-gqa")
    source = CorpusSource(str(corpus_file), sequence_length=64, num_sequences=(2, 2, 3))
    ids = load_corpus(source, loaded.tokenizer).splits["report"]
    with torch.no_grad():
        exact = loaded.model(ids).logits.double().log_softmax(-1)
        cache = KVTunerCache.from_profile(profile, loaded.shape.config, "cache")
        with cache.attending(loaded.model):
            quantized = loaded.model(ids, past_key_values=cache).logits.double().log_softmax(-1)
    kl = (exact.exp() * (exact - quantized)).sum(-1).mean()
    agree = (exact.argmax(-1) == quantized.argmax(-1)).double().mean()
    nll = -quantized[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    for measure, expected in (("kl_nats_per_token", kl), ("top1_agreement", agree), ("nll_nats_per_token", nll)):
        mine = results(evaluation, "likelihood", measure)[64, 0]["profile"]
        assert mine["mean"] == pytest.approx(float(expected), rel=1e-3, abs=1e-6)
        assert mine["low"] <= mine["mean"] <= mine["high"]
    assert set(results(evaluation, "likelihood", "kl_nats_per_token")[64, 0]) == {"profile", "fp8", "K8V8"}
    base = float(-exact[:, :-1].gather(-1, ids[:, 1:, None]).mean())
    assert differences(evaluation, "nll_nats_per_token")["bf16"]["mean"] == pytest.approx(float(nll) - base, abs=1e-5)


def test_the_file_stands_beside_the_profile_and_is_shown(evaluate: Evaluate, run: RunCommand) -> None:
    status, evaluation, _, path = evaluate(*FEW)
    assert status == 0
    file = Path(evaluation.pop("evaluation"))
    assert file.parent == path.parent
    assert Path(evaluation.pop("page")) == file.with_suffix(".html")
    assert evaluation.pop("verdict")["advice"].startswith("Ask what it can answer")
    assert json.loads(file.read_text()) == evaluation
    assert evaluation["profile_digest"] == load_profile(path).digest
    assert evaluation["data"]["is_unseen"] is True
    levels = ["likelihood"] * 6 + ["recall"] * 2 + ["needle"] * 2 + ["arithmetic"] * 3
    assert [cell["level"] for cell in evaluation["cells"]] == levels
    shown = " ".join(run("show", path)[1].split())
    assert "which calibration and selection did not see" in shown
    assert "the unquantized model is right too rarely for a loss to show" in shown
    assert "skipped for profile, fp8, K8V8: needle 40 tokens; needle 70 tokens; --all-questions asks them too" in shown
    assert json.loads(run("show", path, "--json")[1])["evaluations"] == [evaluation]
    second = evaluate(*TABLES, "--levels", "recall")[1]
    assert second["evaluation"] != str(file)
    assert len(json.loads(run("show", path, "--json")[1])["evaluations"]) == 2, "nothing measured is lost"
    again = evaluate(*TABLES, "--levels", "recall")[1]
    assert again == second


def test_nothing_of_this_machine_or_of_anybodys_text_is_in_the_file(
    evaluate: Evaluate, tmp_path: Path, corpus_file: Path, model_folder: ModelFolder, load_tiny: LoadTiny
) -> None:
    _, evaluation, _, path = evaluate(*FEW, f"--model={model_folder('llama-gqa')}")
    text = Path(evaluation["evaluation"]).read_text()
    for part in (*path.parts[1:-1], *corpus_file.parts[1:-1], *model_folder("llama-gqa").parts[1:-1]):
        assert part not in text
    assert evaluation["making"]["command"] == (
        "kvtuner eval profile.json --data sentences.jsonl --lengths 40,70 --model llama-gqa --problems 3 --questions 2"
        " --samples 2"
    )
    samples = (tmp_path / "out" / "samples.md").read_text()
    source = CorpusSource(str(corpus_file), sequence_length=64, num_sequences=(2, 2, 3))
    loaded = load_tiny("llama-gqa")
    for ids in load_corpus(source, loaded.tokenizer).splits["report"][:2]:
        beginning = loaded.tokenizer.decode(ids[:12])
        assert beginning in samples
        assert beginning not in text
    assert samples.count("**bf16**") == samples.count("**K8V8**") == 2


@pytest.mark.parametrize("level", ["recall", "needle"])
def test_a_length_that_the_questions_alone_exceed_is_refused_and_not_shown_as_it(
    level: str, evaluate: Evaluate
) -> None:
    status, _, err, _ = evaluate("--levels", level, "--lengths", "8", "--problems", "2", "--questions", "9")
    assert status == 2
    assert f"{level} of 8 tokens takes " in err
    assert "give longer --lengths, or fewer --questions" in err


def test_a_model_that_was_a_folder_is_asked_for_and_not_guessed(
    run: RunCommand, finished: Path, model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = load_profile(finished / "profile.json").model.id
    shutil.copytree(model_folder("qwen2-bias"), tmp_path / name)  # another one that is called so
    monkeypatch.chdir(tmp_path)
    status, out, err = run("eval", finished, "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    assert err.endswith(f"the profile is for a model of a folder called {name}; give --model FOLDER\n")


def test_what_was_asked_is_not_asked_again(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtuner.calibration.forward.simulator import Simulator
    from kvtuner.evaluation.backends.engine_backend import EngineBackend
    from kvtuner.evaluation.backends.local_backend import LocalBackend

    levels = ("--levels", "likelihood,recall", *TABLES)
    first = evaluate(*levels)[1]

    def unwanted(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(Simulator, "measure", unwanted)
    monkeypatch.setattr(LocalBackend, "answers", unwanted)
    monkeypatch.setattr(EngineBackend, "_run", lambda _, jobs: unwanted() if jobs else [])
    assert evaluate(*levels)[1] == first
    with pytest.raises(AssertionError, match="asked again"):
        evaluate(*levels, "--seed", "5")


def test_the_engine_answers_as_the_transformers_cache_does(evaluate: Evaluate) -> None:
    levels = ("--levels", "recall,arithmetic", "--all-questions", *TABLES)
    answered = {}
    for kind, flags in (("engine", ()), ("transformers", ("--oracle",))):
        status, evaluation, _, path = evaluate(*levels, *flags)
        assert (status, evaluation["host"]["kind"]) == (0, kind)
        assert list(path.parent.glob(f"profile.evaluation-{kind}-decode-*.json"))
        answered[kind] = evaluation["cells"]
    assert answered["engine"] == answered["transformers"]


def test_an_interrupted_evaluation_goes_on(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = ("--levels", "recall,arithmetic", "--all-questions", *TABLES)
    calls: list[str] = []

    def interrupt(name: str) -> None:
        calls.append(name)
        if len(calls) == 20:
            raise KeyboardInterrupt

    before_answers(monkeypatch, interrupt)
    status, _, err, _ = evaluate(*levels)
    assert status == 130
    assert "run the same command again to resume" in err
    assert evaluate(*levels)[0] == 0
    question_sets, schemes, problems = 2 + 3, 4, 3
    assert len(calls) == question_sets * schemes * problems + 1, "only the problem that was cut short is asked again"


def test_what_the_unquantized_model_cannot_answer_is_asked_of_no_other_scheme(
    evaluate: Evaluate, run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    before_answers(monkeypatch, asked.append)
    levels = ("--levels", "recall", *TABLES)
    _, evaluation, _, path = evaluate(*levels)
    assert asked == ["bf16"] * 6
    others = ["profile", "fp8", "K8V8"]
    for cell in evaluation["cells"]:
        assert (cell["flag"], cell["skipped"], cell["differences"]) == ("floor", others, [])
        assert [result["subject"] for result in cell["results"]] == ["bf16"]
    page = path.with_suffix(".html")
    assert run("show", path, "--html", page)[0] == 0
    text = " ".join(evaluate(*levels, as_json=False)[1].split())
    assert "skipped for profile, fp8, K8V8: recall 40 tokens; recall 70 tokens; --all-questions asks them too" in text
    assert "skipped for profile, fp8, K8V8: recall 40 tokens; recall 70 tokens" in page.read_text()
    asked.clear()
    again = evaluate(*levels, "--all-questions")[1]
    assert asked == [name for _ in range(2) for name in others for _ in range(3)], "bf16's answers are kept"
    for cell in again["cells"]:
        assert (cell["flag"], cell["skipped"]) == ("floor", [])
        assert [result["subject"] for result in cell["results"]] == ["bf16", *others]


def test_a_damaged_or_foreign_evaluation_hides_nothing(evaluate: Evaluate, run: RunCommand) -> None:
    _, evaluation, _, path = evaluate("--levels", "arithmetic", "--all-questions", *QUESTIONS)
    file = Path(evaluation["evaluation"])
    document = json.loads(file.read_text())
    cell = document["cells"][0]
    file.write_text(json.dumps({**document, "profile_digest": "sha256:" + "0" * 64}))
    assert json.loads(run("show", path, "--json")[1])["evaluations"] == []
    changes = (
        ({"cells": "none"}, "cells"),
        ({"extra": 1}, "unknown field"),
        ({"evaluation_version": 2, "new": [0] * 2000}, "evaluation_version must be 1"),
        ({"subjects": []}, "'profile' one of them"),
        ({"subjects": document["subjects"] * 2}, "must be different"),
        ({"making": {**document["making"], "command": "a\nb"}}, "must be printable"),
        ({"cells": [{**cell, "results": [{**cell["results"][0], "subject": "x"}]}]}, "none of the subjects"),
        ({"cells": [{**cell, "results": cell["results"] * 2}]}, "two results"),
        ({"cells": [{**cell, "results": [{**cell["results"][0], "mean": 1e30, "high": 1e30}]}]}, "must ascend within"),
        ({"cells": [{**cell, "skipped": ["bf16"]}]}, "results of 'bf16', which was skipped"),
        ({"cells": [{**cell, "skipped": ["z"]}]}, "results of 'z', which is none of the subjects"),
        ({"cells": [{**cell, "differences": [{**cell["differences"][0], "other": "y"}]}]}, "none of the subjects"),
    )
    for change, complaint in changes:
        file.write_text(json.dumps({**document, **change}))
        status, out, err = run("show", path)
        assert status == 0
        assert "bytes per token" in out, "the profile itself is shown"
        assert complaint in err, change


def test_a_profile_with_any_name_finds_its_evaluations(evaluate: Evaluate, run: RunCommand, tmp_path: Path) -> None:
    _, evaluation, _, path = evaluate("--levels", "arithmetic", *QUESTIONS)
    odd = path.with_name("profile[1].json")
    path.rename(odd)
    file = Path(evaluation["evaluation"])
    file.rename(file.with_name(file.name.replace("profile", "profile[1]", 1)))
    assert len(json.loads(run("show", odd, "--json")[1])["evaluations"]) == 1


def test_refusals(evaluate: Evaluate, run: RunCommand, model_folder: ModelFolder, tmp_path: Path) -> None:
    for flags, complaint in (
        (("--against", "K5V5"), "K5V5"),
        (("--against", "K16V16"), "compared with anyway"),
        (("--levels", "vibes"), "'vibes' is none of likelihood"),
        (("--api", "openai"), "give --endpoint too"),
        (("--positions", "4"), "--positions is for servers; give --endpoint too"),
        (("--scored-sequences", "4"), "--scored-sequences is for servers"),
        (("--top-logprobs", "4"), "--top-logprobs is for servers"),
        (("--timeout", "4"), "--timeout is for servers"),
        (("--endpoint", "localhost:1"), "an endpoint is http://HOST:PORT"),
        (("--endpoint", "fp8=http://127.0.0.1:9"), "none of the endpoints serves the profile"),
        (("--endpoint", "http://127.0.0.1:9"), "does not answer as sglang servers do"),
        (("--endpoint", "http://127.0.0.1:9", "--read-plan", "hit"), "--read-plan is for a model loaded here"),
        (("--problems", "1"), "at least 2"),
        (("--lengths", "9999"), "more than the context of"),
        (("--levels", ","), "name one at least"),
        (("--against", "K8V8,8"), "K8V8 is asked twice"),
        (("--against", "bf16"), "bf16 is asked twice"),
        (("--model", str(model_folder("head-dim-80"))), "has num_layers 3, but this model has 2"),
    ):
        status, _, err, _ = evaluate(*flags, as_json=False)
        assert status == 2, flags
        assert complaint in err
    status, _, err = run("eval", tmp_path / "nothing.json")
    assert status == 2
    assert "cannot be read" in err


def test_a_profile_with_a_window_is_evaluated_by_any_read_plan(evaluate: Evaluate, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    searched = load_profile(file)
    stored = (searched.layout, searched.geometry, searched.defaults, searched.layers)
    flags = (
        "--levels",
        "likelihood,recall",
        "--lengths",
        "48",
        "--problems",
        "2",
        "--questions",
        "2",
        "--all-questions",
    )
    kls = []
    for window in (ExactWindow(), ExactWindow(24)):
        digest = sha256_of(hashed_content(*stored, window))
        update = {"residual_length": window.residual_length, "digest": digest}
        file.write_bytes(dump_profile(searched.model_copy(update=update)))
        status, evaluation, err, _ = evaluate(*flags, "--against", "fp8")
        assert status == 0, err
        cells = results(evaluation, "likelihood", "kl_nats_per_token")
        kls.append({name: cell["mean"] for name, cell in next(iter(cells.values())).items()})
    assert kls[1]["profile"] < 0.8 * kls[0]["profile"]
    assert kls[1]["fp8"] == kls[0]["fp8"]
    for read_plan in ("hit", "cache"):
        status, evaluation, err, _ = evaluate(*flags, "--read-plan", read_plan, "--out", str(tmp_path / read_plan))
        assert status == 0, err
        assert results(evaluation, "recall", "accuracy")[48, 0]["profile"]["mean"] <= 1


SERVER = ("--endpoint", "http://127.0.0.1:9")


@pytest.mark.parametrize(("flags", "complaint"), [
    (("--limit", "4"), "--limit is for tasks of lm-evaluation-harness; give --tasks too"),
    (("--num-fewshot", "0"), "--num-fewshot is for tasks"),
    (("--apply-chat-template",), "--apply-chat-template is for tasks"),
    (("--include-path", "."), "--include-path is for tasks"),
    (("--levels", "likelihood", "--questions", "4"), "--questions is for --levels recall or needle or arithmetic; ask"),
    (("--levels", "likelihood", "--all-questions"), "--all-questions is for --levels recall or needle or arithmetic;"),
    (("--levels", "samples", "--problems", "10"), "--problems is for --levels recall or needle or arithmetic; ask"),
    (("--levels", "recall", "--samples", "3"), "--samples is for --levels samples; ask"),
    (("--levels", "arithmetic", "--lengths", "64"), "--lengths is for --levels recall or needle; ask"),
    (("--levels", "recall", "--batch-size", "1"), "--batch-size is for --levels likelihood; ask"),
    ((*SERVER, "--levels", "samples", "--lengths", "64"), "--lengths is for --levels recall or needle or arithmetic"),
    ((*SERVER, "--levels", "recall", "--positions", "4"), "--positions is for --levels likelihood"),
    ((*SERVER, "--levels", "recall", "--scored-sequences", "4"), "--scored-sequences is for --levels likelihood"),
    ((*SERVER, "--levels", "recall", "--top-logprobs", "4"), "--top-logprobs is for --levels likelihood"),
    ((*SERVER, "--api", "openai", "--top-logprobs", "4"), "--top-logprobs is for --levels likelihood"),
    ((*SERVER, "--batch-size", "2"), "--batch-size is for a model loaded here, not for servers"),
    ((*SERVER, "--device", "cpu"), "--device is for a model loaded here, not for servers"),
    ((*SERVER, "--dtype", "float32"), "--dtype is for a model loaded here, not for servers"),
])  # fmt: skip
def test_a_flag_that_nothing_would_read_is_refused_in_one_line(
    evaluate: Evaluate, tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    status, out, err, _ = evaluate(*flags, as_json=False)
    assert (status, out) == (2, "")
    assert complaint in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [
    ("--levels", "arithmetic,samples", "--samples", "1", *QUESTIONS),
    (*SERVER, "--levels", "arithmetic", "--lengths", "64", "--timeout", "1", "--device", "auto"),
    (*SERVER, "--levels", "likelihood", "--positions", "4", "--no-apply-chat-template"),
])  # fmt: skip
def test_a_flag_that_is_read_is_not(evaluate: Evaluate, flags: tuple[str, ...]) -> None:
    status, _, err, _ = evaluate(*flags, as_json=False)
    assert status == (2 if "--endpoint" in flags else 0)
    assert status == 0 or "does not answer as sglang servers do" in err


def test_the_weights_are_hashed_once(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtuner.calibration import weights_hash

    healthy, hashed = weights_hash.fingerprint, []

    def counted(tensors: Any, *rest: Any) -> str:
        hashed.append(len(tensors))
        return healthy(tensors, *rest)

    monkeypatch.setattr(weights_hash, "fingerprint", counted)
    assert evaluate("--levels", "likelihood,recall", *TABLES)[0] == 0
    assert len(hashed) == 1


def test_intervals_are_those_of_numpy(evaluate: Evaluate) -> None:
    """Resamples of the same seed, over per-sequence sums that the journal keeps."""
    _, evaluation, _, path = evaluate("--levels", "likelihood")
    lines = map(json.loads, (path.parent / "out/validation.jsonl").read_text().splitlines())
    small = [(line["key"], line["sums"]["kl"] + line["sums"]["count"]) for line in lines if line["offsets"] == "small"]
    mine, fp8 = (np.array([sums for of, sums in small if of == key]).T for key in (evaluation["profile_digest"], "fp8"))
    drawn = np.random.default_rng(0).integers(0, 3, (2000, 3))
    paired = (mine[0] - fp8[0])[drawn].sum(1) / mine[1][drawn].sum(1)
    stated = differences(evaluation, "kl_nats_per_token")["fp8"]
    assert (stated["low"], stated["high"]) == pytest.approx(tuple(np.quantile(paired, [0.025, 0.975])), rel=1e-4)
    assert stated["p_value"] >= 2 / 2**3, "of three sequences all signs may go one way"


def test_the_demo_model_is_right_and_two_bits_are_not(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: questions that have answers, in a profile that loses them."""
    from kvtuner.calibration.model_loading import ModelSource, read_shape
    from kvtuner.evaluation.scheme_registry import named_scheme
    from kvtuner.exported_configs.profile.build import dump_profile

    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "two.json"
    path.write_bytes(dump_profile(named_scheme("K2V2", read_shape(ModelSource("demo"))).profile))
    command = (
        "--model", "demo", "--levels", "recall,arithmetic", "--lengths", "120", "--problems", "6", "--against", "K8V8",
    )  # fmt: skip
    _, out, _ = run("eval", path, *command, "--out", tmp_path / "out")
    evaluation = json.loads(run("show", path, "--json")[1])["evaluations"][0]
    right = results(evaluation, "recall", "accuracy")[120, 0]
    assert right["bf16"]["mean"] > 0.9
    assert right["K8V8"]["mean"] > 0.9
    assert right["profile"]["mean"] < 0.2
    assert "clear differences, paired" in out and "negative: the profile's figure is lower" in out
    clear = [line.split() for line in out.splitlines() if "profile - bf16" in line]
    assert [line[3] for line in clear] == ["recall"] + ["arithmetic"] * 3
    assert clear[0][6].startswith("-")
    assert "+ recall 120 tokens" in out, "a reference that never fails is marked"
    verdict = " ".join(out[out.index("verdict") :].split())
    assert verdict.startswith("verdict 4 of 4 tasks lose answers beyond the interval, beside bf16: recall 120 tokens -")
    (page,) = tmp_path.glob("two.evaluation-*.html")
    assert "4 of 4 tasks lose answers beyond the interval" in page.read_text(encoding="utf-8")


def test_a_word_that_is_no_scheme_is_refused_before_its_text_is_read(run: RunCommand, tmp_path: Path) -> None:
    absent = tmp_path / "absent.jsonl"
    status, _, err = run("eval", "catalogue:demo-4bit", "--against", "K4V4-per-head", "--data", absent)
    assert status == 2
    assert "K4V4-per-head is no scheme to store a cache, such as fp8 or K8V8" in err
