"""The state of one process of SGLang: one object, which hooks that SGLang calls without our context look up here.

Imports nothing heavy, and knows nothing of how a request is checked or a pool is built.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import KVTunerError, ServingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.read_plan_names import Attend
    from kvtuner.runtime_loader.packed_attention import PackedAttention
    from kvtuner.runtime_loader.sglang.loaded_request import LoadedRequest

PROFILE_KEY: Final = "kvtuner_profile"
"""The key of the digest that a scheduler serves, in what it tells its launcher and in a server's `/server_info`."""
READS_KEY: Final = "kvtuner_reads"
"""The key of what a chunk reads of itself: ``fresh``, ``cache``, or ``below`` where the device pool is exact."""
WINDOW_KEY: Final = "kvtuner_window"
"""The key of the tokens of a request that are kept exactly too, by `residual_length` and `sinks`."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The facts of a rank: the whole model's profile, the query heads of a KV head, and the cap of scores or 0.

    `dtype` is the name of that in which layers of 16 bits are stored, and `has_sinks` whether attention has sinks.
    """

    profile: Profile
    attend: Attend
    attention: PackedAttention
    gqa: int
    logit_cap: float
    dtype: str = ""
    has_sinks: bool = False


@dataclass(slots=True)
class ProcessState:
    """The state of this process: the profile that it serves, and the hooks that it has in SGLang.

    Attributes:
        loaded_request: The request with its profile; None where nothing is asked for.
        checked_digest: The digest of the profile that this launcher checked, which each scheduler must state.
        rank_profile: The profile of this scheduler's rank, once its model is known.
        rank: The facts of this rank, once SGLang has asked how many tokens fit.
        hooked: The names of what is hooked once in a process, whatever it serves later.
        targets: The functions of SGLang that are hooked for us alone, each with its hook.
    """

    loaded_request: LoadedRequest | None = None
    checked_digest: str | None = None
    rank_profile: Profile | None = None
    rank: RankState | None = None
    hooked: set[str] = field(default_factory=set)
    targets: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def active(self) -> LoadedRequest:
        """Return the request that this process serves; an error where there is none."""
        if self.loaded_request is None:
            raise ServingError("no profile is active in this process")
        return self.loaded_request

    def active_rank(self) -> RankState:
        """Return what this rank serves with; an error where SGLang did not ask how many tokens fit."""
        if self.rank is None:
            raise ServingError("SGLang built its KV pool before it asked how many tokens fit")
        return self.rank

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Forget what this process serves while the context lasts, and serve that again after it."""
        before = self.loaded_request, self.checked_digest, self.rank_profile, self.rank
        self.loaded_request = self.checked_digest = self.rank_profile = self.rank = None
        try:
            yield
        finally:
            self.loaded_request, self.checked_digest, self.rank_profile, self.rank = before

    def hook_once(self, name: str, hook: Callable[[], None]) -> None:
        """Call `hook` unless one of that name was called before and succeeded."""
        if name not in self.hooked:
            hook()
            self.hooked.add(name)


_STATE: Final = ProcessState()


def process_state() -> ProcessState:
    """Return the state of this process: the one place where it is found."""
    return _STATE


@contextmanager
def refusing() -> Iterator[None]:
    """End a launched server with one line where its profile cannot be served; an engine's process gets the error."""
    # Goes around our own code only: an error of SGLang's own is SGLang's to report.
    try:
        yield
    except (KVTunerError, ImportError) as error:
        loaded = _STATE.loaded_request
        if loaded is not None and not loaded.request.from_launcher:
            raise
        raise SystemExit(f"kvtuner: {error}") from None
