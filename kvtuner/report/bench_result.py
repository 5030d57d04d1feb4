"""The figures of a benchmark: plain values for the report, its JSON and the terminal. Measures nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_jsonable_python

from kvtuner.bench.ablation import GROUPS
from kvtuner.bench.gates import SKIPPED
from kvtuner.report.formatting import NOT_MEASURED, count, number, percent
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.bench.gates import Gate
    from kvtuner.bench.load_metrics import SchemeRun
    from kvtuner.bench.load_target import ServerRecord
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.exported_configs.profile.evaluation_record import Evaluation, ResultProvenance
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity

RESULT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """A scheme, its figures and their gates; server and run are None where it was not served.

    Attributes:
        weight_bytes: The bytes of weights that a token of one request reads at least; None of other servers than
            SGLang.
        refused: The reason why it was not served; None where it was.
    """

    scheme: CacheScheme
    server: ServerRecord | None
    run: SchemeRun | None
    gates: tuple[Gate, ...]
    weight_bytes: int | None
    refused: str | None

    @property
    def name(self) -> str:
        """The name of the scheme."""
        return self.scheme.name

    @property
    def tokens_that_fit(self) -> int | None:
        """The tokens that the server has room for; None where it was not served."""
        return None if self.server is None else self.server.tokens_that_fit

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The figures of the loads of a kind, in the order in which they were sent."""
        return [] if self.run is None else [row for row in self.run.rows() if row["kind"] == kind]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "group": GROUPS.get(self.name),
            "bytes_per_token": self.scheme.bytes_per_token,
            "effective_bits": self.scheme.effective_bits,
            "refused": self.refused,
            "server": None if self.server is None else asdict(self.server),
            "loads": [] if self.run is None else self.run.rows(),
            "rounds": [] if self.run is None else self.run.rounds(),
            "left_out": [] if self.run is None else [asdict(load) for load in self.run.left_out],
            "gates": [{"name": gate.name, "verdict": gate.verdict, "words": gate.detail} for gate in self.gates],
            "weight_bytes": self.weight_bytes,
            "harness": None if self.run is None else self.run.harness(),
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The whole benchmark: the schemes in the order in which they were served, and all that they share.

    Attributes:
        evaluation: The evaluation of the same schemes, for the ablation.
        server_args: The flags that all servers had.
    """

    profile: Profile
    model: ModelIdentity
    schemes: tuple[SchemeResult, ...]
    evaluation: Evaluation | None
    provenance: ResultProvenance
    server_args: Sequence[str]

    def problems(self) -> list[str]:
        """The gates that fail, and the schemes that should have been served."""
        gates = [(scheme, gate) for scheme in self.schemes for gate in scheme.gates]
        failed = [f"{scheme.name}: {gate.name}: {gate.detail}" for scheme, gate in gates if gate.verdict == "failed"]
        refused = [(scheme, scheme.refused) for scheme in self.schemes if scheme.refused is not None]
        # A scheme that nothing here stores is expected to be refused: servers do not have it yet either.
        return failed + [
            f"{result.name}: not served: {reason}"
            for result, reason in refused
            if result.scheme.is_local or "per-channel" not in reason
        ]

    def quality(self, name: str, measure: str) -> float | None:
        """A scheme's mean of a measure: of likelihoods, of those at the beginning of the context; None without one."""
        cells = [] if self.evaluation is None else [cell for cell in self.evaluation.cells if cell.measure == measure]
        return next((result.mean for cell in cells for result in cell.results if result.scheme == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        payload: dict[str, Any] = to_jsonable_python(
            {
                "bench_version": RESULT_VERSION,
                "profile_digest": self.profile.digest,
                "model": self.model.model_dump(mode="json"),
                "server_args": list(self.server_args),
                "ways": [scheme.to_json() for scheme in self.schemes],
                "problems": self.problems(),
                "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
                "making": self.provenance.model_dump(mode="json"),
            },
            inf_nan_mode="null",
        )
        return payload


def overview(result: BenchResult) -> Table:
    """A row for each scheme: its size, its quality if that was asked, its speed.

    Speed is under the most requests in flight that all schemes had; a scheme that was not served has none.
    """
    quality = ["KL nats/token", "top-1"] if result.evaluation is not None else []
    speed = ["in flight", "TTFT p50 ms", "TPOT p50 ms", "E2E p99 ms", "tokens/s", "success"]
    headers = ["", "bits", "bytes/token", "tokens that fit", *quality, *speed]
    rows, lanes = [], _common_concurrency(result)
    for scheme in result.schemes:
        bits, size = number(scheme.scheme.effective_bits), count(scheme.scheme.bytes_per_token)
        letter = GROUPS.get(scheme.name, "") if result.evaluation is not None else ""
        row = [f"{letter} {scheme.name}".lstrip(), bits, size, count(scheme.tokens_that_fit)]
        if result.evaluation is not None:
            row.append(number(result.quality(scheme.name, "kl_nats_per_token")))
            row.append(percent(result.quality(scheme.name, "top1_agreement")))
        rows.append([*row, *_speed(scheme, lanes)])
    return Table(headers, rows)


def _common_concurrency(result: BenchResult) -> int | None:
    """The most requests in flight that every scheme that was served had."""
    served = [scheme for scheme in result.schemes if scheme.run is not None]
    concurrencies = [{row["concurrency"] for row in scheme.rows("concurrency")} for scheme in served]
    return max(set.intersection(*concurrencies), default=None) if served else None


def _speed(scheme: SchemeResult, lanes: int | None) -> list[str]:
    row = next((row for row in scheme.rows("concurrency") if row["concurrency"] == lanes), None)
    if row is None:
        return ["not served" if scheme.server is None else NOT_MEASURED, "", "", "", "", ""]
    return [
        str(row["concurrency"]),
        milliseconds(row["ttft_s"]["p50"]),
        milliseconds(row["tpot_s"]["p50"]),
        milliseconds(row["e2e_s"]["p99"]),
        number(row["output_tokens_per_s"]),
        percent(row["success_rate"]),
    ]


def milliseconds(seconds: float | None) -> str:
    """Milliseconds with three digits."""
    return number(None if seconds is None else 1e3 * seconds)


def gates_that_passed(result: BenchResult) -> str:
    """The number of gates that passed, and of those that could not be asked."""
    verdicts = [gate.verdict for scheme in result.schemes for gate in scheme.gates]
    skipped = verdicts.count(SKIPPED)
    return f"{verdicts.count('passed')} gates passed" + (f", {skipped} could not be asked" if skipped else "")


def summary_lines(result: BenchResult) -> list[str]:
    """The table and the verdict for the terminal."""
    problems = [f"FAILED  {problem}" for problem in result.problems()]
    return [*overview(result).lines(), "", *(problems or [gates_that_passed(result)])]
