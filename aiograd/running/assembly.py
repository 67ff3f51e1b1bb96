"""Callbacks that connect parts of the package when they are imported.

Parts on one level of the package do not import each other. If one part needs something of another, such as the classes that a worker may
make on request, the top of the package passes it on. To do that without importing the part, it registers a callback here; at the end of
its import the part runs the callbacks registered for it.
"""

from __future__ import annotations

from collections.abc import Callable

#: name of the adapter by which workers make members of pipelines
STAGE_MEMBER_ADAPTER = "pipeline.member"
#: name of the adapter by which workers make members of data-parallel replicas
REPLICA_MEMBER_ADAPTER = "data_parallel.replica"
#: name of the adapter by which workers make members of trainings with local steps
LOCAL_STEPS_ADAPTER = "local_steps.member"

_callbacks: dict[str, Callable[[], None]] = {}


def when_imported(part: str, callback: Callable[[], None]) -> None:
    """Register a callback to run once a part has been imported."""
    _callbacks[part] = callback


def imported(part: str) -> None:
    """Run the callbacks registered for a part; the part calls this at the end of its import."""
    callback = _callbacks.pop(part, None)
    if callback is not None:
        callback()
