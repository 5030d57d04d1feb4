"""Speculative decoding: what is answered does not depend on drafts, and drafts are accepted as without packed rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny.draft_models import eagle, eagle3, with_mtp_head
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization

if TYPE_CHECKING:
    from fixture_types import (
        Json,
        MixedLayers,
        ModelFolder,
        ProfileOf,
        Prompts,
        RunProgram,
        SaveProfile,
        Serve,
    )  # fmt: skip

TOKENS = 40
FEW_TOKENS = 16
"""The tokens of an answer with a draft model, whose own attention runs in Triton's interpreter."""
TIE = 0.01
"""Nats between the two likeliest tokens that a flipped code may turn round."""
NGRAM = ("--speculative-algorithm", "NGRAM")
"""Trees of drafts, by the breadth that SGLang gives them."""


@pytest.fixture(scope="module")
def served(
    drafts_work: None,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
) -> tuple[Path, tuple[str, ...]]:
    """A model, and the flags that serve it by a mixed profile."""
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, mixed_layers(config))
    return folder, ("--kvtuner-profile", str(save_profile(profile)))


@pytest.fixture(scope="module")
def repeating(prompts: Prompts) -> list[list[int]]:
    """Prompts that say the same thing several times, so that drafts can be looked up."""
    return [ids * 4 for ids in prompts(9, 14, 20, 5)]


def assert_same(found: list[Json], plain: list[Json]) -> None:
    """Assert the same tokens, unless the two likeliest were all but equal."""
    for answer, single in zip(found, plain, strict=True):
        pairs = enumerate(zip(answer["output_ids"], single["output_ids"], strict=False))
        parting = next((position for position, (a, b) in pairs if a != b), None)
        if parting is None:
            assert len(answer["output_ids"]) == len(single["output_ids"])
        else:
            (first, _, _), (second, _, _) = single["meta_info"]["output_top_logprobs"][parting]
            assert first - second < TIE, (parting, first, second)


def accepted_length(answers: list[Json]) -> float:
    """Tokens of a verification, the one that the target adds included."""
    verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers) / verified


def test_the_cache_of_a_draft_that_nobody_charged(run_program: RunProgram) -> None:
    done = run_program(str(Path(__file__).parents[1] / "programs" / "drafts_program.py"))
    assert done.returncode == 0, done.stderr[-3000:]


# SGLang has trees for pages of one token alone.
@pytest.mark.parametrize(
    ("attend", "page_size", "breadth"),
    [("cache", "1", "10"), ("fresh", "16", "1"), pytest.param("fresh", "1", "10", marks=pytest.mark.full)],
)
def test_ngram_drafts_change_no_answer(
    attend: str,
    page_size: str,
    breadth: str,
    served: tuple[Path, tuple[str, ...]],
    repeating: list[list[int]],
    serve: Serve,
) -> None:
    folder, flags = served
    flags = (*flags, "--kvtuner-attend", attend, "--page-size", page_size, "--disable-radix-cache")
    with serve(folder, *flags) as server:
        plain = server.generate(repeating, TOKENS, top=2)
    with serve(folder, *flags, *NGRAM, "--speculative-ngram-max-bfs-breadth", breadth) as server:
        drafted = [server.generate(repeating, TOKENS, top=2) for _ in range(2)]
    for answers in drafted:
        assert_same(answers, plain)
    # What was answered before is looked up.
    assert accepted_length(drafted[1]) > 2


def test_by_cache_drafts_change_no_answer_whatever_is_hit_evicted_retracted_or_cut(
    served: tuple[Path, tuple[str, ...]], prompts: Prompts, serve: Serve
) -> None:
    folder, flags = served
    flags = (*flags, "--kvtuner-attend", "cache")
    stem = prompts(60)[0]
    requests = [stem[: 5 * index] + tail for index, tail in enumerate(prompts(*range(20, 32), seed=5))]
    with serve(folder, *flags, "--disable-radix-cache", "--chunked-prefill-size", "-1") as server:
        plain = [server.generate([ids], TOKENS, top=2, ignore_eos=False)[0] for ids in requests]
    small = (
        "--max-total-tokens", "448", "--chunked-prefill-size", "48", "--schedule-conservativeness", "0.1",
        "--max-running-requests", "6",
    )  # fmt: skip
    with serve(folder, *flags, *NGRAM, *small) as server:
        for _ in range(2):
            assert_same(server.generate(requests, TOKENS, ignore_eos=False), plain)
        assert "Retract requests" in server.log
        hit = server.generate(requests[-1:], TOKENS)[0]["meta_info"]["cached_tokens"]
    assert hit >= 60


def drafting(algorithm: str, draft: Path, topk: int = 1) -> tuple[str, ...]:
    return (
        "--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft),
        "--speculative-num-steps", "3", "--speculative-eagle-topk", str(topk),
        "--speculative-num-draft-tokens", str(3 + topk),
    )  # fmt: skip


@pytest.fixture(scope="module")
def drafts(
    served: tuple[Path, tuple[str, ...]],
    model_folder: ModelFolder,
    repeating: list[list[int]],
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, tuple[str, ...], tuple[str, ...]]]:
    """Targets, the flags of their profiles, and those of their drafts, by kind."""
    target, flags = served
    folder = tmp_path_factory.mktemp("drafts")
    mimo = with_mtp_head(model_folder("qwen2-bias"), folder / "mimo")
    config = AutoConfig.from_pretrained(mimo)
    of_mimo = ("--kvtuner-profile", str(save_profile(profile_of(config, mixed_layers(config)))))
    # What EAGLE's draft learnt is what the unquantized model says.
    wide = profile_of(AutoConfig.from_pretrained(target), [LayerQuantization(8, 8)] * 4)
    of_wide, learnt = ("--kvtuner-profile", str(save_profile(wide))), eagle(target, folder / "eagle", repeating, TOKENS)
    return {
        "eagle": (target, of_wide, drafting("EAGLE", learnt)),
        "eagle tree": (target, of_wide, drafting("EAGLE", learnt, topk=3)),
        "eagle3": (target, flags, drafting("EAGLE3", eagle3(target, folder / "eagle3"))),
        "mtp": (mimo, of_mimo, drafting("NEXTN", mimo)),
    }


KINDS = {"eagle": 1.3, "eagle tree": 1.3, "eagle3": 1.0, "mtp": 1.0}
"""The least accepted lengths; drafts of the latter two are random."""


@pytest.mark.parametrize(
    "kind", ["eagle", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("eagle tree", "eagle3", "mtp"))]
)
def test_drafts_of_a_model_change_no_answer_and_their_cache_is_charged(
    kind: str,
    drafts: dict[str, tuple[Path, tuple[str, ...], tuple[str, ...]]],
    repeating: list[list[int]],
    serve: Serve,
) -> None:
    folder, flags, draft_flags = drafts[kind]
    flags, few = (*flags, "--kvtuner-attend", "cache"), repeating[:2]
    with serve(folder, *flags) as server:
        plain = server.generate(few, FEW_TOKENS, top=2)
    with serve(folder, *flags, *draft_flags) as server:
        drafted = server.generate(few, FEW_TOKENS, top=2)
        log = server.log
    assert_same(drafted, plain)
    assert accepted_length(drafted) >= KINDS[kind]
    available, tokens = re.search(r"([\d,]+) bytes are available for the KV cache: ([\d,]+) tokens", log).groups()
    row_bytes = number(re.search(r"  ([\d,]+) bytes per token", log)[1])
    config = AutoConfig.from_pretrained(folder)
    of_draft = 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4  # float32
    assert number(available) // (row_bytes + of_draft) == number(tokens)


def number(text: str) -> int:
    return int(text.replace(",", ""))
