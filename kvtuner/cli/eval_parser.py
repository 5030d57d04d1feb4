"""Flags of ``kvtuner eval``. Knows nothing of what they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.cli import flag_types
from kvtuner.cli.shared_flags import add_data_flags, add_model_flags, add_switch
from kvtuner.pipeline.evaluation_options import EVALUATION_DEFAULTS, LEVELS
from kvtuner.pipeline.options import READ_PLANS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def add_eval_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    parser.add_argument("profile", metavar="PROFILE|RUN", help="profile.json or run folder")
    add_model_flags(parser)
    add_data_flags(parser)
    _add_evaluation(parser)
    _add_tasks(parser)
    _add_servers(parser)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--out", metavar="FOLDER", help="what is asked once is kept here; runs/<model>-eval-... by default"
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--levels", type=flag_types.words(LEVELS), metavar="LEVEL[,...]", help=f"{', '.join(LEVELS)}; all, by default"
    )
    group.add_argument(
        "--read-plan", choices=READ_PLANS, help="which tokens read quantized keys and values; the search's by default"
    )
    group.add_argument(
        "--against",
        type=flag_types.words(),
        metavar="SCHEME[,...]",
        help="other schemes to store the cache: fp8, or pairs such as K8V8, which is int8; these two by default",
    )
    group.add_argument(
        "--lengths",
        type=flag_types.counts,
        metavar="TOKENS[,...]",
        help="of recall's and needles' contexts; those of 128, 256, 512, 2048 and 8192 that fit, by default",
    )
    _add_number(group, "--problems", "contexts of every length", kind=flag_types.several)
    _add_number(group, "--questions", "after each context")
    _add_number(group, "--samples", "prompts that all schemes continue")
    _add_number(group, "--batch-size", "sequences in flight, of likelihood")
    group.add_argument(
        "--seed", type=flag_types.seed, help="of documents, questions and bootstrap; the search's by default"
    )


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_argument_group("tasks of lm-evaluation-harness (pip install 'kvtuner[eval]')")
    tasks.add_argument(
        "--tasks", type=flag_types.words(), metavar="NAME[,...]", help="such as gsm8k; names in --include-path too"
    )
    tasks.add_argument("--include-path", metavar="FOLDER", help="of task files; they may run code of their own")
    tasks.add_argument("--limit", type=flag_types.several, help="questions of each task; all, by default")
    tasks.add_argument("--num-fewshot", type=int, help="examples before a question; the task's own, by default")
    add_switch(tasks, "--apply-chat-template", "prompts go through the tokenizer's chat template")


def _add_servers(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("servers, in place of a model loaded here")
    servers.add_argument(
        "--endpoint",
        type=flag_types.endpoint,
        action="append",
        metavar="[SCHEME=]URL",
        help="of the server that serves the profile; others as bf16=URL, fp8=URL, K8V8=URL",
    )
    servers.add_argument("--api", choices=("sglang", "openai"), help="how they are spoken to; sglang by default")
    _add_number(servers, "--timeout", "for one answer", metavar="SECONDS")
    _add_number(servers, "--positions", "last ones of each sequence, that they score", metavar="TOKENS")
    _add_number(servers, "--scored-sequences", "that they score at most", metavar="N", kind=flag_types.several)
    _add_number(servers, "--top-logprobs", "likely tokens that a truncated KL tells apart", metavar="K")


def _add_number(
    group: argparse._ActionsContainer,
    flag: str,
    text: str,
    *,
    metavar: str | None = None,
    kind: Callable[[str], int] = flag_types.positive,
) -> None:
    """Add a number that stays None where the flag is not given, as one that nothing would read is refused."""
    default = EVALUATION_DEFAULTS[flag.removeprefix("--").replace("-", "_")]
    group.add_argument(flag, type=kind, metavar=metavar, help=f"{text}; {default} by default")
