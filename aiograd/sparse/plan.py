"""`jacobian_plan` and `sparse_jacobian`: the entries of a sparse Jacobian from a few products."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.functional.batching.vmap import vmap
from aiograd.functional.derivatives import Fn, call, jvp, vjp
from aiograd.running.caller import type_found
from aiograd.running.devices import register_device, unregister_device
from aiograd.running.modes import enable_grad
from aiograd.running.offloading import ready
from aiograd.running.svg import svg_document
from aiograd.running.types import Array, Shape
from aiograd.sparse.coloring import color_columns
from aiograd.sparse.level import RowsArray, RowsLevel
from aiograd.sparse.pattern import Pattern, scipy_sparse
from aiograd.tensors.core import TensorCore, make

_MODES = ("auto", "forward", "reverse")
#: side of the largest picture in cells: a larger pattern is drawn with several entries to a cell
_CELLS = 200


@dataclass(frozen=True, eq=False)
class JacobianPlan:
    """How to find the Jacobian of a function at any point where it runs the same rows; made by `jacobian_plan`.

    ``await plan(x)`` runs the function and all products in one batched pass.

    >>> plan = await ag.jacobian_plan(lambda x: x[1:] * x[:-1], ag.ones(5))
    >>> plan.passes, plan.mode
    (2, 'forward')
    >>> (await plan(ag.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))).toarray()[0]
    array([2., 1., 0., 0., 0.], dtype=float32)
    """

    #: (outputs, inputs), both flattened: boolean ``scipy.sparse.csr_array``, True where an output may depend on an input
    pattern: Any
    #: of each column the product that finds its entries; in the mode ``reverse`` of each row
    colors: Array
    #: number of products
    passes: int
    #: ``forward``: products with columns (`jvp`); ``reverse``: with rows (`vjp`)
    mode: str
    _fn: Fn = field(repr=False)
    _shape: Shape = field(repr=False)
    _rows: tuple[Any, ...] = field(repr=False)

    async def __call__(self, x: Any) -> Any:
        """The Jacobian at `x`. Nothing is kept of a call that fails or is cancelled; any number may run at once.

        Args:
            x: a Tensor of the shape that the plan was made for, real.

        Returns:
            (outputs, inputs), ``scipy.sparse.csr_array`` in `x`'s dtype, with an entry wherever `pattern` has one.

        Raises:
            ArgumentTypeError, ShapeError: `x` does not fit. TraceError: the function runs other rows than when the plan was made.
        """
        return await self.of(self._fn, x)

    async def of(self, fn: Fn, x: Any) -> Any:
        """The Jacobian of another function that runs the same rows, such as one with other constants; otherwise as a call."""
        _check("JacobianPlan", fn, x, "auto")
        if x.shape != self._shape:
            raise ShapeError(f"JacobianPlan: x has shape {list(x.shape)}, the plan is for {list(self._shape)}; make another with jacobian_plan()")
        products = await self._products(fn, x.detach().clone())
        indices, starts = self.pattern.indices, self.pattern.indptr
        rows = np.repeat(np.arange(self.pattern.shape[0]), np.diff(starts))
        entries = products[self.colors[indices], rows] if self.mode == "forward" else products[self.colors[rows], indices]
        return scipy_sparse().csr_array((entries, indices.copy(), starts.copy()), shape=self.pattern.shape)

    async def _products(self, fn: Fn, x: Any) -> Array:
        """(passes, outputs), or in the mode ``reverse`` (passes, inputs)."""
        levels: list[RowsLevel] = []

        async def watched(x: Any) -> Any:
            levels.append(RowsLevel(x.size, self._rows))
            output = await _run(fn, x, levels[-1])
            return (output._data.value if levels[-1].holds(output._data) else output).reshape(-1).astype(x.dtype)

        async def product(x: Any, seed: Any) -> Any:
            return (await (jvp if self.mode == "forward" else vjp)(watched, x, seed))[1]

        seeds = (self.colors == np.arange(self.passes)[:, None]).astype(x.dtype)
        if self.mode == "forward":
            seeds = seeds.reshape(self.passes, *x.shape)
        try:
            if not self.passes:
                await watched(x)
                return seeds[:, :1]
            found = await vmap(product, in_dims=(None, 0))(x, make(seeds).to(x.device))
            return (await ready(found)).to("cpu").numpy().reshape(self.passes, -1)  # type: ignore[no-any-return]
        finally:  # a checkpoint of the function runs it again in the backward pass
            for level in levels:
                unregister_device(level.name)

    def svg(self) -> str:
        """The pattern in its colors, as the text of an SVG.

        Entries of one color are found by one product. Of a large pattern a cell shows the first of several entries.
        """
        outputs, inputs = self.pattern.shape
        rows = np.repeat(np.arange(outputs), np.diff(self.pattern.indptr))
        columns = self.pattern.indices
        colors = self.colors[columns if self.mode == "forward" else rows]
        coarse = max(outputs, inputs, _CELLS) / _CELLS
        cells = {(int(r / coarse), int(c / coarse)): color for r, c, color in zip(rows[::-1], columns[::-1], colors[::-1].tolist(), strict=True)}
        high, wide = (int(np.ceil(n / coarse)) for n in (outputs, inputs))
        side = min(16.0, max(3.0, 600.0 / max(high, wide, 1)))
        gap = 0.0 if coarse > 1 else 0.08
        paths: dict[int, list[str]] = {}
        for (row, column), color in sorted(cells.items()):
            paths.setdefault(color, []).append(f"M{column + gap:g} {row + gap:g}h{1 - 2 * gap:g}v{1 - 2 * gap:g}h{2 * gap - 1:g}z")
        name = "product" if self.passes == 1 else "products"
        title = f"{outputs} × {inputs}, {self.pattern.nnz} entries: {self.passes} {name} with {'columns' if self.mode == 'forward' else 'rows'}"
        size = (max(wide * side, 420.0) + 24, high * side + 48)
        lines = [
            f'<text x="12" y="22">{title}</text>',
            f'<g transform="translate(12 34) scale({side:g})"><rect class="b" width="{wide}" height="{high}"/>',
            *(f'<path fill="{_shade(color)}" d="{"".join(parts)}"/>' for color, parts in sorted(paths.items())),
            "</g>",
        ]
        rules = ("text{font-size:13px;fill:#1f2328}", ".b{fill:#f6f8fa;stroke:#8c959f;stroke-width:1px;vector-effect:non-scaling-stroke}")
        return svg_document("jacobian", f"Jacobian of {title}", size, rules, lines)


async def jacobian_plan(fn: Fn, x: Any, *, mode: str = "auto") -> JacobianPlan:
    """The pattern of the Jacobian of `fn`, and which of its columns (or rows) one product finds together.

    `fn` runs once. The pattern follows from the rows it runs, their shapes and integer indices, not from values: `where` unites both branches, and
    ``x**2`` depends on x at 0, too. So the plan serves other points. Coloring is greedy, columns with the most entries first. Cancelling stops `fn`.

    Args:
        fn: ``def`` or ``async def`` of one Tensor that returns one, both real. It may branch on what it reads of single elements.
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
    sparse = scipy_sparse()
    level = RowsLevel(x.size)
    try:
        with enable_grad():
            output = await _run(fn, x.detach().clone(), level)
    finally:
        unregister_device(level.name)
    followed = output._data.pattern if level.holds(output._data) else None
    pattern = sparse.csr_array((output.size, x.size), dtype=bool) if followed is None else followed.matrix()
    shown: dict[str, Array] = {}
    if mode != "reverse":
        shown["forward"] = color_columns(pattern)
    if mode != "forward":
        shown["reverse"] = color_columns(pattern.T)
    passes = {name: int(colors.max()) + 1 if pattern.nnz else 0 for name, colors in shown.items()}
    best = min(passes, key=passes.__getitem__)
    for array in (shown[best], pattern.data, pattern.indices, pattern.indptr):
        array.setflags(write=False)
    return JacobianPlan(pattern, shown[best], passes[best], best, fn, x.shape, tuple(level.rows))


async def sparse_jacobian(fn: Fn, x: Any, *, plan: JacobianPlan | None = None, mode: str = "auto") -> Any:
    """The Jacobian of `fn` as a sparse matrix, from as many products as its pattern has colors. Cancelling stops `fn` and the products.

    Args:
        fn: ``def`` or ``async def`` of one Tensor that returns one, both real.
        x: the point.
        plan: what `jacobian_plan` returned for this function; made here when left out, which costs one more run of `fn`.
        mode: as in `jacobian_plan`; with a plan, ``auto`` or its own.

    Returns:
        (outputs, inputs), both flattened: ``scipy.sparse.csr_array`` in `x`'s dtype, with an entry wherever an output may depend on an input.

    Raises:
        As `jacobian_plan`, and ShapeError: `x` has another shape than the plan. TraceError: `fn` runs other rows than when the plan was made.

    >>> (await ag.sparse_jacobian(lambda x: x * x, ag.tensor([1.0, 2.0]))).toarray()
    array([[2., 0.],
           [0., 4.]], dtype=float32)
    """
    _check("sparse_jacobian", fn, x, mode)
    if plan is None:
        plan = await jacobian_plan(fn, x, mode=mode)
    elif not isinstance(plan, JacobianPlan):
        raise ArgumentTypeError(f"sparse_jacobian: plan is {type_found(plan)}; expected what jacobian_plan() returns")
    elif mode not in ("auto", plan.mode):
        raise ArgumentError(f"sparse_jacobian: mode={mode!r} with a plan for {plan.mode!r}; leave one of them out")
    return await plan.of(fn, x)


def _check(what: str, fn: Any, x: Any, mode: Any) -> None:
    if not callable(fn):
        raise ArgumentTypeError(f"{what}: expected a function of x, found {type_found(fn)}; pass the function, not its result")
    if not isinstance(x, TensorCore):
        raise ArgumentTypeError(f"{what}: x is {type_found(x)}; expected one Tensor. Join several into one with np.concatenate.")
    if x.dtype.kind != "f":
        raise ArgumentTypeError(f"{what}: x has dtype {x.dtype}; expected real floating point")
    if mode not in _MODES:
        raise ArgumentError(f"{what}: mode is {mode!r}; expected 'auto', 'forward' or 'reverse'")


async def _run(fn: Fn, x: Any, level: RowsLevel) -> Any:
    """Run `fn` on arrays of a new level, which the caller unregisters."""
    register_device(level)
    pattern = Pattern.of_inputs(x.shape) if level.expected is None else None
    outputs, _ = await call(fn, (make(RowsArray(level, x, pattern)),), "sparse_jacobian")
    level.end()
    if len(outputs) != 1 or outputs[0].dtype.kind != "f":
        found = ", ".join(f"{output.dtype}{list(output.shape)}" for output in outputs)
        raise ArgumentTypeError(f"sparse_jacobian: the function returned {found}; expected one real Tensor. Join several with np.concatenate.")
    return outputs[0]


def _shade(color: int) -> str:
    """Hues that are far from each other for colors that follow each other."""
    return f"hsl({(210 + color * 137.508) % 360:.0f} {62 if color % 2 == 0 else 48}% {46 if color % 3 else 56}%)"
