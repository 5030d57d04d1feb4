"""The program that trains the demo model writes a model of the kind that is shipped."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.model_loading import DEMO_MODEL, LoadedModel, ModelSource, load_model
from tools.train_demo_model import KEY_BIAS, add_key_biases

ROOT = Path(__file__).resolve().parents[2]


def test_the_key_biases_are_qwens_and_change_no_prediction() -> None:
    demo = load_model(ModelSource("demo", device="cpu"))

    def norms(loaded: LoadedModel) -> list[float]:
        return [float(layer.self_attn.k_proj.bias.detach().norm()) for layer in loaded.model.get_decoder().layers]

    without = load_model(ModelSource("demo", device="cpu"))
    add_key_biases(without.model, -KEY_BIAS)
    first, *middle, last = norms(demo)
    assert min(first, last) > 10 * statistics.median(middle)
    assert max(norms(without)) < 10
    ids = load_corpus(CorpusSource(num_sequences=(4, 1, 1)), demo.tokenizer).splits["calibrate"][:, :512]
    with torch.no_grad():
        wanted, found = (torch.log_softmax(m.model(ids).logits.double(), dim=-1) for m in (without, demo))
    kl = (wanted.exp() * (wanted - found)).sum(dim=-1).mean()
    nll = [-x[:, :-1].gather(-1, ids[:, 1:, None]).mean() for x in (wanted, found)]
    assert kl < 0.01
    assert abs(nll[1] - nll[0]) < 0.01


@pytest.mark.full
def test_the_training_script_writes_a_model_of_the_kind_that_is_shipped(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    done = subprocess.run(
        [sys.executable, "-m", "tools.train_demo_model", "--out", "model", "--steps", "2", "--long-from", "0.5",
         "--threads", "1"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["step"] == 2
    assert last["loss"] == pytest.approx(math.log(1024), abs=0.5)  # of guessing among 1,024 tokens
    written, shipped = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", DEMO_MODEL))
    assert {name: (t.dtype, t.shape) for name, t in written.items()} == {
        name: (torch.bfloat16, t.shape) for name, t in shipped.items()
    }
    for layer in range(9):
        bias = written[f"model.layers.{layer}.self_attn.k_proj.bias"].float()
        assert float(bias.abs().max()) == pytest.approx(KEY_BIAS if layer in (0, 8) else 0, abs=0.25), layer
    config, as_shipped = (Qwen2Config.from_pretrained(folder) for folder in (tmp_path / "model", DEMO_MODEL))
    assert config.to_dict() == as_shipped.to_dict()
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (256, 4, 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert (type(model).__name__, model.dtype) == ("Qwen2ForCausalLM", torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "def answer():\n    return 4711\n"
    ids = tokenizer(text).input_ids
    assert (tokenizer.vocab_size, ids[0]) == (1024, config.bos_token_id)
    assert tokenizer.decode(ids[1:]) == text
    assert {"4", "7", "1"} <= set(tokenizer.convert_ids_to_tokens(ids))
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()
