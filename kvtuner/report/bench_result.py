"""The figures of a benchmark and their JSON form. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_jsonable_python

from kvtuner.bench.ablation import GROUPS
from kvtuner.bench.gates import FAILED
from kvtuner.bench.load_metrics import SchemeRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.bench.gates import Gate
    from kvtuner.bench.load_target import ServerRecord
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.exported_configs.profile.evaluation_record import CellResult, Evaluation, ResultProvenance
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity

RESULT_VERSION: Final = 1
FIX_A_START: Final = (
    "read the server's log in the run folder, set --server-args by what it says, and run the command again"
)
NO_LOADS: Final = SchemeRun((), ())


@dataclass(frozen=True, slots=True)
class BenchProblem:
    """What makes figures useless, and what to do about it."""

    text: str
    way_out: str


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """A scheme, its figures and their gates; one that was not served has no server and no loads.

    Attributes:
        weight_bytes: The bytes of weights that a token of one request reads at least; None of other servers than
            SGLang.
        refused: The reason why it was not served; None where it was.
    """

    scheme: CacheScheme
    server: ServerRecord | None = None
    run: SchemeRun = NO_LOADS
    gates: tuple[Gate, ...] = ()
    weight_bytes: int | None = None
    refused: str | None = None

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
        return [row for row in self.run.rows() if row["kind"] == kind]

    def to_json(self) -> dict[str, Any]:
        """Values of which `BenchResult.to_json` makes plain JSON."""
        return {
            "name": self.name,
            "group": GROUPS.get(self.name),
            "bytes_per_token": self.scheme.bytes_per_token,
            "effective_bits": self.scheme.effective_bits,
            "refused": self.refused,
            "server": self.server,
            "loads": self.run.rows(),
            "rounds": self.run.rounds(),
            "left_out": self.run.left_out,
            "gates": [{"name": gate.name, "verdict": gate.verdict, "words": gate.detail} for gate in self.gates],
            "weight_bytes": self.weight_bytes,
            "harness": None if self.server is None else self.run.harness(),
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The whole benchmark: the schemes in the order in which they were served, and all that they share.

    Attributes:
        evaluation: The evaluation of the same schemes, for the ablation.
        server_args: The flags that all servers had.
        best_uniform: The name of the scheme that is the best uniform of the profile's search; None without one.
        no_best_uniform: The reason why there is none, where there would be one by default.
    """

    profile: Profile
    model: ModelIdentity
    schemes: tuple[SchemeResult, ...]
    evaluation: Evaluation | None
    provenance: ResultProvenance
    server_args: Sequence[str]
    best_uniform: str | None = None
    no_best_uniform: str | None = None

    @property
    def served(self) -> list[SchemeResult]:
        """The schemes that were served."""
        return [scheme for scheme in self.schemes if scheme.server is not None]

    def problems(self) -> list[BenchProblem]:
        """The gates that fail, and the schemes that should have been served."""
        failed = [
            BenchProblem(f"{scheme.name}: {gate.name}: {gate.detail}", gate.way_out)
            for scheme in self.schemes
            for gate in scheme.gates
            if gate.verdict == FAILED
        ]
        # On a GPU nothing reads keys per channel yet, and servers say so.
        return failed + [
            BenchProblem(f"{result.name}: not served: {result.refused}", FIX_A_START)
            for result in self.schemes
            if result.refused is not None and "keys per channel are not read on cuda" not in result.refused
        ]

    def quality(self, name: str, measure: str) -> CellResult | None:
        """A scheme's result by a measure: of likelihoods, that at the beginning of the context; None without one."""
        cells = [] if self.evaluation is None else [cell for cell in self.evaluation.cells if cell.measure == measure]
        return next((result for cell in cells for result in cell.results if result.scheme == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite becomes null."""
        payload: dict[str, Any] = {
            "bench_version": RESULT_VERSION,
            "profile_digest": self.profile.digest,
            "model": self.model,
            "server_args": self.server_args,
            "best_uniform": self.best_uniform,
            "no_best_uniform": self.no_best_uniform,
            "ways": [scheme.to_json() for scheme in self.schemes],
            "problems": [problem.text for problem in self.problems()],
            "ways_out": [problem.way_out for problem in self.problems()],
            "evaluation": self.evaluation,
            "making": self.provenance,
        }
        return to_jsonable_python(payload, inf_nan_mode="null")  # type: ignore[no-any-return]
