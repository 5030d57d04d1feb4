"""Flags of ``kvtuner bench`` that contradict each other; what it measures is in tests/sglang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig

from kvtuner.bench.server import ServerFlags
from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.cli import main
from kvtuner.cli.parser import build_parser
from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from fixture_types import ProfileOf

URL = "http://127.0.0.1:9"


@pytest.fixture
def profile(profile_of: ProfileOf, tmp_path: Path) -> str:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    path = tmp_path / "profile.json"
    path.write_bytes(dump_profile(profile_of(config, [LayerQuantization(4, 4)] * config.num_hidden_layers)))
    return str(path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "takes bytes of every request: give --max-running-requests to the servers, or leave --kv-memory out"),
        (
            ("--server-args", "--max-running-requests 8x"),
            "--max-running-requests must be a whole number of requests, not",
        ),
        (("--server-args", "--max-running-requests 9999"), "--kv-memory is all for the exact copies of profile"),
    ],
)
def test_memory_of_the_copies_of_a_window_is_counted_before_a_server_starts(
    flags: tuple[str, ...],
    message: str,
    profile_of: ProfileOf,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtuner.pipeline.benchmark.serving_client", lambda: None)
    config, path = AutoConfig.from_pretrained(DEMO_MODEL), tmp_path / "windowed.json"
    layers = [LayerQuantization(4, 4)] * config.num_hidden_layers
    path.write_bytes(dump_profile(profile_of(config, layers, window=ExactWindow(32))))
    assert main(["bench", str(path), "--model", "demo", "--kv-memory", "64MiB", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--endpoint", URL, "--server-args", "--tp 2"), "--server-args is for servers that are started here"),
        (("--endpoint", URL, "--device", "cpu"), "--device is for servers that are started here"),
        (("--endpoint", URL, "--dtype", "float16"), "--dtype is for servers that are started here"),
        (("--endpoint", URL, "--kv-memory", "1GiB"), "--kv-memory is for servers that are started here"),
        (("--endpoint", URL, "--ablation"), "--against and --ablation start servers"),
        (("--endpoint", URL, "--endpoint", URL), "profile is asked twice"),
        (("--ablation", "--against", "K8V8"), "--ablation says what is compared"),
        (("--api", "openai"), "give --endpoint too"),
        (("--levels", "recall"), "--levels is for the quality of --ablation"),
        (("--endpoint", URL, "--start-timeout", "9"), "--start-timeout is for servers that are started here"),
        (("--server-args", "--port=1 --device cpu"), "--port cannot stand in --server-args: a free one is taken"),
        (("--server-args", "--api-key secret"), "--api-key cannot stand in --server-args"),
        (("--server-args", "'open"), "cannot be read: No closing quotation"),
        (("--against", "bf16"), "bf16 is asked twice"),
        (("--local", "--endpoint", URL), "--endpoint is for servers; leave out that or --local"),
        (("--local", "--server-args", "--tp 2"), "--server-args is for servers; leave out that or --local"),
        (("--local", "--ablation"), "--ablation is for servers; leave out that or --local"),
        (("--local", "--against", "fp8"), "--local stores a profile's rows or unquantized ones; leave out fp8"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    profile: str,
    flags: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtuner.pipeline.benchmark.serving_client", lambda: None)  # it need not be installed to refuse
    assert main(["bench", profile, "--model", "demo", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("40GiB", 40 * 2**30), ("40GB", 40 * 10**9), ("1.5MiB", 3 * 2**19), ("4096", 4096), ("12 kib", 12 * 2**10)],
)
def test_bytes_are_read_with_their_units(text: str, expected: int) -> None:
    assert parsed("--kv-memory", text).kv_memory == expected


@pytest.mark.parametrize("flags", [("--kv-memory", "40PB"), ("--kv-memory", "0.3"), ("--memory-bandwidth", "-1")])
def test_amounts_that_say_nothing_are_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*flags)


def parsed(*flags: str) -> argparse.Namespace:
    found: Any = build_parser().parse_args(["bench", "profile.json", *flags])
    return found


def test_paths_in_flags_of_servers_stay_here() -> None:
    flags = ServerFlags.parse("--chat-template=/home/alice/x.jinja --draft /home/alice/draft --device=cpu")
    assert flags.shareable() == ["--chat-template=x.jinja", "--draft", "draft", "--device=cpu"]
    assert (flags.value("--device"), flags.value("--draft"), flags.value("--tp")) == ("cpu", "/home/alice/draft", None)
