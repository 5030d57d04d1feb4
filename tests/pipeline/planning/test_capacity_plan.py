"""What a plan says fits, does: by the bytes of whole configurations, and no larger budget would."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.errors import BudgetError, GeometryError, ServingError, UnsupportedModelError
from kvtuner.evaluation.cache_scheme import RankLayout
from kvtuner.pipeline.planning.capacity_plan import CapacityPlan, make_plan
from kvtuner.pipeline.planning.gpus import find_gpu
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.pipeline.planning.plan_text import assumptions, search_sentences
from kvtuner.pipeline.planning.search_cost import SearchCost
from kvtuner.pipeline.planning.server_memory import ServerMemory
from kvtuner.precision import GIB, ExactWindow, PrecisionPair
from kvtuner.runtime_loader.workspaces import DECODED_PARTS, AttentionShape, attention_bytes
from kvtuner.search_spaces.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    HubModel = Callable[..., Path]

LLAMA_BYTES = 16_060_522_496


def plan_of(folder: Path, **options: Any) -> CapacityPlan:
    return make_plan(PlanOptions(model=str(folder), **options))


def requests_of(plan: CapacityPlan, name: str) -> int:
    return next(row.requests for row in plan.schemes if row.name == name)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (8, 1), (16, 1), (1, 3), (4, 2)])
def test_bytes_are_those_of_the_fullest_rank_and_tokens_fill_the_memory(
    hub_model: HubModel, tp_size: int, pp_size: int
) -> None:
    folder = hub_model("llama")
    plan = plan_of(folder, gpu="H100", tp_size=tp_size, pp_size=pp_size, context_length=32_768, concurrency=40)
    geometry = read_shape(ModelSource(str(folder))).geometry
    ranks = RankLayout.of(geometry, tp_size=tp_size, pp_size=pp_size)
    copies = ranks.window_bytes([PrecisionPair(2, 2)] * 32, ExactWindow(32))
    heads = max(1, 32 // tp_size), max(1, 8 // tp_size)
    workspace = attention_bytes(AttentionShape(*heads, 128, 128, DECODED_PARTS, 8192, 40, 32_768, window_tokens=32))
    assert plan.server.rank_weights_bytes == -(-LLAMA_BYTES // (tp_size * pp_size))
    for row in plan.schemes:
        if row.kind == "uniform":
            assert row.bytes_per_token == ranks.bytes_per_token([PrecisionPair.parse(row.name)] * 32)
        slots = 41 * copies if row.kind in ("uniform", "budget") else 0
        # Attention of SGLang itself works in what SGLang keeps.
        works_in = 0 if row.name in ("bf16", "fp8") else workspace
        assert row.workspace_bytes == works_in
        assert row.tokens == (plan.server.pool_bytes - works_in - slots) // row.bytes_per_token
        assert row.requests == row.tokens // 32_768
    assert plan.schemes[0].bytes_per_token == ranks.bf16_bytes_per_token() == 2 * plan.schemes[1].bytes_per_token


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("concurrency", [30, 64, 100])
@pytest.mark.parametrize("residual_length", [0, 32, 256])
def test_the_largest_budget_is_the_largest_with_which_all_requests_fit(
    hub_model: HubModel, tp_size: int, pp_size: int, concurrency: int, residual_length: int
) -> None:
    context = 32_768
    folder, num_ranks = hub_model("llama"), tp_size * pp_size
    server = ServerMemory(183_359, 0, context, tp_size, pp_size, concurrency)
    # The weights leave a bit more than a third of what bf16 takes.
    room = concurrency * context * 131_072 * 9 // 25 // num_ranks
    options: dict[str, Any] = {
        "gpu": "B200", "weights": (server.pool_bytes - room) * num_ranks, "tp_size": tp_size, "pp_size": pp_size,
        "concurrency": concurrency, "context_length": context, "residual_length": residual_length,
    }  # fmt: skip
    plan = plan_of(folder, **options)
    assert plan.advice.choice == "search" and plan.server.pool_bytes == room
    room -= plan.schemes[-1].workspace_bytes
    (text,) = plan.advice.budgets
    budget = Budget.parse(text)
    assert text.endswith(f"GiB@{concurrency}x32k")
    assert requests_of(plan_of(folder, **options, budget=(text,)), budget.text) >= concurrency
    larger = f"{float(budget.amount) + 0.01:.2f}GiB@{concurrency}x32k"
    # A larger budget's rows and the copies of all slots are more than the memory.
    window = ExactWindow(residual_length)
    ranks = RankLayout.of(plan.shape.geometry, tp_size=tp_size, pp_size=pp_size)
    slot = ranks.window_bytes([PrecisionPair(2, 2)] * 32, window)
    assert float(larger.partition("GiB")[0]) * GIB + slot > room
    # Stored bits are another word for the same rows.
    bits = f"{plan.advice.effective_bits:.2f}bpe"
    assert requests_of(plan_of(folder, **options, budget=(bits,)), Budget.parse(bits).text) >= concurrency
    # Whatever a search may choose inside the budget fits with one slot more than requests.
    constraint = budget.constraint(plan.shape.geometry, tp_size=tp_size, pp_size=pp_size, window=window)
    mixes = [[first] * 20 + [second] * 12 for first, second in product(map(PrecisionPair.parse, UNIFORMS), repeat=2)]
    inside = [mix for mix in mixes if constraint.is_met(mix)]
    assert 0 < len(inside) < len(mixes)
    for mix in inside:
        rows = ranks.bytes_per_token(mix) * context * concurrency
        assert rows + (concurrency + 1) * ranks.window_bytes(mix, window) <= room


UNIFORMS = ("2", "K4V2", "4", "K8V4", "8", "16")


@pytest.mark.parametrize(("name", "share", "full", "windows"), [("gpt-oss", 0.8, 12, 12), ("gemma3", 1, 4, 22)])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_layers_with_a_window_take_what_sglang_keeps_of_them(
    hub_model: HubModel, name: str, share: float, full: int, windows: int, tp_size: int
) -> None:
    """SGLang keeps four fifths of the tokens in windows' own part, and all where they share the full layers' pool."""
    folder, context, concurrency = hub_model(name), 32_768, 150
    options: dict[str, Any] = {"gpu": "H100", "context_length": context, "concurrency": concurrency, "tp_size": tp_size}
    plan = plan_of(folder, **options, weights=40 * GIB * tp_size)
    config = plan.shape.config
    of_layer = 2 * 2 * config.num_key_value_heads // tp_size * config.head_dim
    ranks = RankLayout.of(plan.shape.geometry, tp_size=tp_size)
    copies = ranks.window_bytes([PrecisionPair(2, 2)] * full, ExactWindow(32))
    for row in plan.schemes:
        native = share * windows * of_layer / (2 if row.kind == "fp8" else 1)
        assert row.window_bytes_per_token == pytest.approx(native)
        if row.kind == "bf16":
            assert row.bytes_per_token == full * of_layer
        slots = (concurrency + 1) * copies if row.kind in ("uniform", "budget") else 0
        room = plan.server.pool_bytes - row.workspace_bytes - slots
        assert row.tokens == int(room // (row.bytes_per_token + native))
    text = " ".join(assumptions(plan))
    assert ("0.8 of the tokens (--swa-full-tokens-ratio)" if share < 1 else "SGLang keeps all tokens") in text


def test_the_largest_budget_leaves_room_for_what_sglang_keeps_of_windows(hub_model: HubModel) -> None:
    context, concurrency, of_layer = 32_768, 40, 2 * 2 * 8 * 64
    layers = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 20}
    options: dict[str, Any] = {"gpu": "H100", "context_length": context, "concurrency": concurrency}
    server = ServerMemory(81_559, 0, context, max_running_requests=concurrency)
    kept, windows = 0.8 * 4 * of_layer, 4 * 128 * of_layer
    # Full layers have a third of what they take in bf16, beside what is kept of windows.
    room = int(concurrency * context * (20 * of_layer / 3 + kept))
    options["weights"] = server.pool_bytes - room
    plan = plan_of(hub_model("gpt-oss", **layers), **options)
    assert plan.advice.choice == "search" and plan.server.pool_bytes == room
    (text,) = plan.advice.budgets
    rows = float(text.partition("GiB")[0]) * GIB - concurrency * windows
    room -= plan.schemes[-1].workspace_bytes
    beside = concurrency * context * kept
    assert rows + beside <= room < rows + beside + GIB / 100 + plan.schemes[-1].copies_bytes_per_request
    found = plan_of(hub_model("gpt-oss", **layers), **options, budget=(text,))
    assert requests_of(found, Budget.parse(text).text) >= concurrency


@pytest.mark.parametrize("tp_size", [8, 16])
def test_every_rank_holds_whole_latents_and_the_rotary_channels_beside_them(hub_model: HubModel, tp_size: int) -> None:
    """A token of DeepSeek V3 has 512 channels of a latent and 64 rotary ones in each of 61 layers."""
    options: dict[str, Any] = {"gpu": "H200", "context_length": 32_768, "tp_size": tp_size, "concurrency": 600}
    plan = plan_of(hub_model("deepseek-v3"), **options)
    of_layer = {row.name: row.bytes_per_token / 61 for row in plan.schemes}
    words = 16  # a group of 512 channels has 4 bytes, and rows are padded to 16
    assert of_layer["bf16"] == 2 * (512 + 64)
    assert of_layer["fp8"] == 512 + 64
    for bits in (2, 3, 4, 8):
        assert of_layer[f"K{bits}V{bits}"] == 512 * bits // 8 + words + 2 * 64
    copies = 61 * 32 * (2 * (512 + 64) + 4)  # of a request's last 32 tokens, and where each is
    for row in plan.schemes:
        is_packed = row.kind in ("uniform", "budget")
        assert (row.workspace_bytes > 512 << 20) == is_packed
        beside = 601 * copies + row.workspace_bytes if is_packed else 0
        assert row.tokens == (plan.server.pool_bytes - beside) // row.bytes_per_token, row
    assert {row.name for row in plan.schemes if row.kind == "uniform"} == {f"K{bits}V{bits}" for bits in (2, 3, 4, 8)}
    assert "every tensor-parallel rank holds whole latents" in " ".join(assumptions(plan))
    with pytest.raises(ServingError, match="plan with --pp-size 1"):
        plan_of(hub_model("deepseek-v3"), **options, pp_size=2)


def test_keys_of_indexes_are_counted_beside_latents_as_sglang_keeps_them(hub_model: HubModel) -> None:
    """A key of DeepSeek V3.2's index has 128 channels of fp8 and a scale of 4 bytes, in each of 61 layers."""
    options: dict[str, Any] = {"gpu": "H200", "context_length": 32_768, "tp_size": 8, "concurrency": 600}
    plan, without = (plan_of(hub_model(name), **options) for name in ("deepseek-v32", "deepseek-v3"))
    copies = 61 * 32 * (2 * (512 + 64) + 4)
    both = ([row for row in each.schemes if row.kind in ("bf16", "uniform")] for each in (plan, without))
    for row, other in zip(*both, strict=True):
        assert row.bytes_per_token == other.bytes_per_token
    # Beside an index a latent of 512 channels has four scales in fp8, and 64 rotary channels keep 16 bits.
    assert plan.schemes[1].bytes_per_token == 61 * (512 + 16 + 128) and plan.schemes[1].kind == "fp8"
    for row in plan.schemes:
        beside = 601 * copies + row.workspace_bytes if row.kind in ("uniform", "budget") else 0
        assert row.tokens == (plan.server.pool_bytes - beside) // (row.bytes_per_token + 61 * (128 + 4)), row
        assert row.index_bytes_per_token == 61 * (128 + 4)
    assert {row.index_bytes_per_token for row in without.schemes} == {0}
    assert {row["index_bytes_per_token"] for row in plan.to_json()["schemes"]} == {61 * (128 + 4)}
    text = " ".join(assumptions(plan))
    assert "take 8,052 bytes more of each token as SGLang keeps them, in fp8" in text
    assert "pages of 64 tokens" in text
    assert "beside an index SGLang's plugin serves latents on an H100 or H200 alone" in text
    assert "index" not in " ".join(assumptions(without)) and "pages of one token" in " ".join(assumptions(without))


def test_an_index_that_sglang_has_not_is_not_said_to_be_kept_by_it(model_folder: Callable[..., Path]) -> None:
    text = " ".join(assumptions(plan_of(model_folder("axk2"), gpu="H200")))
    assert "bytes more of each token in fp8;" in text and "as SGLang keeps" not in text
    assert "SGLang does not know the index of this model; KVTunerCache runs it" in text
    assert "H100" not in text


def test_the_largest_budget_holds_keys_of_indexes_as_the_server_keeps_them(hub_model: HubModel) -> None:
    """The budget is the memory that the server has, to a hundredth of a GiB: both count the same bytes beside rows."""
    context, concurrency = 32_768, 40
    options: dict[str, Any] = {"gpu": "H200", "context_length": context, "concurrency": concurrency, "tp_size": 8}
    server = ServerMemory(find_gpu("H200").memory_mib, 0, context, tp_size=8, max_running_requests=concurrency)
    # Latents have a third of what they take in bf16, beside keys of indexes.
    room = concurrency * context * 61 * (2 * (512 + 64) // 3 + 128 + 4)
    options["weights"] = 8 * (server.pool_bytes - room)
    plan = plan_of(hub_model("deepseek-v32"), **options)
    assert plan.advice.choice == "search" and plan.server.pool_bytes == room
    (text,) = plan.advice.budgets
    budget = float(text.partition("GiB")[0]) * GIB
    room -= plan.schemes[-1].workspace_bytes
    assert budget <= room < budget + GIB / 100 + plan.schemes[-1].copies_bytes_per_request
    found = plan_of(hub_model("deepseek-v32"), **options, budget=(text,))
    assert requests_of(found, Budget.parse(text).text) >= concurrency


@pytest.mark.parametrize(("concurrency", "residual_length"), [(None, 0), (20, 32), (700, 32)])
def test_states_are_taken_from_the_cache_before_tokens(
    hub_model: HubModel, concurrency: int | None, residual_length: int
) -> None:
    options = {"gpu": "H100", "weights": 40 * GIB, "context_length": 8192, "residual_length": residual_length}
    plan = plan_of(hub_model("qwen3-next"), **options, concurrency=concurrency)
    # 16 key heads, 32 value heads of 128 x 128 in float32, and three inputs of a convolution in bfloat16.
    state = 36 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128))
    pool = plan.server.pool_bytes
    assert plan.server.num_states == int((pool * 0.9 / 1.9 - state) // state)
    room, most = pool - (plan.server.num_states + 1) * state, plan.server.num_states // 5
    assert 20 < most < 60
    bf16 = plan.schemes[0]
    assert bf16.bytes_per_token == 12 * 2 * 2 * 2 * 256  # of the layers with keys alone
    assert bf16.tokens == room // bf16.bytes_per_token
    for row in plan.schemes:
        slots = (min(concurrency or 10**6, most) + 1) * row.copies_bytes_per_request
        assert row.tokens == (room - row.workspace_bytes - slots) // row.bytes_per_token
        assert row.requests == min(row.tokens // 8192, most)
    assert (plan.advice.choice == "none") == (concurrency is not None and concurrency > most)
    assert f"so that {most} may run" in " ".join(assumptions(plan))
    with pytest.raises(ServingError, match="plan with --pp-size 1"):
        plan_of(hub_model("qwen3-next"), **options, pp_size=2)


def test_states_beside_keys_in_every_layer_are_counted_too(model_folder: Callable[..., Path]) -> None:
    plan = plan_of(model_folder("falcon-h1"), gpu="H100")
    assert plan.server.states is not None and plan.server.states_bytes > plan.server.pool_bytes // 3


def test_states_for_which_sglang_has_no_pool_are_not_planned(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(ServingError, match="SGLang has no pool for the states of OlmoHybridForCausalLM"):
        plan_of(model_folder("olmo-hybrid"), gpu="H100")


def test_ranks_that_states_cannot_be_split_over_are_refused(hub_model: HubModel) -> None:
    with pytest.raises(GeometryError, match="states of 24 heads or channels cannot be split among 16 ranks"):
        plan_of(hub_model("qwen3-next", linear_num_value_heads=24), gpu="H100", weights=40 * GIB, tp_size=16)


def test_the_cheapest_scheme_is_bf16_then_fp8_then_a_search_then_none(hub_model: HubModel) -> None:
    folder = hub_model("qwen")
    advised = {}
    for concurrency in range(1, 300, 7):
        plan = plan_of(folder, gpu="H100", context_length=32_768, concurrency=concurrency)
        advised[concurrency] = plan.advice.choice
        assert (plan.advice.choice == "bf16") == (requests_of(plan, "bf16") >= concurrency)
        assert (plan.advice.choice in ("bf16", "fp8")) == (requests_of(plan, "fp8") >= concurrency)
        assert (plan.advice.choice != "none") == (requests_of(plan, "K2V2") >= concurrency)
        assert (plan.search_command is not None) == (plan.advice.choice == "search")
    assert list(dict.fromkeys(advised.values())) == ["bf16", "fp8", "search", "none"]


def test_where_nothing_fits_the_least_ranks_that_would_are_named(hub_model: HubModel) -> None:
    folder = hub_model("qwen")
    plan = plan_of(folder, gpu="L4", concurrency=32)
    assert plan.advice.choice == "none" and plan.advice.tp_size == 2 and plan.search is None
    assert requests_of(plan_of(folder, gpu="L4", concurrency=32, tp_size=2), "K2V2") >= 32
    # 28 heads and 4 KV heads: neither 3 nor 5 ranks.
    assert plan_of(folder, gpu="L4", concurrency=120).advice.tp_size == 4
    assert plan_of(folder, gpu="L4", concurrency=10**6).advice.tp_size is None


def test_without_a_number_of_requests_the_search_is_of_the_budgets_that_hold_one(hub_model: HubModel) -> None:
    folder = hub_model("qwen")
    plan = plan_of(folder, gpu="L4", memory=22 * GIB + GIB // 2)
    assert [row.name for row in plan.schemes if row.kind == "budget" and row.requests] == list(plan.advice.budgets)
    assert 0 < len(plan.advice.budgets) < 4 and plan.advice.choice in ("search", "fp8")
    none = plan_of(folder, gpu="L4", memory=22 * GIB + GIB // 2, budget=("15bit",))
    assert none.advice.choice == plan.advice.choice
    one = plan_of(folder, memory=22 * GIB + GIB // 8, budget=("8bit",))
    assert one.advice.choice == "search" and one.advice.budgets[0].endswith("@1x32k")
    assert one.server_flags.endswith("--max-running-requests 1")


def test_weights_that_do_not_fit_name_the_ranks_that_hold_them(hub_model: HubModel) -> None:
    folder = hub_model("llama")
    with pytest.raises(ServingError, match=r"does not fit: each rank's weights take 15\.0 GiB, .* take --tp-size 2"):
        plan_of(folder, gpu="T4")
    plan_of(folder, gpu="T4", tp_size=2)
    with pytest.raises(ServingError, match=r"leaves 0\.0 MiB of a GPU of 2\.0 GiB .* take a GPU with more memory$"):
        plan_of(folder, memory=2 * GIB)
    with pytest.raises(ServingError, match="take a GPU with more memory, or more --pp-size"):
        plan_of(folder, memory=7 * GIB, weights=500 * GIB)


def test_copies_that_take_most_of_the_memory_leave_no_tokens(hub_model: HubModel) -> None:
    plan = plan_of(hub_model("llama"), gpu="L4", concurrency=400, residual_length=1024, context_length=4096)
    assert plan.has_refused_copies and plan.advice.choice == "none"
    assert {row.tokens for row in plan.schemes if row.kind in ("uniform", "budget")} == {0}


def test_of_stages_without_tokens_one_of_the_most_layers_is_told_of(hub_model: HubModel) -> None:
    options = {"concurrency": 400, "residual_length": 1024, "context_length": 4096, "pp_size": 3}
    row = next(row for row in plan_of(hub_model("llama"), gpu="L4", **options).schemes if row.name == "K4V4")
    # 8 heads of 128 channels: 512 bytes of codes and 32 of scale words, of keys and of values, in 11 of 32 layers.
    assert (row.tokens, row.bytes_per_token) == (0, 11 * 2 * (512 + 32))


def test_weights_of_float32_are_served_in_16_bits_and_given_ones_as_they_are(hub_model: HubModel) -> None:
    folder = hub_model("qwen", dtype="float32")
    plan = plan_of(folder, gpu="H100")
    assert plan.weights.served_bytes == plan.weights.stored_bytes // 2
    assert plan_of(folder, gpu="H100", weights=14 * GIB).weights.served_bytes == 14 * GIB


@pytest.mark.parametrize(("dtype", "tensors", "share"), [("bfloat16", "F32", 0.5), ("float32", "BF16", 1.0)])
def test_the_dtype_of_files_that_are_here_counts_and_not_the_configurations(
    model_folder: Callable[..., Path], dtype: str, tensors: str, share: float
) -> None:
    folder = model_folder("llama-gqa", dtype=dtype)
    weights = load_file(folder / "model.safetensors")
    kind = torch.float32 if tensors == "F32" else torch.bfloat16
    save_file({name: tensor.to(kind) for name, tensor in weights.items()}, folder / "model.safetensors")
    counted = plan_of(folder, gpu="T4", context_length=512).weights
    assert counted.served_bytes == counted.stored_bytes * share


def test_heads_of_no_multiple_of_16_channels_have_no_three_bits(model_folder: Callable[..., Path]) -> None:
    names = [row.name for row in plan_of(model_folder("llama-gqa"), gpu="T4", context_length=512).schemes]
    assert "K3V3" in names
    odd = model_folder("head-dim-80", hidden_size=80, num_attention_heads=2)
    assert "K3V3" not in [row.name for row in plan_of(odd, gpu="T4", context_length=512).schemes]


def test_the_model_is_refused_as_by_a_search(hub_model: HubModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="window of 4096 tokens"):
        plan_of(hub_model("qwen", sliding_window=4096, use_sliding_window=True, max_window_layers=0), gpu="H100")
    with pytest.raises(UnsupportedModelError, match="--context-length 65536 exceeds the 32768 positions"):
        plan_of(hub_model("qwen"), gpu="H100", context_length=65_536)
    with pytest.raises(GeometryError, match="tp_size 3"):
        plan_of(hub_model("qwen"), gpu="H100", tp_size=3)
    with pytest.raises(BudgetError, match="smallest possible"):
        plan_of(hub_model("qwen"), gpu="H100", budget=("1bit",))
    folder = hub_model("llama")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"no safetensors files .* such as --weights 14GiB"):
        plan_of(folder, gpu="H100")


@pytest.mark.parametrize(("tp_size", "advice"), [(1, "more than this GPU has"), (2, "more than one of these GPUs has")])
def test_a_search_that_a_gpu_cannot_hold_says_what_to_do_with_the_gpus_that_there_are(
    hub_model: HubModel, tp_size: int, advice: str
) -> None:
    plan = plan_of(hub_model("llama"), memory=20 * GIB, weights=4 * GIB, tp_size=tp_size, context_length=32_768)
    # The weights alone are what a search loads, whatever the ranks.
    plan = replace(plan, search=SearchCost(1, 1, None, 24 * GIB, 0))
    text = " ".join(search_sentences(plan))
    assert advice in text and "accelerate" in text and "--stream" in text
