"""How rows of the op tables run on arrays with a hidden batch axis.

A rule takes the level, the row, its array arguments and its settings, and returns the row's result for Tensors with the batch in front. Rows
without a rule run in a loop over the examples.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.array_functions.searching import where
from aiograd.functional.batching.array import RUN, BatchedArray, BatchLevel
from aiograd.ops.op import ROWS, Op
from aiograd.ops.shape import checked_axis
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import make
from aiograd.tensors.levels import recording, split_arguments
from aiograd.tensors.record import call

Rule = Callable[[BatchLevel, Op, list[Any], dict[str, Any]], Any]

#: rows that broadcast, beside ufuncs
BROADCAST = (
    "pow abs sgn rsqrt relu gelu silu elu leaky_relu softplus softsign sigmoid log_sigmoid clamp erf erfc erfinv log_ndtr logit gammaln gamma "
    "digamma zeta bessel_i0 bessel_i1 bessel_i0e bessel_i1e bessel_j0 bessel_j1 bessel_y0 bessel_y1 sinc xlogy xlog1py "
    "bessel_jv bessel_yn bessel_iv bessel_ive bessel_k0 bessel_k1 rgamma gammasgn gammainc gammaincc betainc betaincc stdtr erfcx ndtri "
    "exprel mills_gap rel_entr where mask round real imag angle conj clone to_copy nan_to_num complex isclose clamp_min "
    "clamp_max to_device"
).split()
REDUCTIONS = "sum mean max min var std logsumexp prod all any count_nonzero vector_norm".split()
#: rows with rules for settings that differ from example to example
_OF_SETTINGS = frozenset("embedding embedding_grad cross_entropy".split())
_ALONG_AN_AXIS = "softmax log_softmax cumsum cumprod sort argsort topk unbind split shift".split()


def run(level: BatchLevel, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The row on arrays of which some are batched; arrays of the level again."""
    arrays, statics = split_arguments(op, tuple([_of_level(level, x) for x in args]), kwargs)
    settings = leaves_of(statics, BatchedArray) if statics else []
    if settings:
        statics = map_tree(lambda x: _of_level(level, x), statics, BatchedArray)
        settings = leaves_of(statics, BatchedArray)
    if op.name == "to_device":
        statics = {**statics, "source": arrays[0].value.device}
    batched = any([isinstance(x, BatchedArray) and x.batched for x in (*arrays, *settings)])
    with recording(level.records_now):
        if not batched:
            plain = map_tree(lambda x: x.value, (arrays, statics), BatchedArray)
            result = call(op, tuple(plain[0]), plain[1])
        else:
            rule = RULES.get(op.name) or (_broadcast if isinstance(op.forward, np.ufunc) and op.outputs == 1 else None)
            if settings and op.name not in _OF_SETTINGS:
                rule = None
            result = NotImplemented if rule is None else rule(level, op, arrays, statics)
            if result is NotImplemented:
                result = _loop(level, op, arrays, statics)
    made = tuple([BatchedArray(level, r, batched) for r in (result if isinstance(result, tuple) else (result,))])
    if op.view and isinstance(arrays[0], BatchedArray):
        for array in made:
            array.base = arrays[0] if arrays[0].base is None else arrays[0].base
    return made if isinstance(result, tuple) else made[0]


def _of_level(level: BatchLevel, x: Any) -> Any:
    """An argument of a row as an array of the level; settings as they are."""
    if isinstance(x, BatchedArray) and x.level is level:
        return x
    if isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "__aiograd_device__"):
        return BatchedArray(level, make(x), False)
    return x


def _defaulted(op: Op, statics: dict[str, Any], name: str) -> Any:
    return statics.get(name, op.defaults.get(name))


def _behind(axis: int, ndim: int) -> int:
    """An axis of an example with `ndim` axes in a batch of them."""
    return checked_axis(axis, ndim) + 1


def _in_front(level: BatchLevel, x: Any, ndim: int) -> Any:
    """The Tensor of an argument with the batch in front of `ndim` axes; one that is the same for all examples as it is."""
    if not isinstance(x, BatchedArray):
        return x
    if not x.batched or x.ndim >= ndim:
        return x.value
    return x.value.reshape(level.size, *(1,) * (ndim - x.ndim), *x.shape)


def _spread(level: BatchLevel, x: Any) -> Any:
    """The Tensor of an argument with the batch in front, repeated where it is the same for all examples."""
    return x.value if x.batched else x.value.broadcast_to((level.size, *x.shape))


def _widest(arrays: list[Any]) -> int:
    return max(x.ndim for x in arrays if isinstance(x, BatchedArray))


def _loop(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    def example(i: int) -> Callable[[BatchedArray], Any]:
        return lambda x: x.value[i] if x.batched else x.value

    def one(i: int) -> Any:
        args, options = map_tree(example(i), (arrays, statics), BatchedArray)
        return call(op, tuple(args), options)

    results = [one(i) for i in range(level.size)]
    if results and isinstance(results[0], tuple):
        return tuple(call(ROWS["stack"], pieces, {}) for pieces in zip(*results, strict=True))
    return call(ROWS["stack"], tuple(results), {})


def _broadcast(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    ndim = _widest(arrays)
    return call(op, tuple(_in_front(level, x, ndim) for x in arrays), statics)


def _reduce(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    x, axis = arrays[0], _defaulted(op, statics, "axis")
    axes = range(x.ndim) if axis is None or not x.ndim else (axis,) if isinstance(axis, int) else axis
    return call(op, (x.value,), {**statics, "axis": tuple(_behind(a, x.ndim) for a in axes)})


def _along(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    x, axis = arrays[0], _defaulted(op, statics, "axis")
    if axis is None or not x.ndim:
        return NotImplemented
    along = tuple(_behind(a, x.ndim) for a in axis) if isinstance(axis, tuple) else _behind(axis, x.ndim)
    return call(op, (x.value,), {**statics, "axis": along})


def _index_of(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    x, axis = arrays[0], _defaulted(op, statics, "axis")
    if axis is None and x.ndim != 1:
        return NotImplemented
    return call(op, (x.value,), {**statics, "axis": _behind(axis or 0, x.ndim)}) if x.ndim else NotImplemented


def _reshape(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    x, shape = arrays[0], tuple(statics["shape"])
    if -1 in shape:
        known = -math.prod(shape)
        shape = tuple((x.size // known if known else 0) if n == -1 else n for n in shape)
    return call(op, (x.value,), {"shape": (level.size, *shape)})


def _expand(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    shape = tuple(statics["shape"])
    return call(op, (_in_front(level, arrays[0], len(shape)),), {"shape": (level.size, *shape)})


def _permute(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    ndim, axes = arrays[0].ndim, _defaulted(op, statics, "axes")
    order = tuple(range(ndim))[::-1] if axes is None else axes
    return call(op, (arrays[0].value,), {"axes": (0, *(_behind(a, ndim) for a in order))})


def _transpose(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    ndim = arrays[0].ndim
    return call(op, (arrays[0].value,), {name: _behind(_defaulted(op, statics, name), ndim) for name in ("axis0", "axis1")})


def _squeeze(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    x, axis = arrays[0], _defaulted(op, statics, "axis")
    axes = [a for a, n in enumerate(x.shape) if n == 1] if axis is None else (axis,) if isinstance(axis, int) else axis
    return call(op, (x.value,), {"axis": tuple(_behind(a, x.ndim) for a in axes)})


def _unsqueeze(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    axis = _defaulted(op, statics, "axis")
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    ndim = arrays[0].ndim + len(axes)
    return call(op, (arrays[0].value,), {"axis": tuple(_behind(a, ndim) for a in axes)})


def _getitem(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    index = statics["index"] if isinstance(statics["index"], tuple) else (statics["index"],)
    return call(op, (arrays[0].value,), {"index": (slice(None), *index)})


def _join(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    ndim = arrays[0].ndim + (op.name == "stack")
    return call(op, tuple(_spread(level, x) for x in arrays), {"axis": _behind(_defaulted(op, statics, "axis"), ndim)})


def _like(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    shape = statics.get("shape")
    return call(op, (arrays[0].value,), {**statics, "shape": None if shape is None else (level.size, *shape)})


def _matmul(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    x1, x2 = arrays
    ndim = max(x1.ndim, x2.ndim, 2)
    first = x1.value[..., None, :] if x1.ndim == 1 else x1.value
    second = x2.value[..., :, None] if x2.ndim == 1 else x2.value
    first, second = (
        value.reshape(level.size, *(1,) * (ndim + 1 - value.ndim), *value.shape[1:]) if x.batched and value.ndim < ndim + 1 else value
        for x, value in ((x1, first), (x2, second))
    )
    product = call(op, (first, second), {})
    if x2.ndim == 1:
        product = product[..., 0]
    return (product[..., 0, :] if x2.ndim != 1 else product[..., 0]) if x1.ndim == 1 else product


def _einsum(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    text = statics["subscripts"]
    letter = next(c for c in string.ascii_letters if c not in text)
    terms, output = text.split("->")
    marked = ",".join((letter if x.batched else "") + term for x, term in zip(arrays, terms.split(","), strict=True))
    return call(op, tuple(x.value for x in arrays), {"subscripts": f"{marked}->{letter}{output}"})


def _same(*arrays: Any) -> bool:
    """True if each is the same for all examples."""
    return not any(isinstance(x, BatchedArray) and x.batched for x in arrays)


def _linear(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    return call(op, tuple(getattr(x, "value", x) for x in arrays), statics) if _same(*arrays[1:]) else NotImplemented


def _embedding(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    return call(op, (arrays[0].value,), {**statics, "indices": statics["indices"].value}) if _same(arrays[0]) else NotImplemented


def _embedding_grad(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    """The tables of all examples in one, a row of each for the padding."""
    indices, count, padding = statics["indices"], statics["num_embeddings"], statics.get("padding_idx")
    spread = _spread(level, indices if isinstance(indices, BatchedArray) else BatchedArray(level, make(np.asarray(indices)), False))
    kept = spread if padding is None else where(spread == padding, count, spread)
    shifted = kept + np.arange(level.size).reshape(-1, *(1,) * (spread.ndim - 1)) * (count + 1)
    rows = _spread(level, arrays[0])
    table = call(op, (rows,), {"indices": shifted, "num_embeddings": level.size * (count + 1)})
    return table.reshape(level.size, count + 1, rows.shape[-1])[:, :count]


def _cross_entropy(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    """Losses of logits (C,) or (N, C, ...), with the batch and N as one axis; the mean of losses that all do not count is NaN."""
    x, target, reduction = arrays[0], statics["target"], _defaulted(op, statics, "reduction")
    if not x.ndim or statics.get("weight") is not None or not isinstance(target, BatchedArray):
        return NotImplemented
    logits, classes = _spread(level, x), _spread(level, target)
    if x.ndim > 1:
        logits = logits.reshape(level.size * x.shape[0], *x.shape[1:])
    folded = classes.reshape(level.size * x.shape[0], *target.shape[1:]) if target.ndim else classes
    losses = call(op, (logits,), {**statics, "target": folded, "reduction": "none"}).reshape(level.size, *target.shape)
    axes = tuple(range(1, losses.ndim))
    if reduction == "none":
        return losses
    total = losses.sum(axes) if axes else losses
    if reduction == "sum":
        return total
    count = (classes != _defaulted(op, statics, "ignore_index")).astype(total.dtype)
    count = count.sum(axes) if axes else count
    return total / where(count == 0, math.nan, count)


def _elementwise_loss(level: BatchLevel, op: Op, arrays: list[Any], statics: dict[str, Any]) -> Any:
    if len({x.ndim for x in arrays}) != 1:
        return NotImplemented
    losses = call(op, tuple(_spread(level, x) for x in arrays), {**statics, "reduction": "none"})
    reduction, axes = _defaulted(op, statics, "reduction"), tuple(range(1, losses.ndim))
    return losses if reduction == "none" or not axes else losses.mean(axes) if reduction == "mean" else losses.sum(axes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(BROADCAST, _broadcast),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(_ALONG_AN_AXIS, _along),
    **dict.fromkeys(("argmax", "argmin"), _index_of),
    **dict.fromkeys(("cat", "stack"), _join),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _like),
    "reshape": _reshape,
    "expand": _expand,
    "permute": _permute,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "getitem": _getitem,
    "matmul": _matmul,
    "einsum": _einsum,
    "linear": _linear,
    "embedding": _embedding,
    "embedding_grad": _embedding_grad,
    "cross_entropy": _cross_entropy,
    **dict.fromkeys(("mse_loss", "huber_loss", "smooth_l1_loss"), _elementwise_loss),
}
RUN.append(run)
