"""An attention backend is one row: it is chosen by name or device, made when it is used, and refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.errors import ServingError
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader import attention_backends
from kvtuner.runtime_loader.attention_backends import AttentionBackend, backend_for, latent_backend, register_backend
from kvtuner.runtime_loader.cpu import library
from kvtuner.runtime_loader.cpu.latent_attention import LatentAttention
from kvtuner.runtime_loader.host_tier.transfer import TorchMover
from kvtuner.runtime_loader.kernels.latents.triton_latents import TritonLatentAttention
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")


class FloatRows(TorchAttention):
    """A toy: it counts what it decodes."""

    name = "toy"

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, q: torch.Tensor, *arguments: object, **named: object) -> torch.Tensor:
        self.decoded += len(q)
        return super().decode(q, *arguments, **named)  # type: ignore[arg-type]


@pytest.fixture
def toy() -> Iterator[AttentionBackend]:
    backend = AttentionBackend("toy", ("cpu", "meta"), lambda _: FloatRows())
    register_backend(backend)
    yield backend
    del attention_backends._BACKENDS["toy"]


def test_a_registered_backend_is_chosen_by_name_and_attends(toy: AttentionBackend) -> None:
    chosen = backend_for(CPU, "toy")
    assert chosen is toy
    assert chosen.make_mover is TorchMover
    attention = chosen.make(CPU)
    generator = torch.Generator().manual_seed(0)
    row_format = RowFormat(2, 16, QuantSpec(8))
    keys, values = (
        PackedRows(torch.zeros(8, row_format.row_bytes(torch.float32), dtype=torch.uint8), row_format) for _ in range(2)
    )
    slots, k, v = torch.tensor([3, 5]), *(torch.randn(2, 2, 16, generator=generator) for _ in range(2))
    attention.prepare([(keys, values)], 4, 1)
    attention.store(keys, values, slots, k, v)
    q = torch.randn(1, 4, 16, generator=generator)
    out = attention.decode(q, keys, values, torch.tensor([0, 2]), slots, ScoreScaling(0.25))
    expected = torch.softmax(torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.25, -1)
    torch.testing.assert_close(
        out, torch.einsum("hqk,khd->qhd", expected, v.repeat_interleave(2, 1)), atol=0.02, rtol=0
    )
    assert isinstance(attention, FloatRows)
    assert attention.decoded == 1


def test_a_backend_is_never_taken_unasked_unless_it_says_so(toy: AttentionBackend) -> None:
    assert backend_for(CPU).name in ("cpu", "torch")
    assert backend_for(torch.device("cuda")).name == "triton"
    with pytest.raises(AssertionError, match="there is an attention backend toy already"):
        register_backend(toy)


@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "flash"), ("cuda", "torch"), ("xpu", None), ("xpu", "triton"), ("cuda", "toy")]
)
def test_a_backend_that_does_not_run_there_is_refused(toy: AttentionBackend, device: str, name: str | None) -> None:
    refusal = f"KVTUNER_ATTENTION={name} is no implementation of attention on {device}; unset it"
    with pytest.raises(ServingError, match=refusal):
        backend_for(torch.device(device), name)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine that has no C++ compiler, for a user who compiled nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    attention_backends._say_once.cache_clear()
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def test_without_a_compiler_torch_attends_and_one_line_says_so(
    without_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert [backend_for(CPU).name for _ in range(2)] == ["torch", "torch"]
    (line,) = caplog.messages
    assert line.startswith("kvtuner: attention is torch and not cpu: there is no C++ compiler: install g++")


def test_without_a_compiler_the_library_is_refused_by_name(without_compiler: None) -> None:
    with pytest.raises(ServingError, match="there is no C\\+\\+ compiler: install g\\+\\+ 12 or newer"):
        backend_for(CPU, "cpu")


def test_the_kernels_are_refused_on_a_processor_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ServingError, match="the Triton kernels do not run on cpu"):
        backend_for(CPU, "triton").make(CPU)


def test_the_kernels_are_refused_on_a_gpu_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ServingError, match="never tried on a GPU of AMD"):
        backend_for(torch.device("cuda"))


def test_latents_are_read_in_torch_on_a_processor_and_by_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wanted in ((None, LatentAttention), ("torch", LatentAttention), ("triton", TritonLatentAttention)):
        make = latent_backend(CPU, name).make_of_latents
        assert make is not None and isinstance(make(CPU), wanted)
    monkeypatch.setattr(Device, "of", lambda _: Device("sm_90", 132))
    assert latent_backend(torch.device("cuda")).name == "triton"
    monkeypatch.setattr(Device, "of", lambda _: Device("sm_100", 148))
    with pytest.raises(ServingError, match="the kernel of latents has no settings for sm_100, only for sm_80, "):
        latent_backend(torch.device("cuda"))
    with pytest.raises(
        ServingError, match=r"nothing reads latents \(MLA\) on mps, only torch on cpu and triton on cuda"
    ):
        latent_backend(torch.device("mps"))
    with pytest.raises(ServingError, match=r"KVTUNER_ATTENTION=cpu does not read latents .*; unset KVTUNER_ATTENTION"):
        latent_backend(CPU, "cpu")


def test_kernels_do_not_read_latents_on_a_gpu_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ServingError, match="the kernels were never tried on a GPU of AMD"):
        latent_backend(torch.device("cuda"))
