"""Answers as OpenAI's interface gives them, whole or as the chunks of a stream. Knows nothing of HTTP."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvtuner.runtime_loader.engine.text_stream import UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.runtime_loader.engine.async_engine import AnswerStream
    from kvtuner.runtime_loader.engine.generation import Delta, TokenLogprob
    from kvtuner.runtime_loader.openai_server.protocol import ChatRequest, CompletionRequest

    Json = dict[str, Any]


@dataclass(slots=True)
class _Piece:
    """A part of an answer with the log-probabilities of its tokens; the first token of a prompt has none."""

    text: str
    logprobs: Sequence[tuple[int, TokenLogprob | None]] = ()
    finish_reason: str | None = None


class AnswerFormat(ABC):
    """The answers to one HTTP request, of which each stream is a choice; the first of every `n` is a prompt's first."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, tokenizer: Any, *, num_answers: int, with_usage: bool) -> None:
        self._model, self._tokenizer, self._num_answers, self._with_usage = model, tokenizer, num_answers, with_usage
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._num_answer_tokens = 0

    def whole(self, streams: Sequence[AnswerStream], answers: Sequence[Sequence[Delta]]) -> Json:
        """The body of an answer without a stream, of all deltas of every choice."""
        choices = []
        for index, (stream, deltas) in enumerate(zip(streams, answers, strict=True)):
            pieces = [*self._beginning(stream), *(self._piece(delta) for delta in deltas)]
            merged = _Piece(
                "".join(piece.text for piece in pieces),
                [entry for piece in pieces for entry in piece.logprobs],
                pieces[-1].finish_reason,
            )
            choices.append({"index": index, **self._choice(index, merged)})
        return {**self._head(self.whole_object), "choices": choices, "usage": self._usage(streams)}

    def opening(self) -> list[Json]:
        """The chunks that a stream begins with."""
        return []

    def chunks(self, index: int, stream: AnswerStream, delta: Delta, *, is_first: bool) -> list[Json]:
        """The chunks of a delta of one choice."""
        pieces = [*(self._beginning(stream) if is_first else ()), self._piece(delta)]
        return [
            {**self._head(self.chunk_object), "choices": [{"index": index, **self._chunk_choice(index, piece)}]}
            for piece in pieces
        ]

    def closing(self, streams: Sequence[AnswerStream]) -> list[Json]:
        """The chunks that a stream ends with."""
        if not self._with_usage:
            return []
        return [{**self._head(self.chunk_object), "choices": [], "usage": self._usage(streams)}]

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self, streams: Sequence[AnswerStream]) -> Json:
        """The tokens of prompts, each once however many answers it has, and of answers."""
        firsts = streams[:: self._num_answers]
        num_prompt = sum(len(stream.prompt_token_ids) for stream in firsts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_answer_tokens,
            "total_tokens": num_prompt + self._num_answer_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in firsts)},
        }

    def _beginning(self, stream: AnswerStream) -> list[_Piece]:
        """What stands before an answer."""
        return []

    def _piece(self, delta: Delta) -> _Piece:
        self._num_answer_tokens += len(delta.token_ids)
        return _Piece(delta.text, [(entry.token, entry) for entry in delta.logprobs], delta.finish_reason)

    def _token_text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text

    @abstractmethod
    def _choice(self, index: int, piece: _Piece) -> Json:
        """The choice of a whole answer."""

    @abstractmethod
    def _chunk_choice(self, index: int, piece: _Piece) -> Json:
        """The choice of a chunk."""


class CompletionFormat(AnswerFormat):
    """Answers of ``/v1/completions``."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, num_answers=request.n, with_usage=request.stream_options.include_usage)
        self._echoes, self._tells_logprobs = request.echo, request.logprobs is not None
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def _beginning(self, stream: AnswerStream) -> list[_Piece]:
        if not self._echoes:
            return []
        tokens = stream.prompt_token_ids
        text = self._tokenizer.decode(tokens)
        entries = list(zip(tokens, (None, *stream.prompt_logprobs), strict=True)) if self._tells_logprobs else []
        return [_Piece(text, entries)]

    def _choice(self, index: int, piece: _Piece) -> Json:
        logprobs = self._logprobs(index, piece) if self._tells_logprobs else None
        return {"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    _chunk_choice = _choice

    def _logprobs(self, index: int, piece: _Piece) -> Json:
        tokens = [self._token_text(token) for token, _ in piece.logprobs]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for _, entry in piece.logprobs],
            "top_logprobs": [self._top(entry) for _, entry in piece.logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in ((entry.token, entry.logprob), *entry.top):
            text = self._token_text(token)
            top[text] = max(logprob, top.get(text, logprob))  # two tokens may have one text
        return top


class ChatFormat(AnswerFormat):
    """Answers of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, model: str, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, num_answers=request.n, with_usage=request.stream_options.include_usage)
        self._tells_logprobs = request.logprobs

    def opening(self) -> list[Json]:
        """The role of every choice."""
        role = {"role": "assistant", "content": ""}
        return [
            {
                **self._head(self.chunk_object),
                "choices": [{"index": index, "delta": role, "logprobs": None, "finish_reason": None}],
            }
            for index in range(self._num_answers)
        ]

    def _choice(self, index: int, piece: _Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(piece), "finish_reason": piece.finish_reason}

    def _chunk_choice(self, index: int, piece: _Piece) -> Json:
        delta = {"content": piece.text} if piece.text else {}
        return {"delta": delta, "logprobs": self._logprobs(piece), "finish_reason": piece.finish_reason}

    def _logprobs(self, piece: _Piece) -> Json | None:
        if not self._tells_logprobs:
            return None
        return {
            "content": [
                {**self._entry(token, entry.logprob), "top_logprobs": [self._entry(*top) for top in entry.top]}
                for token, entry in piece.logprobs
                if entry is not None
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._token_text(token)
        # A part of a character has bytes that its text does not tell.
        return {"token": text, "logprob": logprob, "bytes": None if UNFINISHED in text else list(text.encode())}
