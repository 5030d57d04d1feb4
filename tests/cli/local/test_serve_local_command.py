"""``kvtuner serve-local``: a process that serves until it is told to end, and refusals before anything is loaded."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import LoadTiny, ModelFolder, ProfileOf, RunCommand


@pytest.mark.slow
def test_a_server_answers_with_a_profile_and_ends_when_told(
    model_folder: ModelFolder, load_tiny: LoadTiny, profile_of: ProfileOf, tmp_path: Path
) -> None:
    folder = model_folder("llama-gqa", chat=True)
    profile = profile_of(load_tiny("llama-gqa", chat=True).model.config, [LayerQuantization(4, 2)] * 3)
    file = tmp_path / "profile.json"
    file.write_bytes(dump_profile(profile))
    command = [
        sys.executable, "-m", "kvtuner", "serve-local", "--model", str(folder), "--profile", str(file), "--port", "0",
        "--served-model-name", "tiny", "--attention", "torch", "--device", "cpu", "--json",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert (facts["model"], facts["profile"]) == ("tiny", profile.digest)
        assert facts["kv_bytes_per_token"] == profile.bytes_per_token()
        answer = httpx.post(
            f"{facts['url']}/v1/completions", json={"prompt": "the fox", "max_tokens": 4}, trust_env=False
        )
        assert answer.json()["usage"]["completion_tokens"] <= 4
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"tiny answers at {facts['url']}/v1; attention by torch" in err
    assert "Traceback" not in err


def test_other_machines_are_let_in_with_a_key_alone(
    run: RunCommand, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVTUNER_API_KEY", raising=False)
    for host in ("0.0.0.0", "::"):
        status, out, err = run("serve-local", "--model", model_folder(), "--host", host)
        assert (status, out) == (2, "")
        assert "lets other machines ask; put a key into the variable KVTUNER_API_KEY" in err


def test_a_port_in_use_is_refused_before_weights_are_loaded(run: RunCommand) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = run("serve-local", "--model", "/nowhere", "--port", port)
    assert status == 2
    assert f"port {port} of 127.0.0.1 cannot be had (Address already in use); give another --port" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", "70000"), "a port is within 0..65535, not 70000"),
        (("--host", "nowhere.invalid"), "--host nowhere.invalid is no address"),
        (("--most-requests", "0"), "must be at least 1, not 0"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: tuple[str, ...], message: str, run: RunCommand) -> None:
    status, _, err = run("serve-local", "--model", "demo", *flags)
    assert status == 2
    assert message in err


def test_the_extra_is_named_where_it_is_missing(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    status, _, err = run("serve-local", "--model", "demo")
    assert status == 2
    assert "pip install 'kvtuner[serve]'" in err
