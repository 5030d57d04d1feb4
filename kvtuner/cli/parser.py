"""Flags of every sub-command, and the YAML file that they overlay. Knows nothing of what they do."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvtuner import __version__
from kvtuner.cli.bench_parser import Types, add_bench_flags
from kvtuner.cli.profile_parser import add_profile_commands
from kvtuner.pipeline.evaluation_options import EVALUATION_DEFAULTS, LEVELS
from kvtuner.pipeline.options import DEFAULT_SAMPLER, DEFAULT_TRIALS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SCORES = ("kl", "fisher", "e_o")
_PLANS = ("decode", "hit", "cache")
_PATHS = ("model", "data", "out")
_APIS = ("sglang", "openai")
_SAMPLERS = ("nsga2", "tpe", "random", "none")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Show defaults, except None and off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS, []):
            return action.help
        return super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as everything else does; the flags are in ``--help``."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="kvtuner", description="Per-layer mixed-precision KV caches: measure, search, prove, share.")
    parser.add_argument("--version", action="version", version=f"kvtuner {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary, groups in (
        ("search", "from a model to profile.json and a report", (_model, _data, _measurement, _search, _run)),
        (
            "calibrate",
            "measure sensitivity only; search with the same --out reuses it",
            (_model, _data, _measurement, _run),
        ),
    ):
        command = commands.add_parser(name, help=summary, description=summary, formatter_class=_Help)
        for add in groups:
            add(command)
        _common(command)
    _evaluation(commands)
    _bench(commands)
    for about_profiles in add_profile_commands(commands, formatter=_Help, switch=_switch):
        _common(about_profiles)
    return parser


def _model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="ID|FOLDER|demo", help="hub id, local folder, or the shipped demo model")
    group.add_argument("--revision", help="commit, tag or branch on the hub")
    group.add_argument("--device", default="auto", help="auto (every GPU, else the CPU), cpu, cuda, cuda:N")
    group.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    _switch(group, "--trust-remote-code", "run code that comes with the checkpoint")
    group.add_argument(
        "--context-length",
        type=_positive,
        metavar="TOKENS",
        help="what will be served; the model's maximum by default",
    )


def _data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        metavar="FILE|FOLDER|ID[@REV]",
        help="text, JSONL with text or messages, or a datasets id; a shipped demo corpus by default",
    )
    group.add_argument("--data-config", help="configuration of the datasets id")
    group.add_argument("--data-split", default="train", help="split of the datasets id")
    group.add_argument("--text-field", default="text", help="field that holds the text")
    group.add_argument(
        "--sequence-length",
        type=_positive,
        metavar="TOKENS",
        help="512 for demo, else 2048 or the context if that is less",
    )
    group.add_argument(
        "--sequences",
        type=_sequences,
        metavar="N[,N,N]",
        help="sequences to calibrate, select and report on; 4,12,12 for demo, else 8,8,16",
    )
    _switch(group, "--deduplicate", "drop repeated documents instead of refusing them")


def _measurement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--score",
        choices=_SCORES,
        default="kl",
        help="what bits are allocated by; fisher and e_o skip the isolated forwards",
    )
    group.add_argument(
        "--read-plan", choices=_PLANS, default="decode", help="which tokens read quantized keys and values"
    )
    group.add_argument("--fisher-draws", type=_positive, default=4, metavar="R", help="sampled labels per token")
    group.add_argument("--batch-size", type=_positive, default=1, help="sequences in flight")
    group.add_argument(
        "--k-group-size",
        type=_positive,
        metavar="CHANNELS",
        help="channels per scale of keys; head_dim by default",
    )
    group.add_argument(
        "--v-group-size",
        type=_positive,
        metavar="CHANNELS",
        help="channels per scale of values; head_dim by default",
    )
    _switch(group, "--symmetric", "one grid around zero instead of minimum and scale")
    _switch(group, "--pairs", "also measure the paper's e_o of all K/V pairs")
    group.add_argument("--seed", type=_seed, default=0, help="of documents, offsets, labels, sampler and bootstrap")


def _search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--budget",
        nargs="+",
        action="extend",
        default=[],
        metavar="BUDGET",
        help="4bit, 4.25bpe, 35%%, 18KiB/token, 40GiB@32x64k; several make several profiles",
    )
    group.add_argument(
        "--layers", metavar="RANGES", help="write this configuration instead of searching: 0-1:bf16,2-27:K4V2"
    )
    group.add_argument("--keep", metavar="LAYERS", help="force layers: 0:K8V8,27:16")
    _switch(group, "--groups", "tie layers by DBSCAN as the KVTuner paper does")
    group.add_argument(
        "--sampler",
        choices=_SAMPLERS,
        help=f"of the refinement; none measures the warm starts only; {DEFAULT_SAMPLER} by default",
    )
    group.add_argument(
        "--trials", type=_positive, help=f"of the refinement, warm starts included; {DEFAULT_TRIALS} by default"
    )
    _switch(group, "--nested", "a larger budget never takes bits away; needs --sampler none")
    group.add_argument("--tp-size", type=_positive, default=1, help="tensor-parallel ranks that will serve")
    group.add_argument(
        "--pp-size", type=_positive, default=1, help="pipeline stages that will serve; each keeps the budget"
    )
    _switch(group, "--report", "write report.html and its pictures (`kvtuner report` does so later)", default=True)
    group.add_argument(
        "--storage",
        metavar="URL",
        help="Optuna storage to share between workers; SQLite in the run folder by default",
    )


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--out",
        metavar="FOLDER",
        help="run folder; runs/<model>-<budget> by default. The same command resumes",
    )
    group.add_argument("--config", metavar="FILE.yaml", help="flags by name, overlaid by the command line")
    _switch(group, "--dry-run", "geometry, bytes per token and forward tokens; loads no weights")


def _evaluation(commands: Any) -> None:
    summary = "is the answer still right, beside the unquantized model, fp8 and int8"
    command = commands.add_parser("eval", help=summary, description=summary, formatter_class=_Help)
    command.add_argument("profile", metavar="PROFILE|RUN", help="profile.json or run folder")
    _model(command)
    _data(command)
    group = command.add_argument_group("evaluation")
    group.add_argument(
        "--levels", type=_words(LEVELS), metavar="LEVEL[,...]", help=f"{', '.join(LEVELS)}; all, by default"
    )
    group.add_argument(
        "--read-plan", choices=_PLANS, help="which tokens read quantized keys and values; the search's by default"
    )
    group.add_argument(
        "--against",
        type=_words(),
        metavar="WAY[,...]",
        help="other ways to store the cache: fp8, or pairs such as K8V8, which is int8; these two by default",
    )
    group.add_argument(
        "--lengths",
        type=_counts,
        metavar="TOKENS[,...]",
        help="of recall's and needles' contexts; those of 128, 256, 512, 2048 and 8192 that fit, by default",
    )
    _unsaid(group, "--problems", "contexts of every length", of=_several)
    _unsaid(group, "--questions", "after each context")
    _unsaid(group, "--samples", "prompts that all ways continue")
    _unsaid(group, "--batch-size", "sequences in flight, of likelihood")
    group.add_argument("--seed", type=_seed, help="of documents, questions and bootstrap; the search's by default")
    tasks = command.add_argument_group("tasks of lm-evaluation-harness (pip install 'kvtuner[eval]')")
    tasks.add_argument(
        "--tasks", type=_words(), metavar="NAME[,...]", help="such as gsm8k; names in --include-path too"
    )
    tasks.add_argument("--include-path", metavar="FOLDER", help="of task files; they may run code of their own")
    tasks.add_argument("--limit", type=_several, help="questions of each task; all, by default")
    tasks.add_argument("--num-fewshot", type=int, help="examples before a question; the task's own, by default")
    _switch(tasks, "--apply-chat-template", "prompts go through the tokenizer's chat template")
    served = command.add_argument_group("servers, in place of a model loaded here")
    served.add_argument(
        "--endpoint",
        type=_endpoint,
        action="append",
        metavar="[WAY=]URL",
        help="of the server that serves the profile; others as bf16=URL, fp8=URL, K8V8=URL",
    )
    served.add_argument("--api", choices=_APIS, help="how they are spoken to; sglang by default")
    _unsaid(served, "--timeout", "for one answer", metavar="SECONDS")
    _unsaid(served, "--positions", "last ones of each sequence, that they score", metavar="TOKENS")
    _unsaid(served, "--scored-sequences", "that they score at most", metavar="N", of=_several)
    _unsaid(served, "--top-logprobs", "likely tokens that a truncated KL tells apart", metavar="K")
    run = command.add_argument_group("run")
    run.add_argument(
        "--out", metavar="FOLDER", help="what is asked once is kept here; runs/<model>-eval-... by default"
    )
    _common(command)


def _bench(commands: Any) -> None:
    summary = "is it worth it: servers under load, beside bf16 and fp8, and the ablation"
    command = commands.add_parser("bench", help=summary, description=summary, formatter_class=_Help)
    command.add_argument("profile", metavar="PROFILE|RUN", help="profile.json or run folder")
    _model(command)
    _data(command)
    types = Types(counts=_counts, positive=_positive, words=_words(), levels=_words(LEVELS), endpoint=_endpoint)
    add_bench_flags(command, types, seed=_seed, switch=_switch)
    _common(command)


def _common(parser: argparse.ArgumentParser) -> None:
    _switch(parser, "--json", "print the result as JSON on stdout")
    _switch(parser, "--debug", "traceback instead of one line")


def _unsaid(
    group: argparse._ActionsContainer,
    flag: str,
    text: str,
    *,
    metavar: str | None = None,
    of: Callable[[str], int] | None = None,
) -> None:
    """Add a number of `EVALUATION_DEFAULTS`, which stays None where the flag is not given; at least 1 without `of`."""
    usual = EVALUATION_DEFAULTS[flag.removeprefix("--").replace("-", "_")]
    group.add_argument(flag, type=of or _positive, metavar=metavar, help=f"{text}; {usual} by default")


def _switch(group: argparse._ActionsContainer, flag: str, text: str, *, default: bool = False) -> None:
    """A flag that ``--no-`` turns off, be it on by default or by the YAML file."""
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse flags over the YAML file that ``--config`` names, if any; argparse exits with 2 on a bad flag."""
    args = parser.parse_args(argv)
    if getattr(args, "config", None):
        subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        command: argparse.ArgumentParser = subparsers.choices[args.command]
        _apply_file(command, Path(args.config), keep_budget=not getattr(args, "budget", None))
        args = parser.parse_args(argv)
    if args.command in ("search", "calibrate") and not args.model:
        parser.error(f"{args.command} needs --model")
    return args


def _apply_file(command: argparse.ArgumentParser, path: Path, *, keep_budget: bool) -> None:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        command.error(f"cannot read --config {path}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        command.error(f"--config {path} is not YAML: {' '.join(str(error).split())}")
    if values is None:
        return
    if not isinstance(values, dict):
        command.error(f"--config {path} must map flag names to values")
    known = {action.dest: action for action in command._actions if action.dest not in ("help", "config")}
    for key, value in values.items():
        action = known.get(str(key).replace("-", "_"))
        if action is None:
            command.error(f"--config {path}: unknown flag {key!r}; known: {', '.join(sorted(known))}")
        if value is None:  # the flag's default, as if the line were absent
            continue
        if action.dest != "budget" or keep_budget:  # a repeated flag would add to the file's list, not replace it
            command.set_defaults(**{action.dest: _file_value(command, action, key, value, path)})


def _file_value(command: argparse.ArgumentParser, action: argparse.Action, key: Any, value: Any, path: Path) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            command.error(f"--config {path}: {key} must be true or false, not {value!r}")
        return value
    if action.dest == "budget":
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    text = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
    if action.dest in _PATHS:
        text = os.path.expanduser(text)  # a shell does it for flags
    try:
        return command._get_value(action, text) if action.choices is None else _chosen(action, text)
    except (argparse.ArgumentError, argparse.ArgumentTypeError, ValueError) as error:
        command.error(f"--config {path}: {key}: {error}")


def _chosen(action: argparse.Action, text: str) -> str:
    if action.choices is not None and text not in action.choices:
        raise ValueError(f"{text!r} is none of {', '.join(map(str, action.choices))}")
    return text


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _several(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"intervals need at least 2, not {value}")
    return value


def _endpoint(text: str) -> tuple[str, str]:
    """A way and the server of it; the profile's where there is no way."""
    way, is_named, url = text.partition("=")
    if not is_named or "://" in way:
        way, url = "profile", text
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"an endpoint is http://HOST:PORT, or WAY=http://HOST:PORT, not {text!r}")
    return way, url


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_positive(part) for part in text.split(",")}))


def _words(known: Sequence[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """Words between commas, each once, in order."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        if not words:
            raise argparse.ArgumentTypeError("name one at least")
        for word in words:
            if known and word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words

    return parse


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"must be within 0..{2**31 - 1}, not {value}")
    return value


def _sequences(text: str) -> tuple[int, int, int]:
    counts = [_positive(part) for part in str(text).split(",")]
    if len(counts) == 1:
        counts *= 3
    if len(counts) != 3:
        raise argparse.ArgumentTypeError(f"one count or three (calibrate,select,report), not {text!r}")
    if counts[2] < 2:
        raise argparse.ArgumentTypeError("the report split needs at least 2 sequences for its intervals")
    return counts[0], counts[1], counts[2]
