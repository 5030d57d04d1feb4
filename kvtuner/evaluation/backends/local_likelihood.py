"""Teacher-forced scores of the report split, every scheme simulated on a model loaded here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tqdm import tqdm

from kvtuner.evaluation.cells import Place, make_cell
from kvtuner.evaluation.scheme import REFERENCE
from kvtuner.evaluation.validation import OFFSETS, Validator
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.workbench import Workbench
    from kvtuner.evaluation.scheme import CacheScheme
    from kvtuner.exported_configs.profile.evaluation_record import Cell, Measure
    from kvtuner.run_folder import RunFolder

MEASURES: Final[tuple[Measure, ...]] = ("kl_nats_per_token", "top1_agreement", "nll_nats_per_token")


def local_likelihood_cells(bench: Workbench, schemes: Sequence[CacheScheme], folder: RunFolder) -> list[Cell]:
    """KL, top-1 agreement and negative log-likelihood at the first and the last positions of the context.

    Args:
        bench: The workbench; its report split is scored, by its read plan.
        schemes: The schemes, the unquantized one and the searched profile among them.
        folder: The run folder, whose journal keeps what was measured.

    Raises:
        NonFiniteActivationError: a token's KL is NaN or infinite.
    """
    validator = Validator(bench, folder, sha256_of(bench.identity()))
    tokens = bench.corpus.splits["report"].shape[1]
    last = max(0, bench.loaded.shape.context_length - tokens)
    places = list(zip(OFFSETS, (0, last), strict=True))[: 2 if last else 1]
    cells: list[Cell] = []
    with tqdm(desc="likelihood", total=len(places) * len(schemes), disable=None) as bar:
        for offsets, position in places:
            sums = {}
            for scheme in schemes:
                sums[scheme.name] = validator.measure(scheme, offsets)
                bar.update()
            for measure in MEASURES:
                # KL and agreement are from the unquantized model, which has neither of its own.
                names = [name for name in sums if name != REFERENCE or measure == "nll_nats_per_token"]
                means = {name: sums[name].means(measure) for name in names}
                cells.append(make_cell(measure, Place("likelihood", tokens, position), means, bench.options.seed))
    return cells
