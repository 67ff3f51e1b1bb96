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
`LocalCluster`; elsewhere: ``aiograd worker``. Limits on requests: `Limits`; shared secrets: `Keyring`. Errors: ``ag.errors.DistributedError``.

====================  ==========================================================================================================
`worker`, `service`   the public classes: workers, and the functions that may be called
`worker_core`         name, limits, clock, requests and tasks of a worker, which everything on it shares
`calls`, `payload`    remote calls, and the values in them
`autograd`            contexts, send and recv nodes, and backward passes across workers
`objects`             references, modules, optimizers and adapters, and the transfer of states
`rpc`                 requests and answers between workers by name: sessions, frames, handshake, HTTP
`collectives`         operations that all workers of a group carry out together
`data_parallel`       replicas of a module that train on shards of a batch
`local_steps`         members that take many steps each between two rounds of exchange
`cluster`             processes of this machine, workers that join, Ray
`moe`                 mixtures of experts
`watchdog`            notices when an event loop is held up
====================  ==========================================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.coordination.compression import Blockwise as Blockwise
from aiograd.coordination.compression import Compressor as Compressor
from aiograd.coordination.compression import TopK as TopK
from aiograd.distributed.autograd.context import Context as Context
from aiograd.distributed.autograd.context import ContextGradients as ContextGradients
from aiograd.distributed.autograd.nodes import RecvNode as RecvNode
from aiograd.distributed.autograd.nodes import SendNode as SendNode
from aiograd.distributed.collectives.group import Group as Group
from aiograd.distributed.collectives.group_server import join_group as join_group
from aiograd.distributed.dashboard_options import DashboardOptions as DashboardOptions
from aiograd.distributed.monitoring import register_face as register_face
from aiograd.distributed.objects.module import RemoteModule as RemoteModule
from aiograd.distributed.objects.object_server import register_adapter as register_adapter
from aiograd.distributed.objects.optimizer import DistributedOptimizer as DistributedOptimizer
from aiograd.distributed.objects.optimizer_server import register_optimizers as register_optimizers
from aiograd.distributed.objects.references import RemoteRef as RemoteRef
from aiograd.distributed.rpc.encodings import Encoding as Encoding
from aiograd.distributed.rpc.failure_detector import FailureDetector as FailureDetector
from aiograd.distributed.rpc.http import HttpTransport as HttpTransport
from aiograd.distributed.rpc.keyring import Keyring as Keyring
from aiograd.distributed.rpc.keyring_file import read_secret_file as read_secret_file
from aiograd.distributed.rpc.limits import Limits as Limits
from aiograd.distributed.rpc.transport import Channel as Channel
from aiograd.distributed.rpc.transport import Transport as Transport
from aiograd.distributed.scope import current_context as current_context
from aiograd.distributed.scope import current_worker as current_worker
from aiograd.distributed.service import Service as Service
from aiograd.distributed.statistics import WorkerStatistics as WorkerStatistics
from aiograd.distributed.waits import HeldLoop as HeldLoop
from aiograd.distributed.waits import Wait as Wait
from aiograd.distributed.waits import WaitReport as WaitReport
from aiograd.distributed.worker import Worker as Worker
from aiograd.running import assembly
from aiograd.running.lazy import on_first_use as _on_first_use

if TYPE_CHECKING:
    from aiograd.distributed import data_parallel as data_parallel
    from aiograd.distributed import local_steps as local_steps
    from aiograd.distributed import moe as moe
    from aiograd.distributed.cluster import Cluster as Cluster
    from aiograd.distributed.cluster import JoinCluster as JoinCluster
    from aiograd.distributed.cluster import LocalCluster as LocalCluster
    from aiograd.distributed.cluster import RayCluster as RayCluster
    from aiograd.distributed.cluster import make_cluster as make_cluster
    from aiograd.distributed.data_parallel import DataParallel as DataParallel
    from aiograd.distributed.data_parallel.distributed_data_parallel import DistributedDataParallel as DistributedDataParallel
    from aiograd.distributed.data_parallel.zero_redundancy_optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from aiograd.distributed.local_steps import LocalSteps as LocalSteps
    from aiograd.distributed.local_steps.round_record import RoundRecord as RoundRecord
    from aiograd.distributed.local_steps.round_statistics import LocalStepsStatistics as LocalStepsStatistics
else:  # a worker needs none of these, and is the sooner there
    __getattr__, __dir__ = _on_first_use(
        __name__,
        {
            "Cluster": "aiograd.distributed.cluster.protocol",
            "DataParallel": "aiograd.distributed.data_parallel",
            "DistributedDataParallel": "aiograd.distributed.data_parallel.distributed_data_parallel",
            "JoinCluster": "aiograd.distributed.cluster.join",
            "LocalCluster": "aiograd.distributed.cluster.local",
            "LocalSteps": "aiograd.distributed.local_steps",
            "LocalStepsStatistics": "aiograd.distributed.local_steps.round_statistics",
            "RoundRecord": "aiograd.distributed.local_steps.round_record",
            "RayCluster": "aiograd.distributed.cluster.ray_cluster",
            "ZeroRedundancyOptimizer": "aiograd.distributed.data_parallel.zero_redundancy_optimizer",
            "make_cluster": "aiograd.distributed.cluster.factory",
        },
        modules=("cluster", "data_parallel", "local_steps", "moe"),
    )

assembly.imported("distributed")
