"""DashboardPages: the page, its data, and the right to them.

Note [Token and cookie]
    The printed URL holds a token. A request with it is answered by a cookie that scripts cannot read and that goes to no other site, and by a page
    that leads on to the URL without the token, so that the token stays out of bookmarks and screenshots. The cookie is derived from the token and
    does not give it away. All workers of a machine share their cookies' host, so the cookie's name has the port in it.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.resources
import time
from typing import NamedTuple

from aiograd.dashboard.collector import Collector
from aiograd.distributed.rpc.http.pages import DASHBOARD, FAVICON, Page, PageRequest
from aiograd.distributed.worker_core import WorkerCore

SCRIPTS = ("main", "draw", "stream", "cluster", "graph", "training", "rounds", "serving", "waits")
#: route -> file and type
FILES = {
    f"{DASHBOARD}/style.css": ("style.css", "text/css; charset=utf-8"),
    f"{DASHBOARD}/icon.svg": ("icon.svg", "image/svg+xml"),
    FAVICON: ("icon.svg", "image/svg+xml"),
    **{f"{DASHBOARD}/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in SCRIPTS},
}
#: routes without a lock: their files are no secrets
OPEN = (f"{DASHBOARD}/style.css", f"{DASHBOARD}/icon.svg", FAVICON)
#: answers with data per second, over all open pages
DATA_RATE = 20.0
HTML = "text/html; charset=utf-8"

_DOOR = b"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>aiograd</title>
<meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0; url=/dashboard">
<link rel="icon" href="/dashboard/icon.svg"><link rel="stylesheet" href="/dashboard/style.css"></head>
<body class="door"><p><a href="/dashboard">Open the dashboard</a></p></body></html>"""
_LOCKED = b"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>aiograd: locked</title>
<link rel="icon" href="/dashboard/icon.svg"><link rel="stylesheet" href="/dashboard/style.css"></head>
<body class="door"><h1>This dashboard is locked</h1>
<p>Open the URL with the token that the program has printed, or <code>worker.dashboard_url</code>.</p></body></html>"""


class StaticFile(NamedTuple):
    """A file of the package, as it is sent."""

    body: bytes
    content_type: str


def load_files() -> dict[str, StaticFile]:
    """The page's files by route."""
    folder = importlib.resources.files("aiograd.dashboard") / "static"
    files = {route: StaticFile((folder / name).read_bytes(), kind) for route, (name, kind) in FILES.items()}
    files[DASHBOARD] = StaticFile((folder / "index.html").read_bytes(), HTML)
    return files


class DashboardPages:
    """The dashboard of one worker.

    Args:
        core: the worker.
        collector: gathers the data.
        token: in the URL.
    """

    def __init__(self, core: WorkerCore, collector: Collector, token: str) -> None:
        self._core = core
        self._collector = collector
        self._token = token.encode()
        self._cookie = hmac.new(self._token, b"aiograd dashboard cookie" + core.entropy(16), hashlib.sha256).hexdigest()
        self._files = load_files()
        self._allowance = DATA_RATE
        self._allowed_at = 0.0

    def knows(self, token: str) -> bool:
        """True if it is the token."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token)

    def _is_known(self, request: PageRequest) -> bool:
        shown = request.cookies.get(f"aiograd_dashboard_{request.port}", "")
        return hmac.compare_digest(shown.encode("utf-8", "replace"), self._cookie.encode())

    def answer(self, request: PageRequest) -> Page:
        """See `Pages`."""
        path, token = request.path, request.query.get("token")
        if path == DASHBOARD and token is not None and self.knows(token):
            secure = "; Secure" if request.is_secure else ""
            cookie = f"aiograd_dashboard_{request.port}={self._cookie}; Path={DASHBOARD}; HttpOnly; SameSite=Strict{secure}"
            return Page(200, _DOOR, HTML, {"Set-Cookie": cookie})
        if path in OPEN:
            return Page(200, *self._files[path])
        if not self._is_known(request):
            return Page(401, _LOCKED, HTML)
        if path == f"{DASHBOARD}/data":
            return self._data(request)
        found = self._files.get(path)
        return Page(404, b"not found\n") if found is None else Page(200, *found)

    def _data(self, request: PageRequest) -> Page:
        now = self._core.loop.time()
        self._allowance = min(DATA_RATE, self._allowance + (now - self._allowed_at) * DATA_RATE)
        self._allowed_at = now
        if self._allowance < 1:
            return Page(429, b"too many requests\n", headers={"Retry-After": "1"})
        self._allowance -= 1
        self._collector.page_asked()
        names = ("after", "scalars", "graph", "pipeline", "serving")
        after, scalars_after, graph, pipeline, serving = (_whole(request.query.get(name, "")) for name in names)
        return Page(200, self._collector.board.answer(after, scalars_after, graph, time.time(), pipeline, serving), "application/json")


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
