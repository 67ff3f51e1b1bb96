"""How each row of the op tables changes the sets of its arguments.

A rule depends on shapes, settings and integer indices, never on values. It takes a `RowRun` and returns the pattern of the result, or a list of them.
A row without a rule unites everything: each of its elements may depend on all elements of its arguments.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.functional.batching.rules import BROADCAST, REDUCTIONS
from aiograd.ops.op import ROWS, Op
from aiograd.running.types import Array, Shape
from aiograd.sparse.pattern import Pattern, union, with_one_table

#: rows that move elements, put zeros between them, or drop some
_MOVING = (
    "getitem getitem_adjoint index take gather reshape permute transpose expand squeeze unsqueeze flip roll tril triu diagonal diagonal_adjoint tile "
    "repeat_interleave constant_pad shift windows im2col unbind split cat stack setitem scatter embedding"
).split()
#: rows that add elements up in the places from which another row takes them
_ADJOINTS = {
    "index_adjoint": "index", "take_adjoint": "take", "gather_adjoint": "gather", "windows_adjoint": "windows", "col2im": "im2col",
    "embedding_grad": "embedding",
}  # fmt: skip
#: rows that mix along their setting ``axis``
_ALONG_AN_AXIS = "softmax log_softmax safe_softmax sort topk cross vecdot fft ifft rfft irfft".split()
_SCANS = "cumsum cumprod linear_scan logcumsumexp cummax cummin".split()
#: rows that mix their last axis, or the last two, and keep those before as a batch
_VECTORS = "prod_others".split()
_MATRICES = (
    "inv solve cholesky det slogdet eigh eigvalsh eig eigvals svd svdvals qr pinv expm cofactors cofactors_grad scaled_dot_product_attention"
).split()
_LOSSES = "mse_loss huber_loss smooth_l1_loss binary_cross_entropy_with_logits cross_entropy nll_loss".split()


@dataclass(frozen=True)
class RowRun:
    """One run of a row: everything that its pattern may depend on."""

    op: Op
    #: of each array argument: the pattern, None where it depends on no input
    patterns: Sequence[Pattern | None]
    #: its values where they are indices, else None
    indices: Sequence[Any]
    shapes: Sequence[Shape]
    statics: dict[str, Any]
    #: shapes of the results
    results: Sequence[Shape]

    def static(self, name: str) -> Any:
        """A setting of the row."""
        return self.statics.get(name, self.op.defaults.get(name))


Rule = Callable[[RowRun], Any]


def patterns_of(run: RowRun) -> Sequence[Pattern | None]:
    """The pattern of each result; None where it depends on no input."""
    if not run.op.differentiable or all(pattern is None for pattern in run.patterns):
        return [None] * len(run.results)
    found = RULES.get(run.op.name, _broadcast if isinstance(run.op.forward, np.ufunc) else _all)(run)
    return found if isinstance(found, list) else [found] * len(run.results)


def united_all(patterns: Sequence[Pattern | None]) -> Pattern | None:
    """One element that depends on all elements of all."""
    whole = [pattern.united(range(pattern.sets.ndim)) for pattern in patterns if pattern is not None]
    return union([pattern.moved(pattern.sets.reshape(())) for pattern in whole], ())


def _all(run: RowRun) -> Any:
    return [union([united_all(run.patterns)], shape) for shape in run.results]


def _broadcast(run: RowRun) -> Any:
    return union(run.patterns, run.results[0])


def _moved(run: RowRun) -> Any:
    dependent = iter(with_one_table([pattern for pattern in run.patterns if pattern is not None]))
    known = [pattern and next(dependent) for pattern in run.patterns]
    args = [
        pattern.sets if pattern is not None else np.zeros(shape, np.int64) if index is None else index
        for pattern, index, shape in zip(known, run.indices, run.shapes, strict=True)
    ]
    sets = run.op.forward(*args, **{**run.statics, **dict.fromkeys({"fill", "value"} & set(run.op.statics), 0)})
    one = next(pattern for pattern in known if pattern is not None)
    return [one.moved(part) for part in sets] if isinstance(sets, (tuple, list)) else one.moved(np.asarray(sets))


def _added(run: RowRun) -> Any:
    (pattern, *_), shape, takes = run.patterns, run.results[0], ROWS[_ADJOINTS[run.op.name]]
    settings = {name: run.static(name) for name in takes.statics if name in run.op.statics}
    return pattern and pattern.scattered(shape, takes.forward(_numbered(shape), *run.indices[1:], **settings))


def _numbered(shape: Shape) -> Array:
    return np.arange(1, math.prod(shape) + 1).reshape(shape)


def _mixed(axes_of: Callable[[RowRun, int], Sequence[int]]) -> Rule:
    """The rule of rows that mix some axes of each argument. A result has as many axes, or the axes before the mixed ones and perhaps others."""

    def fit(pattern: Pattern | None, shape: Shape, run: RowRun) -> Pattern | None:
        if pattern is None:
            return None
        ndim = pattern.sets.ndim
        axes = tuple({a % ndim for a in axes_of(run, ndim)}) if ndim else ()
        thin = pattern.united(axes)
        most = max(map(len, run.shapes))
        if len(shape) != most:
            batch = np.squeeze(thin.sets, axes)
            thin = thin.moved(batch.reshape((*batch.shape, *(1,) * (len(shape) - most + len(axes)))))
        return thin

    return lambda run: [union([fit(pattern, shape, run) for pattern in run.patterns], shape) for shape in run.results]


def _axes(run: RowRun, ndim: int) -> Sequence[int]:
    axis = run.static("axis")
    return range(ndim) if axis is None else (axis,) if isinstance(axis, int) else axis


def _loss_axes(run: RowRun, ndim: int) -> Sequence[int]:
    return range(ndim) if run.static("reduction") != "none" else (min(1, ndim - 1),) if "target" in run.op.statics else ()


def _scanned(run: RowRun) -> Any:
    """Each element depends on all elements up to it, or on all from it on."""
    axis, reverse = run.static("axis"), run.static("reverse")
    pattern = union(run.patterns, run.shapes[0])
    if pattern is None or not run.shapes[0]:
        return pattern
    sets = np.moveaxis(pattern.sets, axis, -1)
    taken = np.broadcast_to((np.triu if reverse else np.tril)(np.ones((sets.shape[-1],) * 2, bool)), (*sets.shape, sets.shape[-1]))
    scanned = pattern.grouped(sets.shape, taken.sum(-1).ravel(), np.broadcast_to(sets[..., None, :], taken.shape)[taken])
    return scanned.moved(np.moveaxis(scanned.sets, -1, axis))


def _matmul(run: RowRun) -> Any:
    first, second = map(len, run.shapes)
    batch = string.ascii_lowercase[: max(first, second, 2) - 2]
    left, right = "Y" * (first > 1), "X" * (second > 1)  # a vector has no axis of its own in the result
    ours, theirs = (batch[len(batch) - max(ndim - 2, 0) :] for ndim in (first, second))
    return _product(run, (f"{ours}{left}Z", f"{theirs}Z{right}"), batch + left + right)


def _linear(run: RowRun) -> Any:
    batch = string.ascii_lowercase[: len(run.shapes[0]) - 1]
    return _product(run, (batch + "Z", "XZ", "X"), batch + "X")


def _einsum(run: RowRun) -> Any:
    terms, output = run.static("subscripts").split("->")
    return _product(run, terms.split(","), output)


def _product(run: RowRun, terms: Sequence[str], output: str) -> Any:
    """A product of arguments with axes that these letters name, summed over letters that the result lacks."""

    def aligned(pattern: Pattern | None, term: str) -> Pattern | None:
        if pattern is None:
            return None
        thin = pattern.united([a for a, letter in enumerate(term) if letter not in output])
        # letters that only the result has become axes of length 1, letters that only the term has go
        sets = thin.sets[(*(slice(None) if letter in output else 0 for letter in term), *(None for letter in output if letter not in term))]
        letters = [*(letter for letter in term if letter in output), *(letter for letter in output if letter not in term)]
        return thin.moved(sets.transpose([letters.index(letter) for letter in output]))

    return union([aligned(p, term) for p, term in zip(run.patterns, terms, strict=False)], run.results[0])


def _windows(run: RowRun) -> Any:
    """Convolution and pooling: the elements of a window, of all channels of its group; and the weight and bias of its channel."""
    x, *others = run.patterns
    (n, channels, *plane), size = run.results[0], run.statics["kernel_size"] if "kernel_size" in run.statics else run.shapes[1][2:]
    if x is not None:
        groups, stride = run.static("groups") or x.sets.shape[1], run.static("stride")
        columns = ROWS["im2col"].forward(x.sets, size, size if stride is None else stride, run.static("padding"), run.static("dilation") or 1)
        x = x.moved(columns.reshape(n, groups, columns.shape[1] // groups, columns.shape[2])).united((2,))
        x = x.moved(np.repeat(x.sets[:, :, 0], channels // groups, 1).reshape(n, channels, *plane))
    beside = [p and p.united(range(1, p.sets.ndim)) for p in others]
    return union((x, *(p and p.moved(p.sets[(slice(None), *(0,) * (p.sets.ndim - 1))][:, None, None]) for p in beside)), run.results[0])


RULES: dict[str, Rule] = {
    **dict.fromkeys((*BROADCAST, "tanh_slope", "tanh_bend", "binary_cross_entropy"), _broadcast),
    **dict.fromkeys((*REDUCTIONS, *_ALONG_AN_AXIS), _mixed(_axes)),
    **dict.fromkeys(_MOVING, _moved),
    **dict.fromkeys(_ADJOINTS, _added),
    **dict.fromkeys(_SCANS, _scanned),
    **dict.fromkeys(_VECTORS, _mixed(lambda run, ndim: (-1,))),
    **dict.fromkeys(_MATRICES, _mixed(lambda run, ndim: range(-min(2, ndim), 0))),
    **dict.fromkeys(("layer_norm", "rms_norm"), _mixed(lambda run, ndim: range(-min(run.static("ndims"), ndim), 0))),
    **dict.fromkeys(_LOSSES, _mixed(_loss_axes)),
    **dict.fromkeys(("conv2d", "avg_pool2d", "max_pool2d"), _windows),
    "matmul": _matmul,
    "einsum": _einsum,
    "linear": _linear,
}
