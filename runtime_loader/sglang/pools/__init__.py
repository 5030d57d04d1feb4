"""SGLang's KV pools with packed rows, and what tests them before they serve.

Private to `runtime_loader.sglang`, which builds `dense_pool` (`PackedKVPool`) or `latent_pool` (`PackedLatentPool`).
SGLang is reached through `compat`.
"""
