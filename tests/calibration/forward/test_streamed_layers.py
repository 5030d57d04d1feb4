"""A model that is streamed from its files: the numbers of the model in memory, loads counted, memory limited."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracles import all_figures

from kvtuner.calibration.batches import Batch
from kvtuner.calibration.forward import streamed_layers as streaming
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.parallel_sequences import run_sequences
from kvtuner.calibration.forward.streamed_layers import on_disk, streamed_layers_of
from kvtuner.calibration.model_loading import ModelSource, load_model
from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fixture_types import LoadTiny, ModelFolder, RunCommand

pytest.importorskip("accelerate", reason="--stream reads layers by accelerate")

BATCHES = [
    Batch(number, torch.arange(9).unsqueeze(0) * 7 % 50 + number, torch.arange(9).unsqueeze(0)) for number in range(5)
]


def streamed_chain(folder: Path) -> DecoderChain:
    loaded = load_model(ModelSource(str(folder), device="cpu", stream=True))
    return DecoderChain(loaded.model, loaded.shape.cache)


def run_program(*arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, all_figures.__file__, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        # glibc would keep freed weights for itself.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-3000:]}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen2-bias", "gpt-oss", "qwen3-next", "qwen2.5-vl", "gemma4-readers", "gemma3n", "glm-moe-dsa"]
)
def test_all_figures_are_those_of_the_model_in_memory(name: str, model_folder: ModelFolder) -> None:
    whole, streamed = (all_figures.figures_of(str(model_folder(name)), loading) for loading in ("whole", "streamed"))
    assert streamed == whole


@pytest.mark.slow
def test_a_search_writes_the_profile_of_the_model_in_memory(run: RunCommand, tmp_path: Path) -> None:
    common = ["--model", "demo", "--budget", "3bit", "--sequence-length", "64", "--sequences", "2,2,4", "--trials", "6"]
    for name, flags in (("whole", []), ("streamed", ["--stream"])):
        status, _, stderr = run("search", *common, "--no-report", *flags, "--out", tmp_path / name)
        assert status == 0, stderr
    whole, streamed = ((tmp_path / name / "profile.json").read_bytes() for name in ("whole", "streamed"))
    assert streamed == whole
    # The dry run counts how often the layers are read, at most; the phases record how often they were.
    status, stdout, _ = run("search", *common, "--stream", "--dry-run", "--json", "--out", tmp_path / "dry")
    ahead = json.loads(stdout)["weight_reads"]
    calibration = sum(ahead[part] for part in ("statistics", "candidates", "isolated KL"))
    most = {**ahead, "calibration": calibration, "refinement 3bit": ahead["refinement"]}
    events = [json.loads(line) for line in (tmp_path / "streamed/events.jsonl").read_text().splitlines()]
    took = {event["name"]: event["weight_reads"] for event in events if event["event"] == "phase"}
    assert set(took) == {"scale layouts", "calibration", "uniform table", "refinement 3bit", "validation"}
    assert all(reads <= most[name] for name, reads in took.items())
    assert took["scale layouts"] == most["scale layouts"]  # others end early, or need less than the most
    assert ahead["total"] == sum(number for name, number in ahead.items() if name != "total")


def test_sequences_that_run_together_pass_each_layer_once(model_folder: ModelFolder) -> None:
    folder = model_folder("llama-gqa", num_hidden_layers=6)
    chain = streamed_chain(folder)
    streamed = streamed_layers_of(chain.model)
    assert streamed is not None
    before = streamed.num_loads
    traces = list(run_sequences(chain.model, lambda batch: chain.trace(batch.input_ids, batch.position_ids), BATCHES))
    assert len(traces) == len(BATCHES)
    assert streamed.num_loads - before <= 6 + 2  # and what was read ahead where the loading turned

    def back(trace: Any) -> float:
        for layer in reversed(range(6)):
            output = chain.run_layer_exactly(layer, trace.residual[layer], trace.calls[layer])
        return float(output.sum())

    before = streamed.num_loads
    list(run_sequences(chain.model, back, traces))
    assert streamed.num_loads - before <= 6 + 2


def test_runs_that_begin_at_several_layers_pass_each_layer_once(model_folder: ModelFolder) -> None:
    chain = streamed_chain(model_folder("llama-gqa", num_hidden_layers=6))
    streamed = streamed_layers_of(chain.model)
    assert streamed is not None
    trace = chain.trace(BATCHES[0].input_ids, BATCHES[0].position_ids)  # which leaves the last layer in memory
    before = streamed.num_loads
    starts = (0, 5, 2, 3, 0, 4)
    found = list(run_sequences(chain.model, lambda n: chain.run(trace.residual[n], trace.calls, start=n), starts))
    assert streamed.num_loads - before <= 6 + 1
    for final in found:
        torch.testing.assert_close(final, trace.final, rtol=0, atol=1e-5)


def test_no_two_sequences_run_at_once(model_folder: ModelFolder) -> None:
    chain, inside = streamed_chain(model_folder()), threading.Lock()

    def run(batch: Batch) -> torch.Tensor:
        for layer in range(len(chain.layers)):
            streamed_layers_of(chain.model).need(layer)
            assert inside.acquire(blocking=False)
            present = [not weight.is_meta for weight in chain.layers[layer].parameters()]
            inside.release()
            assert all(present)
        return batch.input_ids

    assert len(list(run_sequences(chain.model, run, BATCHES))) == len(BATCHES)


def test_more_sequences_than_may_pass_together_run_in_turn(
    model_folder: ModelFolder, load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SEQUENCES_AT_ONCE", 2)
    chain = streamed_chain(model_folder())
    whole = DecoderChain(load_tiny().model, load_tiny().shape.cache)
    finals = run_sequences(chain.model, lambda batch: chain.trace(batch.input_ids, batch.position_ids).final, BATCHES)
    for batch, final in zip(BATCHES, finals, strict=True):
        torch.testing.assert_close(final, whole.trace(batch.input_ids, batch.position_ids).final)


@pytest.mark.parametrize("failing", [0, 2, 4])
def test_the_first_that_fails_decides_and_no_thread_is_left(failing: int, model_folder: ModelFolder) -> None:
    chain = streamed_chain(model_folder())

    def run(batch: Batch) -> torch.Tensor:
        trace = chain.trace(batch.input_ids, batch.position_ids)
        if batch.index >= failing:
            raise ValueError(str(batch.index))
        return trace.final

    with pytest.raises(ValueError, match=str(failing)):
        list(run_sequences(chain.model, run, BATCHES))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtuner-stream")]
    assert len(
        list(run_sequences(chain.model, lambda batch: chain.trace(batch.input_ids, batch.position_ids), BATCHES))
    )


def test_files_that_are_gone_end_all_sequences_with_that_error(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(), folder)
    chain = streamed_chain(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError):
        list(run_sequences(chain.model, lambda batch: chain.trace(batch.input_ids, batch.position_ids), BATCHES))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtuner-stream")]


def test_tensors_on_disk_are_equal_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(1, 5, 7).to(dtype)
        stored = on_disk(tensor)
        assert torch.equal(stored, tensor)
        assert stored.dtype == dtype
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_streamed_is_refused_by_name(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ModelSource(str(model_folder()), device="cpu", stream=True)
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "accelerate" else find(name))
        with pytest.raises(UnsupportedModelError, match="pip install accelerate"):
            load_model(source)
    quantized = model_folder("llama-gqa", seed=3)
    config = json.loads((quantized / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (quantized / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="is quantized"):
        load_model(ModelSource(str(quantized), device="cpu", stream=True))


@pytest.fixture
def memory_cgroup() -> Iterator[Callable[[int], Path]]:
    """`memory_cgroup(limit)`: the file by which a process joins a new cgroup of so many bytes."""
    root = Path("/sys/fs/cgroup")
    is_first = (root / "memory").is_dir()
    parent, limit_file = (root / "memory", "memory.limit_in_bytes") if is_first else (root, "memory.max")
    folder = parent / f"kvtuner-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit_file).write_text(str(1 << 40), encoding="ascii")
    except OSError as error:
        pytest.skip(f"this machine lets no test limit memory: {error}")

    def limited(limit: int) -> Path:
        (folder / limit_file).write_text(str(limit), encoding="ascii")
        return folder / "cgroup.procs"

    yield limited
    for _ in range(100):  # a process that was killed leaves it a little later
        try:
            folder.rmdir()
            break
        except OSError:
            time.sleep(0.1)


@pytest.mark.slow
def test_a_model_ten_times_the_memory_gives_the_figures_of_the_model_in_memory(
    memory_cgroup: Callable[[int], Path], make_model: Callable[..., Any], make_tokenizer: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "large"
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = make_model("llama-gqa", **sizes, head_dim=64, num_hidden_layers=64)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    assert model.dtype == torch.float32
    # Loaded as float32: weights that lie in the files as they are used would be the system's to drop.
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="30MB")
    make_tokenizer().save_pretrained(folder)
    del model
    whole = run_program(folder, "whole")
    procs = memory_cgroup(num_bytes // 10)
    streamed = run_program(folder, "streamed", procs)
    assert streamed == whole
    with pytest.raises(AssertionError, match="status -9"):  # the limit is one that the model in memory exceeds
        run_program(folder, "whole", procs)
