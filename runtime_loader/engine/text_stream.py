"""The text of an answer as its tokens come. Knows nothing of models or requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvtuner.runtime_loader.engine.generation import SamplingParameters

UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""What decoders give for a character whose last bytes are in a token to come."""

MOST_TEXTS: Final = 1 << 16
"""The most texts that are kept, some 15 MB."""
MOST_SILENT: Final = 8
"""Tokens without any text that may still give those behind them another one."""
KeptTexts = dict[tuple[bool, tuple[int, ...], tuple[int, ...]], str | None]
"""What was decoded, for all streams of an engine: the text that new tokens add to those before them, None while a
character is not whole, by whether special tokens are skipped; without new tokens the text of those before."""


class TextStream:
    """Text that is delivered once it is sure: no half characters, and nothing that may begin a text to stop at."""

    # A token's text depends on what is before it, such as a space that decoders drop at the beginning. So text is the
    # difference of two decoded windows that begin at a place where text was whole.

    def __init__(self, tokenizer: Any, sampling: SamplingParameters, kept: KeptTexts | None = None) -> None:
        """Begin a text; `kept` has what was decoded before, in any stream."""
        self._tokenizer, self._stops, self._skips = tokenizer, sampling.stop, sampling.skip_special_tokens
        self._kept = {} if kept is None else kept
        self._whole: tuple[int, ...] = ()  # the tokens whose text was whole last
        self._new: tuple[int, ...] = ()
        self._held = ""
        self._delivered: list[str] = []
        self.stopped_at: str | None = None

    @property
    def delivered(self) -> str:
        """All text that is sure."""
        return "".join(self._delivered)

    def push(self, token: int) -> str:
        """Add a token; returns text that is sure now. At a text to stop at `stopped_at` is set, and no more comes."""
        self._new += (token,)
        key = (self._skips, self._whole, self._new)
        try:
            added = self._kept[key]
        except KeyError:
            added = self._added()
            if len(self._new) < MOST_SILENT:  # others are rare, and long
                self._kept[key] = added
        if not added:
            # A skipped token between two words has no text, and they have the same space between them as without it.
            if added is not None and len(self._new) >= MOST_SILENT:
                self._new = ()
            return ""
        self._whole, self._new = self._new, ()
        if self._stops:
            return self._deliver(added)
        self._delivered.append(added)
        return added

    def flush(self) -> str:
        """The text that was held back, once no token comes any more."""
        if self.stopped_at is not None:
            return ""
        text = self._deliver(self._decoded(self._whole + self._new)[len(self._text_before()) :])
        rest, self._held = ("", "") if self.stopped_at is not None else (self._held, "")
        self._delivered.append(rest)
        return text + rest

    def _added(self) -> str | None:
        """The text of the new tokens, if it is whole."""
        if len(self._kept) >= MOST_TEXTS:
            self._kept.clear()
        text = self._decoded(self._whole + self._new)
        return None if text.endswith(UNFINISHED) else text[len(self._text_before()) :]

    def _text_before(self) -> str:
        """The text of the tokens before the new ones, by themselves."""
        key = (self._skips, self._whole, ())
        text = self._kept.get(key)
        if text is None:
            text = self._kept[key] = self._decoded(self._whole)
        return text

    def _decoded(self, tokens: tuple[int, ...]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=self._skips)
        return text

    def _deliver(self, new: str) -> str:
        """Deliver new text as far as no text to stop at can begin in it."""
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
        self._delivered.append(sure)
        return sure


def _overlap(text: str, stop: str) -> int:
    """The characters at the end of a text that a text to stop at begins with."""
    return next((count for count in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:count])), 0)
