"""Chunks attend by flash attention to what their rows hold: a stand-in computes what SGLang's function promises."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.attention import flash_attention as sglang_flash

from kvtuner.errors import ServingError
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.kernels import triton_attention
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.sglang.attention.flash_prefill import PREFILL_VARIABLE, FlashPrefill, chosen_prefill
from kvtuner.runtime_loader.sglang.compat.attention.flash import called_by_place, check_flash, flash_attention
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat
    from torch import Tensor

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

HEADS, GQA, DIM, SLOTS = 2, 3, 64, 60
SCALE = DIM**-0.5
REQUESTS = ((20, 5), (0, 7), (9, 1), (4, 0), (0, 0), (13, 3))
"""The tokens of prefixes and the new ones."""


def promised(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, *, shift: int = 0) -> Tensor:
    """Causal attention, aligned to the last key of each request; NaN for queries of none."""
    out = torch.full((len(q), q.shape[1], v.shape[2]), torch.nan, dtype=q.dtype)
    gqa = q.shape[1] // k.shape[1]
    for queries, keys in zip(*(list(itertools.pairwise(bounds.tolist())) for bounds in (cu_q, cu_k)), strict=True):
        of, k_of, v_of = q[slice(*queries)].double(), k[slice(*keys)].double(), v[slice(*keys)].double()
        products = torch.einsum("qhd,khd->hqk", of, k_of.repeat_interleave(gqa, 1)) * scale
        hidden = torch.ones(products.shape[1:], dtype=torch.bool).triu(1 + len(k_of) - len(of) + shift)
        weights = products.masked_fill(hidden, -torch.inf).softmax(-1)
        out[slice(*queries)] = torch.einsum("hqk,khd->qhd", weights, v_of.repeat_interleave(gqa, 1)).to(q.dtype)
    return out


class StandIn:
    """SGLang's function, called as it is, without its kernels; it notes the most tokens that it was told."""

    def __init__(self, *, writes_out: bool = True, shift: int = 0) -> None:
        self.writes_out, self.shift = writes_out, shift
        self.told: list[tuple[int, int]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        taken = inspect.signature(sglang_flash.flash_attn_varlen_func).bind(*args, **kwargs)
        taken.apply_defaults()
        given = taken.arguments
        assert given["causal"] is True and given["ver"] == 3 and given["window_size"] == (-1, -1)
        assert given["softcap"] == 0 and given["page_table"] is None and given["return_softmax_lse"] is False
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            assert given[name].dtype == torch.int32 and given[name].is_contiguous()
        self.told.append((given["max_seqlen_q"], given["max_seqlen_k"]))
        found = promised(
            given["q"], given["k"], given["v"], given["cu_seqlens_q"], given["cu_seqlens_k"], given["softmax_scale"],
            shift=self.shift,
        )  # fmt: skip
        out: Tensor = given["out"].copy_(found) if self.writes_out else found
        return out


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> TritonAttention:
    """The kernels, for which every prefix is worth reading back."""
    monkeypatch.setattr(triton_attention, "WORTH_READING", 0)
    return TritonAttention(torch.device("cpu"))


def batch() -> tuple[ExtendBounds, int]:
    past, new = (torch.tensor([0, *itertools.accumulate(each)]) for each in zip(*REQUESTS, strict=True))
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[: int(past[-1])]
    return ExtendBounds(new, past.int(), slots, 7), int(new[-1])


@pytest.mark.parametrize("writes_out", [True, False])
@pytest.mark.parametrize(("k_bits", "v_bits"), [(4, 2), (3, 16), (16, 8)])
def test_it_attends_as_extend_does(
    k_bits: int, v_bits: int, writes_out: bool, attention: TritonAttention, row_format: MakeRowFormat,
    poisoned: MakePoisoned,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    keys = poisoned(row_format(HEADS, DIM, k_bits, "centered+balanced+hadamard"), SLOTS)
    values = poisoned(row_format(HEADS, DIM, v_bits, "hadamard"), SLOTS)
    bounds, count = batch()
    for side in (keys, values):
        side.write(bounds.slots, torch.randn(len(bounds.slots), HEADS, DIM, generator=generator).half())
    padding = 2
    q = torch.randn(count + padding, HEADS * GQA, DIM, generator=generator).half()
    k, v = (torch.randn(count + padding, HEADS, DIM, generator=generator).half() for _ in range(2))
    flash = StandIn(writes_out=writes_out)
    prefill, out = FlashPrefill(called_by_place(flash), attention), torch.full_like(q, torch.nan)
    assert prefill.attend(q, k, v, keys, values, bounds, SCALE, out, longest=25)
    wanted = TorchAttention().extend(q, k, v, keys, values, bounds, ScoreScaling(SCALE))
    torch.testing.assert_close(out[:count], wanted[:count], atol=4e-3, rtol=4e-3)
    # Another layer has the same places; a forward that begins has its own.
    assert prefill.attend(q, k, v, keys, values, bounds, SCALE, out)
    prefill.begin()
    assert prefill.attend(q, k, v, keys, values, bounds, SCALE, out)
    assert flash.told == [(7, 25), (7, 25), (7, len(bounds.slots) + 7)]


def test_chunks_without_prefixes_are_read_where_they_are(
    attention: TritonAttention, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    stored = poisoned(row_format(HEADS, DIM, 4), SLOTS)
    tokens, nothing = torch.tensor([0, 3, 8]), torch.zeros(3, dtype=torch.int32)
    bounds = ExtendBounds(tokens, nothing, torch.empty(0, dtype=torch.int64), 5)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(8, HEADS * GQA, DIM, generator=generator).half()
    k, v = (torch.randn(8, HEADS, DIM, generator=generator).half() for _ in range(2))
    seen: list[Tensor] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, ends: Tensor, *_: Any) -> Tensor:
        seen.extend((k, v))
        return promised(q, k, v, queries, ends, SCALE)

    out = torch.empty_like(q)
    assert FlashPrefill(flash, attention).attend(q, k, v, stored, stored, bounds, SCALE, out)
    assert [states.data_ptr() for states in seen] == [k.data_ptr(), v.data_ptr()]
    torch.testing.assert_close(out, promised(q, k, v, tokens, tokens, SCALE))


def test_a_prefix_that_is_not_worth_reading_is_left_to_extend(
    row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    stored = poisoned(row_format(HEADS, DIM, 4), SLOTS)
    bounds, count = batch()
    q, k = torch.zeros(count, HEADS * GQA, DIM), torch.zeros(count, HEADS, DIM)
    prefill = FlashPrefill(called_by_place(StandIn()), TritonAttention(torch.device("cpu")))
    assert not prefill.attend(q, k, k, stored, stored, bounds, SCALE, torch.empty_like(q))


@pytest.mark.parametrize("shift", [0, 1])
def test_the_self_test_finds_a_mask_that_is_aligned_otherwise(
    shift: int, attention: TritonAttention, row_format: MakeRowFormat
) -> None:
    def empty(bits: int, kind: str) -> PackedRows:
        form = row_format(HEADS, DIM, bits, kind)
        return PackedRows(torch.zeros(SLOTS, form.row_bytes(torch.float16), dtype=torch.uint8), form)

    layers = [(empty(bits, "centered+hadamard"), empty(bits, "hadamard")) for bits in (4, 2)]
    prefill = FlashPrefill(called_by_place(StandIn(shift=shift)), attention)
    if shift:
        with pytest.raises(ServingError, match=f"{PREFILL_VARIABLE}=triton"):
            prefill.check(layers, HEADS * GQA, torch.float16)
    else:
        prefill.check(layers, HEADS * GQA, torch.float16)
        assert not any(side.rows.any() for layer in layers for side in layer)


@pytest.mark.parametrize("group", [16, 64])
def test_the_self_test_stores_keys_per_channel_by_whole_groups(group: int, attention: TritonAttention) -> None:
    def empty(spec: QuantSpec) -> PackedRows:
        return PackedRows.zeros(RowFormat(HEADS, DIM, spec), 128, torch.float16, "cpu")

    keys, values = empty(QuantSpec(4, token_group=group)), empty(QuantSpec(2))
    FlashPrefill(called_by_place(StandIn()), attention).check([(keys, values)], HEADS * GQA, torch.float16)
    with pytest.raises(ServingError, match=f"{PREFILL_VARIABLE}=triton"):
        FlashPrefill(called_by_place(StandIn(shift=1)), attention).check([(keys, values)], HEADS * GQA, torch.float16)


def test_it_is_taken_on_hopper_alone_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    check_flash()
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert flash_attention(cpu, torch.bfloat16, {128})[0] is None
    for capability, dtype, head_dims, why in (
        ((10, 0), torch.bfloat16, {128}, "compute capability 9.0 alone"),
        ((9, 0), torch.float32, {128}, "does not take torch.float32"),
        ((9, 0), torch.bfloat16, {128, 64}, r"heads of \[64, 128\] channels"),
        ((9, 0), torch.bfloat16, {100}, "channels"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        function, reason = flash_attention(cuda, dtype, head_dims)
        assert function is None
        assert re.search(why, reason), reason


def test_the_variable_chooses_and_refuses_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_prefill() is None
    monkeypatch.setenv(PREFILL_VARIABLE, "triton")
    assert chosen_prefill() == "triton"
    monkeypatch.setenv(PREFILL_VARIABLE, "fa3")
    with pytest.raises(ServingError, match="must be flash or triton, not 'fa3'"):
        chosen_prefill()
