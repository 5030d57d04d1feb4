"""Texts as the tokens of a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtuner.calibration.corpus import start_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvtuner.evaluation.tasks.recall_and_needles import Problem


class TextTokenizer:
    """Texts as token ids of a model's tokenizer, and back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._start = tokenizer, start_tokens(tokenizer)
        self._tokens_of: Counter[str] | None = None

    def context(self, text: str) -> list[int]:
        """The token ids of a text that a sequence begins with."""
        return self._start + self._ids(text)

    def after(self, context: str, text: str) -> list[int]:
        """The token ids that `text` adds to a context, as in the middle of a text where the tokenizer allows it.

        Some tokenizers begin every text with a space, which is not there in the middle.
        """
        before, whole = self._ids(context), self._ids(context + text)
        return whole[len(before) :] if whole[: len(before)] == before else self._ids(text)

    def count(self, text: str) -> int:
        """The number of tokens of a text, without special ones."""
        return len(self._ids(text))

    def longest(self, problem: Problem) -> int:
        """The tokens of a context with its longest question and as much of an answer as is asked for."""
        questions = (self.count(question.text) + question.max_tokens for question in problem.questions)
        return len(self.context(problem.context)) + max(questions)

    def of(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special ones."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def names_one_token(self, text: str) -> bool:
        """Whether exactly one token of the vocabulary, decoded by itself, is this text."""
        if self._tokens_of is None:
            self._tokens_of = Counter(self._tokenizer.batch_decode([[token] for token in range(len(self._tokenizer))]))
        return self._tokens_of[text] == 1

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
