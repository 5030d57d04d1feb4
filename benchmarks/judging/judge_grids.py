"""The KL of other grids beside fitted ones, all layers allocated exactly, at equal stored bits.

    python benchmarks/judging/judge_grids.py --model demo --out runs/judge --json judged.json

Menus of items are compared: fitted grids of 2, 3, 4 and 8 bits, and the same with one more idea each: values in a
calibrated basis whose second half has few or no bits, trellis codes of values, ternary codes, words of 16 bits without
and with ternary codes, and fitted grids by KV head. Every item is measured alone (calibrate split) in every layer, a
knapsack allocates stored bits without padding, and the result is measured as a whole (report split), all menus on the
same sequences. An idea's share is its KL by that of the fitted menu, with the standard error over sequences. The
decisions are in docs/method.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from judged_grids import WORD_BITS, ByHead, Halves, Judged, Levels, Trellis
from value_moments import ValueMoments

from kvtuner.calibration.corpus import load_corpus
from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.calibration.model_loading import load_model, read_shape
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.calibration.workbench import CalibrationOptions, Workbench
from kvtuner.pipeline.options import DataOptions, ModelOptions
from kvtuner.pipeline.sources import corpus_source, model_source
from kvtuner.precision import SHORT_WORD_BITS
from kvtuner.quant import QuantSpec

if TYPE_CHECKING:
    from kvtuner.calibration.forward.simulator import Simulator
    from kvtuner.calibration.sensitivity import LayerConstants
    from kvtuner.precision import Side

KEY_TRANSFORMS: Final = ("balanced+hadamard", "centered+balanced+hadamard")
VALUE_TRANSFORMS: Final = ("none", "hadamard")
HALVES: Final = ((4, None), (4, 2), (8, None), (8, 2), (8, 4), (16, None), (16, 2), (16, 4))
"""Levels of the strong half and of the weak one."""
SHORT_PARTS: Final = (1, 2, 4)
"""The groups of a head in which words of 16 bits are judged."""
Storage = QuantSpec | Judged | ByHead
Place = tuple[int, str, int | None]
"""A layer, a side, and a head; None for all heads of the layer."""


@dataclass(frozen=True)
class Item:
    """One way to store a side of a layer, or of one of its heads.

    Attributes:
        family: The menu's part that it belongs to: fitted, heads, or an idea.
        name: The item's name in results.
        bits: Stored bits of a token over all KV heads, or of the head, words counted.
        storage: What simulates it.
    """

    family: str
    name: str
    bits: int
    storage: QuantSpec | Judged


MENUS: Final = {
    "fitted 2/4/8": ("fitted",),
    "fitted": ("fitted", "three"),
    "ternary": ("fitted", "three", "ternary"),
    "short words": ("fitted", "three", "short fitted", "short three"),
    "short words, ternary": ("fitted", "three", "short fitted", "short three", "ternary", "short ternary"),
    "halves, by weights": ("fitted", "three", "weights"),
    "halves, by gradients": ("fitted", "three", "gradients"),
    "trellis": ("fitted", "three", "trellis"),
    "by head 2/4/8": ("heads",),
    "by head": ("heads", "heads three"),
}
"""The families of items in each menu."""


class Judge:
    """A model with its items of every place, their KL alone, and the KL of what is allocated."""

    def __init__(self, bench: Workbench, journal: Path, *, one_transform: bool = False) -> None:
        self.bench, self.journal, self.one_transform = bench, journal, one_transform
        self.known: dict[str, Any] = json.loads(journal.read_text()) if journal.exists() else {}
        self.alone: Simulator = bench.simulator("calibrate", reuse=True)
        self.whole: Simulator = bench.simulator("report", reuse=True)
        self.items: dict[Place, list[Item]] = {}
        geometry = bench.loaded.shape.geometry
        self.num_layers, self.num_heads, self.channels = geometry.num_layers, geometry.num_kv_heads, geometry.v_head_dim
        constants = measure_constants(bench.chain, bench.batches("calibrate"))
        moments = ValueMoments.measure(bench)
        for layer in range(self.num_layers):
            for side, channels in (("k", geometry.head_dim), ("v", geometry.v_head_dim)):
                self._add_items(layer, cast("Side", side), channels, constants[layer], moments)

    def _add_items(
        self, layer: int, side: Side, channels: int, constants: LayerConstants, moments: ValueMoments
    ) -> None:
        names = KEY_TRANSFORMS if side == "k" else VALUE_TRANSFORMS
        transforms = {name: constants.transform(side, name) for name in names[-1 if self.one_transform else 0 :]}
        items: list[Item] = []

        def add(family: str, name: str, judged: Judged) -> None:
            items.append(Item(family, name, self.num_heads * judged.grid.stored_bits(channels), judged))

        for name, transform in transforms.items():
            for levels, family in ((4, "fitted"), (8, "three"), (16, "fitted"), (3, "ternary")):
                add(family, f"{levels} levels {name}", Judged(Levels(levels), transform))
                for parts in SHORT_PARTS:
                    grid = Levels(levels, parts, SHORT_WORD_BITS)
                    add(f"short {family}", f"{levels} levels {parts} short {name}", Judged(grid, transform))
        last = QuantSpec(8, transform)
        items.append(Item("fitted", "8 bits", self.num_heads * (8 * channels + WORD_BITS), last))
        if side == "v":
            for reader in ("weights", "gradients"):
                basis = moments.basis(layer, reader)
                for strong, weak in HALVES:
                    halves = Halves(Levels(strong), None if weak is None else Levels(weak))
                    add(reader, f"{strong}/{weak or 0} levels {reader}", Judged(halves, basis))
            for bits in (2, 3):
                add("trellis", f"trellis {bits}", Judged(Trellis(bits), transforms["hadamard"]))
        self.items[layer, side, None] = items

    def kl_alone(self, place: Place, item: Item) -> float:
        """The mean KL per token with nothing else quantized."""
        layer, side, head = place
        storage: Storage = item.storage
        if head is not None:
            storage = ByHead([item.storage if other == head else None for other in range(self.num_heads)])
        spec = self._layer({side: storage})
        return cast("float", self._once(f"{place} {item.name}", lambda: self.alone.kl({layer: spec})))

    def split_heads(self) -> None:
        """Add the places of single heads: the fitted items, each width with its better transform."""
        for layer, side in [(layer, side) for layer, side, head in self.items if head is None]:
            best: dict[int, Item] = {}
            for item in self.items[layer, side, None]:
                if item.family in ("fitted", "three"):
                    other = best.get(item.bits)
                    place = (layer, side, None)
                    if other is None or self.kl_alone(place, item) < self.kl_alone(place, other):
                        best[item.bits] = item
            for head in range(self.num_heads):
                self.items[layer, side, head] = [
                    Item(
                        item.family.replace("fitted", "heads").replace("three", "heads three"),
                        item.name,
                        bits // self.num_heads,
                        item.storage,
                    )
                    for bits, item in best.items()
                ]

    def allocate(self, families: tuple[str, ...], cap: int) -> dict[Place, Item]:
        """The items of the least summed KL within `cap` stored bits of a token."""
        front: list[tuple[int, float, dict[Place, Item]]] = [(0, 0.0, {})]
        for place in self.items:
            choices = [(item, self.kl_alone(place, item)) for item in self.items[place] if item.family in families]
            if not choices:
                continue
            grown = [
                (bits + i.bits, kl + more, {**chosen, place: i}) for bits, kl, chosen in front for i, more in choices
            ]
            front, least = [], float("inf")
            for point in sorted(grown, key=lambda point: point[:2]):
                if point[0] <= cap and point[1] < least:
                    front.append(point)
                    least = point[1]
        return front[-1][2]

    def measure(self, chosen: dict[Place, Item]) -> list[float]:
        """The KL per token of each sequence of the report split."""
        layers = []
        for layer in range(self.num_layers):
            sides: dict[str, Storage] = {}
            for side in ("k", "v"):
                if (layer, side, None) in chosen:
                    sides[side] = chosen[layer, side, None].storage
                elif (layer, side, 0) in chosen:
                    sides[side] = ByHead([chosen[layer, side, h].storage for h in range(self.num_heads)])
            layers.append(self._layer(sides))
        name = " ".join(f"{place}:{item.family}:{item.name}" for place, item in chosen.items())
        specs = dict(enumerate(layers))
        return cast("list[float]", self._once(name, lambda: self.whole.measure(specs).mean_kl.tolist()))

    def _layer(self, sides: dict[str, Storage]) -> LayerSpec:
        # A simulation asks of a storage no more than `simulate`.
        k, v = (cast("QuantSpec | None", sides.get(side)) for side in ("k", "v"))
        return LayerSpec(k, v)

    def _once(self, name: str, measure: Any) -> Any:
        if name not in self.known:
            self.known[name] = measure()
            if len(self.known) % 20 == 0:
                self.save()
        return self.known[name]

    def save(self) -> None:
        """Keep what was measured."""
        self.journal.write_text(json.dumps(self.known))


def write_results(file: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, a line for every row, with the mean KL and its standard error for the sequences' KL."""
    lines = []
    for name, value in results.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(summary(row)) for row in value)
            lines.append(f"{json.dumps(name)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    file.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """A row in few digits."""
    kl = torch.tensor(row["kl"], dtype=torch.float64)
    short = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in row.items() if name != "kl"
    }
    return short | {"kl": float(f"{kl.mean():.4g}"), "error": float(f"{kl.std() / len(kl) ** 0.5:.2g}")}


def prepare(args: argparse.Namespace) -> Workbench:
    """Load the model and its text."""
    model = ModelOptions(model=args.model)
    shape = read_shape(model_source(model))
    data = DataOptions(data=args.data, sequence_length=args.sequence_length, sequences=tuple(args.sequences))
    loaded = load_model(model_source(model), shape)
    corpus = load_corpus(corpus_source(data, model, shape, seed=0), loaded.tokenizer)
    return Workbench.prepare(loaded, corpus, CalibrationOptions())


def uniform_values(judge: Judge) -> list[dict[str, Any]]:
    """The KL of every item of values in all layers, keys exact: no allocation has a part in it."""
    rows = []
    for index, first in enumerate(judge.items[0, "v", None]):
        specs = {layer: judge.items[layer, "v", None][index] for layer in range(judge.num_layers)}
        kl = judge.measure({(layer, "v", None): item for layer, item in specs.items()})
        bits = first.bits / judge.num_heads / judge.channels
        rows.append({"item": first.name, "family": first.family, "stored_bits": bits, "kl": kl})
        print(f"values {first.name:28} stored {bits:.3f}", compared(rows), flush=True)
        judge.save()
    return rows


def judged(bench: Workbench, judge: Judge, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The KL of every menu at every budget, and the share of stored sides that an idea's items took."""
    geometry = bench.loaded.shape.geometry
    elements = geometry.num_layers * geometry.num_kv_heads * (geometry.head_dim + geometry.v_head_dim)
    words = 2 * geometry.num_layers * geometry.num_kv_heads * WORD_BITS
    rows = []
    for budget in args.budgets:
        for menu in args.menus:
            chosen = judge.allocate(MENUS[menu], int(budget * elements) + words)
            bits = sum(item.bits for item in chosen.values()) / elements
            own = MENUS[menu][-1]
            taken = sum(item.family == own for item in chosen.values()) / len(chosen)
            predicted = sum(judge.kl_alone(place, item) for place, item in chosen.items())
            kl = judge.measure(chosen)
            rows.append(
                {"budget": budget, "menu": menu, "stored_bits": bits, "taken": taken, "predicted": predicted, "kl": kl}
            )
            print(
                f"{budget:5} {menu:22} stored {bits:.3f} taken {taken:.0%} predicted {predicted:.4g}",
                compared(rows),
                flush=True,
            )
            judge.save()
    return rows


def compared(rows: list[dict[str, Any]]) -> str:
    """The last row's KL, and its share of the fitted menu's at the same budget, which the row gets, with errors."""
    kl = torch.tensor(rows[-1]["kl"], dtype=torch.float64)
    text = f"KL {kl.mean():.4g} +- {kl.std() / len(kl) ** 0.5:.2g}"
    for row in rows[:-1]:
        if "menu" in row and (row["budget"], row["menu"]) == (rows[-1]["budget"], "fitted"):
            other = torch.tensor(row["kl"], dtype=torch.float64)
            ratio = kl.mean() / other.mean()
            error = (kl - ratio * other).std() / len(kl) ** 0.5 / other.mean()
            rows[-1] |= {"share": float(ratio), "share_error": float(error)}
            text += f"; {ratio:.3f} +- {error:.3f} of fitted"
    return text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.0, 2.25, 2.5, 3.0, 3.5])
    parser.add_argument("--menus", nargs="*", default=list(MENUS), choices=list(MENUS))
    parser.add_argument("--one-transform", action="store_true", help="rotate all, for models that are slow")
    parser.add_argument("--uniform-values", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--sequences", type=int, nargs=3, default=[4, 1, 12])
    args = parser.parse_args()
    torch.manual_seed(0)
    bench = prepare(args)
    args.out.mkdir(parents=True, exist_ok=True)
    judge = Judge(bench, args.out / "measured.json", one_transform=args.one_transform)
    results: dict[str, Any] = {"model": args.model.rstrip("/").split("/")[-1], "sequences": args.sequences}
    results |= {name: getattr(bench.loaded.shape.geometry, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
    if args.uniform_values:
        results["uniform values"] = uniform_values(judge)
    if args.menus:
        if any(menu.startswith("by head") for menu in args.menus):
            judge.split_heads()
        results["allocated"] = judged(bench, judge, args)
    if args.json:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
