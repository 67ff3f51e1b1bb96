"""Isolated passes: forward and backward of one call, outside of the caller's graph. Parallel maps and mixtures of experts use them."""

from __future__ import annotations

from aiograd.functional.isolation.passes import IsolatedContext as IsolatedContext
from aiograd.functional.isolation.passes import isolate as isolate
from aiograd.functional.isolation.passes import run_isolated_backward as run_isolated_backward
from aiograd.functional.isolation.passes import run_isolated_forward as run_isolated_forward
