"""The attention that was asked for runs or is refused; what was not asked for falls back, and the log says why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import OptionError, ServingError
from kvtuner.runtime_loader import attention_backends
from kvtuner.runtime_loader.engine.engine_options import ATTENTION_VARIABLE
from kvtuner.runtime_loader.engine.step_attention import available

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    EngineOf = Callable[..., LocalEngine]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the native library."""

    def missing() -> None:
        raise ServingError("there is no compiled library")

    row = attention_backends._BACKENDS["cpu"]
    monkeypatch.setitem(
        attention_backends._BACKENDS,
        "cpu",
        attention_backends.AttentionBackend("cpu", row.devices, row.make, row.default_on, missing),
    )


@pytest.mark.usefixtures("no_library")
def test_the_next_one_takes_the_place_of_a_default_that_is_missing(
    models: Any, engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvtuner"):
        engine = engine_of(models())
    assert engine.attention == "torch"
    assert "attention by torch (not cpu: there is no compiled library)" in caplog.text
    assert not available("cpu", engine.pool)
    assert available("torch", engine.pool)


@pytest.mark.usefixtures("no_library")
def test_one_that_was_named_is_refused_where_it_is_missing(
    models: Any, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServingError, match="by cpu was asked for and cannot run here: there is no compiled library"):
        engine_of(models(), attention="cpu")
    monkeypatch.setenv(ATTENTION_VARIABLE, "cpu")
    with pytest.raises(ServingError, match="by cpu was asked for"):
        engine_of(models())


def test_the_variable_names_one_and_the_option_comes_first(
    models: Any, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTENTION_VARIABLE, "torch")
    assert engine_of(models()).attention == "torch"
    monkeypatch.setenv(ATTENTION_VARIABLE, "flash")
    with pytest.raises(ServingError, match="must be one of sgl_kernel, cpu, triton, torch, not 'flash'"):
        engine_of(models())
    assert engine_of(models(), attention="torch").attention == "torch"


def test_an_option_that_is_none_of_the_choices_is_named(models: Any, engine_of: EngineOf) -> None:
    with pytest.raises(OptionError, match="attention must be one of sgl_kernel, cpu, triton, torch, not 'flash'"):
        engine_of(models(), attention="flash")
