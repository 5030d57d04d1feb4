"""``kvtuner generate``: a model's answers with a profile at work, without a server."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvtuner.cli.command import Command, add_options
from kvtuner.pipeline.flags.option_fields import options_from
from kvtuner.pipeline.local.engine_flags import GenerateFlags
from kvtuner.pipeline.progress import say, say_loading

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

_SHOWN: Final = 72


def _run(args: Namespace) -> int:
    flags = options_from(GenerateFlags, vars(args))
    sampling = flags.sampling.parameters()
    from kvtuner.pipeline.local.prompts import encode, read_prompts

    prompts = read_prompts(flags)
    say_loading()
    from kvtuner.pipeline.local.opened_engine import in_order, open_engine

    with open_engine(flags.model, flags.engine) as engine:
        tokens = [encode(engine.tokenizer, prompt, is_chat=flags.chat) for prompt in prompts]
        start = time.perf_counter()
        if args.json:
            answers = engine.generate(tokens, sampling)
            facts = _facts(engine, time.perf_counter() - start)
            print(_json({**facts, "answers": [asdict(answer) for answer in answers]}))
            return 0
        is_new = True
        for number, delta in in_order(engine, tokens, sampling):
            if is_new and len(prompts) > 1:
                print(f">>> {_first_line(prompts[number])}", flush=True)
            is_new = delta.finish_reason is not None
            print(delta.text, end="\n" if is_new else "", flush=True)
            if delta.error is not None:
                say(f"error in the answer above: {delta.error}")
        facts = _facts(engine, time.perf_counter() - start)
    say(
        f"{facts['answer_tokens']} tokens after {facts['prompt_tokens'] + facts['cached_tokens']}"
        f" in {facts['seconds']:.1f} s; attention by {facts['attention']},"
        f" {facts['kv_bytes_per_token']} bytes of KV per token"
    )
    return 0


def _facts(engine: LocalEngine, seconds: float) -> dict[str, Any]:
    state = engine.state
    return {
        "attention": engine.attention,
        "profile": None if engine.profile is None else engine.profile.digest,
        "kv_bytes_per_token": engine.pool.shape.bytes_per_token,
        "prompt_tokens": state.num_prompt_tokens,
        "cached_tokens": state.num_cached_tokens,
        "answer_tokens": state.num_answer_tokens,
        "seconds": seconds,
    }


def _json(value: Any, start: str = "\n") -> str:
    """JSON with a line for each field and for each object of a list; a list of tokens stands in one line."""
    inner = f"{start} "
    if isinstance(value, dict):
        fields = [f"{inner}{json.dumps(name)}: {_json(field, inner)}" for name, field in value.items()]
        return f"{{{','.join(fields)}{start}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return f"[{','.join(inner + _json(item, inner) for item in value)}{start}]"
    return json.dumps(value)


def _first_line(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."


def _add_flags(parser: ArgumentParser) -> None:
    add_options(parser, GenerateFlags)


COMMANDS: Final = (Command("generate", "answer prompts here, with a profile and without a server", _add_flags, _run),)
