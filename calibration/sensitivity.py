"""The sensitivity table: the scores of every candidate of every layer, measured once and reused. Knows no budgets."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from kvtuner.errors import RunFolderError
from kvtuner.exported_configs.profile.layer_storage import Fp16Array, encode_fp16
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair, Side
from kvtuner.quant import Transform
from kvtuner.transforms import TransformKind, transform_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from kvtuner.run_folder import RunFolder

ScoreName = Literal["kl", "fisher", "e_o"]
TABLE_FILE = "sensitivity.json"
TABLE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One side of one layer at one width with one transform."""

    layer: int
    side: Side
    bits: int
    transform: str


@dataclass(frozen=True, slots=True)
class CandidateScores:
    """The errors of a candidate; each but e_self is a mean over the calibration tokens that read quantized ones.

    Where several layers read the cache of one, each but e_self is the sum of what they see.

    Attributes:
        e_self: mean |x - x'| / |x| of the keys (e_k) or values (e_v) themselves, over all calibration tokens; those
            that no token reads quantized count zero.
        e_a: mean |a - a'| of the probabilities of tokens that attention reads; zero for values.
        e_o: mean |o - o'| / |o| of attention outputs.
        fisher: half the expected squared directional derivative of the loss, nats per token.
        kl: KL of the model with only this candidate quantized, nats per token: the Fisher score, at the narrowest width
            as measured KL of some sequences corrects it (`with_isolated_kl`); None where it decides nothing.
    """

    e_self: float
    e_a: float
    e_o: float
    fisher: float
    kl: float | None = None

    def get(self, name: ScoreName) -> float | None:
        """The score of that name."""
        return {"kl": self.kl, "fisher": self.fisher, "e_o": self.e_o}[name]


@dataclass(frozen=True, slots=True)
class LayerConstants:
    """Constants of a layer's key transforms, fp16 [num_kv_heads, head_dim].

    Attributes:
        mu: mean key over random position offsets.
        lam: lambda for keys that are not centred.
        lam_centered: lambda for keys that are.
    """

    mu: torch.Tensor
    lam: torch.Tensor
    lam_centered: torch.Tensor

    def transform(self, side: Side, name: str) -> Transform:
        """The transform `name` with this layer's constants."""
        kind = TransformKind.parse(name)
        if name not in transform_names(side):
            raise ValueError(f"values have no transform {name!r}")
        lam = self.lam_centered if kind.centered else self.lam
        return Transform(kind, self.mu if kind.centered else None, lam if kind.balanced else None)


@dataclass(frozen=True)  # without slots, which cached_property cannot have
class SensitivityTable:
    """All measurements of one model on one calibration corpus.

    Attributes:
        identity: The facts that decide the measurement; plain JSON values.
        geometry: The layers that were measured; scores and constants name them by their global ids.
        pairs: The paper's e_o of (layer, pair) without transforms; empty unless asked for.
        info: The counts that are reported, not compared (tokens, forward passes).
    """

    identity: Mapping[str, Any]
    geometry: ModelGeometry
    constants: Mapping[int, LayerConstants]
    scores: Mapping[Candidate, CandidateScores]
    pairs: Mapping[tuple[int, PrecisionPair], float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _by_place(self) -> Mapping[tuple[int, Side, int], dict[str, CandidateScores]]:
        by_place: dict[tuple[int, Side, int], dict[str, CandidateScores]] = {}
        for candidate, scores in self.scores.items():
            place = (candidate.layer, candidate.side, candidate.bits)
            by_place.setdefault(place, {})[candidate.transform] = scores
        return by_place

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The packed widths that were measured, ascending."""
        return tuple(sorted({candidate.bits for candidate in self.scores}))

    def of(self, layer: int, side: Side, bits: int) -> dict[str, CandidateScores]:
        """Scores of one layer, side and width, by transform."""
        return self._by_place.get((layer, side, bits), {})

    def best(self, layer: int, side: Side, bits: int, score: ScoreName) -> tuple[str, float]:
        """The best-scoring transform of one layer, side and width, and its score.

        Only candidates that have the score take part: isolated KL is that of one or two transforms at the narrowest
        width, and of the Fisher score's choice above. Of equals the simpler one is taken.

        Raises:
            RunFolderError: The score was not measured.
        """
        measured = [
            (value, name)
            for name, scores in self.of(layer, side, bits).items()
            if (value := scores.get(score)) is not None
        ]
        if not measured:
            raise RunFolderError(f"the sensitivity table has no {score!r} score for layer {layer} {side}{bits}")
        order = transform_names(side)
        value, name = min(measured, key=lambda item: (item[0], order.index(item[1])))
        return name, value

    def constants_of(self, layer: int, side: Side, transform: str) -> Transform:
        """The transform of a layer by name, with its constants."""
        return self.constants[layer].transform(side, transform)

    def save(self, folder: RunFolder) -> None:
        """Write the table atomically with a checksum."""
        folder.write_checked(
            TABLE_FILE,
            {
                "version": TABLE_VERSION,
                "identity": dict(self.identity),
                "geometry": self.geometry.as_dict(),
                "constants": [
                    {name: encode_fp16(getattr(c, name)) for name in ("mu", "lam", "lam_centered")}
                    for c in self.constants.values()
                ],
                "scores": [{**asdict(candidate), **asdict(scores)} for candidate, scores in self.scores.items()],
                "pairs": [
                    {"layer": layer, "pair": str(pair), "e_o": value} for (layer, pair), value in self.pairs.items()
                ],
                "info": dict(self.info),
            },
        )

    @classmethod
    def load(cls, folder: RunFolder) -> SensitivityTable:
        """Read what `save` wrote.

        Raises:
            RunFolderError: Absent, damaged, or of another version.
        """
        payload = folder.read_checked(TABLE_FILE)
        if payload.get("version") != TABLE_VERSION:
            raise RunFolderError(
                f"{folder.file(TABLE_FILE)} has version {payload.get('version')!r}, this kvtuner reads {TABLE_VERSION};"
                " calibrate again in another folder"
            )
        candidate_fields = ("layer", "side", "bits", "transform")
        score_fields = ("e_self", "e_a", "e_o", "fisher", "kl")
        geometry = ModelGeometry.from_dict(payload["geometry"])
        constants = (
            LayerConstants(**{name: Fp16Array.model_validate(array).decode() for name, array in item.items()})
            for item in payload["constants"]
        )
        return cls(
            identity=payload["identity"],
            geometry=geometry,
            constants=dict(zip(geometry.ids, constants, strict=True)),
            scores={
                Candidate(**{name: row[name] for name in candidate_fields}): CandidateScores(
                    **{name: row[name] for name in score_fields}
                )
                for row in payload["scores"]
            },
            pairs={(row["layer"], PrecisionPair.parse(row["pair"])): row["e_o"] for row in payload["pairs"]},
            info=payload["info"],
        )


def missing_candidates(table: SensitivityTable, score: ScoreName) -> Iterable[tuple[int, Side, int]]:
    """(layer, side, bits) for which no transform has the score."""
    for layer, side, bits in product(table.geometry.ids, table.geometry.sides, table.widths):
        if all(scores.get(score) is None for scores in table.of(layer, side, bits).values()):
            yield layer, side, bits
