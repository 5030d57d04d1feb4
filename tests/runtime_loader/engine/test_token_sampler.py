"""Tokens are chosen as transformers' generate chooses them, each request by its own parameters and seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtuner.errors import RequestError
from kvtuner.runtime_loader.engine.generation import Generation, SamplingParameters
from kvtuner.runtime_loader.engine.token_sampler import (
    generator_of,
    likeliest_tokens,
    processors,
    sample,
    token_logprobs,
)

PROMPT = [1, 2, 3]
ANSWER = [4, 4, 5]
CPU = torch.device("cpu")


def request(**parameters: Any) -> Generation:
    sampling = SamplingParameters(**parameters)
    return Generation("a", 0, [*PROMPT, *ANSWER], 3, 99, sampling, generator=generator_of(sampling, CPU))


def logits_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 50, generator=torch.Generator().manual_seed(seed))


def test_the_likeliest_token_is_the_first_of_the_highest_logits_and_nan_is_higher_than_all() -> None:
    logits = torch.randn(5, 1001, generator=torch.Generator().manual_seed(0))
    logits[1, [7, 900]] = logits[2, [0, 1000]] = 9.0
    logits[3, 20], logits[3, 900] = torch.nan, torch.inf
    highest, tokens = likeliest_tokens(logits)
    assert tokens == logits.argmax(-1).tolist() and tokens[1:4] == [7, 0, 20]
    torch.testing.assert_close(torch.tensor(highest), logits.amax(-1), equal_nan=True)


def test_penalties_of_the_answer_are_openais() -> None:
    scores = processors(SamplingParameters(presence_penalty=0.5, frequency_penalty=0.25), 3)(
        torch.tensor([[*PROMPT, *ANSWER]]), torch.zeros(1, 8)
    )
    assert scores.tolist() == [[0, 0, 0, 0, -1.0, -0.75, 0, 0]]


@pytest.mark.parametrize(
    "parameters", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.3}, {"temperature": 0.2}, {"repetition_penalty": 1.9}]
)
def test_frequencies_are_those_of_the_filtered_distribution(parameters: dict[str, Any]) -> None:
    parameters = {"temperature": 1.0, **parameters}
    generation = request(**parameters, seed=1)
    # What generate applies, by its own objects in its own order, written out.
    scores = logits_of().clone()
    if "repetition_penalty" in parameters:
        seen = torch.tensor(sorted({*PROMPT, *ANSWER}))
        picked = scores[0, seen]
        scores[0, seen] = torch.where(picked < 0, picked * 1.9, picked / 1.9)
    probabilities = (scores / parameters["temperature"]).softmax(-1)[0]
    if "top_k" in parameters:
        probabilities[probabilities < probabilities.topk(3).values[-1]] = 0
    if "top_p" in parameters:
        ordered, order = probabilities.sort(descending=True)
        probabilities[order[(ordered.cumsum(0) - ordered) >= 0.3]] = 0
    if "min_p" in parameters:
        probabilities[probabilities < 0.3 * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    drawn = torch.tensor([sample(generation, logits_of()) for _ in range(3000)])
    found = torch.bincount(drawn, minlength=50) / 3000
    assert bool((found[probabilities == 0] == 0).all())
    assert float((found - probabilities).abs().max()) < 0.03


def test_a_seed_decides_alone_whatever_runs_beside() -> None:
    first, other = request(temperature=1.0, seed=3), request(temperature=1.0, seed=4)
    together = [(sample(other, logits_of(9)), sample(first, logits_of(at)))[1] for at in range(20)]
    again = request(temperature=1.0, seed=3)
    assert [sample(again, logits_of(at)) for at in range(20)] == together


def test_greedy_with_penalties_takes_the_best_that_is_left() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 4], logits[0, 6] = 1.0, 0.5
    assert sample(request(), logits) == 4
    assert sample(request(frequency_penalty=0.4), logits) == 6


def test_log_probabilities_are_of_the_logits_as_they_are() -> None:
    (found,) = token_logprobs(logits_of(), [7], 2)
    wanted = logits_of().log_softmax(-1)[0]
    assert found.logprob == pytest.approx(float(wanted[7]))
    assert [token for token, _ in found.top] == wanted.topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"min_p": 2.0}, "min_p must be at least 0 and at most 1"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a finite number"),
        ({"logprobs": 101}, "logprobs must be at least 0 and at most 100"),
        ({"stop": ("",)}, "must not be empty"),
    ],
)
def test_parameters_outside_what_they_may_be_are_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParameters(**parameters)
