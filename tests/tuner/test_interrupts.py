"""Ctrl-C while a study's storage is in use."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import event
from sqlalchemy.engine import Engine

from kvtuner.search_spaces.space import predicted_score
from kvtuner.tuner.interrupts import InterruptGate
from kvtuner.tuner.study import refine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_is_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_gate_holds_the_interrupt_back_to_its_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), InterruptGate().closed():
        press()
        done.append("transaction")
    assert done == ["transaction"]


def test_an_opened_gate_delivers_what_was_held_back_before_anything_else() -> None:
    gate, done = InterruptGate(), []
    with gate.closed():
        press()
        with pytest.raises(KeyboardInterrupt), gate.opened():
            done.append("measurement")
    assert done == []


def test_an_opened_gate_lets_an_interrupt_through_at_once_and_closes_again() -> None:
    gate, done = InterruptGate(), []
    with pytest.raises(KeyboardInterrupt), gate.closed():
        with pytest.raises(KeyboardInterrupt), gate.opened():
            press()
            done.append("never")
        press()
        done.append("release of the trial")
    assert done == ["release of the trial"]


def test_a_second_interrupt_is_not_held_back() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), InterruptGate().closed():
        press()
        done.append("once")
        press()
        done.append("never")
    assert done == ["once"]


def test_in_another_thread_the_gate_does_nothing() -> None:
    done = []

    def work() -> None:
        gate = InterruptGate()
        with gate.closed(), gate.opened():
            done.append("work")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["work"]


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with InterruptGate().closed():
            press()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("statement", [1, 2, 3, 30, 60, 61, 62, 90, 120, 150])
def test_an_interrupt_within_any_statement_leaves_a_study_that_resumes(
    make_space: Callable[..., Any],
    make_constraint: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    statement: int,
) -> None:
    space, constraint = make_space(3, lambda layer, pair: layer / pair.k_bits), make_constraint("6bit", 3)
    url, count = f"sqlite:///{tmp_path / 'study.db'}", iter(range(1, 100_000))

    def press_once(*_: object) -> None:
        if next(count) == statement:
            press()

    def run() -> Any:
        return refine(space, constraint, predicted_score, warm=[], num_trials=10, storage=url)

    event.listen(Engine, "before_cursor_execute", press_once)
    try:
        with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
            run()
    finally:
        event.remove(Engine, "before_cursor_execute", press_once)
    assert not caplog.records
    for name in optuna.study.get_all_study_names(url):
        trials = optuna.load_study(study_name=name, storage=url).trials
        assert all(trial.state != TrialState.RUNNING for trial in trials)
    assert len(run().trials) == 10
