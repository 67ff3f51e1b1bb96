"""Kernels of several steps as the calls of numpy that they make, for native functions only: the code of numpy calls keeps the kernel.

Note [Expanded kernels]
    A native function repeats the way that the kernel takes for the usual arguments, in the same order and so with the same bits. Residuals
    that the kernel does not have then are None. Where an argument turns out to be another one at run time (a class out of range), the
    function sets a flag, and the numpy function of the same code answers, see Note [The function] in `aiograd.compiler.native.emit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.compiler.calls import Call, Form, Ref
from aiograd.compiler.native.items import Location, PickedElements, dtype_of
from aiograd.compiler.native.placing import Unsupported
from aiograd.ops import nn_loss
from aiograd.ops.reduction import add_reduce, maximum_reduce
from aiograd.running.types import Shape

_QUIET = tuple([(kind, "ignore") for kind in ("divide", "over", "under", "invalid")])


class _Steps:
    """Adds the calls of one kernel to a lowering.

    Args:
        lowering: of the native function.
        call: of the kernel.
    """

    def __init__(self, lowering: Any, call: Call) -> None:
        self._lowering = lowering
        self._call = call
        self._count = 0

    def ref(self, shape: Shape, dtype: np.dtype[Any]) -> Ref:
        """A new array in row-major order."""
        self._count += 1
        return Ref(f"{self._call.results[0].name}_{self._count}", shape, dtype, np.empty(shape, dtype).strides)

    def add(self, function: Callable[..., Any], label: str, shape: Shape, dtype: np.dtype[Any], *arguments: Any) -> Ref:
        """The result of a call, of this shape and dtype."""
        result = self.ref(shape, dtype)
        self._lowering.add(Call(Form.CALL, function, label, arguments, (result,), fresh=True, errors=_QUIET))
        return result


@functools.lru_cache(maxsize=256)
def _numbers(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count)


def _cross_entropy(lowering: Any, call: Call) -> None:
    """As `nn_loss._small_cross_entropy`."""
    (logits,), options = call.arguments, call.options
    target: Any = lowering._array(options["target"], whole=True) if options.keys() == _OPTIONS else None
    if logits.__class__ is not Ref or target.__class__ is not Ref or len(call.results) != 4:
        raise Unsupported("cross_entropy of no array")
    shape, dtype = logits.shape or (), dtype_of(logits)
    if len(shape) != 2 or shape[1] < 2 or not 0 < shape[0] * shape[1] <= nn_loss.SMALL or not logits.is_in_order or dtype.char not in "fd":
        raise Unsupported(f"cross_entropy of {dtype}{list(shape)}")
    rows, classes = shape
    if options["weight"] is not None or options["label_smoothing"] != 0.0 or options["reduction"] != "mean" or 0 <= options["ignore_index"] < classes:
        raise Unsupported("cross_entropy with other options")
    if target.shape != (rows,) or target.dtype != np.int64:
        raise Unsupported(f"cross_entropy with targets of {target.dtype}{list(target.shape or ())}")
    steps = _Steps(lowering, call)
    one_each: Shape = (rows, 1)
    highest = steps.add(maximum_reduce, "maximum_reduce", one_each, dtype, logits, 1, None, None, True)
    shifted = steps.add(np.subtract, "subtract", shape, dtype, logits, highest)
    power = steps.add(np.exp, "exp", shape, dtype, shifted)
    total = steps.add(add_reduce, "add_reduce", one_each, dtype, power, 1, None, None, True)
    logs = steps.add(np.log, "log", one_each, dtype, total)
    chosen = steps.ref((rows,), dtype)
    lowering._make(chosen)
    lowering._item(PickedElements(shifted, target, chosen, _QUIET))
    sums = [steps.add(add_reduce, "add_reduce", (), dtype, each, None) for each in (logs, chosen)]
    count = dtype.type(rows)
    loss = steps.add(np.divide, "divide", (), dtype, steps.add(np.subtract, "subtract", (), dtype, *sums), count)
    column = Ref(f"{target.name}_column", one_each, target.dtype, (*(target.strides or ()), 0))
    location = lowering._given(target)
    lowering._known[column] = Location(location.root, location.offset)
    is_target = steps.add(np.equal, "equal", shape, np.dtype(bool), column, _numbers(classes))
    share = steps.add(np.divide, "divide", shape, dtype, power, total)
    slope = steps.add(np.divide, "divide", shape, dtype, steps.add(np.subtract, "subtract", shape, dtype, share, is_target), count)
    for ref, made in zip(call.results, (loss, None, None, slope), strict=True):
        lowering.name(ref, made)


_OPTIONS = {"target", "weight", "ignore_index", "label_smoothing", "reduction"}


def _cross_entropy_logits(lowering: Any, call: Call) -> None:
    """As `nn_loss._fused_cross_entropy_logits` where the slope was made with the loss."""
    g, slope = call.arguments[0], call.arguments[-1]
    slope = lowering._named.get(slope, slope)
    if len(call.arguments) != 10 or slope.__class__ is not Ref or slope.dtype is None:
        raise Unsupported("cross_entropy whose slope was not made with it")
    lowering.add(Call(Form.CALL, np.multiply, "multiply", (g, slope), call.results, fresh=True, errors=call.errors))


#: by function of a call
EXPANSIONS: dict[Any, Callable[[Any, Call], None]] = {
    nn_loss._fused_cross_entropy: _cross_entropy,
    nn_loss._fused_cross_entropy_logits: _cross_entropy_logits,
}
