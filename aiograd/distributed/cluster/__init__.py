"""Clusters: workers that are placed, watched, restarted and introduced to each other, and a driver that leads them.

`local`: processes of this machine. `ray_cluster`: actors of a Ray cluster. `join`: processes that somebody else starts, which come by themselves
(`joining` is their side). All three keep a `roster` and satisfy `protocol.Cluster`; `factory` makes the one that a word names.
"""

from __future__ import annotations

from aiograd.distributed.cluster.factory import make_cluster
from aiograd.distributed.cluster.join import JoinCluster
from aiograd.distributed.cluster.local import LocalCluster
from aiograd.distributed.cluster.process import WorkerProcess
from aiograd.distributed.cluster.protocol import Cluster
from aiograd.distributed.cluster.ray_cluster import RayCluster

__all__ = ["Cluster", "JoinCluster", "LocalCluster", "RayCluster", "WorkerProcess", "make_cluster"]
