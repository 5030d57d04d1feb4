"""Processes that hold one model together and run one program, for which their first one decides. Knows no models.

What depends on the outside, such as files, claims, the clock or a study, the leader alone asks, and tells the others:
so all ranks make the same calls in the same order, and none waits for a part that another one does not compute.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvtuner.errors import KVTunerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Decided = TypeVar("Decided")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the leader's work returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What the leader's work raised."""

    error: KVTunerError


@dataclass(frozen=True, slots=True)
class _SharedCall:
    """A call of a shared function, by its place, that all ranks make."""

    place: int
    arguments: tuple[Any, ...]


class RankGroup:
    """The ranks of a group, numbered from 0, the leader; a process alone is a group of one."""

    def __init__(self, number: int = 0, size: int = 1, broadcast: Callable[[Any], Any] = lambda sent: sent) -> None:
        """Take part as one rank; `broadcast` returns on every rank what the leader called it with."""
        self.number, self.size, self._broadcast = number, size, broadcast
        self._is_deciding = False

    def lead(self, work: Callable[..., Decided], *shared: Callable[..., Any]) -> Decided:
        """Have the leader alone work; every rank gets what `work` returns, or the `KVTunerError` that it raises.

        `work` is called with a function in place of each shared one: where it calls that, all ranks call the shared one
        with the same arguments. Otherwise what `work` calls is the leader's: `lead` within it is a plain call.
        """
        if self.size == 1 or self._is_deciding:
            return work(*shared)
        if self.number:
            followed: Decided = self._follow(shared)
            return followed
        self._is_deciding = True
        try:
            value = work(*(partial(self._call_on_all, place, call) for place, call in enumerate(shared)))
        except KVTunerError as error:
            self._broadcast(_Refusal(error))
            raise
        finally:
            self._is_deciding = False
        self._broadcast(_Answer(value))
        return value

    def _call_on_all(self, place: int, call: Callable[..., Any], *arguments: Any) -> Any:
        self._broadcast(_SharedCall(place, arguments))
        self._is_deciding = False
        try:
            return call(*arguments)
        finally:
            self._is_deciding = True

    def _follow(self, shared: Sequence[Callable[..., Any]]) -> Any:
        while isinstance(message := self._broadcast(None), _SharedCall):
            with contextlib.suppress(KVTunerError):  # the leader meets it too, and decides what it means
                shared[message.place](*message.arguments)
        if isinstance(message, _Refusal):
            raise message.error
        assert isinstance(message, _Answer)
        return message.value


ALONE: Final = RankGroup()
"""The group of a process that holds its model alone."""
