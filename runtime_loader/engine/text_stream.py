"""The text of an answer as its tokens come. Knows nothing of models or requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvtuner.runtime_loader.engine.generation import SamplingParameters

UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""What decoders give for a character whose last bytes are in a token to come."""


class TextStream:
    """Text that is delivered once it is sure: no half characters, and nothing that may begin a text to stop at."""

    # A token's text depends on what is before it, such as a space that decoders drop at the beginning. So text is the
    # difference of two decoded windows that begin at a place where text was whole.

    def __init__(
        self, tokenizer: Any, sampling: SamplingParameters, token_texts: dict[tuple[int, bool], str] | None = None
    ) -> None:
        """Begin a text; `token_texts` keeps those of single tokens, with or without special ones, for all streams."""
        self._tokenizer, self._stops, self._skips = tokenizer, sampling.stop, sampling.skip_special_tokens
        self._token_texts = {} if token_texts is None else token_texts
        self._tokens: list[int] = []
        self._start = self._end = 0  # of the tokens whose text was whole last
        self._held = ""
        self.delivered = ""
        self.stopped_at: str | None = None

    def push(self, token: int) -> str:
        """Add a token; returns text that is sure now. At a text to stop at `stopped_at` is set, and no more comes."""
        self._tokens.append(token)
        text = self._decoded(self._tokens[self._start :])
        if text.endswith(UNFINISHED):
            return ""
        return self._deliver(text[len(self._whole()) :])

    def flush(self) -> str:
        """The text that was held back, once no token comes any more."""
        if self.stopped_at is not None:
            return ""
        text = self._deliver(self._decoded(self._tokens[self._start :])[len(self._whole()) :])
        rest, self._held = ("", "") if self.stopped_at is not None else (self._held, "")
        self.delivered += rest
        return text + rest

    def _whole(self) -> str:
        """The text of the window that was whole last, which is a single token mostly."""
        if self._end - self._start != 1:
            return self._decoded(self._tokens[self._start : self._end])
        key = self._tokens[self._start], self._skips
        if key not in self._token_texts:
            self._token_texts[key] = self._decoded([key[0]])
        return self._token_texts[key]

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skips)
        return text

    def _deliver(self, new: str) -> str:
        self._start, self._end = self._end, len(self._tokens)
        text = self._held + new
        found = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            key=lambda place: place[0],
            default=None,
        )
        if found is not None:
            sure, self._held, self.stopped_at = text[: found[0]], "", found[1]
        else:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            sure, self._held = text[: len(text) - held], text[len(text) - held :]
        self.delivered += sure
        return sure


def _overlap(text: str, stop: str) -> int:
    """The characters at the end of a text that a text to stop at begins with."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)
