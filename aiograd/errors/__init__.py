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
    ├── ModeError (RuntimeError)       a mode was left in another context than it was entered in, or a lease not entered once
    ├── LoopError (RuntimeError)       no running event loop where one is needed, or the wrong one
    ├── NotReadyError (RuntimeError)   reading a value that is still being computed, inside a running loop
    ├── EngineClosedError (RuntimeError)
    ├── CancelGraceError (RuntimeError) a cancelled coroutine did not stop within the grace period
    ├── PipelineError (RuntimeError)   a stage of a pipeline failed; says which, and doing what
    ├── StageBackwardError (RuntimeError) the backward pass of a stage failed; the cause is chained
    ├── GradcheckError (RuntimeError)  analytic and numeric derivatives disagree
    ├── ConvergenceError (RuntimeError) an implicit function's answer is no root, or the linear solve of its derivative failed
    ├── DataError (RuntimeError)       a process that makes examples failed at it, or is gone
    ├── ServingError (RuntimeError)    a server, trainer or follower refuses a call in its present state
    │   ├── QueueFullError            the queue of a server is full; says when to try again
    │   ├── DrainingError             a server closes and refuses new requests; says when to try again
    │   ├── ForwardError (ValueError) the forward of a server fails, and not because of the request
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
        ├── QuorumError                       too few members of a training with local steps are left; names the lost ones
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

from aiograd.errors import distributed, local, serving
from aiograd.errors.distributed import *
from aiograd.errors.local import *
from aiograd.errors.serving import *

__all__ = [*distributed.__all__, *local.__all__, *serving.__all__]

for _each in list(globals().values()):
    if isinstance(_each, type) and issubclass(_each, local.AiogradError):
        _each.__module__ = __name__  # the name by which errors are imported and shown
