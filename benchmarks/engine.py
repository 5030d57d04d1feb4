"""Times the local engine beside transformers' generate and continuous batching, and SGLang on this processor.

    PYTHONPATH=examples/sglang_on_cpu OMP_NUM_THREADS=1 python benchmarks/engine.py --json F --markdown F --picture F

The demo model and models of about 25M and 100M parameters with random weights, in float32. In every round each way
takes its turn, so that what else runs on the machine hits all of them; figures are medians of rounds. Tokens that were
asked for count, padding does not. *Mixed* requests have prompts and answers from an eighth to four times as long, and
16 run at once; `generate` answers them in batches of 16, padded to the longest.

Goals: with 16 mixed requests at once 3 times transformers; at least SGLang's throughput; a profile of 4 bits no slower
than unquantized rows at 1,000 tokens of context and faster at 8,000; hits cut the time to the first token in
proportion; the scheduler's own part under 5 % of a step of the demo model, and near linear to 256 requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from cpu_parts.growth_plot import growth_picture
from serving_parts.answering import Answered, by_client, local_server
from serving_parts.engine_costs import decoding_after, hit_first_tokens, own_cost
from serving_parts.peak_memory import MIB, peak_of_answerer, peak_of_children
from serving_parts.subject import LENGTHS, OWN, PACKED, Subject, random_prompt

from kvtuner.bench.client import Client
from kvtuner.bench.server import run_server
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from serving_parts.answering import Asked

    Rows = dict[str, dict[str, Any]]

AT_ONCE: Final = 16
FIGURES: Final = (
    ("tokens/s", "tokens_per_s", 1.0),
    ("tokens/processor s", "tokens_per_cpu_s", 1.0),
    ("TTFT ms", "ttft_ms", 1.0),
    ("KV MiB", "kv_bytes", 2.0**-20),
)
"""What tables show: its title, its key, and its factor."""
SGLANG: Final = (
    "--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--disable-radix-cache", "--sleep-on-idle",
    "--max-total-tokens", "32768", "--max-running-requests", "64", "--mem-fraction-static", "0.5",
)  # fmt: skip


def equal_requests(rng: random.Random, name: str, count: int) -> list[Asked]:
    """Requests of one length."""
    num_prompt, num_answer = LENGTHS[name]
    return [(random_prompt(rng, num_prompt), num_answer) for _ in range(count)]


def mixed_requests(rng: random.Random, name: str, count: int) -> list[Asked]:
    """Requests whose logarithms of lengths are uniform."""
    num_prompt, num_answer = LENGTHS[name]

    def drawn(length: int) -> int:
        return max(1, round(length * 2 ** rng.uniform(-3, 2)))

    return [(random_prompt(rng, drawn(num_prompt)), drawn(num_answer)) for _ in range(count)]


def in_turns(
    answerers: dict[str, Callable[[Sequence[Asked]], Answered]], draw: Callable[[int], list[Asked]], rounds: int
) -> Rows:
    """The medians of each way, which all answer the same requests in a round."""
    answered: dict[str, list[Answered]] = {name: [] for name in answerers}
    for number in range(rounds):
        asked = draw(number)
        for name, answer in answerers.items():
            answered[name].append(answer(asked))
    return {name: medians(runs) for name, runs in answered.items()}


def medians(runs: Sequence[Answered]) -> dict[str, Any]:
    """The figures of several runs of a way."""
    firsts, has_cpu = [statistics.median(run.ttft_s) for run in runs if run.ttft_s], all(run.cpu_s for run in runs)
    return {
        "tokens_per_s": statistics.median(run.tokens / run.wall_s for run in runs),
        "tokens_per_cpu_s": statistics.median(run.tokens / (run.cpu_s or 1) for run in runs) if has_cpu else None,
        "ttft_ms": 1e3 * statistics.median(firsts) if firsts else None,
        "kv_bytes": runs[-1].kv_bytes,
        "runs": [{**asdict(run), "ttft_s": len(run.ttft_s)} for run in runs],
    }


def throughput(subject: Subject, args: argparse.Namespace) -> dict[str, Rows]:
    """Equal requests, so many at once each, and mixed ones."""
    rows: dict[str, Rows] = {}
    for count in args.requests:

        def equal(number: int, count: int = count) -> list[Asked]:
            return equal_requests(random.Random(f"{count} {number}"), subject.name, count)

        answerers = subject.answerers(count, continuous=count == AT_ONCE)
        for answer in answerers.values():
            answer(equal_requests(random.Random(-1), subject.name, 1))
        rows[f"{count} equal"] = in_turns(answerers, equal, args.rounds)
    rows[f"{args.mixed} mixed, {AT_ONCE} at once"] = in_turns(
        subject.answerers(AT_ONCE, continuous=True),
        lambda number: mixed_requests(random.Random(f"mixed {number}"), subject.name, args.mixed),
        args.rounds,
    )
    return rows


def over_http(subject: Subject, args: argparse.Namespace, folder: Path) -> dict[str, Rows]:
    """Equal requests to SGLang and to `kvtuner serve-local`, by the same client."""
    tokenizer, rows = subject.loaded.tokenizer, {}
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(sglang_server(subject, folder))
        clients = {"SGLang": Client(url, "sglang", "model", tokenizer, 600)}
        for name, profile in (("serve-local", None), ("serve-local, K4V4", subject.profile_file)):
            url = stack.enter_context(local_server(subject.path, profile, 64))
            clients[name] = Client(url, "openai", "model", tokenizer, 600)
        for count in args.requests:

            def equal(number: int, count: int = count) -> list[Asked]:
                return equal_requests(random.Random(f"http {count} {number}"), subject.name, count)

            answerers: dict[str, Callable[[Sequence[Asked]], Answered]] = {
                name: lambda asked, client=client, count=count: by_client(client, asked, count)  # type: ignore[misc]  # bound now
                for name, client in clients.items()
            }
            for answer in answerers.values():
                answer(equal_requests(random.Random(f"warm {count}"), subject.name, count))
            rows[f"{count} equal"] = in_turns(answerers, equal, args.rounds)
    return rows


def memory(subject: Subject, args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """MiB of the processes of each way with its interpreter, libraries and weights, for as many equal requests."""
    names = (OWN, PACKED, "generate", "continuous batching")
    table = {name: peak_of_answerer(subject.name, folder / "memory", name, AT_ONCE) for name in names}
    if args.sglang:
        asked, tokenizer = equal_requests(random.Random(0), subject.name, AT_ONCE), subject.loaded.tokenizer
        servers: dict[str, Callable[[], contextlib.AbstractContextManager[str]]] = {
            "SGLang": lambda: sglang_server(subject, folder),
            "serve-local": lambda: local_server(subject.path, None, AT_ONCE),
            "serve-local, K4V4": lambda: local_server(subject.path, subject.profile_file, AT_ONCE),
        }
        for name, start in servers.items():
            with start() as url:
                loaded = peak_of_children()
                client = Client(url, "sglang" if name == "SGLang" else "openai", "model", tokenizer, 600)
                by_client(client, asked, AT_ONCE)
                table[name] = {"loaded": loaded / MIB, "peak": peak_of_children() / MIB}
    return table


@contextlib.contextmanager
def sglang_server(subject: Subject, folder: Path) -> Iterator[str]:
    """The URL of SGLang until the block ends."""
    with run_server(["--model-path", str(subject.path), *SGLANG], folder / "sglang.log", 600) as server:
        yield server.url


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures, written after each model: the same command goes on with those that the file lacks."""
    results: dict[str, Any] = {
        "command": f"PYTHONPATH=examples/sglang_on_cpu OMP_NUM_THREADS=1 python {shlex.join(sys.argv)}",
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "load_at_start": os.getloadavg()[0],
        "models": {},
    }
    if args.json and args.json.exists():
        results["models"] = json.loads(args.json.read_text(encoding="utf-8"))["models"]
    for name in args.models:
        if name in results["models"]:
            continue
        subject = Subject(name, folder)
        found = results["models"][name] = {"parameters": subject.num_parameters, "lengths": LENGTHS[name]}
        found["in_process"] = throughput(subject, args)
        if name == "demo":
            found["decoding"] = decoding_after(subject, args.contexts, args.rounds)
            found["hits"] = hit_first_tokens(subject, args.rounds)
            found["own_cost"] = own_cost(subject, args.growth)
        if args.sglang:
            found["http"] = over_http(subject, args, folder)
        found["memory"] = memory(subject, args, folder)
        print(f"{name} is measured", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results["load_at_end"] = os.getloadavg()[0]
    return results


def machine() -> str:
    """The cores of this machine and whose they are."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{os.cpu_count()} virtual cores of {name}{' with AVX-512' if 'avx512' in facts else ''}"


def page(results: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    lines = [
        "# The local engine", "",
        "Figures of [docs/engine.md](../../docs/engine.md#speed): float32, medians of rounds in which the ways take"
        f" turns, {results['threads']} thread. The load of the machine, {results['machine']}, was"
        f" {results['load_at_start']:.1f} at the start, what was before included, and {results['load_at_end']:.1f} at"
        " the end.", "",
        f"    {results['command']}", "",
    ]  # fmt: skip
    for name, found in results["models"].items():
        num_prompt, num_answer = found["lengths"]
        lines += [
            f"## {name}: {found['parameters'] / 1e6:.1f}M parameters, {num_prompt} tokens in, {num_answer} out",
            "",
        ]
        for part, title in (("in_process", "In one process"), ("http", "Over HTTP, by SGLang's client")):
            if part in found:
                lines += [f"### {title}", "", *_throughput_table(found[part]), ""]
        for part, title in (
            ("memory", f"MiB of processes: loaded, and at the peak of {AT_ONCE} equal requests"),
            ("decoding", "Milliseconds of processor time of a step of 4 requests, by context"),
            (
                "hits",
                "Milliseconds to the first token of a prompt of 2,048 tokens, by the share that was a hit, and what its"
                " other tokens take of a whole prompt",
            ),
            (
                "own_cost",
                "A step of the engine by requests: milliseconds, what is not the model's, and of that what is the"
                " scheduler's",
            ),
        ):
            if part in found:
                lines += [f"### {title}", "", *_plain_table(found[part]), ""]
    return "\n".join(lines)


def _throughput_table(rows: dict[str, Rows]) -> list[str]:
    names = list(dict.fromkeys(name for each in rows.values() for name in each))
    table = []
    for load, by_name in rows.items():
        for figure, key, scale in FIGURES:
            cells = [by_name.get(name, {}).get(key) for name in names]
            if any(cell is not None for cell in cells):
                table.append((load, figure, *("-" if cell is None else f"{cell * scale:,.4g}" for cell in cells)))
    return Table(("", "", *names), table).markdown()


def _plain_table(rows: dict[str, dict[str, float]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    return Table(
        ("", *columns), [(key, *(f"{row[name]:.3g}" for name in columns)) for key, row in rows.items()]
    ).markdown()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16, 64], help="equal requests at once")
    parser.add_argument("--mixed", type=int, default=64, help="mixed requests")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1000, 8000], help="tokens before decoding")
    parser.add_argument("--growth", nargs="+", type=int, default=[1, 4, 16, 64, 128, 256], help="requests of steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sglang", action=argparse.BooleanOptionalAction, default=True, help="also servers over HTTP")
    for name in ("json", "markdown", "picture"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(args, Path(folder))
    text = page(results)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    own = results["models"].get("demo", {}).get("own_cost")
    if args.picture and own:
        args.picture.write_text(cost_picture(own), encoding="utf-8")


def cost_picture(own: dict[str, dict[str, float]]) -> str:
    """The picture of a step's time by requests."""
    lines = {
        name: [(int(count), row[name]) for count, row in own.items()] for name in ("step", "outside of the model")
    }  # fmt: skip
    return growth_picture(
        lines, "a decoding step of the local engine", "requests, log scale", "processor ms, log scale"
    )


if __name__ == "__main__":
    main()
