"""Options of SGLang that a packed pool does not work with or was never tried with, as the table in docs/serving.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class OptionRule:
    """An option and the values that work.

    Attributes:
        name: The attribute of SGLang's resolved arguments; a dot leads into what an argument holds.
        works: The values that a packed pool works with.
        set_by: The flag, where it is not the name with dashes.
        of_attention: Whether the rule holds only where the device pool has packed rows, which attention reads.
        remedy: The way out, where it is another than to drop the flag.
    """

    name: str
    works: tuple[object, ...]
    reason: str
    set_by: str = ""
    of_attention: bool = False
    remedy: str = "drop it"

    @property
    def flag(self) -> str:
        """The flag to drop."""
        return self.set_by or f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """The differences of a release of SGLang from the newest that is accepted.

    Attributes:
        absent: The options of rules, and the methods of its pool that ours overrides, which it does not have.
        refused: The rules of what does not work with it.
        remedy_of_index: The way out for a model with an index, where none was tried.
    """

    absent: frozenset[str] = frozenset()
    refused: tuple[OptionRule, ...] = ()
    remedy_of_index: str = ""


NOTHING_SPECIAL: Final = ReleaseRules()
"""The newest release's."""

OFF: Final = (None, False, "", "none", "null")

_OFF_BY_REASON: Final = {
    "it scales an fp8 cache": ("quantization_param_path",),
    "it copies rows of one width": ("disaggregation_decode_enable_offload_kvcache", "enable_flexkv"),
    "ranks would share tokens of one pool": ("enable_prefill_cp",),
    "it has a pool of its own": (
        "enable_kv_cache_sharding", "enable_unified_memory", "enable_page_major_kv_layout", "enable_hisparse",
    ),
    "it writes into the pool's buffers": ("kv_canary",),
    "there would be no cache": ("prefill_only_disable_kv_cache", "is_embedding", "encoder_only"),
    "diffusion models read their cache in another order": ("dllm_algorithm",),
    "answers would still depend on others, by the splits of a batch and by prefixes that come back quantized": (
        "enable_deterministic_inference",
    ),
    "its kernels read a bf16 pool": ("enable_nvidia_megakernel", "enable_amd_monokernel"),
    "it shares pages with servers of other profiles": ("enable_unified_cache_external_linker",),
    "its actors do not load plugins": ("use_ray",),
    "it was never tried": (
        "enable_pdmux", "enable_two_batch_overlap", "enable_single_batch_overlap", "enable_torch_compile",
        "enable_memory_saver", "enable_streaming_session", "enable_session_radix_cache", "enable_dynamic_chunking",
        "uno_lora_path", "radix_cache_backend", "elastic_ep_backend",
    ),
}  # fmt: skip

RULES: Final = (
    OptionRule("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "the profile decides how the cache is stored"),
    OptionRule("enable_hierarchical_cache", (*OFF, True), "it is on or off"),
    OptionRule("enable_lora", (True, False, None), "it is on or off"),
    OptionRule("enable_lmcache", (True, False, None), "it is on or off"),
    OptionRule("disaggregation_mode", ("prefill", "decode", None, "null"), "it is a role, or off"),
    OptionRule(
        "speculative_algorithm",
        ("NGRAM", "EAGLE", "EAGLE3", None),
        "of speculative decoding, NGRAM, EAGLE, EAGLE3 and NEXTN alone are tested",
    ),
    OptionRule("dcp_size", (None, 1), "ranks would share tokens of one pool"),
    OptionRule("attn_cp_size", (None, 1), "ranks would share tokens of one pool"),
    OptionRule("dwdp_size", (None, 1), "it was never tried"),
    OptionRule("attn_dp_size", (None, 1), "it was never tried", set_by="--enable-dp-attention: its --dp-size"),
    OptionRule(
        "cuda_graph_config.prefill.backend",
        ("breakable", "disabled"),
        "how a prefix is read is decided outside of graphs",
        set_by="--cuda-graph-backend-prefill",
        of_attention=True,
    ),
    *(OptionRule(name, OFF, reason) for reason, names in _OFF_BY_REASON.items() for name in names),
)

HICACHE_RULES: Final = (
    OptionRule(
        "hicache_mem_layout", ("layer_first", "page_first", "page_first_direct"), "it splits pages by heads or sides"
    ),
    OptionRule("hicache_io_backend", ("kernel", "direct"), "it is of another vendor's devices"),
    OptionRule("hicache_host_memory_mode", ("cache",), "it was never tried"),
)
"""Rules beside the hierarchical cache."""

REPLICA_RULES: Final = (
    OptionRule("nnodes", (1,), "replicas on several nodes were never tried"),
    *(OptionRule(name, OFF, "it was never tried") for name in ("enable_hierarchical_cache", "speculative_algorithm")),
)
"""Rules beside replicas (data parallelism)."""

SPECULATION_RULES: Final = (
    OptionRule("speculative_ngram_external_sam_budget", (None, 0), "it was never tried"),
    OptionRule("speculative_draft_kv_cache_dtype", (None, "auto", "bf16", "bfloat16"), "drafts keep the served dtype"),
    *(
        OptionRule(
            f"cuda_graph_config.{phase}.backend",
            ("disabled",),
            "no GPU has checked it",
            set_by=f"--cuda-graph-backend-{phase}",
            remedy="add --disable-cuda-graph",
        )
        for phase in ("decode", "prefill")
    ),
    *(
        OptionRule(name, OFF, "it was never tried")
        for name in ("enable_hierarchical_cache", "enable_multi_layer_eagle", "speculative_adaptive")
    ),
    OptionRule("pp_size", (None, 1), "it was never tried"),
)
"""Rules beside speculative decoding."""

LMCACHE_RULES: Final = (
    OptionRule("enable_hierarchical_cache", OFF, "both would keep pages below the device"),
    OptionRule("speculative_algorithm", (None,), "it was never tried"),
    *(OptionRule(name, (None, 1), "it was never tried") for name in ("dp_size", "pp_size", "nnodes")),
)
"""Rules beside LMCache."""

ROLES: Final = ("prefill", "decode")
"""The values of --disaggregation-mode with which prompts and answers are computed on different servers."""

DISAGGREGATION_RULES: Final = (
    OptionRule("disaggregation_transfer_backend", ("mooncake",), "no test moved packed rows by it"),
    OptionRule(
        "disaggregation_decode_retraction_backup",
        (None, "none", "cpu_tensor"),
        "its host pool holds rows of one width",
        remedy="drop it: cpu_tensor is chosen",
    ),
    OptionRule("disaggregation_decode_host_receive_threshold", (1, None), "its host pool holds rows of one width"),
    OptionRule("enable_lmcache", (False, None), "it was never tried"),
    OptionRule("disaggregation_decode_allocation_policy", ("early",), "it was never tried"),
    OptionRule("speculative_algorithm", (None,), "it was never tried"),
    *(
        OptionRule(name, OFF, "it was never tried")
        for name in (
            "disaggregation_enable_kv_checksum", "disaggregation_decode_enable_radix_cache", "enable_pd_role_switch",
            "optimistic_prefill_attempts", "language_only", "enable_hierarchical_cache",
        )
    ),
    *(OptionRule(name, (None, 1), "it was never tried") for name in ("dp_size", "pp_size", "nnodes")),
)  # fmt: skip
"""Rules beside disaggregation, on both sides."""

LORA_RULES: Final = (
    OptionRule("enable_hierarchical_cache", OFF, "no test stored one adapter's pages beside another's"),
    OptionRule("speculative_algorithm", (None,), "it was never tried"),
    OptionRule("dp_size", (None, 1), "it was never tried"),
    OptionRule("disaggregation_mode", (None, "null"), "it was never tried"),
    OptionRule("enable_lmcache", (False, None), "it was never tried"),
)
"""Rules beside adapters (LoRA)."""

OTHER_LAYER_RULES: Final = (
    OptionRule("disaggregation_mode", (None, "null"), "it was never tried"),
    OptionRule("pp_size", (None, 1), "stages of such models are not planned"),
    *(
        OptionRule(name, OFF, "it was never tried")
        for name in (
            "enable_hierarchical_cache",
            "enable_lmcache",
            "speculative_algorithm",
            "enable_lora",
            "lora_paths",
        )
    ),
)
"""Rules beside layers with a window, without keys, or with another layer's keys."""

LATENT_RULES: Final = (
    *OTHER_LAYER_RULES,
    OptionRule("dp_size", (None, 1), "it was never tried"),
    OptionRule("nnodes", (1,), "it was never tried"),
)
"""Rules of latents (MLA)."""

PER_CHANNEL_RULES: Final = (
    OptionRule("disaggregation_mode", (None, "null"), "a group that is not full has no rows to transfer"),
    *(OptionRule(name, (None, 1), "it was never tried") for name in ("dp_size", "pp_size", "nnodes")),
    *(
        OptionRule(name, OFF, "it was never tried")
        for name in ("enable_hierarchical_cache", "enable_lmcache", "enable_lora", "lora_paths")
    ),
)
"""Rules beside keys per channel."""

IMAGE_RULES: Final = (OptionRule("enable_mixed_chunk", OFF, "SGLang makes no mask of a chunk beside decoding"),)
"""Rules of models whose images are read both ways."""

METADATA_BACKEND: Final = "triton"
"""SGLang's name of its attention backend whose metadata ours reads, whichever of ours attends."""

INDEX_BACKEND: Final = "dsa"
"""SGLang's name of the one that has an index, which selects what queries read (sparse attention)."""
SPARSE_KERNEL: Final = "flashmla_sparse"
"""SGLang's name of its sparse kernel that reads latents in the served dtype."""


def backend_rules(metadata_backend: str) -> tuple[OptionRule, ...]:
    """The rules of the attention backend, by the name of the one whose metadata ours reads."""
    works = {
        "attention_backend": (metadata_backend,),
        "prefill_attention_backend": (None, metadata_backend),
        "decode_attention_backend": (None, metadata_backend),
    }
    return tuple(
        OptionRule(name, values, "no other backend can read packed rows", of_attention=True)
        for name, values in works.items()
    )


CAPABILITY_OF_INDEX: Final = 9
"""The major compute capability of GPUs for which SGLang's sparse kernel and ours of latents both are."""
INDEX_KERNELS: Final = (
    OptionRule("dsa_prefill_backend", (None, SPARSE_KERNEL), "latents are staged for this kernel alone"),
    OptionRule("dsa_decode_backend", (None,), "no kernel of SGLang reads packed rows"),
)
"""Rules of what a user chooses for an index, before SGLang does."""
INDEX_RULES: Final = (
    OptionRule("enable_mixed_chunk", OFF, "it was never tried"),
    OptionRule("enable_return_indexer_topk", OFF, "it was never tried"),
)
"""Rules of latents that an index selects from."""
