"""Args, Returns and Raises of the array functions, from tables: facts that many functions share stand here once.

A function's own docstring says in a line what it computes. `document` appends the sections: its parameters are looked up by name in `PARAMETERS`
(or as ``function.parameter``, where one means something else), its result in `RETURNS`, and its errors follow from what it takes.
A parameter or a result without an entry is left out, which ``tests/test_reference.py`` finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType

#: text by parameter, or by ``function.parameter``
PARAMETERS: Mapping[str, str] = {
    "x": "a Tensor, array, number or nested list of numbers",
    "x1": "a Tensor, array, number or nested list of numbers",
    "x2": "the same, of a shape that broadcasts with that of `x1`",
    "axis": "the axis, or a sequence of axes; negative ones count from the end. None: all axes",
    "keepdims": "keep the reduced axes, with extent 1",
    "dtype": "the dtype of the result; None: chosen by the values or the default dtype",
    "device": "the device of the result, such as ``'cpu'`` or ``'cuda:0'``; None: that of the arguments, or the host",
    "requires_grad": "make it a leaf whose gradients accumulate in ``.grad``",
    "shape": "the extents, an int or a sequence of ints",
    "decimals": "digits behind the point; negative ones round before it",
    "arrays": "Tensors or arrays",
    "k": "the diagonal: 0 the main one, above it positive, below it negative",
    "offset": "the diagonal: 0 the main one, above it positive, below it negative",
    "copy": "True: always copy; False: never, an error where a copy is needed; None: only where needed",
    "axes": "the axes, in the order wanted",
    "correction": "subtracted from the number of elements: 0 as numpy's default, 1 as PyTorch's",
    "rtol": "relative tolerance",
    "atol": "absolute tolerance",
    "equal_nan": "NaN equals NaN",
    "indices": "integers; negative ones count from the end",
    "value": "the values, of a shape that broadcasts to that of `indices`",
    "descending": "the largest first",
    "stable": "equal elements keep their order",
    "approximate": '"none" for the exact function, "tanh" for the usual approximation',
    "alpha": "the limit for large negative elements is ``-alpha``",
    "negative_slope": "the factor of negative elements",
    "beta": "sharpness of the bend at 0",
    "nan": "put in place of NaN",
    "posinf": "put in place of infinity; None: the largest number of the dtype",
    "neginf": "put in place of minus infinity; None: the smallest number of the dtype",
    "min": "lower limits, a number or an array that broadcasts; None: none",
    "max": "upper limits, a number or an array that broadcasts; None: none",
    "fill_value": "the number",
    "ord": "the order of the norm",
    "n": "how often",
    "axis1": "the first axis",
    "axis2": "the second axis",
    "include_initial": "begin with the sum (0) or product (1) of no elements",
    "other": "the other operand",
    "mode": "the kind",
    # those that mean something else in one function
    "softmax.axis": "the axis along which the results add up to 1",
    "log_softmax.axis": "the axis along which the probabilities add up to 1",
    "full.dtype": "the dtype; None: that of `fill_value`, floating numbers in the default dtype",
    "arange.dtype": "the dtype; None: int64 where all arguments are integers, else the default dtype",
    "zeros_like.dtype": "the dtype; None: that of `x`",
    "ones_like.dtype": "the dtype; None: that of `x`",
    "full_like.dtype": "the dtype; None: that of `x`",
    "empty_like.dtype": "the dtype; None: that of `x`",
    "arange.start": "the first number, or the end where `stop` is left out",
    "arange.stop": "the end, not included",
    "arange.step": "the difference of neighbours, not 0",
    "linspace.start": "the first number",
    "linspace.stop": "the last number",
    "linspace.num": "how many, at least 0",
    "linspace.endpoint": "include `stop`",
    "eye.n_rows": "rows",
    "eye.n_cols": "columns; None: as many as rows",
    "meshgrid.arrays": "vectors",
    "meshgrid.indexing": '"xy" exchanges the first two axes of the grids, "ij" keeps the order of the vectors',
    "diag.x": "a vector or a matrix",
    "tril.x": "(..., M, N)",
    "triu.x": "(..., M, N)",
    "sum.dtype": "the dtype to add up in; None: that of `x`, small integers in int64",
    "prod.dtype": "the dtype to multiply in; None: that of `x`, small integers in int64",
    "trace.dtype": "the dtype to add up in; None: that of `x`",
    "cumulative_sum.axis": "the axis; may be left out for vectors",
    "cumulative_prod.axis": "the axis; may be left out for vectors",
    "cumsum.axis": "the axis; None: the flattened array",
    "cumprod.axis": "the axis; None: the flattened array",
    "diff.axis": "the axis",
    "diff.prepend": "values before the first, of a shape that fits along the other axes",
    "diff.append": "values behind the last, of a shape that fits along the other axes",
    "where.condition": "true where elements of `x1` are taken",
    "where.x1": "taken where the condition holds; broadcasts",
    "where.x2": "taken elsewhere; broadcasts",
    "where.x": "taken where the condition does not hold; broadcasts",
    "argmax.axis": "the axis; None: an index into the flattened array",
    "argmin.axis": "the axis; None: an index into the flattened array",
    "searchsorted.x1": "a sorted vector",
    "searchsorted.x2": "values of any shape",
    "searchsorted.side": '"left": before equal elements, "right": behind them',
    "searchsorted.sorter": "indices that sort `x1`; None: it is sorted",
    "isin.elements": "the values looked for",
    "isin.invert": "True where an element is not among them",
    "take.axis": "the axis; may be left out for vectors",
    "take_along_axis.axis": "the axis",
    "take_along_axis.indices": "integers, with the number of axes of `x`; the other axes broadcast",
    "gather.axis": "the axis",
    "gather.indices": "integers, with the number of axes of `x`",
    "scatter.axis": "the axis",
    "scatter.indices": "integers, with the number of axes of `x`",
    "scatter_add.axis": "the axis",
    "scatter_add.indices": "integers, with the number of axes of `x`",
    "index_add.axis": "the axis",
    "index_add.indices": "a vector of integers",
    "index_add.value": "as many slices along the axis as there are indices",
    "index": "integers; negative ones count from the end",
    "index_select.axis": "the axis",
    "source": "the values, of a shape that broadcasts to that of `index`",
    "index_add.source": "as many slices along the axis as there are indices",
    "sort.axis": "the axis",
    "argsort.axis": "the axis",
    "topk.k": "how many, at most the extent of the axis",
    "topk.axis": "the axis",
    "topk.largest": "False: the smallest",
    "unstack.axis": "the axis",
    "reshape.shape": "the new extents; one may be -1, which is then computed",
    "flatten.start": "the first axis to join",
    "flatten.end": "the last axis to join",
    "transpose.axes": "the axes, in the order wanted; None: reversed",
    "moveaxis.source": "the axes to move, by their places now",
    "moveaxis.destination": "their places afterwards",
    "squeeze.axis": "axes of extent 1; None: all of them",
    "expand_dims.axis": "places of the new axes in the result",
    "broadcast_to.shape": "the shape; the extents of `x` fit its last ones or are 1",
    "broadcast_shapes.shapes": "shapes, as sequences of ints",
    "flip.axis": "the axes; None: all",
    "roll.shift": "by how many places, one number or one for each axis",
    "roll.axis": "the axes; None: the flattened array, put back into its shape",
    "concat.arrays": "Tensors or arrays, at least one, of equal shapes but for the axis",
    "concat.axis": "the axis; None: all are flattened first",
    "stack.arrays": "Tensors or arrays, at least one, of equal shapes",
    "stack.axis": "place of the new axis in the result",
    "split.sections": "how many equal parts, or a sequence of the positions to cut at",
    "split.axis": "the axis",
    "tile.repetitions": "how often along each of the last axes",
    "repeat.repeats": "how often each element, one number or one for each along the axis",
    "repeat.axis": "the axis; None: the flattened array",
    "pad.pad_width": "one number for every side, (before, after) for every axis, or such a pair for each axis",
    "pad.mode": '"constant", "reflect", "edge" and so on, as in ``np.pad``',
    "pad.value": 'the border of "constant"',
    "diagonal.x": "(..., M, N)",
    "diagonal.axis1": "first axis of the planes",
    "diagonal.axis2": "second axis of the planes",
    "matrix_transpose.x": "(..., M, N)",
    "matmul.x1": "(..., M, K), or (K,)",
    "matmul.x2": "(..., K, N), or (K,)",
    "tensordot.x2": "a Tensor or array",
    "tensordot.axes": "how many axes at the end of `x1` and start of `x2`, or two sequences of axes",
    "vecdot.axis": "the axis, counted from the end: -1 is the last",
    "einsum.subscripts": "the axes of each operand and of the result as letters; ``...`` stands for leading axes",
    "einsum.operands": "one for each term of `subscripts`",
    "dot.x2": "a Tensor or array whose second last axis (or only one) has the extent of the last of `x1`",
    "inner.x2": "a Tensor or array with the same extent of the last axis",
    "outer.x1": "(M,)",
    "outer.x2": "(N,)",
    "kron.x2": "a Tensor or array",
    "trace.x": "(..., M, N)",
    "astype.dtype": "the dtype",
    "astype.copy": "False: `x` itself where nothing changes",
    "can_cast.from_": "a dtype, or a Tensor for its dtype",
    "can_cast.to": "a dtype",
    "finfo.type": "a floating dtype, or a Tensor for its dtype",
    "iinfo.type": "an integer dtype, or a Tensor for its dtype",
    "isdtype.dtype": "the dtype",
    "isdtype.kind": "a dtype, a tuple of kinds, or one of the standard's names: bool, signed integer, unsigned integer, integral, real floating, "
    "complex floating, numeric",
    "result_type.arrays_and_dtypes": "Tensors, arrays, dtypes",
    # linear algebra
    "cholesky.x": "(..., N, N), symmetric or Hermitian and positive definite; only the lower triangle is read",
    "cholesky.upper": "return the upper factor",
    "cross.axis": "the axis of length 3",
    "det.x": "(..., N, N)",
    "eigh.x": "(..., N, N), symmetric or Hermitian; only the lower triangle is read",
    "eigvalsh.x": "(..., N, N), symmetric or Hermitian; only the lower triangle is read",
    "inv.x": "(..., N, N)",
    "matrix_norm.x": "(..., M, N)",
    "matrix_norm.ord": '"fro", "nuc", 1, -1, 2, -2, inf or -inf',
    "matrix_power.x": "(..., N, N)",
    "matrix_power.n": "the power",
    "multi_dot.arrays": "at least two matrices; the first and the last may be vectors",
    "norm.ord": "as of ``np.linalg.norm``; None: the root of the sum of squares",
    "norm.axis": "one axis: norms of vectors; two: norms of matrices; None: of all elements",
    "pinv.x": "(..., M, N)",
    "pinv.rtol": "singular values below this part of the largest count as 0; None: max(M, N) times the precision of the dtype",
    "qr.x": "(..., M, N)",
    "qr.mode": '"reduced" or "complete"',
    "slogdet.x": "(..., N, N)",
    "solve.x1": "(..., N, N)",
    "solve.x2": "(N,) or (..., N, K)",
    "svd.x": "(..., M, N)",
    "svd.full_matrices": "U and Vh are square; else (..., M, K) and (..., K, N) with K the smaller of M and N",
    "svdvals.x": "(..., M, N)",
    "vector_norm.axis": "the axes of the vectors; None: all elements are one vector",
    "vector_norm.ord": "0 counts what is not 0, inf and -inf are the extrema of magnitudes, p the p-norm",
    # what only methods have
    "unflatten.axis": "the axis to split",
    "unflatten.sizes": "its new extents; one may be -1",
    "permute.axes": "the axes, as ints or as one tuple",
    "expand.shape": "the extents, as ints or as one tuple; -1 keeps one",
    "view_as.other": "the tensor with the shape",
    "expand_as.other": "the tensor with the shape",
    "narrow.axis": "the axis",
    "narrow.start": "the first slice",
    "narrow.length": "how many slices",
    "chunk.chunks": "how many parts at most",
    "chunk.axis": "the axis",
    "masked_fill.mask": "true where the value goes; broadcasts",
    "masked_fill.value": "a number",
    # beyond the standard
    "generator": "where the numbers come from; None: the default generator of the running task",
    "end": "the value at weight 1",
    "weight": "how much of `end`",
    "first": "the first factor",
    "second": "the second factor, or the divisor",
    "sections": "how many parts, or a sequence of the positions to cut at",
    "q": "numbers between 0 and 1, of any shape",
    "method": "between two neighbours: \"linear\", \"lower\", \"higher\", \"midpoint\" or \"nearest\"",
    "fweights": "how often each observation counts, integers",
    "aweights": "the weight of each observation",
    "weights": "of each element; None: 1",
    "minlength": "the least length of the result",
    "bins": "how many intervals",
    "y": "the values",
    "dx": "the distance of neighbours where no points are given",
    "xp": "the abscissae of the points, a vector that ascends",
    "fp": "the ordinates of the points",
    "left": "the value below the first point; None: that of the first point",
    "right": "the value above the last point; None: that of the last point",
    "period": "the period of `x`; None: not periodic",
    "spacing": "the distance of neighbours or their coordinates, one for all axes or one for each",
    "edge_order": "order of the differences at the ends, 1 or 2",
    "values": "appended; the extents fit but for the axis",
    "matrices": "matrices or vectors",
    "conditions": "bool arrays, the first that holds decides",
    "choices": "as many arrays",
    "default": "taken where no condition holds",
    "window_shape": "the extent of the windows along each axis",
    "size": "elements of a window",
    "step": "elements between the starts of neighbouring windows",
    "kth": "the place, or several",
    "boundaries": "a vector that ascends",
    "low": "the least number",
    "high": "the end of the interval, not included",
    "mean": "of the distribution",
    "std": "of the distribution, at least 0",
    "p": "a probability, or one for each element",
    "lambd": "one over the mean",
    "real": "real parts",
    "imag": "imaginary parts",
    "angle": "in radians",
    "eps": "the distance that is kept from 0 and 1; None: none",
    "mask": "true where elements are taken; broadcasts",
    "data": "anything that `tensor` takes",
    "unitriangular": "the diagonal counts as ones",
    "upper": "the upper triangle is meant",
    "rcond": "singular values below this part of the largest count as 0; None: max(M, N) times the precision of the dtype",
    "start": "the place",
    "base": "the base of the powers",
    "rounding_mode": 'None, "floor" or "trunc"',
    "return_inverse": "return as well which distinct element each one is",
    "return_counts": "return as well how often each occurs",
    "sizes": "the new extents; one may be -1",
    "src": "the values, of a shape that covers that of `index`",
    "arguments": "the axis, the index and the values",
    "polar.size": "magnitudes",
    "percentile.q": "numbers between 0 and 100, of any shape",
    "add.alpha": "the factor of `x2`",
    "subtract.alpha": "the factor of `x2`",
    "addmm.alpha": "the factor of the product",
    "addmm.beta": "the factor of `x`",
    "addr.alpha": "the factor of the product",
    "addr.beta": "the factor of `x`",
    "addbmm.alpha": "the factor of the product",
    "addbmm.beta": "the factor of `x`",
    "addcmul.value": "the factor of the product",
    "addcdiv.value": "the factor of the quotient",
    "diagonal_filled.value": "the number",
    "histc.min": "the lower end of the first interval",
    "histc.max": "the upper end of the last interval",
    "rot90.k": "how often",
    "rot90.axes": "the plane",
    "rollaxis.axis": "the axis to move",
    "polygamma.n": "the order of the derivative",
    "randperm.n": "how many",
    "randint.low": "the least number, or the end where `high` is left out",
    "logspace.start": "the first exponent",
    "logspace.stop": "the last exponent",
    "logspace.num": "how many, at least 0",
    "bucketize.right": "an end belongs to the interval above it",
    "append.axis": "the axis; None: both are flattened",
    "cuda.device": "the number of the device",
    "select.axis": "the axis",
    "select.index": "the place of the slice",
    "diag_embed.axis1": "place of the rows in the result",
    "diag_embed.axis2": "place of the columns in the result",
    "kthvalue.k": "which, counted from 1",
    "equal.other": "a Tensor or array",
}

#: the result, by function; functions that share one have a common entry
RETURNS: Mapping[str, str] = {
    name: text
    for names, text in {
        "sum prod mean var std max min median logsumexp all any count_nonzero norm vector_norm": "A Tensor without the axes, or with extent 1 there "
        "if `keepdims`.",
        "cumulative_sum cumulative_prod": "A Tensor of the shape of `x`, longer by one along the axis with `include_initial`.",
        "cumsum cumprod": "A Tensor of the shape of `x`; a vector if `axis` is None.",
        "diff": "A Tensor, shorter by `n` along the axis than `x` with what is prepended and appended.",
        "where": "A Tensor of the shape that all broadcast to; with the condition alone a tuple of index Tensors.",
        "method_forms.where": "A Tensor of the shape that all broadcast to.",
        "nonzero": "int64 vectors, one for each axis of `x`.",
        "argmax argmin": "int64 indices, without the axis or with extent 1 there if `keepdims`.",
        "searchsorted": "int64 positions, of the shape of `x2`.",
        "isin": "A bool Tensor of the shape of `x`.",
        "take index_select": "A Tensor of the shape of `x` with the extent of `indices` along the axis.",
        "take_along_axis gather": "A Tensor of the shape of `indices`.",
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
        "broadcast_arrays": "A tuple of Tensors of one shape.",
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
        "meshgrid": "A tuple of Tensors, one for each vector.",
        "diag": "A matrix of a vector, a vector of a matrix.",
        "astype": "A Tensor of the dtype.",
        "can_cast isdtype allclose array_equal": "A bool.",
        "finfo iinfo": "The limits.",
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
        "numel dim": "An int.",
        "nansum nanmean nanmedian": "A Tensor without the axes, or with extent 1 there if `keepdims`.",
        "quantile nanquantile percentile": "A Tensor: the axes of `q`, then those of `x` that are left.",
        "aminmax": "``min, max``: a named tuple of Tensors.",
        "cov corrcoef": "(variables, variables), or a number for one variable.",
        "bincount histc": "A vector with a number for each value or interval.",
        "cdist": "(..., M, N).",
        "dist vdot": "A Tensor without axes.",
        "trapezoid": "A Tensor without the axis.",
        "cumulative_trapezoid": "A Tensor, shorter by one along the axis.",
        "gradient": "A Tensor of the shape of `x`, or a tuple of them, one for each axis.",
        "interp polygamma digamma gammaln erfinv i0 logit lerp addcmul addcdiv addmm addr addbmm beta betaln zeta": "A Tensor of the shape that "
        "the arguments broadcast to.",
        "gamma ndtr log_ndtr entr i1 i0e i1e j0 j1 y0 y1 xlog1py clamp_min clamp_max": "A Tensor of the shape that the arguments broadcast to.",
        "append hstack vstack dstack column_stack block_diag": "A Tensor; its dtype is numpy's promotion of theirs.",
        "atleast_1d atleast_2d atleast_3d t select rollaxis sum_to_size reshape_as": "A Tensor, a view where possible.",
        "diag_embed diagflat": "A Tensor that is zero beside the diagonals.",
        "hsplit vsplit dsplit tensor_split": "A tuple of views.",
        "unfold sliding_window_view": "A view with the elements of a window along new last axes.",
        "fliplr flipud rot90 partition msort index_copy index_fill diagonal_filled scatter_reduce logcumsumexp": "A Tensor of the elements of "
        "`x`, rearranged or replaced.",
        "cummax cummin kthvalue": "Values and int64 indices.",
        "unique": "A vector; with it, where asked for, int64 Tensors.",
        "argwhere": "int64, (number of elements found, axes of `x`).",
        "masked_select": "A vector.",
        "bucketize": "int64, of the shape of `x`.",
        "convolve correlate logspace": "A vector.",
        "rand randn randint randperm rand_like randn_like randint_like normal bernoulli uniform exponential bernoulli_filled random": "A new Tensor.",
        "new_tensor new_zeros new_ones new_empty new_full": "A new Tensor.",
        "complex polar": "A complex Tensor.",
        "is_tensor is_floating_point is_complex is_contiguous is_same_size equal": "A bool.",
        "element_size": "An int.",
        "type_of": "A Tensor, or the dtype.",
        "type_as cuda": "A Tensor of the same values.",
        "eig": "``eigenvalues`` (..., N) and ``eigenvectors`` (..., N, N), in columns.",
        "eigvals": "(..., N), complex.",
        "expm": "(..., N, N).",
        "solve_triangular cholesky_solve": "The solution, of the shape of the right-hand side.",
        "lstsq": "``solution``, ``residuals``, ``rank`` and ``singular_values``: a named tuple of Tensors.",
        "cond logdet": "(...).",
    }.items()
    for name in names.split()
}

_ONE = "A Tensor of the shape of `x`; its dtype is that of numpy's function."
_TWO = "A Tensor of the shape that the arguments broadcast to; its dtype is numpy's promotion of theirs."
_BOOL_ONE, _BOOL_TWO = "A bool Tensor of the shape of `x`.", "A bool Tensor of the shape that the arguments broadcast to."

#: functions whose arrays may have shapes that do not fit each other or the other arguments
_SHAPED = frozenset(
    "matmul tensordot vecdot dot inner einsum outer kron concat stack reshape unflatten view_as expand expand_as broadcast_to broadcast_arrays "
    "broadcast_shapes permute_dims permute transpose matrix_transpose squeeze where diagonal trace cholesky cross det eigh eigvalsh inv matrix_norm "
    "matrix_power pinv qr slogdet solve svd svdvals nonzero max min tile repeat isclose allclose scatter scatter_add index_add multi_dot "
    "masked_fill sum_to_size t".split()
)
_INDEXED = frozenset("take take_along_axis gather scatter scatter_add index_add index_select narrow".split())
#: matrices for which there is no result
_SINGULAR = frozenset("cholesky inv solve matrix_power eigh eigvalsh svd svdvals pinv".split())
_COMPLAINS: Mapping[str, str] = {
    "linspace arange zeros ones full empty eye": "ArgumentError: a shape, number or step that makes no sense.",
    "split chunk hsplit vsplit dsplit": "ArgumentError: the axis does not divide into so many parts.",
    "take where": "ArgumentError: an argument is left out that is needed here.",
    "topk": "ArgumentError: `k` is more than the extent of the axis.",
    "gelu": "ArgumentError: another `approximate`.",
    "concat stack multi_dot": "ArgumentError: too few arrays.",
    "argmax argmin": "ArgumentError: there are no elements.",
    "pad": "ArgumentError: a `pad_width` below 0 or another mode.",
    "diff": "ArgumentError: `n` is below 0.",
    "diag": "ArgumentError: neither a vector nor a matrix.",
    "cumulative_sum cumulative_prod": "ArgumentError: no axis for an array of several.",
    "searchsorted": "ArgumentError: another `side`, or a `sorter` that is no vector of integers.",
    "isdtype": "ArgumentError: another kind.",
    "matrix_norm norm vector_norm": "ArgumentError: another `ord`.",
    "qr": "NoRuleError: another `mode`.",
    "reshape": "ArgumentError: a copy is needed and `copy` is False.",
    "divide": "ArgumentError: another `rounding_mode`.",
    "histc block_diag select normal polygamma": "ArgumentError: too few of what is needed, or numbers that make no sense.",
    "randint": "ArgumentError: no shape, or an interval without numbers.",
    "quantile percentile nanquantile": "ArgumentError: another `method`, numbers beyond the ends, or nothing to choose from.",
    "scatter_reduce": "ArgumentError: another reduction.",
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
                    function.__doc__ = "\n".join([text, *_sections(module.__name__.rpartition(".")[2], function)])


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
        yield "\n    Args:"
        yield from (f"        {each}: {text}." for each, text in known)
    if returned := RETURNS.get(f"{family}.{name}", RETURNS.get(name)) or _by_family(family, parameters):
        yield f"\n    Returns:\n        {returned}"
    if raised := list(_errors(name, parameters)):
        yield "\n    Raises:"
        yield from (f"        {line}" for line in raised)
    yield "    "


def _by_family(family: str, parameters: list[str]) -> str:
    """The result of functions that work element by element."""
    if family not in ("elementwise", "comparison", "activation"):
        return ""
    one, two = (_BOOL_ONE, _BOOL_TWO) if family == "comparison" else (_ONE, _TWO)
    return two if "x2" in parameters else one


def _errors(name: str, parameters: list[str]) -> Iterator[str]:
    if {"x", "x1", "arrays", "operands"} & {*parameters}:
        yield "ArgumentTypeError: an argument is no Tensor, array or number, or has a dtype that the function does not take."
    if name in _SHAPED or ("x2" in parameters and "side" not in parameters):
        yield "ShapeError: shapes that do not fit."
    if name in _INDEXED or ({"axis", "axis1", "source", "axes", "start"} & {*parameters} and name not in ("arange", "linspace")):
        yield "IndexRangeError: an axis or index that is not there."
    if name in _COMPLAINTS:
        yield _COMPLAINTS[name]
    if name in _SINGULAR:
        yield "numpy.linalg.LinAlgError: a matrix for which there is no result, such as a singular one."
