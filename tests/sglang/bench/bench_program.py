"""What SGLang's own client makes of servers that are wrong, and its figures beside ours; JSON on stdout.

Arguments: folder of a tokenizer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from sglang.benchmark import serving
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from bench_stub import stub

from kvtuner.bench.client import Client
from kvtuner.bench.load_metrics import LoadResult, figures
from kvtuner.bench.loads import Load

FAULTS = ("none", "constant", "slow", "error", "dies", "empty", "cut", "short")


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    load = Load("concurrency", 50, 12, 2, 6)
    prompts = [list(range(number, number + 50)) for number in range(6)]
    found = {}
    for fault in FAULTS:
        with stub(fault) as url:
            sent = Client(url, "sglang", "model", tokenizer, 1.0).send(load, prompts)
        found[fault] = [asdict(each) for each in sent]
    with stub("none") as url:
        theirs, ours = side_by_side(url, tokenizer, load, prompts)
    sys.stdout.write(json.dumps({"faults": found, "theirs": theirs, "ours": ours}) + "\n")


def side_by_side(url: str, tokenizer: object, load: Load, prompts: list[list[int]]) -> tuple[object, object]:
    """Return the same answers by `sglang.benchmark.serving.calculate_metrics` and by our figures."""
    kept = []
    client = Client(url, "sglang", "model", tokenizer, 1.0)  # type: ignore[arg-type]
    send = serving.ASYNC_REQUEST_FUNCS["sglang"]

    async def keeping(request_func_input: object) -> object:
        kept.append(await send(request_func_input=request_func_input))
        return kept[-1]

    serving.ASYNC_REQUEST_FUNCS["sglang"] = keeping
    ours = figures([LoadResult(load, tuple(client.send(load, prompts)), {})])
    rows = [SimpleNamespace(prompt_len=50, text_prompt_len=50, vision_prompt_len=0)] * len(kept)
    metrics, _ = serving.calculate_metrics(rows, kept, ours["duration_s"], tokenizer, "sglang")
    return vars(metrics), ours


if __name__ == "__main__":
    main()
