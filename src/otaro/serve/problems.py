"""What a client is told where something is wrong: one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from otaro.errors import OtaroError, PrecisionError, printable

log = logging.getLogger("otaro.serve")

INVALID, SERVER = "invalid_request_error", "server_error"
MEANT = {
    "extra_forbidden": ("unknown_parameter", "this server knows no such field"),
    "missing": ("missing_required_parameter", "this field is required"),
    "json_invalid": ("invalid_json", "the body is not valid JSON"),
}
"""What some of pydantic's errors are called here."""


class Problem(HTTPException):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, self.detail, self.param, self.code)

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error, whatever a request put into its words."""
    kind = SERVER if status >= 500 else INVALID
    name = None if param is None else printable(param)
    return {"error": {"message": printable(message), "type": kind, "param": name, "code": code}}


def as_problem(error: OtaroError) -> Problem:
    """A request that the model cannot be run with, by the sentence that says why."""
    if isinstance(error, PrecisionError):
        return Problem(400, str(error), param="precision", code="precision_not_available")
    return Problem(400, str(error))


def install(app: FastAPI) -> None:
    """Have every error of the app answered in this shape."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, Problem):
            return error.response
        words = {
            404: f"there is no {request.url.path} here",
            405: f"{request.method} is not possible on {request.url.path}",
            400: "the body is not valid JSON",  # FastAPI's, for what its parser does not get through
        }
        message = words.get(error.status_code, str(error.detail))
        code = "invalid_json" if error.status_code == 400 else None
        return JSONResponse(error_body(error.status_code, message, code=code), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # Of the errors of several alternatives the one that lies deepest is about what was meant.
        found = max(error.errors(), key=lambda entry: len(entry["loc"]))
        code, words = MEANT.get(found["type"], ("invalid_value", found["msg"]))
        place = ".".join(str(part) for part in found["loc"][1:] if not _is_type(part))
        param = place or None if found["type"] != "json_invalid" else None
        return Problem(400, f"{param}: {words}" if param else words, param=param, code=code).response

    @app.exception_handler(OtaroError)
    async def unusable(request: Request, error: OtaroError) -> JSONResponse:
        return as_problem(error).response

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed: %s", request.method, printable(request.url.path), type(error).__name__)
        return JSONResponse(error_body(500, "the server failed on this request; its log says where"), 500)


def _is_type(part: str | int) -> bool:
    """Whether a part of pydantic's places names an alternative and not a field."""
    if not isinstance(part, str):
        return False
    return part in ("str", "int", "float", "bool") or not {"[", "-"}.isdisjoint(part) or part[:1].isupper()
