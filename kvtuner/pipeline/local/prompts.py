"""Prompts out of flags, a file or standard input, as the tokenizer's tokens. Knows nothing of engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtuner.calibration.documents.text_files import JSON_LINES, json_of, lines_of
from kvtuner.errors import OptionError, RequestError
from kvtuner.pipeline.progress import say
from kvtuner.runtime_loader.openai_server.chat_prompt import chat_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtuner.pipeline.local.engine_flags import GenerateFlags

    Messages = list[dict[str, Any]]


def read_prompts(flags: GenerateFlags) -> list[str | Messages]:
    """The prompts that flags give: texts, or messages of a conversation.

    Raises:
        OptionError: A file that has none, or a line of another form.
        CorpusError: A file that cannot be read, or is not UTF-8 or JSON.
    """
    if flags.prompt:
        return list(flags.prompt)
    if flags.prompts is not None:
        prompts = list(_of_file(Path(flags.prompts)))
        if not prompts:
            raise OptionError(f"--prompts {flags.prompts} has no prompt; write one on each line")
        return prompts
    if sys.stdin.isatty():
        say("type the prompt, and end it with Ctrl-D")
    text = sys.stdin.read()
    if not text:
        raise OptionError("standard input is empty; give --prompt TEXT, --prompts FILE or text there")
    return [text]


def encode(tokenizer: Any, prompt: str | Messages, *, is_chat: bool) -> list[int]:
    """The tokens of a prompt; a conversation, or a text that `is_chat`, goes through the chat template.

    Raises:
        OptionError: The tokenizer has no such template, or it refuses the messages.
    """
    if isinstance(prompt, str) and not is_chat:
        ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return chat_tokens(tokenizer, messages)
    except RequestError as error:
        raise OptionError(str(error)) from error


def _of_file(path: Path) -> Iterator[str | Messages]:
    is_json = path.suffix.lower() in JSON_LINES
    for where, line in lines_of(path, f"--prompts {path}"):
        yield _of_json(line, where) if is_json else line


def _of_json(line: str, where: str) -> str | Messages:
    record = json_of(line, where, "an object with prompt or messages")
    prompt = record.get("prompt") if isinstance(record, dict) else None
    messages = record.get("messages") if isinstance(record, dict) else None
    if isinstance(prompt, str):
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages):
        return messages
    raise OptionError(f"{where} has neither prompt, a text, nor messages, a list of role and content; give one")
