"""The ranks of torchrun that hold a model together: which options they cannot have, how they meet, and how they end."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import OptionError
from kvtuner.pipeline.progress import say
from kvtuner.workers.led_folder import LedFolder
from kvtuner.workers.rank_group import ALONE, RankGroup
from kvtuner.workers.worker_identity import has_ended, worker_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtuner.pipeline.options import CalibrateOptions
    from kvtuner.pipeline.stages.worker_processes import WorkerPlace
    from kvtuner.run_folder import RunFolder

SILENCE: Final = timedelta(hours=2)
"""The time that a rank waits for the others: one loads and hashes a large model from slow disks."""
_POLL_S: Final = 0.2
_LEAVING_S: Final = 2.0
"""The time by which ranks that end for the same reason end after one another."""


def refuse_ranks(options: CalibrateOptions, place: WorkerPlace) -> None:
    """Refuse options that ranks with a part of the model each cannot have, and processes that make no whole groups.

    Raises:
        OptionError: One of them.
    """
    ranks = options.tp
    if ranks == 1:
        return
    if options.stream:
        raise OptionError("--tp and --stream are two ways to run a model that does not fit; give one of them")
    if options.workers > 1:
        raise OptionError("--tp has torchrun start all processes; leave --workers out, and give torchrun more of them")
    start = f"torchrun --standalone --nproc-per-node {ranks} -m kvtuner search --tp {ranks} ..."
    if place.count % ranks:
        started = "this is one process" if place.count == 1 else f"torchrun started {place.count}"
        raise OptionError(f"--tp {ranks} needs {ranks} processes, or a multiple, but {started}; start {start}")
    if os.environ.get("MASTER_PORT", "0") == "0" or not os.environ.get("MASTER_ADDR"):
        raise OptionError(f"--tp {ranks} needs an address where its processes meet; start {start}, or name a port")
    if options.model.device not in ("auto", "cpu"):
        raise OptionError(f"--tp {ranks} gives each process a GPU; leave --device {options.model.device} out")
    import torch

    if options.model.device == "cpu" and torch.cuda.is_available():
        raise OptionError(
            f"--tp {ranks} takes the GPUs that it sees; hide them by CUDA_VISIBLE_DEVICES=, with no value"
        )


def in_groups(place: WorkerPlace, ranks: int) -> tuple[int, int]:
    """The number of this process's group, and its number in it: processes next to each other make a group."""
    return divmod(place.number, ranks)


@contextmanager
def rank_group(place: WorkerPlace, ranks: int) -> Iterator[RankGroup]:
    """The group of this process, one of so many ranks, each with the same work in the block.

    Each group has a process group of its own, which transformers finds. A rank that ends before the block does takes
    the others on its machine along: they hold no whole model.
    """
    if ranks == 1:
        yield ALONE
        return
    import torch.distributed as dist

    number, rank = in_groups(place, ranks)
    _meet(place, number, rank, ranks)
    talk = dist.new_group(backend="gloo", timeout=SILENCE)

    def broadcast(message: Any) -> Any:
        box = [message]
        dist.broadcast_object_list(box, src=0, group=talk)
        return box[0]

    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, worker_id(), group=talk)
    ended = threading.Event()
    others = {other: name for other, name in enumerate(names) if other != rank}
    watch = threading.Thread(target=_end_with_others, args=(others, ended), name="kvtuner-ranks", daemon=True)
    watch.start()
    try:
        yield RankGroup(rank, ranks, broadcast)
    except RuntimeError:  # what ranks exchange breaks with one of them: the watch then says so, and ends this one
        watch.join(2 * _LEAVING_S)
        raise
    finally:
        ended.set()
        watch.join()
    dist.barrier(group=talk)
    dist.destroy_process_group()


def _meet(place: WorkerPlace, number: int, rank: int, ranks: int) -> None:
    """Join the process group of this rank's group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(place.local)
    store, _, _ = next(rendezvous("env://", place.number, place.count, timeout=SILENCE))
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if has_gpu else "gloo",
        store=PrefixStore(f"kvtuner-{number}", store),
        rank=rank,
        world_size=ranks,
        timeout=SILENCE,
        device_id=torch.device("cuda", place.local) if has_gpu else None,
    )


def _end_with_others(others: Mapping[int, str], ended: threading.Event) -> None:
    while not ended.wait(_POLL_S):
        for rank, name in others.items():
            if has_ended(name) and not ended.wait(_LEAVING_S):
                say(
                    f"rank {rank} of this group ended, and with it its part of the model; the same command goes on"
                    " where the search stands"
                )
                sys.stderr.flush()
                os._exit(1)


def folder_of(group: RankGroup, folder: RunFolder) -> RunFolder:
    """A run folder as all ranks of a group use it."""
    return folder if group is ALONE else LedFolder(folder, group)
