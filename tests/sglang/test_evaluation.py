"""``kvtuner eval`` of real servers: what a served profile answers, and what is said of other servers."""

from __future__ import annotations

import json
import random
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.demo.tasks import addition_lines, recall_problem
from kvtuner.calibration.model_loading import DEMO_MODEL, ModelSource, load_tokenizer
from kvtuner.cli import main
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fixture_types import Json, ProfileOf, SaveProfile, Serve

    Evaluate = Callable[..., tuple[int, Json, str]]

SCORED, POSITIONS = 3, 12
EXACT, CHAOTIC = 1e-3, 1e-2
"""Tolerances in nats of a mean over these positions. With noise of 1e-6 in keys and values some codes of 2 bits differ,
and the transformers cache's own mean changes by up to 3e-3 (the rough profile's is 4.75, the unquantized model's 1.81).
"""
SEQUENCES = (4, 12, 12)
SCORING = (
    *("--levels", "likelihood", "--scored-sequences", str(SCORED), "--positions", str(POSITIONS)),
    *("--sequences", ",".join(map(str, SEQUENCES))),
)
QUESTIONS = ("--problems", "5", "--questions", "3")
FEW = ("--lengths", "150", *QUESTIONS)


@pytest.fixture(scope="module")
def rough(profile_of: ProfileOf, save_profile: SaveProfile) -> Path:
    """A profile that hurts the demo model."""
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    path: Path = save_profile(profile_of(config, [LayerQuantization(2, 4)] * config.num_hidden_layers))
    return path


@pytest.fixture(scope="module")
def served(serve: Serve, rough: Path) -> Iterator[tuple[str, ...]]:
    """Flags that name a server of the rough profile and one of the unquantized model."""
    with serve(DEMO_MODEL, "--kvtuner-profile", str(rough)) as server, serve(DEMO_MODEL) as plain:
        yield "--endpoint", server.url, "--endpoint", f"bf16={plain.url}"


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str], rough: Path, tmp_path: Path) -> Evaluate:
    """`evaluate(*flags)`: exit status, JSON, stderr."""

    def call(*flags: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        command = ("eval", str(rough), "--model", "demo", "--out", str(tmp_path / "out"), "--json")
        status = main([*command, *flags])
        out, err = capsys.readouterr()
        return status, json.loads(out) if status == 0 else None, err

    return call


def first_sample(scheme: str, folder: Path) -> str:
    """The first sample of a scheme."""
    return (folder / "samples.md").read_text().partition(f"**{scheme}**")[2].partition("**")[0]


def accuracies(found: Json, subject: str) -> dict[tuple[str, int | None], float]:
    return {
        (cell["level"], cell["num_tokens"]): result["mean"]
        for cell in found["cells"]
        for result in cell["results"]
        if result["subject"] == subject and cell["position"] == 0
    }


def test_served_profiles_are_asked_what_the_transformers_host_is_asked(
    served: tuple[str, ...], evaluate: Evaluate, rough: Path, tmp_path: Path
) -> None:
    levels = ("--levels", "recall,arithmetic,samples", *FEW, "--samples", "1")
    _, offline, _ = evaluate(*levels, "--read-plan", "hit", "--out", str(tmp_path / "offline"))
    status, found, _ = evaluate(*levels, *served)
    assert status == 0
    assert found["host"]["kind"] == "sglang"
    assert found["host"]["reads"] == "fresh"
    assert found["host"]["hit_share"] > 0.8, "questions find their contexts in the cache"
    assert found["profile_digest"] == load_profile(rough).digest
    assert "unread" not in {cell["flag"] for cell in found["cells"]}
    exact, hurt = accuracies(found, "bf16"), accuracies(found, "profile")
    host = {scheme: accuracies(offline, scheme) for scheme in ("bf16", "profile")}
    assert exact == {key: host["bf16"].get(key, value) for key, value in exact.items()}
    for quantized in (hurt, host["profile"]):
        assert quantized["arithmetic", None] < exact["arithmetic", None] - 0.3, "damage shows"
    assert first_sample("bf16", tmp_path / "out") == first_sample("bf16", tmp_path / "offline")
    again = evaluate(*levels, *served)[1]
    assert again == found, "the journal knows what was found in the cache too"
    status, openai, _ = evaluate("--api", "openai", *levels, *served, "--out", str(tmp_path / "openai"))
    assert status == 0
    assert accuracies(openai, "bf16") == exact
    assert (openai["host"]["kind"], openai["host"]["hit_share"]) == ("openai", None)
    assert {cell["flag"] for cell in openai["cells"]} - {"floor"} == {"unread"}, "this one does not say what it found"


def test_servers_that_serve_something_else_are_refused(served: tuple[str, ...], evaluate: Evaluate) -> None:
    rough, plain = served[1], served[3].removeprefix("bf16=")
    for wrong, message in (
        ((plain,), "serves no profile, not sha256:"),
        ((f"bf16={rough}", rough), "was named bf16, but its cache is quantized"),
        ((f"fp8={plain}", rough), "was named fp8, but its cache is"),
    ):
        flags = (word for each in wrong for word in ("--endpoint", each))
        status, _, err = evaluate("--levels", "recall", *FEW, *flags)
        assert status == 2
        assert message in err


@torch.no_grad()
def log_probs(profile: Any, sequences: Any) -> torch.Tensor:
    """Log-probabilities of transformers, cut as an empty server cuts them; [sequences, positions, vocab].

    What a beginning shares with an earlier one is found in the cache; then come chunks of one token.
    """
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    start, rows = sequences.shape[1] - POSITIONS, []
    for index, ids in enumerate(sequences):
        shared = max([0, *(int((ids == other).cumprod(0).sum()) for other in sequences[:index])])
        for first in (start - 1, start):  # the first position's last token is no token of the prefix
            cache = DynamicCache() if profile is None else KVTunerCache.from_profile(profile, model.config, "hit")
            for chunk in (ids[:shared], ids[shared:first]):
                if len(chunk):
                    model(chunk[None], past_key_values=cache)
            for token in ids[first:-1] if first == start else ids[first:start]:
                rows.append(model(token.reshape(1, 1), past_key_values=cache).logits[0, -1].double().log_softmax(-1))
    return torch.stack(rows).unflatten(0, (len(sequences), POSITIONS))


def empty(*urls: str) -> None:
    """Forget what is in the prefix caches."""
    for url in urls:
        urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache?timeout=30", b""), timeout=60).close()


def likelihoods(found: Json) -> dict[tuple[str, str], float]:
    return {
        (cell["measure"], result["subject"]): result["mean"] for cell in found["cells"] for result in cell["results"]
    }


def test_likelihoods_of_servers_are_those_of_transformers(
    served: tuple[str, ...],
    evaluate: Evaluate,
    serve: Serve,
    rough: Path,
    profile_of: ProfileOf,
    save_profile: SaveProfile,
    tmp_path: Path,
) -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    fine = save_profile(profile_of(config, [LayerQuantization(8, 8)] * config.num_hidden_layers))
    with serve(DEMO_MODEL, "--kvtuner-profile", str(fine)) as third:
        empty(third.url, served[1], served[3].removeprefix("bf16="))
        status, found, _ = evaluate(*SCORING, *served, "--endpoint", f"K8V8={third.url}")
    assert status == 0
    assert found["host"]["hit_share"] > 0.95
    for cell in found["cells"]:
        assert (cell["units"], cell["count"], cell["flag"]) == (SCORED, SCORED * POSITIONS, None)
    tokenizer = load_tokenizer(ModelSource("demo"))
    ids = load_corpus(CorpusSource(num_sequences=SEQUENCES), tokenizer).splits["report"][:SCORED]
    exact = log_probs(None, ids)
    means = likelihoods(found)
    for scheme, profile in (("bf16", None), ("profile", load_profile(rough)), ("K8V8", load_profile(fine))):
        log_p = exact if profile is None else log_probs(profile, ids)
        nll = -log_p.gather(-1, ids[:, -POSITIONS:, None]).mean()
        tolerance = CHAOTIC if scheme == "profile" else EXACT
        assert means["nll_nats_per_token", scheme] == pytest.approx(float(nll), abs=tolerance)
        if profile is None:
            continue
        whole = float((exact.exp() * (exact - log_p)).sum(-1).mean())
        truncated = means["truncated_kl_nats_per_token", scheme]
        assert 0.8 * whole < truncated <= whole * 1.001 + 1e-6
        agree = (exact.argmax(-1) == log_p.argmax(-1)).double().mean()
        assert means["top1_agreement", scheme] == pytest.approx(float(agree), abs=1 / (SCORED * POSITIONS))
    assert means["truncated_kl_nats_per_token", "profile"] > 20 * means["truncated_kl_nats_per_token", "K8V8"]
    status, openai, _ = evaluate("--api", "openai", *SCORING, *served, "--out", str(tmp_path / "openai"))
    assert status == 0
    assert "nll_nats_per_token" not in {cell["measure"] for cell in openai["cells"]}
    bound = likelihoods(openai)["truncated_kl_nats_per_token", "profile"]
    assert 0.3 < bound / means["truncated_kl_nats_per_token", "profile"] < 1.001, "only tokens that both name"
    assert likelihoods(openai)["top1_agreement", "profile"] == pytest.approx(means["top1_agreement", "profile"])
    assert {cell["flag"] for cell in openai["cells"]} == {"unread"}


def test_hits_have_no_copies_so_that_a_server_shows_a_window_as_if_there_were_none(
    served: tuple[str, ...],
    evaluate: Evaluate,
    serve: Serve,
    profile_of: ProfileOf,
    save_profile: SaveProfile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    layers = [LayerQuantization(2, 4)] * config.num_hidden_layers
    windowed = save_profile(profile_of(config, layers, window=ExactWindow(32)))
    with serve(DEMO_MODEL, "--kvtuner-profile", str(windowed)) as server:
        empty(server.url, served[1], served[3].removeprefix("bf16="))
        flags = ("--model", "demo", "--json", "--out", str(tmp_path / "windowed"), "--endpoint", server.url)
        assert main(["eval", str(windowed), *flags, *SCORING, *served[2:]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile_digest"] == load_profile(windowed).digest
    assert {cell["flag"] for cell in found["cells"]} == {None}
    means, without = likelihoods(found), likelihoods(evaluate(*SCORING, *served)[1])
    for measure in ("truncated_kl_nats_per_token", "nll_nats_per_token"):
        assert means[measure, "profile"] == pytest.approx(without[measure, "profile"], abs=CHAOTIC)


def test_a_server_without_a_prefix_cache_is_flagged_and_shows_no_damage(
    served: tuple[str, ...], evaluate: Evaluate, serve: Serve, rough: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(DEMO_MODEL, "--kvtuner-profile", str(rough), "--disable-radix-cache") as server:
        levels = ("--levels", "likelihood,recall", *SCORING[2:], *FEW)
        status, found, _ = evaluate(*levels, "--endpoint", server.url, *served[2:])
    assert status == 0
    assert found["host"]["hit_share"] == 0
    assert {cell["flag"] for cell in found["cells"]} == {"unread"}
    assert likelihoods(found)["truncated_kl_nats_per_token", "profile"] < 1e-4, "what the flag is for"
    assert main(["show", str(rough)]) == 0
    shown = capsys.readouterr().out
    assert "~ truncated KL nats/token at 0" in shown
    assert "~ a server hardly found these prompts in its cache" in shown


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with sums to say and lines to find among four."""
    rng, folder = random.Random(5), tmp_path / "tasks"
    folder.mkdir()
    sums, lines = [], []
    for _ in range(6):
        *examples, last = addition_lines(rng, 9).splitlines()
        question, _, answer = last.partition("=")
        sums.append({"question": "\n".join([*examples, f"{question}="]), "answer": answer})
        problem = recall_problem(rng, 20, 1)
        key, value = problem.table[problem.questions[0]]
        choices = [value, *(other for _, other in rng.sample(problem.table, 3))]
        lines.append({"question": f"{problem.prompt}{key}:", "answer": 0, "choices": choices})
    generated = 'output_type: generate_until\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 8}\n'
    generated += "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}, {metric: chrf}]\n"
    chosen = "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ntarget_delimiter: ''\n"
    for name, rows, rest in (("sums", sums, generated), ("lines", lines, chosen)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(
            f"task: demo_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {data}}}\ntest_split: train\n"
            f"doc_to_text: '{{{{question}}}}'\ndoc_to_target: '{{{{answer}}}}'\n{rest}"
        )
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the harness's and its libraries'
def test_tasks_of_servers_are_answered_as_the_transformers_host_answers_them(
    served: tuple[str, ...], evaluate: Evaluate, tasks: Path, tmp_path: Path
) -> None:
    flags = ("--levels", "arithmetic", *QUESTIONS, "--include-path", str(tasks), "--tasks")
    served = ("--lengths", "150", *served)
    both, offline = "demo_sums,demo_lines", str(tmp_path / "offline")
    status, there, err = evaluate(*flags, both, "--read-plan", "hit", "--out", offline)
    assert status == 0, err
    status, found, err = evaluate(*flags, both, *served)
    assert status == 0, err
    means, host = ({each["task"]: each for each in got["cells"] if each["task"]} for got in (found, there))
    assert {"demo_sums exact_match", "demo_sums chrf", "demo_lines acc"} <= set(means)
    for task, cell in means.items():
        assert cell["flag"] != "unread"
        for scheme in ("bf16", "profile"):
            mine, theirs = (
                next(each["mean"] for each in got[task]["results"] if each["subject"] == scheme)
                for got in (means, host)
            )
            assert scheme == "profile" or mine == theirs
            assert scheme == "bf16" or max(mine, theirs) < means[task]["results"][0]["mean"], "damage shows"
    assert log_likelihoods(tmp_path / "out", 2) == pytest.approx(log_likelihoods(Path(offline), 4), abs=2e-3)
    again = evaluate(*flags, both, *served)[1]
    assert again == found, "the journal answers"
    status, _, err = evaluate("--api", "openai", *flags, "demo_lines", *served)
    assert status == 2
    assert "the task demo_lines: OpenAI's API names likely tokens only" in err
    status, openai, err = evaluate("--api", "openai", *flags, "demo_sums", *served)
    assert status == 0, err
    (cell,) = (each for each in openai["cells"] if each["task"] == "demo_sums exact_match")
    assert cell["results"] == means["demo_sums exact_match"]["results"]
    assert cell["flag"] == "unread"


def log_likelihoods(folder: Path, num_schemes: int) -> list[float]:
    """Log-likelihoods of all choices, in the order asked, by the first of so many schemes: the unquantized one."""
    answers = [json.loads(line)["answer"] for line in (folder / "tasks.jsonl").read_text().splitlines()]
    found = [answer[0] for answer in answers if isinstance(answer, list)]
    return found[: len(found) // num_schemes]


class Faulty(BaseHTTPRequestHandler):
    """Says what an SGLang server says, and answers by `fault`."""

    fault = "none"
    digest = ""
    num_requests = 0

    def do_GET(self) -> None:
        if self.fault == "gone" and Faulty.num_requests > 3:
            self.connection.close()
            return
        self.reply({"model_path": "demo", "version": "0", "kvtuner_profile": self.digest, "kvtuner_reads": "fresh"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Faulty.num_requests += 1
        if self.fault == "gone" and Faulty.num_requests > 3:
            self.connection.close()
        elif self.fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"text": "1')
        elif self.fault == "error":
            self.send_error(500)
        else:
            self.reply({"text": "" if self.fault == "empty" else "7", "meta_info": {"cached_tokens": 0}})

    def reply(self, document: Json) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def faulty(rough: Path, serve_http: Any) -> Callable[[str], str]:
    """`faulty(fault)`: the address of a server that has it."""

    def start(fault: str) -> str:
        handler = type("Handler", (Faulty,), {"fault": fault, "digest": load_profile(rough).digest})
        Faulty.num_requests = 0
        return f"http://127.0.0.1:{serve_http(handler).server_port}"

    return start


@pytest.mark.parametrize("fault", ["cut", "error", "empty"])
def test_likelihoods_that_never_come_are_refused_by_name(
    fault: str, faulty: Callable[[str], str], evaluate: Evaluate
) -> None:
    status, _, err = evaluate(*SCORING, "--endpoint", faulty(fault))
    assert status == 2
    assert f"gave no log-probabilities of {POSITIONS} tokens" in err
    assert "leave out the level likelihood" in err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("fault", ["cut", "empty"])
def test_tasks_that_are_never_answered_are_wrong_and_counted(
    fault: str, faulty: Callable[[str], str], evaluate: Evaluate, tasks: Path
) -> None:
    own = ("--include-path", str(tasks), "--tasks", "demo_sums,demo_lines")
    status, found, err = evaluate("--levels", "arithmetic", *FEW, *own, "--endpoint", faulty(fault))
    assert status == 0, err
    for cell in found["cells"]:
        if cell["level"] == "task":
            (result,) = cell["results"]
            assert (result["mean"], result["failures"], cell["count"]) == (0.0, 6, 6)
            assert cell["flag"] == "unread"


@pytest.mark.parametrize("fault", ["cut", "error", "empty"])
def test_answers_that_never_come_are_wrong_and_counted(
    fault: str, faulty: Callable[[str], str], evaluate: Evaluate
) -> None:
    status, found, _ = evaluate("--levels", "arithmetic", *FEW, "--endpoint", faulty(fault))
    assert status == 0
    for cell in found["cells"]:
        (result,) = cell["results"]
        assert (result["mean"], result["failures"], cell["count"]) == (0.0, 15, 15)


def test_a_server_that_dies_ends_the_run(faulty: Callable[[str], str], evaluate: Evaluate) -> None:
    status, _, err = evaluate("--levels", "arithmetic", *FEW, "--endpoint", faulty("gone"))
    assert status == 2
    assert "stopped answering; start it and run the same command again to resume" in err
