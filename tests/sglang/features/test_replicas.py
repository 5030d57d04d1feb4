"""Replicas (data parallelism): each tells the launcher what it serves, and answers as a server alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fixture_types import Json, MixedProfile, ModelFolder, Prompts, RunProgram, SaveProfile, Serve
    from sglang_server import Server

TOKENS = 24


def ask(server: Server, prompts: list[list[int]], replica: int | None = None) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body: Json = {"input_ids": prompts, "sampling_params": sampling}
    answers = server.post("/generate", body if replica is None else {**body, "routed_dp_rank": replica})
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_answer_as_a_server_alone_and_say_what_they_serve(
    ranks: int, replicas_work: None, model_folder: ModelFolder, mixed_profile: MixedProfile,
    save_profile: SaveProfile, prompts: Prompts, serve: Serve,
) -> None:  # fmt: skip
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    profile = mixed_profile(folder)
    flags = ("--kvtuner-profile", str(save_profile(profile)), "--kvtuner-attend", "cache", "--tp-size", str(ranks))
    asked = prompts(40, 9, 70)
    with serve(folder, *flags) as server:
        alone = ask(server, asked)
    with serve(folder, *flags, "--dp-size", "2") as server:
        assert ask(server, asked, 0) == ask(server, asked, 1) == alone
        assert ask(server, asked) == alone
        assert json.loads(server.get("/server_info"))["kvtuner_profile"] == profile.digest
        shown = re.findall(rf"KV cache of rank \d \(TP \d/{ranks},", server.log)
        assert len(shown) == server.log.count("self-test passed") == 2 * ranks


def test_replicas_that_do_not_all_serve_the_profile(run_program: RunProgram) -> None:
    done = run_program(str(Path(__file__).parents[1] / "programs" / "replicas_program.py"))
    assert done.returncode == 0, done.stderr[-3000:]
