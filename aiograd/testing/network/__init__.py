"""A simulated network: hosts in one process, and faults between them that a seed draws."""

from __future__ import annotations

from aiograd.testing.network.access import AccessLink
from aiograd.testing.network.faults import Faults
from aiograd.testing.network.hosts import HostKilledError, SimulatedTransport
from aiograd.testing.network.network import SimulatedNetwork
from aiograd.testing.network.records import LinkStatistics

__all__ = ["AccessLink", "Faults", "HostKilledError", "LinkStatistics", "SimulatedNetwork", "SimulatedTransport"]
