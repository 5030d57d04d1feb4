"""Scores of servers from what they say token by token: means, failures, what is known, what was not read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import CorpusError, EndpointError
from kvtuner.evaluation.backends.base import HitCount
from kvtuner.evaluation.backends.endpoint import ServerFacts
from kvtuner.evaluation.backends.server_backend import NextToken, ServerBackend, truncated_kl
from kvtuner.evaluation.tasks.likelihood import Scoring, server_likelihood_cells
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SEQUENCES = [[(7 * row + column) % 11 for column in range(12)] for row in range(6)]
VOCABULARY = 11


class Stub(ServerBackend):
    """Knows a distribution of the next token by the last one; silent where it is told to be."""

    def __init__(self, name: str, lean: float, *, api: Any = "sglang", reads: Any = "fresh", found: float | None = 1.0):
        self.name, self.url, self.api = name, f"http://{name}", api
        self.hits, self.lean, self.found = HitCount(), lean, found
        self.facts = ServerFacts("demo", "0", None if name == "bf16" else name, reads, None)
        self.silent: set[tuple[int, ...]] = set()
        self.asked: list[tuple[int, ...]] = []

    def prime(self, ids: Sequence[int]) -> None:
        self.asked.append(tuple(ids))

    def next_token(self, ids: Sequence[int], *, top: int, asked: Sequence[int] = ()) -> NextToken | None:
        self.asked.append(tuple(ids))
        if tuple(ids) in self.silent:
            return None
        if self.found is not None:
            self.hits += HitCount(len(ids), int(self.found * len(ids)))
        log_p = self.log_p(ids)
        order = sorted(range(VOCABULARY), key=lambda token: -log_p[token])[:top]
        return NextToken(
            {token if self.api == "sglang" else str(token): log_p[token] for token in order},
            {token: log_p[token] for token in asked},
        )

    def log_p(self, ids: Sequence[int]) -> list[float]:
        logits = [math.cos(ids[-1] + token) + self.lean * math.sin(3 * token * len(ids)) for token in range(VOCABULARY)]
        total = math.log(sum(map(math.exp, logits)))
        return [each - total for each in logits]


def cells(folder: Path, *endpoints: Stub, positions: int = 4, top: int = 5) -> dict[str, Any]:
    run = RunFolder(folder)
    run.create()
    scoring = Scoring(SEQUENCES, positions, top, 0)
    return {cell.measure: cell for cell in server_likelihood_cells(endpoints, scoring, run, "x")}


def means(cell: Any) -> dict[str, float]:
    return {result.scheme: result.mean for result in cell.results}


def test_figures_are_means_over_the_last_tokens(tmp_path: Path) -> None:
    exact, mine, other = Stub("bf16", 0.0), Stub("profile", 0.6), Stub("fp8", 0.1)
    found = cells(tmp_path, mine, exact, other)
    assert list(found) == ["truncated_kl_nats_per_token", "top1_agreement", "nll_nats_per_token"]
    prompts = [(ids[:place], ids[place]) for ids in SEQUENCES for place in range(8, 12)]
    for backend in (mine, other):
        nll = [-backend.log_p(prompt)[target] for prompt, target in prompts]
        top = [sorted(range(VOCABULARY), key=lambda token: -exact.log_p(p)[token])[:5] for p, _ in prompts]
        kl = [
            truncated_kl(
                NextToken({each: exact.log_p(prompt)[each] for each in named}, {}),
                NextToken({each: backend.log_p(prompt)[each] for each in range(VOCABULARY)}, {}),
            )
            for (prompt, _), named in zip(prompts, top, strict=True)
        ]
        best = [max(range(VOCABULARY), key=backend.log_p(prompt).__getitem__) for prompt, _ in prompts]
        agree = [mine == theirs[0] for mine, theirs in zip(best, top, strict=True)]
        for values, measure in zip((kl, agree, nll), found, strict=True):
            assert means(found[measure])[backend.name] == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert set(means(found["nll_nats_per_token"])) == {"bf16", "profile", "fp8"}
    assert set(means(found["top1_agreement"])) == {"profile", "fp8"}
    for cell in found.values():
        assert (cell.num_tokens, cell.units, cell.count, cell.flag) == (12, 6, 24, None)
    assert mine.asked[:5] == [tuple(SEQUENCES[0][:end]) for end in (8, 8, 9, 10, 11)]


@pytest.mark.parametrize(
    ("mine", "flag"),
    [
        ({"found": 0.4}, "unread"),
        ({"found": 0.0}, "unread"),
        ({"found": None}, "unread"),
        ({"found": 0.9}, None),
        ({"found": 0.0, "reads": "cache"}, None),
    ],
)
def test_servers_that_did_not_read_what_they_stored_are_flagged(mine: Any, flag: Any, tmp_path: Path) -> None:
    backends = [Stub("bf16", 0.0, found=0.0), Stub("profile", 0.5, **mine)]
    found = cells(tmp_path, *backends)
    assert {cell.flag for cell in found.values()} == {flag}
    again = [Stub("bf16", 0.0), Stub("profile", 0.5, **mine)]
    assert cells(tmp_path, *again) == found, "the journal knows it too"
    assert not again[1].asked
    assert again[1].hits == backends[1].hits


def test_one_token_that_never_came_is_left_out_of_all_schemes_and_asked_again(tmp_path: Path) -> None:
    exact, mine = Stub("bf16", 0.0), Stub("profile", 0.6)
    mine.silent = {tuple(SEQUENCES[2][:9])}
    found = cells(tmp_path, exact, mine)
    for cell in found.values():
        assert cell.count == 23
        assert {each.scheme: each.failures for each in cell.results}["profile"] == 1
    nll = [-exact.log_p(ids[:p])[ids[p]] for ids in SEQUENCES for p in range(8, 12) if (ids, p) != (SEQUENCES[2], 9)]
    assert means(found["nll_nats_per_token"])["bf16"] == pytest.approx(sum(nll) / 23, rel=1e-5)
    exact, mine = Stub("bf16", 0.0), Stub("profile", 0.6)
    assert {cell.count for cell in cells(tmp_path, exact, mine).values()} == {24}
    assert (len(exact.asked), len(mine.asked)) == (0, 5), "one sequence of one scheme"


def test_servers_that_hardly_say_anything_are_refused(tmp_path: Path) -> None:
    mine = Stub("profile", 0.6)
    mine.silent = {tuple(SEQUENCES[0][:end]) for end in (8, 9)}
    with pytest.raises(EndpointError, match=r"http://profile \(profile\) gave no log-probabilities of 2 tokens"):
        cells(tmp_path, Stub("bf16", 0.0), mine)
    assert len(mine.asked) == 5, "no more is asked"


def test_what_servers_cannot_say_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert list(cells(tmp_path / "a", Stub("profile", 0.6))) == ["nll_nats_per_token"]
    assert "without --endpoint bf16=URL KL and top-1 agreement are left out" in caplog.text
    backends = [Stub(name, lean, api="openai") for name, lean in (("bf16", 0.0), ("profile", 0.6))]
    found = cells(tmp_path / "b", *backends)
    assert list(found) == ["truncated_kl_nats_per_token", "top1_agreement"]
    assert "perplexity is left out" in caplog.text
    whole = cells(tmp_path / "c", Stub("bf16", 0.0), Stub("profile", 0.6))
    bound, exact = (means(each["truncated_kl_nats_per_token"])["profile"] for each in (found, whole))
    assert 0 < bound <= exact
    with pytest.raises(EndpointError, match="give that server too"):
        cells(tmp_path / "d", Stub("profile", 0.6, api="openai"))
    with pytest.raises(CorpusError, match="give fewer --positions"):
        cells(tmp_path / "e", Stub("profile", 0.6), positions=12)
