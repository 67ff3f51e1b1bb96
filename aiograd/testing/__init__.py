"""What users need to test async code that differentiates: a virtual clock and leak checks.

The pytest fixtures are in `aiograd.testing.pytest_plugin`, which is not imported here: testing without pytest works too.
"""

from __future__ import annotations

from aiograd.testing.clock import DeadlockError, SimulatedLoop
from aiograd.testing.jobs import InlineJobs, JobRunner
from aiograd.testing.leaks import LeakCheck, LeakError, Leaks
from aiograd.testing.simulation import Simulation, simulated_run

__all__ = [
    "DeadlockError",
    "InlineJobs",
    "JobRunner",
    "LeakCheck",
    "LeakError",
    "Leaks",
    "SimulatedLoop",
    "Simulation",
    "simulated_run",
]
