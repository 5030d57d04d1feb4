"""Text comes as soon as it is sure: whole characters, and nothing of a text to stop at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, strategies

from kvtuner.runtime_loader.engine.generation import SamplingParameters
from kvtuner.runtime_loader.engine.text_stream import TextStream

if TYPE_CHECKING:
    from fixture_types import MakeTokenizer


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


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
