"""The exception tree. Each class is also a subclass of the builtin that a caller would catch.

::

    AiogradError
    ├── GraphError (RuntimeError)
    │   ├── TraceError                a compiled function does something that a program cannot repeat
    │   ├── NoGraphError              nothing to differentiate: no tensor requires grad
    │   ├── GraphFreedError           second backward through a graph without its saved values
    │   ├── ModifiedError             a saved value was modified in place
    │   ├── InPlaceError              in-place on a leaf that requires grad, or on a view of one
    │   ├── UnusedInputError          the outputs do not depend on an input
    │   ├── OnceDifferentiableError   differentiating a backward marked once_differentiable
    │   ├── CheckpointError           recomputation saved other values than the forward
    │   └── NestedPassError           a synchronous rule tried to run a pass
    ├── GradientError (RuntimeError)   a rule returned a gradient of the wrong number, shape, dtype or device
    ├── NaNGradientError (RuntimeError) a rule returned NaN in anomaly mode
    ├── HookError (RuntimeError)       a hook returned an unusable value
    │   └── HookTypeError (TypeError)
    ├── ArgumentError (ValueError)     a call with wrong values
    │   ├── ShapeError                shapes do not fit
    │   ├── LinearAlgebraError (numpy.linalg.LinAlgError) a matrix for which there is no result, such as a singular one
    │   ├── IndexRangeError (IndexError) an index or axis outside of its range, or no index at all
    │   ├── ScheduleError             a pipeline schedule that cannot run; says where
    │   ├── MicrobatchError (RuntimeError) a batch that cannot be split into microbatches, or results that cannot be put together
    │   └── ArgumentTypeError (TypeError) a call with wrong types or dtypes
    │       └── NoRuleError           a numpy function, or an argument of one, for which there is no derivative
    ├── UnknownNameError (AttributeError) a tensor or a package has no attribute of that name; names the nearest
    ├── MissingExtraError (ImportError) a library that an extra brings is not installed; names the extra
    ├── ModeError (RuntimeError)       a mode was left in another context than it was entered in
    ├── LoopError (RuntimeError)       no running event loop where one is needed, or the wrong one
    ├── NotReadyError (RuntimeError)   reading a value that is still being computed, inside a running loop
    ├── EngineClosedError (RuntimeError)
    ├── CancelGraceError (RuntimeError) a cancelled coroutine did not stop within the grace period
    ├── PipelineError (RuntimeError)   a stage of a pipeline failed; says which, and doing what
    ├── StageBackwardError (RuntimeError) the backward pass of a stage failed; the cause is chained
    ├── GradcheckError (RuntimeError)  analytic and numeric derivatives disagree
    ├── DataError (RuntimeError)       a process that makes examples failed at it, or is gone
    ├── TransactionError (RuntimeError) an event that a transaction over workers does not allow in its present state
    ├── DeviceError (RuntimeError)     device missing, failed, or arrays on different devices
    │   ├── DeviceMismatchError
    │   ├── DeviceUnavailableError    no driver, toolkit or device of that number; lists the places that were searched
    │   ├── DeviceMemoryError (MemoryError) the device has no memory left, even after everything in reserve was given back
    │   └── DeviceLostError           a kernel failed so that the device cannot be used in this process any more
    └── DistributedError (RuntimeError) an error between workers
        ├── WorkerLostError (ConnectionError) a worker crashed, fell silent or was restarted
        ├── UnknownPeerError (LookupError)    no worker of that name is known here
        ├── DeadlineError (TimeoutError)      a call or pass did not end before its deadline
        ├── ClusterError                      a cluster cannot be started, or does not admit a worker
        │   └── NameTakenError                another worker of the cluster has the name
        ├── CollectiveError                   a group of workers cannot carry out an operation together
        ├── ExpertLostError                   an expert of a mixture failed, or too few of them answered
        ├── RemoteError                       a remote function, rule or hook raised
        │   └── RemotePipelineError (PipelineError)  a stage of a pipeline failed on another worker
        ├── PassAbortedError                  a distributed pass was given up because another worker failed
        ├── CommitUnknown                     contact was lost between prepare and commit: the outcome is not known everywhere
        ├── ContextError                      a distributed context is missing, released, or of another principal
        │   ├── NoContextError                a differentiable remote call outside of any context
        │   ├── ContextNotFoundError (LookupError)
        │   └── ContextReleasedError
        ├── StepError                         a distributed optimizer step was taken on some workers only
        ├── ReferenceLostError (LookupError)  a remote reference to an object that is gone
        ├── NotExposedError (LookupError)     a function or class that the service does not expose
        ├── Overloaded                        a worker has reached a limit; says when to try again
        ├── LimitError (ValueError)           a message is larger than what the limits allow
        ├── AuthenticationError (PermissionError) the peer could not prove its identity
        │   └── CertificateError              a TLS certificate is not trusted, missing, or for another name
        ├── AddressError (ConnectionError)    the URL of a worker cannot be right
        ├── HostRefusedError (PermissionError) a worker does not accept the host name in its URL
        └── ProtocolError (ValueError)        a peer sent bytes that violate the protocol
            └── VersionMismatch               no common version of the protocol

An exception raised by a user's own rule, hook or callback keeps its type; the engine adds a note that says where it came from, and the
attribute ``committed`` (True when the gradients of the pass had been committed before it was raised).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from numpy.linalg import LinAlgError

from aiograd.running.late import LateModule

if TYPE_CHECKING:
    import difflib
else:
    difflib = LateModule("difflib")


class AiogradError(Exception):
    """Base of every error that aiograd raises."""

    #: True if the gradients of the pass had been committed when this was raised
    committed: bool = False


class GraphError(AiogradError, RuntimeError):
    """The graph cannot be differentiated as asked."""


class TraceError(GraphError):
    """A compiled function does something that a program cannot repeat.

    It reads the value of a tensor, waits for something else than a pass, returns something that is no Tensor, or calls itself without end.
    """


class NoGraphError(GraphError):
    """There is nothing to differentiate: no tensor requires grad."""


class GraphFreedError(GraphError):
    """The saved values of the graph were released by an earlier pass."""


class ModifiedError(GraphError):
    """A value saved for backward has been modified in place."""


class InPlaceError(GraphError):
    """An in-place operation that would lose a gradient."""


class UnusedInputError(GraphError):
    """The outputs do not depend on an input of `grad`."""


class OnceDifferentiableError(GraphError):
    """A backward marked ``once_differentiable`` was differentiated."""


class CheckpointError(GraphError):
    """Recomputation in `checkpoint` did not repeat the forward."""


class NestedPassError(GraphError):
    """A synchronous rule tried to run a backward pass."""


class GradientError(AiogradError, RuntimeError):
    """A rule returned a gradient of the wrong number, shape, dtype or device."""


class NaNGradientError(AiogradError, RuntimeError):
    """A rule returned NaN in anomaly mode."""


class HookError(AiogradError, RuntimeError):
    """A hook returned something that cannot be used."""


class HookTypeError(HookError, TypeError):
    """A hook returned a value of the wrong type."""


class ArgumentError(AiogradError, ValueError):
    """A call with values that cannot work."""


class ShapeError(ArgumentError):
    """Shapes that do not fit."""


class LinearAlgebraError(ArgumentError, LinAlgError):
    """A matrix for which there is no result, such as the inverse of a singular one; also in a derivative that needs such a result."""


def refused(name: str, arrays: Iterable[Any], error: LinAlgError) -> LinearAlgebraError:
    """The error for an operation on matrices that numpy refused.

    Args:
        name: name of the operation.
        arrays: its arguments; others than arrays among them are ignored.
        error: numpy's error.

    Returns:
        The error to raise.
    """
    described = ", ".join([f"{a.dtype} {list(a.shape)}" for a in arrays if hasattr(a, "dtype") and hasattr(a, "shape")])
    text = str(error).rstrip(". ")
    advice = "; pinv() and lstsq() take singular ones" if "ingular" in text else ""
    return LinearAlgebraError(f"{name}({described}): {text}. Give matrices for which the result exists{advice}.")


class IndexRangeError(ArgumentError, IndexError):
    """An index or axis that is out of range, or no index at all."""


class ArgumentTypeError(ArgumentError, TypeError):
    """A call with wrong types or dtypes."""


class NoRuleError(ArgumentTypeError):
    """A numpy function, or a keyword of one, that has no rule was called on tensors that require grad: their graph would be lost."""


class ScheduleError(ArgumentError):
    """A pipeline schedule that cannot run.

    Attributes:
        rank: row of the schedule with the offending action, or None where no single row is at fault.
        step: its position in that row, idle cells included.
        stage: stage of the offending action.
        microbatch: microbatch of the offending action.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, step: int | None = None, stage: int | None = None, microbatch: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.stage = stage
        self.microbatch = microbatch


class MicrobatchError(ArgumentError, RuntimeError):
    """A batch cannot be split into microbatches, or their results cannot be put together."""


class UnknownNameError(AiogradError, AttributeError):
    """A tensor or a package has no attribute of that name. The message names the nearest one; it is looked for when the message is read.

    Args:
        owner: the tensor's class or the module, for the message.
        name: the name that is not there.
        known: gives the names that are.
    """

    def __init__(self, owner: str, name: str, known: Callable[[], Iterable[str]]) -> None:
        super().__init__(owner, name)
        self.known = known

    def __str__(self) -> str:
        owner, name = self.args
        public = [other for other in self.known() if not other.startswith("_")]
        near = [] if name.startswith("_") else difflib.get_close_matches(name, public, 1, 0.6)
        return f"{owner} has no attribute {name!r}" + (f"; the nearest is {near[0]!r}" if near else "")


class MissingExtraError(AiogradError, ImportError):
    """A library that comes with an extra is not installed."""


class ModeError(AiogradError, RuntimeError):
    """A mode was left in another context than the one it was entered in."""


class LoopError(AiogradError, RuntimeError):
    """No running event loop where one is needed, or the wrong one."""


class NotReadyError(AiogradError, RuntimeError):
    """A value was read before it was computed, inside a running event loop."""


class EngineClosedError(AiogradError, RuntimeError):
    """The engine has been closed."""


class CancelGraceError(AiogradError, RuntimeError):
    """A cancelled coroutine did not stop within the grace period."""


class PipelineError(AiogradError, RuntimeError):
    """A stage of a pipeline failed; the whole step was given up and no gradient changed. The cause is chained.

    Where the stage is on another worker, it is a `RemotePipelineError`.

    Attributes:
        stage: index of the failed stage, or None where no single stage failed.
        microbatch: index of the microbatch, or None.
        action: text of the action that failed, such as "1F0", or "".
        rank: the rank that carried out the action, or None.
    """

    def __init__(
        self, message: str, *, stage: int | None = None, microbatch: int | None = None, action: str = "", rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        self.rank = rank


class StageBackwardError(AiogradError, RuntimeError):
    """The backward pass of a stage failed; the cause is chained. ``committed`` is the cause's."""


class GradcheckError(AiogradError, RuntimeError):
    """Analytic and numeric derivatives disagree."""


class DataError(AiogradError, RuntimeError):
    """A process that makes examples failed at it, or is gone."""


class TransactionError(AiogradError, RuntimeError):
    """An event that a transaction over workers does not allow in its present state; nothing has changed."""


class DeviceError(AiogradError, RuntimeError):
    """A device is missing or failed."""


class DeviceMismatchError(DeviceError):
    """Arrays that live on different devices met in one operation."""


class DeviceUnavailableError(DeviceError):
    """There is no such device, or something it needs is missing; the message names the missing component and the remedy."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A device has no memory left, even after everything in reserve was given back.

    Attributes:
        asked: bytes asked for.
        free: bytes that were free on the device then.
    """

    def __init__(self, message: str, *, asked: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.asked = asked
        self.free = free


class DeviceLostError(DeviceError):
    """A kernel failed so that the device cannot be used in this process any more."""


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
        self,
        message: str,
        *,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str = "",
        rank: int | None = None,
        **origin: Any,
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
