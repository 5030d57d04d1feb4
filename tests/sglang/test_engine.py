"""SGLang's offline engine serves a profile, by a variable or by `engine`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import catalogue_file
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import MixedLayers, ModelFolder, ProfileOf, Prompts, RunProgram, SaveProfile

PROGRAM = """
import json, os, sys
import sglang
from kvtuner.runtime_loader.sglang import engine

if __name__ == "__main__":
    model, profile, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    arguments = dict(
        model_path=model, device="cpu", dtype="float32", disable_cuda_graph=True, max_total_tokens=1024,
        max_running_requests=4, mem_fraction_static=0.5, log_level="info",
    )
    llm = engine(profile, **arguments) if profile else sglang.Engine(**arguments)
    answer = llm.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True})
    print("ANSWER", json.dumps(answer["output_ids"]), [name for name in os.environ if name == "KVTUNER_SERVING"])
    llm.shutdown()
"""


@pytest.mark.parametrize("named_by", ["variable", "function"])
def test_an_engine_answers_as_the_transformers_host(
    named_by: str,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    prompts: Prompts,
    run_program: RunProgram,
    tmp_path: Path,
) -> None:
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    profile = profile_of(AutoConfig.from_pretrained(folder), mixed_layers(model.config))
    path = str(save_profile(profile))
    (ids,) = prompts(30)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {"KVTUNER_PROFILE": path} if named_by == "variable" else {}
    named = "" if named_by == "variable" else path
    done = run_program(str(program), str(folder), named, json.dumps(ids), **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    cache = KVTunerCache.from_profile(profile, model.config)
    expected = model.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, past_key_values=cache, eos_token_id=None
    )
    assert answer == f"ANSWER {json.dumps(expected[0, 30:].tolist())} []"
    assert profile.digest in done.stdout + done.stderr


def test_an_engine_whose_schedulers_load_no_plugin_is_refused(
    model_folder: ModelFolder, profile_of: ProfileOf, save_profile: SaveProfile, run_program: RunProgram, tmp_path: Path
) -> None:
    folder = model_folder("llama-gqa")
    path = save_profile(profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(4, 4)] * 3))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_program(str(program), str(folder), str(path), "[5, 6, 7]", SGLANG_PLUGINS="sglang_on_cpu")
    assert done.returncode != 0
    assert "ANSWER" not in done.stdout
    assert "ServingError: scheduler 0 does not serve the profile: its process did not load" in done.stderr


@pytest.mark.parametrize("named_by", ["variable", "function"])
def test_an_engine_serves_the_catalogues_profile_of_its_model(
    named_by: str, run_program: RunProgram, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    digest = load_profile(catalogue_file("demo-4bit")).digest
    named = f"auto#{digest}"
    given, variables = ("", {"KVTUNER_PROFILE": named}) if named_by == "variable" else (named, {})
    done = run_program(str(program), str(DEMO_MODEL), given, "[5, 6, 7]", **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ANSWER" in done.stdout and digest in done.stdout + done.stderr
