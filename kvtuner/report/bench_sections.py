"""What a benchmark's report says, as sections of words and tables. Knows nothing of HTML or Markdown."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.usage import GPU_BUSY, GPU_MEMORY, GPU_MEMORY_BUSY, MEMORY
from kvtuner.exported_configs.profile.evaluation_record import PROFILE
from kvtuner.precision import tokens_per_gib
from kvtuner.report.bench_result import gates_that_passed, milliseconds, overview
from kvtuner.report.evaluation_report import TITLES, value_text
from kvtuner.report.formatting import NOT_MEASURED, number, percent

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile.evaluation_record import Cell
    from kvtuner.report.bench_result import BenchResult, WayResult

NO_ROOM: Final = "does not fit"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headers.

    Attributes:
        headers: of columns.
        rows: of cells.
        wrap: whether cells may take several lines.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    wrap: bool = False


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Part of a report.

    Attributes:
        title: of it.
        words: what is shown, and how to read it.
        tables: in order.
        picture: name of a chart, and what it shows in words; None without.
    """

    title: str
    words: str
    tables: tuple[Table, ...]
    picture: tuple[str, str] | None = None


def sections(result: BenchResult) -> list[ReportSection]:
    """All of them, in order."""
    found = [
        _overview(result),
        _gates(result),
        *([_quality(result)] if result.evaluation is not None else []),
        _memory(result),
        _prompts(result),
        _outputs(result),
        _concurrency(result),
        _batches(result),
        _stability(result),
        _resources(result),
        _left_out(result),
        _making(result),
    ]
    return [each for each in found if each is not None]


def verdict(result: BenchResult) -> str:
    """In one sentence."""
    problems = result.problems()
    if problems:
        return f"{len(problems)} problems; use no figure before they are understood: {'; '.join(problems)}."
    return f"{gates_that_passed(result)}."


def _overview(result: BenchResult) -> ReportSection:
    words = f"{verdict(result)} Speed is at the most requests in flight that all ways had."
    headers, rows = overview(result)
    refused = [(each.way.name, each.refused) for each in result.ways if each.refused is not None]
    tables = [Table(tuple(headers), tuple(map(tuple, rows)))]
    if refused:
        tables.append(Table(("not served", "because"), tuple((name, str(why)) for name, why in refused), wrap=True))
    return ReportSection("Side by side", words, tuple(tables))


def _gates(result: BenchResult) -> ReportSection:
    asked = [each for each in result.ways if each.gates]
    names = list(dict.fromkeys(gate.name for each in asked for gate in each.gates))
    found = {each.way.name: {gate.name: gate.verdict for gate in each.gates} for each in asked}
    verdicts = tuple((name, *(found[way][name] for way in found)) for name in names)
    rows = [
        (each.way.name, gate.name, gate.verdict, gate.words)
        for each in asked
        for gate in each.gates
        if gate.verdict != "passed" or each.way.name == PROFILE
    ]
    words = (
        "Figures that a model cannot have produced fail the run: answers that never came, tokens that are not in the"
        " text, prompts that were in the cache, a first token that costs the same after any prompt, outputs of any"
        " length in the same time, and more tokens than memory can deliver weights for."
    )
    details = Table(("", "of the profile, and what did not pass", "", "by"), tuple(rows), wrap=True)
    return ReportSection("Can these figures be real?", words, (Table(("", *found), verdicts), details))


def _quality(result: BenchResult) -> ReportSection:
    evaluation = result.evaluation
    assert evaluation is not None
    names = [each.way.name for each in result.ways if each.way.is_local]
    rows = [
        (_place(cell), *(value_text(cell, {r.subject: r for r in cell.results}.get(name)) for name in names))
        for cell in evaluation.cells
    ]
    words = (
        "By kvtuner eval, with transformers, on text that calibration and selection did not see, all ways paired. Mean"
        " and 95% interval. KL is from the unquantized model. A row whose unquantized model fails or hardly fails"
        " (marked) cannot show a loss."
    )
    text = "KL from the unquantized model by effective bits, a point for each way; lower is better."
    return ReportSection("Quality", words, (Table(("", *names), tuple(rows)),), ("quality-by-bits", text))


def _memory(result: BenchResult) -> ReportSection:
    reference = max((each.way.bytes_per_token or 0 for each in result.ways), default=0)
    rows = []
    for each in result.ways:
        size = each.way.bytes_per_token
        if size is None:
            continue
        fit = None if each.server is None else each.server.tokens_that_fit
        against = f"{reference / size:.2f}x"
        rows.append(
            (
                each.way.name,
                number(each.bits),
                f"{size:,}",
                f"{tokens_per_gib(size):,}",
                against,
                "-" if fit is None else f"{fit:,}",
            )
        )
    headers = ("", "effective bits", "bytes/token", "tokens/GiB", "against the largest", "tokens that fit the server")
    words = "Bytes of keys and values of all layers, with scales, on one rank that holds all heads."
    text = "Tokens per GiB by effective bits, a point for each way; higher is better."
    return ReportSection("Memory", words, (Table(headers, tuple(rows)),), ("memory-by-bits", text))


def _prompts(result: BenchResult) -> ReportSection | None:
    words = (
        "One request at a time, 16 tokens generated; every prompt is new to the server. Milliseconds to the first"
        " token: median / P90 / P99; P99 of few is the slowest."
    )
    table = _by_way(result, "prompt", "prompt_tokens", "prompt tokens", lambda row: _three(row["ttft_s"]))
    text = "Median time to the first token by prompt length, a line for each way; lower is better."
    if table is None:
        return None
    return ReportSection("Time to the first token", words, (table,), ("first-token-by-prompt", text))


def _outputs(result: BenchResult) -> ReportSection | None:
    words = "One request at a time, after 100 tokens. Milliseconds: median / P90 / P99; P99 of few is the slowest."
    tables = [
        _by_way(result, "output", "output_tokens", title, lambda row, name=name: _three(row[name]))  # type: ignore[misc]
        for title, name in (
            ("tokens generated: time per token", "tpot_s"),
            ("tokens generated: between tokens", "itl_s"),
            ("tokens generated: whole request", "e2e_s"),
        )
    ]
    found = tuple(table for table in tables if table is not None)
    return ReportSection("Generation", words, found) if found else None


def _concurrency(result: BenchResult) -> ReportSection | None:
    kinds: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("in flight: output tokens/s", lambda row: number(row["output_tokens_per_s"])),
        ("in flight: requests/s", lambda row: number(row["requests_per_s"])),
        ("in flight: ms to the first token", lambda row: _three(row["ttft_s"])),
        ("in flight: ms per token", lambda row: _three(row["tpot_s"])),
        ("in flight: ms of a request", lambda row: _three(row["e2e_s"])),
        ("in flight: answered", lambda row: percent(row["success_rate"])),
    )
    tables = [_by_way(result, "concurrency", "concurrency", title, value) for title, value in kinds]
    found = tuple(table for table in tables if table is not None)
    text = "Output tokens per second by requests in flight, a line for each way; higher is better."
    words = f"{_shape(result, 'concurrency')} Percentiles are median / P90 / P99; P99 of few is the slowest."
    return ReportSection("Many requests", words, found, ("throughput-by-concurrency", text)) if found else None


def _batches(result: BenchResult) -> ReportSection | None:
    table = _by_way(
        result,
        "batch",
        "concurrency",
        "sent at one moment",
        lambda row: f"{milliseconds(row['duration_s'] / row['rounds'])} ({number(row['output_tokens_per_s'])}/s)",
    )
    words = f"{_shape(result, 'batch')} Milliseconds until all are answered, mean, and output tokens per second."
    return None if table is None else ReportSection("Batches", words, (table,))


def _stability(result: BenchResult) -> ReportSection | None:
    by_way = {each.way.name: each.run.rounds() for each in result.ways if each.run is not None}
    has_gpu = any(GPU_MEMORY in row for rounds in by_way.values() for row in rounds)
    kind, place = (GPU_MEMORY, "GPU") if has_gpu else (MEMORY, "host")
    rows = []
    for name, rounds in by_way.items():
        if not rounds:
            continue
        e2e = [row["e2e_s"]["p50"] for row in rounds if row["e2e_s"]["p50"] is not None]
        rows.append(
            (
                name,
                str(len(rounds)),
                f"{sum(row['answered'] for row in rounds)} of {sum(row['sent'] for row in rounds)}",
                milliseconds(e2e[0]) if e2e else NOT_MEASURED,
                milliseconds(e2e[-1]) if e2e else NOT_MEASURED,
                milliseconds(max(e2e)) if e2e else NOT_MEASURED,
                f"{_mib(rounds[0].get(kind))} / {_mib(rounds[-1].get(kind))}",
            )
        )
    memory = f"{place} memory MiB first / last"
    headers = ("", "rounds", "answered", "first round ms", "last round ms", "slowest ms", memory)
    words = f"The same load again and again. {_shape(result, 'stability')} Median time of a request, by round."
    return ReportSection("Stability", words, (Table(headers, tuple(rows)),)) if rows else None


def _resources(result: BenchResult) -> ReportSection | None:
    rows = []
    for each in result.ways:
        if each.run is None:
            continue
        loads, harness = each.run.rows(), each.run.harness.to_json()
        memory, gpu = (max((row[name] for row in loads if name in row), default=None) for name in (MEMORY, GPU_MEMORY))
        busiest = max(loads, key=lambda row: row["output_tokens_per_s"], default={})
        rows.append(
            (
                each.way.name,
                _mib(memory),
                _mib(gpu),
                percent(busiest.get(GPU_BUSY)),
                percent(busiest.get(GPU_MEMORY_BUSY)),
                _gigabytes(max((each.read_bytes_per_s(row) or 0.0 for row in loads), default=0.0)),
                percent(harness["overhead"]),
                percent(harness["client_cpu"]),
            )
        )
    headers = (
        "",
        "host MiB",
        "GPU MiB",
        "GPU busy",
        "GPU memory busy",
        "weights read GB/s",
        "between loads",
        "client",
    )
    words = (
        "The most that the server's processes held; how busy the GPU and its memory were under the load with most"
        " tokens per second (NVML: share of time); the most bytes of weights per second that tokens took at least;"
        " what measuring cost, by the time that was measured: time between loads, and this client's processor time."
    )
    return ReportSection("Machine", words, (Table(headers, tuple(rows)),)) if rows else None


def _left_out(result: BenchResult) -> ReportSection | None:
    rows = sorted(
        {
            (each.way.name, load.kind, f"{load.prompt_tokens:,} + {load.output_tokens:,}", str(load.concurrency))
            for each in result.ways
            if each.run is not None
            for load in each.run.left_out
        }
    )
    headers = ("", "load", "tokens of a request", "in flight")
    words = "Asked for, but larger than the context, the KV pool or the requests that the server runs at once."
    return ReportSection("What did not fit", words, (Table(headers, tuple(rows)),)) if rows else None


def _making(result: BenchResult) -> ReportSection:
    made, model = result.making, result.model
    rows = [
        ("command", made.command),
        ("machine", made.machine),
        ("model", f"{model.id}@{model.revision}" if model.revision else model.id),
        ("profile", result.profile.digest),
        ("flags of all servers", shlex.join(result.server_args) or "none"),
        ("versions", f"kvtuner {made.kvtuner_version}, torch {made.torch}, transformers {made.transformers}"),
        *(
            (
                f"server {each.way.name}",
                f"SGLang {server.version or '-'} on {server.device or '-'}, weights {server.dtype or '-'}, cache"
                f" {server.digest or server.kv_cache_dtype or '-'}",
            )
            for each in result.ways
            if (server := each.server) is not None
        ),
    ]
    words = (
        "Load by SGLang's own client, sglang.benchmark.serving. Prompts are cut from the text of --data, no two begin"
        " alike, all ways are sent the same; outputs are greedy and as long as asked."
    )
    return ReportSection("Where the figures come from", words, (Table(("", ""), tuple(rows), wrap=True),))


def _by_way(
    result: BenchResult, kind: str, key: str, title: str, value: Callable[[dict[str, Any]], str]
) -> Table | None:
    """A row for each point, a column for each way that was served."""
    served = [each for each in result.ways if each.run is not None]
    found = {each.way.name: {row[key]: value(row) for row in each.rows(kind)} for each in served}
    points = sorted({point for rows in found.values() for point in rows})
    if not points:
        return None
    left_out = {each.way.name: _left_out_points(each, kind, key) for each in served}
    rows = tuple(
        (
            f"{point:,}",
            *(found[name].get(point, NO_ROOM if point in left_out[name] else NOT_MEASURED) for name in found),
        )
        for point in points
    )
    return Table((title, *found), rows)


def _left_out_points(each: WayResult, kind: str, key: str) -> set[int]:
    """Also those that doubling did not come to."""
    assert each.run is not None
    named = {getattr(load, key) for load in each.run.left_out if load.kind == kind}
    most = max((row["concurrency"] for row in each.rows("concurrency")), default=0)
    return named | {2**power for power in range(9) if kind == "concurrency" and 2**power > most}


def _shape(result: BenchResult, kind: str) -> str:
    row = next((row for each in result.ways for row in each.rows(kind)), None)
    return "" if row is None else f"{row['prompt_tokens']:,} tokens in, {row['output_tokens']:,} out."


def _three(quantiles: dict[str, float | None]) -> str:
    return " / ".join(milliseconds(quantiles[name]) for name in ("p50", "p90", "p99"))


def _gigabytes(num_bytes: float) -> str:
    return number(num_bytes / 1e9) if num_bytes else NOT_MEASURED


def _mib(num_bytes: float | None) -> str:
    return NOT_MEASURED if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


def _place(cell: Cell) -> str:
    is_likelihood = cell.level == "likelihood"
    name = TITLES[cell.measure] if is_likelihood else " ".join(filter(None, (cell.level, cell.task)))
    length = f", {cell.num_tokens:,} tokens" if cell.num_tokens else ""
    flag = f" ({cell.flag})" if cell.flag else ""
    return f"{name}{length} at {cell.position:,}{flag}"
