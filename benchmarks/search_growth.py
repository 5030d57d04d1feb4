"""What a search takes as models grow: forward passes and processor seconds by layers, width, vocabulary and length.

    OMP_NUM_THREADS=1 python benchmarks/search_growth.py --out runs/growth --json growth.json --markdown growth.md \
        --picture growth.svg

Models are Llamas with random weights, of 8 layers, 128 channels in 4 heads of 32 with 2 KV heads, and 1,024 tokens in
the vocabulary; searches have 8, 4 and 4 sequences of 128 tokens and 12 trials. One of these is varied at a time. Times
are those of the process, by phase, without loading: what else runs on the machine changes them less than wall time.
All cases are run in turn, `--repeats` times, and the fastest run of each is shown: other work only adds to a run, and
the fastest is clean only if nothing disturbed one of them.
`--workers 1 2 4` instead times whole searches of one model by their processes, in wall time, which needs a machine
without other work; ways alternate. Resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from cpu_parts.growth_plot import growth_picture

from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.run_folder import RunFolder

BASE: Final = {"layers": 8, "width": 128, "vocabulary": 1024, "length": 128}
VARIED: Final[dict[str, tuple[int, ...]]] = {
    "layers": (6, 12, 24, 48),
    "width": (128, 256, 512, 1024),
    "vocabulary": (1024, 8192, 32768, 131072),
    "length": (128, 256, 512, 1024),
}
PHASES: Final = ("scale layouts", "calibration", "uniform table", "refinement 4bit", "validation")
SEARCH: Final = ("--budget", "4bit", "--sequences", "8,4,4", "--trials", "12", "--no-report")


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """Save a model of these sizes with the demo model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        intermediate_size=2 * sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["width"] // 32,
        num_key_value_heads=sizes["width"] // 64,
        max_position_embeddings=4096,
        initializer_range=0.06,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)


def search(folder: Path, sizes: dict[str, int], repeat: int, *flags: str) -> RunFolder:
    """Search a model of these sizes in a process of its own, unless the folder has this repeat's search."""
    model, run = folder / "model", folder / f"run{repeat}"
    if not model.exists():
        make_model(model, sizes)
    if not (run / "profile.json").exists():
        command = [sys.executable, "-m", "kvtuner", "search", "--model", str(model), "--out", str(run), *SEARCH, *flags]
        command += ["--sequence-length", str(sizes["length"])]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return RunFolder(run)


def took(run: RunFolder) -> dict[str, dict[str, float]]:
    """Forward passes and processor seconds of each phase."""
    phases = [record for record in run.records("events.jsonl") if record["event"] == "phase"]
    return {
        phase["name"]: {"forward_passes": phase["forward_passes"], "processor_seconds": phase["processor_seconds"]}
        for phase in phases
    }


def growth(out: Path, repeats: int) -> list[dict[str, Any]]:
    """What the fastest run of every case took, and the processor seconds of all its runs."""
    cases = [(name, value) for name, values in VARIED.items() for value in values]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for name, value in cases:
            sizes = {**BASE, name: value}
            folder = out / "-".join(f"{key}{size}" for key, size in sizes.items())
            runs[name, value].append({"phases": took(search(folder, sizes, repeat))})
            print(name, value, round(total(runs[name, value][-1], "processor_seconds"), 1), flush=True)
    rows = []
    for (name, value), measured in runs.items():
        seconds = [round(total(run, "processor_seconds"), 2) for run in measured]
        fastest = measured[seconds.index(min(seconds))]
        rows.append({"varied": name, "value": value, "processor_seconds": seconds, **fastest})
    return rows


def total(run: dict[str, Any], figure: str) -> float:
    """The sum of a figure over the phases of a run."""
    return float(sum(phase[figure] for phase in run["phases"].values()))


def page(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| varied | | forward passes | " + " | ".join(PHASES) + " | processor seconds | a token and layer, us |"]
    lines.append("|" + " --- |" * (len(PHASES) + 5))
    for row in rows:
        sizes = {**BASE, row["varied"]: row["value"]}
        seconds = [row["phases"].get(phase, {}).get("processor_seconds", 0.0) for phase in PHASES]
        passes = total(row, "forward_passes")
        each = total(row, "processor_seconds") / (passes * sizes["length"] * sizes["layers"]) * 1e6
        cells = [row["varied"], f"{row['value']:,}", f"{passes:.0f}", *(f"{value:.1f}" for value in seconds)]
        lines.append("| " + " | ".join([*cells, f"{sum(seconds):.1f}", f"{each:.1f}"]) + " |")
    return "\n".join(lines) + "\n"


def by_workers(out: Path, counts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Wall seconds of whole searches by their number of processes, loading included."""
    sizes = {**BASE, "layers": 16, "width": 256, "length": 512}
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(repeats):
        for count in counts:
            folder = out / f"workers{count}"
            if not (folder / "model").exists():
                make_model(folder / "model", sizes)
            begun = time.monotonic()
            search(folder, sizes, repeat, "--sequences", "12,12,12", "--workers", str(count))
            seconds[count].append(round(time.monotonic() - begun, 1))
    medians = {count: statistics.median(values) for count, values in seconds.items()}
    return [
        {"workers": count, "seconds": values, "times_first": round(medians[counts[0]] / medians[count], 2)}
        for count, values in seconds.items()
    ]


def picture(rows: list[dict[str, Any]]) -> str:
    """The processor seconds by the size that is varied, as SVG."""
    lines = {
        name: [(row["value"] // values[0], total(row, "processor_seconds")) for row in rows if row["varied"] == name]
        for name, values in VARIED.items()
    }
    title = "Processor seconds of a search, as one size of the model grows"
    return growth_picture(lines, title, "times the smallest, log scale", "processor seconds, log scale", "s")


def page_by_workers(rows: list[dict[str, Any]]) -> str:
    """The searches by their number of processes as a Markdown table."""
    lines = ["| workers | wall seconds of each run | times one worker's speed |", "| --- | --- | --- |"]
    for row in rows:
        seconds = ", ".join(f"{value:.0f}" for value in row["seconds"])
        lines.append(f"| {row['workers']} | {seconds} | {row['times_first']:.2f} |")
    return "\n".join(lines) + "\n"


def picture_by_workers(rows: list[dict[str, Any]]) -> str:
    """The wall seconds by the number of processes, as SVG."""
    lines = {"a search": [(row["workers"], statistics.median(row["seconds"])) for row in rows]}
    return growth_picture(lines, "Wall seconds of a search by its workers", "workers", "wall seconds, log scale", "s")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", help="time whole searches by these numbers of processes")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each case, in turn")
    args = parser.parse_args()
    rows = by_workers(args.out, args.workers, args.repeats) if args.workers else growth(args.out, args.repeats)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(page_by_workers(rows) if args.workers else page(rows), encoding="utf-8")
    if args.picture:
        args.picture.write_text(picture_by_workers(rows) if args.workers else picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
