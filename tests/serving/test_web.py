"""Errors of a server as HTTP responses, in aiohttp and in Starlette where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import aiograd as ag
from aiograd import nn, serving
from aiograd.errors import (
    AiogradError,
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    DrainingError,
    ForwardError,
    GraphError,
    QueueFullError,
    RejectedVersionError,
    ServingError,
    VersionLogError,
    VersionNotFoundError,
)

ROWS: list[tuple[Exception, int, dict[str, str]]] = [
    (ArgumentError("rows"), 400, {}),
    (ArgumentTypeError("rows"), 400, {}),
    (VersionNotFoundError("rows"), 404, {}),
    (QueueFullError("rows", retry_after=2.2), 429, {"Retry-After": "3"}),
    (DrainingError("rows", retry_after=0.0), 503, {"Retry-After": "1"}),
    (ServingError("rows"), 503, {}),
    (DeadlineError("rows"), 504, {}),
    (ForwardError("rows"), 500, {}),
    (RejectedVersionError("rows"), 500, {}),
    (VersionLogError("rows"), 500, {}),
    (GraphError("rows"), 500, {}),
    (KeyError("rows"), 500, {}),
]
ROW_IDS = [type(error).__name__ for error, _, _ in ROWS]


@pytest.mark.parametrize(("error", "status", "headers"), ROWS, ids=ROW_IDS)
def test_statuses(error: Exception, status: int, headers: dict[str, str]) -> None:
    found = serving.http_error(error)
    assert (found.status, found.headers) == (status, headers)
    assert ("rows" in str(found.body)) == (status != 500), "a 500 shows nothing from inside"


@pytest.mark.net
async def test_aiohttp() -> None:
    async def handle(request: web.Request) -> web.Response:
        raise ROWS[int(request.query["row"])][0]

    app = web.Application(middlewares=[serving.aiohttp_middleware()])
    app.add_routes([web.get("/", handle)])
    async with TestClient(TestServer(app, host="127.0.0.1")) as client:
        for row, (error, status, headers) in enumerate(ROWS):
            response = await client.get("/", params={"row": row})
            assert response.status == status, error
            assert headers.items() <= dict(response.headers).items()
            if status != 500:
                assert await response.json() == serving.http_error(error).body


@pytest.mark.net
async def test_a_model_that_fails_is_not_the_fault_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    """A bad request is answered with status 400, also the first one, and a good one with status 500 where the model fails."""
    is_broken = False

    def forward(module: Any, x: Any) -> Any:
        return module(x) @ ag.ones(7 if is_broken else 2, 1)

    async def handle(request: web.Request) -> web.Response:
        answer = await server.predict((await request.json())["rows"])
        return web.json_response(answer.value.tolist())

    async def ask(rows: Any) -> int:
        async with client.post("/", json={"rows": rows}) as response:
            assert (await response.text() == "500 Internal Server Error\n\nServer got itself in trouble") == (response.status == 500)
            return response.status

    good, narrow, text = [[0.5, 1.5, 2.5]], [[0.5]], "rows"
    app = web.Application(middlewares=[serving.aiohttp_middleware()])
    app.add_routes([web.post("/", handle)])
    async with serving.Server(nn.Linear(3, 2), forward=forward) as server, TestClient(TestServer(app, host="127.0.0.1")) as client:
        assert [await ask(rows) for rows in (narrow, good)] == [400, 200]
        is_broken = True
        assert [await ask(rows) for rows in (good, narrow, text)] == [500, 500, 400]
        assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [ForwardError, ForwardError]
        is_broken = False
        assert [await ask(rows) for rows in (good, narrow, text)] == [200, 400, 400]


@pytest.mark.net
async def test_starlette(caplog: pytest.LogCaptureFixture) -> None:
    applications = pytest.importorskip("starlette.applications")
    routing = pytest.importorskip("starlette.routing")

    async def handle(request: Any) -> Any:
        raise ROWS[int(request.query_params["row"])][0]

    app = applications.Starlette(routes=[routing.Route("/", handle)], exception_handlers=serving.exception_handlers())
    for row, (error, status, headers) in enumerate(ROWS):
        if status == 500 and not isinstance(error, ServingError):
            continue
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        query = f"row={row}".encode()
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": query, "headers": [], "root_path": "", "http_version": "1.1"}
        caplog.clear()
        await app(scope, receive, send)
        assert [(each.name, each.exc_info and each.exc_info[1]) for each in caplog.records] == ([("aiograd.serving", error)] if status == 500 else [])
        assert sent[0]["status"] == status
        found = {name.decode().title(): value.decode() for name, value in sent[0]["headers"]}
        assert headers.items() <= found.items(), AiogradError
