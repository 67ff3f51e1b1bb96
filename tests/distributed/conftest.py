"""A fixture of the tests of endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.distributed.world import World


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    """Nodes on one switchboard, closed after the test."""
    async with World() as world:
        yield world
