"""Clusters: workers that are placed, watched, restarted and introduced to each other by a coordinator.

The coordinator is the worker of the process that makes the cluster: the attribute `driver`, and ``"driver"`` by name, which are public.

`local`: processes of this machine. `ray_cluster`: actors of a Ray cluster. `join`: processes that are started elsewhere and come by themselves
(`joining` is their side). All three derive from `base`, keep a `roster` and satisfy `protocol.Cluster`; `factory` makes the one that a word names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.running.lazy import on_first_use

if TYPE_CHECKING:
    from aiograd.distributed.cluster.factory import make_cluster
    from aiograd.distributed.cluster.join import JoinCluster
    from aiograd.distributed.cluster.local import LocalCluster
    from aiograd.distributed.cluster.process import WorkerProcess
    from aiograd.distributed.cluster.protocol import Cluster
    from aiograd.distributed.cluster.ray_cluster import RayCluster
else:  # the workers' side, in modules of this package, needs none of these
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "make_cluster": "aiograd.distributed.cluster.factory",
            "JoinCluster": "aiograd.distributed.cluster.join",
            "LocalCluster": "aiograd.distributed.cluster.local",
            "WorkerProcess": "aiograd.distributed.cluster.process",
            "Cluster": "aiograd.distributed.cluster.protocol",
            "RayCluster": "aiograd.distributed.cluster.ray_cluster",
        },
    )

__all__ = ["Cluster", "JoinCluster", "LocalCluster", "RayCluster", "WorkerProcess", "make_cluster"]
