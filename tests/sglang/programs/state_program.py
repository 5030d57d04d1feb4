"""Run by layers/test_states.py: the states that SGLang itself would keep of a model, for ranks that are not there.

The arguments are the folder of a model, a flag of SGLang's that overrides its configuration with its value, and JSON of
tensor-parallel ranks and of the bytes that weights leave. It writes the bytes of a real pool of `SLOTS` states on a
rank, by the number of ranks, the states that a request may take, and for each of the bytes that weights leave a single
rank the states, and the bytes for tokens. The ranks are put in place, and what a server resolves of its flags; all else
is SGLang's.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups.overrides import resolution_result, supports_mamba_cache_extra_buffer
from sglang.srt.configs import hybrid_arch, qwen3_next
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.server_args import ServerArgs

from kvtuner.calibration.model_loading import DEMO_MODEL

GIB, SLOTS = 1 << 30, 6


def params_of(config: Any, tp_size: int) -> Any:
    """What SGLang says of the states of a configuration on so many ranks."""
    parallel = SimpleNamespace(attn_tp_size=tp_size, tp_size=tp_size, enable_cp_tp_group_sharing=False)
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang.srt.") and hasattr(module, "get_parallel"):
            module.get_parallel = lambda: parallel
    return config.mamba2_cache_params


def pool_bytes(params: Any) -> int:
    """The bytes that a pool of states takes, with one that pads batches."""
    pool = MambaPool(
        size=SLOTS - 1, spec_state_size=0, cache_params=params, mamba_layer_ids=params.layers, device="cpu"
    )  # fmt: skip
    return int(pool.mamba_cache.mem_usage_bytes())


def main() -> None:
    folder, _, overrides, asked = sys.argv[1:]
    ranks, available = json.loads(asked)
    qwen3_next._is_cpu = False  # where heads that cannot be split are padded
    read = ModelConfig(folder, model_override_args=overrides, dtype="bfloat16")
    config = hybrid_arch.mambaish_config(read)
    has_buffer = supports_mamba_cache_extra_buffer(SimpleNamespace(linear_attn_backend="triton"), read.hf_config)
    ratio = resolution_result(ServerArgs(model_path=str(DEMO_MODEL)), "mamba_full_memory_ratio")
    schedule = SimpleNamespace(
        max_mamba_cache_size=None, mamba_full_memory_ratio=ratio, max_running_requests=None,
        disable_overlap_schedule=not has_buffer,
    )  # fmt: skip
    mamba = SimpleNamespace(
        enable_linear_replayssm_spec=False, enable_mamba_extra_buffer=has_buffer, enable_mamba_extra_buffer_lazy=False
    )
    kv_cache_configurator.get_schedule = lambda: schedule
    kv_cache_configurator.get_exec = lambda: SimpleNamespace(mamba=mamba)
    kv_cache_configurator.get_memory = lambda: SimpleNamespace(disable_radix_cache=False)
    override = SimpleNamespace(override=lambda _, **values: vars(schedule).update(values))
    kv_cache_configurator.get_context = lambda: override
    sizes = [pool_bytes(params_of(config, tp_size)) for tp_size in ranks]
    params_of(config, ranks[0])
    configurator: Any = SimpleNamespace(
        mambaish_config=config, pp_size=1, model_config=read, attn_dp_size=1, extra_mamba_cache_bytes_per_req=0,
        fused_entry_bytes=lambda _: None, spec_algorithm=SimpleNamespace(is_none=lambda: True),
        hybrid_gdn_config=None, hybrid_kda_config=None,
    )  # fmt: skip
    whole = kv_cache_configurator.KVCacheConfigurator
    pools = []
    for num_bytes in available:
        schedule.max_mamba_cache_size = None
        rest = whole._handle_max_mamba_cache(configurator, num_bytes / GIB)
        pools.append([schedule.max_mamba_cache_size, int(rest * GIB)])
    answers = {"bytes": sizes, "per_request": whole._calculate_mamba_ratio(configurator), "pools": pools}
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
