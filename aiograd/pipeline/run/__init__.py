"""Running pipelines: everything of `aiograd.pipeline` that waits on an event loop.

==============  =========================================================================================
`pipeline`      the public face
`fleet`         all hosts of a pipeline: what they do together, the commit, the replacement of lost ones
`host`          the ranks that live in one process, from step to step; also on workers
`charge`        what those ranks have to do
`session`       one step of theirs
`local`         those ranks while they carry it out
`outbox`        values on their way to other processes
`mailbox`       values that wait for a rank
`verdicts`      what became of steps, told to hosts until they confirm it
`watch`         what a host does about a step of whose driver it hears nothing
`together`      coroutines that stand or fall together
==============  =========================================================================================
"""

from __future__ import annotations

from aiograd.pipeline.run.host import StageHost as StageHost
from aiograd.pipeline.run.local import Event as Event
from aiograd.pipeline.run.pipeline import Pipeline as Pipeline
