"""``kvtuner bench``: stubs that are wrong in every way, and real servers of the demo model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvtuner
from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.reference import find_profile
from kvtuner.pipeline.stages.best_uniform import best_uniform_scheme

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import Json, RunProgram
    from sglang_server import Programs

    Bench = Callable[..., tuple[int, Json, str]]

HERE = Path(__file__).parent
STUB = runpy.run_path(str(HERE / "bench_stub.py"))
stub, CONSTANT_S = STUB["stub"], STUB["CONSTANT_S"]
SHORT = (
    "--concurrency",
    "2",
    "--batches",
    "2",
    "--rounds",
    "2",
    "--repeats",
    "2",
    "--prompt-tokens",
    "64",
    "--output-tokens",
    "8",
)
BY_TIME = ("time to the first token grows with the prompt", "latency grows with the output")
"""Gates that a machine with much else to do can fail: tests wait for no quiet one."""
ON_A_PROCESSOR = (
    "--device cpu --dtype bfloat16 --disable-cuda-graph --mem-fraction-static 0.5 --max-running-requests 4"
    " --skip-server-warmup --sleep-on-idle"
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the demo model, with a window, in the run folder of the search that made it."""
    found = kvtuner.search(
        "demo", layers="0-2:K8V4,3-8:K4V4", residual_length=16, score="fisher", fisher_draws=1, word_bits="32",
        sequence_length=256, sequences=(2, 2, 4), report=False, out=tmp_path_factory.mktemp("search") / "run",
    )  # fmt: skip
    return found.file


@pytest.fixture
def bench(programs: Programs, run_program: RunProgram, mixed: Path, tmp_path: Path) -> Bench:
    """`bench(*flags)`: exit status, bench.json if there is one, stderr."""

    def call(*flags: str) -> tuple[int, Any, str]:
        in_forks = (str(HERE / "bench_in_forks.py"), str(programs.forks.address)) if programs.forks.is_used else ()
        command = in_forks or ("-m", "kvtuner", "bench")
        done = run_program(*command, str(mixed), "--model", "demo", "--out", str(tmp_path / "run"), *flags)
        result = tmp_path / "run" / "bench.json"
        return done.returncode, json.loads(result.read_text()) if result.exists() else None, done.stderr

    return call


@pytest.fixture(scope="module")
def program(run_program: RunProgram) -> Any:
    done = run_program(str(HERE / "bench_program.py"), str(DEMO_MODEL))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("fault", "least", "message"),
    [
        ("slow", 3, "no answer within 1 s"),
        ("error", 3, "Internal Server Error: out of memory"),
        ("dies", 4, "Error"),
        ("empty", 3, "an empty answer"),
        ("cut", 3, "Error"),
        ("short", 3, "ended after 2 of 12 tokens"),
    ],
)
def test_whatever_goes_wrong_is_a_failure_that_stays(program: Json, fault: str, least: int, message: str) -> None:
    sent = program["faults"][fault]
    failures = [each["error"] for each in sent if each["error"] is not None]
    assert len(sent) == 6
    assert least <= len(failures) < 6
    assert all(message in failure for failure in failures), failures


def test_a_server_that_is_right_is_counted_token_by_token(program: Json) -> None:
    for each in program["faults"]["none"]:
        assert each["error"] is None
        assert each["reported_tokens"] == 12
        assert len(each["gaps_s"]) == 11
        assert each["latency_s"] == pytest.approx(each["ttft_s"] + sum(each["gaps_s"]))


def test_figures_are_those_of_sglangs_own_benchmark(program: Json) -> None:
    theirs, ours = program["theirs"], program["ours"]
    for measure, name in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "itl_s")):
        for percentile, quantile in (("median", "p50"), ("p90", "p90"), ("p99", "p99")):
            expected = theirs[f"{percentile}_{measure}_ms"] / 1e3
            assert ours[name][quantile] == pytest.approx(expected, rel=0.02, abs=2e-4), (measure, quantile)
    assert ours["output_tokens_per_s"] == pytest.approx(theirs["output_throughput"])
    assert ours["requests_per_s"] == pytest.approx(theirs["request_throughput"])
    assert ours["answered"] == theirs["completed"] == 6


def test_a_stub_that_answers_in_constant_time_fails_the_run(bench: Bench, mixed: Path) -> None:
    lengths = ("--lengths", "100,4000", "--outputs", "16,64", *SHORT)
    with stub("constant", digest=load_profile(mixed).digest) as url:
        status, found, _ = bench("--endpoint", url, "--memory-bandwidth", "1", *lengths)
    assert status == 1
    verdicts = {gate["name"]: gate["verdict"] for gate in found["ways"][0]["gates"]}
    assert verdicts == {
        "requests are answered": "passed",
        "reported tokens are in the text": "failed",
        "prompts were new to the server": "passed",
        "time to the first token grows with the prompt": "failed",
        "latency grows with the output": "failed",
        "tokens per second are below what memory allows": "failed",
    }
    assert len(found["problems"]) == 4
    first = [row["ttft_s"]["p50"] for row in found["ways"][0]["loads"] if row["kind"] == "prompt"]
    assert all(CONSTANT_S < seconds < 10 * CONSTANT_S for seconds in first)


def test_a_server_that_dies_leaves_every_request_in_the_denominator(bench: Bench, mixed: Path) -> None:
    with stub("dies", digest=load_profile(mixed).digest) as url:
        status, found, _ = bench("--endpoint", url, "--lengths", "100", "--outputs", "16", *SHORT)
    assert status == 1
    rows = found["ways"][0]["loads"]
    assert sum(row["sent"] for row in rows) == 2 + 2 + 2 * 2 + 2 * 2 + 2 * 8
    assert sum(row["answered"] for row in rows) == 1, "after one that is not measured"
    assert "requests are answered" in found["problems"][0]
    assert any("the server was gone: it stopped answering" in error for row in rows for error in row["errors"])
    assert "127.0.0.1" not in json.dumps(found), "addresses stay here"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"digest": "sha256:" + "0" * 64}, "serves the profile sha256:000"),
        ({"architecture": "LlamaForCausalLM"}, "serves a LlamaForCausalLM, not the Qwen2ForCausalLM of --model"),
    ],
)
def test_a_server_of_something_else_is_refused(bench: Bench, mixed: Path, facts: dict[str, str], message: str) -> None:
    with stub("none", **{"digest": load_profile(mixed).digest, **facts}) as url:
        status, found, output = bench("--endpoint", url)
    assert status == 2
    assert found is None
    assert message in output


@pytest.mark.parametrize(
    "loads",
    [
        (*SHORT, "--lengths", "50,300", "--outputs", "4,16", "--sequences", "2,2,4", "--rounds", "1", "--repeats", "1"),
        pytest.param((*SHORT, "--lengths", "100,1000", "--outputs", "16,64"), marks=pytest.mark.full),
    ],
    ids=["small", "whole"],
)
def test_the_ablation_serves_every_group_or_says_why_not(
    loads: tuple[str, ...], bench: Bench, mixed: Path, tmp_path: Path
) -> None:
    common = ("--ablation", "--levels", "likelihood", "--kv-memory", "32MiB", "--server-args", ON_A_PROCESSOR)
    status, found, output = bench(*common, *loads)
    assert found, output[-3000:]
    assert all(any(gate in problem for gate in BY_TIME) for problem in found["problems"]), found["problems"]
    assert status == bool(found["problems"])
    schemes = {scheme["name"]: scheme for scheme in found["ways"]}
    assert {scheme["group"] for scheme in found["ways"]} == {*"ABCDEFG", None}
    served = [scheme for scheme in found["ways"] if scheme["refused"] is None]
    assert len(served) == len(schemes) == 10
    uniform = found["best_uniform"]
    assert uniform.endswith(" + transforms") and list(schemes)[1:3] == ["profile", uniform]
    assert schemes[uniform]["server"]["digest"] == best_uniform_scheme(find_profile(str(mixed))).profile.digest
    assert all(f"starting {scheme['name']} (" in output for scheme in served)
    window = (4 + 1) * load_profile(mixed).window_bytes()
    copies = {"profile": window, uniform: window, "K4V4-per-channel": 2 * window}  # 16 tokens, and 32
    for scheme in served:
        rows = (32 << 20) - copies.get(scheme["name"], 0)
        assert scheme["server"]["tokens_that_fit"] == pytest.approx(rows // scheme["bytes_per_token"], rel=0.01)
        assert len(scheme["gates"]) == 7
        assert all(gate["verdict"] == "passed" for gate in scheme["gates"] if gate["name"] not in BY_TIME)
        assert all(row["success_rate"] == 1 for row in scheme["loads"])
    kl = {
        result["subject"]: result["mean"]
        for cell in found["evaluation"]["cells"]
        if cell["measure"] == "kl_nats_per_token" and cell["position"] == 0
        for result in cell["results"]
    }
    assert kl["K8V8"] < kl["K4V4"] < kl["K2V2"]
    assert kl["K4V4"] < kl["K4V4-symmetric"]
    assert 0 < kl["K4V4-per-channel"] < kl["K2V2"]
    assert kl[uniform] < kl[uniform.removesuffix(" + transforms")], "it has transforms, other grids and a window too"
    folder = tmp_path / "run"
    page = (folder / "bench.html").read_text()
    assert page.count("<svg") == 2 * len(list(folder.glob("*.svg"))) == 8
    assert "http" not in page.replace("http-equiv", "")
    assert "K4V4-symmetric" in (folder / "bench.md").read_text()
    assert f"its fair rival, {uniform}:" in " ".join(page.split())
    assert str(tmp_path) not in json.dumps(found), "paths stay here"
    again_status, again, output = bench(*common, *loads)
    assert again_status == status
    assert "measured before" in output, "the journal is read, no server is started"
    assert again["ways"] == found["ways"]
