"""A benchmark in this process: the local engine by each scheme, beside transformers' generate."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvtuner import __version__
from kvtuner.bench.local_target import EngineTarget, GenerateTarget
from kvtuner.calibration.model_loading import load_model
from kvtuner.errors import OptionError
from kvtuner.exported_configs.scheme_names import REFERENCE
from kvtuner.pipeline.bench_session import BenchSession
from kvtuner.runtime_loader.engine.engine_options import EngineOptions
from kvtuner.runtime_loader.engine.local_engine import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvtuner.bench.gates import Gate
    from kvtuner.bench.load_target import ServerRecord, Target
    from kvtuner.bench.server import ServerFlags
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.pipeline.eval_bench_options import BenchOptions
    from kvtuner.pipeline.sources import ProfiledModel

GENERATE: Final = "transformers"
"""The name in tables of transformers' generate with its own cache."""


class LocalBenchSession(BenchSession):
    """The schemes of a benchmark that answer in this process, on one model that is loaded once."""

    def __init__(self, model: ProfiledModel[BenchOptions], flags: ServerFlags) -> None:
        for scheme in model.schemes:
            if scheme.profile is None and scheme.name != REFERENCE:
                raise OptionError(f"--local stores a profile's rows or unquantized ones; leave out {scheme.name}")
        super().__init__(model, flags)
        self._loaded = load_model(model.source, model.shape)

    def served(self, folder: Path) -> list[tuple[CacheScheme, tuple[str, ...]]]:
        """Transformers' generate first, then the engine by every scheme."""
        unquantized = self._model.schemes[0]
        return [(scheme, ()) for scheme in (replace(unquantized, name=GENERATE), *self._model.schemes)]

    @contextmanager
    def _target(self, scheme: CacheScheme, flags: Sequence[str]) -> Iterator[Target]:
        loaded, options, name = self._loaded, self._options, self._model.source.name
        context_length = self._model.shape.context_length
        at_once = max(EngineOptions().max_requests, *(options.concurrency or ()), *options.loads.batches)
        if scheme.name == GENERATE:
            yield GenerateTarget(
                loaded.model, loaded.tokenizer, name,
                context_length=context_length, most_requests=at_once, timeout_s=options.timeout,
            )  # fmt: skip
            return
        with LocalEngine(
            loaded.model,
            loaded.tokenizer,
            scheme.profile,
            kv_memory=options.kv_memory,
            max_requests=at_once,
            context_length=context_length,
            allow_derived=self._is_derived,
        ) as engine:
            yield EngineTarget(engine, name, options.timeout)

    def _software(self) -> str:
        return f"kvtuner {__version__}"

    def _check_memory(self) -> None:
        """Leave it to the engine, which refuses what holds no page."""

    def _memory_gates(self, scheme: CacheScheme, record: ServerRecord) -> list[Gate]:
        return []
