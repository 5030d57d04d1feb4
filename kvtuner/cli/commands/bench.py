"""``kvtuner bench``: is it worth it? Servers under load, one way to store the cache beside the others."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.ablation import ABLATION
from kvtuner.bench.bandwidth import measured_elsewhere, weight_bytes
from kvtuner.bench.client import serving_client
from kvtuner.bench.gates import kv_pool_gate
from kvtuner.bench.loads import LoadOptions
from kvtuner.bench.runner import BenchWork, Journal, replay, run_loads
from kvtuner.bench.served_target import ServedTarget, ServerRecord
from kvtuner.bench.server import running
from kvtuner.bench.server_flags import ServerFlags
from kvtuner.calibration.corpus import load_corpus
from kvtuner.calibration.model_loading import load_tokenizer, read_shape
from kvtuner.cli.commands.eval import evaluate
from kvtuner.cli.profile_command import command_said
from kvtuner.errors import EndpointError, RunFolderError
from kvtuner.evaluation.backends.endpoint import Endpoint
from kvtuner.evaluation.scheme import FP8, PER_CHANNEL, REFERENCE, ProfileScheme, named_schemes
from kvtuner.evaluation.token_text import Text
from kvtuner.exported_configs.identity.mismatch import DERIVED
from kvtuner.exported_configs.profile.evaluation_record import PROFILE
from kvtuner.pipeline.inputs import making, model_record, profile_of, take_from_profile, warn_of_mismatches
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.session import corpus_source, model_source, run_folder
from kvtuner.report.bench_report import write_report
from kvtuner.report.bench_result import BenchResult, WayResult, summary_lines
from kvtuner.run_folder import sha256_of
from kvtuner.runtime_loader.model_check import check_model

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping

    from kvtuner.bench.runner import SchemeRun
    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.evaluation.scheme import CacheScheme
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.run_folder import RunFolder

LOGS: Final = "logs"
WAYS: Final = "ways"
FAILED: Final = 1
START_S: Final = 1800
QUALITY: Final = ("likelihood", "recall")


def run(args: Namespace) -> int:
    """Run the sub-command: 1 where a gate fails, or where a way could not be served."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # servers end with this process
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    said = command_said(args)
    serving_client()  # refused here where it is not installed
    found = profile_of(args.profile)
    path, profile = found.path, found.profile
    names = _names(args)
    flags = ServerFlags.parse(args.server_args)
    take_from_profile(args, profile)
    if args.ablation and found.is_own and not os.access(path.parent, os.W_OK):
        raise RunFolderError(f"{path.parent} cannot be written, where the evaluation will stand; copy the profile")
    shape = read_shape(model_source(args))
    check_model(profile, shape.config, context_length=shape.context_length)
    ways = named_schemes(names, shape, profile, path)
    folder = run_folder(args, f"bench-{profile.digest.removeprefix('sha256:')[:12]}")
    folder.create()
    with folder.lock("bench.lock", waiting="another benchmark runs in this folder"):
        bench = _BenchSession(args, flags, profile, shape, folder)
        bench.scheme_flags = {way.name: way.server_flags(folder.file(WAYS)) for way in ways}
        bench.urls = {
            way.name: dict(args.endpoint)[name] for way, name in zip(ways, names, strict=True) if args.endpoint
        }
        result = BenchResult(
            profile=profile,
            model=bench.identity,
            ways=tuple(map(bench.way, ways)),
            evaluation=None,
            making=making(said, args, device=flags.value("--device")),
            server_args=flags.shared(),
        )
        page = write_report(result, folder.path)
        if args.ablation:
            result = replace(
                result,
                evaluation=_quality(
                    args, str(path) if found.is_own else found.name, [way.name for way in ways], folder
                ),
            )
            page = write_report(result, folder.path)
    if args.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        print("\n".join(summary_lines(result)))
    say(f"\nreport: {page}; the same in Markdown and JSON beside it, and every request in requests.jsonl")
    return FAILED if result.problems() else 0


class _BenchSession:
    """What all ways share.

    Args:
        args: flags.
        flags: of all servers.
        profile: that is benchmarked.
        shape: of its model.
        folder: of the run.

    Attributes:
        identity: of the model, as results say it.
        urls: of servers that are there already, by way.
        scheme_flags: SGLang's flags of each scheme, by its name.
    """

    def __init__(
        self, args: Namespace, flags: ServerFlags, profile: Profile, shape: ModelShape, folder: RunFolder
    ) -> None:
        self._args, self._flags_of_all, self._profile, self._shape = args, flags, profile, shape
        self._folder = folder
        self._tokenizer = load_tokenizer(model_source(args))
        self.identity = model_record(args, shape, profile.model.dtype, self._tokenizer)
        mismatches = warn_of_mismatches(profile, self.identity, shape.context_length)
        self._is_derived = any(each.kind in DERIVED for each in mismatches)
        self._text = Text(self._tokenizer)
        corpus = load_corpus(corpus_source(args, shape), self._tokenizer)
        stream = [token for split in corpus.splits.values() for token in split.flatten().tolist()]
        text = sha256_of(corpus.hashes())
        self._work = BenchWork(_load_options(args), stream, f"{args.seed} {text}", Journal(folder))
        self._work.check()  # refused before a server is started
        self._bandwidth, self._no_bandwidth = self._find_bandwidth()
        self._model: str | None = None
        self.urls: dict[str, str] = {}
        self.scheme_flags: dict[str, tuple[str, ...]] = {}

    def way(self, way: CacheScheme) -> WayResult:
        """Serve it, unless it is served already, and put it under load; or say why it could not be."""
        said = {} if self._args.endpoint else self._work.journal.server(self._key(way))
        if said:
            known = ServerRecord(**said)
            done = replay(known.capacity, self._work, way=self._key(way))
            if done is not None:
                say(f"{way.name} was measured before")
                return self._result(way, known, done)
        try:
            return self._served_now(way)
        except EndpointError as error:
            if self._args.endpoint:
                raise
            say(f"{way.name} is not served: {error} (its log: {self._log(way)})")
            return WayResult(way, None, None, (), None, str(error))

    def _served_now(self, way: CacheScheme) -> WayResult:
        with self._target(way) as target:
            work, said = self._work, {}
            if self._args.endpoint:
                said = {"url": self.urls[way.name], **asdict(target.record)}
            if self._args.api == "openai":  # which says nothing by which it could be known again, and keeps its cache
                said["once"] = uuid.uuid4().hex
                work = replace(work, seed=f"{work.seed} {said['once']}")
            key = self._key(way, said)
            work.journal.put_server(key, way.name, asdict(target.record))
            return self._result(way, target.record, run_loads(target, work, way=key, name=way.name))

    def _result(self, way: CacheScheme, record: ServerRecord, done: SchemeRun) -> WayResult:
        weights = self._weights(record) if record.version is not None else None
        gates = done.gates(*self._bound(record, weights))
        if self._args.kv_memory:
            gates.append(kv_pool_gate(self._tokens_asked(way), record.tokens_that_fit))
        return WayResult(way, record, done, tuple(gates), weights, None)

    def _weights(self, record: ServerRecord | None) -> int | None:
        served = {} if record is None else {"dtype": record.dtype, "quantization": record.quantization}
        return weight_bytes(self._shape.config, served, trust_remote_code=self._args.trust_remote_code)

    def _tokens_asked(self, way: CacheScheme) -> int:
        return int(self._args.kv_memory // (way.bytes_per_token or self._profile.bytes_per_token()))

    def _key(self, way: CacheScheme, said: Mapping[str, Any] = MappingProxyType({})) -> str:
        """What decides answers and times besides the load; of a server that is there already, what it says."""
        args = self._args
        asked = [args.server_args, args.kv_memory, args.context_length, args.device, args.dtype]
        made = making([], args, device=self._flags_of_all.value("--device")).model_dump(mode="json")
        software = [version("sglang"), os.environ.get("CUDA_VISIBLE_DEVICES"), made]
        files = [self.identity.model_dump(mode="json"), _stamps(model_source(args).path)]
        digest = None if way.profile is None else way.profile.digest
        served = {"name": way.name, "digest": digest, "flags": [] if digest else list(self.scheme_flags[way.name])}
        return sha256_of([served, files, asked, software, dict(said)])

    def _log(self, way: CacheScheme) -> Path:
        return self._folder.file(LOGS) / f"{way.name}.log"

    @contextmanager
    def _target(self, way: CacheScheme) -> Iterator[ServedTarget]:
        args = self._args
        if args.endpoint:
            target = self._served(way, self.urls[way.name], args.api or "sglang")
            self._check_same_model(target.record.model)
            yield target
            return
        self._log(way).parent.mkdir(exist_ok=True)
        with running(self._flags(way), self._log(way), args.start_timeout or START_S) as server:
            yield self._served(way, server.url, "sglang", server)

    def _served(self, way: CacheScheme, url: str, api: Any, server: Any = None) -> ServedTarget:
        endpoint = Endpoint(way.name, url, api, self._text, self._args.timeout)
        is_known = server is not None or way.name == PROFILE  # elsewhere a uniform may have groups of its own
        profile = way.profile if is_known else None
        is_uniform = isinstance(way, ProfileScheme) and way.is_uniform
        if endpoint.api == "sglang" and server is None and is_uniform and endpoint.served.digest is None:
            raise EndpointError(f"{url} was named {way.name}, but serves no profile")
        return ServedTarget(
            endpoint,
            self._tokenizer,
            self._args.timeout,
            context_length=self._shape.context_length,
            scheme=way,
            profile=profile,
            architecture=self._shape.architecture,
            server=server,
        )

    def _flags(self, way: CacheScheme) -> list[str]:
        args = self._args
        flags = ["--model-path", model_source(args).path, *self.scheme_flags[way.name]]
        flags += ["--kvtuner-allow-derived"] if self._is_derived and way.name == PROFILE else []
        flags += ["--revision", args.revision] if args.revision else []
        flags += ["--trust-remote-code"] if args.trust_remote_code else []
        flags += ["--context-length", str(args.context_length)] if args.context_length else []
        flags += ["--device", args.device.partition(":")[0]] if args.device != "auto" else []
        flags += ["--dtype", args.dtype] if args.dtype != "auto" else []
        if args.kv_memory:
            flags += ["--max-total-tokens", str(self._tokens_asked(way))]
        return [*flags, *self._flags_of_all.words]

    def _find_bandwidth(self) -> tuple[float | None, str]:
        """Of one device, before a server is on it."""
        args = self._args
        if args.memory_bandwidth:
            return args.memory_bandwidth, ""
        if args.endpoint:
            return None, "the servers' memory bandwidth is not known here; give --memory-bandwidth"
        num_bytes, device = self._weights(None), self._device()
        found = None if num_bytes is None else self._measured_bandwidth(num_bytes, device)
        return found, f"the memory bandwidth of {device} could not be measured; give --memory-bandwidth"

    def _measured_bandwidth(self, num_bytes: int, device: str) -> float | None:
        """Once for all runs in a folder on this machine, as what is compared with it is."""
        made = making([], self._args, device=device)
        key, name = sha256_of([made.machine, device, num_bytes]), "bandwidth"
        if known := self._work.journal.server(key):
            return float(known[name])
        found = measured_elsewhere(num_bytes, device)
        if found is not None:
            self._work.journal.put_server(key, name, {name: found})
        return found

    def _device(self) -> str:
        """That servers will be on, the first of several."""
        import torch

        asked = self._flags_of_all.value("--device") or self._args.device
        if asked == "auto":
            asked = "cuda" if torch.cuda.is_available() else "cpu"
        index = self._flags_of_all.value("--base-gpu-id")
        return f"{asked}:{index}" if index and asked == "cuda" else asked

    def _check_same_model(self, model: str) -> None:
        """Of servers that are there already, as far as their names tell."""
        if self._model not in (None, model):
            raise EndpointError(f"the endpoints serve different models ({self._model}, {model}); compare one")
        self._model = model

    def _bound(self, record: ServerRecord, weights: int | None) -> tuple[float | None, str]:
        """Tokens per second of one request; else why it is not known."""
        if self._bandwidth is None:
            return None, self._no_bandwidth
        if weights is None:
            return None, "how many bytes of weights a token reads is not known of this model or server"
        if record.speculates:
            return None, "the server speculates: a step gives several tokens"
        return self._bandwidth * record.tp_size / weights, ""


def _stamps(path: str) -> list[list[Any]]:
    """Of a local model's weights: other ones have another size or time."""
    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _names(args: Namespace) -> list[str]:
    """Ways in the order in which they are served; unquantized first.

    Raises:
        EndpointError: flags of the one way to have servers beside those of the other.
        PrecisionError: the same way twice.
    """
    if args.levels and not args.ablation:
        raise EndpointError("--levels is for the quality of --ablation; add it, or run kvtuner eval")
    if args.endpoint:
        for flag in ("server_args", "kv_memory", "start_timeout", "device", "dtype"):
            if getattr(args, flag) not in (None, "", "auto"):
                name = f"--{flag.replace('_', '-')}"
                raise EndpointError(f"{name} is for servers that are started here; leave out --endpoint")
        if args.against or args.ablation:
            raise EndpointError("--against and --ablation start servers; other endpoints are named, as in fp8=URL")
        names = [name for name, _ in args.endpoint]
    elif args.ablation:
        if args.against:
            raise EndpointError("--ablation says what is compared; leave out --against")
        names = [PROFILE, *ABLATION]
    else:
        names = [REFERENCE, PROFILE, *(args.against or (FP8,))]
    if args.api and not args.endpoint:
        raise EndpointError("--api is how servers are spoken to; give --endpoint too")
    return sorted(names, key=lambda name: (name != REFERENCE, name != PROFILE))


def _load_options(args: Namespace) -> LoadOptions:
    usual = LoadOptions()
    return LoadOptions(
        lengths=args.lengths or usual.lengths,
        outputs=args.outputs or usual.outputs,
        concurrency=args.concurrency,
        batches=args.batches or usual.batches,
        rounds=args.rounds,
        repeats=args.repeats,
        prompt_tokens=args.prompt,
        output_tokens=args.output,
    )


def _quality(args: Namespace, profile: str, names: list[str], folder: RunFolder) -> Any:
    """What ``kvtuner eval`` finds of the same ways."""
    from kvtuner.cli.parser import build_parser

    others = [name for name in names if name not in (PROFILE, REFERENCE, PER_CHANNEL)]
    words = ["eval", profile, "--against", ",".join(others), "--levels", ",".join(args.levels or QUALITY)]
    asked = build_parser().parse_args([*words, "--out", str(folder.file("quality"))])
    shared = ("model", "revision", "device", "dtype", "trust_remote_code", "context_length")
    data = ("data", "data_config", "data_split", "text_field", "sequence_length", "sequences", "deduplicate")
    for name in (*shared, *data):
        setattr(asked, name, getattr(args, name))
    asked.seed = None
    return evaluate(asked).evaluation
