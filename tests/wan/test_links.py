"""The proxies of `make wan` carry their rate, and count what passes."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from tests.wan.links import Proxies, Traffic


@pytest.mark.net
async def test_a_proxy_carries_its_rate_and_counts_both_ways() -> None:
    proxies, loop = Proxies(100_000.0), asyncio.get_running_loop()
    await proxies.open(0)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(10_000))
        writer.close()

    host, port = proxies.listen(0).split(":")
    server = await asyncio.start_server(echo, host, int(port))
    parts = urlsplit(proxies.url(0))
    start = loop.time()
    connections = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(2)]
    for _, writer in connections:
        writer.write(bytes(10_000))
    for reader, writer in connections:
        assert await reader.read(-1) == bytes(10_000)
        writer.close()
    assert loop.time() - start > 0.19, "two connections share the rate"
    assert proxies.traffic(0) == Traffic(20_000, 20_000) and proxies.traffic(1) == Traffic(0, 0)
    server.close()
    await proxies.aclose()
