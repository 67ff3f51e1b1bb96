"""Pages: a worker's answers to browsers and to Prometheus, if it has a dashboard or metrics.

Note [Rules for pages]
    Everything else on a worker's port is closed to browsers (Note [Refusals] in `server`). The dashboard's routes let in a browser that
    shows a page of this very worker: Host must be a name of the worker; an ``Origin`` must be the request's own; ``Sec-Fetch-Site``,
    where it is sent, must say that the request comes from the same origin, or from no page, or that a link to the page is followed at the top of a
    tab. Only GET, without a body. Prometheus is no browser: its route stays closed to browsers. Nothing is embedded in foreign pages, nothing foreign
    is loaded, and no referrer is sent: see `HEADERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from aiohttp import web

DASHBOARD, METRICS, FAVICON, NAME = "/dashboard", "/metrics", "/favicon.ico", "/aiograd/name"
#: the largest answer; a page that wants more asks again
MOST_BYTES = 8 << 20

HEADERS: Mapping[str, str] = {
    "Server": "aiograd",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
}


class PageRequest(NamedTuple):
    """A request that has passed the rules."""

    path: str
    query: Mapping[str, str]
    cookies: Mapping[str, str]
    #: the Authorization header
    authorization: str
    #: True if it comes from this machine, and no proxy has passed it on
    is_local: bool
    is_secure: bool
    #: the port at which it arrived
    port: int


class Page(NamedTuple):
    """An answer."""

    status: int
    body: bytes
    content_type: str = "text/plain"
    headers: Mapping[str, str] = {}


class Pages(Protocol):
    """Answers the requests below one route."""

    def answer(self, request: PageRequest) -> Page:
        """The answer; quick, since it is made on the event loop."""


class Site:
    """The routes for browsers and Prometheus of one worker.

    Attributes:
        dashboard, metrics, name: answer the routes, or None.
        take_pulse: takes the pulses of peers, and returns False for what is none; None: they are not taken.
    """

    def __init__(self) -> None:
        self.name: Pages | None = None
        self.dashboard: Pages | None = None
        self.metrics: Pages | None = None
        self.take_pulse: Callable[[bytes], bool] | None = None

    def pages_of(self, path: str) -> Pages | None:
        """The pages that a path belongs to."""
        if path == METRICS:
            return self.metrics
        if path == NAME:
            return self.name
        if path in (DASHBOARD, FAVICON) or path.startswith(DASHBOARD + "/"):
            return self.dashboard
        return None


def refuses_browser(request: web.BaseRequest, path: str, *, secure: bool) -> bool:
    """True if a request for a page of the dashboard comes from another place than this worker's own pages; see Note [Rules for pages]."""
    headers = request.headers
    origins = headers.getall("Origin", [])
    if origins and origins != [f"{'https' if secure else 'http'}://{headers['Host']}"]:
        return True
    sites = headers.getall("Sec-Fetch-Site", [])
    if not sites or sites in (["same-origin"], ["none"]):
        return False
    is_followed = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    return not (is_followed and path == DASHBOARD)


def respond(pages: Pages, request: web.BaseRequest, path: str, *, is_loopback: bool, secure: bool, port: int) -> web.Response:
    """The answer of some pages to a request."""
    headers = request.headers
    is_passed_on = "Forwarded" in headers or any(name.lower().startswith("x-forwarded-") for name in headers)
    page = pages.answer(
        PageRequest(path, request.query, request.cookies, headers.get("Authorization", ""), is_loopback and not is_passed_on, secure, port)
    )
    return web.Response(status=page.status, body=page.body, headers={**HEADERS, **page.headers, "Content-Type": page.content_type})
