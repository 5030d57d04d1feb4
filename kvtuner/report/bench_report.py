"""The report of a benchmark: text, a page that needs nothing else, Markdown, JSON, pictures. Measures nothing."""

from __future__ import annotations

import json
import shlex
import textwrap
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.ablation import GROUPS
from kvtuner.bench.gates import FAILED, SKIPPED
from kvtuner.bench.hardware import GPU_BUSY, GPU_MEMORY, GPU_MEMORY_BUSY, MEMORY
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME
from kvtuner.precision import tokens_per_gib
from kvtuner.report.evaluation_report import cell_values, flagged_title, versions_text
from kvtuner.report.formatting import NOT_MEASURED, count, model_name, number, percent
from kvtuner.report.table import Table, markdown_text
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvtuner.bench.gates import Gate
    from kvtuner.report.bench_result import BenchResult, SchemeResult

    LoadText = Callable[[Mapping[str, Any]], str]

PAGE: Final = "bench.html"
MARKDOWN: Final = "bench.md"
JSON: Final = "bench.json"
NO_ROOM: Final = "does not fit"
FAILED_TEXT: Final = "FAILED"


def write_bench_report(result: BenchResult, folder: Path) -> Path:
    """Write all files of the report; returns the path of the page.

    Raises:
        RunFolderError: The disk is full or the folder cannot be written.
    """
    from kvtuner.report.html_page import picture_file, render
    from kvtuner.report.plots.bench_plots import bench_drawings

    drawings = bench_drawings(result)
    for name, both in drawings.items():
        write_atomically(folder / f"{name}.svg", picture_file([both.wide]).encode(errors="replace"))
    title = f"Serving {result.model.id} with a quantized KV cache: what it is worth"
    context: dict[str, Any] = {
        "title": title,
        "verdict": _verdict(result),
        "shapes": {kind: _shape(result, kind) for kind in ("concurrency", "batch", "stability")},
        "tables": report_tables(result),
        "drawings": drawings,
        "problems": result.problems(),
    }
    page = render("bench.html", layout="bench_page_section.html", **context)
    markdown = render("bench_sections.html", layout="bench_markdown_section.html", **context)
    write_atomically(folder / JSON, json.dumps(result.to_json(), indent=1) + "\n")
    write_atomically(folder / MARKDOWN, f"# {markdown_text(title)}\n\n{markdown.strip()}\n")
    write_atomically(folder / PAGE, page.encode(errors="replace"))
    return folder / PAGE


def summary_lines(result: BenchResult, width: int | None = None) -> list[str]:
    """The table, as wide as a terminal if its width is given, and the verdict."""
    problems = [(f"FAILED  {problem.text}", f"what to do: {problem.way_out}") for problem in result.problems()]
    lines = [line for problem in problems for text in problem for line in _folded(text, width)]
    beside = [line for text in _beside_uniform(result) for line in _folded(text, width)]
    return [*_overview(result).lines(width), "", *beside, *(lines or [_gates_that_passed(result)])]


def report_tables(result: BenchResult) -> dict[str, list[Table]]:
    """The tables of each section; ``templates/bench_sections.html`` says what they show."""
    refused = [(scheme.name, scheme.refused) for scheme in result.schemes if scheme.refused is not None]
    return {
        "overview": [_overview(result), *([Table(("not served", "because"), refused, wrap=True)] if refused else [])],
        "gates": _gates(result),
        "quality": _quality(result),
        "memory": [_memory(result)],
        "prompts": [_by_load(result, "prompt", "prompt_tokens", "prompt tokens", _percentiles("ttft_s"))],
        "outputs": [_by_load(result, "output", "output_tokens", *figure) for figure in _OUTPUT_FIGURES.items()],
        "concurrency": [_by_load(result, "concurrency", "concurrency", *figure) for figure in _LANE_FIGURES.items()],
        "batches": [_by_load(result, "batch", "concurrency", "sent at one moment", _batch_text)],
        "stability": [_stability(result)],
        "machine": [_machine(result)],
        "left_out": [_left_out(result)],
        "provenance": [_provenance(result)],
    }


def _verdict(result: BenchResult) -> str:
    gates = f"{_gates_that_passed(result)}."
    if problems := result.problems():
        gates = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}: see above."
    return " ".join((*_beside_uniform(result), gates))


def _beside_uniform(result: BenchResult) -> list[str]:
    """A sentence that puts the profile beside the best uniform of its search, or says why that was not served."""
    if result.no_best_uniform is not None:
        return [f"The best uniform of the search is not beside the profile: {result.no_best_uniform}."]
    schemes = {scheme.name: scheme for scheme in result.served}
    own, uniform = schemes.get(PROFILE_SCHEME), schemes.get(result.best_uniform or "")
    if own is None or uniform is None:
        return []
    parts = [f"{count(own.tokens_that_fit)} tokens that fit against {count(uniform.tokens_that_fit)}"]
    kls, origin = tuple(_mean(result, scheme, "kl_nats_per_token") for scheme in (own, uniform)), ""
    if None in kls:
        kls, origin = _searched_kls(result), ", by the search"
    if None not in kls:
        parts.append(f"KL {number(kls[0])} against {number(kls[1])} nats per token{origin}")
    lanes = _common_concurrency(result)
    speeds = [row["output_tokens_per_s"] for scheme in (own, uniform) for row in _rows_in_flight(scheme, lanes)]
    if len(speeds) == 2:
        parts.append(f"{number(speeds[0])} tokens/s against {number(speeds[1])} with {lanes} in flight")
    return [f"The profile beside its fair rival, {uniform.name}: {'; '.join(parts)}."]


def _searched_kls(result: BenchResult) -> tuple[float | None, float | None]:
    """The KL of the profile and of the best uniform that its search measured."""
    quality = result.profile.quality
    if quality is None or quality.best_uniform is None:
        return None, None
    by_name = {baseline.name: baseline.kl_mean for baseline in quality.baselines}
    return quality.measured_kl.mean, by_name.get(quality.best_uniform.name)


def _gates_that_passed(result: BenchResult) -> str:
    verdicts = [gate.verdict for scheme in result.schemes for gate in scheme.gates]
    skipped = verdicts.count(SKIPPED)
    return f"{verdicts.count('passed')} gates passed" + (f", {skipped} could not be asked" if skipped else "")


def _shape(result: BenchResult, kind: str) -> str:
    row = next((row for scheme in result.schemes for row in scheme.rows(kind)), None)
    return "" if row is None else f"{row['prompt_tokens']:,} tokens in, {row['output_tokens']:,} out."


def _overview(result: BenchResult) -> Table:
    """A row for each scheme; its speed is under the most requests in flight that all that were served had."""
    has_quality = result.evaluation is not None
    quality = ("KL nats/token", "top-1") if has_quality else ()
    speed = ("in flight", "TTFT p50 ms", "TPOT p50 ms", "E2E p99 ms", "tokens/s", "success")
    lanes, rows = _common_concurrency(result), []
    for scheme in result.schemes:
        name = f"{GROUPS.get(scheme.name, '')} {scheme.name}".lstrip() if has_quality else scheme.name
        row = [name, number(scheme.scheme.effective_bits), count(scheme.scheme.bytes_per_token)]
        row.append(count(scheme.tokens_that_fit))
        if has_quality:
            row.append(number(_mean(result, scheme, "kl_nats_per_token")))
            row.append(percent(_mean(result, scheme, "top1_agreement")))
        rows.append([*row, *_speed(scheme, lanes)])
    return Table(("", "bits", "bytes/token", "tokens that fit", *quality, *speed), rows)


def _mean(result: BenchResult, scheme: SchemeResult, measure: str) -> float | None:
    found = result.quality(scheme.name, measure)
    return None if found is None else found.mean


def _folded(text: str, width: int | None) -> list[str]:
    """Text as wide as a terminal; what does not fit is indented below."""
    return textwrap.wrap(text, width, subsequent_indent=" " * 8, break_on_hyphens=False) if width else [text]


def _common_concurrency(result: BenchResult) -> int | None:
    concurrencies = [{row["concurrency"] for row in scheme.rows("concurrency")} for scheme in result.served]
    return max(set.intersection(*concurrencies), default=None) if concurrencies else None


def _rows_in_flight(scheme: SchemeResult, lanes: int | None) -> list[dict[str, Any]]:
    """The figures with so many requests in flight; none where they were not measured."""
    return [row for row in scheme.rows("concurrency") if row["concurrency"] == lanes]


def _speed(scheme: SchemeResult, lanes: int | None) -> tuple[str, ...]:
    row = next(iter(_rows_in_flight(scheme, lanes)), None)
    if row is None:
        return ("not served" if scheme.server is None else NOT_MEASURED, "", "", "", "", "")
    seconds = (row["ttft_s"]["p50"], row["tpot_s"]["p50"], row["e2e_s"]["p99"])
    throughput = number(row["output_tokens_per_s"])
    return (str(lanes), *map(_milliseconds, seconds), throughput, percent(row["success_rate"]))


def _gates(result: BenchResult) -> list[Table]:
    verdicts = {scheme.name: {gate.name: _verdict_text(gate) for gate in scheme.gates} for scheme in result.schemes}
    checked = {name: by_gate for name, by_gate in verdicts.items() if by_gate}
    names = dict.fromkeys(gate for by_gate in checked.values() for gate in by_gate)
    rows = [(name, *(by_gate.get(name, NOT_MEASURED) for by_gate in checked.values())) for name in names]
    details = [
        (scheme.name, gate.name, _verdict_text(gate), gate.detail)
        for scheme in result.schemes
        for gate in scheme.gates
        if gate.verdict != "passed" or scheme.name in (PROFILE_SCHEME, result.best_uniform)
    ]
    own = "of the profile, and" if result.best_uniform is None else "of the profile and its fair rival, and"
    headers = ("", f"{own} what did not pass", "", "by")
    failures = (FAILED_TEXT,)
    return [Table(("", *checked), rows, failures=failures), Table(headers, details, wrap=True, failures=failures)]


def _verdict_text(gate: Gate) -> str:
    """The verdict of a gate; a failure stands out in every form."""
    return FAILED_TEXT if gate.verdict == FAILED else gate.verdict


def _quality(result: BenchResult) -> list[Table]:
    if result.evaluation is None:
        return []
    names = [scheme.name for scheme in result.schemes]
    return [Table(("", *names), [(flagged_title(cell), *cell_values(cell, names)) for cell in result.evaluation.cells])]


def _memory(result: BenchResult) -> Table:
    sizes = [(scheme, scheme.scheme.bytes_per_token) for scheme in result.schemes]
    largest, index = max((size for _, size in sizes), default=0), result.profile.index_bytes
    rows = [
        (
            scheme.name,
            number(scheme.scheme.effective_bits),
            count(size),
            count(tokens_per_gib(size + index)),
            f"{(largest + index) / (size + index):.2f}x",
            count(scheme.tokens_that_fit),
        )
        for scheme, size in sizes
    ]
    headers = ("", "effective bits", "bytes/token", "tokens/GiB", "against the largest", "tokens that fit the server")
    return Table(headers, rows)


def _milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds)


def _percentiles(name: str) -> LoadText:
    return lambda row: " / ".join(map(_milliseconds, row[name].values()))


def _batch_text(row: Mapping[str, Any]) -> str:
    return f"{_milliseconds(row['duration_s'] / row['rounds'])} ({number(row['output_tokens_per_s'])}/s)"


_OUTPUT_FIGURES: Final = {
    "tokens generated: time per token": _percentiles("tpot_s"),
    "tokens generated: between tokens": _percentiles("itl_s"),
    "tokens generated: whole request": _percentiles("e2e_s"),
}
_LANE_FIGURES: Final[dict[str, LoadText]] = {
    "in flight: output tokens/s": lambda row: number(row["output_tokens_per_s"]),
    "in flight: requests/s": lambda row: number(row["requests_per_s"]),
    "in flight: ms to the first token": _percentiles("ttft_s"),
    "in flight: ms per token": _percentiles("tpot_s"),
    "in flight: ms of a request": _percentiles("e2e_s"),
    "in flight: answered": lambda row: percent(row["success_rate"]),
}


def _by_load(result: BenchResult, kind: str, key: str, title: str, text: LoadText) -> Table:
    """A row for each size of a kind of load, which is its field `key`; a column for each scheme that was served."""
    cells = {scheme.name: {row[key]: text(row) for row in scheme.rows(kind)} for scheme in result.served}
    sizes = sorted({size for column in cells.values() for size in column})
    for scheme in result.served:
        column = cells[scheme.name]
        left_out = {getattr(load, key) for load in scheme.run.left_out if load.kind == kind}
        if kind == "concurrency":  # doubling ends at the first size that does not fit
            left_out |= {2**power for power in range(9) if 2**power > max(column, default=0)}
        absent = {size: NO_ROOM if size in left_out else NOT_MEASURED for size in sizes}
        cells[scheme.name] = absent | column
    return Table((title, *cells), [(count(size), *(column[size] for column in cells.values())) for size in sizes])


def _stability(result: BenchResult) -> Table:
    rounds = {scheme.name: scheme.run.rounds() for scheme in result.served}
    has_gpu = any(GPU_MEMORY in row for rows in rounds.values() for row in rows)
    kind, place = (GPU_MEMORY, "GPU") if has_gpu else (MEMORY, "host")
    table = []
    for name, rows in rounds.items():
        if rows:
            medians = [row["e2e_s"]["p50"] for row in rows if row["e2e_s"]["p50"] is not None] or [None]
            times = map(_milliseconds, (medians[0], medians[-1], max(medians)))
            answered = f"{sum(row['answered'] for row in rows)} of {sum(row['sent'] for row in rows)}"
            memory = f"{_mib(rows[0].get(kind))} / {_mib(rows[-1].get(kind))}"
            table.append((name, str(len(rows)), answered, *times, memory))
    headers = ("", "rounds", "answered", "first round ms", "last round ms", "slowest ms")
    return Table((*headers, f"{place} memory MiB first / last"), table)


def _machine(result: BenchResult) -> Table:
    headers = ("", "host MiB", "GPU MiB", "GPU busy", "GPU memory busy", "weights read GB/s", "between loads", "client")
    return Table(headers, [_machine_row(scheme) for scheme in result.served])


def _machine_row(scheme: SchemeResult) -> tuple[str, ...]:
    loads, cost = scheme.run.rows(), scheme.run.harness()
    memory, gpu = (max((row[name] for row in loads if name in row), default=None) for name in (MEMORY, GPU_MEMORY))
    busiest = max(loads, key=lambda row: row["output_tokens_per_s"], default={})
    # A step reads the weights once and gives a token to every request in flight.
    steps_per_s = max((row["output_tokens_per_s"] / row["concurrency"] for row in loads), default=0.0)
    weights = steps_per_s * (scheme.weight_bytes or 0)
    shares = (busiest.get(GPU_BUSY), busiest.get(GPU_MEMORY_BUSY))
    weights_text = number(weights / 1e9) if weights else NOT_MEASURED
    overhead = (cost["overhead"], cost["client_cpu"])
    return (scheme.name, _mib(memory), _mib(gpu), *map(percent, shares), weights_text, *map(percent, overhead))


def _mib(num_bytes: float | None) -> str:
    return NOT_MEASURED if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


def _left_out(result: BenchResult) -> Table:
    rows = {
        (scheme.name, load.kind, f"{load.prompt_tokens:,} + {load.output_tokens:,}", str(load.concurrency))
        for scheme in result.served
        for load in scheme.run.left_out
    }
    return Table(("", "load", "tokens of a request", "in flight"), sorted(rows))


def _provenance(result: BenchResult) -> Table:
    provenance = result.provenance
    rows = [
        ("command", provenance.command),
        ("machine", provenance.machine),
        ("model", model_name(result.model)),
        ("profile", result.profile.digest),
        ("flags of all servers", shlex.join(result.server_args) or "none"),
        ("versions", versions_text(provenance)),
    ]
    for scheme in result.schemes:
        if (server := scheme.server) is not None:
            software = f"SGLang {server.version or '-'} on {server.device or '-'}, weights {server.dtype or '-'}"
            cache = server.digest or server.kv_cache_dtype or "-"
            rows.append((f"server {scheme.name}", f"{software}, cache {cache}"))
    return Table(("", ""), rows, wrap=True)
