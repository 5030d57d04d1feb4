"""Programs that others wrote for such servers run against this one: lm-evaluation-harness and SGLang's benchmark."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from fixture_types import LoadTiny, ModelFolder

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the harness' own imports
def test_the_harness_scores_and_generates_as_transformers_does(
    served: Any, model_folder: ModelFolder, load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    tokenizer = str(model_folder("llama-gqa", chat=True))
    harness = LocalCompletionsAPI(
        base_url=f"{served.url}/v1/completions", model="tiny", tokenizer=tokenizer, max_length=512, batch_size=3
    )
    pairs = [("the fox counts", " 12 lamps"), ("the sailor", " hides"), ("the river", " 7 coins near the tower")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    scores = harness.loglikelihood(asked)

    loaded = load_tiny("llama-gqa", chat=True)
    encode = loaded.tokenizer
    fresh = type(loaded.model)(copy.deepcopy(loaded.model.config))  # the served one's attention is the engine's
    fresh.load_state_dict(loaded.model.state_dict())
    fresh.set_attn_implementation("sdpa")
    for (context, continuation), (score, is_greedy) in zip(pairs, scores, strict=True):
        before, ids = encode(context)["input_ids"], encode(context + continuation)["input_ids"]
        with torch.no_grad():
            logprobs = fresh.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = ids[len(before) :]
        rows = logprobs[len(before) - 1 : -1]
        assert score == pytest.approx(float(rows.gather(1, torch.tensor(wanted).unsqueeze(1)).sum()), abs=1e-3)
        assert is_greedy == (rows.argmax(-1).tolist() == wanted)

    until = Instance("generate_until", {}, ("the fox counts", {"until": ["\n"], "max_gen_toks": 6}), 0)
    (text,) = harness.generate_until([until])
    with torch.no_grad():
        ids = torch.tensor([encode("the fox counts")["input_ids"]])
        output = fresh.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert text == encode.decode(output[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0]


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.parametrize("interface", ["sglang-oai", pytest.param("sglang-oai-chat", marks=pytest.mark.full)])
def test_sglangs_benchmark_measures_it(interface: str, served: Any, model_folder: ModelFolder, tmp_path: Path) -> None:
    result = tmp_path / "result.jsonl"
    path = os.pathsep.join([str(ROOT / "examples" / "sglang_on_cpu"), str(ROOT)])
    command = [
        sys.executable, "-m", "sglang.benchmark.serving", "--backend", interface, "--base-url", served.url,
        "--model", "tiny", "--tokenizer", str(model_folder("llama-gqa", chat=True)), "--dataset-name", "random-ids",
        "--random-input-len", "40", "--random-output-len", "8", "--num-prompts", "12", "--max-concurrency", "4",
        "--random-range-ratio", "1", "--disable-tqdm", "--output-file", str(result),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "no_proxy": "127.0.0.1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(result.read_text())
    assert figures["completed"] == 12
    assert figures["total_output_tokens"] == 96
    assert figures["mean_ttft_ms"] > 0
    assert served.is_idle()
