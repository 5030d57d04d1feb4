"""KL by stored bits of other projects' recipes beside our searches, simulated on one model.

    python benchmarks/rivals.py --model demo --out runs/rivals --markdown F.md --json F.json --picture F.png

Goal: ours has the lower KL in as many stored bits, or the table says who has. Every recipe (`benchmarks/recipes/`)
stores the model's cache as its paper or code says; what is stored counts in full: codes, scales, norms, exact tokens at
the end of the context. For each the exact solver gets that many bits. Ours is measured as a search does by default, but
for its window, which is the best of `--windows` on the select split. Searches and recipes calibrate on sequences as
long as the context. KL is that of text that no search or calibration saw, at random positions; read plan `decode`. A
stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import optuna
import torch
from recipes.measurements import PLAIN
from recipes.moments import measure_moments
from recipes.ours import PAPER, OwnSearch, SearchSettings, paper_configuration, stored_budget
from recipes.page import markdown, picture
from recipes.recipe_list import all_recipes
from recipes.simulation import measure

from kvtuner.calibration.corpus import load_corpus
from kvtuner.calibration.workbench import Workbench
from kvtuner.errors import NonFiniteActivationError
from kvtuner.journal import Journal
from kvtuner.pipeline.options import MeasurementOptions
from kvtuner.run_folder import RunFolder, sha256_of
from kvtuner.search_spaces.budget import Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recipes.recipe import Recipe

    from kvtuner.calibration.forward.simulator import Simulator
    from kvtuner.calibration.kl import TokenScores
    from kvtuner.search_spaces.space import Configuration

RECIPES_VERSION: Final = 1
"""The version of the recipes; increase it when one of them gives other numbers."""
TWO_ERRORS: Final = 2.0
"""The standard errors of a paired difference beyond which one side is called lower."""


@dataclass(frozen=True)
class Context:
    """The report sequences of one length; what was measured on them is journalled."""

    tokens: int
    bench: Workbench
    journal: Journal

    @cached_property
    def simulator(self) -> Simulator:
        """The simulator, whose exact run is made when something is measured for the first time."""
        return self.bench.simulator("report")

    @classmethod
    def prepare(cls, search: OwnSearch, plan: ContextPlan, folder: RunFolder) -> Context:
        """Take sequences behind all that the searches read."""
        run = search.search.run
        calibrate, select, report = plan.sequences
        source = replace(run.corpus_source, num_sequences=(calibrate + select, 1, report))
        loaded = run.bench.loaded
        bench = Workbench.prepare(loaded, load_corpus(source, loaded.tokenizer), run.bench.options)
        identity = {"report": bench.corpus.hashes()["report"], "weights": bench.weights_sha256}
        journal = Journal(folder, "rivals.jsonl", sha256_of({**identity, "recipes": RECIPES_VERSION}))
        return cls(plan.tokens, bench, journal)

    def kl(self, key: str, run: Callable[[Simulator], TokenScores]) -> list[float]:
        """The mean KL of every sequence, nats per token; measured once."""
        record = self.journal.get(key)
        if record is None:
            start = time.monotonic()
            scores = run(self.simulator)
            if not bool(torch.isfinite(scores.kl).all()):
                raise NonFiniteActivationError(f"the KL of {key} must be finite; run the model in a wider dtype")
            record = {"key": key, "kl": scores.mean_kl.tolist(), "nll": float(scores.nll.nanmean())}
            self.journal.append(record)
            seconds = time.monotonic() - start
            print(f"{self.tokens}  {statistics.fmean(record['kl']):.4g}  {seconds:.0f} s  {key[:90]}", flush=True)
        kls: list[float] = record["kl"]
        return kls

    def kl_of(self, search: OwnSearch, configuration: Configuration) -> list[float]:
        """The same of a configuration of ours."""
        return self.kl(search.key(configuration), lambda simulator: simulator.measure(search.specs(configuration)))

    def perplexity(self) -> float:
        """The unquantized model's perplexity."""
        self.kl("unquantized", lambda simulator: simulator.measure({}))
        record = self.journal.get("unquantized")
        assert record is not None
        return math.exp(record["nll"])


def summary(kls: Sequence[float]) -> dict[str, Any]:
    """The mean over sequences and its standard error."""
    return {"mean": statistics.fmean(kls), "error": statistics.stdev(kls) / math.sqrt(len(kls)), "sequences": list(kls)}


def lower(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Who has the lower KL on the same sequences, by two standard errors of the difference."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    margin = TWO_ERRORS * statistics.stdev(differences) / math.sqrt(len(differences))
    mean = statistics.fmean(differences)
    return "ours" if mean + margin < 0 else "theirs" if mean - margin > 0 else "even"


def matched(searches: Sequence[OwnSearch], context: Context, bits: float) -> tuple[OwnSearch, Configuration] | None:
    """Ours in as many stored bits: with or without a window, whichever is better on the select split."""
    found: list[tuple[float, int, OwnSearch, Configuration]] = []
    for search in searches:
        window_bits = float(search.window.bits_at(context.tokens))
        configuration = search.best(stored_budget(bits - window_bits)) if bits > window_bits else None
        if configuration is not None:
            found.append((search.search.objective(configuration), len(found), search, configuration))
    return min(found)[2:] if found else None


@dataclass(frozen=True)
class Rival:
    """A rival that was measured in one context: its stored bits there, and the KL of every sequence."""

    name: str
    family: str
    source: str
    bits: float
    kls: Sequence[float]

    def beside(self, context: Context, searches: Sequence[OwnSearch]) -> dict[str, Any]:
        """The rival and ours in as many bits, as a row of the table."""
        row = {"name": self.name, "family": self.family, "source": self.source, "bits": self.bits}
        best = matched(searches, context, self.bits)
        if best is None:
            return {**row, "kl": summary(self.kls), "ours": None}
        search, configuration = best
        kls = context.kl_of(search, configuration)
        ours = {**described(search, configuration, context), "kl": summary(kls), "lower": lower(kls, self.kls)}
        return {**row, "kl": summary(self.kls), "ours": ours}


def described(search: OwnSearch, configuration: Configuration, context: Context) -> dict[str, Any]:
    """A configuration's exact tokens and stored bits, without padding and with it."""
    window = f"last {search.window.residual_length}" if search.window.num_tokens else "none"
    bits, padded = (search.stored_bits(configuration, context.tokens, padded=flag) for flag in (False, True))
    pairs = " ".join(str(choice.pair) for choice in configuration)
    return {"window": window, "bits": bits, "padded_bits": padded, "pairs": pairs}


def recipe_rival(recipe: Recipe, search: OwnSearch, context: Context) -> Rival:
    """A recipe, measured."""
    geometry = search.search.run.table.geometry
    bits = recipe.stored_bits(geometry.head_dim, geometry.v_head_dim, context.tokens)
    kls = context.kl(recipe.name, lambda simulator: measure(simulator, recipe.layers))
    return Rival(recipe.name, recipe.family, recipe.source, bits, kls)


def paper_rivals(paper: OwnSearch, budgets: Sequence[str], context: Context) -> list[Rival]:
    """The paper's search at budgets of payload bits, without those that no trial of it keeps."""
    found = {budget: paper_configuration(paper, budget) for budget in budgets}
    return [
        Rival(
            f"KVTuner paper, {budget}",
            "KVTuner paper",
            PAPER,
            paper.stored_bits(configuration, context.tokens),
            context.kl_of(paper, configuration),
        )
        for budget, configuration in found.items()
        if configuration is not None
    ]


def search_row(search: OwnSearch, budget: str, context: Context) -> dict[str, Any]:
    """Our search at a budget beside the uniform that is best on these very sequences: the strongest rival."""
    configuration = search.best(Budget.parse(budget))
    assert configuration is not None, "a budget of 2 bits holds K2V2"
    uniforms = {name: context.kl_of(search, pairs) for name, pairs in search.uniforms(Budget.parse(budget)).items()}
    name = min(uniforms, key=lambda name: statistics.fmean(uniforms[name]))
    return {
        "budget": budget,
        **described(search, configuration, context),
        "kl": summary(context.kl_of(search, configuration)),
        "uniform": {"name": name, "kl": summary(uniforms[name])},
    }


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """What is measured in one context: its tokens, and the sequences that calibrate, select and report."""

    tokens: int
    sequences: tuple[int, int, int]

    @classmethod
    def parse(cls, text: str) -> ContextPlan:
        """Read ``512:4,12,24``."""
        tokens, _, counts = text.partition(":")
        calibrate, select, report = map(int, counts.split(","))
        return cls(int(tokens), (calibrate, select, report))


def prepare_searches(plan: ContextPlan, args: argparse.Namespace) -> tuple[list[OwnSearch], OwnSearch | None]:
    """Ours with every window, and the paper's, each calibrated in a folder of its own."""
    settings = SearchSettings(args.model, args.data, plan.tokens, plan.sequences, args.trials, args.padded)
    folder = args.out / str(plan.tokens)
    ours = [
        OwnSearch.prepare(folder / f"window-{window}", settings, MeasurementOptions(residual_length=window))
        for window in args.windows
    ]
    if not args.paper_trials:
        return ours, None
    settings = replace(settings, trials=args.paper_trials)
    return ours, OwnSearch.prepare(folder / "paper", settings, replace(PLAIN, score="e_o"))


def compare_all(plan: ContextPlan, args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything in one context; the result as JSON values."""
    searches, paper = prepare_searches(plan, args)
    bench = searches[0].search.run.bench
    recipes = all_recipes(measure_moments(bench.chain, [*bench.batches("calibrate"), *bench.batches("select")]))
    context = Context.prepare(searches[0], plan, RunFolder(args.out))
    rivals = [recipe_rival(recipe, searches[0], context) for recipe in recipes]
    rivals += [] if paper is None else paper_rivals(paper, args.paper_budgets, context)
    calibrate, select, report = plan.sequences
    return {
        "tokens": plan.tokens,
        "note": f"{report} sequences; calibrated on {calibrate} and chosen on {select}, which the recipes that"
        f" calibrate also read; unquantized perplexity {context.perplexity():.2f}.",
        "recipes": [rival.beside(context, searches) for rival in rivals],
        "searches": [search_row(search, budget, context) for search in searches for budget in args.budgets],
    }


def notes(args: argparse.Namespace) -> list[str]:
    """What the figures are of."""
    searched = f"refined in {args.trials} trials" if args.trials else "the exact solver's, without refinement"
    windows = " or ".join(map(str, args.windows))
    return [
        "KL in nats per token, mean and standard error over sequences as long as the context, at random positions; the"
        " first quarter of a sequence is a prompt that was prefilled exactly. Stored bits are those of an element at"
        " the end of the context, with scales and exact tokens. `lower`: beyond two standard errors of the paired"
        " difference.",
        "",
        f"Ours: measured as a search does by default, {searched}. In as many bits as a recipe it has {windows} exact"
        " tokens, whichever is best on the sequences that it is chosen on."
        + (" Budgets hold this model's padded rows." if args.padded else " Rows are counted without padding."),
    ]


def write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the files that were asked for."""
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown(result), encoding="utf-8")
    if args.picture:
        args.picture.write_bytes(picture(result))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--name", help="what the table calls the model")
    flags.add_argument("--data", default="demo")
    flags.add_argument("--out", type=Path, required=True)
    flags.add_argument(
        "--contexts",
        type=ContextPlan.parse,
        nargs="+",
        default=[ContextPlan(512, (4, 12, 24)), ContextPlan(4000, (2, 3, 6))],
        metavar="TOKENS:N,N,N",
        help="tokens, and sequences that calibrate, select and report",
    )
    flags.add_argument("--budgets", nargs="+", default=["2bit", "2.5bit", "3bit", "3.5bit", "4bit"])
    flags.add_argument("--windows", type=int, nargs="+", default=[0, 32, 128])
    flags.add_argument("--trials", type=int, default=0, help="of refinement; 0 takes the exact solution")
    flags.add_argument("--padded", action="store_true", help="budgets hold the padding of this model's own rows")
    flags.add_argument("--paper-trials", type=int, default=200, help="of the KVTuner paper's search; 0 leaves it out")
    flags.add_argument("--paper-budgets", nargs="+", default=["3bit", "4bit"])
    flags.add_argument("--markdown", type=Path)
    flags.add_argument("--json", type=Path)
    flags.add_argument("--picture", type=Path)
    return flags


def main() -> None:
    """Run the command line."""
    args = parser().parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    contexts = [compare_all(plan, args) for plan in args.contexts]
    result = {"model": args.name or args.model, "notes": notes(args), "contexts": contexts}
    print(markdown(result))
    write(args, result)


if __name__ == "__main__":
    main()
