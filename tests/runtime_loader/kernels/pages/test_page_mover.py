"""The kernels that move pages leave the bytes that plain torch leaves."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.runtime_loader.host_tier.pages import ORDERS, HostPages, Order, PageLayout
from kvtuner.runtime_loader.host_tier.stored_page import HEADER_BYTES
from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, TorchMover, token_bytes
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.pages import page_mover
from kvtuner.runtime_loader.kernels.pages.page_mover import TritonMover
from kvtuner.runtime_loader.kernels.storing.launch_store import STORED_TOKENS

if TYPE_CHECKING:
    from fixture_types import MakeRowFormat

# numpy's, of lanes that the kernels then throw away
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HEADS, DIM = 1, 80
"""The shape of rows that end in padding."""
BITS = ((4, 2), (16, 8), (2, 16))
KINDS = ("centered+balanced+hadamard", "none", "centered")
HOST_PAGES, DEVICE_PAGES = 5, 4
SPARE = 0xEE


def layers_of(row_format: MakeRowFormat, page_size: int, *, packed: bool) -> Any:
    generator = torch.Generator().manual_seed(7)

    def side(bits: int, kind: str, group_size: int | None) -> DeviceSide:
        form = row_format(HEADS, DIM, bits, kind, group_size)
        states = torch.randn(DEVICE_PAGES * page_size, HEADS, DIM, generator=generator).half()
        return DeviceSide(form.pack(states) if packed and bits < 16 else states, form, packed)

    return [(side(k, kind, 40), side(v, "none", None)) for (k, v), kind in zip(BITS, KINDS, strict=True)]


def pages_for(layers: Any, page_size: int, order: Order, header_bytes: int) -> HostPages:
    layout = PageLayout(page_size, token_bytes(layers), HOST_PAGES, order, header_bytes)
    return HostPages(layout, torch.full((layout.buffer_bytes,), SPARE, dtype=torch.uint8))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "quantized below"])
@pytest.mark.parametrize(("order", "header_bytes"), [*((order, 0) for order in ORDERS), ("page_first", HEADER_BYTES)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_move_as_in_torch(
    page_size: int, order: Order, header_bytes: int, packed: bool, row_format: MakeRowFormat
) -> None:
    by_torch, by_kernels = (layers_of(row_format, page_size, packed=packed) for _ in range(2))
    pages, other = (pages_for(by_torch, page_size, order, header_bytes) for _ in range(2))
    works: list[list[str]] = [[], []]

    def note(done: list[str]) -> Any:
        return lambda work: done.append(work) or nullcontext()

    movers = (TorchMover(by_torch, pages, note(works[0])), TritonMover(by_kernels, other, note(works[1])))

    def slots(chosen: list[int]) -> torch.Tensor:
        return torch.tensor([page * page_size + token for page in chosen for token in range(page_size)])

    for mover in movers:
        mover.backup(slots([3, 0, 4]), slots([1, 3, 2]))
    assert (pages.buffer != SPARE).any()
    assert torch.equal(pages.buffer, other.buffer)
    for mover in movers:
        for layer in (2, 0):
            mover.load(layer, slots([4, 3]), slots([0, 3]))
    for sides, expected in zip(by_kernels, by_torch, strict=True):
        for side, wanted in zip(sides, expected, strict=True):
            assert torch.equal(side.raw, wanted.raw)
    for done in works:
        assert set(done) == (set() if packed else {"quantize", "dequantize"})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels that a mover launches, each with its grid."""
    found: list[tuple[str, tuple[int, ...]]] = []

    class Noted:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            found.append((self.name, grid))
            return self.kernel[grid]

    for module, name in ((page_mover, "copy_pages"), (page_mover, "store_layers"), (launch, "read_joined")):
        monkeypatch.setattr(module, name, Noted(name, getattr(module, name)))
    return found


def test_a_few_programs_move_any_number_of_pages_by_one_launch(
    row_format: MakeRowFormat, launches: list[tuple[str, tuple[int, ...]]]
) -> None:
    layers = layers_of(row_format, 16, packed=True)
    mover = TritonMover(layers, pages_for(layers, 16, "page_first", 0))
    slots = torch.arange(4 * 16)
    mover.backup(slots, slots)
    mover.load(1, slots, slots)
    assert launches == [("copy_pages", (page_mover.COPY_PROGRAMS,))] * 2


def test_below_an_unquantized_pool_all_layers_of_a_format_are_one_launch_and_move_by_one(
    row_format: MakeRowFormat, launches: list[tuple[str, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page_size = 16
    by_torch, by_kernels = (5 * layers_of(row_format, page_size, packed=False) for _ in range(2))
    # Layers of one format with states and constants of their own.
    for layers in (by_torch, by_kernels):
        for index, (keys, values) in enumerate(layers):
            generator = torch.Generator().manual_seed(index)
            spec = keys.format.spec
            if spec is not None and spec.transform.mu is not None:
                transform = replace(spec.transform, mu=torch.randn(HEADS, DIM, generator=generator).half())
                keys = replace(keys, format=replace(keys.format, spec=replace(spec, transform=transform)))
            layers[index] = tuple(
                replace(side, buffer=torch.randn(side.buffer.shape, generator=generator).half())
                for side in (keys, values)
            )
    pages, other = (pages_for(by_torch, page_size, "page_first", 0) for _ in range(2))
    monkeypatch.setattr(page_mover, "STAGING_BYTES", 3 * page_size * pages.layout.token_bytes)  # two blocks
    movers = (TorchMover(by_torch, pages), TritonMover(by_kernels, other))
    device_slots, host_slots = torch.arange(4 * page_size).flip(0).view(4, -1).flip(1).flatten(), torch.arange(4 * 16)
    for mover in movers:
        mover.backup(host_slots, device_slots)
    assert torch.equal(pages.buffer, other.buffer)
    # Two lanes share a token where units of a head are no multiple of four, so that a program has twice the tokens.
    per_program = [2 * STORED_TOKENS if {2, 3} & {*pair} else STORED_TOKENS for pair in BITS]
    copying = ("copy_pages", (page_mover.COPY_PROGRAMS,))
    assert launches == [
        step
        for tokens in (48, 16)
        for step in (*[("store_layers", (tokens // stored, HEADS, 2 * 5)) for stored in per_program], copying)
    ]
    launches.clear()
    for mover in movers:
        for layer in range(len(by_torch)):
            mover.load(layer, host_slots, device_slots.roll(page_size))
    for sides, expected in zip(by_kernels, by_torch, strict=True):
        for side, wanted in zip(sides, expected, strict=True):
            assert torch.equal(side.raw, wanted.raw)
    assert len(launches) == 2 * len(by_torch)


def test_no_pages_are_no_launch(row_format: MakeRowFormat) -> None:
    layers = layers_of(row_format, 16, packed=True)
    pages = pages_for(layers, 16, "page_first", 0)
    nothing = torch.empty(0, dtype=torch.int64)
    TritonMover(layers, pages).backup(nothing, nothing)
    assert (pages.buffer == SPARE).all()
