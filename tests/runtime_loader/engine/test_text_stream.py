"""Text comes as soon as it is sure: whole characters, and nothing of a text to stop at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies

from kvtuner.runtime_loader.engine import text_stream
from kvtuner.runtime_loader.engine.generation import SamplingParameters
from kvtuner.runtime_loader.engine.text_stream import KeptTexts, TextStream

if TYPE_CHECKING:
    from fixture_types import MakeTokenizer


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


class Words:
    """A tokenizer that drops the space before the first word, has a special token, 0, and half characters, 1 and 2."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        pieces = {0: b"" if skip_special_tokens else b"<end>", 1: b"\xc3", 2: b"\xa9", 3: b" a", 4: b" bc", 5: b"d"}
        return b"".join(pieces[token] for token in tokens).decode(errors="replace").removeprefix(" ")


def parts_of(text: str, *stops: str) -> tuple[list[str], TextStream]:
    stream, parts = TextStream(Letters(), SamplingParameters(stop=tuple(stops))), []
    for token in text.encode():
        parts.append(stream.push(token))
        if stream.stopped_at is not None:
            break
    return [*parts, stream.flush()], stream


def test_a_character_comes_with_its_last_byte() -> None:
    assert parts_of("aé€")[0] == ["a", "", "é", "", "", "€", ""]


def test_what_may_begin_a_stop_is_held_until_it_does_not() -> None:
    assert parts_of("aENx", "END")[0] == ["a", "", "", "ENx", ""]
    assert parts_of("aEN", "END")[0] == ["a", "", "", "EN"]
    parts, stream = parts_of("aENDx", "END", "x")
    assert parts == ["a", "", "", "", ""]
    assert stream.stopped_at == "END"


@given(
    text=strategies.text("abé€", max_size=20),
    stops=strategies.lists(strategies.text("abé", min_size=1, max_size=4), max_size=3),
)
def test_the_whole_is_the_text_before_its_first_stop(text: str, stops: list[str]) -> None:
    parts, stream = parts_of(text, *stops)
    found = "".join(parts)
    assert found == stream.delivered
    if stream.stopped_at is None:
        assert found == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(found + stream.stopped_at)
        # No stop was whole before the last character of this one came.
        assert not any(stop in (found + stream.stopped_at)[:-1] for stop in stops)


def test_tokens_of_a_real_tokenizer(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    text = "The fox counts 12 clocks near the harbour, naïve — 漢字 🙂."
    stream = TextStream(tokenizer, SamplingParameters())
    tokens = tokenizer(text)["input_ids"]
    parts = [stream.push(token) for token in tokens]
    assert "".join(parts) + stream.flush() == text
    assert parts[0] == tokenizer.decode(tokens[:1])


ANSWERS = strategies.lists(strategies.integers(0, 5), max_size=12)


@pytest.mark.parametrize("most", [1, 3, 1 << 16])
@given(answers=strategies.lists(strategies.tuples(ANSWERS, strategies.booleans()), max_size=4), data=strategies.data())
def test_streams_that_share_what_was_decoded_do_not_mix(
    most: int, answers: list[tuple[list[int], bool]], data: strategies.DataObject
) -> None:
    kept: KeptTexts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_stream, "MOST_TEXTS", most)
        streams = [TextStream(Words(), SamplingParameters(skip_special_tokens=skips), kept) for _, skips in answers]
        turns = [index for index, (tokens, _) in enumerate(answers) for _ in tokens]
        pushed, texts = [0] * len(answers), [""] * len(answers)
        for index in data.draw(strategies.permutations(turns)):
            texts[index] += streams[index].push(answers[index][0][pushed[index]])
            pushed[index] += 1
            assert len(kept) <= most + 2
    for (tokens, skips), stream, text in zip(answers, streams, texts, strict=True):
        assert text + stream.flush() == stream.delivered == Words().decode(tokens, skip_special_tokens=skips)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_tokens_without_text_leave_the_space_between_words(count: int) -> None:
    stream = TextStream(Words(), SamplingParameters())
    parts = [stream.push(token) for token in [3, *[0] * count, 4]]
    assert (parts[0], parts[-1], stream.delivered) == ("a", " bc", "a bc")
