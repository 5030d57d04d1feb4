"""Errors as OpenAI's interface has them: bad requests 400, a full queue 429, an engine that ended 503."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvtuner.errors import EngineBusyError, RequestError, ServingError

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

_STATUS_OF: Final = {RequestError: 400, EngineBusyError: 429, ServingError: 503, Exception: 500}
_RETRY_AFTER: Final = {"Retry-After": "1"}
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES: Final = {401: "invalid_api_key", 404: "not_found", 429: "too_many_requests", 503: "engine_unavailable"}


def add_error_handlers(app: FastAPI) -> None:
    """Let an application answer every error in OpenAI's form."""
    for error, status in _STATUS_OF.items():
        app.add_exception_handler(error, _handler(status))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": _CODES.get(status)}}


def _handler(status: int) -> Any:
    async def handle(_: Request, error: Exception) -> JSONResponse:
        # A bug's text may tell what is not the client's to know; the log has it.
        message = str(error) if status != 500 else "the server failed; its log says why"
        return JSONResponse(error_body(message, status), status, _RETRY_AFTER if status in (429, 503) else None)

    return handle


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code, error.headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """The first thing that is wrong with a body, and where."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "json_invalid":
        message, where = f"the body is not JSON: {first['ctx']['error']} at character {where}", ""
    elif first["type"] == "extra_forbidden":
        message = f"this server does not take {where}; leave it out"
    else:
        message = f"{where or 'the body'}: {first['msg']}"
    return JSONResponse(error_body(message, 400, where or None), 400)
