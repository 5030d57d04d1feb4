"""Work on several sequences at once: the same results in the same order, errors and threads as if one by one."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.calibration.forward import parallel_sequences as side_by_side
from kvtuner.calibration.forward.parallel_sequences import num_workers, run_in_parallel
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator
from kvtuner.quant import QuantSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fixture_types import RandomBatches

    from kvtuner.calibration.forward.chain import DecoderChain


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set torch's threads; they are as before after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    def slow(n: int) -> int:
        time.sleep(0.02 * (4 - n))
        return n * n

    assert list(run_in_parallel(slow, range(5), workers)) == [0, 1, 4, 9, 16]
    assert list(run_in_parallel(slow, [], workers)) == []


def test_as_many_run_at_once_as_there_are_workers() -> None:
    both = threading.Barrier(2, timeout=30)  # passes only if two are inside
    assert list(run_in_parallel(lambda n: both.wait() >= 0, range(4), 2)) == [True] * 4


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_item_that_fails_decides_and_nothing_new_begins(workers: int) -> None:
    begun: list[int] = []

    def fail(n: int) -> int:
        begun.append(n)
        time.sleep(0.05)
        if n in (1, 2):
            raise ValueError(str(n))
        return n

    done = []
    with pytest.raises(ValueError, match="1"):
        done.extend(run_in_parallel(fail, range(20), workers))
    assert len(begun) <= 5
    count = len(begun)
    time.sleep(0.1)
    assert len(begun) == count  # nothing is left running


def test_an_interruption_between_results_stops_the_rest(threads: Callable[[int], None]) -> None:
    threads(2)
    begun: list[int] = []

    def work(n: int) -> int:
        begun.append(n)
        time.sleep(0.05)
        return n

    with pytest.raises(KeyboardInterrupt):
        for _ in run_in_parallel(work, range(20), 2):
            raise KeyboardInterrupt
    assert len(begun) <= 4
    assert torch.get_num_threads() == 2


def test_each_worker_has_one_thread_of_torch_and_the_caller_gets_its_own_back(threads: Callable[[int], None]) -> None:
    threads(2)
    assert list(run_in_parallel(lambda _: torch.get_num_threads(), range(3), 2)) == [1, 1, 1]
    assert torch.get_num_threads() == 2
    assert list(run_in_parallel(lambda _: torch.get_num_threads(), range(3), 1)) == [2, 2, 2]


def test_only_small_models_on_a_cpu_run_several_sequences_at_once(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(2)
    model = torch.nn.Linear(8, 8)
    assert num_workers(model) == 2
    assert num_workers(model.to("meta")) == 1
    monkeypatch.setattr(side_by_side, "SMALL_MODEL", 73)
    model = torch.nn.Linear(8, 8)
    assert num_workers(model) == 2
    model.register_buffer("packed", torch.zeros(1))
    assert num_workers(model) == 1
    threads(1)
    monkeypatch.undo()
    assert num_workers(torch.nn.Linear(8, 8)) == 1


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-bias"])
def test_a_simulation_gives_the_same_bits_on_one_thread_and_on_two_workers(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, threads: Callable[[int], None]
) -> None:
    chain = chain_of(name)
    specs = dict.fromkeys(range(2), LayerSpec(QuantSpec(2), QuantSpec(4)))
    found, progress = [], []
    for count in (1, 2):
        threads(count)
        simulator = Simulator(chain, random_batches(5, 24), ReadPlan("decode", 6))
        simulator.prepare()
        before = chain.count.layer_tokens
        found.append(simulator.measure(specs, progress.append))
        assert chain.count.layer_tokens - before == chain.geometry.num_layers * 5 * 18
    assert torch.equal(found[0].kl, found[1].kl)
    assert torch.equal(found[0].agree, found[1].agree)
    assert progress == [24] * 10
