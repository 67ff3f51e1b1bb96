"""Who gets the page, and what else is closed: on real sockets, since browsers' headers are what it is about."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.dashboard import pages as pages_module
from aiograd.errors import ArgumentError, ArgumentTypeError
from tests.distributed.http_support import get
from tests.distributed.memory import Switchboard
from tests.support import assert_awaiting_raises, assert_raises

pytestmark = pytest.mark.net
TOKEN = "a-token-for-tests-0123456789"  # noqa: S105
OPTIONS = dist.DashboardOptions(token=TOKEN)
SAME = "Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\nSec-Fetch-Dest: empty\r\n"


async def cookie_of(worker: dist.Worker) -> str:
    """A header with the cookie that the token brings."""
    status, body, head = await get(worker.url, f"/dashboard?token={TOKEN}")
    assert status == 200 and TOKEN.encode() not in body
    (found,) = re.findall(r"Set-Cookie: ([^\r]+)", head)
    attributes = found.split("; ")[1:]
    assert attributes == ["Path=/dashboard", "HttpOnly", "SameSite=Strict"]
    assert TOKEN not in found
    return f"Cookie: {found.split(';')[0]}\r\n"


async def test_the_url_has_the_token_and_leads_to_the_page() -> None:
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        assert worker.dashboard_url == f"{worker.url}/dashboard?token={TOKEN}"
        cookie = await cookie_of(worker)
        status, body, head = await get(worker.url, "/dashboard", cookie)
        assert status == 200 and b"<title>aiograd</title>" in body and TOKEN.encode() not in body
        for header in ("Referrer-Policy: no-referrer", "X-Content-Type-Options: nosniff", "X-Frame-Options: DENY", "Cache-Control: no-store"):
            assert header in head
        (policy,) = re.findall("Content-Security-Policy: ([^\r]+)", head)
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy and "frame-ancestors 'none'" in policy
        for route in (*re.findall(rb'(?:src|href)="(/[^"]+)"', body), b"/dashboard/data"):
            assert (await get(worker.url, route.decode(), cookie + SAME))[0] == 200, route
        assert (await get(worker.url, "/dashboard/../health", cookie))[0] in (400, 404)
        assert (await get(worker.url, "/dashboard/nothing", cookie))[0] == 404
    assert worker.dashboard_url is not None


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/dashboard", ""), ("/dashboard/data", ""), ("/dashboard/main.js", ""), ("/dashboard?token=", ""),
        ("/dashboard?token=a-token-for-tests-012345678X", ""), (f"/dashboard/data?token={TOKEN}", ""),
        ("/dashboard/data", f"Authorization: Bearer {TOKEN}\r\n"), ("/dashboard", "Cookie: aiograd_dashboard_{port}=\r\n"),
        ("/dashboard", f"Cookie: aiograd_dashboard_{{port}}={TOKEN}\r\n"), ("/dashboard", "Cookie: aiograd_dashboard_{port}=\xff\r\n"),
    ],
)  # fmt: skip
async def test_without_the_token_nothing_is_shown(path: str, headers: str) -> None:
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        status, body, head = await get(worker.url, path, headers.replace("{port}", worker.url.rpartition(":")[2]))
        assert status in (400, 401) and b"driver" not in body and "Set-Cookie" not in head


async def test_the_cookie_of_one_worker_opens_no_other() -> None:
    async with dist.Worker("one", dashboard=OPTIONS) as one, dist.Worker("two", dashboard=OPTIONS) as two:
        cookie = await cookie_of(one)
        moved = cookie.replace(one.url.rpartition(":")[2], two.url.rpartition(":")[2])
        assert (await get(two.url, "/dashboard", cookie))[0] == (await get(two.url, "/dashboard", moved))[0] == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("", 200),
        (SAME, 200),
        ("Sec-Fetch-Site: none\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n", 200),
        ("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n", 200),
        ("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: iframe\r\n", 403),
        ("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: cors\r\nSec-Fetch-Dest: empty\r\n", 403),
        ("Sec-Fetch-Site: same-site\r\nSec-Fetch-Mode: no-cors\r\nSec-Fetch-Dest: script\r\n", 403),
        ("Sec-Fetch-Site: same-origin\r\nSec-Fetch-Site: cross-site\r\n", 403),
        ("Origin: http://{host}\r\n", 200),
        ("Origin: https://{host}\r\n", 403),
        ("Origin: null\r\n", 403),
        ("Origin: http://evil.example.org\r\n", 403),
        ("Origin: http://{host}\r\nOrigin: http://evil.example.org\r\n", 403),
    ],
)
async def test_only_the_workers_own_pages_may_ask(headers: str, status: int) -> None:
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        cookie = await cookie_of(worker)
        assert (await get(worker.url, "/dashboard", cookie + headers.replace("{host}", worker.url[7:])))[0] == status


async def test_a_followed_link_leads_to_the_page_only() -> None:
    followed = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n"
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        assert (await get(worker.url, "/dashboard/data", await cookie_of(worker) + followed))[0] == 403


@pytest.mark.parametrize("host", ["evil.example.org", "127.0.0.1:1", "127.0.0.1.evil.example.org"])
async def test_a_foreign_host_gets_nothing(host: str) -> None:
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        for path in (f"/dashboard?token={TOKEN}", "/dashboard/style.css", "/metrics", "/favicon.ico"):
            assert (await get(worker.url, path, host=host))[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        cookie = await cookie_of(worker)
        assert (await get(worker.url, "/dashboard/data", cookie, method=method))[0] in (400, 405)


@pytest.mark.parametrize("dashboard", [False, OPTIONS])
@pytest.mark.parametrize("header", ["Origin: http://{host}\r\n", SAME])
async def test_everything_else_stays_closed_to_browsers(dashboard: Any, header: str) -> None:
    async with dist.Worker("driver", dashboard=dashboard) as worker:
        for path in ("/health", "/aiograd/v1", "/metrics", "/unknown"):
            assert (await get(worker.url, path, header.replace("{host}", worker.url[7:])))[0] == 403


async def test_a_worker_without_a_dashboard_has_no_page() -> None:
    async with dist.Worker("driver") as worker:
        assert worker.dashboard_url is None
        for path in ("/dashboard", "/dashboard/data", "/favicon.ico"):
            assert (await get(worker.url, path))[0] == 404


async def test_there_is_an_icon_for_everybody() -> None:
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        for path in ("/favicon.ico", "/dashboard/icon.svg"):
            status, body, head = await get(worker.url, path, SAME)
            assert status == 200 and body.startswith(b"<svg") and "image/svg+xml" in head


async def test_answers_with_data_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "DATA_RATE", 3.0)
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        cookie = await cookie_of(worker)
        statuses = [(await get(worker.url, "/dashboard/data", cookie))[0] for _ in range(40)]
        assert statuses[0] == 200 and 429 in statuses


async def test_numbers_in_a_question_may_be_anything() -> None:
    async with dist.Worker("driver", dashboard=OPTIONS) as worker:
        cookie = await cookie_of(worker)
        for query in ("after=-1", "after=x&graph=", "after=" + "9" * 100, "after=%00", "after=1&after=2"):
            assert (await get(worker.url, f"/dashboard/data?{query}", cookie))[0] == 200


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"token": "short"}, ArgumentError), ({"token": "with spaces and more text"}, ArgumentError), ({"token": b"bytes" * 8}, ArgumentTypeError),
        ({"interval": 0}, ArgumentError), ({"events_per_second": 1.5}, ArgumentTypeError), ({"interval": 61}, ArgumentError),
    ],
)  # fmt: skip
def test_options_are_checked(options: dict[str, Any], error: type[Exception]) -> None:
    assert_raises(error, "DashboardOptions", lambda: dist.DashboardOptions(**options))


async def test_a_dashboard_is_true_false_or_options_and_needs_http() -> None:
    for wrong in (1, "yes", None):
        assert_raises(ArgumentTypeError, "dashboard=", dist.Worker, "driver", dashboard=wrong)
    worker = dist.Worker("driver", transport=Switchboard().transport("driver"), dashboard=True)
    await assert_awaiting_raises(ArgumentError, "HTTP transport", worker.__aenter__())
