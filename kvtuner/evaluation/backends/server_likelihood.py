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
from kvtuner.evaluation.backends.endpoint import HitCount
from kvtuner.evaluation.backends.next_token import from_record, truncated_kl
from kvtuner.evaluation.cells import Place, mean_cell
from kvtuner.evaluation.scheme import REFERENCE
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.evaluation.backends.endpoint import Endpoint
    from kvtuner.evaluation.backends.next_token import NextToken
    from kvtuner.exported_configs.profile.evaluation_record import Cell, Flag, Measure
    from kvtuner.run_folder import RunFolder

    Said = list[NextToken | None]

JOURNAL: Final = "next-tokens.jsonl"
SCORING: Final = 1
"""Raised whenever the same tokens would be asked about otherwise."""
MOST_FAILED: Final = 0.05
"""Share of a way's tokens that may stay unscored."""

logger: Final = logging.getLogger("kvtuner")


@dataclass(frozen=True, slots=True)
class Scoring:
    """What servers score.

    Attributes:
        sequences: token ids, all of one length.
        positions: of each sequence, its last tokens, so many of them.
        top: of the unquantized server's most likely tokens, how many the truncated KL tells apart.
        seed: of the intervals.
    """

    sequences: Sequence[Sequence[int]]
    positions: int
    top: int
    seed: int

    @property
    def num_tokens(self) -> int:
        """Of a sequence."""
        return len(self.sequences[0])


class ServedScorer:
    """Asks servers about the same tokens; a sequence that was answered is journalled and not asked again.

    Args:
        endpoints: by the name of the way.
        scoring: what to ask.
        folder: of the journal.
        identity: of whatever decides answers besides tokens and servers.

    Raises:
        EndpointError: servers that together say nothing that could be compared.
        CorpusError: more positions than a sequence has.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint], scoring: Scoring, folder: RunFolder, identity: str) -> None:
        self._endpoints, self._scoring, self._folder, self._identity = endpoints, scoring, folder, identity
        self._measures = _measures_of(endpoints)
        if scoring.positions >= scoring.num_tokens:
            raise CorpusError(
                f"{scoring.positions} tokens of each sequence are to be scored, but it has {scoring.num_tokens}, of"
                " which the first has nothing before it; give fewer --positions"
            )
        if "nll_nats_per_token" not in self._measures:
            logger.warning("kvtuner: OpenAI's API names likely tokens only; perplexity is left out")
        if REFERENCE not in endpoints:
            logger.warning("kvtuner: without --endpoint %s=URL KL and top-1 agreement are left out", REFERENCE)
        self._known = {
            record["key"]: record for record in folder.records(JOURNAL) if record.get("identity") == identity
        }

    def cells(self) -> list[Cell]:
        """Truncated KL, top-1 agreement and negative log-likelihood, as far as the servers say them.

        Raises:
            EndpointError: a server is gone, or hardly says anything.
        """
        order = sorted(self._endpoints, key=lambda name: name != REFERENCE)
        failures, hits = dict.fromkeys(order, 0), dict.fromkeys(order, HitCount())
        sequences: list[dict[str, Said]] = []
        total = len(self._scoring.sequences) * len(order)
        with tqdm(desc="likelihood", total=total, unit="sequence", disable=None) as bar:
            for ids in self._scoring.sequences:
                said: dict[str, Said] = {}
                for name in order:
                    said[name], found = self._said(name, ids, said.get(REFERENCE))
                    hits[name] += found
                    failures[name] += said[name].count(None)
                    self._check_failures(name, failures[name])
                    bar.update()
                sequences.append(said)
        flag: Flag | None = "unread" if is_unread(self._endpoints, hits) else None
        place = Place(self._scoring.num_tokens, 0, self._scoring.seed, flag, failures)
        return [mean_cell(measure, self._sums(measure, sequences), place) for measure in self._measures]

    def _said(self, name: str, ids: Sequence[int], reference: Said | None) -> tuple[Said, HitCount]:
        """Of one way, at every scored position; and how much of the prompts it found in its cache."""
        endpoint, start = self._endpoints[name], len(ids) - self._scoring.positions
        beside = reference if reference is not None else [None] * self._scoring.positions
        asked = [_asked(target, each) for target, each in zip(ids[start:], beside, strict=True)]
        top = self._scoring.top if name == REFERENCE or endpoint.api == "openai" else 1
        key = None if endpoint.key is None else sha256_of([SCORING, endpoint.key, list(ids), top, asked])
        if record := self._known.get(key):
            hits = HitCount(*record["hits"])
            endpoint.hits += hits
            return [from_record(each) for each in record["said"]], hits
        before = endpoint.hits
        endpoint.prime(ids[:start])
        said = [
            endpoint.next_token(ids[: start + index], top=top, asked=each if endpoint.api == "sglang" else ())
            for index, each in enumerate(asked)
        ]
        hits = endpoint.hits - before
        known = [each.record() for each in said if each is not None]
        if key is not None and len(known) == len(said):  # what did not come may come another time
            about = {"way": name, "hits": [hits.prompt, hits.cached], "said": known}
            self._folder.append(JOURNAL, {"identity": self._identity, "key": key, **about})
        return said, hits

    def _check_failures(self, name: str, failed: int) -> None:
        most = MOST_FAILED * len(self._scoring.sequences) * self._scoring.positions
        if failed > most:
            raise EndpointError(
                f"{self._endpoints[name].url} ({name}) gave no log-probabilities of {failed} tokens, above the"
                f" {int(most)} that may be left out; run the same command again to ask for these again, give a smaller"
                " --top-logprobs, or leave out the level likelihood"
            )

    def _sums(
        self, measure: Measure, sequences: Sequence[Mapping[str, Said]]
    ) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """By way, a sum and a number of tokens for each sequence, over tokens that all ways scored."""
        ways = [name for name in self._endpoints if name != REFERENCE or measure == "nll_nats_per_token"]
        sums: dict[str, list[float]] = {name: [] for name in ways}
        counts = []
        for ids, said in zip(self._scoring.sequences, sequences, strict=True):
            rows = list(zip(*said.values(), strict=True))
            targets = ids[len(ids) - len(rows) :]
            kept = [index for index, row in enumerate(rows) if None not in row]
            if not kept:
                continue
            counts.append(len(kept))
            for name in ways:
                values = (_value(measure, said, name, index, targets[index]) for index in kept)
                sums[name].append(sum(values))
        numbers = np.array(counts, dtype=np.int64)
        return {name: (np.array(values, dtype=np.float64), numbers) for name, values in sums.items()}


def is_unread(endpoints: Mapping[str, Endpoint], hits: Mapping[str, HitCount]) -> bool:
    """Whether a server of a quantized cache may have read prompts as they were before they were stored."""
    return any(endpoints[name].is_unread(found) for name, found in hits.items() if name != REFERENCE)


def _measures_of(endpoints: Mapping[str, Endpoint]) -> tuple[Measure, ...]:
    """What these servers together let be measured.

    Raises:
        EndpointError: nothing.
    """
    measures: list[Measure] = []
    if REFERENCE in endpoints:
        measures += ["truncated_kl_nats_per_token", "top1_agreement"]
    if all(endpoint.api == "sglang" for endpoint in endpoints.values()):
        measures.append("nll_nats_per_token")
    if not measures:
        raise EndpointError(
            f"OpenAI's API names likely tokens only, which say something beside --endpoint {REFERENCE}=URL; give that"
            " server too, or leave out the level likelihood"
        )
    return tuple(measures)


def _asked(target: int, reference: NextToken | None) -> list[int]:
    likely = [] if reference is None else [token for token in reference.top if isinstance(token, int)]
    return list(dict.fromkeys([target, *likely]))


def _value(measure: Measure, said: Mapping[str, Said], name: str, index: int, target: int) -> float:
    mine = said[name][index]
    assert mine is not None
    if measure == "nll_nats_per_token":
        return -mine.asked[target]
    reference = said[REFERENCE][index]
    assert reference is not None
    return truncated_kl(reference, mine) if measure != "top1_agreement" else float(mine.best == reference.best)
