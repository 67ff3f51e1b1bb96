"""make_cluster: the cluster that a word on a command line names, so that a program runs on any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiograd.distributed.cluster.join import JoinCluster
from aiograd.distributed.cluster.local import LocalCluster
from aiograd.distributed.cluster.names import check_names, check_service
from aiograd.distributed.cluster.protocol import Cluster
from aiograd.distributed.cluster.ray_cluster import RayCluster
from aiograd.errors import ArgumentError

#: the kinds of clusters that `make_cluster` makes
KINDS = ("local", "ray", "join")
#: the default port of the coordinator of a `JoinCluster`
JOIN_PORT = 7000


def make_cluster(on: str, n: int, *, service: str, names: Sequence[str] | None = None, **options: Any) -> Cluster:
    """A cluster of a kind that is chosen at run time; to be used with ``async with``.

    With "join" it prints the commands that start the workers: run them in other terminals or on other machines. The coordinator then listens at
    port 7000 with the secret of ``AIOGRAD_SECRET_FILE``, unless `options` say otherwise.

    Args:
        on: "local", "ray" or "join".
        n: how many workers.
        service: the service of the workers, ``"module:name"`` of a `Service`.
        names: of the workers; ``worker0`` and so on by default.
        options: further arguments of `LocalCluster`, `RayCluster` or `JoinCluster`.

    Returns:
        The cluster, not yet entered.

    Raises:
        ArgumentError: another word, or arguments that make no sense. ClusterError: Ray is not installed.
    """
    if on not in KINDS:
        raise ArgumentError(f"make_cluster(on={on!r}): expected one of {', '.join(KINDS)}")
    if on == "local":
        return LocalCluster(n, service=service, names=names, **options)
    if on == "ray":
        return RayCluster(n, service=service, names=names, **options)
    chosen = check_names("make_cluster", n, names)
    check_service("make_cluster", service)
    options.setdefault("host", "127.0.0.1")
    options.setdefault("port", JOIN_PORT)
    cluster = JoinCluster(n, **options)
    scheme = "http" if options.get("ssl") is None else "https"
    print("Waiting for workers. With the same AIOGRAD_SECRET_FILE, run:")
    for name in chosen:
        print(f"    aiograd worker --join {scheme}://{options['host']}:{options['port']} --name {name} --service {service}", flush=True)
    return cluster
