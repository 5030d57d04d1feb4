"""The progress of the forward passes ahead: what a phase did not need is left out, what nobody announced not shown."""

from __future__ import annotations

import pytest

from kvtuner.pipeline.stages import work_ahead
from kvtuner.pipeline.stages.work_ahead import ForwardProgress
from kvtuner.progress import bar as progress_bar


@pytest.fixture(autouse=True)
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "LINE_INTERVAL_S", 0.0)


def test_the_work_ahead_shrinks_by_what_a_phase_did_not_need(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ForwardProgress([("first", 100.0), ("second", 40.0), ("second", 60.0)])
    shown = []
    for name, passes in (("first", 30.0), ("second", 40.0), ("second", 20.0)):
        with progress.phase(name, lambda passes=passes: passes):  # type: ignore[misc]  # a lambda's default
            pass
        shown.append(capsys.readouterr().err.splitlines()[-1].partition(" (")[0])
    assert shown == ["forward passes: 30 of 200", "forward passes: 70 of 130", "forward passes: 90 of 130"]


def test_more_passes_than_announced_do_not_pass_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with ForwardProgress([("only", 10.0)]).phase("only", lambda: 25.0):
        pass
    assert "forward passes: 10 of 10 (100 %), about 00:00 left" in capsys.readouterr().err


def test_no_bar_is_shown_where_tqdm_is_told_not_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ForwardProgress([("only", 10.0)])
    real = progress_bar.ProgressBar
    monkeypatch.setattr(work_ahead, "ProgressBar", lambda **options: real(disable=True, **options))
    with progress.phase("only", lambda: 5.0):
        pass
    assert capsys.readouterr().err == ""


def test_a_phase_that_was_not_announced_or_fails_leaves_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    with ForwardProgress().phase("unknown", lambda: 1.0):
        assert all(thread.name != "kvtuner-progress" for thread in threading.enumerate())
    assert capsys.readouterr().err == ""
    with pytest.raises(KeyError), ForwardProgress([("only", 10.0)]).phase("only", lambda: 1.0):
        raise KeyError
    assert all(thread.name != "kvtuner-progress" for thread in threading.enumerate())
