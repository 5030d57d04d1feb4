"""The kernels copy, hide and read an exact window as an oracle in float64 does, whatever happens to request slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from windowed_requests import WindowedPool, live

from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.exact_ring import ExactRings, NewTokens
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.row_format import LayerFormat

if TYPE_CHECKING:
    from fixture_types import MakeRowFormat

    from kvtuner.runtime_loader.packed_attention import PackedRows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Queries over rows and weights are rounded to fp16 once each, as in test_decode.py.
TOLERANCE = 1e-2


def pool(row_format: MakeRowFormat, window: ExactWindow, k_bits: int, v_bits: int, **options: object) -> WindowedPool:
    head_dim = options.pop("head_dim", 64)
    k = row_format(2, head_dim, k_bits, "centered+balanced+hadamard")
    v = row_format(2, head_dim, v_bits, "hadamard")
    attention = TritonAttention(torch.device("cpu"))
    return WindowedPool(attention, k, v, window, tolerance=TOLERANCE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("window", "widths", "cap", "head_dim"),
    [
        pytest.param(ExactWindow(5, 2), (2, 4), 0.0, 64, marks=pytest.mark.slow),
        pytest.param(ExactWindow(1), (4, 2), 5.0, 80, marks=pytest.mark.slow),
        pytest.param(ExactWindow(0, 3), (16, 2), 0.0, 64, marks=pytest.mark.full),
        pytest.param(ExactWindow(33, 1), (8, 16), 5.0, 64, marks=pytest.mark.full),
        pytest.param(ExactWindow(128), (2, 2), 0.0, 96, marks=pytest.mark.full),
    ],
)
def test_each_query_reads_its_window_from_its_own_copies_and_the_rest_from_rows(
    window: ExactWindow, widths: tuple[int, int], cap: float, head_dim: int, row_format: MakeRowFormat
) -> None:
    requests = pool(row_format, window, *widths, logit_cap=cap, head_dim=head_dim)
    live(requests)
    assert requests.num_compared == 150


@pytest.mark.parametrize("window", [ExactWindow(6, 2), pytest.param(ExactWindow(40), marks=pytest.mark.slow)], ids=str)
def test_by_cache_a_chunk_reads_itself_as_stored_but_for_the_window(
    window: ExactWindow, row_format: MakeRowFormat
) -> None:
    requests = pool(row_format, window, 2, 4)
    one, other = requests.begin(1), requests.begin(2)
    requests.extend((one, 21), (other, 3), padding=2, by_cache=True)
    requests.extend((other, 9), (one, 1), by_cache=True)
    requests.decode(one, other)
    hit = requests.begin(3, one.tokens[:20])
    requests.extend((hit, 34), (other, 2), by_cache=True)
    requests.decode(hit, other, one)
    assert requests.num_compared == 75


@pytest.mark.parametrize("window", [ExactWindow(4, 2), ExactWindow(0, 3), ExactWindow(37, 64), ExactWindow(1)], ids=str)
def test_copies_and_positions_are_those_of_torch(window: ExactWindow, row_format: MakeRowFormat) -> None:
    layer = LayerFormat(row_format(2, 48, 2), row_format(2, 80, 4))
    rings = [ExactRings([layer], window, 5, dtype=torch.float16, device="cpu")[0] for _ in range(2)]
    attention, generator = TritonAttention(torch.device("cpu")), torch.Generator().manual_seed(2)
    slots = torch.tensor([3, 1, 0, 4])
    past = torch.zeros(4, dtype=torch.int64)
    # Chunks of many lengths, none at all among them, and steps of one token; tokens of no request behind them.
    for lengths in ([7, 1, 0, 40], [1, 1, 1, 1], [0, 90, 2, 0], None, [3, 0, 65, 1], None, None):
        new = torch.ones(4, dtype=torch.int64) if lengths is None else torch.tensor(lengths)
        rows = torch.cat((torch.zeros(1, dtype=torch.int64), (past + (lengths is None)).cumsum(0))).int()
        tokens = None if lengths is None else torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0)))
        k, v = (torch.randn(int(new.sum()) + 3, 2, size, generator=generator).half() for size in (48, 80))
        for ring, store in zip(rings, (lambda *a: a[0].store(*a[1:]), attention.store_copies), strict=True):
            assert ring is not None
            store(ring, NewTokens(slots, rows, tokens), k, v)
        past += new
        first, second = rings
        assert first is not None and second is not None
        for name in ("positions", "keys", "values"):
            assert torch.equal(getattr(first, name), getattr(second, name)), (name, lengths)


def test_a_request_without_tokens_has_no_copy_and_reads_zeros(row_format: MakeRowFormat) -> None:
    requests = pool(row_format, ExactWindow(3, 1), 4, 4)
    one = requests.begin(1)
    requests.extend((one, 9))
    ring = requests.rings[0]
    assert ring is not None
    before = ring.positions.clone()
    new = NewTokens(torch.tensor([2, 1]), torch.tensor([0, 0, 9], dtype=torch.int32))
    k, v = torch.randn(2, 2, 64), torch.randn(2, 2, 64)
    requests.attention.store_copies(ring, new, k, v)
    assert torch.equal(ring.positions, before)


@pytest.mark.parametrize("bits", [4, 16])
def test_a_last_token_that_is_read_exactly_hides_its_row_past_the_end_too(bits: int, row_format: MakeRowFormat) -> None:
    requests = pool(row_format, ExactWindow(4), bits, 4)
    one = requests.begin(1)
    requests.extend((one, 20))
    requests.decode(one)
    # Blocks have 16 tokens: those past the end read the row of the last one, and their keys are no numbers.
    store = requests.attention.store

    def store_and_poison(keys: PackedRows, values: PackedRows, slots: torch.Tensor, *new: torch.Tensor) -> None:
        store(keys, values, slots, *new)
        keys.rows[slots] = torch.nan if keys.format.spec is None else 255

    requests.attention.store = store_and_poison  # type: ignore[method-assign]
    requests.decode(one)
    assert requests.num_compared == 22
