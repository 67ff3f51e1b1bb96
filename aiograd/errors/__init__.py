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
    ├── ServingError (RuntimeError)    a server, trainer or follower cannot do what was asked in its present state
    │   ├── QueueFullError            the queue of a server is full; says when to try again
    │   ├── DrainingError             a server closes and refuses new requests; says when to try again
    │   ├── VersionNotFoundError (LookupError) there is no version of that number, or no more
    │   ├── RejectedVersionError (ValueError) a version may not serve, since its state is not finite
    │   ├── DeltaError (ValueError)   a delta is damaged, or between other versions
    │   └── VersionLogError (OSError) a log of versions cannot be written or read, or belongs to another server or model
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
        ├── LimitError (ValueError)           a message is larger than the limits allow
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

from aiograd.errors.distributed import AddressError as AddressError
from aiograd.errors.distributed import AuthenticationError as AuthenticationError
from aiograd.errors.distributed import CertificateError as CertificateError
from aiograd.errors.distributed import ClusterError as ClusterError
from aiograd.errors.distributed import CollectiveError as CollectiveError
from aiograd.errors.distributed import CommitUnknown as CommitUnknown
from aiograd.errors.distributed import ContextError as ContextError
from aiograd.errors.distributed import ContextNotFoundError as ContextNotFoundError
from aiograd.errors.distributed import ContextReleasedError as ContextReleasedError
from aiograd.errors.distributed import DeadlineError as DeadlineError
from aiograd.errors.distributed import DistributedError as DistributedError
from aiograd.errors.distributed import ExpertLostError as ExpertLostError
from aiograd.errors.distributed import HostRefusedError as HostRefusedError
from aiograd.errors.distributed import LimitError as LimitError
from aiograd.errors.distributed import NameTakenError as NameTakenError
from aiograd.errors.distributed import NoContextError as NoContextError
from aiograd.errors.distributed import NotExposedError as NotExposedError
from aiograd.errors.distributed import Overloaded as Overloaded
from aiograd.errors.distributed import PassAbortedError as PassAbortedError
from aiograd.errors.distributed import ProtocolError as ProtocolError
from aiograd.errors.distributed import ReferenceLostError as ReferenceLostError
from aiograd.errors.distributed import RemoteError as RemoteError
from aiograd.errors.distributed import RemotePipelineError as RemotePipelineError
from aiograd.errors.distributed import StepError as StepError
from aiograd.errors.distributed import UnknownPeerError as UnknownPeerError
from aiograd.errors.distributed import VersionMismatch as VersionMismatch
from aiograd.errors.distributed import WorkerLostError as WorkerLostError
from aiograd.errors.local import AiogradError as AiogradError
from aiograd.errors.local import ArgumentError as ArgumentError
from aiograd.errors.local import ArgumentTypeError as ArgumentTypeError
from aiograd.errors.local import CancelGraceError as CancelGraceError
from aiograd.errors.local import CheckpointError as CheckpointError
from aiograd.errors.local import DataError as DataError
from aiograd.errors.local import DeviceError as DeviceError
from aiograd.errors.local import DeviceLostError as DeviceLostError
from aiograd.errors.local import DeviceMemoryError as DeviceMemoryError
from aiograd.errors.local import DeviceMismatchError as DeviceMismatchError
from aiograd.errors.local import DeviceUnavailableError as DeviceUnavailableError
from aiograd.errors.local import EngineClosedError as EngineClosedError
from aiograd.errors.local import GradcheckError as GradcheckError
from aiograd.errors.local import GradientError as GradientError
from aiograd.errors.local import GraphError as GraphError
from aiograd.errors.local import GraphFreedError as GraphFreedError
from aiograd.errors.local import HookError as HookError
from aiograd.errors.local import HookTypeError as HookTypeError
from aiograd.errors.local import IndexRangeError as IndexRangeError
from aiograd.errors.local import InPlaceError as InPlaceError
from aiograd.errors.local import LinearAlgebraError as LinearAlgebraError
from aiograd.errors.local import LoopError as LoopError
from aiograd.errors.local import MicrobatchError as MicrobatchError
from aiograd.errors.local import MissingExtraError as MissingExtraError
from aiograd.errors.local import ModeError as ModeError
from aiograd.errors.local import ModifiedError as ModifiedError
from aiograd.errors.local import NaNGradientError as NaNGradientError
from aiograd.errors.local import NestedPassError as NestedPassError
from aiograd.errors.local import NoGraphError as NoGraphError
from aiograd.errors.local import NoRuleError as NoRuleError
from aiograd.errors.local import NotReadyError as NotReadyError
from aiograd.errors.local import OnceDifferentiableError as OnceDifferentiableError
from aiograd.errors.local import PipelineError as PipelineError
from aiograd.errors.local import ScheduleError as ScheduleError
from aiograd.errors.local import ShapeError as ShapeError
from aiograd.errors.local import StageBackwardError as StageBackwardError
from aiograd.errors.local import TraceError as TraceError
from aiograd.errors.local import TransactionError as TransactionError
from aiograd.errors.local import UnknownNameError as UnknownNameError
from aiograd.errors.local import UnusedInputError as UnusedInputError
from aiograd.errors.local import refused as refused
from aiograd.errors.serving import DeltaError as DeltaError
from aiograd.errors.serving import DrainingError as DrainingError
from aiograd.errors.serving import QueueFullError as QueueFullError
from aiograd.errors.serving import RejectedVersionError as RejectedVersionError
from aiograd.errors.serving import ServingError as ServingError
from aiograd.errors.serving import VersionLogError as VersionLogError
from aiograd.errors.serving import VersionNotFoundError as VersionNotFoundError

for _each in list(globals().values()):
    if isinstance(_each, type) and issubclass(_each, AiogradError):
        _each.__module__ = __name__  # the name by which errors are imported and shown
