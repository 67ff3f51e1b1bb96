"""Actions of failpoints in a real process, such as killing it. A worker arms them only if its environment says so, in tests.

``AIOGRAD_FAILPOINT="bwd.after_accumulate=kill9@3;fwd.in_compute=sleep:0.5"``: see `aiograd.distributed.failpoints.parse`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from aiograd.distributed import failpoints
from aiograd.distributed.failpoints import Failpoint, FailpointError, FailpointPlan

VARIABLE = "AIOGRAD_FAILPOINT"


def arm_from_environment(environment: Mapping[str, str] | None = None) -> tuple[Failpoint, ...]:
    """Arm the failpoints listed in the environment variable ``AIOGRAD_FAILPOINT``; none if it is not set.

    Args:
        environment: the environment variables; None: those of the process.

    Raises:
        ArgumentError: it cannot be read; nothing was armed.
    """
    plans = failpoints.parse((os.environ if environment is None else environment).get(VARIABLE, ""))
    return tuple(failpoints.arm(plan.point, _action(plan), hit=plan.hit) for plan in plans)


def _action(plan: FailpointPlan) -> Callable[[], object]:
    if plan.action == "kill9":
        return partial(os.kill, os.getpid(), signal.SIGKILL)
    if plan.action == "stop":
        return partial(os.kill, os.getpid(), signal.SIGSTOP)
    if plan.action == "sleep":
        return partial(time.sleep, plan.argument or 0.0)  # the whole process stands still, as under load
    return partial(_raise, plan.point)


def _raise(point: str) -> None:
    raise FailpointError(f"failpoint {point}: raised as the environment variable {VARIABLE} says")
