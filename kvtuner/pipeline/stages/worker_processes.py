"""The processes of one command that measure together, on this machine or under torchrun. Knows nothing of searches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

from kvtuner.errors import OptionError
from kvtuner.pipeline.options import CalibrateOptions
from kvtuner.pipeline.progress import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtuner.run_folder import RunFolder

MAX_WORKERS_HERE: Final = 256
_PARENT_POLL_S: Final = 1.0

MeasuringOptionsOf = TypeVar("MeasuringOptionsOf", bound=CalibrateOptions)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of this process among those that were started together; the first one speaks and writes the results.

    Attributes:
        number: 0 of the first.
        count: The processes.
        local: The number among those on this machine.
        on_machine: The processes on this machine.
    """

    number: int = 0
    count: int = 1
    local: int = 0
    on_machine: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one speaks."""
        return self.number == 0

    @classmethod
    def from_environment(cls) -> WorkerPlace:
        """The place that torchrun gives; that of a process alone where it did not start this one."""
        values = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        if not all(value.isdecimal() for value in values.values()):
            return cls()
        number, count, local, on_machine = map(int, values.values())
        return cls(number, count, local, on_machine)


def placed(options: MeasuringOptionsOf, place: WorkerPlace) -> MeasuringOptionsOf:
    """The options with the GPU of one of several processes on a machine, and torch with its share of the cores."""
    import torch

    if place.on_machine > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.on_machine))
    gpus = torch.cuda.device_count()
    if options.model.device != "auto" or place.on_machine == 1 or gpus == 0:
        return options
    if place.on_machine > gpus:
        raise OptionError(
            f"{place.on_machine} workers need a GPU each, but this machine has {gpus}; give at most as many workers, or"
            " --device cpu"
        )
    return replace(options, model=replace(options.model, device=f"cuda:{place.local}"))


@contextmanager
def quiet_unless_first(place: WorkerPlace, folder: RunFolder) -> Iterator[None]:
    """Let what a process other than the first one says go to a log in the run folder; what it raises is not caught."""
    if place.is_first:
        yield
        return
    folder.create()
    before = sys.stderr, sys.stdout
    with folder.file(f"worker-{place.number}.log").open("a", buffering=1, encoding="utf-8") as log:
        sys.stderr = sys.stdout = log
        try:
            yield
        finally:
            sys.stderr, sys.stdout = before


def begin_imports(module: str) -> None:
    """Import a module in the process that workers will be forked from, while this one goes on to import it too."""
    multiprocessing.set_forkserver_preload([f"{__package__}.silent_interrupt", module])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the server inherits until it has imported the first
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def workers_beside(
    options: MeasuringOptionsOf, folder: RunFolder, help_with: Callable[[MeasuringOptionsOf, WorkerPlace], object]
) -> Iterator[WorkerPlace]:
    """Start the other workers that the options ask for, and end them with the block; gives this process's place.

    Each calls `help_with`, a function of a module. One that fails is named; the others do its work.

    Raises:
        OptionError: Workers were asked for in a process that torchrun started, or too many.
    """
    place, count = WorkerPlace.from_environment(), options.workers
    if count == 1:
        yield place
        return
    if place.count > 1:
        raise OptionError("torchrun starts the workers; leave --workers out")
    if count > MAX_WORKERS_HERE:
        raise OptionError(f"--workers must be at most {MAX_WORKERS_HERE}, but is {count}")
    import torch

    folder.create()
    threads = torch.get_num_threads()
    context = multiprocessing.get_context("forkserver")
    alone = replace(options, workers=1)
    processes = {
        number: context.Process(
            target=_work,
            args=(alone, WorkerPlace(number, count, number, count), help_with, folder.path, dict(os.environ)),
            name=f"kvtuner-worker-{number}",
            daemon=True,
        )
        for number in range(1, count)
    }
    for process in processes.values():
        process.start()
    ended = threading.Event()
    watch = threading.Thread(target=_name_failures, args=(processes, folder, ended), daemon=True)
    watch.start()
    try:
        yield WorkerPlace(0, count, 0, count)
    finally:
        ended.set()
        watch.join()
        for process in processes.values():
            process.terminate()
            process.join()
        torch.set_num_threads(threads)  # of which this process had its share


def _work(
    options: Any, place: WorkerPlace, help_with: Callable[..., object], folder: Path, environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # the server's is of the time when it was started
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which ends the others
    threading.Thread(target=_end_with_parent, name="kvtuner-parent", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first one has its results
    log: TextIO
    with (folder / f"worker-{place.number}.log").open("a", buffering=1, encoding="utf-8") as log:
        sys.stderr = sys.stdout = log
        try:
            help_with(options, place)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=log)
            sys.exit(1)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, however it did: claims are void with their process."""
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def _name_failures(processes: dict[int, Any], folder: RunFolder, ended: threading.Event) -> None:
    left = dict(processes)
    while left and not ended.wait(_PARENT_POLL_S):
        for number, process in list(left.items()):
            if process.exitcode is not None:
                del left[number]
                if process.exitcode:
                    log = folder.file(f"worker-{number}.log")
                    say(f"worker {number} ended with status {process.exitcode}: see {log}; the others do its work")
