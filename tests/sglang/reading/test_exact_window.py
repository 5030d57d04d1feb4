"""A served exact window: each query reads what its request has copies of, which a forward without a cache predicts."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from uncached_forward import uncached_logits

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fixture_types import Compare, Json, MixedLayers, ModelFolder, ProfileOf, Prompts, SaveProfile, Serve, ServePair
    from sglang_server import Server
    from torch import Tensor

    from kvtuner.exported_configs.profile.profile import Profile

WINDOW = ExactWindow(12, 3)
CHUNK = 64
TOKENS = 14
"""More than the last tokens of the window, so that copies are replaced while answers grow."""

OTHER_SCHEDULES = ("--disable-overlap-schedule", "--schedule-policy=lpm")


@dataclass(frozen=True)
class Case:
    """A model, and a profile with a window that is served."""

    folder: Path
    profile: Profile
    flags: tuple[str, ...]
    model: Any


@pytest.fixture(scope="module")
def case(
    model_folder: ModelFolder, profile_of: ProfileOf, mixed_layers: MixedLayers, save_profile: SaveProfile
) -> Case:
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder)
    layers = [LayerQuantization(2, 2), *mixed_layers(config)[1:]]
    profile = profile_of(config, layers, window=WINDOW, fit="least_squares")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Case(folder, profile, ("--kvtuner-profile", str(save_profile(profile)), "--enable-metrics"), model)


@pytest.fixture(scope="module")
def server(case: Case, serve: Serve) -> Iterator[Server]:
    """A server that cuts prompts into chunks, each exact within itself."""
    with serve(case.folder, *case.flags, "--chunked-prefill-size", str(CHUNK), "--page-size", "1") as server:
        yield server


def window_reads(tokens: int, at_hand_from: int = 0) -> Tensor:
    """The pairs of query and key that are exact by the window alone, without copies of tokens before `at_hand_from`."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    near = (query - key < WINDOW.residual_length) | (key < WINDOW.sinks)
    return near & ((key >= at_hand_from) | (query < at_hand_from))


def fresh_reads(tokens: int, cuts: Sequence[int], at_hand_from: int = 0) -> Tensor:
    """The pairs of `window_reads` and those of each chunk of the prompt within itself."""
    exact = window_reads(tokens, at_hand_from)
    for start, stop in itertools.pairwise(cuts):
        exact[start:stop, start:stop] = True
    return exact


@torch.no_grad()
def divergences(case: Case, ids: list[int], answer: Json, *reads: Tensor) -> list[float]:
    """KL of an answer's predictions from those of forwards that read some pairs exactly."""
    output, vocab_size = answer["output_ids"], case.model.config.vocab_size
    served = torch.full((len(output), vocab_size), torch.nan, dtype=torch.float64)
    for position, top in enumerate(answer["meta_info"]["output_top_logprobs"]):
        served[position, [token for _, token, _ in top]] = torch.tensor([p for p, _, _ in top]).double()
    assert not served.isnan().any()
    tokens = torch.tensor([[*ids, *output[:-1]]])
    profile, found = case.profile, []
    specs = [{side: profile.quant_spec(layer, side) for side in ("k", "v")} for layer in range(len(profile.pairs))]
    for exact in reads:
        logits = uncached_logits(case.model, tokens, specs, exact[: tokens.shape[1], : tokens.shape[1]])
        wanted = logits[0, len(ids) - 1 :].double().log_softmax(-1)
        found.append((wanted.exp() * (wanted - served)).sum(-1).mean().item())
    return found


def assert_reads(case: Case, ids: list[int], answer: Json, exact: Tensor, *others: Tensor) -> None:
    """Assert that an answer's queries read these pairs exactly, and not those of another reading."""
    right, *wrong = divergences(case, ids, answer, exact, *others)
    assert right <= 0.02 * min(wrong), (right, wrong)
    assert min(wrong) > 1e-4


def ask(case: Case, server: Server, prompts: list[list[int]], num_tokens: int = TOKENS) -> list[Json]:
    return server.generate(prompts, num_tokens, top=case.model.config.vocab_size)


def test_a_server_agrees_with_the_transformers_host(
    case: Case, server: Server, compare: Compare, prompts: Prompts
) -> None:
    agreement = compare(server, case.folder, case.profile, prompts(5, 1, 17, 33), 40)
    in_chunks = compare(server, case.folder, case.profile, prompts(150, 71, seed=1), 20, CHUNK)
    for each in (agreement, in_chunks):
        assert each.own > 1e-4
        assert each.divergence <= 0.02 * each.own + 1e-6, each
        assert each.same_argmax >= 0.995, each


def test_log_and_metrics_say_what_copies_take(case: Case, server: Server) -> None:
    heads, channels, layers = 2, case.profile.geometry.head_dim, 3  # the last of four layers is of 16 bits
    of_request = WINDOW.num_tokens * (layers * 2 * heads * channels * 4 + 4 * 4)
    slots = 8 + 1  # of --max-running-requests, and one for tokens that pad a graph
    assert f"exact copies of rank 0: {WINDOW}, {of_request:,} bytes for each of {slots} request slots" in server.log
    metrics = server.get("/metrics")
    rank = f'digest="{case.profile.digest}",pp_rank="0",tp_rank="0"'
    assert f"kvtuner_window_bytes{{{rank}}} {slots * of_request:.1f}" in metrics
    assert f"kvtuner_window_tokens{{{rank}}} {WINDOW.num_tokens:.1f}" in metrics


def test_beam_search_is_refused_by_name(server: Server, prompts: Prompts) -> None:
    sampling = {"beam_width": 2, "max_new_tokens": 4}
    with pytest.raises(HTTPError) as refusal:
        server.post("/generate", {"input_ids": prompts(9)[0], "sampling_params": sampling})
    assert f"not supported with an exact window ({WINDOW})" in refusal.value.read().decode()


def test_chunks_read_their_own_requests_copies_of_earlier_chunks(case: Case, server: Server, prompts: Prompts) -> None:
    server.flush()
    (ids,) = prompts(150, seed=3)
    (answer,) = ask(case, server, [ids])
    total, cuts = len(ids) + TOKENS, [0, 64, 128, 150]
    without = fresh_reads(total, cuts)
    without[: len(ids)] &= torch.block_diag(*[torch.ones(n, n) for n in (64, 64, 22, TOKENS)]).bool()[: len(ids)]
    assert_reads(case, ids, answer, fresh_reads(total, cuts), fresh_reads(total, [0, 150]), without)


@pytest.mark.parametrize("attend", ["fresh", pytest.param("cache", marks=pytest.mark.full)])
def test_the_kernels_read_it_too(attend: str, case: Case, serve: Serve, prompts: Prompts) -> None:
    ids, cuts, total = prompts(44, seed=3)[0], [0, 32, 44], 44 + 3
    flags = ("--kvtuner-attend", attend, "--chunked-prefill-size", "32")
    with serve(case.folder, *case.flags, *flags, KVTUNER_ATTENTION="triton") as server:
        (answer,) = ask(case, server, [ids], 3)
        log = server.log
    assert f"attention triton, attend {attend}, self-test passed" in log
    if attend == "fresh":
        blocks = (torch.ones(32, 32), torch.ones(12, 12), torch.zeros(3, 3))
        assert_reads(case, ids, answer, fresh_reads(total, cuts), torch.block_diag(*blocks).bool())
    else:
        assert_reads(case, ids, answer, window_reads(total), torch.zeros(total, total, dtype=torch.bool))


def test_what_was_hit_is_read_from_rows(case: Case, server: Server, prompts: Prompts) -> None:
    server.flush()
    (ids,) = prompts(60, seed=6)
    (first,) = ask(case, server, [ids])
    again = [*ids, *first["output_ids"][:5], *prompts(4, seed=7)[0]]
    (answer,) = ask(case, server, [again])
    hit = answer["meta_info"]["cached_tokens"]
    assert hit == 65
    total = len(again) + TOKENS
    exact, unbroken = window_reads(total, hit), window_reads(total)
    for reads in (exact, unbroken):
        reads[:60, :60] = True
        reads[hit : len(again), hit : len(again)] = True
    assert_reads(case, again, answer, exact, unbroken)


def test_what_comes_back_from_a_lower_tier_is_read_from_rows(case: Case, serve: Serve, prompts: Prompts) -> None:
    tiers = ("--enable-hierarchical-cache", "--hicache-ratio", "3", "--enable-cache-report", "--page-size", "16")
    ids = prompts(60, seed=6)[0]
    with serve(case.folder, *case.flags, *tiers, "--max-total-tokens", "256") as server:
        (first,) = ask(case, server, [ids])
        again = [*ids, *first["output_ids"][:5], *prompts(4, seed=7)[0]]
        for other in prompts(*[100] * 4, seed=11):
            ask(case, server, [other])
        (answer,) = ask(case, server, [again])
    hit = answer["meta_info"]["cached_tokens"]
    assert (hit, answer["meta_info"]["cached_tokens_details"]["host"]) == (64, 64)
    exact, unbroken = (window_reads(len(again) + TOKENS, at_hand_from) for at_hand_from in (hit, 0))
    for reads in (exact, unbroken):
        reads[:60, :60] = True
        reads[hit : len(again), hit : len(again)] = True
    assert_reads(case, again, answer, exact, unbroken)


def test_a_prompt_that_another_server_computed_is_read_from_rows_whoever_had_its_slot(
    case: Case, serve_pair: ServePair, prompts: Prompts
) -> None:
    # One request runs, and two more slots are for those that are transferred meanwhile.
    one = ("--max-running-requests", "1", "--page-size", "1")
    shorter, (ids,) = prompts(*[34] * 4, seed=11), prompts(44, seed=6)
    with serve_pair(case.folder, *case.flags, *one) as pair:
        for other in shorter:
            pair.generate([other], TOKENS)  # leaves copies of positions at which the next request has rows
        (answer,) = pair.generate([ids], TOKENS, top=case.model.config.vocab_size)
        log = pair.decode.log
    assert f"prompts come here as rows, so that of {WINDOW}" in log
    assert "for each of 4 request slots" in log
    exact, unbroken = (window_reads(len(ids) + TOKENS, at_hand_from) for at_hand_from in (len(ids), 0))
    for reads in (exact, unbroken):
        reads[: len(ids), : len(ids)] = True
    output, tops = answer["output_ids"], answer["meta_info"]["output_top_logprobs"]
    later = {"output_ids": output[1:], "meta_info": {"output_top_logprobs": tops[1:]}}
    assert_reads(case, [*ids, output[0]], later, exact, unbroken)


@pytest.mark.parametrize(
    "options",
    [("--enable-mixed-chunk",), *(pytest.param((flag,), marks=pytest.mark.full) for flag in OTHER_SCHEDULES)],
    ids=str,
)
def test_without_hits_by_cache_company_slots_and_cuts_do_not_matter(
    options: tuple[str, ...], case: Case, serve: Serve, prompts: Prompts
) -> None:
    flags = ("--kvtuner-attend", "cache", "--disable-radix-cache", "--chunked-prefill-size", "32", *options)
    requests = list(prompts(*range(3, 99, 6), seed=5))
    growing = list(prompts(*[40] * 6, seed=9))
    with serve(case.folder, *case.flags, *flags, "--max-running-requests", "3", "--max-total-tokens", "512") as server:
        assert "attend cache" in server.log
        with ThreadPoolExecutor(4) as others:
            aborted = [
                others.submit(
                    server.post,
                    "/generate",
                    {
                        "input_ids": ids,
                        "rid": f"gone-{index}",
                        "sampling_params": {
                            "max_new_tokens": 300,
                            "ignore_eos": True,
                            "temperature": 0,
                        },
                    },
                )
                for index, ids in enumerate(prompts(30, 9, 20, seed=8))
            ]
            answers = [others.submit(ask, case, server, [ids]) for ids in requests[:6]]
            for index in range(len(aborted)):
                server.post("/abort_request", {"rid": f"gone-{index}"})
            found = [answer.result()[0] for answer in answers]
        found += ask(case, server, requests[6:])
        # All fit into the pool at first, and not with their answers: some are retracted.
        long = server.generate(growing, 130, top=case.model.config.vocab_size, ignore_eos=False)
        log = server.log
    assert re.search(r"Retract|retract", log), "no request was retracted"
    for ids, answer in zip([*requests, *growing], [*found, *long], strict=True):
        total = len(ids) + len(answer["output_ids"])
        assert_reads(case, ids, answer, window_reads(total), torch.zeros(total, total, dtype=torch.bool))
