"""Likelihoods of the report split: simulated on a model loaded here, or of servers by generation.

A server that scores a whole prompt would never read its cache. So a sequence's beginning is sent first, by itself, then
one token more with each request: all but its last token is read as it is stored.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtuner.errors import CorpusError, EndpointError
from kvtuner.evaluation.backends.base import AnswerJournal, HitCount, unread_flag
from kvtuner.evaluation.backends.server_backend import NextToken, ServerBackend, from_record, truncated_kl
from kvtuner.evaluation.cells import CellKey, MeanScores, make_cell
from kvtuner.evaluation.validation import OFFSETS, Validator
from kvtuner.exported_configs.scheme_names import REFERENCE
from kvtuner.progress.bar import ProgressBar
from kvtuner.run_folder import RunFolder, sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtuner.calibration.workbench import Workbench
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.exported_configs.profile.evaluation_record import Cell, Measure

    Answers = list[NextToken | None]

JOURNAL: Final = "next-tokens.jsonl"
SCORING: Final = 1
"""The version of the requests and what is kept of them; increase it when the same tokens would be asked otherwise."""
MOST_FAILED: Final = 0.05
"""Share of a scheme's tokens that may stay unscored."""
MEASURES: Final[tuple[Measure, ...]] = ("kl_nats_per_token", "top1_agreement", "nll_nats_per_token")

logger: Final = logging.getLogger("kvtuner")


def local_likelihood_cells(bench: Workbench, schemes: Sequence[CacheScheme], folder: RunFolder) -> list[Cell]:
    """KL, top-1 agreement and negative log-likelihood at the first and the last positions of the context.

    The report split is scored; the unquantized scheme and the searched profile are among the schemes.
    """
    validator = Validator(bench, folder, sha256_of(bench.identity()))
    tokens = bench.corpus.splits["report"].shape[1]
    last = max(0, bench.loaded.shape.context_length - tokens)
    places = list(zip(OFFSETS, (0, last), strict=True))[: 2 if last else 1]
    cells: list[Cell] = []
    with ProgressBar(desc="likelihood", total=len(places) * len(schemes)) as bar:
        for offsets, position in places:
            sums = {}
            for scheme in schemes:
                sums[scheme.name] = validator.measure(scheme, offsets)
                bar.update()
            for measure in MEASURES:
                means = {name: sums[name].means(measure) for name in _measured(sums, measure)}
                cells.append(make_cell(measure, CellKey("likelihood", tokens, position), means, bench.options.seed))
    return cells


@dataclass(frozen=True, slots=True)
class Scoring:
    """The tokens that servers score: the last ones of each sequence; sequences have one length.

    A truncated KL tells so many (`top`) of the unquantized server's most likely tokens apart.
    """

    sequences: Sequence[Sequence[int]]
    positions: int
    top: int
    seed: int


def server_likelihood_cells(
    backends: Sequence[ServerBackend], scoring: Scoring, folder: RunFolder, identity: str
) -> list[Cell]:
    """Truncated KL, top-1 agreement and negative log-likelihood, as far as the servers together give them.

    A sequence that was answered is journalled and not asked again. The identity is the hash of whatever decides answers
    besides tokens and servers.

    Raises:
        EndpointError: Servers whose answers together cannot be compared, or one that is gone, or hardly answers.
        CorpusError: More positions than a sequence has.
    """
    num_tokens = len(scoring.sequences[0])
    if scoring.positions >= num_tokens:
        raise CorpusError(
            f"{scoring.positions} tokens of each sequence are to be scored, but it has {num_tokens}, of which the first"
            " has nothing before it; give fewer --positions"
        )
    measures = _measures_of(backends)
    journal = AnswerJournal(folder, JOURNAL, identity, version=SCORING)
    failures = {backend.name: 0 for backend in backends}
    hits = {backend.name: HitCount() for backend in backends}
    sequences: list[dict[str, Answers]] = []
    with ProgressBar(desc="likelihood", total=len(scoring.sequences) * len(backends), unit="sequence") as bar:
        for ids in scoring.sequences:
            answers: dict[str, Answers] = {}
            for backend in sorted(backends, key=lambda backend: backend.name != REFERENCE):
                name = backend.name
                answers[name], more_hits = _ask(backend, ids, answers.get(REFERENCE), scoring, journal)
                hits[name] += more_hits
                failures[name] += answers[name].count(None)
                _check_failures(backend, failures[name], scoring)
                bar.update()
            sequences.append(answers)
    key = CellKey("likelihood", num_tokens, flag=unread_flag(backends, hits), failures=failures)
    return [
        make_cell(measure, key, _means(measure, _measured(failures, measure), scoring, sequences), scoring.seed)
        for measure in measures
    ]


def _measured(names: Iterable[str], measure: Measure) -> list[str]:
    """The schemes that a measure has: KL and agreement are from the unquantized model, which has neither of its own."""
    return [name for name in names if name != REFERENCE or measure == "nll_nats_per_token"]


def _measures_of(backends: Sequence[ServerBackend]) -> list[Measure]:
    has_reference = any(backend.name == REFERENCE for backend in backends)
    names_any_token = all(backend.api == "sglang" for backend in backends)
    if not has_reference and not names_any_token:
        raise EndpointError(
            f"OpenAI's API names likely tokens only, which say something beside --endpoint {REFERENCE}=URL; give that"
            " server too, or leave out the level likelihood"
        )
    if not names_any_token:
        logger.warning("kvtuner: OpenAI's API names likely tokens only; perplexity is left out")
    if not has_reference:
        logger.warning("kvtuner: without --endpoint %s=URL KL and top-1 agreement are left out", REFERENCE)
    measures: list[Measure] = ["truncated_kl_nats_per_token", "top1_agreement"] if has_reference else []
    return [*measures, "nll_nats_per_token"] if names_any_token else measures


def _ask(
    backend: ServerBackend, ids: Sequence[int], reference: Answers | None, scoring: Scoring, journal: AnswerJournal
) -> tuple[Answers, HitCount]:
    start = len(ids) - scoring.positions
    asked: list[list[int]] = []
    for target, token in zip(ids[start:], reference or [None] * scoring.positions, strict=True):
        likely = [] if token is None else [name for name in token.top if isinstance(name, int)]
        asked.append(list(dict.fromkeys([target, *likely])))
    top = scoring.top if backend.name == REFERENCE or backend.api == "openai" else 1

    def ask() -> list[Any]:
        backend.prime(ids[:start])
        answers = [
            backend.next_token(ids[: start + index], top=top, asked=named if backend.api == "sglang" else ())
            for index, named in enumerate(asked)
        ]
        return [None if answer is None else answer.record() for answer in answers]

    records, hits = journal.ask(backend, [list(ids), top, asked], ask, scheme=backend.name)
    return [None if record is None else from_record(record) for record in records], hits


def _check_failures(backend: ServerBackend, failed: int, scoring: Scoring) -> None:
    most = MOST_FAILED * len(scoring.sequences) * scoring.positions
    if failed > most:
        raise EndpointError(
            f"{backend.url} ({backend.name}) gave no log-probabilities of {failed} tokens, above the {int(most)} that"
            " may be left out; run the same command again to ask for these again, give a smaller --top-logprobs, or"
            " leave out the level likelihood"
        )


def _means(
    measure: Measure, names: Sequence[str], scoring: Scoring, sequences: Sequence[Mapping[str, Answers]]
) -> dict[str, MeanScores]:
    """The means of some schemes, over the tokens that all schemes scored."""
    sums: dict[str, list[float]] = {name: [] for name in names}
    counts = []
    for ids, answers in zip(scoring.sequences, sequences, strict=True):
        scored = zip(ids[-scoring.positions :], zip(*answers.values(), strict=True), strict=True)
        rows = [(target, dict(zip(answers, tokens, strict=True))) for target, tokens in scored if None not in tokens]
        if rows:
            counts.append(len(rows))
            for name in names:
                sums[name].append(sum(_value(measure, name, target, tokens) for target, tokens in rows))
    numbers = np.array(counts, dtype=np.int64)
    return {name: MeanScores(np.array(values, dtype=np.float64), numbers) for name, values in sums.items()}


def _value(measure: Measure, name: str, target: int, tokens: Mapping[str, NextToken]) -> float:
    token = tokens[name]
    if measure == "nll_nats_per_token":
        return -token.asked[target]
    reference = tokens[REFERENCE]
    return float(token.best == reference.best) if measure == "top1_agreement" else truncated_kl(reference, token)
