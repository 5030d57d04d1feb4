"""A profile inside SGLang: plugin, packed pool, attention. Knows nothing of how a profile was found.

`engine` is public, and SGLang loads `plugin`; the rest is private. Only `engine` and `compat` import sglang.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.read_plan_names import Attend


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
    """Start an `sglang.Engine` that serves a profile.

    Args:
        profile: The name of a file, a run folder, a profile of the hub or the catalogue, or ``auto``.
        attend: Whether a chunk of new tokens reads itself exactly or as it was stored.
        hicache_only: Whether the device pool stays in the model's dtype, and what leaves it is quantized.
        strict: Whether to refuse what is otherwise warned of where the profile's model is not quite the served one.
        allow_derived: Whether to warn of a fine-tune or another configuration of the same geometry, not refuse it.
        signed_by: The identity that must have signed the profile, as ``key:PUBLIC.pem``; anybody by default.
        **arguments: Arguments of `sglang.Engine`, except a finished `server_args`, which nobody could check.

    Raises:
        KVTunerError: The profile, the model or an argument cannot be served. What a scheduler finds out later, such as
            ranks that disagree, ends it, and SGLang then ends the caller's process as for any lost scheduler.
    """
    import sglang

    from kvtuner.errors import ServingError
    from kvtuner.runtime_loader.sglang.activation import activate
    from kvtuner.runtime_loader.sglang.loaded_request import located
    from kvtuner.runtime_loader.sglang.process_state import process_state
    from kvtuner.runtime_loader.sglang.request import REQUEST_VARIABLE, ServingRequest

    if "server_args" in arguments:
        raise ServingError("engine() takes SGLang's arguments one by one, not server_args: those are checked already")
    request = ServingRequest(
        str(profile),
        attend=attend,
        hicache_only=hicache_only,
        strict=strict,
        allow_derived=allow_derived,
        signed_by=signed_by,
    )
    variable = os.environ.get(REQUEST_VARIABLE)
    try:
        with process_state().set_aside():
            request = located(request)
            activate(request)
            request.to_environment(os.environ)  # of the schedulers that it starts
            return sglang.Engine(**arguments)
    finally:
        os.environ.pop(REQUEST_VARIABLE, None)
        if variable is not None:
            os.environ[REQUEST_VARIABLE] = variable
