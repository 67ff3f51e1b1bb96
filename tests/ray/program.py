"""Runs an example as a program on one of the nodes: ``python -m tests.ray.program NODE PORT EXAMPLE ARGUMENTS``.

A driver has to say which node it runs on only because all nodes are one machine. `PORT` is where it listens for workers that join.
"""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path

import ray

from aiograd.distributed.cluster import factory, ray_cluster
from tests.ray.nodes import LONGEST

if __name__ == "__main__":
    node, port, *sys.argv = sys.argv[1:]
    ray.init = functools.partial(ray.init, _node_ip_address=node)
    factory.JOIN_PORT = int(port)
    ray_cluster.START_SECONDS = LONGEST / 2  # this machine may be busy
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
