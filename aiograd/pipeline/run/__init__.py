"""Running pipelines: everything of `aiograd.pipeline` that waits on an event loop.

===================  =========================================================================================
`pipeline`           the public face
`coordinator`        all hosts of a pipeline: what they do together, the replacement of lost ones; the commit is that of `aiograd.coordination`
`remote_host`        such a host, as the pipeline sees it; which stages live where
`host`               the ranks that live in one process, from step to step; also on workers
`stage_assignment`   what those ranks have to do
`replicated_stages`  the stages of one host of several replicas: their common state, and the sum of their gradients
`session`            one step of theirs: the values for ranks beside its transaction
`step_execution`     those ranks while they carry it out
`outbox`             values on their way to other processes
`mailbox`            values that wait for a rank
`together`           coroutines that stand or fall together
===================  =========================================================================================
"""

from __future__ import annotations

from aiograd.pipeline.run.host import StageHost as StageHost
from aiograd.pipeline.run.pipeline import Pipeline as Pipeline
from aiograd.pipeline.run.step_execution import ExecutedAction as ExecutedAction
