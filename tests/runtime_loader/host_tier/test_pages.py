"""Pages of packed rows go down and come back byte by byte, by every layout and kind of device pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.errors import ServingError
from kvtuner.precision import row_bytes
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.host_tier.pages import ORDERS, HostPages, Order, PageLayout
from kvtuner.runtime_loader.host_tier.stored_page import HEADER_BYTES
from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, TorchMover, token_bytes
from kvtuner.runtime_loader.row_format import BLOCK_TOKENS, RowFormat
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HEADS, DIM = 2, 32
BITS = ((4, 3), (16, 8), (2, 16), (8, 4))
"""Keys' and values', by layer."""
HOST_PAGES, DEVICE_PAGES = 13, 9


def formats() -> list[tuple[RowFormat, RowFormat]]:
    generator = torch.Generator().manual_seed(0)

    def side(bits: int, *, keys: bool) -> RowFormat:
        if bits == 16:
            return RowFormat(HEADS, DIM, None)
        mu = (0.3 * torch.randn(HEADS, DIM, generator=generator)).half() if keys else None
        kind = TransformKind.parse("centered+hadamard" if keys else "hadamard")
        return RowFormat(HEADS, DIM, QuantSpec(bits, Transform(kind, mu)))

    return [(side(k, keys=True), side(v, keys=False)) for k, v in BITS]


def device_layers(page_size: int, *, packed: bool, dtype: torch.dtype, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    slots = DEVICE_PAGES * page_size

    def side(row_format: RowFormat) -> DeviceSide:
        states = torch.randn(slots, HEADS, DIM, generator=generator).to(dtype)
        if packed and row_format.spec is not None:
            return DeviceSide(row_format.pack(states), row_format, packed)
        return DeviceSide(states, row_format, packed)

    return [(side(k), side(v)) for k, v in formats()]


def host_pages(layers: Any, page_size: int, order: Order, header_bytes: int = 0) -> HostPages:
    layout = PageLayout(page_size, token_bytes(layers), HOST_PAGES, order, header_bytes)
    return HostPages(layout, torch.full((layout.buffer_bytes,), 0xEE, dtype=torch.uint8))


def slots_of(pages: list[int], page_size: int) -> Tensor:
    return torch.tensor([page * page_size + token for page in pages for token in range(page_size)])


def page_bytes(layers: Any, page: int, page_size: int) -> bytes:
    """The oracle: keys of all layers, then values, token by token, each as `quant.py` stores it."""
    found = b""
    for name in (0, 1):
        for sides in layers:
            for slot in range(page * page_size, (page + 1) * page_size):
                side = sides[name]
                token = side.buffer[slot : slot + 1]
                row = token if side.moves_as_it_is else side.format.pack(token)
                found += row.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def stored(pages: HostPages, page: int) -> bytes:
    out = torch.empty(pages.layout.page_bytes, dtype=torch.uint8)
    pages.get(page, out)
    return out.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_layout_takes_the_formulas_bytes_and_no_more(page_size: int, order: Order, dtype: torch.dtype) -> None:
    layers = device_layers(page_size, packed=True, dtype=dtype)
    layout = PageLayout(page_size, token_bytes(layers), HOST_PAGES, order)
    expected = sum(
        HEADS * DIM * dtype.itemsize if bits == 16 else row_bytes(HEADS, DIM, bits, None)
        for pair in BITS
        for bits in pair
    )
    assert layout.token_bytes == expected
    assert layout.buffer_bytes == HOST_PAGES * page_size * expected
    places = sorted(
        (layout.offset(layer, side) + page * layout.stride(layer, side), page_size * layout.row_bytes[layer][side])
        for layer in range(len(BITS))
        for side in (0, 1)
        for page in range(HOST_PAGES)
    )
    ends = [start + size for start, size in places]
    assert [start for start, _ in places] == [0, *ends[:-1]]  # side by side, and over nothing twice
    assert ends[-1] == layout.buffer_bytes


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "quantized below"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_stored_page_is_the_same_bytes_by_every_layout(page_size: int, order: Order, packed: bool) -> None:
    layers = device_layers(page_size, packed=packed, dtype=torch.float32)
    pages = host_pages(layers, page_size, order)
    mover = TorchMover(layers, pages)
    mover.backup(slots_of([7, 2], page_size), slots_of([3, 8], page_size))
    assert stored(pages, 7) == page_bytes(layers, 3, page_size)
    assert stored(pages, 2) == page_bytes(layers, 8, page_size)
    untouched = torch.empty(pages.layout.page_bytes, dtype=torch.uint8)
    pages.get(5, untouched)
    assert (untouched == 0xEE).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("page_size", "trips"), [(1, 5000), (16, 4000), (64, 1000)])
def test_ten_thousand_random_page_trips_against_a_byte_oracle(page_size: int, order: Order, trips: int) -> None:
    layers = device_layers(page_size, packed=True, dtype=torch.bfloat16)
    pages = host_pages(layers, page_size, order)
    mover = TorchMover(layers, pages)
    on_device = [page_bytes(layers, page, page_size) for page in range(DEVICE_PAGES)]
    on_host: dict[int, bytes] = {}
    out_of_process: dict[int, bytes] = {}
    num_trips = 0
    while num_trips < trips:
        kind, count = (int(number) for number in torch.randint(4, (2,), generator=_generator) + torch.tensor([0, 1]))
        if kind == 0 or not on_host:  # down
            hosts, devices = distinct(range(HOST_PAGES), count), distinct(range(DEVICE_PAGES), count)
            mover.backup(slots_of(hosts, page_size), slots_of(devices, page_size))
            on_host |= {host: on_device[device] for host, device in zip(hosts, devices, strict=True)}
            num_trips += count
        elif kind == 1:  # up
            hosts = distinct(sorted(on_host), count)
            devices = distinct(range(DEVICE_PAGES), len(hosts))
            for layer in range(len(layers)):
                mover.load(layer, slots_of(hosts, page_size), slots_of(devices, page_size))
            for host, device in zip(hosts, devices, strict=True):
                on_device[device] = on_host[host]
            num_trips += len(hosts)
        elif kind == 2:  # out of the process
            out_of_process |= {page: stored(pages, page) for page in distinct(sorted(on_host), count)}
        elif out_of_process:  # and back in, elsewhere
            (source,), (target,) = distinct(sorted(out_of_process), 1), distinct(range(HOST_PAGES), 1)
            pages.set(target, torch.frombuffer(bytearray(out_of_process[source]), dtype=torch.uint8))
            on_host[target] = out_of_process.pop(source)
            num_trips += 1
        if num_trips % 64 == 0:
            check(layers, pages, on_device, on_host, page_size)
    check(layers, pages, on_device, on_host, page_size)
    assert num_trips >= trips


_generator = torch.Generator().manual_seed(5)


def distinct(choices: Sequence[int], count: int) -> list[int]:
    order = torch.randperm(len(choices), generator=_generator)[:count]
    return [choices[int(index)] for index in order]


def check(layers: Any, pages: HostPages, on_device: list[bytes], on_host: dict[int, bytes], page_size: int) -> None:
    for page in range(DEVICE_PAGES):
        assert page_bytes(layers, page, page_size) == on_device[page], page
    for host, expected in on_host.items():
        assert stored(pages, host) == expected, host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back_to_an_unquantized_pool_differs_by_the_quantizer_alone(dtype: torch.dtype) -> None:
    page_size = 16
    layers = device_layers(page_size, packed=False, dtype=dtype)
    before = [[side.buffer.clone() for side in sides] for sides in layers]
    mover = TorchMover(layers, host_pages(layers, page_size, "page_first"))
    mover.backup(slots_of([4, 1, 9], page_size), slots_of([2, 0, 5], page_size))
    for layer in range(len(layers)):
        mover.load(layer, slots_of([4, 9], page_size), slots_of([7, 3], page_size))
    came, was = slots_of([7, 3], page_size), slots_of([2, 5], page_size)
    elsewhere = torch.ones(DEVICE_PAGES * page_size, dtype=torch.bool)
    elsewhere[came] = False
    for sides, old in zip(layers, before, strict=True):
        for side, states in zip(sides, old, strict=True):
            spec = side.format.spec
            expected = states[was] if spec is None else spec.simulate(states[was])
            assert torch.equal(side.buffer[came], expected.to(dtype))
            assert torch.equal(side.buffer[elsewhere], states[elsewhere])


def test_a_transfer_longer_than_a_block_is_one_transfer() -> None:
    page_size, num_pages = 16, 2 * BLOCK_TOKENS // 16 + 3
    row_format = formats()[0][0]
    states = torch.randn(num_pages * page_size, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    side = DeviceSide(states, row_format, packed=False)
    layout = PageLayout(page_size, token_bytes([(side, side)]), num_pages, "page_first")
    pages = HostPages(layout, torch.zeros(layout.buffer_bytes, dtype=torch.uint8))
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).tolist()
    TorchMover([(side, side)], pages).backup(slots_of(order, page_size), torch.arange(num_pages * page_size))
    found = pages.rows(0, 0)[order].reshape(-1, row_format.row_bytes(torch.float32))
    assert torch.equal(found, row_format.pack(states))


def test_a_header_lies_before_its_page_and_apart_from_it() -> None:
    layers = device_layers(16, packed=True, dtype=torch.bfloat16)
    pages = host_pages(layers, 16, "page_first", HEADER_BYTES)
    TorchMover(layers, pages).backup(slots_of([3], 16), slots_of([2], 16))
    record = pages.record(3)
    assert (record[:HEADER_BYTES] == 0xEE).all()
    assert record[HEADER_BYTES:].numpy().tobytes() == page_bytes(layers, 2, 16)
    keys = pages.layout.key_bytes
    assert keys == 16 * sum(sides[0].row_bytes for sides in layers)


def test_rows_that_cannot_be_aligned_are_refused_by_name() -> None:
    with pytest.raises(ServingError, match="layer 1 take 40 and 16 bytes"):
        PageLayout(1, ((16, 16), (40, 16)), 4, "page_first")
