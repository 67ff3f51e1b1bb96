"""Benchmarks: ``python -m tests.benchmarks [name ...]`` prints a table per workload with aiograd beside its peers.

A module per area of the targets; `run(settings)` of each returns its tables. They are measurements, never tests: `tests/test_benchmarks_smoke.py`
only runs them at a tiny size.
"""

from __future__ import annotations

#: modules in the order in which they run
NAMES = (
    "imports", "small_graphs", "layers", "compiled", "compiled_calls", "native", "scale", "loop_lag", "awaited", "inter_op", "large_tensors",
    "service", "serving", "remote", "collectives", "data_parallel", "compression", "local_steps", "pipelines", "bridges", "dashboard", "derivatives",
)  # fmt: skip
