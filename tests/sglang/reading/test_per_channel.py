"""Keys per channel served: full groups are read from rows, and tokens of others from the copies of their request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from uncached_forward import exact_pairs, uncached_logits

from kvtuner.exported_configs.profile.build import LayerQuantization, uniform_profile
from kvtuner.precision import ExactWindow, PrecisionPair, ScaleLayout
from kvtuner.runtime_loader.attention_backends import backend_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fixture_types import Compare, Json, ModelFolder, ProfileOf, Prompts, Refused, SaveProfile, Serve
    from sglang_server import Server
    from torch import Tensor

    from kvtuner.exported_configs.profile.profile import Profile

GROUP = 16
WINDOW = ExactWindow(19, 2)
CHUNK = 64
PAGES = ("--page-size", str(2 * GROUP))


@dataclass(frozen=True)
class Case:
    """A model, and a profile of keys per channel."""

    folder: Path
    profile: Profile
    model: Any


@pytest.fixture(scope="module")
def case(model_folder: ModelFolder, profile_of: ProfileOf) -> Case:
    folder = model_folder("llama-gqa", num_hidden_layers=3)
    like = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(2, 4)] * 3)
    profile = uniform_profile(
        like.to_geometry(), PrecisionPair(2, 4), like.model, k_layout=ScaleLayout(GROUP, granularity="per_channel"),
        window=WINDOW,
    )  # fmt: skip
    return Case(folder, profile, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def file(case: Case, save_profile: SaveProfile) -> str:
    return str(save_profile(case.profile))


@pytest.fixture(scope="module")
def server(case: Case, file: str, serve: Serve) -> Iterator[Server]:
    """A server that cuts prompts into chunks, each exact within itself."""
    flags = ("--kvtuner-profile", file, "--chunked-prefill-size", str(CHUNK))
    with serve(case.folder, *flags, *PAGES) as server:
        yield server


@torch.no_grad()
def divergence(case: Case, ids: list[int], answer: Json, exact: Tensor, specs: list[dict[str, Any]]) -> float:
    """KL of an answer's predictions from those of a forward without a cache that reads some pairs exactly."""
    output, vocab_size = answer["output_ids"], case.model.config.vocab_size
    served = torch.full((len(output), vocab_size), torch.nan, dtype=torch.float64)
    for position, top in enumerate(answer["meta_info"]["output_top_logprobs"]):
        served[position, [token for _, token, _ in top]] = torch.tensor([p for p, _, _ in top]).double()
    tokens = torch.tensor([[*ids, *output[:-1]]])
    logits = uncached_logits(case.model, tokens, specs, exact[: tokens.shape[1], : tokens.shape[1]])
    wanted = logits[0, len(ids) - 1 :].double().log_softmax(-1)
    return float((wanted.exp() * (wanted - served)).sum(-1).mean())


def assert_reads(case: Case, ids: list[int], answer: Json, exact: Tensor) -> None:
    """Assert that an answer read these pairs exactly, and the others by groups of a channel and not by tokens."""
    layers, per_token = range(len(case.profile.pairs)), case.profile.quant_spec(0, "v")
    specs = [{side: case.profile.quant_spec(layer, side) for side in ("k", "v")} for layer in layers]
    right = divergence(case, ids, answer, exact, specs)
    wrong = divergence(case, ids, answer, exact, [{**spec, "k": per_token} for spec in specs])
    assert right <= 0.02 * wrong and wrong > 1e-4, (right, wrong)


def ask(case: Case, server: Server, prompts: list[list[int]], num_tokens: int) -> list[Json]:
    return server.generate(prompts, num_tokens, top=case.model.config.vocab_size)


def test_a_server_agrees_with_the_transformers_host(
    case: Case, server: Server, compare: Compare, prompts: Prompts
) -> None:
    # Up to a page of 32 tokens: the server counts chunks by pages, and would cut 33 tokens beside others.
    agreement = compare(server, case.folder, case.profile, prompts(5, 1, 17, 31, 20, 32), 60)
    in_chunks = compare(server, case.folder, case.profile, prompts(150, 71, 48, seed=1), 20, CHUNK)
    for each in (agreement, in_chunks):
        assert each.own > 1e-4
        assert each.divergence <= 0.02 * each.own + 1e-6, each
        assert each.same_argmax >= 0.995, each
    attention = backend_for(torch.device("cpu")).name
    assert f"attention {attention}, attend fresh, self-test passed" in server.log
    per_token = case.profile.sizes().num_bytes
    assert f"{per_token:,} bytes per token" in server.log, "the byte formula's"


@pytest.mark.full
def test_the_kernels_agree_too(case: Case, file: str, serve: Serve, compare: Compare, prompts: Prompts) -> None:
    flags = ("--kvtuner-profile", file, "--chunked-prefill-size", str(CHUNK))
    with serve(case.folder, *flags, *PAGES, KVTUNER_ATTENTION="triton") as server:
        agreement = compare(server, case.folder, case.profile, prompts(5, 31, seed=1), 20)
        in_chunks = compare(server, case.folder, case.profile, prompts(71, seed=1), 6, CHUNK)
        assert "attention triton, attend fresh, self-test passed" in server.log
    assert agreement.is_near, agreement
    assert in_chunks.is_near, in_chunks


def test_chunks_and_answers_fill_groups_of_their_own_request(case: Case, server: Server, prompts: Prompts) -> None:
    server.flush()
    for ids in prompts(150, 3, 31, 64, seed=3):
        (answer,) = ask(case, server, [ids], 40)
        cuts = [*range(0, len(ids), CHUNK), len(ids)]
        assert_reads(case, ids, answer, exact_pairs(WINDOW, len(ids) + 40, cuts))


def test_a_prefix_is_shared_by_whole_pages(case: Case, server: Server, prompts: Prompts) -> None:
    server.flush()
    (ids,) = prompts(60, seed=6)
    (first,) = ask(case, server, [ids], 14)
    again = [*ids, *first["output_ids"][:9], *prompts(4, seed=7)[0]]
    (answer,) = ask(case, server, [again], 30)
    hit = answer["meta_info"]["cached_tokens"]
    assert hit == 64
    exact = exact_pairs(WINDOW, len(again) + 30, [hit, len(again)], hit)
    exact[:60, :60] = True
    assert_reads(case, again, answer, exact)


def test_by_cache_company_and_cuts_do_not_matter(case: Case, file: str, serve: Serve, prompts: Prompts) -> None:
    flags = ("--kvtuner-profile", file, "--kvtuner-attend", "cache", "--disable-radix-cache")
    requests = list(prompts(*range(29, 99, 10), seed=5))
    growing = list(prompts(*[40] * 5, seed=9))
    limits = ("--chunked-prefill-size", "32", "--max-running-requests", "4", "--max-total-tokens", "512")
    with serve(case.folder, *flags, *PAGES, *limits, "--enable-mixed-chunk") as server:
        found = ask(case, server, requests, 14)
        long = ask(case, server, growing, 110)  # some are retracted
        assert "etract" in server.log
    for ids, answer in zip([*requests, *growing], [*found, *long], strict=True):
        assert_reads(case, ids, answer, exact_pairs(WINDOW, len(ids) + len(answer["output_ids"]), []))


def test_flags_ask_for_it_on_two_ranks(
    case: Case, serve: Serve, compare: Compare, prompts: Prompts, profile_of: ProfileOf
) -> None:
    layout = ScaleLayout(16, granularity="per_channel")
    geometry, model = case.profile.to_geometry(), case.profile.model
    profile = uniform_profile(
        geometry, PrecisionPair(4, 4), model, k_layout=layout, v_layout=ScaleLayout(16), window=ExactWindow(16)
    )
    flags = ("--enable-kvtuner-quant", "--kvtuner-asym", "true", "--kvtuner-axis-key", "1", "--kvtuner-q-group-size")
    with serve(case.folder, *flags, "16", "--page-size", "16", "--tp-size", "2") as server:
        agreement = compare(server, case.folder, profile, prompts(5, 40), 20)
        log = server.log
    assert profile.digest in log
    assert agreement.is_near, agreement


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--page-size 1 does not work with keys per channel of 16 tokens per scale"),
        (("--page-size", "24"), "add --page-size 16, or a multiple of it"),
        ((*PAGES, "--enable-hierarchical-cache"), "--enable-hierarchical-cache does not work with keys per channel"),
        ((*PAGES, "--kvtuner-hicache-only", "--enable-hierarchical-cache"), "drop --kvtuner-hicache-only"),
    ],
)
def test_what_does_not_work_is_refused_by_name(
    flags: tuple[str, ...], message: str, case: Case, file: str, refused: Refused
) -> None:
    assert message in refused(case.folder, "--kvtuner-profile", file, *flags)


def test_groups_longer_than_the_window_are_refused(
    case: Case, refused: Refused, profile_of: ProfileOf, save_profile: SaveProfile
) -> None:
    shorter = uniform_profile(
        case.profile.to_geometry(), PrecisionPair(2, 4), case.profile.model,
        k_layout=ScaleLayout(32, granularity="per_channel"), window=WINDOW,
    )  # fmt: skip
    line = refused(case.folder, "--kvtuner-profile", str(save_profile(shorter)))
    assert "32 tokens per scale need residual_length 32 or more, not 19" in line
