"""Distributed autograd: workers that call each other over HTTP, and backward passes that cross them.

::

    from aiograd import distributed as dist

    service = dist.Service()                                        # what others may call

    @service.function
    def square(x: ag.Tensor) -> ag.Tensor:
        return x * x

    async def main():
        async with dist.Worker("left", service=service) as left, dist.Worker("driver", peers={"left": left.url}) as driver:
            x = ag.tensor([1.0, 2.0], requires_grad=True)
            async with driver.context() as ctx:                     # one graph on all workers that it reaches
                y = await driver.call("left", "square", x)
                await ctx.backward(y.sum())                         # committed on all of them, or on none
                print(ctx.grads[x])                                 # tensor([2., 4.])

    ag.run(main())

Objects that live on other workers: `Worker.remote`, `RemoteRef`, `RemoteModule`, `DistributedOptimizer`. Workers as processes of this machine:
`LocalCluster`; elsewhere: ``aiograd worker``. What is taken from peers: `Limits`; whom to trust: `Keyring`. Errors: ``ag.errors.DistributedError``.

==============================  ================================================================================================
`worker`, `service`             the public face: who takes part, and what may be called
`context`, `contexts`           a distributed graph on one worker; which contexts there are and who may use them
`nodes`, `payload`              where a graph leaves a worker and arrives at another
`driver.part`, `driver.passes`  a backward pass across workers: who takes part, the gradients' way, commit and abort
`driver.endpoint`               requests and answers between workers by name
`session`                       each request once, over frames that may be lost, repeated or reordered
`codec`, `frame`, `encodings`   what bytes mean
`handshake`, `cipher`           who is there, and that nobody listens
`http`                          frames over aiohttp; `aiograd.testing.SimulatedNetwork` is the other transport
==============================  ================================================================================================
"""

from __future__ import annotations

from aiograd import assembly
from aiograd.distributed import moe as moe
from aiograd.distributed.cluster import Cluster as Cluster
from aiograd.distributed.cluster import JoinCluster as JoinCluster
from aiograd.distributed.cluster import LocalCluster as LocalCluster
from aiograd.distributed.cluster import RayCluster as RayCluster
from aiograd.distributed.cluster import make_cluster as make_cluster
from aiograd.distributed.context import Context as Context
from aiograd.distributed.context import ContextGradients as ContextGradients
from aiograd.distributed.driver.objects import register_adapter as register_adapter
from aiograd.distributed.driver.objects import register_optimizers as register_optimizers
from aiograd.distributed.driver.optimizer import DistributedOptimizer as DistributedOptimizer
from aiograd.distributed.encodings import Encoding as Encoding
from aiograd.distributed.http import HttpTransport as HttpTransport
from aiograd.distributed.keyring import Keyring as Keyring
from aiograd.distributed.keyring_file import read_secret_file as read_secret_file
from aiograd.distributed.limits import Limits as Limits
from aiograd.distributed.module import RemoteModule as RemoteModule
from aiograd.distributed.nodes import RecvNode as RecvNode
from aiograd.distributed.nodes import SendNode as SendNode
from aiograd.distributed.references import RemoteRef as RemoteRef
from aiograd.distributed.scope import current_context as current_context
from aiograd.distributed.scope import current_worker as current_worker
from aiograd.distributed.service import Service as Service
from aiograd.distributed.statistics import WorkerStatistics as WorkerStatistics
from aiograd.distributed.transport import Channel as Channel
from aiograd.distributed.transport import Transport as Transport
from aiograd.distributed.worker import Worker as Worker

assembly.imported("distributed")
