"""``kvtuner eval`` of real servers: what a served profile answers, and what is said of other servers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig

from kvtuner.calibration.model import DEMO_MODEL
from kvtuner.cli import main
from kvtuner.exported_configs.build import LayerChoice
from kvtuner.exported_configs.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FEW = ("--lengths", "150", "--problems", "5", "--questions", "3", "--samples", "1")


@pytest.fixture(scope="module")
def rough(profile_of: Any, save_profile: Any) -> Path:
    """A profile that hurts the demo model."""
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    path: Path = save_profile(profile_of(config, [LayerChoice(2, 4)] * config.num_hidden_layers))
    return path


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str], rough: Path, tmp_path: Path) -> Callable[..., tuple[int, Any, str]]:
    """`evaluate(*flags)`: exit status, JSON, stderr."""

    def call(*flags: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        words = ("eval", str(rough), "--model", "demo", "--out", str(tmp_path / "out"), "--json")
        status = main([*words, *flags])
        out, err = capsys.readouterr()
        return status, json.loads(out) if status == 0 else None, err

    return call


def said_by(way: str, folder: Path) -> str:
    """The first sample of a way."""
    return (folder / "samples.md").read_text().partition(f"**{way}**")[2].partition("**")[0]


def accuracies(found: Any, subject: str) -> dict[tuple[str, int | None], float]:
    return {
        (cell["level"], cell["num_tokens"]): result["mean"]
        for cell in found["cells"]
        for result in cell["results"]
        if result["subject"] == subject and cell["position"] == 0
    }


def test_served_profiles_are_asked_what_the_transformers_host_is_asked(
    serve: Any, rough: Path, evaluate: Any, tmp_path: Path
) -> None:
    levels = ("--levels", "recall,arithmetic,samples", *FEW)
    _, offline, _ = evaluate(*levels, "--read-plan", "hit", "--out", str(tmp_path / "offline"))
    with serve(DEMO_MODEL, "--kvtuner-profile", str(rough)) as server, serve(DEMO_MODEL) as plain:
        ways = ("--endpoint", server.url, "--endpoint", f"bf16={plain.url}")
        status, found, _ = evaluate(*levels, *ways)
        assert status == 0
        assert found["host"]["kind"] == "sglang"
        assert found["host"]["reads"] == "fresh"
        assert found["host"]["hit_share"] > 0.8, "questions find their contexts in the cache"
        assert found["profile_digest"] == load_profile(rough).digest
        exact, hurt = accuracies(found, "bf16"), accuracies(found, "profile")
        host = {way: accuracies(offline, way) for way in ("bf16", "profile")}
        assert exact == {key: host["bf16"].get(key, value) for key, value in exact.items()}
        for served in (hurt, host["profile"]):
            assert served["arithmetic", None] < exact["arithmetic", None] - 0.3, "damage shows"
        assert said_by("bf16", tmp_path / "out") == said_by("bf16", tmp_path / "offline")
        status, again, _ = evaluate("--api", "openai", *levels, *ways, "--out", str(tmp_path / "openai"))
        assert status == 0
        assert accuracies(again, "bf16") == exact
        assert again["host"]["kind"] == "openai"
        for wrong, said in (
            ((plain.url,), "serves no profile, not sha256:"),
            ((f"bf16={server.url}", server.url), "was named bf16, but its cache is quantized"),
            ((f"fp8={plain.url}", server.url), "was named fp8, but its cache is"),
        ):
            status, _, err = evaluate(*levels, *(word for each in wrong for word in ("--endpoint", each)))
            assert status == 2
            assert said in err
        status, _, err = evaluate("--levels", "likelihood", "--endpoint", server.url)
        assert status == 2
        assert "reads it as it was before it was stored" in err


class Faulty(BaseHTTPRequestHandler):
    """Says what an SGLang server says, and answers by `fault`."""

    fault = "none"
    digest = ""
    asked = 0

    def do_GET(self) -> None:
        if self.fault == "gone" and Faulty.asked > 3:
            self.connection.close()
            return
        self.reply({"model_path": "demo", "version": "0", "kvtuner_profile": self.digest, "kvtuner_reads": "fresh"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Faulty.asked += 1
        if self.fault == "gone" and Faulty.asked > 3:
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

    def reply(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def faulty(rough: Path) -> Iterator[Callable[[str], str]]:
    """`faulty(fault)`: the address of a server that has it."""
    servers: list[ThreadingHTTPServer] = []

    def start(fault: str) -> str:
        handler = type("Handler", (Faulty,), {"fault": fault, "digest": load_profile(rough).digest})
        Faulty.asked = 0
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("fault", ["cut", "error", "empty"])
def test_answers_that_never_come_are_wrong_and_counted(fault: str, faulty: Any, evaluate: Any) -> None:
    status, found, _ = evaluate("--levels", "arithmetic", *FEW, "--endpoint", faulty(fault))
    assert status == 0
    for cell in found["cells"]:
        (result,) = cell["results"]
        assert (result["mean"], result["failures"], cell["count"]) == (0.0, 15, 15)


def test_a_server_that_dies_ends_the_run(faulty: Any, evaluate: Any) -> None:
    status, _, err = evaluate("--levels", "arithmetic", *FEW, "--endpoint", faulty("gone"))
    assert status == 2
    assert "stopped answering; start it and run the same command again to resume" in err
