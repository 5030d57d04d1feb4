"""Run by test_refusals.py: each function of SGLang that is hooked is refused by name once it is gone or changed."""

from __future__ import annotations

import multiprocessing
import pkgutil
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang import scheduler
from kvtuner.runtime_loader.sglang.compat import disaggregation
from kvtuner.runtime_loader.sglang.compat.differences import answer_as_transformers
from kvtuner.runtime_loader.sglang.compat.processes import on_ready, on_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

SRT = "sglang.srt"
HOOKED = [
    f"{SRT}.runtime_context.publish",
    f"{SRT}.entrypoints.engine._wait_for_scheduler_ready",
    f"{SRT}.managers.scheduler.Scheduler.get_init_info",
    f"{SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator.__post_init__",
    f"{SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
    f"{SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool",
    f"{SRT}.mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer",
    f"{SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
    f"{SRT}.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
    f"{SRT}.model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes",
    f"{SRT}.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
    f"{SRT}.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache",
    f"{SRT}.mem_cache.memory_pool.MHATokenToKVPool._build_kv_buffer_descs",
    f"{SRT}.mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
    f"{SRT}.mem_cache.memory_pool.MHATokenToKVPool._init_data_ptrs_and_strides",
    f"{SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
    f"{SRT}.beam_search.coordinator.BeamCoordinator.validate_and_init",
    f"{SRT}.layers.attention.triton_backend.TritonAttnBackend.forward_decode",
    f"{SRT}.layers.attention.triton_backend.TritonAttnBackend.forward_extend",
    f"{SRT}.layers.attention.triton_backend.TritonAttnBackend._forward_extend_kernel",
    "sglang.kernels.ops.attention.decode_attention.decode_attention_fwd",
    "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd",
    f"{SRT}.mem_cache.hybrid_cache.hybrid_pool_assembler.build_kv_host_pool",
    f"{SRT}.mem_cache.pool_host.base.HostKVCache.backup_from_device_all_layer",
    f"{SRT}.mem_cache.pool_host.base.HostKVCache.set_from_flat_data_page",
    f"{SRT}.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
    f"{SRT}.mem_cache.hicache_storage.HiCacheFile._get_suffixed_key",
    f"{SRT}.mem_cache.registry.default_radix_cache_factory",
    f"{SRT}.disaggregation.common.conn.CommonKVManager.__init__",
    f"{SRT}.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
    f"{SRT}.model_executor.model_runner.ModelRunner.forward",
    f"{SRT}.layers.attention.triton_backend.TritonAttnBackend.init_forward_metadata",
    f"{SRT}.layers.attention.triton_backend.TritonAttnBackend._update_decode_kv_buffers",
    f"{SRT}.mem_cache.kv_index_translator.KVIndexTranslator.pack_read_stream",
    f"{SRT}.models.mllama4.Llama4ForConditionalGeneration.permute_qk_weight_for_rotary",
    f"{SRT}.models.llama4.get_rope",
    f"{SRT}.models.gemma4_vision.Gemma4VisionPooler.__init__",
    f"{SRT}.models.gemma4_mm.Gemma4ForConditionalGeneration.prepare_attn_masks",
    f"{SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_dsa_kv_pool",
    f"{SRT}.model_executor.pool_configurator.DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
    f"{SRT}.layers.attention.dsa_backend.DeepseekSparseAttnBackend.forward_decode",
    f"{SRT}.layers.attention.dsa_backend.DeepseekSparseAttnBackend.forward_extend",
    f"{SRT}.layers.attention.dsa_backend.DeepseekSparseAttnBackend.get_topk_transform_method",
    f"{SRT}.layers.attention.dsa_backend.DeepseekSparseAttnBackend._pad_topk_indices",
    f"{SRT}.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_flashmla_sparse",
]


FIXED = (
    "configure", "get_init_info", "_wait_for_scheduler_ready", "_create_buffers", "_init_data_ptrs_and_strides",
    "__post_init__",
)  # fmt: skip
"""Called by SGLang alone, whatever their parameters."""
INHERITED = ("calculate_pool_sizes", "forward_decode", "forward_extend", "init_forward_metadata", "__init__")
"""Methods of which a class has an abstract one where it has none of its own."""


def changed(first: object, *, renamed: object = None) -> None:
    """Takes other arguments than any release did."""


def install() -> None:
    """All that a launcher and a scheduler hook."""
    role = SimpleNamespace(disaggregation_mode="decode", disaggregation_decode_extra_slots=0)
    disaggregation.get_disagg = lambda: role
    on_scheduler(lambda _: None, lambda _: {})
    on_ready(lambda _: None)
    scheduler.install_hooks(packed=True, indexed=False, tiers=True, transfers=True, lmcache=True)
    scheduler.hook_sparse_backend()
    for name in ("Llama4ForConditionalGeneration", "Gemma4ForConditionalGeneration"):
        config = SimpleNamespace(architectures=[name])
        answer_as_transformers(SimpleNamespace(hf_config=config, is_multimodal=True))


def refuse(hooked: str, fault: Callable[..., None] | None) -> None:
    path, _, name = hooked.rpartition(".")
    owner = pkgutil.resolve_name(path)
    assert callable(getattr(owner, name)), hooked
    if fault is None:
        delattr(owner, name)
    else:
        setattr(owner, name, fault)
    try:
        install()
    except ServingError as error:
        assert hooked in str(error), (hooked, error)
        assert "install a version that kvtuner is tested with" in str(error), error
    else:
        raise AssertionError(f"installed without {hooked}, or with another")


for module in ("managers.scheduler", "entrypoints.engine", "models.mllama4", "models.llama4", "models.gemma4_mm"):
    pkgutil.resolve_name(f"{SRT}.{module}")  # what children share
for path in HOOKED:
    for fault in (None, changed):
        name = path.rpartition(".")[2]
        if name not in INHERITED if fault is None else name not in FIXED:
            # A process for each: what was hooked before the refusal stays hooked.
            child = multiprocessing.get_context("fork").Process(target=refuse, args=(path, fault))
            child.start()
            child.join()
            assert child.exitcode == 0, (path, fault)
install()  # and with all of them
