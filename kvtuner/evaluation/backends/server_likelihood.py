"""Likelihoods of servers by generation: one token after every beginning of a sequence, which is found in the cache.

Scoring a whole prompt would never read the cache. Here a sequence's beginning is sent first, by itself, then one token
more with each request: all but its last token is read as it is stored.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tqdm import tqdm

from kvtuner.errors import CorpusError, EndpointError
from kvtuner.evaluation.backends.base import AnswerJournal, HitCount, is_unread
from kvtuner.evaluation.backends.next_token import from_record, truncated_kl
from kvtuner.evaluation.cells import Place, make_cell
from kvtuner.evaluation.paired import Means
from kvtuner.evaluation.scheme import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.evaluation.backends.next_token import NextToken
    from kvtuner.evaluation.backends.server_backend import ServerBackend
    from kvtuner.exported_configs.profile.evaluation_record import Cell, Flag, Measure
    from kvtuner.run_folder import RunFolder

    Answers = list[NextToken | None]

JOURNAL: Final = "next-tokens.jsonl"
SCORING: Final = 1
"""Raised whenever the same tokens would be asked about otherwise."""
MOST_FAILED: Final = 0.05
"""Share of a scheme's tokens that may stay unscored."""

logger: Final = logging.getLogger("kvtuner")


@dataclass(frozen=True, slots=True)
class Scoring:
    """The tokens that servers score.

    Attributes:
        sequences: The token ids, all of one length.
        positions: The number of last tokens of each sequence that are scored.
        top: How many of the unquantized server's most likely tokens the truncated KL tells apart.
        seed: The seed of the intervals.
    """

    sequences: Sequence[Sequence[int]]
    positions: int
    top: int
    seed: int

    @property
    def num_tokens(self) -> int:
        """The tokens of a sequence."""
        return len(self.sequences[0])


class ServerScorer:
    """Asks servers about the same tokens; a sequence that was answered is journalled and not asked again.

    Args:
        backends: The servers.
        scoring: The tokens.
        folder: The run folder, which holds the journal.
        identity: The hash of whatever decides answers besides tokens and servers.

    Raises:
        EndpointError: servers whose answers together cannot be compared.
        CorpusError: more positions than a sequence has.
    """

    def __init__(self, backends: Sequence[ServerBackend], scoring: Scoring, folder: RunFolder, identity: str) -> None:
        self._backends = sorted(backends, key=lambda backend: backend.name != REFERENCE)
        self._names = [backend.name for backend in backends]
        self._scoring, self._measures = scoring, _measures_of(backends)
        self._journal = AnswerJournal(folder, JOURNAL, identity, version=SCORING, field="said")
        if scoring.positions >= scoring.num_tokens:
            raise CorpusError(
                f"{scoring.positions} tokens of each sequence are to be scored, but it has {scoring.num_tokens}, of"
                " which the first has nothing before it; give fewer --positions"
            )
        if "nll_nats_per_token" not in self._measures:
            logger.warning("kvtuner: OpenAI's API names likely tokens only; perplexity is left out")
        if REFERENCE not in self._names:
            logger.warning("kvtuner: without --endpoint %s=URL KL and top-1 agreement are left out", REFERENCE)

    def cells(self) -> list[Cell]:
        """Truncated KL, top-1 agreement and negative log-likelihood, as far as the servers give them.

        Raises:
            EndpointError: a server is gone, or hardly answers.
        """
        failures, hits = dict.fromkeys(self._names, 0), dict.fromkeys(self._names, HitCount())
        sequences: list[dict[str, Answers]] = []
        total = len(self._scoring.sequences) * len(self._backends)
        with tqdm(desc="likelihood", total=total, unit="sequence", disable=None) as bar:
            for ids in self._scoring.sequences:
                answers: dict[str, Answers] = {}
                for backend in self._backends:
                    name = backend.name
                    answers[name], found = self._ask(backend, ids, answers.get(REFERENCE))
                    hits[name] += found
                    failures[name] += answers[name].count(None)
                    self._check_failures(backend, failures[name])
                    bar.update()
                sequences.append(answers)
        flag: Flag | None = "unread" if is_unread(self._backends, hits) else None
        place = Place("likelihood", self._scoring.num_tokens, flag=flag, failures=failures)
        return [
            make_cell(measure, place, self._means(measure, sequences), self._scoring.seed) for measure in self._measures
        ]

    def _ask(self, backend: ServerBackend, ids: Sequence[int], reference: Answers | None) -> tuple[Answers, HitCount]:
        """The answers of one server at every scored position, and how much of the prompts was in its cache."""
        start = len(ids) - self._scoring.positions
        beside = reference if reference is not None else [None] * self._scoring.positions
        asked = [_tokens_to_name(target, each) for target, each in zip(ids[start:], beside, strict=True)]
        top = self._scoring.top if backend.name == REFERENCE or backend.api == "openai" else 1

        def ask() -> list[Any]:
            backend.prime(ids[:start])
            answers = [
                backend.next_token(ids[: start + index], top=top, asked=named if backend.api == "sglang" else ())
                for index, named in enumerate(asked)
            ]
            return [None if answer is None else answer.record() for answer in answers]

        records, hits = self._journal.ask(backend, [list(ids), top, asked], ask, way=backend.name)
        return [None if record is None else from_record(record) for record in records], hits

    def _check_failures(self, backend: ServerBackend, failed: int) -> None:
        most = MOST_FAILED * len(self._scoring.sequences) * self._scoring.positions
        if failed > most:
            raise EndpointError(
                f"{backend.url} ({backend.name}) gave no log-probabilities of {failed} tokens, above the"
                f" {int(most)} that may be left out; run the same command again to ask for these again, give a smaller"
                " --top-logprobs, or leave out the level likelihood"
            )

    def _means(self, measure: Measure, sequences: Sequence[Mapping[str, Answers]]) -> dict[str, Means]:
        """The means by the name of the scheme, over tokens that all schemes scored."""
        names = [name for name in self._names if name != REFERENCE or measure == "nll_nats_per_token"]
        sums: dict[str, list[float]] = {name: [] for name in names}
        counts = []
        for ids, answers in zip(self._scoring.sequences, sequences, strict=True):
            rows = list(zip(*answers.values(), strict=True))
            targets = ids[len(ids) - len(rows) :]
            kept = [index for index, row in enumerate(rows) if None not in row]
            if not kept:
                continue
            counts.append(len(kept))
            for name in names:
                sums[name].append(sum(_value(measure, answers, name, index, targets[index]) for index in kept))
        numbers = np.array(counts, dtype=np.int64)
        return {name: Means(np.array(values, dtype=np.float64), numbers) for name, values in sums.items()}


def _measures_of(backends: Sequence[ServerBackend]) -> tuple[Measure, ...]:
    """The metrics that these servers together let be measured.

    Raises:
        EndpointError: there are none.
    """
    measures: list[Measure] = []
    if any(backend.name == REFERENCE for backend in backends):
        measures += ["truncated_kl_nats_per_token", "top1_agreement"]
    if all(backend.api == "sglang" for backend in backends):
        measures.append("nll_nats_per_token")
    if not measures:
        raise EndpointError(
            f"OpenAI's API names likely tokens only, which say something beside --endpoint {REFERENCE}=URL; give that"
            " server too, or leave out the level likelihood"
        )
    return tuple(measures)


def _tokens_to_name(target: int, reference: NextToken | None) -> list[int]:
    likely = [] if reference is None else [token for token in reference.top if isinstance(token, int)]
    return list(dict.fromkeys([target, *likely]))


def _value(measure: Measure, answers: Mapping[str, Answers], name: str, index: int, target: int) -> float:
    mine = answers[name][index]
    assert mine is not None
    if measure == "nll_nats_per_token":
        return -mine.asked[target]
    reference = answers[REFERENCE][index]
    assert reference is not None
    return truncated_kl(reference, mine) if measure != "top1_agreement" else float(mine.best == reference.best)
