"""What one forward pass of a chain of layers leaves, and how it is compared. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvtuner.calibration.forward.finite_check import check_finite, check_residual
from kvtuner.errors import KVTunerError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


STATES: Final = "shared_kv_states"
"""The argument in which transformers' layers leave keys and values for later layers that read them, and find them."""
States = MutableMapping[Any, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Everything a layer was called with but its hidden states.

    Attributes:
        added: What the model adds to the output of the layer before, beside images, float32 [batch, tokens,
            hidden_size]; None where it adds nothing.
        handed: The arguments that the layer before gives beside its hidden states, such as the tokens that its index
            selects: by their names, their places in its output.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    added: Tensor | None = None
    handed: Mapping[str, int] = field(default_factory=dict)

    def own_states(self) -> States | None:
        """A copy of what layers left for later ones in the traced forward; None where no layer reads another's keys."""
        states = self.kwargs.get(STATES)
        return None if states is None else copy(states)

    def kwargs_with(self, states: States | None, before: Any = None) -> dict[str, Any]:
        """The arguments by name, with other keys and values to leave and find, where layers share them.

        What the layer before hands on is that of its output, where one is given.
        """
        kwargs = self.kwargs if states is None else {**self.kwargs, STATES: states}
        return kwargs if before is None else {**kwargs, **{name: before[at] for name, at in self.handed.items()}}

    def without_handed(self) -> LayerCall:
        """The same without what the layer before hands on in the traced forward."""
        kept = {name: value for name, value in self.kwargs.items() if name not in self.handed}
        return replace(self, kwargs=kept) if self.handed else self

    def input_after(self, output: Tensor) -> Tensor:
        """The layer's input after an output of the layer before, [batch, tokens, hidden_size] each."""
        if self.added is None:
            return output
        return (output.to(torch.float32) + self.added.to(output.device)).to(output.dtype)


@dataclass(frozen=True, slots=True)
class Trace:
    """One forward pass of one batch, kept at layer boundaries.

    It holds the input of every layer, [batch, tokens, hidden_size] each, the rest of every layer's arguments, and the
    final hidden states after the last norm, [batch, tokens, hidden_size].
    """

    residual: Sequence[Tensor]
    calls: Sequence[LayerCall]
    final: Tensor

    def check_finite(self) -> None:
        """Check the final hidden states, which show all that goes wrong on the way; one reduction if nothing did.

        Raises:
            NonFiniteActivationError: NaN or infinity; names the first layer that gave any.
        """
        if not bool(torch.isfinite(self.final).all()):
            check_residual(self.residual)
            check_finite(len(self.residual) - 1, outputs=self.final)


@dataclass
class ForwardCount:
    """The work done, in layers and tokens; several threads may add to it."""

    layer_tokens: int = 0
    backward_layer_tokens: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, layer_tokens: int = 0, backward_layer_tokens: int = 0) -> None:
        """Count work."""
        with self._lock:
            self.layer_tokens += layer_tokens
            self.backward_layer_tokens += backward_layer_tokens


def added_between(output: Tensor, following: Tensor) -> Tensor | None:
    """What makes the input of the following layer of a layer's output; None where they are the same."""
    if is_same(following, output):
        return None
    return following.to(torch.float32) - output.to(following.device, torch.float32)


def handed_on(output: Any, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """The arguments of the following layer, by name, that an output holds beside its hidden states; their places."""
    beside = list(enumerate(output))[1:] if isinstance(output, tuple) else []
    return {name: at for at, given in beside for name, value in kwargs.items() if given is not None and given is value}


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, maybe on two devices, are equal element by element; NaN equals NaN."""
    return torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num())


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal up to the order of a sum, which some kernels (experts on a GPU) do not keep."""
    if not bool(torch.isfinite(expected).all()):
        return True  # the statistics pass names the layer
    tolerance = 1e-4 if expected.dtype == torch.float32 else 2e-2
    return largest_difference(actual, expected) <= tolerance * max(expected.abs().max().item(), 1e-6)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, maybe on two devices, of one element; NaN where one is not finite."""
    return (actual.to(expected.device, torch.float32) - expected.to(torch.float32)).abs().max().item()


@contextmanager
def refusing_model(name: str, how: str) -> Iterator[None]:
    """Refuse a model, by its class, where it cannot be run in a certain way."""
    try:
        yield
    except KVTunerError:
        raise
    except Exception as error:  # a model's own code raises anything where it meets what it does not expect
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedModelError(f"{name} cannot be run {how}: {reason}") from error
