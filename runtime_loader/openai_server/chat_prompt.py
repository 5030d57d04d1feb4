"""The tokens of a conversation, by the chat template of a model's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtuner.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence


def chat_tokens(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The tokens of messages, up to where the answer begins.

    Raises:
        RequestError: The tokenizer has no chat template, or it refuses the messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("the model's tokenizer has no chat template; ask for a completion of text")
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the model's, and raises what it likes
        raise RequestError(f"the chat template refuses the messages: {error}") from error
    # The template has written what begins a text already.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
