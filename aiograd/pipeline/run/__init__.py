"""Running pipelines: everything of `aiograd.pipeline` that waits on an event loop.

===================  =========================================================================================
`pipeline`           the public class
`action_handlers`    functions of the user for some kinds of action
`batch`              the arguments of a step in microbatches
`coordinator`        all members of a pipeline: their steps, and the replacement of lost ones
`pipeline_members`   which members there are, and their groups
`pipeline_replicas`  the part of a `Pipeline` that is about its replicas
`lost_ranks`         members whose place nothing fills, and the rows of the others then
`absorbed_execution` one step of one member with microbatches of lost ones
`remote_stages`      the ranks on a worker, as the coordinating process sees them; the places of stages
`member`             the ranks on a worker, as a member of steps
`stage_ranks`        the ranks in one process, from step to step
`stage_assignment`   their stages and rows of the schedule
`replicated_stages`  stages of one of several replicas: their common state, and the sum of their gradients
`work`               one step in one process: the values for its ranks
`step_execution`     the ranks of one process while they carry out a step
`messages`           the wire form of requests, results and values between workers; pure
`outbox`             values on their way to other processes
`mailbox`            values that wait for a rank
`together`           coroutines that succeed or fail together
===================  =========================================================================================
"""

from __future__ import annotations

from aiograd.pipeline.run.member import StageMember as StageMember
from aiograd.pipeline.run.pipeline import Pipeline as Pipeline
from aiograd.pipeline.run.stage_assignment import ExecutedAction as ExecutedAction
