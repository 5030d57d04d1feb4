"""Read plans, against attention written out token by token in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvtuner.calibration.forward import read_plan
from kvtuner.calibration.forward.read_plan import AttentionCall, ReadPlan, attend, attend_by_plan, probabilities
from kvtuner.calibration.forward.seen_tokens import SelectedTokens
from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.read_plan_names import READ_PLANS

TOKENS, SPLIT = 13, 5
SHAPES = {"mha": (1, 3, 3, 8, 8), "gqa": (2, 6, 2, 8, 8), "mqa-wider-values": (1, 4, 1, 16, 24)}


def random_call(
    shape: tuple[int, int, int, int, int], softcap: float | None = None, dtype: torch.dtype = torch.float32
) -> AttentionCall:
    batch, heads, kv_heads, head_dim, v_head_dim = shape
    generator = torch.Generator().manual_seed(heads)

    def draw(num_heads: int, channels: int) -> Tensor:
        return torch.randn(batch, num_heads, TOKENS, channels, generator=generator).to(dtype)

    # Twice the usual scaling, so that a softcap of 2 bites.
    q, k, v = draw(heads, head_dim), draw(kv_heads, head_dim), draw(kv_heads, v_head_dim)
    return AttentionCall(q, k, v, 2 * head_dim**-0.5, softcap)


def other_readings(call: AttentionCall) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    k = call.k.float() + 0.3 * torch.randn(call.k.shape, generator=generator)
    return k, call.v.float() + 0.3 * torch.randn(call.v.shape, generator=generator)


def reads_quantized(plan: ReadPlan, query: int, key: int) -> bool:
    """The design's words, for one query and one key it sees."""
    if plan.name == "cache":
        return True
    if query < plan.split:
        return False
    return plan.name == "decode" or key < plan.split


def reads_copy(window: ExactWindow, query: int, key: int) -> bool:
    """The same of the exact window: the last R tokens with the query's own, and the first S."""
    return query - key < window.residual_length or key < window.sinks


def attention_by_loops(
    call: AttentionCall, plan: ReadPlan, k_read: Tensor, v_read: Tensor, window: ExactWindow = NO_WINDOW
) -> Tensor:
    q, k, v, k_read, v_read = (x.double() for x in (call.q, call.k, call.v, k_read, v_read))
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                scores, values = [], []
                seen = range(t + 1)
                if call.selected is not None:
                    seen = [j for j in call.selected.indices[b, t].tolist() if j <= t]
                for j in seen:
                    quantized = reads_quantized(plan, t, j) and not reads_copy(window, t, j)
                    key = (k_read if quantized else k)[b, h // group, j]
                    score = float(q[b, h, t] @ key) * call.scaling
                    if call.softcap is not None:
                        score = call.softcap * math.tanh(score / call.softcap)
                    scores.append(score)
                    values.append((v_read if quantized else v)[b, h // group, j])
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                out[b, h, t] = weights @ torch.stack(values)
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", READ_PLANS)
def test_every_plan_reads_what_the_design_says_token_by_token(name, shape, softcap) -> None:
    call = random_call(shape, softcap)
    k_read, v_read = other_readings(call)
    plan = ReadPlan(name, 0 if name == "cache" else SPLIT)
    expected = attention_by_loops(call, plan, k_read, v_read)
    torch.testing.assert_close(attend_by_plan(call, plan, k_read, v_read).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", READ_PLANS)
@pytest.mark.parametrize(
    "counts", [(1, 0), (3, 0), (0, 2), (4, 3), (TOKENS, 0), (TOKENS + 7, 3), (0, TOKENS + 2), (2, 6)]
)
@pytest.mark.parametrize("rows_at_a_time", [4, 128])
def test_tokens_of_a_window_are_read_exactly_and_all_others_as_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, name, shape, softcap, counts, rows_at_a_time
) -> None:
    monkeypatch.setattr(read_plan, "ROWS_AT_A_TIME", rows_at_a_time)
    call, window = random_call(shape, softcap), ExactWindow(*counts)
    k_read, v_read = other_readings(call)
    plan = ReadPlan(name, 0 if name == "cache" else SPLIT)
    expected = attention_by_loops(call, plan, k_read, v_read, window)
    read = attend_by_plan(call, plan, k_read, v_read, window)
    torch.testing.assert_close(read.double(), expected, rtol=1e-5, atol=1e-5)
    late = AttentionCall(call.q[:, :, SPLIT + 2 :], call.k, call.v, call.scaling, softcap)  # as after a kept prompt
    read = attend_by_plan(late, plan, k_read, v_read, window)
    torch.testing.assert_close(read.double(), expected[:, :, SPLIT + 2 :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", READ_PLANS)
@pytest.mark.parametrize("window", [NO_WINDOW, ExactWindow(3, 1)], ids=str)
@pytest.mark.parametrize("rows_at_a_time", [4, 128])
def test_a_query_reads_the_tokens_that_an_index_selects_and_no_other(
    monkeypatch: pytest.MonkeyPatch, name, shape, softcap, window, rows_at_a_time
) -> None:
    """Early queries select later tokens too, as there are fewer before them than an index gives."""
    monkeypatch.setattr(read_plan, "ROWS_AT_A_TIME", rows_at_a_time)
    call, generator = random_call(shape, softcap), torch.Generator().manual_seed(5)
    scores = torch.rand(shape[0], TOKENS, TOKENS, generator=generator).add_(torch.ones(TOKENS, TOKENS).tril())
    call = replace(call, selected=SelectedTokens.of(scores.topk(4).indices.int(), TOKENS))
    k_read, v_read = other_readings(call)
    plan = ReadPlan(name, 0 if name == "cache" else SPLIT)
    expected = attention_by_loops(call, plan, k_read, v_read, window)
    read = attend_by_plan(call, plan, k_read, v_read, window)
    torch.testing.assert_close(read.double(), expected, rtol=1e-5, atol=1e-5)
    weights = probabilities(call, call.grouped_query(), call.k, torch.arange(TOKENS))
    assert ((weights > 0).sum(-1) == torch.arange(1, TOKENS + 1).clamp(max=4)).all()
    assert SelectedTokens.of(scores.topk(TOKENS).indices, TOKENS) is None


def test_rows_of_tokens_that_a_window_holds_for_every_query_are_never_touched() -> None:
    call, window = random_call(SHAPES["gqa"]), ExactWindow(TOKENS - 3, 3)
    poison = torch.full_like(call.k, torch.nan), torch.full_like(call.v, torch.nan)
    for name in READ_PLANS:
        plan = ReadPlan(name, 0 if name == "cache" else SPLIT)
        exact = attention_by_loops(call, plan, call.k, call.v)
        read = attend_by_plan(call, plan, *poison, window)
        torch.testing.assert_close(read.double(), exact, rtol=1e-5, atol=1e-5)
        assert plan.mix(call.k, poison[0], window).isfinite().all()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("start", [0, 1, SPLIT, TOKENS - 1])
def test_attending_from_a_later_token_gives_the_last_rows_of_exact_attention(start, softcap) -> None:
    call = random_call(SHAPES["gqa"], softcap)
    expected = attention_by_loops(call, ReadPlan("decode", TOKENS), call.k, call.v)[:, :, start:]
    torch.testing.assert_close(attend(call, start=start).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["decode", "hit"])
def test_tokens_before_the_split_never_touch_the_quantized_readings(name) -> None:
    call = random_call(SHAPES["gqa"])
    poison = torch.full_like(call.k, torch.nan), torch.full_like(call.v, torch.nan)
    out = attend_by_plan(call, ReadPlan(name, SPLIT), *poison)
    torch.testing.assert_close(out[:, :, :SPLIT], attend(call)[:, :, :SPLIT], rtol=1e-6, atol=1e-6)
    assert out[:, :, SPLIT:].isnan().all()


def test_a_hit_never_touches_the_quantized_readings_of_the_fresh_chunk() -> None:
    call = random_call(SHAPES["gqa"])
    k_read, v_read = call.k.clone(), call.v.clone()
    k_read[:, :, SPLIT:] = torch.nan
    v_read[:, :, SPLIT:] = torch.nan
    out = attend_by_plan(call, ReadPlan("hit", SPLIT), k_read, v_read)
    torch.testing.assert_close(out, attend(call), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_no_token_sees_a_later_one(softcap) -> None:
    call = random_call(SHAPES["gqa"], softcap)
    k, v = call.k.clone(), call.v.clone()
    k[:, :, 9:], v[:, :, 9:] = 50.0, -50.0
    for start in (0, 4):
        changed, same = attend(call, k, v, start=start), attend(call, start=start)
        assert torch.equal(changed[:, :, : 9 - start], same[:, :, : 9 - start])
        assert not torch.isclose(changed[:, :, 9 - start :], same[:, :, 9 - start :]).all(-1).any()


def test_exact_readings_leave_attention_as_it_is_under_every_plan() -> None:
    call = random_call(SHAPES["gqa"])
    for name in READ_PLANS:
        plan = ReadPlan(name, 0 if name == "cache" else SPLIT)
        read = attend_by_plan(call, plan, call.k.float(), call.v.float())
        torch.testing.assert_close(read, attend(call), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_readings_beyond_fp16_are_its_largest_numbers(softcap) -> None:
    call = random_call(SHAPES["gqa"], softcap, torch.float16)
    plan = ReadPlan("cache", 0)
    v = call.v.float()
    v[..., 0], v[..., 1] = 70000.0, -70000.0
    out = attend_by_plan(call, plan, call.k.float(), v)
    torch.testing.assert_close(out, attend_by_plan(call, plan, call.k.float(), v.clamp(-65504, 65504)))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_outputs_have_the_dtype_of_the_queries(softcap) -> None:
    call = random_call(SHAPES["gqa"], softcap, torch.bfloat16)
    k_read, v_read = other_readings(call)
    plan = ReadPlan("decode", SPLIT)
    out = attend_by_plan(call, plan, k_read, v_read)
    assert out.dtype == torch.bfloat16
    expected = attention_by_loops(call, plan, k_read, v_read)
    # Readings are rounded to bfloat16 (2**-9) before they are used, as a served cache would.
    torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)


def test_probabilities_of_a_block_of_rows_are_rows_of_the_whole() -> None:
    call = random_call(SHAPES["gqa"])
    whole = probabilities(call, call.grouped_query(), call.k, torch.arange(call.k.shape[2]))
    for chosen in ([4, 5, 6], [0, 3, 6]):
        rows = torch.tensor(chosen)
        block = probabilities(call, call.grouped_query(rows), call.k[:, :, :7], rows)
        torch.testing.assert_close(block, whole[..., rows, :7], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(whole.sum(-1), torch.ones(whole.shape[:-1]))
    assert (whole.triu(1) == 0).all()


@pytest.mark.parametrize(("name", "split"), [("decode", 16), ("hit", 32), ("cache", 0)])
def test_the_tuner_splits_a_sequence_as_documented(name, split) -> None:
    assert ReadPlan.of(name, 64) == ReadPlan(name, split)


@pytest.mark.parametrize("name", READ_PLANS)
def test_mixing_keeps_only_a_hits_fresh_tokens_exact(name) -> None:
    exact, quantized = torch.zeros(1, 2, TOKENS, 4), torch.ones(1, 2, TOKENS, 4)
    mixed = ReadPlan(name, SPLIT).mix(exact, quantized)[0, 0, :, 0].tolist()
    assert mixed == [1.0] * (SPLIT if name == "hit" else TOKENS) + [0.0] * (TOKENS - SPLIT if name == "hit" else 0)
