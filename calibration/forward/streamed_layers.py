"""The layers of a model that does not fit in memory, loaded from its files one after another.

Sequences that run together take turns: all of them pass a layer while its weights are in memory, and the next layer is
read meanwhile. Results are those of the model in memory. Knows nothing of what is run.
"""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

SEQUENCES_AT_ONCE: Final = 256
"""The sequences that pass a layer while it is in memory; each has a hidden state of its own there."""

StreamedItem = TypeVar("StreamedItem")
StreamedResult = TypeVar("StreamedResult")

_STREAMED: Final[WeakKeyDictionary[nn.Module, StreamedLayers]] = WeakKeyDictionary()


def streamed_layers_of(model: nn.Module) -> StreamedLayers | None:
    """The layers of a model that is streamed; None of one that is in memory."""
    return _STREAMED.get(model)


@dataclass(frozen=True, slots=True)
class _StoredWeight:
    """A weight of a layer in the files of its model; `absent` takes its place in the module while it is not loaded."""

    module: nn.Module
    name: str
    files: Mapping[str, Tensor]
    absent: nn.Parameter

    def read(self, device: torch.device) -> nn.Parameter:
        """The weight, in memory."""
        return nn.Parameter(self.files[self.name].to(device), requires_grad=False)


@dataclass(slots=True)
class _Turns:
    """The tasks that run together, of which one runs at a time; the others wait for a layer, or to begin (None).

    Attributes:
        waiting: The layer that each waiting task needs.
        has_loaded: Whether a layer was loaded for them.
        is_busy: Whether a task runs.
        is_ended: Whether tasks are to end.
        failure: The error of a layer that could not be read.
    """

    waiting: dict[int, int | None] = field(default_factory=dict)
    has_loaded: bool = False
    is_busy: bool = False
    is_ended: bool = False
    failure: Exception | None = None


class StreamedLayers:
    """Loads a layer when a sequence comes to it, and keeps two in memory: that one and the next."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
        """Take over layers whose weights accelerate has left in files, and which run on `device`."""
        from accelerate.hooks import remove_hook_from_module

        self.device = device
        self._layers: list[list[_StoredWeight]] = []
        self._files: dict[str, tuple[Mapping[str, Tensor], str]] = {}
        names = {module: name for name, module in model.named_modules()}
        for number, layer in enumerate(layers):
            weights = []
            for module in layer.modules():
                hook: Any = getattr(module, "_hf_hook", None)
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if parameter.is_meta:
                        weights.append(_StoredWeight(module, name, hook.weights_map, parameter))
                        self._files[f"{names[module]}.{name}"] = (hook.weights_map, name)
                remove_hook_from_module(module)
            self._layers.append(weights)
            layer.register_forward_pre_hook(lambda *_, number=number: self.need(number))
        self._here: int | None = None
        self._step = 1
        self._next: tuple[int, Future[list[nn.Parameter]]] | None = None
        self._reader = ThreadPoolExecutor(1, "kvtuner-layers")
        self._turns = _Turns()
        self._changed = threading.Condition()
        self._task = threading.local()
        self.num_loads = 0
        """The layers that were read so far."""
        _STREAMED[model] = self

    def read(self, name: str) -> Tensor:
        """A weight of a layer by its name in the model's state dict."""
        files, key = self._files[name]
        return files[key]

    def need(self, layer: int) -> None:
        """Have the weights of a layer in memory until the caller needs those of another one."""
        number = getattr(self._task, "number", None)
        with self._changed:
            if number is None:
                self._load(layer)
            elif layer != self._here:
                self._wait(number, layer)

    def run_together(
        self, work: Callable[[StreamedItem], StreamedResult], items: Sequence[StreamedItem]
    ) -> Iterator[StreamedResult]:
        """Results of `work` in the order of `items`, `SEQUENCES_AT_ONCE` of which pass the layers together.

        The first item that fails, in the order of items, decides the error.
        """
        for first in range(0, len(items), SEQUENCES_AT_ONCE):
            yield from self._run_some(work, items[first : first + SEQUENCES_AT_ONCE])

    def _run_some(
        self, work: Callable[[StreamedItem], StreamedResult], items: Sequence[StreamedItem]
    ) -> list[StreamedResult]:
        self._turns = _Turns(dict.fromkeys(range(len(items))))
        pool = ThreadPoolExecutor(len(items), "kvtuner-stream")
        try:
            futures = [pool.submit(self._run_task, number, work, item) for number, item in enumerate(items)]
            return [future.result() for future in futures]
        except InterruptedError:
            if self._turns.failure is not None:
                raise self._turns.failure from None
            raise
        finally:
            with self._changed:
                self._turns.is_ended = True
                self._changed.notify_all()
            pool.shutdown()

    def _run_task(
        self, number: int, work: Callable[[StreamedItem], StreamedResult], item: StreamedItem
    ) -> StreamedResult:
        with self._changed:
            self._wait(number, None)
        self._task.number = number
        try:
            return work(item)
        finally:
            self._task.number = None
            with self._changed:
                self._hand_on()

    def _wait(self, number: int, layer: int | None) -> None:
        """Let others run until this task's layer is there, and it is its turn."""
        turns = self._turns
        if number not in turns.waiting:
            turns.waiting[number] = layer
            self._hand_on()
        self._changed.wait_for(
            lambda: turns.is_ended or (not turns.is_busy and turns.waiting[number] in (None, self._here))
        )
        if turns.is_ended:
            raise InterruptedError("the sequences that run together were interrupted")
        del turns.waiting[number]
        turns.is_busy = True

    def _hand_on(self) -> None:
        """Let another task run; load the next layer where none can, up and down the layers as a lift does."""
        turns = self._turns
        turns.is_busy = False
        wanted = list(turns.waiting.values())
        if wanted and not turns.is_ended and None not in wanted and self._here not in wanted:
            here = -1 if self._here is None else self._here
            if not turns.has_loaded and len(set(wanted)) > 1:  # runs that begin at several layers all go up
                here, self._step = -1, 1
            turns.has_loaded = True
            ahead = [layer for layer in wanted if layer is not None and (layer - here) * self._step > 0]
            if not ahead:
                self._step = -self._step
                ahead = [layer for layer in wanted if layer is not None]
            try:
                self._load(min(ahead, key=lambda layer: abs(layer - here)))
            except Exception as error:  # accelerate raises anything: `run_together` raises it in the caller
                turns.failure, turns.is_ended = error, True
        self._changed.notify_all()

    def _load(self, layer: int) -> None:
        """Have a layer in memory, no other one, and begin to read the one after it."""
        if layer == self._here:
            return
        if self._here is not None:
            for weight in self._layers[self._here]:
                weight.module.register_parameter(weight.name, weight.absent)
        read_ahead, self._next = self._next, None
        if read_ahead is not None and read_ahead[0] == layer:
            parameters = read_ahead[1].result()
        else:
            if read_ahead is not None:
                read_ahead[1].cancel()
            parameters = self._reader.submit(self._read, layer).result()
        for weight, parameter in zip(self._layers[layer], parameters, strict=True):
            weight.module.register_parameter(weight.name, parameter)
        self._here = layer
        following = layer + self._step
        if 0 <= following < len(self._layers):
            self._next = following, self._reader.submit(self._read, following)

    def _read(self, layer: int) -> list[nn.Parameter]:
        self.num_loads += 1
        return [weight.read(self.device) for weight in self._layers[layer]]


def on_disk(tensor: Tensor) -> Tensor:
    """The tensor in a file of the folder for temporary files, which the system writes back where memory ends.

    The file goes with the tensor. It is on the CPU.
    """
    with tempfile.TemporaryDirectory(prefix="kvtuner-") as folder:
        path = Path(folder) / "tensor"
        stored = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return stored.view(tensor.shape).copy_(tensor)
