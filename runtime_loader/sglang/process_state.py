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
    from kvtuner.runtime_loader.packed_attention import PackedAttention
    from kvtuner.runtime_loader.sglang.request import Attend
    from kvtuner.runtime_loader.sglang.serving import Serving

PROFILE_KEY: Final = "kvtuner_profile"
"""The key of the digest that a scheduler serves, in what it tells its launcher and in a server's `/server_info`."""
READS_KEY: Final = "kvtuner_reads"
"""The key of what a chunk reads of itself: ``fresh``, ``cache``, or ``below`` where the device pool is exact."""


@dataclass(frozen=True, slots=True)
class RankServing:
    """The facts of a rank: the whole model's profile, the query heads of a KV head, and the cap of scores or 0."""

    profile: Profile
    attend: Attend
    attention: PackedAttention
    gqa: int
    logit_cap: float


@dataclass(slots=True)
class ProcessState:
    """The state of this process: the profile that it serves, and the hooks that it has in SGLang.

    Attributes:
        serving: The request with its profile; None where nothing is asked for.
        rank_profile: The profile of this scheduler's rank, once its model is known.
        rank: The facts of this rank, once SGLang has asked how many tokens fit.
        hooked: The names of what is hooked once in a process, whatever it serves later.
        targets: The functions of SGLang that are hooked for us alone, each with its hook.
    """

    serving: Serving | None = None
    checked_digest: str | None = None
    rank_profile: Profile | None = None
    rank: RankServing | None = None
    hooked: set[str] = field(default_factory=set)
    targets: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def active(self) -> Serving:
        """Return the request that this process serves; an error where there is none."""
        if self.serving is None:
            raise ServingError("no profile is active in this process")
        return self.serving

    def serving_of_rank(self) -> RankServing:
        """Return what this rank serves with; an error where SGLang did not ask how many tokens fit."""
        if self.rank is None:
            raise ServingError("SGLang built its KV pool before it asked how many tokens fit")
        return self.rank

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
        serving = _STATE.serving
        if serving is not None and not serving.request.from_launcher:
            raise
        raise SystemExit(f"kvtuner: {error}") from None
