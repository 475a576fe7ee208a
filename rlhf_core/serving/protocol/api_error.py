"""Errors as OpenAI's API reports them: a status, and one line in a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INVALID_REQUEST = "invalid_request_error"
CLIENT_CLOSED_REQUEST = 499


class ApiError(Exception):
    """A request that is not answered.

    Attributes:
        status: The HTTP status.
        message: What is wrong and what to do, in one line.
        param: The parameter that is wrong, as in ``messages[0].role``.
        code: A short name of the error for programs.
        kind: OpenAI's class of errors.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def timed_out(seconds: float) -> ApiError:
    """The error of a reply that took longer than a request may."""
    message = f"the reply was not finished within {seconds:g} seconds; ask for fewer tokens, or raise --timeout"
    return ApiError(504, message, code="timeout", kind="timeout_error")


def internal_error() -> ApiError:
    """The error of a request that failed for a reason that only the server's log tells."""
    return ApiError(500, "the server failed on this request; its log says why", code="internal", kind="server_error")
