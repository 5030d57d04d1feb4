"""What the schemes of a benchmark share: their loads, the journal, the servers started one after another."""

from __future__ import annotations

import os
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.gates import all_gates, kv_pool_gate
from kvtuner.bench.hardware import read_bandwidth_in_subprocess, weight_bytes
from kvtuner.bench.load_target import LoadTarget, ServerRecord
from kvtuner.bench.runner import BenchWork, replay, run_loads
from kvtuner.bench.server import ServerFlags, run_server
from kvtuner.errors import EndpointError, OptionError
from kvtuner.evaluation.backends.endpoint import Endpoint
from kvtuner.exported_configs.identity.mismatch import DERIVED
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME, ResultProvenance
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.provenance import result_provenance
from kvtuner.report.bench_result import SchemeResult
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtuner.bench.gates import Gate
    from kvtuner.bench.load_metrics import SchemeRun
    from kvtuner.bench.load_target import Target
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.pipeline.eval_bench_options import BenchOptions
    from kvtuner.pipeline.sources import ProfiledModel

LOGS: Final = "logs"
START_S: Final = 1800


class BenchSession:
    """All that the schemes of a benchmark share; each is served by SGLang."""

    def __init__(self, model: ProfiledModel[BenchOptions], flags: ServerFlags) -> None:
        self._model, self._options, self._flags_of_all = model, model.options, flags
        self._urls, self._folder = model.urls, model.folder
        self._is_derived = any(mismatch.kind in DERIVED for mismatch in model.mismatches)
        model.corpus.refuse_images("benchmarks")
        self._stream = [token for split in model.corpus.splits.values() for token in split.flatten().tolist()]
        prompt_seed = f"{model.seed} {sha256_of(model.corpus.hashes())}"
        self._work = BenchWork(self._folder, model.options.loads, self._stream, prompt_seed)
        # Refused before a server is started.
        self._work.check()
        self._check_memory()
        self._bandwidth, self._no_bandwidth = self._find_bandwidth()
        self._served_model: str | None = None

    def served(self, folder: Path) -> list[tuple[CacheScheme, tuple[str, ...]]]:
        """The schemes in the order in which they are served, with a server's flags; what it reads is in the folder."""
        return [(scheme, scheme.server_flags(folder)) for scheme in self._model.schemes]

    def measure(self, scheme: CacheScheme, flags: Sequence[str], place: str) -> SchemeResult:
        """Serve a scheme, unless it is served already, and put it under load; or state why it could not be.

        The place is that among all schemes, as in ``1/3``.
        """
        key = self._key(scheme, flags, {})
        if not self._urls and (record := self._work.server(key)):
            server = ServerRecord(**record)
            if run := replay(server.capacity, self._work, server_key=key):
                say(f"{scheme.name} was measured before")
                return self._result(scheme, server, run)
        say(f"{'asking' if self._urls else 'starting'} {scheme.name} ({place})")
        try:
            with self._target(scheme, flags) as target:
                return self._result(scheme, target.record, self._run(scheme, flags, target))
        except EndpointError as error:
            if self._urls:
                raise
            say(f"{scheme.name} is not served: {error} (its log: {self._log(scheme)})")
            return SchemeResult(scheme, refused=str(error))

    def provenance(self, command: Sequence[str] = (), device: str | None = None) -> ResultProvenance:
        """The command, machine and software that figures come from; the servers' device is in their flags, or given."""
        return result_provenance(command, self._options, device or self._flags_of_all.value("--device"))

    def _run(self, scheme: CacheScheme, flags: Sequence[str], target: Target) -> SchemeRun:
        work, facts = self._work, {}
        if self._urls:
            facts = {"url": self._urls[scheme.name], **asdict(target.record)}
        if self._options.api == "openai":  # which has nothing to be known again by, and keeps its cache
            facts["once"] = uuid.uuid4().hex
            work = BenchWork(self._folder, work.options, self._stream, f"{work.seed} {facts['once']}")
        key = self._key(scheme, flags, facts)
        work.put_server(key, scheme.name, asdict(target.record))
        return run_loads(target, work, server_key=key, name=scheme.name)

    def _result(self, scheme: CacheScheme, record: ServerRecord, run: SchemeRun) -> SchemeResult:
        is_known = record.version is not None
        weights = self._weights(dtype=record.dtype, quantization=record.quantization) if is_known else None
        gates = [*all_gates(run.results, *self._tokens_per_s(record, weights)), *self._memory_gates(scheme, record)]
        return SchemeResult(scheme, record, run, tuple(gates), weights)

    def _check_memory(self) -> None:
        """Refuse KV memory that holds no token, before a server is started."""
        if self._options.kv_memory:
            for scheme in self._model.schemes:
                self._pool_tokens(scheme, self._options.kv_memory)

    def _memory_gates(self, scheme: CacheScheme, record: ServerRecord) -> list[Gate]:
        if not self._options.kv_memory:
            return []
        return [kv_pool_gate(self._pool_tokens(scheme, self._options.kv_memory), record.tokens_that_fit)]

    def _tokens_per_s(self, record: ServerRecord, weights: int | None) -> tuple[float | None, str]:
        """The most tokens per second of one request; None with a reason where that is not known."""
        if self._bandwidth is None:
            return None, self._no_bandwidth
        if weights is None:
            return None, "how many bytes of weights a token reads is not known of this model or server"
        if record.speculates:
            return None, "the server speculates: a step gives several tokens"
        return self._bandwidth * record.tp_size / weights, ""

    def _weights(self, **served: str | None) -> int | None:
        return weight_bytes(self._model.shape.config, served, trust_remote_code=self._options.model.trust_remote_code)

    def _pool_tokens(self, scheme: CacheScheme, kv_memory: int) -> int:
        left = kv_memory - self._bytes_of_copies(scheme)
        if left <= 0:
            raise OptionError(f"--kv-memory is all for the exact copies of {scheme.name}; give more, or fewer requests")
        return int(left // scheme.bytes_per_token)

    def _bytes_of_copies(self, scheme: CacheScheme) -> int:
        """Bytes of the copies of an exact window, which a server keeps for every request slot."""
        profile, flag = scheme.profile, "--max-running-requests"
        if profile is None or not profile.window.num_tokens:
            return 0
        requests = self._flags_of_all.value(flag)
        if requests is None:
            raise OptionError(
                f"{scheme.name} has {profile.window}, which takes bytes of every request: give {flag} to the servers,"
                " or leave --kv-memory out"
            )
        if not requests.isdecimal():
            raise OptionError(f"{flag} must be a whole number of requests, not {requests[:60]!a}")
        return profile.window_bytes() * (int(requests) + 1)

    def _key(self, scheme: CacheScheme, flags: Sequence[str], facts: Mapping[str, Any]) -> str:
        """The hash of all that decides answers and times besides the load, a running server's own facts included."""
        options, model = self._options, self._options.model
        # A profile is its digest: the path in its flags differs from run to run.
        digest = None if scheme.profile is None else scheme.profile.digest
        served = {"name": scheme.name, "digest": digest, "flags": [] if digest else list(flags)}
        requested = [options.server_args, options.kv_memory, model.context_length, model.device, model.dtype]
        machine = self.provenance().model_dump(mode="json")
        software = [self._software(), os.environ.get("CUDA_VISIBLE_DEVICES"), machine]
        files = [self._model.identity.model_dump(mode="json"), _stamps(self._model.source.path)]
        return sha256_of([served, files, requested, software, dict(facts)])

    def _software(self) -> str:
        """The release of what serves."""
        return version("sglang")

    def _log(self, scheme: CacheScheme) -> Path:
        return self._folder.file(LOGS) / f"{scheme.name}.log"

    @contextmanager
    def _target(self, scheme: CacheScheme, flags: Sequence[str]) -> Iterator[Target]:
        with ExitStack() as stack:
            server, url = None, self._urls.get(scheme.name)
            if url is None:
                log = self._log(scheme)
                log.parent.mkdir(exist_ok=True)
                start_s = self._options.start_timeout or START_S
                server = stack.enter_context(run_server(self._flags(scheme, flags), log, start_s))
                url = server.url
            endpoint = Endpoint(url, self._options.api or "sglang", self._options.timeout)
            target = LoadTarget(endpoint, self._model.tokenizer, scheme=scheme, shape=self._model.shape, server=server)
            model = target.record.model
            if self._served_model not in (None, model):
                raise EndpointError(
                    f"the endpoints serve different models ({self._served_model}, {model}); compare one"
                )
            self._served_model = model
            yield target

    def _flags(self, scheme: CacheScheme, scheme_flags: Sequence[str]) -> list[str]:
        options, model = self._options, self._options.model
        flags = ["--model-path", self._model.source.path, *scheme_flags]
        is_searched = scheme.name == PROFILE_SCHEME or scheme is self._model.best_uniform
        flags += ["--kvtuner-allow-derived"] if self._is_derived and is_searched else []
        flags += ["--trust-remote-code"] if model.trust_remote_code else []
        flags += ["--revision", model.revision] if model.revision else []
        values = {
            "--context-length": model.context_length,
            "--device": model.device.partition(":")[0],
            "--dtype": model.dtype,
            "--max-total-tokens": self._pool_tokens(scheme, options.kv_memory) if options.kv_memory else None,
        }
        for flag, value in values.items():
            flags += [] if value in (None, "", "auto") else [flag, str(value)]
        return [*flags, *self._flags_of_all.arguments]

    def _find_bandwidth(self) -> tuple[float | None, str]:
        """The bytes per second that one device reads, before a server is on it; None with a reason if not known.

        It is measured once for all runs in a folder on this machine, like what is compared with it.
        """
        if self._options.memory_bandwidth:
            return self._options.memory_bandwidth, ""
        if self._urls:
            return None, "the servers' memory bandwidth is not known here; give --memory-bandwidth"
        num_bytes, device, name = self._weights(), self._device(), "bandwidth"
        unknown = f"the memory bandwidth of {device} could not be measured; give --memory-bandwidth"
        if num_bytes is None:
            return None, unknown
        key = sha256_of([self.provenance(device=device).machine, device, num_bytes])
        if record := self._work.server(key):
            return float(record[name]), ""
        measured = read_bandwidth_in_subprocess(num_bytes, device)
        if measured is not None:
            self._work.put_server(key, name, {name: measured})
        return measured, unknown

    def _device(self) -> str:
        """The device that the servers run on; the first where there are several."""
        import torch

        device = self._flags_of_all.value("--device") or self._options.model.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        # SGLang begins to count its GPUs there.
        index = self._flags_of_all.value("--base-gpu-id")
        return f"{device}:{index}" if index and device == "cuda" else device


def _stamps(path: str) -> list[list[Any]]:
    """Sizes and times of a local model's weights: other weights have others."""
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
