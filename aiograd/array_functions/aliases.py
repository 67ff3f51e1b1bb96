"""Names that numpy and PyTorch have for functions of the standard: a table, ``function as name``.

Type checkers follow an import to its function; the type of ``name = module.function`` is left to what each infers.

A name is here where it means the same as there. Where the two libraries mean different things by a name, numpy's meaning is meant; the
table in ``docs/guides/from-pytorch.md`` lists those.
"""

from __future__ import annotations

from typing import Any

from aiograd.array_functions import elementwise, method_forms, searching
from aiograd.array_functions.conversion import ArrayLike, as_tensor, as_tensors, row
from aiograd.tensors.core import TensorCore
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

# isort: off
from aiograd.running.modes import no_grad as inference_mode
from aiograd.tensors.creation import tensor as array
from aiograd.array_functions.comparison import (
    bitwise_invert as bitwise_not, bitwise_invert as invert, bitwise_left_shift as left_shift, bitwise_right_shift as right_shift, equal as eq,
    greater as gt, greater_equal as ge, less as lt, less_equal as le, not_equal as ne,
)  # fmt: skip
from aiograd.array_functions.elementwise import (
    abs as absolute, acos as arccos, acosh as arccosh, asin as arcsin, asinh as arcsinh, atan as arctan, atan2 as arctan2, atanh as arctanh,
    clip as clamp, conj as conjugate, divide as div, divide as true_divide, multiply as mul, negative as neg, pow as power, remainder as mod,
    round as around, sign as sgn, subtract as sub, trunc as fix,
)  # fmt: skip
from aiograd.array_functions.linalg import (
    cholesky, cross, det, expm as matrix_exp, inv as inverse, logdet, matrix_power, norm, pinv as pinverse, slogdet,
)  # fmt: skip
from aiograd.array_functions.manipulation import (
    broadcast_arrays as broadcast_tensors, concat as cat, concat as concatenate, expand_dims as unsqueeze, moveaxis as movedim,
    permute_dims as permute, repeat as repeat_interleave, swapaxes as swapdims, unstack as unbind,
)  # fmt: skip
from aiograd.array_functions.products import matmul as bmm, matmul as mm, matmul as mv, outer as ger
from aiograd.array_functions.reduction import max as amax, min as amin
from aiograd.array_functions.special import digamma, erfinv, gammaln as lgamma, i0, logit, polygamma
# isort: on

__all__ = [
    "cat", "permute", "unsqueeze", "unbind", "movedim", "swapdims", "repeat_interleave", "broadcast_tensors", "clamp", "sub", "mul", "div", "neg",
    "sgn", "fix", "eq", "ne", "lt", "le", "gt", "ge", "mm", "bmm", "mv", "ger", "norm", "det", "slogdet", "logdet", "inverse", "pinverse",
    "cholesky", "cross", "matrix_exp", "matrix_power", "lgamma", "digamma", "polygamma", "erfinv", "logit", "i0", "inference_mode", "array",
    "concatenate", "absolute", "power", "mod", "true_divide", "arccos", "arcsin", "arctan", "arctan2", "arccosh", "arcsinh", "arctanh", "around",
    "conjugate", "amax", "amin", "invert", "bitwise_not", "left_shift", "right_shift", "index_select", "masked_fill", "ravel", "t", "numel",
    "is_tensor", "is_floating_point", "is_complex", "complex", "polar",
]  # fmt: skip


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
