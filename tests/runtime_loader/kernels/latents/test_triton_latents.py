"""Kernels store, copy, read back and attend to latents as torch and an oracle in float64 do."""

from __future__ import annotations

import pytest
import torch
from windowed_requests import WindowedPool, live

from kvtuner.errors import PrecisionError, ServingError
from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.cpu.latent_attention import LatentAttention
from kvtuner.runtime_loader.kernels.latents.triton_latents import TritonLatentAttention
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
# Queries over rows and weights are rounded to fp16 once each, as in test_decode.py.
TOLERANCE = 1e-2


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec_of(bits: int, rank: int, **more: object) -> QuantSpec | None:
    mu, lam = random(1, rank, seed=3).half(), (0.4 * random(1, rank, seed=4)).exp().half()
    transform = Transform(TransformKind.parse("centered+balanced+hadamard"), mu, lam)
    return None if bits == 16 else QuantSpec(bits, transform, **more)


@pytest.mark.parametrize(
    ("window", "bits", "rank", "cap"),
    [
        (NO_WINDOW, 4, 64, 0.0),
        (ExactWindow(5, 2), 3, 64, 0.0),
        pytest.param(ExactWindow(1), 2, 80, 5.0, marks=pytest.mark.slow),
        pytest.param(ExactWindow(33, 1), 16, 48, 0.0, marks=pytest.mark.full),
        pytest.param(NO_WINDOW, 8, 96, 5.0, marks=pytest.mark.full),
    ],
)
def test_chunks_and_single_tokens_of_requests_that_come_and_go(
    window: ExactWindow, bits: int, rank: int, cap: float
) -> None:
    latents = RowFormat(1, rank, spec_of(bits, rank, group_size=rank // 2))
    attention = TritonLatentAttention(CPU)
    requests = WindowedPool(
        attention, latents, RowFormat(1, 10, None), window, gqa=5, logit_cap=cap, tolerance=TOLERANCE, is_latent=True
    )
    live(requests)
    assert requests.num_compared == 150


def test_by_cache_a_chunk_reads_itself_as_stored_but_for_the_window() -> None:
    latents = RowFormat(1, 64, spec_of(2, 64))
    requests = WindowedPool(
        TritonLatentAttention(CPU), latents, RowFormat(1, 16, None), ExactWindow(6, 2), gqa=3, tolerance=TOLERANCE,
        is_latent=True,
    )  # fmt: skip
    one, other = requests.begin(1), requests.begin(2)
    requests.extend((one, 21), (other, 3), padding=2, by_cache=True)
    requests.extend((other, 9), (one, 1), by_cache=True)
    requests.decode(one, other)
    assert requests.num_compared == 36


@pytest.mark.parametrize(
    ("rank", "rope", "bits", "more"),
    [
        (512, 64, 4, {"group_size": 128}),
        (512, 64, 2, {"fit": "least_squares", "word_bits": 16, "group_size": 64}),
        pytest.param(512, 64, 3, {"fit": "least_squares", "group_size": 128}, marks=pytest.mark.slow),
        pytest.param(512, 64, 8, {"symmetric": True}, marks=pytest.mark.slow),
        (320, 20, 4, {"group_size": 80}),
        (96, 10, 3, {}),
        (64, 16, 16, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_are_those_of_torch_and_are_read_back_as_by_torch(
    rank: int, rope: int, bits: int, more: dict[str, object], dtype: torch.dtype
) -> None:
    spec, slots, num_tokens = spec_of(bits, rank, **more), torch.tensor([9, 0, 5, 3, 2]), 5
    layers = []
    for attention in (TritonLatentAttention(CPU), LatentAttention()):
        latents = PackedRows.zeros(RowFormat(1, rank, spec), 11, dtype, "cpu")
        rotary = PackedRows.zeros(RowFormat(1, rope, None), 11, dtype, "cpu")
        states = [(2 * random(num_tokens, 1, channels, seed=channels) + 1).to(dtype) for channels in (rank, rope)]
        states[0][3, 0, rank // 2] = torch.nan if spec is not None else 0
        attention.store(latents, rotary, slots, *states)
        layers.append((latents, rotary))
    for mine, right in zip(*layers, strict=True):
        assert torch.equal(mine.rows.view(torch.uint8), right.rows.view(torch.uint8))
        found = TritonLatentAttention(CPU).read(mine, slots, dtype)
        expected = right.read(slots, dtype)
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_prefix_is_read_back_as_the_hosts_kernel_takes_it() -> None:
    latents, rotary = RowFormat(1, 96, spec_of(4, 96)), RowFormat(1, 10, None)
    keys, values = (PackedRows.zeros(each, 60, torch.float32, "cpu") for each in (latents, rotary))
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:50]
    keys.write(slots, random(50, 1, 96, seed=1))
    values.write(slots, random(50, 1, 10, seed=2))
    q, attention = torch.zeros(3, 16, 106), TritonLatentAttention(CPU)

    def read(longest: int, end: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        bounds = ExtendBounds(torch.tensor([0, longest]), torch.tensor([0, end], dtype=torch.int32), slots, longest)
        return attention.read_prefix(q, keys, values, bounds)

    assert read(31, 50) is None  # few queries read packed rows themselves
    for end in (50, 20):
        found = read(32, end)
        assert found is not None
        wanted = torch.cat([stored.read(slots[:end], torch.float32) for stored in (keys, values)], dim=-1)
        assert torch.equal(found[0][:end], wanted)
        assert torch.equal(found[1][:end], wanted[..., :96])


def test_latents_that_kernels_do_not_take_are_refused_by_name() -> None:
    attention = TritonLatentAttention(CPU)
    wide, latents, rotary, none = (
        PackedRows(torch.zeros(4, 1, size), RowFormat(1, size, None)) for size in (520, 64, 16, 0)
    )
    with pytest.raises(ServingError, match="read latents of at most 512 channels, not 520; serve without a profile"):
        attention.prepare([(wide, rotary)], 4, 1)
    with pytest.raises(PrecisionError, match=r"the kernels take latents \(MLA\) with rotary channels"):
        attention.prepare([(latents, none)], 4, 1)


@pytest.mark.parametrize(("arch", "is_dependent"), [("sm_80", False), ("sm_89", False), ("sm_90", True)])
def test_launches_begin_while_the_kernel_before_ends_where_a_gpu_can(
    arch: str, is_dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "of", lambda _: Device(arch, 132))
    attention = TritonLatentAttention(torch.device("meta"))
    latents, rotary = (
        PackedRows(torch.zeros(4, 1, size, device="meta"), RowFormat(1, size, None)) for size in (64, 16)
    )
    assert attention.settings(attention.sides(latents, rotary), 16).dependent is is_dependent
