"""Data parallelism: replicas of one module on several workers, which train on a shard of each batch and stay equal to the bit.

=============================  ====================================================================================================
`controller`                   replicas that one process drives (`DataParallel`)
`coordinator`                  all replicas as that process sees them: a step, its commit, joining and lost replicas
`module_coordinator`           equal modules on workers, as that process makes and drops them
`replica_member`               one replica on its worker, as a member of steps
`remote_replica`               such a replica, as the coordinating process sees it
`loss_module`                  a module with the method that computes its loss
`replica`                      the module, the optimizer and the rest of the state of a replica
`replica_step`                 one step of it, up to the commit
`staged_optimizer`             an optimizer step with a result that waits until it is written or dropped
`replica_state`                states of replicas as arrays and an outline, on their way to others; pure
`replica_messages`             the wire form of requests, results and outlines of states; pure
`distributed_data_parallel`    the same program on every worker (`DistributedDataParallel`)
`reducer`                      gradients of local backward passes, combined over a group of workers
`zero_redundancy_optimizer`    an optimizer with its state divided among the members
=============================  ====================================================================================================
"""

from __future__ import annotations

from aiograd.distributed.data_parallel.controller import DataParallel as DataParallel
from aiograd.distributed.data_parallel.replica_member import ReplicaMember as ReplicaMember
