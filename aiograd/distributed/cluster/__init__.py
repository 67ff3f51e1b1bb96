"""Worker processes on this machine, started, watched and restarted by a driver."""

from __future__ import annotations

from aiograd.distributed.cluster.local import LocalCluster
from aiograd.distributed.cluster.process import WorkerProcess

__all__ = ["LocalCluster", "WorkerProcess"]
