"""Sparse attention (DSA) of DeepSeek V3.2 and GLM-5 in plain torch: the index that selects tokens, and their attention.

SGLang has kernels of a Hopper for both, and asks which GPU it has before it loads weights. What lies between them stays
SGLang's: the pool with its index keys, written and gathered by kernels that Triton interprets. Where no
other dtype is asked for, the pool has the model's.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

HOPPER: Final = (9, 0)
"""The compute capability of the GPU whose branches SGLang takes."""
ASKING: Final = (
    "sglang.srt.arg_groups.model_hook",
    "sglang.srt.arg_groups.overrides",
    "sglang.srt.layers.attention.dsa_backend",
)
"""The modules that ask for it, of sparse attention alone."""
LARGEST: Final = 448.0
"""The largest number of fp8 (e4m3)."""
LEAST_RANGE: Final = 1e-4
"""The least range that a block of an index has, so that zeros have a scale."""


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """The last axis, of a power of two, by the Hadamard matrix in natural order, and by a scale."""
    import torch

    signs = torch.ones(1, 1)
    while len(signs) < x.shape[-1]:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return (x.float() @ signs * scale).to(x.dtype)


def rounded_to_fp8(x: Tensor, block_size: int = 128, scale_fmt: str | None = None) -> tuple[Tensor, Tensor]:
    """Codes in fp8 of blocks of the last axis, and the scale of each block [..., blocks], as SGLang's `act_quant`.

    Triton could interpret that one, but halves what its conversion rounds up to a power of two.

    Args:
        x: The numbers [..., channels].
        block_size: The channels of a block.
        scale_fmt: The format of scales; where there is one, scales are powers of two.
    """
    import torch

    blocks = x.float().unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(-1).clamp(min=LEAST_RANGE) / LARGEST
    if scale_fmt is not None:
        scale = scale.log2().ceil().exp2()
    codes = (blocks / scale[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale


def select_tokens(
    self: Any, x: Tensor, q_lora: Tensor, positions: Tensor, forward_batch: Any, layer_id: int,
    return_indices: bool = True,
) -> Any:  # fmt: skip
    """Store the index keys of new tokens, and select the tokens that each of them reads, as SGLang's `Indexer`.

    Args:
        self: The `Indexer`.
        x: The layer's input [tokens, hidden_size].
        q_lora: The queries' latents [tokens, q_lora_rank].
        positions: The position of each token.
        forward_batch: The batch, whose requests' tokens follow one another.
        layer_id: The number of the layer.
        return_indices: Whether anything is selected.

    Returns:
        What `look_up_selected` makes of them, [tokens, index_topk], or None.
    """
    import torch

    indexers: Any = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_indexer")
    metadata = indexers.get_attn_backend().get_indexer_metadata(layer_id, forward_batch)
    query, key, _ = self._get_q_k_bf16(q_lora, x, positions, False, forward_batch)
    codes, scale = rounded_to_fp8(query, self.block_size, self.scale_fmt)
    self._store_index_k_cache(forward_batch, layer_id, key, act_quant=rounded_to_fp8)
    if not return_indices:
        return None
    # The weights of heads are stored in bf16, whatever the model's dtype.
    weights = torch.nn.functional.linear(x.float(), self.weights_proj.weight.float()) * self.n_heads**-0.5
    weights = weights * scale[..., 0] * self.softmax_scale
    lengths = metadata.get_seqlens_int32()
    counts = lengths.tolist()
    stored, scales = indexers.get_token_to_kv_pool().get_index_k_scale_buffer(
        layer_id, lengths, metadata.get_logical_page_table().contiguous(), sum(counts), max(counts)
    )
    keys = stored.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
    new_tokens = metadata.get_dsa_extend_len_cpu()
    scores = torch.zeros(sum(new_tokens), max(counts))
    first, first_key = 0, 0
    for new, count in zip(new_tokens, counts, strict=True):
        of_heads = (codes[first : first + new].float() @ keys[first_key : first_key + count].T).relu()
        scores[first : first + new, :count] = (weights[first : first + new, :, None] * of_heads).sum(1)
        first, first_key = first + new, first_key + count
    selected: Tensor = metadata.topk_transform(scores, self.index_topk)  # which leaves out later tokens
    return indexers.maybe_capture_indexer_topk(layer_id, selected)


def look_up_selected(
    self: Any, logits: Tensor, lengths: Tensor, topk: int, topk_transform_method: Any, attn_metadata: Any,
    topk_indices_offset: Tensor | None = None, row_starts: Tensor | None = None, force_unfused_topk: bool = False,
    **_: Any,
) -> Tensor:  # fmt: skip
    """The tokens of the highest scores, and where they are, as `DSATopKBackend.topk_transform` of a GPU finds both.

    Args:
        self: The way of choosing, which is torch's here whatever it is.
        logits: The scores [tokens, positions].
        lengths: How many of them there are, [tokens].
        topk: How many are chosen.
        topk_transform_method: What tells tokens: their place among all of the batch (RAGGED), or their slot (PAGED).
        attn_metadata: The tables of the batch.
        topk_indices_offset: The place of the first token of each one's request, [tokens].
        row_starts: The first position that has a score, [tokens]; 0 by default.
        force_unfused_topk: Whether positions are wanted.

    Returns:
        Places, slots or positions, [tokens, topk], int32, -1 behind the last where there are fewer.
    """
    import torch

    choices: Any = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_topk_backend")
    positions: Tensor = choices.DSATopKBackend.TORCH.topk_func(logits, lengths, topk, row_starts=row_starts)
    if force_unfused_topk or not choices.envs.SGLANG_DSA_FUSE_TOPK.get():
        return positions
    if topk_transform_method == choices.TopkTransformMethod.RAGGED:
        assert topk_indices_offset is not None
        return torch.where(positions >= 0, positions + topk_indices_offset[:, None], positions)
    table = attn_metadata.page_table_1
    if len(table) != len(positions):  # several tokens of a request
        table = table[attn_metadata.token_to_batch_idx.long()]
    return torch.where(positions >= 0, table.gather(1, positions.clamp(min=0).long()), positions)


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of each query to slots of its own, as FlashMLA's function of this name.

    Args:
        q: The queries [tokens, heads, channels].
        kv: The rows of the pool [slots, 1, channels], of which the first `d_v` channels are values too.
        indices: The slots that a query reads [tokens, 1, most], -1 for none.
        sm_scale: The factor of scores.
        d_v: The channels of values.
        attn_sink: The value None: these models have no sinks.
        topk_length: How many of its slots a query reads, from the first on, [tokens]; all by default.

    Returns:
        What is read [tokens, heads, d_v], the highest score of each query [tokens, heads], and the logarithm of what
        its weights are divided by.
    """
    import torch

    assert attn_sink is None
    slots = indices[:, 0].long()
    is_read = slots >= 0
    if topk_length is not None:
        is_read &= torch.arange(slots.shape[1]) < topk_length[:, None]
    rows = kv[slots.clamp(min=0), 0].float()
    scores = (q.float() @ rows.mT) * sm_scale
    scores = scores.masked_fill(~is_read[:, None], -torch.inf)
    divisor = scores.logsumexp(-1)
    weights = (scores - divisor[..., None]).exp().nan_to_num()  # a query that only fills a batch reads nothing
    return (weights @ rows[..., :d_v]).to(q.dtype), scores.amax(-1), divisor


def _answer_as_a_hopper() -> None:
    """Let the modules that ask for sparse attention find a Hopper, and no other."""
    import torch

    original = torch.cuda.get_device_capability
    if original.__module__ == __name__:
        return

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return HOPPER if sys._getframe(1).f_globals.get("__name__") in ASKING else original(device)

    torch.cuda.get_device_capability = get_device_capability


def install_in_launcher() -> None:
    """Let SGLang's launcher choose sparse attention: of a pool in the model's dtype, by one kernel for all queries."""
    _answer_as_a_hopper()
    hook: Any = importlib.import_module("sglang.srt.arg_groups.model_hook")
    choose_dtype = hook._dsa_kv_cache_dtype_default
    if choose_dtype.__module__ == __name__:
        return

    def choose(view: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = {} if view.kv_cache_dtype == "auto" else choose_dtype(view)
        return chosen if view.dsa_decode_backend else {**chosen, "dsa_decode_backend": "flashmla_sparse"}

    hook._dsa_kv_cache_dtype_default = choose
    family: Any = importlib.import_module("sglang.srt.arg_groups.model_overrides.deepseek_v2")

    def names_no_backend(cfg: Any) -> bool:
        """Whether no backend was asked for: of a processor SGLang names one before it knows the model."""
        of_phases = (cfg.prefill_attention_backend, cfg.decode_attention_backend)
        return cfg.attention_backend in (None, "intel_amx") and of_phases == (None, None)

    family.is_attention_backend_not_set = names_no_backend


def install() -> None:
    """Let SGLang's layers of sparse attention run by these."""
    _answer_as_a_hopper()
    indexers: Any = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_indexer")
    indexers.Indexer.forward_native = select_tokens
    choices: Any = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_topk_backend")
    choices.DSATopKBackend.resolve = classmethod(lambda cls, _: cls.FLASHINFER)  # one that looks tokens up
    choices.DSATopKBackend.topk_transform = look_up_selected
    rotations: Any = importlib.import_module("sglang.kernels.ops.quantization.hadamard")
    rotations.hadamard_transform = hadamard_transform
    flash: Any = ModuleType("sglang.kernels.ops.attention.flash_mla_interface")
    flash.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    sys.modules[flash.__name__] = flash
