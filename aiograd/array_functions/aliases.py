"""Names that numpy and PyTorch have for functions of the standard: a table, ``name = function``.

A name is here where it means the same as there. Where the two libraries mean different things by a name, numpy's meaning is meant; the
table in ``docs/guides/from-pytorch.md`` lists those.
"""

from __future__ import annotations

from typing import Any

from aiograd.array_functions import comparison, elementwise, linalg, manipulation, method_forms, products, reduction, searching, special
from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors, row
from aiograd.running.modes import no_grad
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import tensor
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

__all__ = [
    "cat", "permute", "unsqueeze", "unbind", "movedim", "swapdims", "repeat_interleave", "broadcast_tensors", "clamp", "sub", "mul", "div", "neg",
    "sgn", "fix", "eq", "ne", "lt", "le", "gt", "ge", "mm", "bmm", "mv", "ger", "norm", "det", "slogdet", "logdet", "inverse", "pinverse",
    "cholesky", "cross", "matrix_exp", "matrix_power", "lgamma", "digamma", "polygamma", "erfinv", "logit", "i0", "inference_mode", "array",
    "concatenate", "absolute", "power", "mod", "true_divide", "arccos", "arcsin", "arctan", "arctan2", "arccosh", "arcsinh", "arctanh", "around",
    "conjugate", "amax", "amin", "invert", "bitwise_not", "left_shift", "right_shift", "index_select", "masked_fill", "ravel", "t", "numel",
    "is_tensor", "is_floating_point", "is_complex", "complex", "polar",
]  # fmt: skip

# PyTorch's
cat, permute, unsqueeze, unbind = manipulation.concat, manipulation.permute_dims, manipulation.expand_dims, manipulation.unstack
movedim, swapdims, repeat_interleave = manipulation.moveaxis, manipulation.swapaxes, manipulation.repeat
broadcast_tensors = manipulation.broadcast_arrays
clamp, sub, mul, div, neg = elementwise.clip, elementwise.subtract, elementwise.multiply, elementwise.divide, elementwise.negative
sgn, fix = elementwise.sign, elementwise.trunc
eq, ne, lt, le = comparison.equal, comparison.not_equal, comparison.less, comparison.less_equal
gt, ge = comparison.greater, comparison.greater_equal
mm = bmm = mv = products.matmul
ger = products.outer
norm, det, slogdet, logdet, inverse, pinverse = linalg.norm, linalg.det, linalg.slogdet, linalg.logdet, linalg.inv, linalg.pinv
cholesky, cross, matrix_exp, matrix_power = linalg.cholesky, linalg.cross, linalg.expm, linalg.matrix_power
lgamma, digamma, polygamma, erfinv, logit, i0 = (
    special.gammaln, special.digamma, special.polygamma, special.erfinv, special.logit, special.i0,
)  # fmt: skip
inference_mode = no_grad

# numpy's
array, concatenate = tensor, manipulation.concat
absolute, power, mod, true_divide = elementwise.abs, elementwise.pow, elementwise.remainder, elementwise.divide
arccos, arcsin, arctan, arctan2 = elementwise.acos, elementwise.asin, elementwise.atan, elementwise.atan2
arccosh, arcsinh, arctanh = elementwise.acosh, elementwise.asinh, elementwise.atanh
around, conjugate, amax, amin = elementwise.round, elementwise.conj, reduction.max, reduction.min
invert = bitwise_not = comparison.bitwise_invert
left_shift, right_shift = comparison.bitwise_left_shift, comparison.bitwise_right_shift


def index_select(x: ArrayLike, axis: int, indices: ArrayLike, /) -> Tensor:
    """`take` with PyTorch's order of arguments."""
    return searching.take(x, indices, axis)


def t(x: ArrayLike, /) -> Tensor:
    """The transpose of a matrix; vectors and numbers as they are."""
    return method_forms.t(as_tensor(x))


def ravel(x: ArrayLike, /) -> Tensor:
    """The elements in a vector; a view where possible."""
    return method_forms.ravel(as_tensor(x))


def masked_fill(x: ArrayLike, mask: ArrayLike, value: ArrayLike, /) -> Tensor:
    """A copy with `value` where `mask` is true, in the dtype of `x`; `mask` broadcasts to its shape."""
    return method_forms.masked_fill(as_tensor(x), mask, value)


def numel(x: ArrayLike, /) -> int:
    """The number of elements."""
    return int(as_tensor(x).size)


def is_tensor(x: Any, /) -> bool:
    """True of Tensors."""
    return isinstance(x, TensorCore)


def is_floating_point(x: ArrayLike, /) -> bool:
    """True of real floating dtypes."""
    return as_tensor(x).dtype.kind == "f"


def is_complex(x: ArrayLike, /) -> bool:
    """True of complex dtypes."""
    return as_tensor(x).dtype.kind == "c"


def complex(real: ArrayLike, imag: ArrayLike, /) -> Tensor:
    """Complex numbers of their real and imaginary parts."""
    return call(row("complex"), tuple(as_tensors(real, imag)), {})  # type: ignore[no-any-return]


def polar(size: ArrayLike, angle: ArrayLike, /) -> Tensor:
    """Complex numbers of their magnitudes and angles."""
    source, turned = as_tensors(size, angle)
    return complex(source * elementwise.cos(turned), source * elementwise.sin(turned))
