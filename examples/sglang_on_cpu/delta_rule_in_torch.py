"""The gated delta rule of Qwen3-Next, Qwen3.5 and Kimi Linear in plain torch, token by token.

Kimi Linear forgets each channel of a key at a pace of its own, the others a whole head. SGLang's own are Triton
kernels: that of prompts refuses float32, the dtype that a processor serves exactly, that of single tokens is not one
that Triton interprets, and that of the norm behind it asks a GPU for its size. The convolutions in front of it stay
SGLang's kernels, interpreted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

CHUNK: Final = 64
"""The tokens between the states that SGLang's radix cache keeps."""


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Any = None, initial_state_indices: Any = None, cu_seqlens: Any = None, head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False, inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    """Read and update the states of requests whose tokens follow one another, as SGLang's function of chunks does.

    Args:
        q: The queries [1, tokens, heads, key_dim], as `k`; `v` is [1, tokens, value_heads, value_dim].
        k: The keys.
        v: The values.
        g: The logarithm of what is kept of a state [1, tokens, value_heads], or of each channel of its keys [1, tokens,
            value_heads, key_dim].
        beta: The share of a value that is written [1, tokens, value_heads].
        scale: The factor of what is read, one by the root of key_dim by default.
        initial_state: The states of all slots [slots, value_heads, value_dim, key_dim], updated in place.
        initial_state_indices: The slot of each request.
        cu_seqlens: The ends of the requests' tokens, from 0 on.
        head_first: False, as SGLang calls it.
        use_qk_l2norm_in_kernel: Whether queries and keys are divided by their length.
        inplace_update: Whether the last states are written back.

    Returns:
        What is read [1, tokens, value_heads, value_dim], None, and the state in front of every `CHUNK` tokens of each
        request [1, chunks, value_heads, value_dim, key_dim].
    """
    import torch

    assert q.shape[0] == 1
    assert not head_first
    read, before = torch.empty_like(v), []
    repeats, dtype = v.shape[2] // k.shape[2], torch.promote_types(v.dtype, torch.float32)
    q, k = (states[0].to(dtype).repeat_interleave(repeats, dim=1) for states in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (states * (states.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for states in (q, k))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    kept, written, v_of_token = g[0].to(dtype).exp(), beta[0].to(dtype)[..., None], v[0].to(dtype)
    kept = kept[:, :, None, None] if kept.dim() == 2 else kept[:, :, None]
    ends = cu_seqlens.tolist()
    for begin, end, slot in zip(ends, ends[1:], initial_state_indices.tolist(), strict=False):
        # A slot below 0 only fills a batch.
        state = initial_state[max(slot, 0)].to(dtype) * (slot >= 0)
        for token in range(begin, end):
            if (token - begin) % CHUNK == 0:
                before.append(state)
            state = state * kept[token]
            key = k[token][..., None]
            missing = (v_of_token[token] - (state @ key)[..., 0]) * written[token]
            state = state + missing[..., None] * k[token][:, None]
            read[0, token] = (state @ q[token][..., None])[..., 0].to(read.dtype)
        if inplace_update and slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return read, None, torch.stack(before)[None].to(q.dtype)


def gated_delta_rule_of_one_token(
    *, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    initial_state: Tensor, out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Read and update the states of requests by one token of each, from what the convolution gave.

    Args:
        mixed_qkv: The queries, keys and values [requests, channels].
        a: The input of what is kept of a state [requests, value_heads], with `A_log` and `dt_bias` of each head.
        b: The input of the share of a value that is written.
        A_log: The logarithm of how fast a head forgets.
        dt_bias: The bias of `a`.
        scale: The factor of what is read.
        initial_state: The states of all slots [slots, value_heads, value_dim, key_dim], updated in place.
        out: The tensor that what is read goes into [requests, 1, value_heads, value_dim].
        ssm_state_indices: The slot of each request.
        use_qk_l2norm_in_kernel: Whether queries and keys are divided by their length.
    """
    import torch

    _, value_heads, value_dim, key_dim = initial_state.shape
    of_keys = (mixed_qkv.shape[1] - value_heads * value_dim) // 2
    q, k, v = mixed_qkv.split([of_keys, of_keys, value_heads * value_dim], dim=1)
    g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    read, _, _ = gated_delta_rule(
        q.unflatten(1, (-1, key_dim))[None], k.unflatten(1, (-1, key_dim))[None], v.unflatten(1, (-1, value_dim))[None],
        g[None], b.float().sigmoid()[None], scale, initial_state, ssm_state_indices, torch.arange(len(a) + 1),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    out.copy_(read[0][:, None])
    return out, initial_state


def gated_delta_rule_by_channel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, initial_state_indices: Tensor,
    cu_seqlens: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None, beta_is_raw: bool = True,
    use_qk_l2norm_in_kernel: bool = True, output_intermediate_states: bool = False, track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None, **_: Any,
) -> Any:  # fmt: skip
    """Read and update the states of requests as `gated_delta_rule`, for Kimi Linear, whose gates come as they are.

    Args:
        q: The queries [1, tokens, heads, channels], as `k` and `v`.
        k: The keys.
        v: The values.
        g: The input of what is kept of a channel [1, tokens, heads, channels].
        beta: The input of the share of a value that is written [1, tokens, heads].
        initial_state: The states of all slots [slots, heads, channels of values, channels of keys], updated in place.
        initial_state_indices: The slot of each request.
        cu_seqlens: The ends of the requests' tokens, from 0 on.
        A_log: The logarithm of how fast a head forgets.
        dt_bias: The bias of `g`.
        lower_bound: The value None, as in these layers.
        beta_is_raw: The value True.
        use_qk_l2norm_in_kernel: The value True.
        output_intermediate_states: Whether the state in front of every `CHUNK` tokens is returned too.
        track_state: The tensor that one of these goes into, of each request.
        track_chunk_idx: The number of that one in each request; below 0 for none.
    """
    assert lower_bound is None
    assert beta_is_raw
    assert use_qk_l2norm_in_kernel
    read, _, before = gated_delta_rule(
        q, k, v, _log_kept(g.float(), A_log, dt_bias), beta.float().sigmoid(), None, initial_state,
        initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    if track_state is not None and track_chunk_idx is not None:
        first = 0
        for request, tokens in enumerate(cu_seqlens.diff().tolist()):
            chunk = int(track_chunk_idx[request])
            if chunk >= 0:
                track_state[request] = before[0, first + chunk].to(track_state.dtype)
            first += -(-tokens // CHUNK)
    return (read, before) if output_intermediate_states else read


def gated_delta_rule_by_channel_of_one_token(
    *, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = True, lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Read and update the states of requests by one token of each, as `gated_delta_rule_of_one_token`.

    What is kept of a state has an input of each channel, `a` [requests, heads * channels], and so has `dt_bias`.
    """
    assert lower_bound is None
    assert use_qk_l2norm_in_kernel
    import torch

    _, heads, value_dim, key_dim = initial_state.shape
    q, k, v = mixed_qkv.split([heads * key_dim, heads * key_dim, heads * value_dim], dim=1)
    read, _, _ = gated_delta_rule(
        q.unflatten(1, (heads, -1))[None], k.unflatten(1, (heads, -1))[None], v.unflatten(1, (heads, -1))[None],
        _log_kept(a.float().unflatten(1, (heads, -1))[None], A_log, dt_bias), b.float().sigmoid()[None], scale,
        initial_state, ssm_state_indices, torch.arange(len(a) + 1), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out.copy_(read[0][:, None])
    return out, initial_state


def _log_kept(gates: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The logarithm of what is kept of each channel, of its input [1, tokens, heads, channels]."""
    import torch

    heads = gates.shape[2]
    return -A_log.float().exp().view(heads, 1) * torch.nn.functional.softplus(gates + dt_bias.float().view(heads, -1))


def gated_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6,
    group_size: int | None = None, norm_before_gate: bool = True, is_rms_norm: bool = False, activation: str = "swish",
) -> Tensor:  # fmt: skip
    """Divide channels by their root mean square, and multiply by a gate, as the rule's layers do with what they read.

    Args:
        x: The numbers [..., channels].
        weight: The factor of each channel.
        bias: The value None, as in these layers.
        z: The gate, of the shape of `x`.
        eps: The number that is added to the mean square.
        group_size: The value None: all channels are one group.
        norm_before_gate: The value True.
        is_rms_norm: The value True.
        activation: The function of the gate, by its name in SGLang.
    """
    import torch

    assert bias is None
    assert group_size is None
    assert norm_before_gate
    assert is_rms_norm
    assert activation == "swish"
    numbers = x.float()
    numbers = numbers * (numbers.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return (numbers if z is None else numbers * torch.nn.functional.silu(z.float())).to(x.dtype)


def install() -> None:
    """Let SGLang's layers of linear attention run by these."""
    kernels: Any = importlib.import_module("sglang.srt.layers.attention.linear.kernels.gdn_triton")
    kernels.chunk_gated_delta_rule = gated_delta_rule
    kernels.fused_recurrent_gated_delta_rule_packed_decode = gated_delta_rule_of_one_token
    of_channels: Any = importlib.import_module("sglang.srt.layers.attention.linear.kernels.kda_triton")
    of_channels.chunk_kda = gated_delta_rule_by_channel
    of_channels.fused_recurrent_kda_packed_decode = gated_delta_rule_by_channel_of_one_token
    norms: Any = importlib.import_module("sglang.kernels.ops.attention.fla.layernorm_gated")
    norms.layernorm_fn = gated_norm
