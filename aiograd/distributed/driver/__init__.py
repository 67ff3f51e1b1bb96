"""The part of distributed autograd that waits: asyncio on top of sessions, handshakes and transports."""

from __future__ import annotations

from aiograd.distributed.driver.endpoint import Endpoint
from aiograd.distributed.driver.statistics import EndpointStatistics, PeerStatistics

__all__ = ["Endpoint", "EndpointStatistics", "PeerStatistics"]
