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
    "divide.rounding_mode": '"floor", "trunc", or None: not rounded',
    "logit.eps": "how far from 0 and 1 elements are kept; None: not at all",
    "lerp.end": "the values at weight 1; broadcasts",
    "lerp.weight": "0 for `x`, 1 for `end`; broadcasts",
    "first": "the first factor",
    "second": "the second factor, or the divisor",
    "addcmul.value": "the factor of the product",
    "addcdiv.value": "the factor of the quotient",
    "addmm.alpha": "the factor of the product",
    "addmv.alpha": "the factor of the product",
    "addr.alpha": "the factor of the product",
    "addbmm.alpha": "the factor of the product",
    "baddbmm.alpha": "the factor of the products",
    **{f"{name}.beta": "the factor of `x`" for name in ("addmm", "addmv", "addr", "addbmm", "baddbmm")},
    "q": "from 0 to 1, one number or several; several are the first axis of the result",
    "percentile.q": "from 0 to 100, one number or several; several are the first axis of the result",
    "method": "which number between two neighbours is meant, as of numpy's function",
    "cov.fweights": "how often each observation counts, integers, or None",
    "cov.aweights": "the weight of each observation, or None",
    "bincount.weights": "added up in place of counting, of the shape of `x`; None: count",
    "bincount.minlength": "the least length of the result",
    "histc.bins": "how many intervals",
    "sections": "how many parts, or a sequence of the positions to cut at",
    "unfold.size": "elements of a window",
    "unfold.step": "distance of windows",
    "return_inverse": "return which of them each element is as well",
    "return_counts": "return how often each occurs as well",
    "mask": "true for the elements that are meant; broadcasts",
    "arguments": "axis, indices and values in PyTorch's order, or indices and values",
    "src": "the values, of a shape that broadcasts to that of `index`",
    "scatter_reduce.src": "the values",
    "scatter_reduce.reduce": '"sum", "prod", "mean", "amax" or "amin"',
    "include_self": "let the elements of `x` take part",
    "data": "nested lists of numbers, an array or a Tensor",
    "generator": "where the numbers come from; None: the default generator",
    "mean": "the mean",
    "std": "the standard deviation",
    "lambd": "the rate",
    "p": "the probability",
    "low": "the least number",
    "high": "the end, not included",
    "append.values": "the values, of a shape that fits along the other axes",
    "matrices": "matrices, vectors or numbers",
    "boundaries": "a vector in ascending order",
    "right": "an element that equals a boundary lies in the interval behind it",
    "real": "the real parts",
    "imag": "the imaginary parts, of a shape that broadcasts",
    "size": "the magnitudes",
    "angle": "the angles in radians",
    "y": "the values",
    "dx": "the distance of the points",
    "trapezoid.x": "the points; None: `dx` apart",
    "cumulative_trapezoid.x": "the points; None: `dx` apart",
    "spacing": "the distance of the points, or their coordinates, for all axes or one for each",
    "edge_order": "1 or 2: the order of the differences at the ends",
    "xp": "coordinates of the points, ascending",
    "fp": "values of the points",
    "left": "the value before the first point; None: that of the first",
    "solve_triangular.left": "False: solve ``out @ x1 = x2``",
    "period": "coordinates repeat with this period; None: they do not",
    "interp.right": "the value behind the last point; None: that of the last",
    "start": "the first number",
    "stop": "the last number",
    "num": "how many",
    "base": "the base of the powers",
    "kth": "the position, or several",
    "rollaxis.start": "the axis before which it comes",
    "conditions": "arrays that are true where their choice is meant",
    "choices": "as many arrays as conditions",
    "default": "the value where no condition holds",
    "window_shape": "elements of a window along each axis",
    "upper": "the upper triangle is meant, not the lower one",
    "unitriangular": "the diagonal counts as ones",
    "rcond": "singular values below this part of the largest count as 0; None: the precision of the dtype times the larger extent",
    "select.index": "number of the slice; negative ones count from the end",
    "randperm.n": "how many",
    **{
        f"{name}.n": "elements of the axis that are transformed: cut off, or filled with zeros; None: all"
        for name in "fft ifft hfft ihfft irfft rfft".split()
    },
    "s": "the same for several axes; None: all elements",
    "norm": '"backward", "ortho" or "forward": where the factor 1 / n stands, as in numpy',
    "fftfreq.n": "how many samples",
    "rfftfreq.n": "how many samples",
    "d": "distance of the samples",
    "fftshift.axes": "the axes; None: all",
    "ifftshift.axes": "the axes; None: all",
    **{f"{name}.axes": "the axes; None: all, or as many last ones as `s` has" for name in "fftn ifftn irfftn rfftn".split()},
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
}

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
    "divide": "ArgumentError: another `rounding_mode`.",
    "histc normal randint polygamma bernoulli scatter_reduce block_diag select": "ArgumentError: numbers, names or lengths that make no sense.",
    "linspace arange zeros ones full empty eye": "ArgumentError: a shape, number or step that makes no sense.",
    "split chunk": "ArgumentError: the axis does not divide into so many parts.",
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
        yield "numpy.linalg.LinAlgError: a matrix for which there is no result, such as a singular one."
