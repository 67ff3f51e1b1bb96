"""The exception tree. Each class is also a subclass of the builtin that a caller would catch.

::

    AiogradError
    ├── GraphError (RuntimeError)
    │   ├── NoGraphError              nothing to differentiate: no tensor requires grad
    │   ├── GraphFreedError           second backward through a graph whose saved values are gone
    │   ├── ModifiedError             a saved value was modified in place
    │   ├── InPlaceError              in-place on a leaf that requires grad, or on a view of one
    │   ├── UnusedInputError          an input does not take part in the outputs
    │   ├── OnceDifferentiableError   differentiating a backward marked once_differentiable
    │   ├── CheckpointError           recomputation saved other values than the forward
    │   └── NestedPassError           a synchronous rule tried to run a pass
    ├── GradientError (RuntimeError)   a rule returned a gradient of the wrong number, shape, dtype or device
    ├── NaNGradientError (RuntimeError) a rule returned NaN while anomaly mode looked
    ├── HookError (RuntimeError)       a hook returned nonsense
    │   └── HookTypeError (TypeError)
    ├── ArgumentError (ValueError)     a call with wrong values
    │   ├── ShapeError                shapes do not fit
    │   ├── IndexRangeError (IndexError) an index or axis outside of its range, or no index at all
    │   └── ArgumentTypeError (TypeError) a call with wrong types or dtypes
    ├── ModeError (RuntimeError)       a mode was left in another context than it was entered in
    ├── LoopError (RuntimeError)       no running event loop where one is needed, or the wrong one
    ├── NotReadyError (RuntimeError)   reading a value that is still being computed, inside a running loop
    ├── EngineClosedError (RuntimeError)
    ├── CancelGraceError (RuntimeError) a cancelled coroutine did not stop within the grace period
    ├── GradcheckError (RuntimeError)  analytic and numeric derivatives disagree
    └── DeviceError (RuntimeError)     device missing, failed, or arrays on different devices
        └── DeviceMismatchError

An exception raised by a user's own rule, hook or callback keeps its type; the engine adds a note that says where it came from, and the
attribute ``committed`` (True when the gradients of the pass had been committed before it was raised).
"""

from __future__ import annotations


class AiogradError(Exception):
    """Base of every error that aiograd raises."""

    #: whether the gradients of the pass had been committed when this was raised
    committed: bool = False


class GraphError(AiogradError, RuntimeError):
    """The graph cannot be differentiated as asked."""


class NoGraphError(GraphError):
    """There is nothing to differentiate: no tensor requires grad."""


class GraphFreedError(GraphError):
    """The saved values of the graph were released by an earlier pass."""


class ModifiedError(GraphError):
    """A value saved for backward has been modified in place."""


class InPlaceError(GraphError):
    """An in-place operation that would lose a gradient."""


class UnusedInputError(GraphError):
    """An input of `grad` does not take part in the outputs."""


class OnceDifferentiableError(GraphError):
    """A backward marked ``once_differentiable`` was differentiated."""


class CheckpointError(GraphError):
    """Recomputation in `checkpoint` did not repeat the forward."""


class NestedPassError(GraphError):
    """A synchronous rule tried to run a backward pass."""


class GradientError(AiogradError, RuntimeError):
    """A rule returned a gradient of the wrong number, shape, dtype or device."""


class NaNGradientError(AiogradError, RuntimeError):
    """A rule returned NaN while anomaly mode was looking."""


class HookError(AiogradError, RuntimeError):
    """A hook returned something that cannot be used."""


class HookTypeError(HookError, TypeError):
    """A hook returned a value of the wrong type."""


class ArgumentError(AiogradError, ValueError):
    """A call with values that cannot work."""


class ShapeError(ArgumentError):
    """Shapes that do not fit."""


class IndexRangeError(ArgumentError, IndexError):
    """An index or axis that is out of range, or no index at all."""


class ArgumentTypeError(ArgumentError, TypeError):
    """A call with wrong types or dtypes."""


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


class GradcheckError(AiogradError, RuntimeError):
    """Analytic and numeric derivatives disagree."""


class DeviceError(AiogradError, RuntimeError):
    """A device is missing or failed."""


class DeviceMismatchError(DeviceError):
    """Arrays that live on different devices met in one operation."""
