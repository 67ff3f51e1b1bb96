"""Mixtures of experts over workers.

`gating` chooses experts and combines their answers; `runtime` asks many at once, one request for all rows of a batch that go to the same expert,
and lets experts learn; `serving.batcher` batches requests of several callers; `expert` is an expert on another worker, `mixture` puts them
together.
"""

from __future__ import annotations

from aiograd.distributed.moe.expert import RemoteExpert as RemoteExpert
from aiograd.distributed.moe.expert import find_experts as find_experts
from aiograd.distributed.moe.expert import serve_experts as serve_experts
from aiograd.distributed.moe.gating import Grid as Grid
from aiograd.distributed.moe.gating import combine_experts as combine_experts
from aiograd.distributed.moe.gating import expert_scores as expert_scores
from aiograd.distributed.moe.mixture import RemoteMixtureOfExperts as RemoteMixtureOfExperts
from aiograd.distributed.moe.mixture import RemoteSwitchMixtureOfExperts as RemoteSwitchMixtureOfExperts
from aiograd.distributed.moe.runtime.backend import ExpertBackend as ExpertBackend
from aiograd.distributed.moe.runtime.call_many import CallManyResult as CallManyResult
from aiograd.distributed.moe.runtime.call_many import call_many as call_many
from aiograd.distributed.moe.runtime.gathering import Loss as Loss
from aiograd.distributed.moe.uid import ExpertUid as ExpertUid
from aiograd.distributed.moe.uid import parse_uid as parse_uid
from aiograd.serving.batcher import TaskPool as TaskPool
