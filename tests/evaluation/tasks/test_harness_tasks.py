"""Tasks of lm-evaluation-harness: answers are those of plain transformers; local files, by the whole command."""

from __future__ import annotations

import copy
import json
import random
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import sacrebleu
import torch
from lm_eval.tasks import _index
from transformers import AutoModelForCausalLM

from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.demo.tasks import addition_lines, recall_problem
from kvtuner.calibration.model_loading import ModelSource, load_tokenizer, read_shape
from kvtuner.cli import main
from kvtuner.errors import CacheError
from kvtuner.evaluation.backends.base import TextTokenizer
from kvtuner.evaluation.backends.local_backend import LocalBackend
from kvtuner.evaluation.scheme_registry import named_scheme
from kvtuner.evaluation.tasks.harness_model import HarnessModel
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.run_folder import RunFolder
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fixture_types import Json, LoadTiny, ModelFolder

    Evaluate = Callable[..., tuple[int, Json, str]]
    MakeHarness = Callable[..., HarnessModel]

# The harness's and its libraries', in every process that imports them.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODELS = pytest.mark.parametrize(
    "model_fields", [{"name": "llama-gqa"}, {"name": "qwen2-bias", "adds_bos": True}], ids=["plain", "bos"]
)


@pytest.fixture(scope="module", autouse=True)
def what_the_harness_reads_again() -> Iterator[None]:
    """Read each of the harness's own thousands of task files once, and list this machine's packages for no result."""
    own = Path(_index.__file__).parent
    load_yaml = _index.load_yaml
    load_own = cache(partial(load_yaml, resolve_func=False, recursive=True))

    def load(path: Path, **how: bool) -> Any:
        if path.is_relative_to(own) and how == {"resolve_func": False, "recursive": True}:
            return copy.deepcopy(load_own(path))
        return load_yaml(path, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index, "load_yaml", load)
        patch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "")
        yield


@pytest.fixture
def harness(load_tiny: LoadTiny, tmp_path: Path) -> MakeHarness:
    """`harness(model_fields, scheme, read_plan="decode", context_length=512)`."""

    def make(model_fields: Json, scheme: str, read_plan: Any = "decode", context_length: int = 512) -> HarnessModel:
        loaded = load_tiny(**model_fields)
        backend = LocalBackend(loaded, named_scheme(scheme, loaded.shape), read_plan)
        folder = RunFolder(tmp_path / "run")
        folder.create()
        return HarnessModel(backend, TextTokenizer(loaded.tokenizer), context_length, folder, "x")

    return make


def asking(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="a", doc_id=index) for index, each in enumerate(arguments)]


@MODELS
def test_log_likelihoods_are_those_of_one_forward(
    model_fields: Json, harness: MakeHarness, load_tiny: LoadTiny, model_folder: ModelFolder
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder(**model_fields), dtype=torch.float32).eval()
    tokenizer = load_tiny(**model_fields).tokenizer
    pairs = [("a table of words", " and more"), ("words end in a space ", "more"), ("one", " two three four five")]
    found = harness(model_fields, "bf16").loglikelihood(asking(*pairs))
    for (context, continuation), (log_p, is_greedy) in zip(pairs, found, strict=True):
        ids = tokenizer(context + continuation, return_tensors="pt").input_ids
        start = len(tokenizer(context.rstrip()).input_ids)
        with torch.no_grad():
            logits = model(ids).logits[0, start - 1 : -1].double()
        assert log_p == pytest.approx(float(logits.log_softmax(-1).gather(-1, ids[0, start:, None]).sum()), abs=1e-4)
        assert is_greedy == bool((logits.argmax(-1) == ids[0, start:]).all())


@MODELS
def test_an_answer_reads_its_context_as_it_is_stored(
    model_fields: Json, harness: MakeHarness, load_tiny: LoadTiny
) -> None:
    loaded = load_tiny(**model_fields)
    context, continuation = "a table of words that is stored in four bits", " and"
    ((log_p, _),) = harness(model_fields, "K4V2").loglikelihood(asking((context, continuation)))
    before, after = (loaded.tokenizer(text).input_ids for text in (context, context + continuation))
    profile = named_scheme("K4V2", loaded.shape).profile
    assert profile is not None
    cache = KVTunerCache.from_profile(profile, loaded.shape.config, "decode")
    with torch.no_grad():
        loaded.model(torch.tensor([before[:-1]]), past_key_values=cache)
        logits = loaded.model(torch.tensor([after[len(before) - 1 : -1]]), past_key_values=cache).logits[0].double()
    targets = torch.tensor(after[len(before) :])
    assert log_p == pytest.approx(float(logits.log_softmax(-1).gather(-1, targets[:, None]).sum()), abs=1e-4)
    ((exact, _),) = harness(model_fields, "bf16").loglikelihood(asking((context, continuation)))
    assert abs(exact - log_p) > 1e-3, "one token shows it"


@MODELS
def test_long_texts_are_scored_in_pieces_each_token_once(
    model_fields: Json, harness: MakeHarness, load_tiny: LoadTiny, model_folder: ModelFolder
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder(**model_fields), dtype=torch.float32).eval()
    tokenizer = load_tiny(**model_fields).tokenizer
    text = "a text of many words that go on and on " * 4
    ids = tokenizer(text).input_ids
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = ids if model_fields.get("adds_bos") else [first, *ids]
    (found,) = harness(model_fields, "bf16", context_length=20).loglikelihood_rolling(asking((text,)))
    expected, scored = 0.0, 0
    for start in range(0, len(ids) - 1, 19):
        piece = torch.tensor([ids[start : start + 20]])
        with torch.no_grad():
            log_p = model(piece).logits[0, :-1].double().log_softmax(-1)
        expected += float(log_p.gather(-1, piece[0, 1:, None]).sum())
        scored += piece.shape[1] - 1
    assert scored == len(ids) - 1
    assert found == pytest.approx(expected, abs=1e-3)


def test_an_empty_continuation_is_certain_and_takes_nothing_from_its_neighbours(harness: MakeHarness) -> None:
    model = harness({"name": "llama-gqa"}, "bf16")
    alone = model.loglikelihood(asking(("one", " two")))
    found = model.loglikelihood(asking(("abc", ""), ("one", " two"), ("", ""), ("abc ", "")))
    assert found == [(0.0, True), *alone, (0.0, True), (0.0, True)]


@pytest.mark.parametrize(("options", "is_sampled"), [
    ({}, False), ({"do_sample": False}, False), ({"do_sample": False, "temperature": 0.7}, False),
    ({"temperature": 0}, False), ({"do_sample": True, "temperature": 0.0}, False),
    ({"do_sample": True}, True), ({"do_sample": True, "temperature": 1.5}, True), ({"temperature": 0.7}, True),
])  # fmt: skip
def test_a_task_that_asks_for_sampling_is_noted_and_answered_greedily(
    harness: MakeHarness, options: dict[str, Any], is_sampled: bool
) -> None:
    model = harness({"name": "llama-gqa"}, "bf16")
    (greedy,) = model.generate_until(asking(("one two", {"max_gen_toks": 12})))
    assert model.greedy == set()
    assert model.generate_until(asking(("one two", {"max_gen_toks": 12, **options}))) == [greedy]
    assert model.greedy == ({"a"} if is_sampled else set())


def test_generations_stop_where_the_task_says(
    harness: MakeHarness, load_tiny: LoadTiny, model_folder: ModelFolder
) -> None:
    model_fields = {"name": "llama-gqa"}
    model = AutoModelForCausalLM.from_pretrained(model_folder(**model_fields), dtype=torch.float32).eval()
    tokenizer = load_tiny(**model_fields).tokenizer
    ids = tokenizer("one two", return_tensors="pt").input_ids
    generated = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    whole = tokenizer.decode(generated, skip_special_tokens=True)
    stop = whole[3:5]
    asked = asking(("one two", {"max_gen_toks": 12}), ("one two", {"until": [stop], "max_gen_toks": 12}))
    found = harness(model_fields, "bf16").generate_until(asked)
    assert found == [whole, whole.split(stop)[0]]
    known = harness(model_fields, "bf16")
    backend = known._backend
    silent = partial(pytest.fail, "the backend is asked")
    known._backend = SimpleNamespace(key=backend.key, hits=None, generate_until=silent)
    assert known.generate_until(asked) == found, "the journal answers"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with tasks of the demo model's kind: sums to say, lines to find among four, texts to go on with."""
    rng, folder = random.Random(5), tmp_path / "tasks"
    folder.mkdir()
    sums, lines = [], []
    for _ in range(8):
        *examples, asked = addition_lines(rng, 9).splitlines()
        question, _, answer = asked.partition("=")
        sums.append({"question": "\n".join([*examples, f"{question}="]), "answer": answer})
        problem = recall_problem(rng, 20, 1)
        key, value = problem.table[problem.questions[0]]
        choices = [value, *(other for _, other in rng.sample(problem.table, 3))]
        lines.append({"question": f"{problem.prompt}{key}:", "choices": choices, "label": 0})
    tokenizer = load_tokenizer(ModelSource("demo"))
    texts = [
        {"question": tokenizer.decode(ids[1:161]), "answer": tokenizer.decode(ids[161:185])}
        for ids in load_corpus(CorpusSource(num_sequences=(1, 1, 8)), tokenizer).splits["report"].tolist()
    ]
    common = "dataset_path: json\ntest_split: train\n"
    for name, rows, rest in (
        ("sums", sums, "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
                       "generation_kwargs: {until: [\"\\n\"], max_gen_toks: 8}\n"
                       "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"),
        ("texts", texts, "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
                         "generation_kwargs: {until: [], max_gen_toks: 24}\n"
                         "metric_list: [{metric: bleu}, {metric: chrf}]\n"),
        ("lines", lines, "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
                         "doc_to_target: label\ntarget_delimiter: ''\n"
                         "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"),
    ):  # fmt: skip
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"task: demo_{name}\ndataset_kwargs: {{data_files: {data}}}\n{common}{rest}"
        )
    return folder


@pytest.fixture
def evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """A K2V2 profile of the demo model by tasks alone, in effect: exit status, JSON, stderr."""
    path = tmp_path / "two.json"
    profile = named_scheme("K2V2", read_shape(ModelSource("demo"))).profile
    assert profile is not None
    path.write_bytes(dump_profile(profile))

    def call(*flags: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        words = ("--model", "demo", "--levels", "arithmetic", "--problems", "2", "--questions", "1")
        status = main(["eval", str(path), *words, "--out", str(tmp_path / "out"), "--json", *flags])
        out, err = capsys.readouterr()
        return status, json.loads(out) if status == 0 else None, err

    return call


def test_local_tasks_show_what_two_bits_lose(evaluate: Evaluate, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("--tasks", "demo_sums,demo_lines", "--include-path", str(tasks))
    flags = (*own, "--limit", "6", "--against", "K8V8")
    status, found, err = evaluate(*flags)
    assert status == 0, err
    cells = {cell["task"]: cell for cell in found["cells"] if cell["level"] == "task"}
    assert set(cells) == {"demo_sums exact_match", "demo_lines acc"}
    for cell in cells.values():
        means = {result["subject"]: result["mean"] for result in cell["results"]}
        assert cell["units"] == cell["count"] == 6
        assert means["bf16"] >= 5 / 6
        assert means["profile"] < means["bf16"]
        assert means["K8V8"] == means["bf16"]
        assert {each["other"]: each["mean"] for each in cell["differences"]}["bf16"] < 0
    assert str(tasks) not in json.dumps(found)

    def unwanted(*_: object, **__: object) -> None:
        raise AssertionError("asked twice")

    monkeypatch.setattr(LocalBackend, "log_likelihood", unwanted)
    monkeypatch.setattr(LocalBackend, "generate_until", unwanted)
    assert evaluate(*flags)[1] == found


def test_a_corpus_has_one_score_that_is_sacrebleus(evaluate: Evaluate, tasks: Path, tmp_path: Path) -> None:
    flags = ("--tasks", "demo_texts", "--include-path", str(tasks), "--against", "K8V8")
    status, found, err = evaluate(*flags)
    assert status == 0, err
    cells = {cell["task"]: cell for cell in found["cells"] if cell["level"] == "task"}
    assert {name: cell["measure"] for name, cell in cells.items()} == {
        "demo_texts bleu": "bleu",
        "demo_texts chrf": "chrf",
    }
    answers = [json.loads(line)["answer"] for line in (tmp_path / "out" / "tasks.jsonl").read_text().splitlines()]
    right = [json.loads(line)["answer"] for line in (tasks / "texts.jsonl").read_text().splitlines()]
    assert len(answers) == 3 * 8, "asked once for both metrics"
    means = {}
    for index, scheme in enumerate(("bf16", "profile", "K8V8")):
        mine = answers[8 * index : 8 * index + 8]
        for name, own in (("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)):
            (result,) = (each for each in cells[f"demo_texts {name}"]["results"] if each["subject"] == scheme)
            assert result["mean"] == pytest.approx(own(mine, [right]).score, rel=1e-4)
            assert result["low"] < result["mean"] < result["high"]
            means[scheme, name] = result["mean"]
    assert means["profile", "chrf"] < means["bf16", "chrf"] - 5
    differences = {each["other"]: each for each in cells["demo_texts chrf"]["differences"]}
    assert differences["bf16"]["mean"] == pytest.approx(means["profile", "chrf"] - means["bf16", "chrf"], abs=1e-3)
    assert differences["bf16"]["high"] < 0
    assert 2 / 2**8 <= differences["bf16"]["p_value"] < 0.2, "every swap of eight texts"


def test_tasks_that_cannot_be_asked(evaluate: Evaluate, tasks: Path) -> None:
    (tasks / "broken.yaml").write_text(
        "task: broken\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.jsonl}\n"
    )
    unsafe = (tasks / "sums.yaml").read_text().replace("task: demo_sums", "task: unsafe") + "unsafe_code: true\n"
    (tasks / "unsafe.yaml").write_text(unsafe)
    for flags, reason in (
        (("--tasks", "no_such_task"), "no_such_task"),
        (("--tasks", "broken", "--include-path", str(tasks)), "cannot be evaluated"),
        (("--tasks", "unsafe", "--include-path", str(tasks)), "marked as unsafe"),
        (("--tasks", "demo_sums", "--include-path", str(tasks), "--apply-chat-template"), "cannot be evaluated"),
        (("--tasks", "x", "--include-path", str(tasks / "none")), "is no folder"),
    ):
        status, _, err = evaluate(*flags)
        assert status == 2, flags
        assert reason in err


def test_sampling_is_left_out_with_a_warning_and_the_result_says_so(
    evaluate: Evaluate, tasks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tasks / "sums.yaml"
    drawn = file.read_text().replace("max_gen_toks: 8", "max_gen_toks: 8, do_sample: true, temperature: 1.5")
    (tasks / "drawn.yaml").write_text(drawn.replace("task: demo_sums", "task: demo_drawn"))
    status, found, err = evaluate("--tasks", "demo_sums,demo_drawn", "--include-path", str(tasks), "--against", "K8V8")
    assert status == 0, err
    cells = {cell["task"]: cell for cell in found["cells"] if cell["level"] == "task"}
    assert set(cells) == {"demo_sums exact_match", "demo_drawn exact_match (greedy)"}
    assert cells["demo_drawn exact_match (greedy)"]["results"] == cells["demo_sums exact_match"]["results"]
    (warning,) = (record.getMessage() for record in caplog.records if "sampling" in record.getMessage())
    assert "demo_drawn asks for sampling" in warning


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), KeyError("a bug of ours"), OSError("the disk")])
def test_what_fails_in_the_model_is_not_blamed_on_the_task(
    evaluate: Evaluate, tasks: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(LocalBackend, "log_likelihood", failing)
    with pytest.raises(type(error)) as raised:
        evaluate("--tasks", "demo_lines", "--include-path", str(tasks))
    assert raised.value is error


def test_a_refusal_of_the_model_keeps_its_words(
    evaluate: Evaluate, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise CacheError("the cache is of another batch")

    monkeypatch.setattr(LocalBackend, "generate_until", refusing)
    status, _, err = evaluate("--tasks", "demo_sums", "--include-path", str(tasks))
    assert status == 2
    assert err.splitlines()[-1] == "kvtuner eval: error: the cache is of another batch"
