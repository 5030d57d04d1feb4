"""The next token as servers give it: truncated KL beside the whole, and answers of another form."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import entropy

from kvtuner.calibration.model_loading import ModelSource, load_tokenizer
from kvtuner.evaluation.backends.base import TextTokenizer
from kvtuner.evaluation.backends.server_backend import NextToken, from_openai, from_record, from_sglang, truncated_kl


def two_distributions(size: int, spread: float, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=size) * 3
    near = logits + rng.normal(size=size) * spread
    return tuple(np.exp(each - np.logaddexp.reduce(each)) for each in (logits, near))


def token_of(p: Any, tokens: Any) -> NextToken:
    return NextToken({int(token): math.log(p[token]) for token in tokens}, {})


@pytest.mark.parametrize("spread", [1e-3, 0.1, 2.0])
def test_a_truncated_kl_is_that_of_the_merged_distributions_and_grows_to_the_whole(spread: float) -> None:
    for seed in range(20):
        p, q = two_distributions(50, spread, seed)
        order = np.argsort(-p)
        whole, before = float(entropy(p, q)), 0.0
        for top in (1, 5, 20, 50):
            named = order[:top]
            merged = [np.append(each[named], max(1 - each[named].sum(), 1e-7)) for each in (p, q)]
            found = truncated_kl(token_of(p, named), token_of(q, order))
            assert found == pytest.approx(float(entropy(*merged)), rel=1e-4, abs=1e-9)
            assert before - 1e-9 <= found <= whole * (1 + 1e-6) + 1e-9
            before = found
        assert found == pytest.approx(whole, rel=1e-4)


def test_tokens_that_only_one_side_names_are_merged() -> None:
    p, q = two_distributions(8, 1.0, 0)
    mine, other = token_of(p, [0, 1, 2, 3]), token_of(q, [2, 3, 4])
    merged = [np.array([each[2], each[3], 1 - each[2] - each[3]]) for each in (p, q)]
    assert truncated_kl(mine, other) == pytest.approx(float(entropy(*merged)), rel=1e-6)
    assert truncated_kl(mine, token_of(q, [5])) == 0.0
    assert truncated_kl(mine, mine) == 0.0


def test_sure_models_are_no_nan_and_no_infinity() -> None:
    sure = NextToken({3: -1e-9, 4: -40.0}, {})
    assert truncated_kl(sure, sure) == 0.0
    assert 30 < truncated_kl(sure, NextToken({3: -40.0, 4: -1e-9}, {})) < 50


def sglang(top: Any, asked: Any) -> Any:
    return {"meta_info": {"output_top_logprobs": top, "output_token_ids_logprobs": asked}}


def test_answers_are_read_and_kept() -> None:
    found = from_sglang(sglang([[[-0.1, 7, None], [-2.5, 9, None]]], [[[-2.5, 9, None], [-4.0, 1, None]]]), [9, 1])
    assert (found.best, found.asked) == (7, {9: -2.5, 1: -4.0})
    assert from_record(json.loads(json.dumps(found.record()))) == found


TOP, NAMED = [[-0.1, 7, None]], [[-2.5, 9, None]]


def test_the_answer_that_the_refused_ones_are_changed_from_is_read() -> None:
    assert from_sglang(sglang([TOP], [NAMED]), [9]) == NextToken({7: -0.1}, {9: -2.5})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "output_top_logprobs holds no list"),
        ({"meta_info": {"output_top_logprobs": [TOP]}}, "output_token_ids_logprobs holds no list"),
        (sglang([], [NAMED]), "output_top_logprobs holds no list"),
        (sglang([TOP], []), "output_token_ids_logprobs holds no list"),
        (sglang([[]], [NAMED]), "output_top_logprobs names no token"),
        (sglang([TOP], [[]]), "output_token_ids_logprobs names no token"),
        (sglang([TOP], [[[-2.5, 8, None]]]), r"no log-probability of \[9\], which were asked for"),
        (sglang([[[-0.1, 7]]], [NAMED]), "output_top_logprobs holds no list"),
        (sglang([TOP], [[[None, 9, None]]]), "output_token_ids_logprobs holds no list"),
        (sglang([TOP], [[[float("-inf"), 9, None]]]), "-inf is no log-probability"),
        (sglang([[[0.1, 7, None]]], [NAMED]), "0.1 is no log-probability"),
    ],
)
def test_answers_of_another_form_are_refused_by_the_part_that_is_wrong(answer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_sglang(answer, [9])


def test_texts_that_several_tokens_share_are_not_taken_for_one() -> None:
    tokenizer = load_tokenizer(ModelSource("demo"))
    text = TextTokenizer(tokenizer)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    shared = next(each for each in texts if texts.count(each) > 1)
    alone = [each for each in texts if texts.count(each) == 1]
    likely = {alone[3]: -2.0, shared: -0.5, "no token of this vocabulary": -1.0, alone[5]: -1.5}
    found = from_openai({"choices": [{"logprobs": {"top_logprobs": [likely]}}]}, text.names_one_token)
    assert found.top == {alone[5]: -1.5, alone[3]: -2.0}
    assert found.best == alone[5]
    no_token, no_texts = "names no text that is one token", "holds no log-probabilities by text"
    for wrong, message in (({shared: -0.5}, no_token), ({}, no_token), (None, no_texts), ({alone[3]: None}, no_texts)):
        with pytest.raises(ValueError, match=message):
            from_openai({"choices": [{"logprobs": {"top_logprobs": [wrong]}}]}, text.names_one_token)
