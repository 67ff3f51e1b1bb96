"""The errors of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from numpy.linalg import LinAlgError

from aiograd.running.late import LateModule

if TYPE_CHECKING:
    import difflib
else:
    difflib = LateModule("difflib")

__all__ = [
    "AiogradError", "ArgumentError", "ArgumentTypeError", "CancelGraceError", "CheckpointError", "ConvergenceError", "DataError", "DeviceError",
    "DeviceLostError", "DeviceMemoryError", "DeviceMismatchError", "DeviceUnavailableError", "EngineClosedError", "GradcheckError", "GradientError",
    "GraphError", "GraphFreedError", "HookError", "HookTypeError", "InPlaceError", "IndexRangeError", "LinearAlgebraError", "LoopError",
    "MicrobatchError", "MissingExtraError", "ModeError", "ModifiedError", "NaNGradientError", "NestedPassError", "NoGraphError", "NoRuleError",
    "NotReadyError", "OnceDifferentiableError", "PipelineError", "ScheduleError", "ShapeError", "StageBackwardError", "TraceError",
    "TransactionError", "UnknownNameError", "UnusedInputError", "refused",
]  # fmt: skip


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
    """A mode was left in another context than its own, a lease of a batch was not entered exactly once, or a server has a trainer already."""


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

    def __init__(self, message: str, *, stage: int | None = None, microbatch: int | None = None, action: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        self.rank = rank


class StageBackwardError(AiogradError, RuntimeError):
    """The backward pass of a stage failed; the cause is chained. ``committed`` is the cause's."""


class GradcheckError(AiogradError, RuntimeError):
    """Analytic and numeric derivatives disagree."""


class ConvergenceError(AiogradError, RuntimeError):
    """An implicit function has no derivative here: its answer is no root, or the linear solve of its derivative failed. No gradient changed.

    Attributes:
        norm: of what was found: the largest element of the residual at the answer, or the length of what the linear solve left.
        limit: the largest `norm` that would have been accepted.
        iterations: products with the Jacobian that were made.
    """

    def __init__(self, message: str, *, norm: float = float("nan"), limit: float = float("nan"), iterations: int = 0) -> None:
        super().__init__(message)
        self.norm = norm
        self.limit = limit
        self.iterations = iterations


class DataError(AiogradError, RuntimeError):
    """A source, a sampler or a process that makes examples gave none that can be used, or cannot go on."""


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
