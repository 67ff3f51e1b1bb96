"""Einstein summation: any expression is reduced to the row `einsum` of two operands; its gradients are einsums again.

Note [Reduction to pairs]
    An expression goes through these steps, each a row or a composition of rows:

    1. an axis named twice in one operand: its diagonal; an axis of length 1 that another operand stretches: dropped;
    2. an axis that only one operand has and the result has not: summed;
    3. two operands at a time, in the order that ``np.einsum_path`` finds: the row `einsum`;
    4. the remaining axes: put into order.

    In a pair every axis of an operand is then in the other operand or in the result, so the gradient of an operand is the einsum of the
    gradient of the result with the other operand. A pair with a contraction is one (batched) GEMM, without one a broadcast product.

Rejected: calling ``np.einsum`` forward and backward, which loops in C without BLAS and is 10 to 100 times slower on matrices.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.ops.creation import refuse
from aiograd.ops.linalg import GEMM_RATE, matmul
from aiograd.ops.op import Op, define, implements
from aiograd.ops.reduction import sum_
from aiograd.ops.shape import checked_axis, diagonal, permute, reshape, squeeze
from aiograd.running.types import Array, Shape


@functools.lru_cache(maxsize=1024)
def _pair_plan(subscripts: str) -> tuple[str, str, str, str, str, str, str]:
    inputs, output = subscripts.split("->")
    first, second = inputs.split(",")
    batch = "".join(c for c in first if c in second and c in output)
    inner = "".join(c for c in first if c in second and c not in output)
    left = "".join(c for c in first if c not in second)
    right = "".join(c for c in second if c not in first)
    return first, second, output, batch, inner, left, right


def _order(names: str, wanted: str) -> tuple[int, ...]:
    return tuple(names.index(c) for c in wanted)


def _einsum(x1: Array, x2: Array, /, subscripts: str) -> Array:
    """Einstein summation of two operands.

    Args:
        x1, x2: operands.
        subscripts: ``ab,bc->ac``: letters, none twice in one term, each in at least two of the three terms.
    """
    first, second, output, batch, inner, left, right = _pair_plan(subscripts)
    size = dict(zip(first + second, x1.shape + x2.shape, strict=True))
    a, b = x1.transpose(_order(first, batch + left + inner)), x2.transpose(_order(second, batch + inner + right))
    shape = tuple(size[c] for c in batch + left + right)
    if not inner:
        n = len(batch)
        product = a.reshape((*a.shape, *(1,) * len(right))) * b.reshape((*b.shape[:n], *(1,) * len(left), *b.shape[n:]))
    else:
        lead = tuple(size[c] for c in batch)
        rows, depth, columns = (math.prod(size[c] for c in names) for names in (left, inner, right))
        product = matmul(a.reshape(*lead, rows, depth), b.reshape(*lead, depth, columns))
    return product.reshape(shape).transpose(_order(batch + left + right, output))


def _einsum_x1(g: Array, x2: Array, subscripts: str) -> Array:
    first, second, output, *_ = _pair_plan(subscripts)
    return einsum_row(g, x2, subscripts=f"{output},{second}->{first}")


def _einsum_x2(g: Array, x1: Array, subscripts: str) -> Array:
    first, second, output, *_ = _pair_plan(subscripts)
    return einsum_row(x1, g, subscripts=f"{first},{output}->{second}")


def _cost(output: Shape, inputs: tuple[Shape, ...]) -> float:
    # the lengths of the axes are not known here: this is exact without batch axes, and too much with them
    return 2.0 * math.sqrt(float(math.prod(output)) * math.prod(inputs[0]) * math.prod(inputs[1])) / GEMM_RATE


einsum_row: Op = define("einsum", _einsum, x1=_einsum_x1, x2=_einsum_x2, jvp="forward", complex="holomorphic", cost=_cost)


def _parse(subscripts: str, shapes: Sequence[Shape]) -> tuple[list[str], str]:
    """The terms and the result, with letters for ellipses; checked.

    Raises:
        ArgumentError: the expression is not one, or does not fit the operands.
    """
    text = subscripts.replace(" ", "")

    def fail(why: str) -> ArgumentError:
        return ArgumentError(f"einsum: {subscripts!r} with operands of shapes {[tuple(s) for s in shapes]}: {why}")

    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(shapes):
        raise fail(f"{len(terms)} terms for {len(shapes)} operands")
    for term in (*terms, output):
        rest = term.replace("...", "", 1)
        if not all(c in string.ascii_letters for c in rest):
            raise fail(f"the term {term!r} has characters that are neither letters nor one ellipsis")
    free = [c for c in string.ascii_letters if c not in text]
    extra = []
    for term, shape in zip(terms, shapes, strict=True):
        named = len(term.replace("...", ""))
        if named > len(shape) or ("..." not in term and named != len(shape)):
            raise fail(f"the term {term!r} names {named} axes of an operand with {len(shape)}")
        extra.append(len(shape) - named)
    widest = max((n for n, term in zip(extra, terms, strict=True) if "..." in term), default=0)
    if widest > len(free):
        raise fail("more axes than letters")
    dots = "".join(free[:widest])
    terms = [term.replace("...", dots[widest - n :]) for term, n in zip(terms, extra, strict=True)]
    if arrow:
        output = output.replace("...", dots)
        if len(set(output)) != len(output):
            raise fail("an axis is twice in the result")
        if any(c not in "".join(terms) for c in output):
            raise fail("the result names an axis that no operand has")
    else:
        named_once = "".join(terms)
        output = dots + "".join(sorted(c for c in set(named_once) if named_once.count(c) == 1 and c not in dots))
    return terms, output


@functools.lru_cache(maxsize=256)
def _path(terms: tuple[str, ...], output: str, shapes: tuple[Shape, ...]) -> tuple[tuple[int, ...], ...]:
    """Which operands to contract, in turn; what results goes to the end of the list."""
    if len(terms) <= 2:
        return (tuple(range(len(terms))),)
    stand_ins = [np.broadcast_to(np.float64(0), shape) for shape in shapes]
    return tuple(np.einsum_path(f"{','.join(terms)}->{output}", *stand_ins, optimize="greedy")[0][1:])


def einsum(subscripts: str, /, *operands: Array) -> Array:
    """Einstein summation.

    Args:
        subscripts: numpy's notation: ``ij,jk->ik``, or without ``->`` for the axes that are named once, in alphabetical order; ``...``
            stands for axes that broadcast.
        operands: arrays.

    Returns:
        The sums of products over all axes that the result does not name.

    Raises:
        ArgumentError: the notation is wrong; ShapeError: lengths of an axis disagree.
    """
    if not isinstance(subscripts, str):
        raise ArgumentTypeError(f"einsum: the first argument is {type(subscripts).__name__}, expected a string such as 'ij,jk->ik'")
    arrays = [x if hasattr(x, "shape") else np.asarray(x) for x in operands]
    terms, output = _parse(subscripts, [tuple(x.shape) for x in arrays])
    for i in range(len(arrays)):
        terms[i], arrays[i] = _take_diagonals(terms[i], arrays[i], subscripts)
    size = _sizes(terms, arrays, subscripts)
    for i in range(len(arrays)):
        names = terms[i]
        stretched = tuple(k for k, c in enumerate(names) if arrays[i].shape[k] == 1 and size[c] != 1)
        if stretched:
            arrays[i] = squeeze(arrays[i], axis=stretched)
            terms[i] = "".join(c for k, c in enumerate(names) if k not in stretched)
    for group in _path(tuple(terms), output, tuple(tuple(x.shape) for x in arrays)):
        chosen = [(terms[i], arrays[i]) for i in group]
        for i in sorted(group, reverse=True):
            del terms[i], arrays[i]
        while len(chosen) > 1:
            others = "".join([*terms, *(term for term, _ in chosen[2:]), output])
            chosen[:2] = [_contract(*chosen[0], *chosen[1], others)]
        terms.append(chosen[0][0])
        arrays.append(chosen[0][1])
    names, result = _sum_alone(terms[0], arrays[0], output)
    order = _order(names, output)
    return result if order == tuple(range(len(order))) else permute(result, axes=order)


def _take_diagonals(names: str, x: Array, subscripts: str) -> tuple[str, Array]:
    while len(set(names)) < len(names):
        c = next(c for c in names if names.count(c) > 1)
        first = names.index(c)
        second = names.index(c, first + 1)
        if x.shape[first] != x.shape[second]:
            raise ShapeError(f"einsum: {subscripts!r}: the axis {c!r} has lengths {x.shape[first]} and {x.shape[second]} in one operand")
        x = diagonal(x, offset=0, axis1=first, axis2=second)
        names = "".join(n for k, n in enumerate(names) if k not in (first, second)) + c
    return names, x


def _sizes(terms: Sequence[str], arrays: Sequence[Array], subscripts: str) -> dict[str, int]:
    size: dict[str, int] = {}
    for names, x in zip(terms, arrays, strict=True):
        for c, length in zip(names, x.shape, strict=True):
            if size.get(c, 1) != 1 and length not in (1, size[c]):
                raise ShapeError(f"einsum: {subscripts!r}: the axis {c!r} has lengths {size[c]} and {length}; they must agree, or one be 1")
            size[c] = length if size.get(c, 1) == 1 else size[c]
    return size


def _sum_alone(names: str, x: Array, kept: str) -> tuple[str, Array]:
    """`x` summed over the axes that are not in `kept`."""
    alone = tuple(k for k, c in enumerate(names) if c not in kept)
    if not alone:
        return names, x
    return "".join(c for c in names if c in kept), sum_(x, axis=alone)


def _contract(names1: str, x1: Array, names2: str, x2: Array, others: str) -> tuple[str, Array]:
    """Two operands into one; `others` are the axes that are wanted later."""
    names1, x1 = _sum_alone(names1, x1, names2 + others)
    names2, x2 = _sum_alone(names2, x2, names1 + others)
    result = "".join(dict.fromkeys(c for c in names1 + names2 if c in others))
    return result, einsum_row(x1, x2, subscripts=f"{names1},{names2}->{result}")


def tensordot(x1: Array, x2: Array, /, *, axes: Any = 2) -> Array:
    """The sum of products over pairs of axes.

    Args:
        x1, x2: operands.
        axes: how many of the last axes of `x1` go with the first of `x2`, or two sequences of axes.

    Returns:
        The other axes of `x1`, then of `x2`.
    """
    ndim1, ndim2 = len(x1.shape), len(x2.shape)
    if np.ndim(axes) == 0 and not isinstance(axes, (tuple, list)):
        if not 0 <= axes <= min(ndim1, ndim2):
            raise ShapeError(f"tensordot: shapes {tuple(x1.shape)} and {tuple(x2.shape)} with axes={axes}, expected 0 to {min(ndim1, ndim2)} axes")
        pairs1, pairs2 = list(range(ndim1 - axes, ndim1)), list(range(axes))
    else:
        pairs1, pairs2 = ([int(a) for a in (p if np.iterable(p) else (p,))] for p in axes)
        pairs1, pairs2 = [checked_axis(a, ndim1) for a in pairs1], [checked_axis(a, ndim2) for a in pairs2]
    lengths1, lengths2 = [x1.shape[a] for a in pairs1], [x2.shape[a] for a in pairs2]
    if lengths1 != lengths2:
        raise ShapeError(f"tensordot: shapes {tuple(x1.shape)} and {tuple(x2.shape)} with axes {axes}: lengths {lengths1} and {lengths2} differ")
    rest1, rest2 = [a for a in range(ndim1) if a not in pairs1], [a for a in range(ndim2) if a not in pairs2]
    depth = math.prod(lengths1)
    left = reshape(permute(x1, axes=tuple(rest1 + pairs1)), shape=(math.prod(x1.shape[a] for a in rest1), depth))
    right = reshape(permute(x2, axes=tuple(pairs2 + rest2)), shape=(depth, math.prod(x2.shape[a] for a in rest2)))
    return reshape(matmul(left, right), shape=(*(x1.shape[a] for a in rest1), *(x2.shape[a] for a in rest2)))


# numpy's functions, with numpy's arguments


@implements(np.einsum)
def np_einsum(subscripts: Any, /, *operands: Any, out: Any = None, optimize: Any = False, **unsupported: Any) -> Array:
    """numpy's ``einsum``, with a string or with lists of axes; always in the cheapest order found."""
    refuse("einsum", out=out, **unsupported)
    return einsum(*as_string(subscripts, *operands))


def as_string(subscripts: Any, /, *operands: Any) -> tuple[Any, ...]:
    """``(a, [0, 1], b, [1, 2], [0, 2])`` as ``("ab,bc->ac", a, b)``; arguments that begin with a string as they are."""
    if isinstance(subscripts, str):
        return (subscripts, *operands)
    given = (subscripts, *operands)
    letters = string.ascii_letters
    terms = ["".join("..." if i is Ellipsis else letters[i] for i in axes) for axes in given[1::2]]
    text = ",".join(terms)
    if len(given) % 2:
        text += "->" + "".join("..." if i is Ellipsis else letters[i] for i in given[-1])
        given = given[:-1]
    return (text, *given[::2])


@implements(np.tensordot)
def np_tensordot(a: Array, b: Array, axes: Any = 2) -> Array:
    """numpy's ``tensordot``."""
    return tensordot(a, b, axes=axes)


@implements(np.linalg.tensordot)
def np_linalg_tensordot(x1: Array, x2: Array, /, *, axes: Any = 2) -> Array:
    """numpy's ``linalg.tensordot``."""
    return tensordot(x1, x2, axes=axes)
