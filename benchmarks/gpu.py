"""Everything that only a GPU shows, in one command: first that kernels and servers are right, then their speed.

    make gpu                                # or: python benchmarks/gpu.py
    python benchmarks/gpu.py --smoke        # on a processor, in Triton's interpreter: that the command itself works
    python benchmarks/gpu.py --sweep K4V4   # launch settings of a pair by time; the fastest go into launches.json

Needs torch and triton, SGLang for servers and rivals, and nothing from a network. Results are written as JSON and
Markdown to benchmarks/results/<gpu>/, after every section, so that a run that is cut off has lost nothing. Exits 1
where a kernel or a server is wrong, and then no time means anything, and 3 where all that ran is right but something
was left out, which the results name.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SECTIONS: Final = ("correct", "server", "decode", "model", "prefill", "stores", "pages", "extends", "sweep")
LIMIT_S: Final = 520
"""The seconds after which no section begins."""
LEFT_OUT: Final = 3
"""The exit status of a run that left something out and found nothing wrong."""


def main() -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[name for name in SECTIONS if name != "sweep"])
    parser.add_argument("--sweep", nargs="+", metavar="PAIR", default=[], help="pairs whose launch settings are timed")
    parser.add_argument("--out", type=Path, help="folder; benchmarks/results/<gpu> by default")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds after which nothing is begun")
    args = parser.parse_args()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    import torch

    if not args.smoke and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --smoke runs everything, tiny, on a processor")
    from gpu_parts import baselines, correct, measured_launches, model_step, pools, prefill, results_page, speed
    from gpu_parts.machine import Machine
    from serving_parts import served_demo

    from kvtuner.precision import PrecisionPair

    machine = Machine(torch.device("cpu"), torch.float16) if args.smoke else Machine(
        torch.device("cuda"), torch.bfloat16
    )  # fmt: skip
    out = args.out or ROOT / "benchmarks" / "results" / machine.name
    start = time.monotonic()
    deadline: float = start + args.limit_s
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "seconds": 0.0,
        "machine": machine.facts(), "sglang_missing": baselines.sglang_kernels()[1], "left_out": [],
        "copy_bytes_per_s": machine.copy_bytes_per_s(), **{name: [] for name in SECTIONS},
    }  # fmt: skip

    def save() -> None:
        results["seconds"] = time.monotonic() - start
        results_page.save(out, results)

    def out_of_time() -> bool:
        return time.monotonic() > deadline

    def record(name: str, rows: Iterable[dict[str, Any]]) -> None:
        try:
            for row in rows:
                if name != "correct" and out_of_time():
                    results["left_out"].append(f"the rest of {name}, for want of time")
                    break
                results[name].append(row)
                print(name, *(f"{key}={value}" for key, value in row.items()), flush=True)
        except Exception as error:  # what was measured before it is kept, and the next section has its turn
            results["left_out"].append(f"the rest of {name}: {type(error).__name__}: {error}".splitlines()[0])
            traceback.print_exc()
        finally:
            save()

    def decoding(shape: pools.HeadShape) -> list[Callable[[], Iterable[dict[str, Any]]]]:
        return [functools.partial(speed.decode, machine, *place) for place in speed.grid(machine, shape)]

    def prefilling(shape: pools.HeadShape) -> list[Callable[[], Iterable[dict[str, Any]]]]:
        return [functools.partial(prefill.run, machine, *place) for place in prefill.grid(machine, shape)]

    def serving() -> Iterable[dict[str, Any]]:
        machine.give_back()  # a server takes most of what is free
        return served_demo.run(out / "servers", on_gpu=not machine.smoke)

    other_shapes = (pools.QWEN, pools.QWEN_OF_TWO, pools.LLAMA_OF_EIGHT)
    sections: list[tuple[str, list[Callable[[], Iterable[dict[str, Any]]]]]] = [
        ("correct", [lambda: correct.run(machine)]),
        ("server", [serving]),
        ("decode", decoding(pools.LLAMA)),
        ("model", [lambda: model_step.run(machine)]),
        ("prefill", prefilling(pools.LLAMA)),
        ("stores", [lambda: speed.stores(machine)]),
        ("pages", [lambda: speed.pages(machine)]),
        ("extends", [lambda: speed.extends(machine)]),
        *(
            (name, [] if args.smoke else loads(shape))
            for shape in other_shapes
            for name, loads in (("decode", decoding), ("prefill", prefilling))
        ),
        ("sweep", [functools.partial(speed.sweep, machine, PrecisionPair.parse(pair)) for pair in args.sweep]),
    ]
    for name, parts in sections:
        for part in parts if name in args.only or name == "sweep" else []:
            if out_of_time():
                results["left_out"].append(f"{name}, for want of time")
                break
            record(name, part())
    print(f"{out / 'results.md'}")
    checked = [*results["correct"], *results["server"]]
    is_wrong = any(row["passed"] is False for row in checked)
    if results["sweep"] and not is_wrong:
        table_path = ROOT / "runtime_loader" / "kernels" / "launches.json"
        chosen, arch = measured_launches.winners(results["sweep"]), machine.facts().get("arch", "sm_90")
        table = measured_launches.with_winners(json.loads(table_path.read_text()), arch, chosen, machine.name)
        measured_launches.write_table(out / "launches.json" if args.smoke else table_path, table)
    # What a smoke test skips is what a processor has not.
    results["left_out"] += [row["case"] for row in checked if row["passed"] is None and not row.get("no_gpu")]
    save()
    if is_wrong:
        print("a kernel or a server is wrong: no time means anything", file=sys.stderr)
        return 1
    if results["left_out"] or ("correct" in args.only and not results["correct"]):
        print(f"left out: {'; '.join(results['left_out'])}", file=sys.stderr)
        return LEFT_OUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
