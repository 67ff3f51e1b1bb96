"""What each row of the op tables does to the sets of its arguments.

A rule depends on shapes, settings and integer indices, never on values. It takes a `Run` of the row and returns the pattern of the result, or a list
of them. A row without a rule unites everything: each of its elements may depend on all elements of its arguments.
"""

from __future__ import annotations

import math
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
#: rows that mix along an axis and keep it
_ALONG_AN_AXIS = "softmax log_softmax safe_softmax sort topk cross fft ifft rfft irfft".split()
_SCANS = "cumsum cumprod linear_scan logcumsumexp cummax cummin".split()
#: rows that mix their last axes and keep those before as a batch: how many
_CORES = (
    (1, "prod_others"),
    (2, "inv solve cholesky det slogdet eigh eigvalsh eig eigvals svd svdvals qr pinv expm cofactors cofactors_grad scaled_dot_product_attention"),
)
_LOSSES = "mse_loss huber_loss smooth_l1_loss binary_cross_entropy_with_logits".split()


@dataclass(frozen=True)
class Run:
    """A row that runs: what its pattern may depend on."""

    op: Op
    #: of each array argument the pattern, None where it depends on no input
    patterns: Sequence[Pattern | None]
    #: of each array argument the values where these are integers, else None
    indices: Sequence[Any]
    shapes: Sequence[Shape]
    statics: dict[str, Any]
    #: shapes of the results
    results: Sequence[Shape]

    def static(self, name: str) -> Any:
        """A setting of the row."""
        return self.statics.get(name, self.op.defaults.get(name))

    def among(self, names: Sequence[str]) -> dict[str, Any]:
        """The settings of another row that this one has, too."""
        return {name: self.static(name) for name in names if name in self.op.statics}


Rule = Callable[[Run], Any]


def patterns_of(run: Run) -> list[Pattern | None]:
    """The pattern of each result; None where it depends on no input."""
    if not run.op.differentiable or all(pattern is None for pattern in run.patterns):
        return [None] * len(run.results)
    found = RULES.get(run.op.name, _broadcast if isinstance(run.op.forward, np.ufunc) else _all)(run)
    return found if isinstance(found, list) else [found] * len(run.results) if len(run.results) > 1 else [found]


def _all(run: Run) -> Any:
    whole = [pattern.united(range(pattern.sets.ndim)) for pattern in run.patterns if pattern is not None]
    one = union([Pattern(pattern.sets.reshape(()), pattern.table) for pattern in whole], ())
    return [one.broadcast(shape) for shape in run.results] if one is not None else None


def _broadcast(run: Run) -> Any:
    return union(run.patterns, run.results[0])


def _moved(run: Run) -> Any:
    dependent = iter(with_one_table([pattern for pattern in run.patterns if pattern is not None]))
    known = [next(dependent) if pattern is not None else None for pattern in run.patterns]
    table = next(pattern.table for pattern in known if pattern is not None)
    args = [
        pattern.sets if pattern is not None else np.zeros(shape, np.int64) if index is None else index
        for pattern, index, shape in zip(known, run.indices, run.shapes, strict=True)
    ]
    empty = dict.fromkeys({"fill", "value"} & set(run.op.statics), 0)
    sets = run.op.forward(*args, **{**run.statics, **empty})
    return [Pattern(part, table) for part in sets] if isinstance(sets, (tuple, list)) else Pattern(np.asarray(sets), table)


def _added(run: Run) -> Any:
    """The adjoint of a moving row, see `_ADJOINTS`."""
    pattern, shape = run.patterns[0], run.results[0]
    takes = ROWS[_ADJOINTS[run.op.name]]
    places = takes.forward(_numbered(shape), *run.indices[1:], **run.among(takes.statics))
    return None if pattern is None else pattern.broadcast(places.shape).scattered(shape, places)


def _numbered(shape: Shape) -> Array:
    return np.arange(1, math.prod(shape) + 1).reshape(shape)


def _axes(run: Run, ndim: int) -> Sequence[int]:
    axis = run.static("axis")
    return range(ndim) if axis is None else (axis,) if isinstance(axis, int) else axis


def _reduced(run: Run) -> Any:
    (pattern,) = run.patterns
    return None if pattern is None else pattern.united(_axes(run, pattern.sets.ndim)).reshape(run.results[0])


def _along(run: Run) -> Any:
    return [union([p and p.united(_axes(run, p.sets.ndim)) for p in run.patterns], shape) for shape in run.results]


def _vecdot(run: Run) -> Any:
    thin = [p and p.united(_axes(run, p.sets.ndim)) for p in run.patterns]
    return union([p and p.moved(np.squeeze(p.sets, run.static("axis"))) for p in thin], run.results[0])


def _scanned(run: Run) -> Any:
    """Each element depends on those up to it, or from it on."""
    axis, reverse = run.static("axis"), run.static("reverse")
    pattern = union(run.patterns, run.shapes[0])
    if pattern is None or not run.shapes[0]:
        return pattern
    sets = np.moveaxis(pattern.sets, axis, -1)
    length = sets.shape[-1]
    before = (np.triu if reverse else np.tril)(np.ones((length, length), bool))
    members = np.broadcast_to(sets[..., None, :], (*sets.shape, length))[np.broadcast_to(before, (*sets.shape, length))]
    scanned = pattern.grouped(sets.shape, np.broadcast_to(before.sum(-1), sets.shape).ravel(), members)
    return scanned.moved(np.moveaxis(scanned.sets, -1, axis))


def _core(count: int) -> Rule:
    def rule(run: Run) -> Any:
        mixed = [p and p.united(range(-min(count, p.sets.ndim), 0)) for p in run.patterns]
        batches = [p and p.moved(p.sets.reshape(p.sets.shape[: max(p.sets.ndim - count, 0)])) for p in mixed]
        batch = np.broadcast_shapes(*(p.sets.shape for p in batches if p is not None))
        one = union(batches, batch)
        return [one and one.reshape((*batch, *(1,) * (len(shape) - len(batch)))).broadcast(shape) for shape in run.results]

    return rule


def _matmul(run: Run) -> Any:
    first, second = run.patterns
    alone = [len(shape) == 1 for shape in run.shapes]  # a vector has no axis of its own in the result
    if first is not None:
        first = first.united((-1,))
        first = first.moved(first.sets[..., 0] if alone[1] else first.sets)
    if second is not None:
        second = second.united((-1 if alone[1] else -2,))
        second = second.moved(second.sets[..., 0] if alone[1] else second.sets[..., 0, :] if alone[0] else second.sets)
    return union((first, second), run.results[0])


def _einsum(run: Run) -> Any:
    terms, output = run.static("subscripts").split("->")

    def aligned(pattern: Pattern | None, term: str) -> Pattern | None:
        if pattern is None:
            return None
        thin = pattern.united([a for a, letter in enumerate(term) if letter not in output])
        kept = [letter for letter in term if letter in output]
        sets = thin.sets.reshape([n for n, letter in zip(thin.sets.shape, term, strict=True) if letter in output])
        sets = sets.transpose([kept.index(letter) for letter in output if letter in kept])
        return thin.moved(sets[tuple(slice(None) if letter in kept else None for letter in output)])

    return union([aligned(p, term) for p, term in zip(run.patterns, terms.split(","), strict=True)], run.results[0])


def _linear(run: Run) -> Any:
    x, weight, bias = (*run.patterns, None)[:3]
    weight = weight and weight.united((-1,)).reshape(run.shapes[1][:1])
    return union((x and x.united((-1,)), weight, bias), run.results[0])


def _normalized(run: Run) -> Any:
    x, *scales = run.patterns
    return union((x and x.united(range(-run.static("ndims"), 0)), *scales), run.results[0])


def _loss(run: Run) -> Any:
    return _all(run) if run.static("reduction") != "none" else _broadcast(run)


def _class_loss(run: Run) -> Any:
    (logits,) = run.patterns
    if logits is None or run.static("reduction") != "none":
        return _all(run)
    return logits.united((min(1, logits.sets.ndim - 1),)).reshape(run.results[0])


def _in_windows(run: Run, pattern: Pattern, groups: int, size: Any, dilation: Any = 1) -> Pattern:
    """(N, groups, windows): what each window of (N, C, H, W) sees, of all channels of its group."""
    n, c, h, w = pattern.sets.shape
    stride = run.static("stride")
    columns = ROWS["im2col"].forward(pattern.sets, size, size if stride is None else stride, run.static("padding"), dilation)
    return pattern.moved(columns.reshape(n, groups, columns.shape[1] // groups, columns.shape[2])).united((2,))


def _pooled(run: Run) -> Any:
    x = run.patterns[0]
    dilation = run.static("dilation") if "dilation" in run.op.statics else 1
    return x and _in_windows(run, x, x.sets.shape[1], run.static("kernel_size"), dilation).reshape(run.results[0])


def _conv2d(run: Run) -> Any:
    x, weight, bias = (*run.patterns, None)[:3]
    (n, outputs, *plane), groups = run.results[0], run.static("groups")
    if x is not None:
        seen = _in_windows(run, x, groups, run.shapes[1][2:], run.static("dilation"))
        x = seen.moved(np.repeat(seen.sets, outputs // groups, 1).reshape(n, outputs, *plane))
    weight = weight and weight.united((1, 2, 3)).reshape((outputs, 1, 1))
    return union((x, weight, bias and bias.reshape((outputs, 1, 1))), run.results[0])


def _conv2d_adjoint(run: Run) -> Any:
    """Of the input of `conv2d`, or the transposed convolution: each window adds to the elements that it sees."""
    y, weight = run.patterns
    (n, channels, h, w), groups = run.results[0], run.static("groups")
    if weight is not None:
        return _all(run)
    if y is not None:
        numbers = _numbered((n, groups, h, w))
        columns = ROWS["im2col"].forward(numbers, run.shapes[1][2:], run.static("stride"), run.static("padding"), run.static("dilation"))
        windows = y.moved(y.sets.reshape(n, groups, -1, columns.shape[2])).united((2,))
        places = columns.reshape(n, groups, -1, columns.shape[2])
        y = windows.broadcast(places.shape).scattered((n, groups, h, w), places)
        y = y.moved(np.repeat(y.sets, channels // groups, 1))
    return y


RULES: dict[str, Rule] = {
    **dict.fromkeys((*BROADCAST, "tanh_slope", "tanh_bend", "binary_cross_entropy"), _broadcast),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(_MOVING, _moved),
    **dict.fromkeys(_ADJOINTS, _added),
    **dict.fromkeys(_ALONG_AN_AXIS, _along),
    **dict.fromkeys(_SCANS, _scanned),
    **{name: _core(count) for count, names in _CORES for name in names.split()},
    **dict.fromkeys(_LOSSES, _loss),
    **dict.fromkeys(("cross_entropy", "nll_loss"), _class_loss),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
    **dict.fromkeys(("avg_pool2d", "max_pool2d"), _pooled),
    "vecdot": _vecdot,
    "matmul": _matmul,
    "einsum": _einsum,
    "linear": _linear,
    "conv2d": _conv2d,
    "conv2d_input_grad": _conv2d_adjoint,
}
