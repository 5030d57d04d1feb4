"""The processes of one command that measure together, on this machine or under torchrun. Knows nothing of searches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

from kvtuner.errors import KVTunerError, OptionError
from kvtuner.pipeline.options import CalibrateOptions
from kvtuner.pipeline.progress import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

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


@dataclass(frozen=True, slots=True)
class WaitingWorkers:
    """Processes that were started before their work was known, each with the pipe by which it gets it."""

    processes: Sequence[SpawnProcess] = ()
    tasks: Sequence[Connection] = ()


@contextmanager
def waiting_workers(count: int, module: str | None = None) -> Iterator[WaitingWorkers]:
    """Start processes that import a module, while this one goes on, and wait; end them with the block."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(count)]
    processes = [
        spawn.Process(target=_wait_for_work, args=(receiver, module), name=f"kvtuner-worker-{number}", daemon=True)
        for number, (receiver, _) in enumerate(pipes, 1)
    ]
    try:
        with _without_interrupts():  # which they inherit: Ctrl-C is for the first process, which ends the others
            for process in processes:
                process.start()
        for receiver, _ in pipes:
            receiver.close()
        yield WaitingWorkers(processes, [sender for _, sender in pipes])
    finally:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            if process.pid is not None:
                process.terminate()
                process.join()
            sender.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def workers_beside(
    options: MeasuringOptionsOf,
    folder: RunFolder,
    help_with: Callable[[MeasuringOptionsOf, WorkerPlace], object],
    waiting: WaitingWorkers | None = None,
) -> Iterator[WorkerPlace]:
    """Let the other workers that the options ask for help; gives this process's place.

    They are those that are `waiting`, or are started and end with the block. Each calls `help_with`, a function of a
    module. One that fails is named; the others do its work.

    Raises:
        OptionError: Workers were asked for in a process that torchrun started, or too many.
    """
    place, count = WorkerPlace.from_environment(), options.workers
    check_workers(options)
    if count == 1:
        yield place
        return
    import torch

    folder.create()
    threads = torch.get_num_threads()
    alone = replace(options, workers=1)
    with nullcontext(waiting) if waiting is not None else waiting_workers(count - 1) as workers:
        for number, sender in enumerate(workers.tasks, 1):
            with suppress(BrokenPipeError):  # of a process that has ended, which is named below
                sender.send((alone, WorkerPlace(number, count, number, count), help_with, folder.path))
        ended = threading.Event()
        left = dict(enumerate(workers.processes, 1))
        watch = threading.Thread(target=_name_failures, args=(left, folder, ended), daemon=True)
        watch.start()
        try:
            yield WorkerPlace(0, count, 0, count)
        finally:
            ended.set()
            watch.join()
            torch.set_num_threads(threads)  # of which this process had its share


def check_workers(options: CalibrateOptions) -> None:
    """Refuse workers by an `OptionError` in a process that torchrun started, and too many of them."""
    if options.workers > 1 and WorkerPlace.from_environment().count > 1:
        raise OptionError("torchrun starts the workers; leave --workers out")
    if options.workers > MAX_WORKERS_HERE:
        raise OptionError(f"--workers must be at most {MAX_WORKERS_HERE}, but is {options.workers}")


def _wait_for_work(tasks: Connection, module: str | None) -> None:
    threading.Thread(target=_end_with_parent, name="kvtuner-parent", daemon=True).start()
    if module is not None:
        import_module(module)
    try:
        options, place, help_with, folder = tasks.recv()
    except EOFError:  # the first process has ended
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first one has its results
    log: TextIO
    with (folder / f"worker-{place.number}.log").open("a", buffering=1, encoding="utf-8") as log:
        sys.stderr = sys.stdout = log
        try:
            help_with(options, place)
        except KVTunerError as error:
            print(f"{type(error).__name__}: {error}", file=log)
            sys.exit(1)
        except Exception:  # of which nobody else will know where it came from
            traceback.print_exc(file=log)
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
