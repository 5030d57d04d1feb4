"""Run by test_planned_memory.py: what SGLang itself reserves and what fits, for GPUs that are not there.

The argument is JSON with `reserves`, lists of a GPU's MiB, ranks, stages and requests asked for, and `pools`, lists of
the bytes available, the context, the requests asked for, and a token's and a request slot's bytes on a rank and on all
stages, and `parts`, lists of the bytes available and of a token's bytes in full layers and in those with a window. It
writes the shares that SGLang gives to weights and cache, the tokens and request slots of each pool, the tokens of each
pool of two parts, and the architectures of transformers for which it has such pools. What a device says of itself, and
what was asked for, is put in place; all else is SGLang's and the hooks'.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups import cuda_graph_hook, memory_hook, serving_hook
from sglang.srt.arg_groups.overrides import resolution_result, resolving_view
from sglang.srt.configs.model_config import is_hybrid_swa_model
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, HybridSWAPoolConfigurator
from sglang.srt.server_args import ServerArgs
from transformers.models.auto import modeling_auto

from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.runtime_loader.exact_ring import most_requests
from kvtuner.runtime_loader.sglang.compat import capacity, disaggregation


def static_fraction(memory_mib: int, tp_size: int, pp_size: int, requests: int | None) -> float:
    memory_hook.get_device_memory_capacity = lambda device: memory_mib
    cuda_graph_config.default_prefill_backend = lambda: cuda_graph_config.Backend.BREAKABLE  # as on every GPU
    arguments = ServerArgs(
        model_path=str(DEMO_MODEL), device="cuda", tp_size=tp_size, pp_size=pp_size, max_running_requests=requests
    )
    for step in (
        serving_hook.handle_missing_default_values,
        cuda_graph_hook.handle_cuda_graph_config,
        memory_hook.handle_gpu_memory_settings,
    ):
        step(arguments)
    return float(resolving_view(arguments).mem_fraction_static)


def pool_size(
    available: int,
    context: int,
    requests: int | None,
    token: int,
    slot: int,
    all_token: int,
    all_slot: int,
    workspace: int,
) -> list[int]:
    schedule = SimpleNamespace(max_running_requests=requests, max_total_tokens=None)
    kv_cache_configurator.get_schedule = capacity.get_schedule = lambda: schedule
    role = SimpleNamespace(disaggregation_mode="null", disaggregation_decode_extra_slots=0)
    disaggregation.get_disagg = lambda: role
    configurator = SimpleNamespace(
        model_config=SimpleNamespace(context_len=context),
        attn_dp_size=1,
        mambaish_config=None,
        is_draft_worker=False,
        costs=(all_token, all_slot),
    )
    resolve = kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs
    configurator.resolve_max_num_reqs = lambda tokens: resolve(configurator, tokens)
    sizes: Any = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    sizes._cell_size, sizes._kvtuner_cell, sizes._fixed_overhead_bytes = token, token, 0
    sizes._kvtuner_costs = capacity._Costs(configurator, token, slot, workspace)
    tokens = sizes.calculate_pool_sizes(available, 1).max_total_num_tokens
    return [tokens, configurator.resolve_max_num_reqs(tokens)]


def part_tokens(available: int, full: int, window: int) -> int:
    """The tokens of the full layers' part of a pool, by SGLang's default share of the windows' part."""
    sizes: Any = HybridSWAPoolConfigurator.__new__(HybridSWAPoolConfigurator)
    arguments = ServerArgs(model_path=str(DEMO_MODEL))
    sizes._swa_full_tokens_ratio = resolution_result(arguments, "swa_full_tokens_ratio")
    sizes._full_layers_num, sizes._swa_layers_num, sizes._swa_per_token, sizes._full_per_token = 1, 1, window, 0
    sizes._draft_full_layers_num = sizes._draft_swa_layers_num = sizes._draft_swa_full_layers_num = 0
    sizes._draft_cell_size, sizes._enable_unified_memory = 0, False
    sizes._fused_full_entry = sizes._fused_swa_entry = None
    sizes._sliding_window_size, sizes._page_size = 128, 1
    sizes._kvtuner_costs = capacity._Costs(None, full, 0, 0)
    sizes._recompute_cell_size()
    return int(sizes.calculate_pool_sizes(available, 1).max_total_num_tokens)


def in_parts() -> list[str]:
    """The classes of transformers' language models whose windows SGLang keeps in a part of their own."""
    of_text = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    classes = {name if isinstance(name, str) else name[0] for name in (*of_text, *with_images)}
    return sorted(name for name in classes if is_hybrid_swa_model([name]))


def main() -> None:
    asked = json.loads(sys.argv[1])
    fractions = [static_fraction(*case) for case in asked["reserves"]]
    rank = capacity.RankBytes(
        of_token=lambda kvc, layers: 0,
        of_request=lambda kvc, layers: 0,
        of_workspace=lambda kvc: 0,
        most_requests=lambda kvc, tokens: most_requests(tokens, *kvc.costs) if kvc.costs[1] else None,
    )
    capacity.on_capacity(rank, lambda *_: None)
    answers = {
        "fractions": fractions,
        "pools": [pool_size(*case) for case in asked["pools"]],
        "parts": [part_tokens(*case) for case in asked["parts"]],
        "in_parts": in_parts(),
    }
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
