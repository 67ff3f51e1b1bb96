"""The errors between workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from aiograd.running.late import LateModule

if TYPE_CHECKING:
    import difflib
else:
    difflib = LateModule("difflib")


from aiograd.errors.local import AiogradError, PipelineError

__all__ = [
    "AddressError", "AuthenticationError", "CertificateError", "ClusterError", "CollectiveError", "CommitUnknown", "ContextError",
    "ContextNotFoundError", "ContextReleasedError", "DeadlineError", "DistributedError", "ExpertLostError", "HostRefusedError", "LimitError",
    "NameTakenError", "NoContextError", "NotExposedError", "Overloaded", "PassAbortedError", "ProtocolError", "QuorumError", "ReferenceLostError",
    "RemoteError", "RemotePipelineError", "StepError", "UnknownPeerError", "VersionMismatch", "WorkerLostError",
]  # fmt: skip


class DistributedError(AiogradError, RuntimeError):
    """Base of errors between workers."""

    #: names of the workers that the error passed through on its way here, nearest first
    path: tuple[str, ...] = ()
    #: identifies the traceback in the log of the worker where it was raised; empty for an error of this worker
    correlation_id: str = ""


class WorkerLostError(DistributedError, ConnectionError):
    """A worker crashed, fell silent, was restarted or cannot be reached.

    Attributes:
        worker: name of the lost worker.
        stage: the operation that was under way with it.
        is_gone: True if its process is known to have ended, with everything in its memory; otherwise it may only be unreachable.
        spared_since: time of the loop from which on work is not affected by the loss, since it sends its requests to the worker again; infinite
            where all work is affected.
    """

    def __init__(self, message: str, *, worker: str = "", stage: str = "", is_gone: bool = False, spared_since: float = math.inf) -> None:
        super().__init__(message)
        self.worker = worker
        self.stage = stage
        self.is_gone = is_gone
        self.spared_since = spared_since


class UnknownPeerError(DistributedError, LookupError):
    """No worker of that name is known here: it is not among the peers of this worker, and has not called it."""


class DeadlineError(DistributedError, TimeoutError):
    """A call or a pass did not end before its deadline. Its work on other workers has been cancelled."""


class ClusterError(DistributedError):
    """A cluster cannot be started, lacks a requested resource, or does not admit a worker."""


class NameTakenError(ClusterError):
    """Another live worker of the cluster has this worker's name."""


class RemoteError(DistributedError):
    """An exception that was raised on another worker.

    Attributes:
        worker: name of the worker where it was raised.
        function: the exposed function, or the node of the graph.
        code: the kind of failure, as a short word.
        type_name: name of the exception's type on that worker.
        correlation_id: identifies the traceback in that worker's log.
        path: names of the workers the error passed through, nearest first.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str = "",
        function: str = "",
        code: str = "raised",
        type_name: str = "",
        correlation_id: str = "",
        path: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.function = function
        self.code = code
        self.type_name = type_name
        self.correlation_id = correlation_id
        self.path = path


class RemotePipelineError(RemoteError, PipelineError):
    """A stage of a pipeline failed on another worker: a `PipelineError` that has the attributes of a `RemoteError` as well.

    Attributes:
        stage: index of the failed stage, or None.
        microbatch: index of the microbatch, or None.
        action: text of the action that failed, or "".
        rank: the rank that carried out the action, or None.
    """

    def __init__(
        self, message: str, *, stage: int | None = None, microbatch: int | None = None, action: str = "", rank: int | None = None, **origin: Any
    ) -> None:
        super().__init__(message, **origin)
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        self.rank = rank


class ExpertLostError(DistributedError):
    """An expert failed, or too many of a sample's experts did.

    Attributes:
        sample: number of the sample in the batch.
        position: index of the expert among the sample's experts.
    """

    def __init__(self, message: str, *, sample: int = 0, position: int = 0) -> None:
        super().__init__(message)
        self.sample = sample
        self.position = position


class CollectiveError(DistributedError):
    """A group of workers cannot carry out an operation together: a member does something else, has given up, or has left.

    Attributes:
        worker: name of that member, where it is one; else empty.
    """

    def __init__(self, message: str, *, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


class QuorumError(DistributedError):
    """Too few members of a training with local steps are left for a round; it names the lost ones.

    Attributes:
        lost: names of the workers with lost members.
    """

    def __init__(self, message: str, *, lost: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.lost = lost


class PassAbortedError(DistributedError):
    """A distributed pass was given up, because another worker failed or its initiator gave up. Nothing was committed anywhere."""


class CommitUnknown(DistributedError):
    """Contact was lost between prepare and commit, so some worker's outcome is not known.

    Raised from ``backward``, ``committed`` is True: the gradients are committed on this worker and on all others except those in `workers`, which ask
    for the outcome as soon as they can reach another worker. If you cannot wait for that, restore all workers from a checkpoint.

    Attributes:
        workers: the workers with an unknown outcome.
    """

    def __init__(self, message: str, *, workers: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.workers = workers


class ContextError(DistributedError):
    """A distributed context cannot be used like this."""


class NoContextError(ContextError):
    """A remote call with differentiable arguments outside of any context."""


class ContextNotFoundError(ContextError, LookupError):
    """There is no such context here, or it belongs to another principal."""


class ContextReleasedError(ContextError):
    """The context has been released."""


class StepError(DistributedError):
    """A step of a distributed optimizer was not taken, or not confirmed, on some of the workers that have parameters.

    Attributes:
        step: number of the step.
        applied: workers that have taken it.
        failed: workers that have not, or with a lost answer.
    """

    def __init__(self, message: str, *, step: int = 0, applied: tuple[str, ...] = (), failed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.applied = applied
        self.failed = failed


class ReferenceLostError(DistributedError, LookupError):
    """A remote reference names an object that no longer exists: it was deleted, or its worker was restarted. Make it anew with `Worker.remote`."""


class NotExposedError(DistributedError, LookupError):
    """The service exposes no function or class of that name."""


class Overloaded(DistributedError):
    """A worker has reached a limit and rejects the request.

    Attributes:
        retry_after: seconds after which to try again.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LimitError(DistributedError, ValueError):
    """A message is larger than the limits allow."""


class AuthenticationError(DistributedError, PermissionError):
    """The peer could not prove its identity."""


class CertificateError(AuthenticationError):
    """A TLS certificate is missing or invalid: the peer's is not trusted or is for another name, or the peer requires one of this side.

    Attributes:
        is_certain: True if the peer or its certificate says so; otherwise this is inferred from its behaviour.
    """

    def __init__(self, message: str, *, is_certain: bool = True) -> None:
        super().__init__(message)
        self.is_certain = is_certain


class AddressError(DistributedError, ConnectionError):
    """The URL of a worker is wrong.

    Its host name cannot be resolved, or the server there speaks no TLS although the URL says https, or only TLS although it says http. Do not try
    again; give another URL (`Worker.add_peer`).
    """


class HostRefusedError(DistributedError, PermissionError):
    """A worker does not accept the host name by which it was dialled: give that worker ``trusted_hosts``, or dial another of its names."""


class ProtocolError(DistributedError, ValueError):
    """A peer sent bytes that violate the protocol.

    Attributes:
        code: the check that failed, as a short word.
    """

    def __init__(self, message: str, *, code: str = "protocol") -> None:
        super().__init__(message)
        self.code = code


class VersionMismatch(ProtocolError):
    """The two sides have no version of the protocol in common."""
