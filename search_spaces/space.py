"""The choices of every layer, and configurations made of them. Knows nothing of budgets or solvers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final

from kvtuner.errors import SearchSpaceError
from kvtuner.precision import NATIVE_BITS, SIDES, PrecisionPair, RowShape
from kvtuner.run_folder import sha256_of
from kvtuner.search_spaces.groups import group_layers
from kvtuner.search_spaces.layer_notation import check_layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.calibration.sensitivity import ScoreName, SensitivityTable
    from kvtuner.precision import Side

_NO_TRANSFORM: Final = "none"


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The bits and transforms that a search picks for one layer, with what they cost.

    Attributes:
        cost_bytes: The stored bytes of one token in this layer, on one rank.
        score: The predicted loss of quality, additive over layers; NaN where that of a baseline was not measured.
    """

    pair: PrecisionPair
    k_transform: str
    v_transform: str
    cost_bytes: int
    score: float


Configuration = tuple[LayerChoice, ...]
"""One choice per layer."""


@dataclass(frozen=True, slots=True)
class LayerMenu:
    """The choices of one layer, which has the global id `layer`, by ascending bytes.

    In a menu of `build_space` no choice is beaten by another in bytes, payload bits and score at once. Where bytes grow
    with payload bits, as they do unless rows are padded, that is the Pareto set of bytes and score.
    """

    layer: int
    choices: tuple[LayerChoice, ...]

    @property
    def pairs(self) -> tuple[PrecisionPair, ...]:
        """The pairs of the choices, each once."""
        return tuple(choice.pair for choice in self.choices)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Menus of all tuned layers by ascending ids, and groups, a partition of their places from 0 on.

    The layers of a group have the same pairs to choose from, and must choose the same one. Of a model with other layers
    too, a place is no id. The bytes in the menus are those of rows of `shape`.
    """

    menus: tuple[LayerMenu, ...]
    groups: tuple[tuple[int, ...], ...]
    shape: RowShape

    def __post_init__(self) -> None:
        assert [menu.layer for menu in self.menus] == sorted({menu.layer for menu in self.menus})
        assert sorted(place for group in self.groups for place in group) == list(range(len(self.menus)))
        assert all(self.menus[i].pairs == self.menus[group[0]].pairs for group in self.groups for i in group)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each group."""
        return tuple(len(self.menus[group[0]].choices) for group in self.groups)

    def configuration(self, indices: Sequence[int]) -> Configuration:
        """The configuration in which each group takes its choice of that index."""
        chosen = {
            place: self.menus[place].choices[index]
            for group, index in zip(self.groups, indices, strict=True)
            for place in group
        }
        return tuple(chosen[place] for place in range(len(self.menus)))

    def project(self, configuration: Configuration) -> tuple[int, ...]:
        """Indices, one per group, of the configuration of this space that stands for any other.

        A pair that was pruned is replaced by the best-scoring one that takes no more bits and bytes; a forced
        layer keeps its only choice. A configuration of this space keeps its pairs.
        """
        assert len(configuration) == len(self.menus)
        return tuple(self._project_group(group, configuration) for group in self.groups)

    def _project_group(self, group: tuple[int, ...], configuration: Configuration) -> int:
        pairs = self.menus[group[0]].pairs
        # The group's own pair, where all its layers have one and pruning left it.
        wanted = {configuration[place].pair for place in group}
        if len(wanted) == 1 and (pair := next(iter(wanted))) in pairs:
            return pairs.index(pair)
        fitting = [
            index
            for index in range(len(pairs))
            if all(self._takes_no_more(self.menus[place].choices[index], configuration[place]) for place in group)
        ]
        # Nothing fits under a pair below that of a forced layer, which has one choice only.
        return min(fitting or [0], key=lambda i: sum(self.menus[place].choices[i].score for place in group))

    def _takes_no_more(self, choice: LayerChoice, other: LayerChoice) -> bool:
        payload, limit = (self.shape.payload_bits(pair) for pair in (choice.pair, other.pair))
        return choice.cost_bytes <= other.cost_bytes and payload <= limit

    def between(self, lower: Configuration | None = None, upper: Configuration | None = None) -> SearchSpace:
        """The part of the space that gives no side of any layer fewer bits than `lower` or more than `upper`.

        Raises:
            SearchSpaceError: Nothing is left for a layer.
        """
        menus = []
        for place, menu in enumerate(self.menus):
            low = PrecisionPair(2, 2) if lower is None else lower[place].pair
            high = PrecisionPair(16, 16) if upper is None else upper[place].pair
            choices = tuple(c for c in menu.choices if _is_within(c.pair, low, high))
            if not choices:
                raise SearchSpaceError(f"layer {menu.layer} has no choice from {low} to {high}; change --keep")
            menus.append(LayerMenu(menu.layer, choices))
        return SearchSpace(tuple(menus), self.groups, self.shape)

    def digest(self) -> str:
        """Identity of the space: its groups, and the pairs, transforms and bytes of its menus."""
        menus = [
            [[str(c.pair), c.k_transform, c.v_transform, c.cost_bytes] for c in menu.choices] for menu in self.menus
        ]
        return sha256_of({"menus": menus, "groups": self.groups})


def pairs_of(configuration: Configuration) -> list[PrecisionPair]:
    """The pair of each layer."""
    return [choice.pair for choice in configuration]


def predicted_score(configuration: Configuration) -> float:
    """The additive prediction: the sum of the layers' scores."""
    return sum(choice.score for choice in configuration)


def build_space(
    table: SensitivityTable,
    score: ScoreName,
    shape: RowShape,
    *,
    keep: Mapping[int, PrecisionPair] | None = None,
    groups: bool = False,
    stages: Sequence[range] = (),
) -> SearchSpace:
    """The menu of every layer: pairs of the widths measured and 16 bits, each side with its best-scoring transform.

    Dominated pairs are left out. Bytes are those of rows of `shape`, of one rank. `keep` forces the pair of some
    layers, by their ids. `groups` ties layers that are alike, as the paper does, but none of two pipeline stages, which
    have them by places; all layers are one stage by default. They are compared by e_o whatever `score` is, for the
    clustering distance of 0.05 is in its unit.

    Raises:
        SearchSpaceError: A kept layer that the model lacks, or a score that is not finite.
        RunFolderError: A score that was not measured.
        PrecisionError: Rows that cannot be packed.
    """
    keep = keep or {}
    ids, num_layers = table.geometry.ids, table.geometry.num_layers
    check_layers(keep, ids)
    menus = tuple(_menu(table, score, shape, layer, keep.get(layer)) for layer in ids)
    partition: tuple[tuple[int, ...], ...] = tuple((place,) for place in range(num_layers))
    if groups:
        # A forced layer has nothing to share: its layer id makes its menu differ from all others.
        candidates = [(menu.pairs, menu.layer if menu.layer in keep else None) for menu in menus]
        features = [[_e_o(table, menu.layer, choice) for choice in menu.choices] for menu in menus]
        partition = group_layers(candidates, features, stages or [range(num_layers)])
    return SearchSpace(menus, partition, shape)


def configuration_from_pairs(
    table: SensitivityTable, pairs: Sequence[PrecisionPair], score: ScoreName, shape: RowShape
) -> Configuration:
    """The configuration that gives each layer its pair, each side with its best-scoring transform.

    Raises:
        SearchSpaceError: Not one pair per layer.
    """
    if len(pairs) != table.geometry.num_layers:
        raise SearchSpaceError(f"the model has {table.geometry.num_layers} layers, but {len(pairs)} pairs are given")
    by_id = zip(table.geometry.ids, pairs, strict=True)
    return tuple(_choice(table, score, shape, layer, pair) for layer, pair in by_id)


def uniform(
    table: SensitivityTable, pair: PrecisionPair, score: ScoreName, shape: RowShape, *, transforms: bool
) -> Configuration:
    """The configuration of one pair in every layer, with the best-scoring transforms or with none."""
    best = configuration_from_pairs(table, [pair] * table.geometry.num_layers, score, shape)
    if transforms:
        return best
    widths = table.geometry.widths(pair).items()
    return tuple(
        replace(
            choice,
            k_transform=_NO_TRANSFORM,
            v_transform=_NO_TRANSFORM,
            score=sum(_plain_score(table, layer, side, bits, score) for side, bits in widths),
        )
        for layer, choice in zip(table.geometry.ids, best, strict=True)
    )


def all_pairs(table: SensitivityTable) -> list[PrecisionPair]:
    """All pairs of the widths that were measured, and of 16 bits; a latent has one width, which stands as both."""
    pairs = [PrecisionPair(*bits) for bits in product((*table.widths, NATIVE_BITS), repeat=2)]
    return [pair for pair in pairs if pair.k_bits == pair.v_bits] if table.geometry.is_latent else pairs


def _menu(
    table: SensitivityTable, score: ScoreName, shape: RowShape, layer: int, kept: PrecisionPair | None
) -> LayerMenu:
    pairs = all_pairs(table) if kept is None else [kept]
    choices = _pareto([_choice(table, score, shape, layer, pair) for pair in pairs], shape)
    # Not by score: layers with the same pairs have them in the same order, as groups need it.
    return LayerMenu(layer, tuple(sorted(choices, key=lambda c: (c.cost_bytes, shape.payload_bits(c.pair), c.pair))))


def _pareto(choices: Sequence[LayerChoice], shape: RowShape) -> list[LayerChoice]:
    """The choices that none beats in bytes, payload bits and score at once; the first of equals."""
    pareto: list[LayerChoice] = []
    for choice in sorted(choices, key=lambda c: (c.cost_bytes, shape.payload_bits(c.pair), c.score, c.pair)):
        # Those before it take no more bytes: only payload and score are left to compare.
        payload = shape.payload_bits(choice.pair)
        if not any(other.score <= choice.score and shape.payload_bits(other.pair) <= payload for other in pareto):
            pareto.append(choice)
    return pareto


def _choice(table: SensitivityTable, score: ScoreName, shape: RowShape, layer: int, pair: PrecisionPair) -> LayerChoice:
    best = {side: _best(table, layer, side, bits, score) for side, bits in table.geometry.widths(pair).items()}
    k_transform, v_transform = (best.get(side, (_NO_TRANSFORM, 0.0))[0] for side in SIDES)
    return LayerChoice(pair, k_transform, v_transform, shape.pair_bytes(pair), sum(value for _, value in best.values()))


def _best(table: SensitivityTable, layer: int, side: Side, bits: int, score: ScoreName) -> tuple[str, float]:
    if bits == NATIVE_BITS:
        return _NO_TRANSFORM, 0.0
    transform, value = table.best(layer, side, bits, score)
    if not math.isfinite(value):
        raise SearchSpaceError(
            f"scores must be finite, but {score} of layer {layer} {side}{bits} is {value}; calibrate again"
        )
    return transform, value


def _plain_score(table: SensitivityTable, layer: int, side: Side, bits: int, score: ScoreName) -> float:
    if bits == NATIVE_BITS:
        return 0.0
    scores = table.of(layer, side, bits).get("none")
    value = None if scores is None else scores.get(score)
    # Isolated KL above 2 bits is measured for one transform, which may be another one.
    return math.nan if value is None else value


def _e_o(table: SensitivityTable, layer: int, choice: LayerChoice) -> float:
    names = {"k": choice.k_transform, "v": choice.v_transform}
    packed = {side: bits for side, bits in table.geometry.widths(choice.pair).items() if bits != NATIVE_BITS}
    return sum(table.of(layer, side, bits)[names[side]].e_o for side, bits in packed.items())


def _is_within(pair: PrecisionPair, low: PrecisionPair, high: PrecisionPair) -> bool:
    return low.k_bits <= pair.k_bits <= high.k_bits and low.v_bits <= pair.v_bits <= high.v_bits
