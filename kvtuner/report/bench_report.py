"""The report of a benchmark: a page that needs nothing else, Markdown, JSON, pictures. Measures nothing."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.usage import GPU_BUSY, GPU_MEMORY, GPU_MEMORY_BUSY, MEMORY
from kvtuner.exported_configs.profile.evaluation_record import PROFILE
from kvtuner.precision import tokens_per_gib
from kvtuner.report.bench_result import count_text, gates_that_passed, milliseconds, overview
from kvtuner.report.evaluation_report import cell_title, cell_values, versions_text
from kvtuner.report.formatting import NOT_MEASURED, model_name, number, percent
from kvtuner.report.table import Table, markdown_text
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvtuner.bench.load_metrics import SchemeRun
    from kvtuner.exported_configs.profile.evaluation_record import Evaluation
    from kvtuner.report.bench_result import BenchResult, SchemeResult

PAGE: Final = "bench.html"
MARKDOWN: Final = "bench.md"
JSON: Final = "bench.json"
NO_ROOM: Final = "does not fit"


@dataclass(frozen=True, slots=True)
class ReportSection:
    """One part of the report.

    Attributes:
        title: The title.
        text: The text that says what is shown, and how to read it.
        tables: The tables, in order.
        picture: The name of a chart; empty without one.
        description: The description of the chart for those who cannot see it.
    """

    title: str
    text: str
    tables: Sequence[Table]
    picture: str = ""
    description: str = ""


def write_report(result: BenchResult, folder: Path) -> Path:
    """Write all files of the report; returns the path of the page.

    Raises:
        RunFolderError: The disk is full or the folder cannot be written.
    """
    from kvtuner.report.html_page import Picture, render
    from kvtuner.report.plots.bench_plots import charts

    charted, parts = charts(result), sections(result)
    for name, png in charted.items():
        write_atomically(folder / f"{name}.png", png)
    title = f"Serving {result.model.id} with a quantized KV cache: what it is worth"
    pictures = {
        part.picture: Picture(charted[part.picture], part.description) for part in parts if part.picture in charted
    }
    page = render("bench.html", title=title, sections=parts, pictures=pictures)
    write_atomically(folder / JSON, json.dumps(result.to_json(), indent=1) + "\n")
    write_atomically(folder / MARKDOWN, _markdown(title, parts, charted))
    write_atomically(folder / PAGE, page.encode(errors="replace"))
    return folder / PAGE


def sections(result: BenchResult) -> list[ReportSection]:
    """All sections, in order, without those of loads that were not sent."""
    loads = [
        _prompts(result),
        _outputs(result),
        _concurrency(result),
        _batches(result),
        _stability(result),
        _machine(result),
        _left_out(result),
    ]
    return [
        _overview(result),
        _gates(result),
        *([] if result.evaluation is None else [_quality(result, result.evaluation)]),
        _memory(result),
        *(section for section in loads if any(table.rows for table in section.tables)),
        _provenance(result),
    ]


def _markdown(title: str, parts: Sequence[ReportSection], pictures: Mapping[str, bytes]) -> str:
    lines = [f"# {markdown_text(title)}", ""]
    for part in parts:
        lines += [f"## {part.title}", "", markdown_text(part.text), ""]
        if part.picture in pictures:
            lines += [f"![{part.description}]({part.picture}.png)", ""]
        for table in part.tables:
            lines += [*table.markdown(), ""]
    return "\n".join(lines)


def _overview(result: BenchResult) -> ReportSection:
    problems = result.problems()
    verdict = f"{gates_that_passed(result)}."
    if problems:
        verdict = f"{len(problems)} problems; use no figure before they are understood: {'; '.join(problems)}."
    refused = [(scheme.name, scheme.refused) for scheme in result.schemes if scheme.refused is not None]
    tables = [overview(result), *([Table(("not served", "because"), refused, wrap=True)] if refused else [])]
    return ReportSection(
        "Side by side", f"{verdict} Speed is at the most requests in flight that all schemes had.", tables
    )


def _gates(result: BenchResult) -> ReportSection:
    asked = [scheme for scheme in result.schemes if scheme.gates]
    verdicts = {scheme.name: {gate.name: gate.verdict for gate in scheme.gates} for scheme in asked}
    names = dict.fromkeys(gate.name for scheme in asked for gate in scheme.gates)
    rows = [(name, *(by_gate[name] for by_gate in verdicts.values())) for name in names]
    details = [
        (scheme.name, gate.name, gate.verdict, gate.words)
        for scheme in asked
        for gate in scheme.gates
        if gate.verdict != "passed" or scheme.name == PROFILE
    ]
    text = (
        "Figures that a model cannot have produced fail the run: answers that never came, tokens that are not in the"
        " text, prompts that were in the cache, a first token that costs the same after any prompt, outputs of any"
        " length in the same time, and more tokens than memory can deliver weights for."
    )
    headers = ("", "of the profile, and what did not pass", "", "by")
    tables = (Table(("", *verdicts), rows), Table(headers, details, wrap=True))
    return ReportSection("Can these figures be real?", text, tables)


def _quality(result: BenchResult, evaluation: Evaluation) -> ReportSection:
    names = [served.name for served in result.schemes if served.scheme.is_local]
    text = (
        "By kvtuner eval, with transformers, on text that calibration and selection did not see, all schemes paired."
        " Mean and 95% interval. KL is from the unquantized model. A row whose unquantized model fails or hardly fails"
        " (marked) cannot show a loss."
    )
    rows = [(cell_title(cell), *cell_values(cell, names)) for cell in evaluation.cells]
    description = "KL from the unquantized model by effective bits, a point for each scheme; lower is better."
    return ReportSection("Quality", text, [Table(("", *names), rows)], "quality-by-bits", description)


def _memory(result: BenchResult) -> ReportSection:
    sizes = [(scheme, size) for scheme in result.schemes if (size := scheme.bytes_per_token) is not None]
    largest = max((size for _, size in sizes), default=0)
    rows = [
        (
            scheme.name,
            number(scheme.bits),
            f"{size:,}",
            f"{tokens_per_gib(size):,}",
            f"{largest / size:.2f}x",
            count_text(scheme.tokens_that_fit),
        )
        for scheme, size in sizes
    ]
    headers = ("", "effective bits", "bytes/token", "tokens/GiB", "against the largest", "tokens that fit the server")
    text = "Bytes of keys and values of all layers, with scales, on one rank that holds all heads."
    description = "Tokens per GiB by effective bits, a point for each scheme; higher is better."
    return ReportSection("Memory", text, [Table(headers, rows)], "memory-by-bits", description)


def _prompts(result: BenchResult) -> ReportSection:
    text = (
        "One request at a time, 16 tokens generated; every prompt is new to the server. Milliseconds to the first"
        " token: median / P90 / P99; P99 of few is the slowest."
    )
    table = _by_load(result, "prompt", "prompt_tokens", "prompt tokens", _percentiles("ttft_s"))
    description = "Median time to the first token by prompt length, a line for each scheme; lower is better."
    return ReportSection("Time to the first token", text, [table], "first-token-by-prompt", description)


def _outputs(result: BenchResult) -> ReportSection:
    text = "One request at a time, after 100 tokens. Milliseconds: median / P90 / P99; P99 of few is the slowest."
    figures = {
        "tokens generated: time per token": "tpot_s",
        "tokens generated: between tokens": "itl_s",
        "tokens generated: whole request": "e2e_s",
    }
    tables = [_by_load(result, "output", "output_tokens", title, _percentiles(name)) for title, name in figures.items()]
    return ReportSection("Generation", text, tables)


def _concurrency(result: BenchResult) -> ReportSection:
    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "in flight: output tokens/s": lambda row: number(row["output_tokens_per_s"]),
        "in flight: requests/s": lambda row: number(row["requests_per_s"]),
        "in flight: ms to the first token": _percentiles("ttft_s"),
        "in flight: ms per token": _percentiles("tpot_s"),
        "in flight: ms of a request": _percentiles("e2e_s"),
        "in flight: answered": lambda row: percent(row["success_rate"]),
    }
    tables = [_by_load(result, "concurrency", "concurrency", title, value) for title, value in figures.items()]
    text = f"{_shape(result, 'concurrency')} Percentiles are median / P90 / P99; P99 of few is the slowest."
    description = "Output tokens per second by requests in flight, a line for each scheme; higher is better."
    return ReportSection("Many requests", text, tables, "throughput-by-concurrency", description)


def _batches(result: BenchResult) -> ReportSection:
    def value(row: Mapping[str, Any]) -> str:
        return f"{milliseconds(row['duration_s'] / row['rounds'])} ({number(row['output_tokens_per_s'])}/s)"

    table = _by_load(result, "batch", "concurrency", "sent at one moment", value)
    text = f"{_shape(result, 'batch')} Milliseconds until all are answered, mean, and output tokens per second."
    return ReportSection("Batches", text, [table])


def _stability(result: BenchResult) -> ReportSection:
    rounds = {scheme.name: scheme.run.rounds() for scheme in result.schemes if scheme.run is not None}
    has_gpu = any(GPU_MEMORY in row for rows in rounds.values() for row in rows)
    kind, place = (GPU_MEMORY, "GPU") if has_gpu else (MEMORY, "host")
    headers = ("", "rounds", "answered", "first round ms", "last round ms", "slowest ms")
    table = Table(
        (*headers, f"{place} memory MiB first / last"),
        [_stability_row(name, rows, kind) for name, rows in rounds.items() if rows],
    )
    text = f"The same load again and again. {_shape(result, 'stability')} Median time of a request, by round."
    return ReportSection("Stability", text, [table])


def _stability_row(name: str, rounds: Sequence[Mapping[str, Any]], memory: str) -> tuple[str, ...]:
    medians = [row["e2e_s"]["p50"] for row in rounds if row["e2e_s"]["p50"] is not None]
    return (
        name,
        str(len(rounds)),
        f"{sum(row['answered'] for row in rounds)} of {sum(row['sent'] for row in rounds)}",
        *(milliseconds(median) for median in ((medians[0], medians[-1], max(medians)) if medians else (None,) * 3)),
        f"{_mib(rounds[0].get(memory))} / {_mib(rounds[-1].get(memory))}",
    )


def _machine(result: BenchResult) -> ReportSection:
    headers = ("", "host MiB", "GPU MiB", "GPU busy", "GPU memory busy", "weights read GB/s", "between loads", "client")
    text = (
        "The most that the server's processes held; how busy the GPU and its memory were under the load with most"
        " tokens per second (NVML: share of time); the most bytes of weights per second that tokens took at least;"
        " what measuring cost, by the time that was measured: time between loads, and this client's processor time."
    )
    rows = [_machine_row(scheme, scheme.run) for scheme in result.schemes if scheme.run is not None]
    return ReportSection("Machine", text, [Table(headers, rows)])


def _machine_row(scheme: SchemeResult, run: SchemeRun) -> tuple[str, ...]:
    loads, cost = run.rows(), run.harness()
    memory, gpu = (max((row[name] for row in loads if name in row), default=None) for name in (MEMORY, GPU_MEMORY))
    busiest = max(loads, key=lambda row: row["output_tokens_per_s"], default={})
    weights = max((scheme.read_bytes_per_s(row) or 0.0 for row in loads), default=0.0)
    return (
        scheme.name,
        _mib(memory),
        _mib(gpu),
        percent(busiest.get(GPU_BUSY)),
        percent(busiest.get(GPU_MEMORY_BUSY)),
        number(weights / 1e9) if weights else NOT_MEASURED,
        percent(cost["overhead"]),
        percent(cost["client_cpu"]),
    )


def _left_out(result: BenchResult) -> ReportSection:
    rows = {
        (scheme.name, load.kind, f"{load.prompt_tokens:,} + {load.output_tokens:,}", str(load.concurrency))
        for scheme in result.schemes
        if scheme.run is not None
        for load in scheme.run.left_out
    }
    text = "Asked for, but larger than the context, the KV pool or the requests that the server runs at once."
    return ReportSection(
        "What did not fit", text, [Table(("", "load", "tokens of a request", "in flight"), sorted(rows))]
    )


def _provenance(result: BenchResult) -> ReportSection:
    made = result.provenance
    servers = [
        (
            f"server {scheme.name}",
            f"SGLang {server.version or '-'} on {server.device or '-'}, weights {server.dtype or '-'}, cache"
            f" {server.digest or server.kv_cache_dtype or '-'}",
        )
        for scheme in result.schemes
        if (server := scheme.server) is not None
    ]
    rows = [
        ("command", made.command),
        ("machine", made.machine),
        ("model", model_name(result.model)),
        ("profile", result.profile.digest),
        ("flags of all servers", shlex.join(result.server_args) or "none"),
        ("versions", versions_text(made)),
        *servers,
    ]
    text = (
        "Load by SGLang's own client, sglang.benchmark.serving. Prompts are cut from the text of --data, no two begin"
        " alike, all schemes are sent the same; outputs are greedy and as long as asked."
    )
    return ReportSection("Where the figures come from", text, [Table(("", ""), rows, wrap=True)])


def _by_load(result: BenchResult, kind: str, key: str, title: str, value: Callable[[dict[str, Any]], str]) -> Table:
    """A row for each size of a load, a column for each scheme that was served.

    Args:
        result: The benchmark.
        kind: The kind of loads to show.
        key: The field of a load that the rows differ in.
        title: The header of that field.
        value: Text of a load's figures.
    """
    served = [scheme for scheme in result.schemes if scheme.run is not None]
    values = {scheme.name: {row[key]: value(row) for row in scheme.rows(kind)} for scheme in served}
    left_out = {scheme.name: _left_out_sizes(scheme, kind, key) for scheme in served}
    rows = [
        (
            f"{size:,}",
            *(values[name].get(size, NO_ROOM if size in left_out[name] else NOT_MEASURED) for name in values),
        )
        for size in sorted({size for sizes in values.values() for size in sizes})
    ]
    return Table((title, *values), rows)


def _left_out_sizes(scheme: SchemeResult, kind: str, key: str) -> set[int]:
    """The sizes of loads that were left out, and those that doubling did not come to."""
    assert scheme.run is not None
    sizes = {getattr(load, key) for load in scheme.run.left_out if load.kind == kind}
    most = max((row["concurrency"] for row in scheme.rows("concurrency")), default=0)
    return sizes | {2**power for power in range(9) if kind == "concurrency" and 2**power > most}


def _shape(result: BenchResult, kind: str) -> str:
    row = next((row for scheme in result.schemes for row in scheme.rows(kind)), None)
    return "" if row is None else f"{row['prompt_tokens']:,} tokens in, {row['output_tokens']:,} out."


def _percentiles(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: " / ".join(milliseconds(row[name][quantile]) for quantile in ("p50", "p90", "p99"))


def _mib(num_bytes: float | None) -> str:
    return NOT_MEASURED if num_bytes is None else f"{num_bytes / 2**20:,.0f}"
