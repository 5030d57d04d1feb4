"""``kvtuner generate``: what transformers says, out of every kind of prompt, streamed or as JSON."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import LoadTiny, ModelFolder, ProfileOf, RunCommand

PROMPT = "the fox counts"
LENGTH = ("--max-tokens", "8", "--ignore-eos", "--device", "cpu")


@pytest.fixture
def wanted(load_tiny: LoadTiny) -> str:
    """What the model says after the prompt, by transformers."""
    loaded = load_tiny("llama-gqa", chat=True)
    ids = torch.tensor([loaded.tokenizer(PROMPT)["input_ids"]])
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("sdpa")
    output = loaded.model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    loaded.model.set_attn_implementation(before)
    text: str = loaded.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@pytest.fixture
def folder(model_folder: ModelFolder) -> Path:
    return model_folder("llama-gqa", chat=True)


def test_the_answer_streams_to_stdout_and_facts_to_stderr(run: RunCommand, folder: Path, wanted: str) -> None:
    status, out, err = run("generate", "--model", folder, "--prompt", PROMPT, "--attention", "torch", *LENGTH)
    assert (status, out) == (0, wanted + "\n")
    assert "8 tokens after" in err
    assert "attention by torch" in err


def test_standard_input_is_a_prompt(
    run: RunCommand, folder: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert run("generate", "--model", folder, *LENGTH)[:2] == (0, wanted + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    status, _, err = run("generate", "--model", folder, *LENGTH)
    assert status == 2
    assert "standard input is empty; give --prompt TEXT, --prompts FILE or text there" in err


def test_several_prompts_come_in_their_order(run: RunCommand, folder: Path, wanted: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"a longer text comes first in this file\n\n{PROMPT}\n")
    status, out, _ = run("generate", "--model", folder, "--prompts", file, *LENGTH)
    assert status == 0
    assert out.startswith(">>> a longer text comes first in this file\n")
    assert out.endswith(f">>> {PROMPT}\n{wanted}\n")


def test_conversations_go_through_the_template(run: RunCommand, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    records: list[Any] = [{"messages": [{"role": "user", "content": PROMPT}]}, {"prompt": PROMPT}]
    file.write_text("\n".join(map(json.dumps, records)))
    status, out, _ = run("generate", "--model", folder, "--prompts", file, "--json", *LENGTH)
    talk, text = json.loads(out)["answers"]
    assert status == 0
    assert len(talk["prompt_token_ids"]) > len(text["prompt_token_ids"])
    status, out, _ = run("generate", "--model", folder, "--prompt", PROMPT, "--chat", "--json", *LENGTH)
    assert json.loads(out)["answers"][0]["prompt_token_ids"] == talk["prompt_token_ids"]


def test_a_profile_decides_what_is_stored(
    run: RunCommand, folder: Path, load_tiny: LoadTiny, profile_of: ProfileOf, tmp_path: Path
) -> None:
    loaded = load_tiny("llama-gqa", chat=True)
    profile = profile_of(loaded.model.config, [LayerQuantization(4, 2)] * 3)
    file = tmp_path / "profile.json"
    file.write_bytes(dump_profile(profile))
    flags = ("--model", folder, "--profile", file, "--prompt", PROMPT, "--logprobs", "2", "--seed", "1", "--json")
    status, out, err = run("generate", *flags, *LENGTH)
    assert status == 0, err
    result = json.loads(out)
    assert result["profile"] == profile.digest
    assert result["kv_bytes_per_token"] == profile.bytes_per_token()
    (answer,) = result["answers"]
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 8
    lines = [line.strip(" ,") for line in out.splitlines()]
    for name in ("token_ids", "prompt_token_ids", "logprobs"):
        assert f'"{name}": {json.dumps(answer[name])}' in lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt", "x", "--temperature", "-1"), "temperature must be at least 0, not -1.0"),
        (("--prompt", "x", "--prompts", "y"), "give --prompt or --prompts, one of the two"),
        (("--prompts", "/nowhere/y"), "cannot read --prompts /nowhere/y: No such file or directory; name a file"),
        (("--prompt", "x", "--attention", "sgl_kernel"), "by sgl_kernel was asked for and cannot run here"),
        (("--prompt", "x", "--max-tokens", "9999"), "more than the context of 512"),
        (("--prompt", "x", "--kv-memory", "10"), "hold no page"),
        (("--prompt", "x", "--page-size", "0"), "must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    flags: tuple[str, ...], message: str, run: RunCommand, folder: Path
) -> None:
    status, out, err = run("generate", "--model", folder, "--device", "cpu", *flags)
    assert (status, out) == (2, "")
    assert message in err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["prompts.jsonl", "PROMPTS.JSONL", "prompts.ndjson"])
def test_a_file_that_is_no_jsonl_is_named_by_line(run: RunCommand, folder: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    for text, message in (("{", "line 2 is not JSON"), ('{"text": 1}', "line 2 has neither prompt, a text, nor")):
        file.write_text(f'{{"prompt": "a"}}\n{text}\n')
        status, _, err = run("generate", "--model", folder, "--prompts", file)
        assert status == 2
        assert message in err
