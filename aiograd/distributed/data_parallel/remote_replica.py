"""RemoteReplica: a replica on a worker, as the coordinating process sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiograd.distributed.objects.references import RemoteRef
from aiograd.errors import DistributedError, WorkerLostError


class RemoteReplica:
    """A replica on a worker.

    Args:
        owner: name of the worker.
        module, optimizer, ref: the module, its optimizer and its `ReplicaMember` there.
    """

    def __init__(self, owner: str, module: RemoteRef, optimizer: RemoteRef, ref: RemoteRef) -> None:
        self.owner = owner
        self.module = module
        self.optimizer = optimizer
        self.ref: Any = ref
        #: why it was left out the last time
        self.loss: WorkerLostError | None = None

    @property
    def parts(self) -> tuple[RemoteRef, ...]:
        """References to its module and optimizer."""
        return self.optimizer, self.module

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"the replica on {self.owner}"


def missing_state(what: str, advice: str, failed: Mapping[RemoteReplica, DistributedError] | None = None) -> DistributedError:
    """The error where no replica that can be reached has a part of the state of all.

    Args:
        what: the part.
        advice: for the case that it is lost.
        failed: replicas that could not be asked, with their errors; replicas that are not known to be gone may have it.
    """
    perhaps = {each.owner: error for each, error in (failed or {}).items() if not (isinstance(error, WorkerLostError) and error.is_gone)}
    if not perhaps:
        return DistributedError(f"all replicas that had {what} are lost: {advice}")
    name, error = next(iter(perhaps.items()))
    return WorkerLostError(
        f"no replica that can be reached has {what}; {', '.join(perhaps)} may have it, and cannot be reached ({error}). Try again once they can; "
        f"if they are lost, {advice}",
        worker=name,
        stage="replica",
    )
