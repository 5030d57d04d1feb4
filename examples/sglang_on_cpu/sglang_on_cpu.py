"""A platform for SGLang that runs every layer in plain torch, for a machine without a GPU.

Active in every process that has this folder on its PYTHONPATH: the folder is also the metadata of a distribution with
an entry point in SGLang's group of platforms. For trying things out and for tests; nothing here is fast.
"""

from __future__ import annotations

from typing import Any


def activate() -> str:
    """Name of the platform, for SGLang."""
    return "sglang_on_cpu.TorchPlatform"


def __getattr__(name: str) -> Any:
    if name != "TorchPlatform":
        raise AttributeError(name)
    # Not above: SGLang reads entry points before its platforms can be imported.
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class TorchPlatform(CpuDeviceMixin, SRTPlatform):
        """Plain torch; SGLang's small index kernels run in Triton's interpreter."""

        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"
        capabilities = PlatformCapabilities(supports_triton=True)

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "eager"

    globals()[name] = TorchPlatform
    return TorchPlatform
