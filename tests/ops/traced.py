"""A naive reverse-mode differentiator in a page, and its check against finite differences: needs nothing but the op tables.

Its arrays offer only what rules are allowed to use (operators, numpy's protocols, ``shape dtype ndim size T``), so a rule that steps
outside of the tables fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from aiograd.ops import FUNCTIONS, ROWS, UFUNCS, Op, unbroadcast
from aiograd.ops.indexing import select
from aiograd.ops.slice_gradient import dense
from tests.ops.domain import Domain

STEP = 1e-5


def _binary(ufunc: np.ufunc) -> Any:
    return lambda a, b: ufunc(a, b)


def _reflected(ufunc: np.ufunc) -> Any:
    return lambda a, b: ufunc(b, a)


class Traced:
    """An array that remembers the row it came from."""

    __aiograd_priority__ = 1.0

    def __init__(self, value: Any, node: Node | None = None, number: int = 0) -> None:
        self.value = np.asarray(value)
        self.node, self.number = node, number

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    T = property(lambda self: ROWS["permute"](self))

    __add__, __radd__ = _binary(np.add), _reflected(np.add)
    __sub__, __rsub__ = _binary(np.subtract), _reflected(np.subtract)
    __mul__, __rmul__ = _binary(np.multiply), _reflected(np.multiply)
    __truediv__, __rtruediv__ = _binary(np.divide), _reflected(np.divide)
    __pow__, __rpow__ = _binary(np.power), _reflected(np.power)
    __matmul__, __rmatmul__ = _binary(np.matmul), _reflected(np.matmul)
    __lt__, __le__, __gt__, __ge__ = (_binary(u) for u in (np.less, np.less_equal, np.greater, np.greater_equal))
    __eq__, __ne__ = _binary(np.equal), _binary(np.not_equal)
    __neg__ = lambda self: np.negative(self)  # noqa: E731
    __getitem__ = select
    __bool__ = lambda self: bool(self.value)  # noqa: E731
    __hash__ = None  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *args: Any, **kwargs: Any) -> Any:
        assert method == "__call__", f"ufunc method {method} in a rule"
        return UFUNCS[ufunc](*args, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return FUNCTIONS[function](*args, **kwargs)

    def __aiograd_op__(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        node = Node(op, tuple(args), kwargs)
        out = op.forward(*(plain(a) for a in args), **kwargs)
        if op.outputs == 1:
            node.outs = (Traced(out, node),)
            return node.outs[0]
        node.outs = tuple(Traced(o, node, i) for i, o in enumerate(out))
        return node.outs


class Node:
    """A call of a row."""

    counter = itertools.count()

    def __init__(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op, self.args, self.kwargs, self.order = op, args, kwargs, next(self.counter)
        self.outs: tuple[Traced, ...] = ()


def plain(x: Any) -> Any:
    return x.value if isinstance(x, Traced) else x


def named_values(op: Op, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> dict[str, Any]:
    """All that a rule of `op` may name."""
    values: dict[str, Any] = {"out": out, **op.defaults}
    if op.variadic:
        groups = {op.variadic: tuple(args)}
    else:
        positional = args[: len(op.arrays)]
        groups = dict(zip(op.arrays, positional, strict=False))
        values.update(zip(op.statics, args[len(op.arrays) :], strict=False))
    for name, group in groups.items():
        values[name] = group
        if isinstance(group, tuple):
            values[f"{name}_shape"] = tuple(tuple(a.shape) for a in group)
            values[f"{name}_dtype"] = tuple(a.dtype for a in group)
        else:
            values[f"{name}_shape"] = tuple(np.shape(plain(group)))
            values[f"{name}_dtype"] = getattr(group, "dtype", np.asarray(plain(group)).dtype)
    values.update(kwargs)
    return values


def floating(x: Any) -> bool:
    return getattr(x, "dtype", np.dtype(bool)).kind in "fc"


def call_rules(op: Op, args: Sequence[Any], kwargs: dict[str, Any], out: Any, g: Any) -> dict[int, Any]:
    """The gradients of the arguments, by position, of their shapes: what an engine does for one node."""
    conj = op.complex == "holomorphic" and any(np.iscomplexobj(plain(a)) for a in args)
    if conj:
        g = np.conjugate(g) if not isinstance(g, tuple) else tuple(None if piece is None else np.conjugate(piece) for piece in g)
    values = named_values(op, args, kwargs, out)
    gradients: dict[int, Any] = {}
    for arguments, rule, names in op.rule_plan(op.rules, op.joint):
        positions = [0] if op.variadic else [op.arrays.index(a) for a in arguments]
        if not op.variadic:
            wanted = tuple(i < len(args) and floating(args[i]) for i in positions)
            if not any(wanted):
                continue
            values["needs"] = wanted
        result = rule(g, *(values[n] for n in names))
        if op.variadic:
            assert len(result) == len(args)
            gradients.update(enumerate(result))
        else:
            gradients.update(zip(positions, result if arguments in op.joint else (result,), strict=True))
    done = {}
    for i, gradient in gradients.items():
        if gradient is None or not floating(args[i]):
            continue
        gradient = dense(gradient)
        if conj:
            gradient = np.conjugate(gradient)
        gradient = unbroadcast(gradient, args[i].shape)
        if gradient.dtype.kind == "c" and args[i].dtype.kind != "c":
            gradient = np.real(gradient)
        done[i] = gradient
    return done


def vjp(outs: Sequence[Traced], cotangents: Sequence[Any], inputs: Sequence[Traced], create_graph: bool = False) -> list[Any]:
    """Gradients of ``sum(re(conj(cotangent) * out))``; Traced ones with `create_graph`."""
    grads: dict[int, Any] = {}
    pending: dict[int, Node] = {}
    found: dict[tuple[int, int], Any] = {}

    def give(target: Any, gradient: Any) -> None:
        if not isinstance(target, Traced):
            return
        if target.node is None:
            grads[id(target)] = grads[id(target)] + gradient if id(target) in grads else gradient
            return
        pending[target.node.order] = target.node
        key = (target.node.order, target.number)
        found[key] = found[key] + gradient if key in found else gradient

    for out, cotangent in zip(outs, cotangents, strict=True):
        give(out, cotangent)
    while pending:
        node = pending.pop(max(pending))
        pieces = tuple(found.get((node.order, i)) for i in range(len(node.outs)))
        if node.op.differentiable_outputs is not None:
            pieces = tuple(p if i in node.op.differentiable_outputs else None for i, p in enumerate(pieces))
        if all(p is None for p in pieces):
            continue
        outs_ = node.outs if create_graph else tuple(o.value for o in node.outs)
        args = node.args if create_graph else tuple(plain(a) for a in node.args)
        single = node.op.outputs == 1
        gradients = call_rules(node.op, args, node.kwargs, outs_[0] if single else outs_, pieces[0] if single else pieces)
        for i, gradient in gradients.items():
            give(node.args[i], gradient)
    return [grads.get(id(x), np.zeros(x.shape, x.dtype)) for x in inputs]


def flatten(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


Function = Callable[..., tuple[Any, ...]]


def inner(a: Any, b: Any) -> float:
    return float(np.sum(np.real(np.conjugate(plain(a)) * plain(b))))


def directions(x: Any) -> Iterator[Any]:
    for i in range(x.size):
        for unit in (1.0, 1j) if x.dtype.kind == "c" else (1.0,):
            e = np.zeros(x.size, x.dtype)
            e[i] = unit
            yield e.reshape(x.shape)


def check(function: Function, inputs: Sequence[Any], rng: np.random.Generator, *, second: bool, tolerance: float = 1e-6) -> None:
    """First and, if asked, second derivatives of a function of arrays against central differences."""

    def cotangent(out: Any) -> Any:
        c = rng.normal(size=out.shape)
        return c + 1j * rng.normal(size=out.shape) if out.dtype.kind == "c" else c

    def gradients(*xs: Any) -> list[Any]:
        traced = [Traced(x) for x in xs]
        return [plain(g) for g in vjp(function(*traced)[:count], cotangents, traced)]

    outs = [plain(o) for o in function(*inputs)]
    smooth = [o for o in outs if o.dtype.kind in "fc"]
    count = len(smooth)
    assert count == len(outs) or all(o.dtype.kind not in "fc" for o in outs[count:]), "floating outputs come first"
    cotangents = [cotangent(o) for o in smooth]
    analytic = gradients(*inputs)
    numeric = _differences(lambda *xs: sum(inner(c, o) for c, o in zip(cotangents, function(*xs), strict=False)), inputs)
    for i, (a, n) in enumerate(zip(analytic, numeric, strict=True)):
        assert a.shape == inputs[i].shape
        np.testing.assert_allclose(a, n, rtol=tolerance, atol=tolerance, err_msg=f"gradient of argument {i}")
    if not second:
        return
    weights = [cotangent(x) for x in inputs]
    traced, seeds = [Traced(x) for x in inputs], [Traced(c) for c in cotangents]
    first = vjp(function(*traced)[:count], seeds, traced, create_graph=True)
    live = [(f, w) for f, w in zip(first, weights, strict=True) if isinstance(f, Traced)]
    again = vjp([f for f, _ in live], [w for _, w in live], [*traced, *seeds])
    expected = _differences(lambda *xs: sum(inner(w, g) for w, g in zip(weights, gradients(*xs), strict=True)), inputs)
    for i, (a, n) in enumerate(zip(again, expected, strict=False)):
        np.testing.assert_allclose(plain(a), n, rtol=10 * tolerance, atol=10 * tolerance, err_msg=f"second derivative by argument {i}")
    for i, seed in enumerate(seeds):  # the gradient is linear in its cotangent
        by_seed = plain(again[len(inputs) + i])
        for e in directions(seed.value):
            pieces = [e if j == i else np.zeros_like(c) for j, c in enumerate(cotangents)]
            linear = vjp(function(*traced)[:count], pieces, traced)
            np.testing.assert_allclose(
                inner(e, by_seed), sum(inner(w, g) for w, g in zip(weights, linear, strict=True)), rtol=1e-6, atol=1e-6, err_msg="by cotangent"
            )


def _differences(value: Callable[..., float], inputs: Sequence[Any]) -> list[Any]:
    results = []
    for i, x in enumerate(inputs):
        gradient = np.zeros(x.size, x.dtype)
        for e in directions(x):
            moved = [[x + s * STEP * e if j == i else y for j, y in enumerate(inputs)] for s in (1, -1)]
            slope = (value(*moved[0]) - value(*moved[1])) / (2 * STEP)
            gradient += slope * e.reshape(-1)
        results.append(gradient.reshape(x.shape))
    return results


def bind(domain: Domain, row: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Function, list[Any]]:
    """The row as a function of its differentiable arguments, and these."""
    keys = [i for i, a in enumerate(args) if floating(a)]

    def function(*xs: Any) -> tuple[Any, ...]:
        full = list(args)
        for i, x in zip(keys, xs, strict=True):
            full[i] = x
        return flatten(domain.call(row, full, kwargs))

    return function, [args[i] for i in keys]
