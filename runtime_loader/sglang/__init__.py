"""A profile inside SGLang: plugin, packed pool, attention backend. Alone in importing sglang."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.runtime_loader.sglang.request import Attend


def engine(
    profile: str | Path,
    *,
    attend: Attend = "fresh",
    hicache_only: bool = False,
    strict: bool = False,
    allow_derived: bool = False,
    signed_by: str | None = None,
    **arguments: Any,
) -> Any:
    """An `sglang.Engine` that serves a profile.

    Args:
        profile: what names it: a file, a run folder, a profile of the hub or the catalogue, or ``auto``.
        attend: whether a chunk of new tokens reads itself exactly or as it was stored.
        hicache_only: leave the device pool in the model's dtype, and quantize what leaves it for host and storage.
        strict: refuse what is otherwise warned of where the profile's model is not quite the served one.
        allow_derived: warn of a fine-tune or another configuration of the same geometry, which are otherwise refused.
        signed_by: who must have signed the profile, as ``key:PUBLIC.pem``; anybody by default.
        **arguments: of `sglang.Engine`, but for a finished `server_args`, which nobody could check.

    Raises:
        KVTunerError: a profile, model or argument that cannot be served. What a scheduler finds out later, such as
            ranks that disagree, ends it, and SGLang then ends the caller's process as for any lost scheduler.
    """
    import sglang

    from kvtuner.errors import ServingError
    from kvtuner.runtime_loader.sglang.profile_location import locate
    from kvtuner.runtime_loader.sglang.request import REQUEST_VARIABLE, ServingRequest
    from kvtuner.runtime_loader.sglang.serving import activate, exchange

    if "server_args" in arguments:
        raise ServingError("engine() takes SGLang's arguments one by one, not server_args: those are checked already")
    request = ServingRequest(
        locate(str(profile)),
        None,
        attend,
        hicache_only=hicache_only,
        strict=strict,
        allow_derived=allow_derived,
        signed_by=signed_by,
    )
    served, variable = exchange(None), os.environ.get(REQUEST_VARIABLE)
    try:
        activate(request)
        request.to_environment(os.environ)  # for the schedulers that it starts
        return sglang.Engine(**arguments)
    finally:
        exchange(served)
        os.environ.pop(REQUEST_VARIABLE, None)
        if variable is not None:
            os.environ[REQUEST_VARIABLE] = variable
