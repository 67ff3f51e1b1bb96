"""Args, Returns and Raises of the array functions, from tables: facts that many functions share stand here once.

A function's own docstring is one line about its result. `document` appends the sections: the parameters by name from `PARAMETERS` (or as
``function.parameter`` where a parameter means something else), the result from `RETURNS`, and the errors that follow from the parameters.
A parameter or a result without an entry is left out, which ``tests/test_reference.py`` finds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType

from aiograd.array_functions.parameter_texts import PARAMETERS

_ONE = "A Tensor of the shape of `x`; its dtype is that of numpy's function."
_TWO = "A Tensor of the shape that the arguments broadcast to; its dtype is numpy's promotion of theirs."
_BOOL_ONE, _BOOL_TWO = "A bool Tensor of the shape of `x`.", "A bool Tensor of the shape that the arguments broadcast to."

#: the result, by function; functions that share one have a common entry
RETURNS: Mapping[str, str] = {
    name: text
    for names, text in {
        "sum prod mean var std max min median logsumexp all any count_nonzero norm vector_norm": "A Tensor without the axes, or with extent 1 there "
        "if `keepdims`.",
        "cumulative_sum cumulative_prod": "A Tensor of the shape of `x`, longer by one along the axis with `include_initial`.",
        "cumsum cumprod": "A Tensor of the shape of `x`; a vector if `axis` is None.",
        "var_mean std_mean": "Two Tensors, as of `var` and `mean`.",
        "cartesian_prod": "A matrix, with as many columns as there are vectors.",
        "diff": "A Tensor, shorter by `n` along the axis than `x` with what is prepended and appended.",
        "where": "A Tensor of the shape that all broadcast to; with the condition alone a tuple of index Tensors.",
        "method_forms.where": "A Tensor of the shape that all broadcast to.",
        "nonzero": "int64 vectors, one for each axis of `x`.",
        "argmax argmin": "int64 indices, without the axis or with extent 1 there if `keepdims`.",
        "searchsorted": "int64 positions, of the shape of `x2`.",
        "isin": "A bool Tensor of the shape of `x`.",
        "take index_select": "A Tensor of the shape of `x` with the extent of `indices` along the axis.",
        "take_along_axis take_along_dim gather": "A Tensor of the shape of `indices`.",
        "scatter scatter_add index_add masked_fill clone round_ contiguous": "A Tensor of the shape and dtype of `x`.",
        "sort softmax log_softmax clip round nan_to_num tril triu flip roll": "A Tensor of the shape of `x`.",
        "argsort": "int64 indices of the shape of `x`.",
        "topk": "Values and int64 indices, with extent `k` along the axis.",
        "unique_all": "``values, indices, inverse_indices, counts``: a named tuple of Tensors.",
        "unique_counts": "``values, counts``: a named tuple of Tensors.",
        "unique_inverse": "``values, inverse_indices``: a named tuple of Tensors.",
        "unique_values": "A vector.",
        "reshape view_as unflatten ravel flatten": "A Tensor with the same elements in row-major order, a view where possible.",
        "permute_dims permute transpose swapaxes matrix_transpose moveaxis squeeze expand_dims": "A view with the axes rearranged.",
        "broadcast_to expand expand_as": "A view of the wanted shape.",
        "broadcast_arrays": "A list of Tensors of one shape.",
        "broadcast_shapes": "A tuple of ints.",
        "concat stack": "A Tensor; its dtype is numpy's promotion of theirs.",
        "unstack unbind": "A tuple of views, one for each slice.",
        "split chunk": "A tuple of views.",
        "narrow": "A view.",
        "tile repeat pad": "A larger Tensor of the dtype of `x`.",
        "diagonal": "(..., length of the diagonal).",
        "matmul": "(..., M, N); a vector or a scalar where an argument is a vector.",
        "tensordot": "The axes of `x1` that are left, then those of `x2`.",
        "vecdot": "A Tensor without the axis, of the shape that the rest broadcasts to.",
        "einsum": "A Tensor with the axes behind ``->``, or those that occur once in alphabetical order.",
        "dot inner": "The axes of `x1` and `x2` but for those that are summed over.",
        "outer": "(M, N).",
        "kron": "A Tensor whose extents are the products of those of the arguments.",
        "trace": "(...).",
        "zeros ones full empty arange linspace eye": "A new Tensor.",
        "zeros_like ones_like full_like empty_like": "A new Tensor of the shape of `x`.",
        "meshgrid": "A list of Tensors, one for each vector.",
        "diag": "A matrix of a vector, a vector of a matrix.",
        "astype": "A Tensor of the dtype.",
        "can_cast isdtype allclose array_equal": "A bool.",
        "finfo iinfo": "``np.finfo`` or ``np.iinfo``.",
        "result_type": "A dtype.",
        "cholesky": "The factor, (..., N, N).",
        "det": "(...).",
        "eigh": "``eigenvalues`` (..., N) and ``eigenvectors`` (..., N, N), in columns.",
        "eigvalsh": "(..., N).",
        "inv matrix_power": "(..., N, N).",
        "matrix_norm": "(...), or (..., 1, 1) if `keepdims`.",
        "multi_dot": "The product.",
        "matrix_rank": "int64, (...).",
        "pinv": "(..., N, M).",
        "qr": "``Q`` (..., M, K) and ``R`` (..., K, N), with K the smaller of M and N, or M if complete.",
        "slogdet": "``sign`` and ``logabsdet``, (...).",
        "solve": "A Tensor of the shape of `x2`.",
        "svd": "``U``, ``S`` (..., K) and ``Vh``, with K the smaller of M and N.",
        "svdvals": "(..., K), with K the smaller of M and N.",
        "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift": "A Tensor of the shape that the arguments broadcast to, "
        "of their dtype.",
        "bitwise_invert": "A Tensor of the shape and dtype of `x`.",
        "cross": "A Tensor of the shape that the arguments broadcast to; its dtype is numpy's promotion of theirs.",
        "numel dim element_size": "An int.",
        "equal": "A bool.",
        "comparison.equal": _BOOL_TWO,
        "is_same_size is_contiguous is_floating_point is_complex is_tensor": "True or False.",
        "vdot dist": "A scalar.",
        "nansum nanmean nanmedian": "A Tensor without the axes, or with extent 1 there if `keepdims`.",
        "quantile nanquantile percentile": "A Tensor without the axes, or with extent 1 there if `keepdims`, and one axis in front for several `q`.",
        "aminmax": "``min, max``: a named tuple of Tensors.",
        "cov corrcoef": "(variables, variables), a scalar for one variable.",
        "bincount": "A vector of int64, or of the dtype of the weights.",
        "histc": "A vector of `bins` numbers.",
        "reshape_as": "A Tensor with the same elements, a view where possible.",
        "sum_to_size": "A Tensor of the shape.",
        "t fliplr flipud rot90 rollaxis": "A view.",
        "hsplit vsplit dsplit tensor_split": "A tuple of views.",
        "method_forms.select": "A view without the axis.",
        "joining.select": "A Tensor of the shape that all broadcast to.",
        "unfold": "A view with an axis of `size` more.",
        "sliding_window_view": "A view with the axes of the windows at the end.",
        "diag_embed": "A Tensor with one axis more.",
        "diagflat block_diag": "A matrix.",
        "msort partition": "A Tensor of the shape of `x`.",
        "kthvalue": "Values and int64 indices, without the axis or with extent 1 there if `keepdims`.",
        "unique": "A vector, or a tuple of it and what was asked for.",
        "argwhere": "int64, (elements, axes).",
        "masked_select": "A vector.",
        "scatter_reduce index_copy index_fill diagonal_filled uniform normal exponential bernoulli_filled random "
        "normal_filled uniform_filled exponential_filled random_filled": "A Tensor of the shape and dtype of `x`.",
        "cummax cummin": "Values and int64 indices, of the shape of `x`.",
        "logcumsumexp clamp_min clamp_max": "A Tensor of the shape of `x`.",
        "new_tensor new_zeros new_ones new_empty new_full": "A new Tensor.",
        "cuda type_as": "A Tensor; the tensor itself where nothing changes.",
        "type_of": "A Tensor, or a dtype.",
        "append hstack vstack dstack column_stack": "A Tensor; its dtype is numpy's promotion of theirs.",
        "atleast_1d atleast_2d atleast_3d": "A view, or the same Tensor where it has enough axes.",
        "bernoulli normal rand randn randint randperm logspace": "A new Tensor.",
        "rand_like randn_like randint_like": "A new Tensor of the shape of `x`.",
        "polygamma": _ONE,
        "scatter": "A Tensor of the shape and dtype of `x`.",
        "bucketize": "int64 numbers of the shape of `x`.",
        "cdist": "(..., M, N).",
        "complex polar": "A complex Tensor of the shape that the arguments broadcast to.",
        "convolve correlate": "A vector.",
        "trapezoid": "A Tensor without the axis.",
        "cumulative_trapezoid": "A Tensor, shorter by one along the axis.",
        "gradient": "A Tensor of the shape of `x` for one axis, a tuple of them for several.",
        "interp": "A Tensor of the shape of `x`.",
        "cholesky_solve solve_triangular": "The solution, of the shape of the right-hand side.",
        "cond logdet": "(...).",
        "eig": "``eigenvalues`` (..., N) and ``eigenvectors`` (..., N, N), in columns.",
        "eigvals": "(..., N).",
        "expm": "(..., N, N).",
        "fft ifft fft2 ifft2 fftn ifftn rfft rfft2 rfftn ihfft": "A complex Tensor.",
        "hfft irfft irfft2 irfftn": "A real Tensor.",
        "fftfreq rfftfreq": "A vector.",
        "fftshift ifftshift": "A Tensor of the shape of `x`.",
        "lstsq": "The solution, residuals, rank and singular values: a named tuple of Tensors.",
    }.items()
    for name in names.split()
}

#: functions that raise ShapeError: the shapes of their arrays may not fit each other or the other arguments
_SHAPED = frozenset(
    "matmul tensordot vecdot dot inner einsum outer kron concat stack reshape unflatten view_as expand expand_as broadcast_to broadcast_arrays "
    "broadcast_shapes permute_dims permute transpose matrix_transpose squeeze where diagonal trace cholesky cross det eigh eigvalsh inv matrix_norm "
    "matrix_power pinv qr slogdet solve svd svdvals nonzero max min tile repeat isclose allclose scatter scatter_add index_add multi_dot "
    "masked_fill masked_select sum_to_size t".split()
)
_INDEXED = frozenset("take take_along_axis take_along_dim gather scatter scatter_add index_add index_select narrow".split())
#: matrices for which there is no result
_SINGULAR = frozenset("cholesky inv solve matrix_power eigh eigvalsh svd svdvals pinv".split())
_COMPLAINS: Mapping[str, str] = {
    "divide": "ArgumentError: another `rounding_mode`.",
    "histc normal randint polygamma bernoulli scatter_reduce block_diag select": "ArgumentError: numbers, names or lengths that make no sense.",
    "linspace arange zeros ones full empty eye": "ArgumentError: a shape, number or step that makes no sense.",
    "split chunk": "ArgumentError: the axis does not divide into so many parts.",
    "transpose": "ArgumentError: one axis alone.",
    "take where": "ArgumentError: an argument is left out that is needed here.",
    "topk": "ArgumentError: `k` is more than the extent of the axis.",
    "gelu": "ArgumentError: another `approximate`.",
    "concat stack multi_dot hstack vstack dstack column_stack": "ArgumentError: too few arrays.",
    "argmax argmin": "ArgumentError: there are no elements.",
    "pad": "ArgumentError: a `pad_width` below 0 or another mode.",
    "diff": "ArgumentError: `n` is below 0.",
    "diag": "ArgumentError: neither a vector nor a matrix.",
    "cumulative_sum cumulative_prod": "ArgumentError: no axis for an array of several.",
    "searchsorted": "ArgumentError: another `side`, or a `sorter` that is no vector of integers.",
    "isdtype": "ArgumentError: another kind.",
    "finfo iinfo": "ArgumentTypeError: a dtype of another kind.",
    "bincount": "ArgumentError: no vector of integers from 0 on. ShapeError: not one weight for each.",
    "matrix_norm norm vector_norm": "ArgumentError: another `ord`.",
    "qr": "NoRuleError: another `mode`.",
    "reshape": "ArgumentError: a copy is needed and `copy` is False.",
    "einsum": "ArgumentError: subscripts that do not fit the operands.",
}
_COMPLAINTS = {name: text for names, text in _COMPLAINS.items() for name in names.split()}


def document(*modules: ModuleType) -> None:
    """Append the sections to the docstrings of a module's public functions that have none."""
    for module in modules:
        for name, function in vars(module).items():
            if isinstance(function, FunctionType) and function.__module__ == module.__name__ and not name.startswith("_"):
                text = function.__doc__
                if text is not None and "Args:" not in text and "Returns:" not in text:
                    function.__doc__ = "\n".join([_dedented(text).rstrip(), *_sections(module.__name__.rpartition(".")[2], function)])


def _dedented(text: str) -> str:
    """A docstring of a function of a module without the indentation of the source, which Python before 3.13 leaves in it."""
    return text if sys.version_info >= (3, 13) else text.replace("\n    ", "\n")


def _sections(family: str, function: FunctionType) -> Iterator[str]:
    name, code = function.__name__, function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    parameters = [*code.co_varnames[:count]]
    if code.co_flags & 0x04:  # *args
        parameters.insert(code.co_argcount, code.co_varnames[count])
    known = [(each, text) for each in parameters if (text := PARAMETERS.get(f"{name}.{each}", PARAMETERS.get(each)))]
    if family == "method_forms" and known:
        known[0] = known[0][0], "the tensor"
    if known:
        yield "\nArgs:"
        yield from (f"    {each}: {text}." for each, text in known)
    if returned := RETURNS.get(f"{family}.{name}", RETURNS.get(name)) or _by_family(family, parameters):
        yield f"\nReturns:\n    {returned}"
    if "Raises:" not in (function.__doc__ or "") and (raised := list(_errors(name, parameters))):
        yield "\nRaises:"
        yield from (f"    {line}" for line in raised)


def _by_family(family: str, parameters: list[str]) -> str:
    """The result of functions that work element by element."""
    if family == "blending":
        return _TWO
    if family not in ("elementwise", "comparison", "activation", "special"):
        return ""
    one, two = (_BOOL_ONE, _BOOL_TWO) if family == "comparison" else (_ONE, _TWO)
    return two if "x2" in parameters else one


def _errors(name: str, parameters: list[str]) -> Iterator[str]:
    if {"x", "x1", "arrays", "operands"} & {*parameters} or name == "bernoulli":
        yield "ArgumentTypeError: an argument is no Tensor, array or number, or has a dtype that the function does not take."
    if name in _SHAPED or ("x2" in parameters and "side" not in parameters):
        yield "ShapeError: shapes that do not fit."
    if name in _INDEXED or ({"axis", "axis1", "source", "axes", "start"} & {*parameters} and name not in ("arange", "linspace")):
        yield "IndexRangeError: an axis or index that is not there."
    if name in _COMPLAINTS:
        yield _COMPLAINTS[name]
    if name in _SINGULAR:
        yield "LinearAlgebraError: a matrix for which there is no result, such as a singular one."
