"""`jacobian_plan` and `sparse_jacobian`: the entries of a sparse Jacobian from a few products.

Note [Colors]
    Columns without a row in common may have one color: in the product with the sum of their unit vectors each row shows the entry of one column.
    Coloring is greedy, columns with the most entries first; the colors of a row's columns are the bits of one number.

Source: Curtis, Powell, Reid (1974); Coleman and Moré (1983).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.functional.batching.vmap import with_batch_axis
from aiograd.functional.derivatives import Fn, call, jvp, vjp
from aiograd.running.caller import type_found
from aiograd.running.devices import register_device
from aiograd.running.modes import enable_grad
from aiograd.running.offloading import ready
from aiograd.running.svg import svg_document
from aiograd.running.types import Array, Shape
from aiograd.sparse.level import RowsArray, RowsLevel
from aiograd.sparse.pattern import Pattern, scipy_sparse
from aiograd.tensors.core import TensorCore, make

#: side of the largest picture in cells: of a larger pattern a cell shows several entries
_CELLS = 200


@dataclass(frozen=True, eq=False)
class JacobianPlan:
    """How to find the Jacobian of a function wherever it runs the same rows; made by `jacobian_plan`.

    ``await plan(x)`` runs the function once, with all products in one batched pass.

    >>> plan = await ag.jacobian_plan(lambda x: x[1:] * x[:-1], ag.ones(5))
    >>> plan.passes, plan.mode
    (2, 'forward')
    >>> (await plan(ag.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))).toarray()[0]
    array([2., 1., 0., 0., 0.], dtype=float32)
    """

    #: (outputs, inputs), flattened: boolean ``scipy.sparse.csr_array``, True where an output may depend on an input
    pattern: Any
    #: of each column the number of the product that finds it; in the mode ``reverse`` of each row
    colors: Array
    #: number of products
    passes: int
    #: ``forward``: products with columns (`jvp`); ``reverse``: with rows (`vjp`)
    mode: str
    _fn: Fn = field(repr=False)
    _shape: Shape = field(repr=False)
    _rows: tuple[Any, ...] = field(repr=False)

    async def __call__(self, x: Any) -> Any:
        """The Jacobian at `x`. Any number may run at once; one that fails or is cancelled leaves nothing.

        Args:
            x: a Tensor of the shape that the plan was made for, real.

        Returns:
            (outputs, inputs), ``scipy.sparse.csr_array`` in `x`'s dtype, with an entry wherever `pattern` has one.

        Raises:
            ArgumentTypeError, ShapeError: `x` does not fit. TraceError: the function runs other rows than when the plan was made.
        """
        return await sparse_jacobian(self._fn, x, plan=self)

    async def products(self, fn: Fn, x: Any) -> Array:
        """(passes, outputs), or in the mode ``reverse`` (passes, inputs): the products of the Jacobian of `fn` with the sums of each color."""
        levels: list[RowsLevel] = []

        async def watched(x: Any) -> Any:
            output = await _run(fn, x, levels, self._rows)
            return (output._data.value if levels[-1].holds(output._data) else output).reshape(-1).astype(x.dtype)

        async def product(x: Any, seed: Any) -> Any:
            return (await (jvp if self.mode == "forward" else vjp)(watched, x, seed))[1]

        seeds = (self.colors == np.arange(self.passes)[:, None]).astype(x.dtype)
        if self.mode == "forward":
            seeds = seeds.reshape(self.passes, *x.shape)
        try:
            if not self.passes:
                await watched(x)
                return seeds
            found = await with_batch_axis(product, in_dims=(None, 0))(x, make(seeds).to(x.device))
            return (await ready(found)).to("cpu").numpy().reshape(self.passes, -1)
        finally:  # not earlier: a checkpoint of the function runs parts of it again in the backward pass
            for level in levels:
                level.close()

    def svg(self) -> str:
        """The pattern, each entry in the color of the product that finds it, as the text of an SVG. Of a large one a cell shows several entries."""
        (outputs, inputs), columns = self.pattern.shape, self.pattern.indices
        rows = _rows_of(self.pattern)
        colors = self.colors[columns if self.mode == "forward" else rows]
        coarse = max(outputs, inputs, _CELLS) / _CELLS
        cells = dict(zip(zip((rows / coarse).astype(int), (columns / coarse).astype(int), strict=True), colors.tolist(), strict=True))
        high, wide = (max(int(np.ceil(n / coarse)), 1) for n in (outputs, inputs))
        side, gap = min(16.0, max(3.0, 600.0 / max(high, wide))), 0.0 if coarse > 1 else 0.08
        paths: dict[int, list[str]] = {}
        for (row, column), color in sorted(cells.items()):
            paths.setdefault(color, []).append(f"M{column + gap:g} {row + gap:g}h{1 - 2 * gap:g}v{1 - 2 * gap:g}h{2 * gap - 1:g}z")
        what = "columns" if self.mode == "forward" else "rows"
        title = f"{outputs} × {inputs}, {self.pattern.nnz} entries: {self.passes} product{'s' * (self.passes != 1)} with {what}"
        lines = [
            f'<text x="12" y="22">{title}</text><g transform="translate(12 34) scale({side:g})"><rect class="b" width="{wide}" height="{high}"/>',
            *(f'<path fill="hsl({(210 + color * 137.508) % 360:.0f} 60% {44 + color % 3 * 8}%)" d="{"".join(d)}"/>' for color, d in paths.items()),
            "</g>",
        ]
        rules = (
            "text{font-size:13px;fill:#1f2328}", "path{shape-rendering:crispEdges}",
            ".b{fill:#f6f8fa;stroke:#8c959f;vector-effect:non-scaling-stroke}",
        )
        return svg_document("jacobian", f"Jacobian, {title}", (max(wide * side, 420.0) + 24, high * side + 48), rules, lines)


async def jacobian_plan(fn: Fn, x: Any, *, mode: str = "auto") -> JacobianPlan:
    """The pattern of the Jacobian of `fn`, and which of its columns (or rows) one product finds together; see Note [Colors].

    `fn` runs once. The pattern follows from the rows it runs, their shapes and integer indices, not from values: `where` unites both branches, and
    ``x**2`` depends on x at 0, too. So the plan serves other points. Cancelling stops `fn`.

    Args:
        fn: ``def`` or ``async def`` of one Tensor that returns one, both real. It may branch on single elements that it reads.
        x: a point.
        mode: ``forward``: products with columns; ``reverse``: with rows; ``auto``: whichever needs fewer.

    Returns:
        A frozen `JacobianPlan`; its call takes a point and is awaited.

    Raises:
        ArgumentError: `mode` is another word, or `fn` reads an array that depends on `x`. ArgumentTypeError: `x` is no real Tensor, or `fn` returns
        something else. MissingExtraError: SciPy is not installed.

    >>> plan = await ag.jacobian_plan(lambda x: x[1:] - x[:-1], ag.ones(1000))
    >>> plan.pattern.shape, plan.passes
    ((999, 1000), 2)
    """
    _check("jacobian_plan", fn, x, mode)
    sparse, levels = scipy_sparse(), list[RowsLevel]()
    try:
        output = await _run(fn, x.detach().clone(), levels, None)
        followed = output._data.pattern if levels[0].holds(output._data) else None
    finally:
        levels[0].close()
    pattern = sparse.csr_array((output.size, x.size), dtype=bool) if followed is None else followed.matrix()
    found = [(*_color_columns(pattern), "forward")] if mode != "reverse" else []
    if mode == "reverse" or (mode == "auto" and found[0][0] > np.bincount(pattern.indices, minlength=1).max()):  # rows may need fewer
        found.append((*_color_columns(pattern.T), "reverse"))
    passes, colors, best = min(found, key=operator.itemgetter(0))
    for array in (colors, pattern.data, pattern.indices, pattern.indptr):
        array.setflags(write=False)
    return JacobianPlan(pattern, colors, passes, best, fn, x.shape, tuple(levels[0].rows))


async def sparse_jacobian(fn: Fn, x: Any, *, plan: JacobianPlan | None = None, mode: str = "auto") -> Any:
    """The Jacobian of `fn` as a sparse matrix, by as many products as its pattern has colors. Cancelling stops `fn` and the products.

    Args:
        fn: ``def`` or ``async def`` of one Tensor that returns one, both real.
        x: the point.
        plan: the plan for `fn`, or for a function that runs the same rows; without one `fn` runs once more.
        mode: as in `jacobian_plan`; with a plan, ``auto`` or the plan's.

    Returns:
        (outputs, inputs), flattened: ``scipy.sparse.csr_array`` in `x`'s dtype, with an entry wherever an output may depend on an input.

    Raises:
        ArgumentError, ArgumentTypeError, MissingExtraError: as `jacobian_plan`. ShapeError: `x` has another shape than the plan.
        TraceError: `fn` runs other rows than when the plan was made.

    >>> (await ag.sparse_jacobian(lambda x: x * x, ag.tensor([1.0, 2.0]))).toarray()
    array([[2., 0.],
           [0., 4.]], dtype=float32)
    """
    _check("sparse_jacobian", fn, x, mode)
    if plan is None:
        plan = await jacobian_plan(fn, x, mode=mode)
    elif not isinstance(plan, JacobianPlan):
        raise ArgumentTypeError(f"sparse_jacobian: plan is {type_found(plan)}; expected what jacobian_plan() returns")
    if mode not in ("auto", plan.mode):
        raise ArgumentError(f"sparse_jacobian: mode={mode!r} with a plan for {plan.mode!r}; leave one of them out")
    if x.shape != plan._shape:
        raise ShapeError(f"sparse_jacobian: x has shape {list(x.shape)}, its plan is for {list(plan._shape)}; make another with jacobian_plan()")
    products = await plan.products(fn, x.detach().clone())
    pattern, rows = plan.pattern, _rows_of(plan.pattern)
    entries = products[plan.colors[pattern.indices], rows] if plan.mode == "forward" else products[plan.colors[rows], pattern.indices]
    return scipy_sparse().csr_array((entries, pattern.indices.copy(), pattern.indptr.copy()), shape=pattern.shape)


def _check(what: str, fn: Any, x: Any, mode: Any) -> None:
    if not callable(fn):
        raise ArgumentTypeError(f"{what}: expected a function of x, found {type_found(fn)}; pass the function, not its result")
    if not isinstance(x, TensorCore):
        raise ArgumentTypeError(f"{what}: x is {type_found(x)}; expected one Tensor. Join several into one with np.concatenate.")
    if x.dtype.kind != "f":
        raise ArgumentTypeError(f"{what}: x has dtype {x.dtype}; expected real floating point")
    if mode not in ("auto", "forward", "reverse"):
        raise ArgumentError(f"{what}: mode is {mode!r}; expected 'auto', 'forward' or 'reverse'")


async def _run(fn: Fn, x: Any, levels: list[RowsLevel], expected: Any) -> Any:
    """Run `fn` on arrays of a new level; the caller closes it."""
    level = RowsLevel(expected)
    levels.append(level)
    register_device(level)
    pattern = Pattern.of_inputs(x.shape) if expected is None else None
    with enable_grad():  # for passes of its own
        outputs, one = await call(fn, (make(RowsArray(level, x, pattern)),), "sparse_jacobian")
    if not one or outputs[0].dtype.kind != "f":
        found = ", ".join(f"{output.dtype}{list(output.shape)}" for output in outputs)
        raise ArgumentTypeError(f"sparse_jacobian: the function returned {found}; expected one real Tensor. Join several with np.concatenate.")
    level.end()
    return outputs[0]


def _rows_of(pattern: Any) -> Array:
    """Of each entry of a CSR matrix the number of its row."""
    return np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr))


def _color_columns(pattern: Any) -> tuple[int, Array]:
    """The number of colors, and the color of each column."""
    columns = pattern.tocsc()
    rows, starts = columns.indices.tolist(), columns.indptr.tolist()
    colors, used = np.zeros(pattern.shape[1], np.int64), [0] * pattern.shape[0]
    for column in np.argsort(-np.diff(columns.indptr), kind="stable").tolist():
        mine = rows[starts[column] : starts[column + 1]]
        taken = 0
        for row in mine:
            taken |= used[row]
        free = ~taken & (taken + 1)  # the lowest bit that is 0
        for row in mine:
            used[row] |= free
        colors[column] = free.bit_length() - 1
    return int(colors.max()) + 1 if pattern.nnz else 0, colors
