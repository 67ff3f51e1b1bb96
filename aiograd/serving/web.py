"""Errors of a server as HTTP responses, for aiohttp, Starlette and FastAPI; routes and schemas are theirs."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web

from aiograd import errors

logger = logging.getLogger("aiograd.serving")

#: status of an error by the first of these classes that it is of
_STATUS: dict[type[Exception], int] = {
    errors.VersionNotFoundError: 404, errors.QueueFullError: 429, errors.DrainingError: 503, errors.RejectedVersionError: 500,
    errors.DeltaError: 500, errors.VersionLogError: 500, errors.ForwardError: 500, errors.ServingError: 503,
    errors.DeadlineError: 504, errors.ArgumentError: 400,
}  # fmt: skip


class HTTPError(NamedTuple):
    """An error as an HTTP response: its status, headers by name, and a body for JSON.

    >>> status, headers, body = ag.serving.http_error(ag.errors.DeadlineError("no answer in 0.2 s"))
    >>> status, body["error"]
    (504, 'DeadlineError')
    """

    status: int
    headers: dict[str, str]
    body: dict[str, str]


def http_error(error: BaseException) -> HTTPError:
    """The HTTP response for an error.

    Args:
        error: an exception of a handler.

    Returns:
        Status, headers and body. The status is 400 for an `ArgumentError`, 404 for a `VersionNotFoundError`, 429 for a `QueueFullError`, 503 for
        a `DrainingError` (these two with ``Retry-After``) or another `ServingError`, 504 for a `DeadlineError`. Anything else gives 500 and a
        body without its text, also a `ForwardError`, `RejectedVersionError`, `DeltaError` or `VersionLogError`.

    >>> ag.serving.http_error(ag.errors.QueueFullError("64 of 64 rows wait", retry_after=0.2))
    HTTPError(status=429, headers={'Retry-After': '1'}, body={'error': 'QueueFullError', 'detail': '64 of 64 rows wait'})
    """
    status = next((status for cls, status in _STATUS.items() if isinstance(error, cls)), 500)
    if status == 500:
        return HTTPError(500, {}, {"error": "InternalServerError", "detail": "the request failed inside of the service"})
    retry_after = getattr(error, "retry_after", None)
    headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return HTTPError(status, headers, {"error": type(error).__name__, "detail": str(error)})


def aiohttp_middleware() -> Any:
    """A middleware for ``aiohttp.web.Application(middlewares=[...])`` that answers errors of aiograd by `http_error`.

    Other exceptions pass through: aiohttp logs them and answers 500.

    Returns:
        The middleware.

    >>> app = aiohttp.web.Application(middlewares=[ag.serving.aiohttp_middleware()])
    """

    @web.middleware
    async def answer_errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        try:
            return await handler(request)
        except errors.AiogradError as error:
            found = http_error(error)
            if found.status == 500:
                raise
            return web.json_response(found.body, status=found.status, headers=found.headers)

    return answer_errors


def exception_handlers() -> dict[type[Exception], Callable[..., Any]]:
    """Handlers for ``FastAPI(exception_handlers=...)`` and ``Starlette(exception_handlers=...)``, by `http_error`.

    An error with status 500 is logged, ``logging.getLogger("aiograd.serving")``, since the response does not have its text.

    Returns:
        A handler by the class of the error: `ServingError`, `DeadlineError` and `ArgumentError`.

    Raises:
        ImportError: Starlette is not installed. Only when an error is answered.

    >>> sorted(cls.__name__ for cls in ag.serving.exception_handlers())
    ['ArgumentError', 'DeadlineError', 'ServingError']
    """

    async def answer(request: Any, error: Exception) -> Any:
        from starlette.responses import JSONResponse

        found = http_error(error)
        if found.status == 500:
            logger.error("a request failed with status 500", exc_info=error)
        return JSONResponse(found.body, status_code=found.status, headers=found.headers)

    return dict.fromkeys((errors.ServingError, errors.DeadlineError, errors.ArgumentError), answer)
