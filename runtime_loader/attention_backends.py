"""The attention backends that a server may choose: a row for each, imported once it is chosen.

To add one, write a module with the implementation and a row here (docs/architecture.md). Knows nothing of servers.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.precision import WIDEST_PACKED_BITS
from kvtuner.runtime_loader import cpu, kernels
from kvtuner.runtime_loader.cpu.latent_attention import LatentAttention
from kvtuner.runtime_loader.cpu.library import require_native_library
from kvtuner.runtime_loader.host_tier.transfer import TorchMover
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtuner.runtime_loader.host_tier.pages import HostPages
    from kvtuner.runtime_loader.host_tier.transfer import Layers, MakeMover, PageMover, Timed
    from kvtuner.runtime_loader.packed_attention import PackedAttention

BACKEND_VARIABLE: Final = "KVTUNER_ATTENTION"
"""The variable that names the attention backend of a server, such as triton on a processor for Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """A registered implementation of `PackedAttention`: how it is chosen and made.

    Attributes:
        name: The name that the variable gives, as log and metrics show it.
        devices: The kinds of devices that the backend may run on, as in `torch.device.type`.
        default_on: The kinds of devices that take the backend where the variable names none.
        make: The factory, which imports the implementation and raises ServingError where it cannot run.
        require: A check that raises ServingError on a machine that lacks what the backend needs. Where nobody named
            the backend, the next one that is a default there takes its place.
        make_mover: The factory of what moves pages to the host tier, for layers that this backend serves.
        make_of_latents: The factory of its attention over latents (MLA); None where it has none.
        check_latents: A check that raises ServingError for a device on which that does not run, and allocates nothing.
    """

    name: str
    devices: tuple[str, ...]
    make: Callable[[torch.device], PackedAttention]
    default_on: tuple[str, ...] = ()
    require: Callable[[], None] = lambda: None
    make_mover: MakeMover = TorchMover
    make_of_latents: Callable[[torch.device], PackedAttention] | None = None
    check_latents: Callable[[torch.device], None] = lambda _: None


logger: Final = logging.getLogger("kvtuner")
_BACKENDS: Final[dict[str, AttentionBackend]] = {}


def register_backend(backend: AttentionBackend) -> None:
    """Add an attention backend under its own name."""
    assert backend.name not in _BACKENDS, f"there is an attention backend {backend.name} already"
    _BACKENDS[backend.name] = backend


def backend_for(device: torch.device, name: str | None = None) -> AttentionBackend:
    """Choose the backend of a device, by its name or by default; `ServingError` where it does not run there."""
    return _default_backend(device) if name is None else _named_backend(device, name)


def _named_backend(device: torch.device, name: str) -> AttentionBackend:
    backend = _BACKENDS.get(name)
    if backend is None or device.type not in backend.devices:
        raise _no_backend(device, name)
    backend.require()
    return backend


def latent_backend(device: torch.device, name: str | None = None) -> AttentionBackend:
    """Choose the backend of latents (MLA) as `backend_for` does that of keys and values."""
    rows = [row for row in _BACKENDS.values() if row.make_of_latents is not None]
    chosen = [row for row in rows if device.type in row.devices and name in (None, row.name)]
    if not chosen:
        asked = f"{BACKEND_VARIABLE}={name} does not read" if name else "nothing reads"
        known = " and ".join(f"{row.name} on {' and '.join(row.devices)}" for row in rows)
        raise ServingError(
            f"{asked} latents (MLA) on {device}, only {known};"
            f" {f'unset {BACKEND_VARIABLE}' if name else 'serve without a profile'}"
        )
    chosen[0].require()
    chosen[0].check_latents(device)
    return chosen[0]


def _default_backend(device: torch.device) -> AttentionBackend:
    rows = [row for row in _BACKENDS.values() if device.type in row.default_on]
    if not rows:
        raise _no_backend(device, None)
    for row, following in itertools.pairwise(rows):
        try:
            row.require()
        except ServingError as error:
            _say_once(f"kvtuner: attention is {following.name} and not {row.name}: {error}")
        else:
            return row
    rows[-1].require()
    return rows[-1]


def _no_backend(device: torch.device, name: str | None) -> ServingError:
    return ServingError(f"{BACKEND_VARIABLE}={name} is no implementation of attention on {device}; unset it")


@cache
def _say_once(line: str) -> None:
    logger.warning(line)


def _triton_attention(device: torch.device) -> PackedAttention:
    with _triton_installed():
        from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
    return TritonAttention(device)


def _triton_latents(device: torch.device) -> PackedAttention:
    with _triton_installed():
        from kvtuner.runtime_loader.kernels.latents.triton_latents import TritonLatentAttention
    return TritonLatentAttention(device)


def _check_triton_latents(device: torch.device) -> None:
    with _triton_installed():
        from kvtuner.runtime_loader.kernels.latents.launch_latents import latent_launch
        from kvtuner.runtime_loader.kernels.launch_settings import Device
    latent_launch(Device.of(device).arch, WIDEST_PACKED_BITS)


@contextmanager
def _triton_installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ServingError(f"the kernels need Triton 3.6 or newer: {error}; install it") from error


def _triton_mover(layers: Layers, pages: HostPages, timed: Timed) -> PageMover:
    from kvtuner.runtime_loader.kernels.pages.page_mover import TritonMover

    return TritonMover(layers, pages, timed)


def _refuse_amd() -> None:
    if torch.version.hip:
        raise ServingError("the kernels were never tried on a GPU of AMD; serve without a profile")


def _native_attention(_: torch.device) -> PackedAttention:
    from kvtuner.runtime_loader.cpu.native_attention import NativeAttention

    return NativeAttention()


register_backend(
    AttentionBackend(
        cpu.BACKEND,
        ("cpu",),
        _native_attention,
        default_on=("cpu",),
        require=require_native_library,
    )
)
register_backend(
    AttentionBackend(
        "torch",
        ("cpu",),
        lambda _: TorchAttention(),
        default_on=("cpu",),
        make_of_latents=lambda _: LatentAttention(),
    )
)
register_backend(
    AttentionBackend(
        kernels.NAME,
        ("cuda", "cpu"),
        _triton_attention,
        default_on=("cuda",),
        require=_refuse_amd,
        make_mover=_triton_mover,
        make_of_latents=_triton_latents,
        check_latents=_check_triton_latents,
    )
)
