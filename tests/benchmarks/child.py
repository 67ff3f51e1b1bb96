"""Runs one measurement in a fresh process: for memory, where what ran before would be in the figure.

``await in_child(function, **arguments)`` calls ``function(**arguments)``, a module-level function of a benchmark, in a new interpreter and
returns the dict it returns; arguments and results travel as JSON. `peak`, `resident` and `forget_peak` read what the kernel counts.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def in_child(function: Callable[..., dict[str, Any]], *, environment: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """Call a module-level function in a process of its own.

    Args:
        environment: variables to set there.
        arguments: JSON values.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    command = [sys.executable, "-m", "tests.benchmarks.child", name, json.dumps(arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        raise RuntimeError(f"{name} failed in a process of its own:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def resident() -> int:
    """Bytes of memory this process holds now (0 where the system does not say)."""
    return _status("VmRSS")


def peak() -> int:
    """The most bytes of memory this process has held (since `forget_peak` where the system allows it)."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Give back what has been freed and make the present the peak, where the system allows it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    try:
        _CLEAR.write_text("5")
    except OSError:
        pass


def _status(field: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def main() -> None:
    """Entry of the new process."""
    module, _, function = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
