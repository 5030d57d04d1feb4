"""Who answers: a model loaded here, stored in several ways, or servers, one for each way."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from kvtuner.errors import EndpointError
from kvtuner.evaluation.backends.local_model import Offline
from kvtuner.evaluation.backends.server_likelihood import ServedScorer, is_unread
from kvtuner.evaluation.backends.takers import OfflineTaker, ServedTaker
from kvtuner.evaluation.cells import likelihood_cells
from kvtuner.evaluation.scheme import REFERENCE
from kvtuner.evaluation.validation import OFFSETS, Validator
from kvtuner.exported_configs.profile.evaluation_record import PROFILE, BackendRecord
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.calibration.workbench import Workbench
    from kvtuner.evaluation.backends.endpoint import Endpoint, HitCount
    from kvtuner.evaluation.backends.server_likelihood import Scoring
    from kvtuner.evaluation.backends.takers import Taker
    from kvtuner.evaluation.scheme import CacheScheme
    from kvtuner.evaluation.tasks.answers import Metered, Respondent
    from kvtuner.exported_configs.profile.evaluation_record import Cell
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.run_folder import RunFolder


class EvaluationHost(Protocol):
    """What an evaluation needs of either.

    Attributes:
        respondents: one for each way.
        takers: the same, as tasks are put to them.
        meters: by the name of the way, what counts how much of prompts was found in a cache; of servers.
        dtype: that the model runs in; None where nobody says.
        counts_positions: whether a context can begin at any position.
    """

    respondents: Sequence[Respondent]
    takers: Sequence[Taker]
    meters: Mapping[str, Metered]
    dtype: str | None
    counts_positions: bool

    def identity(self) -> dict[str, Any]:
        """What decides answers besides questions and ways; plain JSON values."""
        ...

    def likelihood(self, folder: RunFolder) -> list[Cell]:
        """Teacher-forced scores.

        Raises:
            EndpointError: a server is gone, or says nothing that could be compared.
        """
        ...

    def is_unread(self, hits: Mapping[str, HitCount]) -> bool:
        """Whether what was found in caches shows that prompts may not have been read as they are stored."""
        ...

    def record(self) -> BackendRecord:
        """For the file, when all is asked."""
        ...


class OfflineHost:
    """A model loaded here.

    Args:
        bench: its report split is scored, by its read plan.
        subjects: ways to store the cache, the unquantized one among them.
    """

    counts_positions = True
    meters: Mapping[str, Metered] = MappingProxyType({})

    def __init__(self, bench: Workbench, subjects: Sequence[CacheScheme]) -> None:
        self._bench, self._subjects = bench, subjects
        self._read_plan = bench.options.read_plan
        self.dtype: str | None = bench.loaded.dtype_name
        models = [Offline(bench.loaded, each, self._read_plan) for each in subjects]
        self.respondents: Sequence[Respondent] = models
        self.takers: Sequence[Taker] = [OfflineTaker(model) for model in models]

    def identity(self) -> dict[str, Any]:
        """See `EvaluationHost.identity`."""
        return self._bench.identity()

    def likelihood(self, folder: RunFolder) -> list[Cell]:
        """Of the report split, at the first and the last positions of the context."""
        validator = Validator(self._bench, folder, sha256_of(self.identity()))
        tokens = self._bench.corpus.splits["report"].shape[1]
        last = max(0, self._bench.loaded.shape.context_length - tokens)
        cells: list[Cell] = []
        places = list(zip(OFFSETS, (0, last), strict=True))[: 2 if last else 1]
        with tqdm(desc="likelihood", total=len(places) * len(self._subjects), disable=None) as bar:
            for offsets, position in places:
                measured = {}
                for subject in self._subjects:
                    measured[subject.name] = validator.measure(subject, offsets)
                    bar.update()
                seed = self._bench.options.seed
                cells += likelihood_cells(measured, REFERENCE, num_tokens=tokens, position=position, seed=seed)
        return cells

    def is_unread(self, hits: Mapping[str, HitCount]) -> bool:
        """See `EvaluationHost.is_unread`; a read plan says what is read."""
        return False

    def record(self) -> BackendRecord:
        """See `EvaluationHost.record`."""
        return BackendRecord(kind="transformers", read_plan=self._read_plan, reads=None, version=None, hit_share=None)


class ServedHost:
    """Servers, each of which stores its cache in one way.

    Args:
        endpoints: by the name of the way.
        schemes: The schemes, the searched profile among them.
        identity: of model and data.
        scoring: tokens whose likelihoods are asked for.

    Raises:
        EndpointError: a server that serves another model, profile or dtype than its name says, or one whose answers
            would not show how it stores its cache.
    """

    dtype: str | None = None
    counts_positions = False

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        schemes: Sequence[CacheScheme],
        *,
        identity: dict[str, Any],
        scoring: Scoring,
    ) -> None:
        self._endpoints, self._identity, self._scoring = endpoints, identity, scoring
        self.meters: Mapping[str, Metered] = endpoints
        self.respondents: Sequence[Respondent] = list(endpoints.values())
        self.takers: Sequence[Taker] = [ServedTaker(endpoint) for endpoint in endpoints.values()]
        models = {endpoint.served.model for endpoint in endpoints.values()}
        if len(models) > 1:
            raise EndpointError(f"the endpoints serve different models ({', '.join(sorted(models))}); compare one")
        for scheme in schemes:
            if endpoints[scheme.name].api == "sglang":
                check_served(scheme, endpoints[scheme.name], scheme.profile if scheme.name == PROFILE else None)

    def identity(self) -> dict[str, Any]:
        """See `EvaluationHost.identity`."""
        return self._identity

    def likelihood(self, folder: RunFolder) -> list[Cell]:
        """Of the last tokens of the report split's sequences, by generation."""
        return ServedScorer(self._endpoints, self._scoring, folder, sha256_of(self._identity)).cells()

    def is_unread(self, hits: Mapping[str, HitCount]) -> bool:
        """See `EvaluationHost.is_unread`."""
        return is_unread(self._endpoints, hits)

    def record(self) -> BackendRecord:
        """See `EvaluationHost.record`."""
        endpoint = self._endpoints[PROFILE]
        served, hits = endpoint.served, endpoint.hits
        return BackendRecord(
            kind=endpoint.api,
            read_plan=None,
            reads=served.reads,
            version=served.version,
            hit_share=hits.share,
        )


def check_served(scheme: CacheScheme, endpoint: Endpoint, profile: Profile | None) -> None:
    """Whether a server of SGLang serves the scheme that it was named for.

    Args:
        scheme: The scheme.
        endpoint: The server.
        profile: The profile that it must serve; None where the scheme says enough.

    Raises:
        EndpointError: it does not, or its answers cannot show it.
    """
    served = endpoint.served
    if profile is not None and served.digest != profile.digest:
        what = f"the profile {served.digest}" if served.digest else "no profile"
        raise EndpointError(f"{endpoint.url} serves {what}, not {profile.digest}; start it with --kvtuner-profile")
    if profile is not None and served.reads == "below":
        raise EndpointError(
            f"{endpoint.url} quantizes below an exact device: its answers show that only after eviction; evaluate with"
            " --read-plan hit and without --endpoint"
        )
    if contradiction := scheme.contradiction(served.kv_cache_dtype, served.digest):
        raise EndpointError(f"{endpoint.url} was named {scheme.name}, but {contradiction}")
