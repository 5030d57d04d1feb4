"""A platform for SGLang that runs every layer in plain torch, for a machine without a GPU.

Active in every process that has this folder on its PYTHONPATH: the folder is also the metadata of a distribution with
an entry point in SGLang's group of platforms. For trying things out and for tests; nothing here is fast.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import delta_rule_in_torch
import sparse_attention_in_torch
import transfer_over_tcp


def activate() -> str:
    """Name of the platform, for SGLang."""
    return "sglang_on_cpu.TorchPlatform"


def use_tree_operators_of_triton() -> None:
    """Let SGLang build and verify trees of drafts by its own Triton kernels, which it has for Intel's devices alone."""
    import sglang.srt.utils
    from sglang.kernels.ops.speculative import spec_tree

    spec_tree._is_xpu = True
    original = sglang.srt.utils.is_xpu
    # Its module asks once, when it is imported, and elsewhere imports compiled kernels.
    sglang.srt.utils.is_xpu = lambda: True
    try:
        importlib.import_module("sglang.kernels.ops.speculative.reconstruct_tree")
    finally:
        sglang.srt.utils.is_xpu = original


def slots_of_drafts(
    *, req_pool_indices: Any, req_to_token: Any, start_offset: Any, draft_token_num: int, **_: Any
) -> Any:
    """Token slots [requests * draft_token_num] of what is verified, from the table of each request's slots."""
    import torch

    columns = start_offset[:, None].long() + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None].long(), columns].flatten().long()


class SlotsOfBatch:
    """SGLang's kernel that lists the token slots of a batch, in torch: interpreted it took a third of a decode step."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return what is called as the kernel on a grid, whose first axis are requests."""

        def run(
            table: Any, rows: Any, lengths: Any, indptr: Any, starts: Any, slots: Any, row_stride: int, **options: Any
        ) -> None:
            if options.get("ENTRY_PAGE_SIZE", 1) != 1 or options.get("token_mapping") is not None:
                self.kernel[grid](table, rows, lengths, indptr, starts, slots, row_stride, **options)
                return
            import torch

            counts, begins = lengths[: grid[0]].long(), indptr[: grid[0]].long()
            request = torch.arange(grid[0]).repeat_interleave(counts)
            tokens = torch.arange(len(request)) - (counts.cumsum(0) - counts)[request]
            columns = tokens if starts is None else tokens + starts[request].long()
            slots[begins[request] + tokens] = table[rows[request].long(), columns].to(slots.dtype)

        return run


def list_slots_in_torch() -> None:
    """Let SGLang's attention list the token slots that a batch reads without Triton's interpreter."""
    translator: Any = importlib.import_module("sglang.srt.mem_cache.kv_index_translator")
    translator.create_flashinfer_kv_indices_triton = SlotsOfBatch(translator.create_flashinfer_kv_indices_triton)


def keep_pools_where_lmcache_reads_them() -> None:
    """Let LMCache move the pool itself into memory that its server shares, not only the views that SGLang gives it."""
    registry = importlib.import_module("sglang.srt.mem_cache.registry")
    build = registry.default_radix_cache_factory

    def build_beside_lmcache(ctx: Any) -> Any:
        if registry.get_memory().enable_lmcache:
            memory = importlib.import_module("lmcache.v1.platform.devices.cpu.shm")
            migrate = memory.migrate_to_shm_and_wrap

            def migrate_all(tensor: Any) -> Any:
                if tensor._base is not None:
                    migrate(tensor._base)
                return migrate(tensor)

            memory.migrate_to_shm_and_wrap = migrate_all
        return build(ctx)

    registry.default_radix_cache_factory = build_beside_lmcache


def rotate_in_torch() -> None:
    """Let models with latents (MLA) have every rotary embedding: SGLang's of a processor is that of YaRN alone."""
    factory: Any = importlib.import_module("sglang.srt.layers.rotary_embedding.factory")

    def rotary_embedding(*arguments: Any, **options: Any) -> Any:
        return factory.get_rope(*arguments[:-1], **options)  # the last is the device

    factory.get_rope_cpu = rotary_embedding


def cap_logits_in_torch() -> None:
    """Let models cap their logits (Gemma): SGLang's kernel calls a function of a GPU's library."""
    processor: Any = importlib.import_module("sglang.srt.layers.logits_processor")

    def cap_in_place(logits: Any, cap: float) -> Any:
        return logits.div_(cap).tanh_().mul_(cap)

    processor.fused_softcap = cap_in_place


def leave_widths_by_layer() -> None:
    """Let models have feed-forward layers of several widths (Gemma 3n), which SGLang pads for ranks as one number."""
    widths: Any = importlib.import_module("sglang.srt.configs.update_config")
    pad = widths.update_intermediate_size

    def pad_a_number(model_config: Any, name: str, multiple: int) -> Any:
        # The configuration of a vision tower, which is padded too, has no other inside.
        text = getattr(model_config, "hf_text_config", model_config)
        of_layers = getattr(text, name, None)
        if not isinstance(of_layers, list):
            return pad(model_config, name, multiple)
        if any(width % multiple for width in of_layers):
            raise ValueError(f"{name} {of_layers} are no multiples of {multiple}; use another number of ranks")
        return model_config

    widths.update_intermediate_size = pad_a_number


def read_images_without_torchvision() -> None:
    """Let transformers make processors of models with images without torchvision, which their parts for videos need."""
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.processing_utils import ProcessorMixin

    class NoVideos(ImageProcessingMixin):
        """A processor without an input."""

        model_input_names = ()

    def check(self: Any, name: str, argument: Any) -> Any:
        return NoVideos if isinstance(argument, NoVideos) else original(self, name, argument)

    original = ProcessorMixin.check_argument_for_proper_class
    ProcessorMixin.check_argument_for_proper_class = check
    AutoVideoProcessor.from_pretrained = lambda *_, **__: NoVideos()
    pixtral = importlib.import_module("transformers.models.pixtral")  # whose processor is hidden without torchvision
    pixtral.PixtralProcessor = importlib.import_module(f"{pixtral.__name__}.processing_pixtral").PixtralProcessor


def run_llama_4() -> None:
    """Let Llama 4 rotate and norm queries and keys in float32, and weigh what its experts read.

    Of GPUs it expects rotations in place, elsewhere it rounds what it norms, and SGLang's experts in torch weigh what
    they return alone.
    """
    import torch

    llama4: Any = importlib.import_module("sglang.srt.models.llama4")
    llama4._is_npu = True  # where rotations are not in place
    llama4._is_cuda = True  # where norms are not rounded
    llama4.Llama4MoE._forward_core_shared_routed_overlap = llama4.Llama4MoE._forward_core_normal
    experts: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    forward = experts.moe_forward_native

    def forward_weighed(layer: Any, x: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
        if config.apply_router_weight_on_input:  # of one expert for a token
            x, chosen = x * chosen.topk_weights, chosen._replace(topk_weights=torch.ones_like(chosen.topk_weights))
            config = dataclasses.replace(config, apply_router_weight_on_input=False)
        outputs: torch.Tensor = forward(layer, x, chosen, config)
        return outputs

    experts.moe_forward_native = forward_weighed


class PageableTorch(ModuleType):
    """The module torch, except that what it makes is not pinned, which takes a GPU."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return found

        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return found(*args, **kwargs)

        setattr(self, name, make)
        return make


def run_adapters() -> None:
    """Let SGLang's layers of adapters (LoRA) do without pinned memory, and their kernels without a GPU's name."""
    import torch
    from sglang.kernels.ops.lora.dense import lora_tuning_config

    lora_tuning_config.get_device_name = lambda: "cpu"

    for name in ("layers", "backend.torch_backend", "backend.triton_backend", "backend.chunked_backend"):
        importlib.import_module(f"sglang.srt.lora.{name}").torch = PageableTorch("torch")
    torch.Tensor.pin_memory = lambda self, device=None: self


def run_state_spaces() -> None:
    """Let SGLang's layers of state spaces run by its own Triton kernels: by their first settings, on no GPU by name."""
    import torch
    from triton.runtime.autotuner import Autotuner

    torch.cpu.device = lambda index: nullcontext()  # type: ignore[attr-defined]
    Autotuner._bench = lambda *_, **__: [0.0]  # an interpreter has no time to choose by
    convolutions: Any = importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
    mixer: Any = importlib.import_module("sglang.srt.layers.attention.mamba.mamba")
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        convolution = getattr(convolutions, name)
        setattr(mixer, name, convolution)
        setattr(mixer, f"{name}_triton", convolution)


class PastEvent:
    """An event of CUDA on a device whose work is done when it is asked for."""

    def record(self, stream: Any = None) -> None:
        """Mark a point of a stream."""

    def synchronize(self) -> None:
        """Wait for nothing."""


def send_without_streams() -> None:
    """Let SGLang's prefill servers send rows without CUDA's events and pinned memory."""
    torch_of_prefill: Any = PageableTorch("torch")
    torch_of_prefill.cuda = SimpleNamespace(Event=PastEvent, current_stream=lambda: None)
    prefill: Any = importlib.import_module("sglang.srt.disaggregation.prefill")
    prefill.torch = torch_of_prefill


def __getattr__(name: str) -> Any:
    if name != "TorchPlatform":
        raise AttributeError(name)
    # Not above: SGLang reads entry points before its platforms can be imported.
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class TorchPlatform(CpuDeviceMixin, SRTPlatform):
        """Plain torch; most of SGLang's small index kernels run in Triton's interpreter."""

        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"
        capabilities = PlatformCapabilities(supports_triton=True)

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def apply_server_args_defaults(self, server_args: Any) -> None:
            sparse_attention_in_torch.install_in_launcher()

        def init_backend(self) -> None:
            run_adapters()
            list_slots_in_torch()
            delta_rule_in_torch.install()
            sparse_attention_in_torch.install()
            rotate_in_torch()
            leave_widths_by_layer()
            cap_logits_in_torch()
            run_state_spaces()
            run_llama_4()
            send_without_streams()
            keep_pools_where_lmcache_reads_them()
            if importlib.util.find_spec("mooncake") is None:
                transfer_over_tcp.install()

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def support_mamba_cache_extra_buffer(self) -> bool:
            return True

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "eager"

        def supports_speculative_algorithm(self, algorithm: str) -> bool:
            return True

        def get_speculative_worker_cls(self, algorithm: str) -> None:
            """Return None for SGLang's own worker, whose module needs operators and is imported after this."""
            use_tree_operators_of_triton()

        def get_speculative_cache_locs_fn(self) -> Any:
            return slots_of_drafts

    if importlib.util.find_spec("torchvision") is None:
        read_images_without_torchvision()
    globals()[name] = TorchPlatform
    return TorchPlatform
