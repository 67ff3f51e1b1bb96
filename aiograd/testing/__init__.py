"""Tools to test async code that uses aiograd: a virtual clock, leak checks, and a network that fails on demand.

The pytest fixtures are in the module ``pytest_aiograd`` beside the package: testing without pytest works too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.running.lazy import on_first_use
from aiograd.testing.clock import DeadlockError, SimulatedLoop
from aiograd.testing.jobs import InlineJobs, JobRunner
from aiograd.testing.leaks import LeakCheck, LeakError, Leaks
from aiograd.testing.simulation import Simulation, simulated_run

if TYPE_CHECKING:
    from aiograd.testing.network import AccessLink, Faults, HostKilledError, LinkStatistics, SimulatedNetwork, SimulatedTransport
else:  # it brings all of `aiograd.distributed`
    _NETWORK = ("AccessLink", "Faults", "HostKilledError", "LinkStatistics", "SimulatedNetwork", "SimulatedTransport")
    __getattr__, __dir__ = on_first_use(__name__, dict.fromkeys(_NETWORK, "aiograd.testing.network"))

__all__ = [
    "AccessLink", "DeadlockError", "Faults", "HostKilledError", "InlineJobs", "JobRunner", "LeakCheck", "LeakError", "Leaks", "LinkStatistics",
    "SimulatedLoop", "SimulatedNetwork", "SimulatedTransport", "Simulation", "simulated_run",
]  # fmt: skip
