"""Options of SGLang that a packed pool does not work with or was never tried with: refused by name.

The table in docs/serving.md is this one in words.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Rule:
    """An option and the values that work.

    Attributes:
        name: attribute of SGLang's resolved arguments; with dots, of what they hold.
        works: values that a packed pool works with.
        reason: why others do not.
        set_by: the flag, where it is not the name with dashes.
        of_attention: that only who reads packed rows needs it.
    """

    name: str
    works: tuple[object, ...]
    reason: str
    set_by: str = ""
    of_attention: bool = False

    @property
    def flag(self) -> str:
        """What to drop."""
        return self.set_by or f"--{self.name.replace('_', '-')}"


OFF: Final = (None, False, "", "none", "null")

RULES: Final = (
    Rule("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "the profile decides how the cache is stored"),
    Rule("quantization_param_path", OFF, "it scales an fp8 cache"),
    Rule("speculative_algorithm", OFF, "drafts share the target's pool and move its rows"),
    Rule("disaggregation_mode", OFF, "the other side would have to hold the same profile, and SGLang does not compare"),
    Rule("disaggregation_decode_enable_offload_kvcache", OFF, "it copies rows of one width"),
    Rule("enable_hierarchical_cache", (*OFF, True), "it is on or off"),
    Rule("dcp_size", (None, 1), "ranks would share tokens of one pool"),
    Rule("attn_cp_size", (None, 1), "ranks would share tokens of one pool"),
    Rule("enable_prefill_cp", OFF, "ranks would share tokens of one pool"),
    Rule("enable_kv_cache_sharding", OFF, "it has a pool of its own"),
    Rule("enable_unified_memory", OFF, "it has a pool of its own"),
    Rule("enable_page_major_kv_layout", OFF, "it has a pool of its own"),
    Rule("enable_hisparse", OFF, "it has a pool of its own"),
    Rule("enable_lmcache", OFF, "it copies keys and values of one width, and leaves their scales behind"),
    Rule("enable_flexkv", OFF, "it copies rows of one width"),
    Rule("kv_canary", OFF, "it writes into the pool's buffers"),
    Rule("prefill_only_disable_kv_cache", OFF, "there would be no cache"),
    Rule("is_embedding", OFF, "there would be no cache"),
    Rule("dllm_algorithm", OFF, "diffusion models read their cache in another order"),
    Rule("enable_deterministic_inference", OFF, "its kernel reads fresh keys from the pool"),
    Rule("enable_pdmux", OFF, "it was never tried"),
    Rule("enable_two_batch_overlap", OFF, "it was never tried"),
    Rule("enable_single_batch_overlap", OFF, "it was never tried"),
    Rule("enable_torch_compile", OFF, "it was never tried"),
    Rule("enable_memory_saver", OFF, "it was never tried"),
    Rule("enable_streaming_session", OFF, "it was never tried"),
    Rule("enable_session_radix_cache", OFF, "it was never tried"),
    Rule("enable_dynamic_chunking", OFF, "it was never tried"),
    Rule("enable_nvidia_megakernel", OFF, "its kernels read a bf16 pool"),
    Rule("enable_amd_monokernel", OFF, "its kernels read a bf16 pool"),
    Rule("dwdp_size", (None, 1), "it was never tried"),
    Rule("attn_dp_size", (None, 1), "it was never tried", set_by="--enable-dp-attention: its --dp-size"),
    Rule("dp_size", (None, 1), "replicas do not tell the launcher what they serve; start a server for each"),
    Rule("enable_lora", OFF, "it was never tried"),
    Rule("lora_paths", OFF, "it was never tried"),
    Rule("uno_lora_path", OFF, "it was never tried"),
    Rule(
        "cuda_graph_config.prefill.backend",
        ("breakable", "disabled"),
        "how a prefix is read is decided outside of graphs",
        set_by="--cuda-graph-backend-prefill",
        of_attention=True,
    ),
    Rule("radix_cache_backend", OFF, "it was never tried"),
    Rule("elastic_ep_backend", OFF, "it was never tried"),
    Rule("encoder_only", OFF, "there would be no cache"),
    Rule("enable_unified_cache_external_linker", OFF, "it shares pages with servers of other profiles"),
    Rule("use_ray", OFF, "its actors do not load plugins"),
)

HICACHE_RULES: Final = (
    Rule("hicache_mem_layout", ("layer_first", "page_first", "page_first_direct"), "it splits pages by heads or sides"),
    Rule("hicache_io_backend", ("kernel", "direct"), "it is of another vendor's devices"),
    Rule("hicache_host_memory_mode", ("cache",), "it was never tried"),
)

BACKENDS: Final = (
    Rule("attention_backend", ("triton",), "no other backend can read packed rows", of_attention=True),
    Rule("prefill_attention_backend", (None, "triton"), "no other backend can read packed rows", of_attention=True),
    Rule("decode_attention_backend", (None, "triton"), "no other backend can read packed rows", of_attention=True),
)

VARIABLES: Final = {
    "SGLANG_USE_HND_KVCACHE": "rows hold all heads of a token",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "it sizes rows of one width",
}


def refuse_flags(arguments: Any, environ: Mapping[str, str] = os.environ, *, hicache_only: bool = False) -> None:
    """Check SGLang's resolved arguments and environment.

    Args:
        arguments: resolved.
        environ: of the process.
        hicache_only: whether the device pool stays in the model's dtype.

    Raises:
        ServingError: the first option that a packed pool or host tier does not work with, or that this SGLang does not
            know.
    """
    what = "a quantized host tier" if hicache_only else "a packed KV pool"
    if str(arguments.device).partition(":")[0] not in ("cuda", "cpu"):
        raise ServingError(
            f"there are no kernels for {arguments.device}: profiles run in SGLang on GPUs of NVIDIA, on a"
            " processor (examples/sglang_on_cpu), and on the transformers host; drop --kvtuner-profile"
        )
    rules = [rule for rule in (*BACKENDS, *RULES) if not (hicache_only and rule.of_attention)]
    if getattr(arguments, "enable_hierarchical_cache", None):
        rules += HICACHE_RULES
    elif hicache_only:
        raise ServingError(
            "HiCache is not enabled, so KVTuner HiCache would not be used: add --enable-hierarchical-cache"
        )
    for rule in rules:
        try:
            value = attrgetter(rule.name)(arguments)
        except AttributeError as error:
            raise ServingError(
                f"this SGLang has no option {rule.name}; install a version that kvtuner is tested with"
            ) from error
        if value not in rule.works and value not in ([], {}):
            shown = "" if value is True else f" {value}"
            raise ServingError(f"{rule.flag}{shown} does not work with {what}: {rule.reason}; drop it")
    for name, reason in VARIABLES.items():
        if environ.get(name, "").lower() in ("1", "true", "t", "yes", "y", "on"):
            raise ServingError(f"{name} does not work with {what}: {reason}; unset it")
