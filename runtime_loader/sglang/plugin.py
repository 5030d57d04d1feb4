"""The entry point that SGLang calls in each of its processes. Heavy imports wait until a profile is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvtuner.errors import KVTunerError
from kvtuner.runtime_loader.sglang.process_state import process_state
from kvtuner.runtime_loader.sglang.request import (
    PROFILE_VARIABLE,
    REQUEST_VARIABLE,
    ServingRequest,
    add_flags,
    request_of_flags,
)

if TYPE_CHECKING:
    from argparse import Namespace


def register() -> None:
    """Add the flags; where a profile was asked for already, prepare this process to serve it.

    SGLang logs and swallows the exceptions of plugins and would serve without them, so a refusal leaves as SystemExit.
    """
    try:
        request = ServingRequest.from_environment(os.environ)
        from kvtuner.runtime_loader.sglang.compat.processes import on_flags

        on_flags(add_flags, _parsed)
        if request is not None:
            from kvtuner.runtime_loader.sglang.activation import activate
            from kvtuner.runtime_loader.sglang.loaded_request import located

            if not os.environ.get(REQUEST_VARIABLE):
                request = located(request)
                os.environ[PROFILE_VARIABLE] = request.profile or ""  # for the processes that this one starts
            activate(request)
    except Exception as error:
        if os.environ.get(PROFILE_VARIABLE) or os.environ.get(REQUEST_VARIABLE):
            raise SystemExit(f"kvtuner: {error}") from error
        raise


def _parsed(args: Namespace) -> None:
    if not hasattr(args, "kvtuner_profile"):
        return  # parsed without our flags, so nothing is said about profiles
    try:
        request = request_of_flags(args, os.environ)
        if request is None:
            if os.environ.pop(REQUEST_VARIABLE, None):  # left by an earlier launch in this process, or by its parent
                process_state().loaded_request = None
            return
        from kvtuner.runtime_loader.sglang.activation import activate
        from kvtuner.runtime_loader.sglang.loaded_request import located

        request = located(request)
        request.to_environment(os.environ)
        activate(request)
    except (KVTunerError, ImportError, ValueError) as error:
        raise SystemExit(f"kvtuner: {error}") from None
