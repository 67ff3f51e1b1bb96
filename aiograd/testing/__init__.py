"""What users need to test async code that differentiates: a virtual clock, leak checks, and a device and a network that break on demand.

The pytest fixtures are in `aiograd.testing.pytest_plugin`, which is not imported here: testing without pytest works too.
"""

from __future__ import annotations

from aiograd.testing.clock import DeadlockError, SimulatedLoop
from aiograd.testing.jobs import InlineJobs, JobRunner
from aiograd.testing.leaks import LeakCheck, LeakError, Leaks
from aiograd.testing.network import Faults, HostKilledError, LinkStatistics, SimulatedNetwork, SimulatedTransport
from aiograd.testing.simulation import Simulation, simulated_run
from aiograd.testing.toy_array import ToyArray
from aiograd.testing.toy_device import ToyDevice, ToyError, ToyMemoryError, ToyStatistics

__all__ = [
    "DeadlockError",
    "Faults",
    "HostKilledError",
    "InlineJobs",
    "JobRunner",
    "LeakCheck",
    "LeakError",
    "Leaks",
    "LinkStatistics",
    "SimulatedLoop",
    "SimulatedNetwork",
    "SimulatedTransport",
    "Simulation",
    "ToyArray",
    "ToyDevice",
    "ToyError",
    "ToyMemoryError",
    "ToyStatistics",
    "simulated_run",
]
