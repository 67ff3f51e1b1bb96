"""The cost of `import aiograd` for a process, and of its plugin for a run of pytest, beyond that of numpy.

Each measurement is a process of its own, in seconds of processor time, which neighbours disturb less than the clock. They are interleaved, and run
from a cache of compiled modules that a first round fills.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.harness import Settings, Table, Timing, goal_cells, milliseconds

ROOT = Path(__file__).parents[2]
#: seconds beyond numpy
TARGET = 0.2
#: seconds beyond pytest without the plugin
PLUGIN_TARGET = 0.01

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_nothing.py")
PROGRAMS = {
    "python": ("-c", "pass"), "numpy": ("-c", "import numpy"), "aiograd": ("-c", "import aiograd"),
    "aiograd.distributed": ("-c", "import aiograd.distributed"), "pytest without the plugin": (*PYTEST, "-p", "no:pytest_aiograd"), "pytest": PYTEST,
}  # fmt: skip


def run(settings: Settings) -> Iterator[Table]:
    """Processor time of whole processes."""
    timings = {name: Timing() for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
        (Path(folder) / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
        caches = {} if settings.tiny else {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{folder}/cache"}
        environment = {**os.environ, **caches, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        for round_number in range(settings.of(11, 1)):
            for name, arguments in PROGRAMS.items():
                started = _spent()
                subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=folder, env=environment)
                if round_number or settings.tiny:
                    timings[name].seconds.append(_spent() - started)
    table = Table("Start of a process", ["process", "ms min/median", "beyond", "by s", "target", "", "verdict"])
    over = {"numpy": "python", "aiograd": "numpy", "aiograd.distributed": "numpy", "pytest": "pytest without the plugin"}
    for name, timing in timings.items():
        beyond = over.get(name)
        difference = None if beyond is None else timing.minimum - timings[beyond].minimum
        target = {"aiograd": TARGET, "pytest": PLUGIN_TARGET}.get(name)
        goal = goal_cells(None if settings.tiny else difference, None if target is None else round(target, 2), None)
        table.add(name, milliseconds(timing), beyond or "", "" if difference is None else f"{difference:.3f}", *goal)
    yield table


def _spent() -> float:
    """Seconds of processor time of all processes that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
