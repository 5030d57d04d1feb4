"""Real SGLang servers of the demo model, whose answers are compared with the transformers host's.

One has default flags, one a hierarchical cache besides. On a processor, for tests, the same servers run with
examples/sglang_on_cpu, and what only a GPU has is skipped by name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoTokenizer

from kvtuner.bench.server import run_server
from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.endpoint import Endpoint, opener_of
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile, write_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ScaleLayout
from kvtuner.quant import IDENTITY
from serving_parts.host_predictions import Answer, Host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtuner.bench.server import ServerProcess
    from kvtuner.exported_configs.profile.profile import Profile

    Row = dict[str, Any]

ROOT: Final = Path(__file__).resolve().parents[2]
PROFILE: Final = ROOT / "exported_configs" / "profiles" / "demo-3bit.json"
START_S: Final = 240
ANSWER_S: Final = 120
TOKENS: Final = 24
"""The tokens of an answer."""
SINGLE: Final = (5, 33, 260, 900)
"""The tokens of prompts that are asked one after the other."""
TOGETHER: Final = tuple(3 + 7 * index for index in range(16))
"""The tokens of prompts that are asked at once."""
STEMS: Final = (300, 700)
"""The tokens of prompts whose beginnings are found again."""
TAIL: Final = 40
"""The tokens that follow a beginning that is found."""
POOL: Final = 2048
"""The token slots of a device pool that one long prompt fills."""
PAGE: Final = 64
ON_CPU: Final = (
    "--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--max-running-requests", "8",
    "--mem-fraction-static", "0.5", "--chunked-prefill-size", "-1", "--sleep-on-idle",
)  # fmt: skip
TIERED: Final = (
    "--enable-hierarchical-cache", "--hicache-ratio", "16", "--page-size", str(PAGE), "--max-total-tokens", str(POOL),
    "--enable-cache-report",
)  # fmt: skip
CAPTURED: Final = "Capture target decode CUDA graph end"
"""SGLang's line once graphs are captured."""
DEFAULT: Final = "default flags"
HIERARCHICAL: Final = "hierarchical cache"


def run(folder: Path, *, on_gpu: bool) -> Iterator[Row]:
    """A row for everything that is checked of both servers, whose logs lie in a folder.

    It raises `EndpointError` where SGLang is not installed; a server that does not serve has a row that fails.
    """
    if importlib.util.find_spec("sglang") is None:
        raise EndpointError("SGLang is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    searched = load_profile(PROFILE)
    written = folder / "without-window.json"
    profile = without_window(searched)
    write_profile(written, profile)
    servers: tuple[tuple[str, Path, Profile, tuple[str, ...], Callable[[Served], Iterator[Row]]], ...] = (
        (DEFAULT, PROFILE, searched, () if on_gpu else ("--max-total-tokens", "8192"), _default),
        (HIERARCHICAL, written, profile, TIERED, _hierarchical),
    )
    for name, file, stored, flags, cases in servers:
        flags = ("--model-path", str(DEMO_MODEL), "--kvtuner-profile", str(file), "--enable-metrics", *flags)
        log = folder / f"{name.replace(' ', '-')}.log"
        try:
            with (
                _found_by_servers(on_gpu=on_gpu),
                run_server((*flags, *(() if on_gpu else ON_CPU)), log, START_S) as process,
            ):
                yield from cases(Served(name, process, stored, on_gpu=on_gpu))
        except (EndpointError, OSError, ValueError) as error:
            yield _row(f"{name}: serves", passed=False, why=f"{type(error).__name__}: {error}".splitlines()[0])


def without_window(profile: Profile) -> Profile:
    """The same layers without exact copies, which tokens that come back from a cache have none of."""
    sides = [(profile.quant_spec(layer, "k"), profile.quant_spec(layer, "v")) for layer in range(len(profile.pairs))]
    layers = [
        LayerQuantization(pair.k_bits, pair.v_bits, k.transform if k else IDENTITY, v.transform if v else IDENTITY)
        for pair, (k, v) in zip(profile.pairs, sides, strict=True)
    ]
    keys, values = profile.defaults.k, profile.defaults.v
    return build_profile(
        geometry=profile.to_geometry(), layers=layers, k_layout=ScaleLayout(keys.group_size, keys.grid_word_bits),
        v_layout=ScaleLayout(values.group_size, values.grid_word_bits), symmetric=keys.symmetric, fit=keys.grid_fit,
        model=profile.model, budget=AskedBudget(profile.budget.asked),
    )  # fmt: skip


@contextlib.contextmanager
def _found_by_servers(*, on_gpu: bool) -> Iterator[None]:
    """Let servers find this checkout and, without a GPU, what runs SGLang's layers in torch."""
    before = os.environ.get("PYTHONPATH")
    stand_ins = [] if on_gpu else [str(ROOT / "examples" / "sglang_on_cpu")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*stand_ins, str(ROOT), *([before] if before else [])])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Served:
    """A running server, the host that it must agree with, and the text that prompts are cut from."""

    def __init__(self, name: str, process: ServerProcess, profile: Profile, *, on_gpu: bool) -> None:
        self.name, self.on_gpu, self._process = name, on_gpu, process
        self.endpoint = Endpoint(process.url, "sglang", ANSWER_S)
        self._profile = profile
        self._host = Host(DEMO_MODEL, profile, torch.bfloat16 if on_gpu else torch.float32)
        longest = max(SINGLE[-1], STEMS[-1]) + 2 * TAIL
        source = CorpusSource(sequence_length=longest)
        self._salts = itertools.count()
        self._text = load_corpus(source, AutoTokenizer.from_pretrained(DEMO_MODEL)).splits["report"].tolist()

    def prompt(self, index: int, length: int) -> list[int]:
        """The beginning of a text, another one for every index below 16."""
        return list(self._text[index % len(self._text)][:length])

    def ask(self, prompt: list[int]) -> Answer:
        """The greedy continuation of a prompt, with all predictions.

        Under a window a prompt finds nothing of others in the cache: tokens that are found have no exact copies.
        """
        vocabulary = self._host.vocab_size
        salt = {"extra_key": str(next(self._salts))} if self._profile.window.num_tokens else {}
        answered = self.endpoint.generate(
            prompt, TOKENS, sampling={"ignore_eos": True}, return_logprob=True, top_logprobs_num=vocabulary, **salt
        )
        self.places = dict(answered["meta_info"].get("cached_tokens_details") or {})
        return Answer.of(prompt, answered, vocabulary)

    def agreement(self, what: str, answers: Sequence[Answer], why: str = "") -> Row:
        """A row that compares answers; it fails in any case where it says why."""
        found = self._host.divergence(answers)
        is_right = found.server <= found.limit and not why
        row = _row(f"{self.name}: {what}", passed=is_right, error=found.server, limit=found.limit)
        return {**row, "own": found.own, **({"why": why} if why else {})}

    def counted(self, metric: str, **labels: str) -> float:
        """The sum of a metric over what labels leave open."""
        url = self.endpoint.url
        with opener_of(url).open(f"{url}/metrics", timeout=ANSWER_S) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if re.match(rf"{metric}\b", line) and all(label in line for label in wanted)
        )

    def on_gpu_alone(self, what: str, check: Callable[[], Row]) -> Row:
        """A row of what a processor has not, which is skipped there by name."""
        skipped = _row(f"{self.name}: {what}", passed=None, why="skipped, as a processor has none")
        return check() if self.on_gpu else {**skipped, "no_gpu": True}

    def log(self) -> str:
        """What the server printed."""
        return self._process.log.read_bytes()[self._process.log_start :].decode(errors="replace")


def _row(case: str, *, passed: bool | None, error: float = 0.0, limit: float = 0.0, why: str = "") -> Row:
    return {"case": case, "error": error, "limit": limit, "passed": passed, **({"why": why} if why else {})}


def _default(served: Served) -> Iterator[Row]:
    prompts = [served.prompt(index, length) for index, length in enumerate(SINGLE)]
    for prompt in prompts:
        yield served.agreement(f"a prompt of {len(prompt)} tokens alone", [served.ask(prompt)])
    others = [served.prompt(index, length) for index, length in enumerate(TOGETHER)]
    with ThreadPoolExecutor(len(others)) as pool:
        answers = list(pool.map(served.ask, others))
    yield served.agreement(f"{len(others)} prompts at once, on the streams of overlapping steps", answers)
    yield served.on_gpu_alone("graphs captured and replayed", lambda: _graphs(served))


def _graphs(served: Served) -> Row:
    replayed = served.counted("sglang:cuda_graph_passes_total", mode="decode_cuda_graph")
    is_captured = CAPTURED in served.log()
    why = "" if is_captured and replayed else f"captured: {is_captured}, replayed {replayed:.0f} times"
    return _row(f"{served.name}: graphs captured and replayed", passed=not why, why=why)


def _hierarchical(served: Served) -> Iterator[Row]:
    stems = [served.prompt(index, length) for index, length in enumerate(STEMS)]
    yield served.agreement("prompts that nobody asked before", [served.ask(stem) for stem in stems])
    rng = random.Random(0)
    churn = [rng.randrange(2, 300) for _ in range(POOL - 2 * PAGE)]
    for place, texts in (("device", 8), ("host", 12)):
        if place == "host":
            served.ask(churn)  # no page of another prompt has room beside it
        answers, elsewhere = [], []
        for index, stem in enumerate(stems):
            answers.append(served.ask([*stem, *served.prompt(texts + index, TAIL)]))
            if served.places.get(place, 0) < len(stem) // 2:
                elsewhere.append(f"a prefix of {len(stem)} tokens lay at {served.places}")
        yield served.agreement(f"beginnings from the {place}", answers, "; ".join(elsewhere))
    yield served.on_gpu_alone("pages back from pinned memory", lambda: _loaded(served))


def _loaded(served: Served) -> Row:
    pages = served.counted("kvtuner_hicache_pages_total", direction="load")
    return _row(f"{served.name}: pages back from pinned memory", passed=pages > 0, why="" if pages else "no page came")
