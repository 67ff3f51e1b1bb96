"""Methods that are no public functions: they take ints one by one, ask about the tensor, or have PyTorch's order of arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.array_functions import comparison, creation, elementwise, joining, linalg, manipulation, reduction, sampling, searching, special
from aiograd.array_functions.conversion import ArrayLike, Axis, row
from aiograd.errors import ShapeError
from aiograd.running.random import default_generator
from aiograd.running.random_parameters import check, check_probability
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import tensor
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor


def _flat(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """``(2, 3)`` of ``f(2, 3)`` and ``f((2, 3))`` alike."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else values


def reshape(x: Tensor, /, *shape: Any) -> Tensor:
    """The same elements in another shape, given as ints or as one tuple; one extent may be -1."""
    return call(row("reshape"), (x,), {"shape": _flat(shape)})  # type: ignore[no-any-return]


def ravel(x: Tensor, /) -> Tensor:
    """The elements in a vector; a view where possible."""
    return reshape(x, -1)


def transpose(x: Tensor, /, *axes: Any) -> Tensor:
    """Axes in the given order (numpy), reversed without any; two axes exchanged where two are given of a tensor that has more (PyTorch)."""
    order = _flat(axes)
    if len(order) == 2 and x.ndim != 2:
        return manipulation.swapaxes(x, *order)
    return manipulation.transpose(x, None if not order or order == (None,) else order)


def permute(x: Tensor, /, *axes: Any) -> Tensor:
    """Axes in the given order, as ints or as one tuple."""
    return manipulation.permute_dims(x, _flat(axes))


def expand(x: Tensor, /, *shape: Any) -> Tensor:
    """Broadcast without a copy to a shape, given as ints or as one tuple; -1 keeps an extent."""
    wanted = _flat(shape)
    missing = len(wanted) - x.ndim
    if missing < 0:
        raise ShapeError(f"expand(): shape {list(x.shape)} has more axes than {list(wanted)}")
    return manipulation.broadcast_to(x, [own if w == -1 else w for w, own in zip(wanted, (1,) * missing + x.shape, strict=True)])


def expand_as(x: Tensor, /, other: Tensor) -> Tensor:
    """Broadcast without a copy to the shape of another tensor."""
    return manipulation.broadcast_to(x, other.shape)


def view_as(x: Tensor, /, other: Tensor) -> Tensor:
    """The same elements in the shape of another tensor."""
    return reshape(x, other.shape)


def tile(x: Tensor, /, *repetitions: Any) -> Tensor:
    """Laid side by side, so many times along each axis, given as ints or as one tuple."""
    return manipulation.tile(x, _flat(repetitions))


def flip(x: Tensor, /, *axis: Any) -> Tensor:
    """Reverse the order along axes, given as ints or as one tuple; along all if none are given."""
    axes = _flat(axis)
    return manipulation.flip(x, axis=None if not axes or axes == (None,) else axes)


def contiguous(x: Tensor, /) -> Tensor:
    """The tensor itself where its elements lie in row-major order without gaps, else a copy that does."""
    return x if not isinstance(x._data, np.ndarray) or x._data.flags.c_contiguous else manipulation.clone(x)


def diagonal(x: Tensor, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The diagonals of the planes of two axes, along a new last axis."""
    return call(row("diagonal"), (x,), {"offset": offset, "axis1": axis1, "axis2": axis2})  # type: ignore[no-any-return]


def trace(x: Tensor, /, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Tensor:
    """Sums of the diagonals of the planes of two axes."""
    return reduction.sum(diagonal(x, offset, axis1, axis2), -1, dtype=dtype)


def take(x: Tensor, /, indices: ArrayLike, axis: int | None = None) -> Tensor:
    """Slices at `indices` along an axis; elements of the flattened tensor when none is given."""
    return searching.take(ravel(x), indices, 0) if axis is None else searching.take(x, indices, axis)


def index_select(x: Tensor, /, axis: int, index: ArrayLike) -> Tensor:
    """Slices at `index` along an axis."""
    return searching.take(x, index, axis)


def index_add(x: Tensor, /, axis: int, index: ArrayLike, source: ArrayLike, *, alpha: float = 1) -> Tensor:
    """A copy with the slices of `source`, times `alpha`, added at `index` along an axis, once for every mention."""
    return searching.index_add(x, axis, index, source, alpha=alpha)


def where(x: Tensor, /, condition: ArrayLike, other: ArrayLike) -> Tensor:
    """The elements where the condition holds, the elements of `other` elsewhere."""
    return searching.where(condition, x, other)


def masked_fill(x: Tensor, /, mask: ArrayLike, value: ArrayLike) -> Tensor:
    """A copy with `value` where `mask` is true, in the tensor's dtype; `mask` broadcasts to its shape."""
    filled: Tensor = searching.where(mask, value, x)
    if filled.shape != x.shape:
        raise ShapeError(f"masked_fill(): mask {list(np.shape(mask))} and value {list(np.shape(value))} do not broadcast to {list(x.shape)}")
    return filled.astype(x.dtype, copy=False)


def norm(x: Tensor, /, ord: float = 2, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Norms of vectors along axes, of all elements when none are given; Euclidean, or of order 0, 1, p, inf, -inf."""
    return linalg.vector_norm(x, axis=axis, keepdims=keepdims, ord=ord)


def numel(x: Tensor, /) -> int:
    """The number of elements."""
    return int(x.size)


def dim(x: Tensor, /) -> int:
    """The number of axes."""
    return x.ndim


def element_size(x: Tensor, /) -> int:
    """The number of bytes of an element."""
    return x.dtype.itemsize


def is_contiguous(x: Tensor, /) -> bool:
    """True if the elements lie in row-major order without gaps."""
    return bool(x._data.flags.c_contiguous) if isinstance(x._data, np.ndarray) else True


def is_floating_point(x: Tensor, /) -> bool:
    """True of real floating dtypes."""
    return x.dtype.kind == "f"


def is_complex(x: Tensor, /) -> bool:
    """True of complex dtypes."""
    return x.dtype.kind == "c"


def is_same_size(x: Tensor, /, other: Tensor) -> bool:
    """True if another tensor has the same shape."""
    return x.shape == other.shape


def equal(x: Tensor, /, other: ArrayLike) -> bool:
    """True if shapes and all elements are equal (PyTorch's method; ``==`` and `eq` compare elements)."""
    return comparison.array_equal(x, other)


def t(x: Tensor, /) -> Tensor:
    """The transpose of a matrix; vectors and numbers as they are."""
    if x.ndim > 2:
        raise ShapeError(f"t() of shape {list(x.shape)}: expected at most two axes; use mT or permute()")
    return x.T if x.ndim == 2 else x


def select(x: Tensor, /, axis: int, index: int) -> Tensor:
    """The slice at `index` along an axis, as a view."""
    return x[(slice(None),) * joining.checked_axis(x, axis, "select()") + (index,)]


def reshape_as(x: Tensor, /, other: Tensor) -> Tensor:
    """The same elements in the shape of another tensor."""
    return reshape(x, other.shape)


def sum_to_size(x: Tensor, /, *shape: Any) -> Tensor:
    """The sum over the axes along which a shape broadcasts to the shape of the tensor."""
    wanted = _flat(shape)
    lead = x.ndim - len(wanted)
    if lead < 0 or any(w not in (1, n) for w, n in zip(wanted, x.shape[lead:], strict=True)):
        raise ShapeError(f"sum_to_size(): shape {list(wanted)} does not broadcast to {list(x.shape)}")
    axes = (*range(lead), *(lead + i for i, w in enumerate(wanted) if w == 1 and x.shape[lead + i] != 1))
    return reshape(reduction.sum(x, axes), tuple(wanted)) if axes else x


def diagonal_filled(x: Tensor, /, value: complex) -> Tensor:
    """A copy with one number on the diagonal."""
    return searching.where(np.eye(*x.shape[-2:], dtype=np.bool_), value, x)


def type_as(x: Tensor, /, other: Tensor) -> Tensor:
    """The values in the dtype of another tensor."""
    return x.astype(other.dtype, copy=False)


def type_of(x: Tensor, /, dtype: Any = None) -> Any:
    """The values in a dtype; the dtype itself where none is given."""
    return x.dtype if dtype is None else x.astype(dtype, copy=False)


def cuda(x: Tensor, /, device: int = 0) -> Tensor:
    """The tensor on a CUDA device."""
    return x.to(f"cuda:{device}")


def new_tensor(x: Tensor, /, data: Any, *, dtype: Any = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor of the data, with the dtype and on the device of this one."""
    return tensor(data, dtype=dtype or x.dtype, device=device or x.device, requires_grad=requires_grad)


def new_zeros(x: Tensor, /, *shape: Any, dtype: Any = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Zeros of a shape, with the dtype and on the device of this tensor."""
    return creation.zeros(_flat(shape), dtype=dtype or x.dtype, device=device or x.device, requires_grad=requires_grad)


def new_ones(x: Tensor, /, *shape: Any, dtype: Any = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Ones of a shape, with the dtype and on the device of this tensor."""
    return creation.ones(_flat(shape), dtype=dtype or x.dtype, device=device or x.device, requires_grad=requires_grad)


def new_empty(x: Tensor, /, *shape: Any, dtype: Any = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor of arbitrary elements in a shape, with the dtype and on the device of this one."""
    return creation.empty(_flat(shape), dtype=dtype or x.dtype, device=device or x.device, requires_grad=requires_grad)


def new_full(x: Tensor, /, shape: Any, fill_value: complex, *, dtype: Any = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """One number in a shape, with the dtype and on the device of this tensor."""
    return creation.full(shape, fill_value, dtype=dtype or x.dtype, device=device or x.device, requires_grad=requires_grad)


def clamp_min(x: Tensor, /, min: ArrayLike) -> Tensor:
    """Elements limited from below."""
    return elementwise.clip(x, min)


def clamp_max(x: Tensor, /, max: ArrayLike) -> Tensor:
    """Elements limited from above."""
    return elementwise.clip(x, None, max)


def polygamma(x: Tensor, /, n: int) -> Tensor:
    """The `n`-th derivative of `digamma`."""
    return special.polygamma(n, x)


# Draws, which methods write in place.


def uniform(x: Tensor, /, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
    """Numbers uniformly distributed between `low` and `high`, in the shape and dtype of the tensor."""
    return (generator or default_generator()).uniform(x.shape, low=low, high=high, dtype=x.dtype).to(x.device)


def normal(x: Tensor, /, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    """Normally distributed numbers in the shape and dtype of the tensor."""
    return (generator or default_generator()).normal(x.shape, mean=mean, std=std, dtype=x.dtype).to(x.device)


def exponential(x: Tensor, /, lambd: float = 1.0, *, generator: Any = None) -> Tensor:
    """Exponentially distributed numbers with mean ``1 / lambd`` in the shape and dtype of the tensor."""
    check(f"exponential(lambd={lambd})", "a finite number above 0", lambda: 0 < lambd < math.inf)
    drawn = sampling.rand_like(x, generator=generator, dtype=np.float32 if x.dtype == np.float16 else None)
    return (elementwise.log1p(-drawn) * (-1.0 / lambd)).astype(x.dtype, copy=False)


def bernoulli_filled(x: Tensor, /, p: float = 0.5, *, generator: Any = None) -> Tensor:
    """1 with probability `p`, else 0, in the shape and dtype of the tensor."""
    if isinstance(p, TensorCore):
        sampling.check_probabilities(p)
    else:
        check_probability("bernoulli", p)
    return (sampling.rand(x.shape, generator=generator, device=x.device) < p).astype(x.dtype)


def random(x: Tensor, /, low: int = 0, high: int | None = None, *, generator: Any = None) -> Tensor:
    """Integers uniformly distributed in [low, high), or [0, low), in the shape and dtype of the tensor."""
    return sampling.randint_like(x, low, high, generator=generator)
