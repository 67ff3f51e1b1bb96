"""The methods of Tensor that compute: one table, whose entries are functions of this package.

Note [The table]
    `TensorMethods` is the table: ``name = function``, and a function's first parameter is the tensor. So a method has the parameters, types and
    docstring of the function that it is, and what is given to the function (another name for a parameter, say) is given to the method. Type
    checkers take `Methods` for a base class of Tensor; when the package is imported its entries are put on Tensor itself.
    A method for a row of one array without further arguments calls the row directly, not the function (`_fast`).

Note [Whose meaning]
    Where numpy and PyTorch mean different things by a name, numpy's meaning is meant (``x.max(1)`` returns values only, ``x.repeat(2)`` repeats
    elements, ``x.split(2)`` cuts in two, ``x.std()`` divides by the number of elements); methods that only PyTorch has take its arguments in its
    order. ``x.sort()`` returns a sorted tensor, as numpy's function does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiograd.array_functions import (
    activation,
    blending,
    comparison,
    creation,
    elementwise,
    joining,
    linalg,
    manipulation,
    method_forms,
    products,
    reduction,
    sampling,
    scattering,
    searching,
    special,
    statistics,
)
from aiograd.array_functions.conversion import row
from aiograd.array_functions.documentation import document
from aiograd.array_functions.names import with_other_names
from aiograd.tensors.core import refresh
from aiograd.tensors.inplace import check_in_place, replace
from aiograd.tensors.tensor import Tensor
from aiograd.tensors.unrolled import unary

P = ParamSpec("P")
R = TypeVar("R")


# -------------------------------------------------------------------- forms


def _fast(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """The row `name` of one array as a method: what `function` does for anything, without asking whether it is a Tensor."""
    method: Any = functools.wraps(function)(unary(row(name)))
    return method  # type: ignore[no-any-return]


def _cast(dtype: str) -> Callable[[Tensor], Tensor]:
    def cast(x: Tensor, /) -> Tensor:
        return x.astype(dtype, copy=False)

    cast.__doc__ = f"""The values as {dtype}.

    Args:
        x: the tensor.

    Returns:
        A Tensor; the tensor itself where the dtype is that.
    """
    return cast


def _in_place(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """The method that writes the result of another into the tensor, and puts the tensor where the result is in the graph."""

    @functools.wraps(method)
    def write(self: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        check_in_place(self, write.__name__)
        refresh(self)

        def compute(old: Any) -> Any:
            return method(old, *[old if x is self else x for x in args], **kwargs)

        return replace(self, write.__name__, compute)  # type: ignore[no-any-return]

    write.__doc__ = f"In place: {(method.__doc__ or '').strip()}"
    write.__name__ = f"{method.__name__}_"
    return write


# -------------------------------------------------------------------- the table

# methods take over the docstrings that functions have now
document(
    activation, blending, comparison, creation, elementwise, joining, linalg, manipulation, method_forms, products, reduction, sampling, scattering,
    searching, special, statistics,
)  # fmt: skip


class TensorMethods:
    """See Note [The table]."""

    __slots__ = ()

    exp, exp2, expm1 = _fast("exp", elementwise.exp), _fast("exp2", elementwise.exp2), _fast("expm1", elementwise.expm1)
    log, log1p = _fast("log", elementwise.log), _fast("log1p", elementwise.log1p)
    log2, log10 = _fast("log2", elementwise.log2), _fast("log10", elementwise.log10)
    sqrt, rsqrt, square = _fast("sqrt", elementwise.sqrt), _fast("rsqrt", elementwise.rsqrt), _fast("square", elementwise.square)
    sin, cos, tan = _fast("sin", elementwise.sin), _fast("cos", elementwise.cos), _fast("tan", elementwise.tan)
    asin, acos, atan = _fast("asin", elementwise.asin), _fast("acos", elementwise.acos), _fast("atan", elementwise.atan)
    sinh, cosh, tanh = _fast("sinh", elementwise.sinh), _fast("cosh", elementwise.cosh), _fast("tanh", elementwise.tanh)
    sigmoid, relu, erf = _fast("sigmoid", activation.sigmoid), _fast("relu", activation.relu), _fast("erf", elementwise.erf)
    abs, neg, sign = _fast("abs", elementwise.abs), _fast("neg", elementwise.negative), _fast("sgn", elementwise.sign)
    floor, ceil, trunc = _fast("floor", elementwise.floor), _fast("ceil", elementwise.ceil), _fast("trunc", elementwise.trunc)
    reciprocal = _fast("reciprocal", elementwise.reciprocal)
    conj = conjugate = _fast("conj", elementwise.conj)
    softmax, log_softmax = activation.softmax, activation.log_softmax

    add, sub, mul, div = elementwise.add, elementwise.subtract, elementwise.multiply, elementwise.divide
    pow, remainder, fmod, floor_divide = elementwise.pow, elementwise.remainder, elementwise.fmod, elementwise.floor_divide
    maximum, minimum, atan2 = elementwise.maximum, elementwise.minimum, elementwise.atan2
    round, nan_to_num = elementwise.round, elementwise.nan_to_num
    clip = clamp = elementwise.clip
    eq, ne, lt, le, gt, ge = (
        comparison.equal, comparison.not_equal, comparison.less, comparison.less_equal, comparison.greater, comparison.greater_equal,
    )  # fmt: skip
    logical_and, logical_or = comparison.logical_and, comparison.logical_or
    logical_xor, logical_not = comparison.logical_xor, comparison.logical_not
    isfinite, isinf, isnan, isclose, allclose = comparison.isfinite, comparison.isinf, comparison.isnan, comparison.isclose, comparison.allclose

    negative, subtract, multiply, divide = neg, sub, mul, div
    true_divide, absolute, fix = div, abs, trunc
    arccos, arcsin, arctan, arctan2 = acos, asin, atan, atan2
    acosh = arccosh = _fast("acosh", elementwise.acosh)
    asinh = arcsinh = _fast("asinh", elementwise.asinh)
    atanh = arctanh = _fast("atanh", elementwise.atanh)
    erfc, angle, sinc = elementwise.erfc, elementwise.angle, elementwise.sinc
    deg2rad, rad2deg, sgn, positive = elementwise.deg2rad, elementwise.rad2deg, sign, elementwise.positive
    copysign, hypot, nextafter, ldexp = elementwise.copysign, elementwise.hypot, elementwise.nextafter, elementwise.ldexp
    fmax, fmin, frac, heaviside = elementwise.fmax, elementwise.fmin, elementwise.frac, elementwise.heaviside
    gcd, lcm, float_power, signbit = elementwise.gcd, elementwise.lcm, elementwise.float_power, elementwise.signbit
    logaddexp, logaddexp2, xlogy = elementwise.logaddexp, elementwise.logaddexp2, elementwise.xlogy
    clamp_min, clamp_max = method_forms.clamp_min, method_forms.clamp_max
    lgamma, digamma, polygamma = special.gammaln, special.digamma, method_forms.polygamma
    erfinv, i0, logit = special.erfinv, special.i0, special.logit
    lerp, addcmul, addcdiv = blending.lerp, blending.addcmul, blending.addcdiv
    addmm, addmv, addr, baddbmm, addbmm = blending.addmm, blending.addmv, blending.addr, blending.baddbmm, blending.addbmm
    greater, greater_equal, less, less_equal = gt, ge, lt, le
    not_equal, equal = ne, method_forms.equal
    isposinf, isneginf, isreal = comparison.isposinf, comparison.isneginf, comparison.isreal
    bitwise_and, bitwise_or, bitwise_xor = comparison.bitwise_and, comparison.bitwise_or, comparison.bitwise_xor
    bitwise_not = comparison.bitwise_invert

    matmul = mm = bmm = mv = products.matmul
    dot, inner, outer, vdot, kron = products.dot, products.inner, products.outer, products.vdot, products.kron
    norm, trace, dist = method_forms.norm, method_forms.trace, statistics.dist
    det, slogdet, logdet, cholesky = linalg.det, linalg.slogdet, linalg.logdet, linalg.cholesky
    inverse, pinverse, matrix_power, matrix_exp = linalg.inv, linalg.pinv, linalg.matrix_power, linalg.expm
    qr, svd, cross = linalg.qr, linalg.svd, linalg.cross

    sum, prod, mean, median, logsumexp = reduction.sum, reduction.prod, reduction.mean, reduction.median, reduction.logsumexp
    var, std = reduction.var, reduction.std
    max = amax = reduction.max
    min = amin = reduction.min
    all, any, count_nonzero = reduction.all, reduction.any, reduction.count_nonzero
    cumsum, cumprod, diff = reduction.cumsum, reduction.cumprod, reduction.diff
    nansum, nanmean, nanmedian = statistics.nansum, statistics.nanmean, statistics.nanmedian
    quantile, nanquantile, aminmax = statistics.quantile, statistics.nanquantile, statistics.aminmax
    cov, corrcoef, bincount, histc = statistics.cov, statistics.corrcoef, statistics.bincount, statistics.histc

    reshape = view = method_forms.reshape
    ravel, flatten, unflatten = method_forms.ravel, manipulation.flatten, joining.unflatten
    view_as, reshape_as, sum_to_size = method_forms.view_as, method_forms.reshape_as, method_forms.sum_to_size
    transpose, permute, t = method_forms.transpose, method_forms.permute, method_forms.t
    swapaxes = swapdims = manipulation.swapaxes
    moveaxis = movedim = manipulation.moveaxis
    squeeze, unsqueeze = manipulation.squeeze, manipulation.expand_dims
    expand, expand_as, broadcast_to = method_forms.expand, method_forms.expand_as, manipulation.broadcast_to
    flip, roll, tile = method_forms.flip, manipulation.roll, method_forms.tile
    fliplr, flipud, rot90 = joining.fliplr, joining.flipud, joining.rot90
    repeat = repeat_interleave = manipulation.repeat
    split, chunk, unbind, narrow = manipulation.split, joining.chunk, manipulation.unstack, joining.narrow
    hsplit, vsplit, dsplit, tensor_split = joining.hsplit, joining.vsplit, joining.dsplit, joining.tensor_split
    select, unfold = method_forms.select, joining.unfold
    diagonal, diag, diag_embed, diagflat = method_forms.diagonal, creation.diag, joining.diag_embed, joining.diagflat
    tril, triu = creation.tril, creation.triu
    clone = copy = manipulation.clone
    resolve_conj, contiguous = positive, method_forms.contiguous

    argmax, argmin, sort, argsort, topk = searching.argmax, searching.argmin, searching.sort, searching.argsort, searching.topk
    msort, kthvalue, unique = searching.msort, searching.kthvalue, searching.unique
    nonzero, argwhere, where = searching.nonzero, searching.argwhere, method_forms.where
    masked_fill, masked_select = method_forms.masked_fill, searching.masked_select
    take, index_select, take_along_axis, gather = method_forms.take, method_forms.index_select, searching.take_along_axis, scattering.gather
    take_along_dim, searchsorted = searching.take_along_dim, searching.searchsorted
    scatter, scatter_add, scatter_reduce = scattering.scatter, scattering.scatter_add, scattering.scatter_reduce
    index_add = method_forms.index_add
    cummax, cummin, logcumsumexp = scattering.cummax, scattering.cummin, scattering.logcumsumexp
    index_copy, index_fill = searching.index_copy, searching.index_fill

    numel = nelement = method_forms.numel
    dim = ndimension = method_forms.dim
    element_size, is_same_size, is_contiguous = method_forms.element_size, method_forms.is_same_size, method_forms.is_contiguous
    is_floating_point, is_complex = method_forms.is_floating_point, method_forms.is_complex
    new_tensor, new_zeros, new_ones = method_forms.new_tensor, method_forms.new_zeros, method_forms.new_ones
    new_empty, new_full = method_forms.new_empty, method_forms.new_full
    cuda, type, type_as = method_forms.cuda, method_forms.type_of, method_forms.type_as

    # in place
    abs_, neg_, sign_, reciprocal_, square_ = _in_place(abs), _in_place(neg), _in_place(sign), _in_place(reciprocal), _in_place(square)
    exp_, exp2_, expm1_, log_, log1p_ = _in_place(exp), _in_place(exp2), _in_place(expm1), _in_place(log), _in_place(log1p)
    log2_, log10_, sqrt_, rsqrt_ = _in_place(log2), _in_place(log10), _in_place(sqrt), _in_place(rsqrt)
    sin_, cos_, tan_, asin_, acos_, atan_ = _in_place(sin), _in_place(cos), _in_place(tan), _in_place(asin), _in_place(acos), _in_place(atan)
    sinh_, cosh_, tanh_ = _in_place(sinh), _in_place(cosh), _in_place(tanh)
    sigmoid_, relu_, erf_, erfc_, erfinv_ = _in_place(sigmoid), _in_place(relu), _in_place(erf), _in_place(erfc), _in_place(erfinv)
    floor_, ceil_, trunc_, round_, frac_ = _in_place(floor), _in_place(ceil), _in_place(trunc), _in_place(round), _in_place(frac)
    lgamma_, digamma_, logit_ = _in_place(lgamma), _in_place(digamma), _in_place(logit)
    pow_, remainder_, fmod_, floor_divide_ = _in_place(pow), _in_place(remainder), _in_place(fmod), _in_place(floor_divide)
    clamp_ = clip_ = _in_place(clip)
    clamp_min_, clamp_max_ = _in_place(clamp_min), _in_place(clamp_max)
    lerp_, addcmul_, addcdiv_ = _in_place(lerp), _in_place(addcmul), _in_place(addcdiv)
    addmm_, addmv_, addr_, baddbmm_ = _in_place(addmm), _in_place(addmv), _in_place(addr), _in_place(baddbmm)
    nan_to_num_, tril_, triu_ = _in_place(nan_to_num), _in_place(tril), _in_place(triu)
    cumsum_, cumprod_ = _in_place(cumsum), _in_place(cumprod)
    masked_fill_, fill_diagonal_ = _in_place(masked_fill), _in_place(method_forms.diagonal_filled)
    index_add_, index_copy_, index_fill_ = _in_place(index_add), _in_place(index_copy), _in_place(index_fill)
    scatter_, scatter_add_ = _in_place(scatter), _in_place(scatter_add)
    uniform_, normal_, exponential_ = _in_place(method_forms.uniform), _in_place(method_forms.normal), _in_place(method_forms.exponential)
    bernoulli_, random_ = _in_place(method_forms.bernoulli_filled), _in_place(method_forms.random)

    half, float, double = _cast("float16"), _cast("float32"), _cast("float64")
    int, long, short, bool = _cast("int32"), _cast("int64"), _cast("int16"), _cast("bool")
    byte, char = _cast("uint8"), _cast("int8")


for _name, _method in list(vars(TensorMethods).items()):
    if not _name.startswith("_"):
        _method = with_other_names(_method)
        setattr(TensorMethods, _name, _method)
        setattr(Tensor, _name, _method)
