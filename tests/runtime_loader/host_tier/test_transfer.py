"""Seconds of transfers, and of what is done inside them."""

from __future__ import annotations

import time

import pytest
import torch

from kvtuner.runtime_loader.host_tier.transfer import Stopwatch


def test_work_and_what_is_inside_it_are_told_apart() -> None:
    took: list[tuple[str, float]] = []
    stopwatch = Stopwatch(torch.device("cpu"), lambda *each: took.append(each))
    with stopwatch("backup"):
        time.sleep(0.02)
        with stopwatch("quantize"):
            time.sleep(0.03)
    assert [work for work, _ in took] == ["quantize", "backup"]
    seconds = dict(took)
    assert seconds["quantize"] >= 0.03
    assert seconds["backup"] >= seconds["quantize"] + 0.02


@pytest.mark.gpu
def test_a_stream_is_not_waited_for() -> None:
    device, took = torch.device("cuda"), []
    stopwatch = Stopwatch(device, lambda *each: took.append(each))
    cycles = 200_000_000
    with stopwatch("load"):
        torch.cuda._sleep(cycles)
    with stopwatch("load"):
        pass
    assert not took
    torch.cuda.synchronize(device)
    with stopwatch("load"):
        pass
    assert [work for work, _ in took] == ["load", "load"]
    assert took[0][1] > cycles / 4e9
