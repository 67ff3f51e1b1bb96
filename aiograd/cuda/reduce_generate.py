"""Source text of kernels that reduce. One launch also computes the pending expression of the argument and the steps on the result.

Note [Stages]
    ``whole``    elements in, results out
    ``partial``  elements in, accumulators of each part out (`aiograd.cuda.tiles`)
    ``final``    accumulators in, results out

    All three have one text: a lane folds its elements into four accumulators in turn, these fold into one, and the lanes of a result fold in a tree.

Note [Axes along which a source varies]
    ``a`` all axes   ``k`` the kept axes: read once for a result   ``c`` nothing: read once

Note [The same bits]
    The order of a sum follows from shape, axes and the layout of the argument. A pending argument counts as if it lay in memory, so a sum has the
    same bits whether its argument was launched before or not, and its pending operations round as they would alone.

Rejected: numba's ``cuda.reduce`` (one dtype and one axis, and it allocates on each call); atomics (they add in the order of arrival).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiograd.cuda.generate import Step, compile_text, computed_in, converted, element
from aiograd.cuda.tiles import UNROLLED, Tile

#: constants as a text without names can say them
_INFINITY = "1e999"
_NAN = "1e999 - 1e999"


@dataclass(frozen=True, slots=True)
class Fold:
    """A way to bring two accumulators together.

    Accumulators are named ``<a>`` and ``<b>`` in the texts, their positions ``<a>i`` and ``<b>i``; ``T`` is their precision.
    """

    name: str
    #: precision -> initial value of an accumulator
    start: Callable[[str], str]
    #: lines that bring `b` into `a`
    lines: Callable[[str, str, str], list[str]]
    #: True if elements are converted to booleans
    truth: bool = False
    #: True if the result is the position of an element
    position: bool = False


def _number(value: int) -> Callable[[str], str]:
    return lambda T: f"{T}({value})"


def _limit(sign: str) -> Callable[[str], str]:
    def start(T: str) -> str:
        if T[0] == "f":
            return f"{T}({sign}{_INFINITY})"
        bits = 8 * int(T[1])
        if T[0] == "u":
            return f"{T}({0 if sign == '-' else 2**bits - 1})"
        return f"{T}({-(2 ** (bits - 1)) if sign == '-' else 2 ** (bits - 1) - 1})"

    return start


def _expression(text: str, integral: str | None = None) -> Callable[[str, str, str], list[str]]:
    def lines(T: str, a: str, b: str) -> list[str]:
        chosen = text if T[0] == "f" or integral is None else integral
        return [f"{a} = " + chosen.format(T=T, a=a, b=b)]

    return lines


def _position(comparison: str) -> Callable[[str, str, str], list[str]]:
    def lines(T: str, a: str, b: str) -> list[str]:
        wins = f"{b} {comparison} {a}"
        ties = f"{b} == {a}"
        if T[0] == "f":
            wins += f" or ({b} != {b} and {a} == {a})"
            ties += f" or ({b} != {b} and {a} != {a})"
        return [f"if {wins} or (({ties}) and {b}i < {a}i):", f"    {a} = {b}", f"    {a}i = {b}i"]

    return lines


FOLDS = {
    fold.name: fold
    for fold in (
        Fold("sum", _number(0), _expression("{a} + {b}", "{T}({a} + {b})")),
        Fold("prod", _number(1), _expression("mul_{T}({a}, {b})", "{T}({a} * {b})")),
        Fold("max", _limit("-"), _expression("({b} if ({b} > {a} or {b} != {b}) else {a})", "({b} if {b} > {a} else {a})")),
        Fold("min", _limit(""), _expression("({b} if ({b} < {a} or {b} != {b}) else {a})", "({b} if {b} < {a} else {a})")),
        Fold("fmax", lambda T: f"{T}({_NAN})" if T[0] == "f" else _limit("-")(T), _expression("({b} if ({b} >= {a} or {a} != {a}) else {a})")),
        Fold("fmin", lambda T: f"{T}({_NAN})" if T[0] == "f" else _limit("")(T), _expression("({b} if ({b} <= {a} or {a} != {a}) else {a})")),
        Fold("any", _number(0), _expression("({b} if {b} != 0 else {a})"), truth=True),
        Fold("all", _number(1), _expression("({b} if {b} == 0 else {a})"), truth=True),
        Fold("count_nonzero", _number(0), _expression("{T}({a} + {b})"), truth=True),
        Fold("argmax", _limit("-"), _position(">"), position=True),
        Fold("argmin", _limit(""), _position("<"), position=True),
    )
}

#: the last step on a result before it is written: the text for an accumulator ``{a}`` of precision ``{T}`` and the scalar ``by``
FINISHES = {"": "{a}", "divide": "{a} / by", "divide_root": "sqrt_{T}({a} / by)"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the text of a kernel; sizes and strides are its arguments."""

    fold: str
    #: pending operations of the argument, innermost first
    steps: tuple[Step, ...]
    #: of the sources
    dtypes: tuple[str, ...]
    #: see Note [Axes along which a source varies]
    varies: str
    #: how many axes are kept, and reduced, after merging
    kept: int
    reduced: int
    #: scalars that the steps use
    scalars: int
    #: the dtypes of elements as they are taken, of accumulators and of results
    taken: str
    accumulator: str
    result: str
    finish: str
    stage: str
    columns: int
    lanes: int
    along: bool
    wide: bool


def recipe_for(tile: Tile, **fields: Any) -> Recipe:
    """A recipe with the block of a tile."""
    return Recipe(columns=tile.columns, lanes=tile.lanes, along=tile.along, **fields)


@functools.lru_cache(maxsize=4096)
def kernel(recipe: Recipe) -> Callable[..., None]:
    """A kernel that reduces.

    Its arguments are ``(outputs, sources, m, n, chunk, scalars, [by,] extents of kept axes but the first, of reduced ones, strides of the result
    along kept axes, then of each source that varies where its first element is, and its strides along kept axes and, for ``a``, along reduced
    axes)``.

    The outputs are one, or accumulators and their positions where the stage is partial and positions are wanted.
    """
    fold = FOLDS[recipe.fold]
    T = recipe.accumulator
    lanes, columns = recipe.lanes, recipe.columns
    partial, final = recipe.stage == "partial", recipe.stage == "final"
    outputs = ["o0", "o1"] if partial and fold.position else ["o0"]
    sources = range(len(recipe.dtypes))
    parameters = [*outputs, *(f"x{p}" for p in sources), "m", "n", "chunk", *(f"k{i}" for i in range(recipe.scalars))]
    parameters += ["by"] if recipe.finish and not partial else []
    parameters += [f"d{a}" for a in range(1, recipe.kept)] + [f"e{a}" for a in range(1, recipe.reduced)]
    parameters += [f"so_{a}" for a in range(recipe.kept)]
    for p, letter in enumerate(recipe.varies):
        parameters += [f"at{p}", *(f"s{p}_{a}" for a in range(recipe.kept))] if letter in "ak" else []
        parameters += [f"r{p}_{a}" for a in range(recipe.reduced)] if letter == "a" else []

    def fill(a: str, value: str, position: str) -> list[str]:
        return [f"{a} = {value}", *([f"{a}i = {position}"] if fold.position else [])]

    body = ["tid = cuda.threadIdx.x", *_threads(recipe)]
    body += [f"i = i8(cuda.blockIdx.x) * {columns} + i8(column)", "start = i8(cuda.blockIdx.y) * chunk", "stop = min(n, start + chunk)"]
    for u in range(UNROLLED):
        body += fill(f"a{u}", fold.start(T), "n")
    row = _coordinates("i", recipe.kept, "d", recipe.wide)
    for p, letter in enumerate(recipe.varies):
        if letter == "c":
            row.append(_load(p, "0", recipe.dtypes[p]))
        else:
            row.append(f"b{p} = at{p} + " + " + ".join(f"c{a} * s{p}_{a}" for a in range(recipe.kept)))
            if letter == "k":
                row.append(_load(p, f"b{p}", recipe.dtypes[p]))
    row.append("j = start + i8(lane)")
    one = _element(recipe, fold)
    row.append(f"while j + {(UNROLLED - 1) * lanes} < stop:")
    for u in range(UNROLLED):
        row += [f"    {line}" for line in ([f"h = j + {u * lanes}", *one, *fold.lines(T, f"a{u}", "z")])]
    row += [f"    j += {UNROLLED * lanes}", "while j < stop:", "    h = j", *(f"    {line}" for line in one)]
    row += [f"    {line}" for line in fold.lines(T, "a0", "z")] + [f"    j += {lanes}"]
    row += [*fold.lines(T, "a0", "a1"), *fold.lines(T, "a2", "a3"), *fold.lines(T, "a0", "a2")]
    body += ["if i < m:", *(f"    {line}" for line in row)]
    if lanes > 1:
        body += _tree(recipe, fold)
    store = _coordinates("i", recipe.kept, "d", recipe.wide)
    if partial:
        store = ["there = i8(cuda.blockIdx.y) * m + i", "o0[there] = a0", *(["o1[there] = a0i"] if fold.position else [])]
    else:
        finished = "a0i" if fold.position else FINISHES[recipe.finish].format(a="a0", T=T)
        stored = f"u1({finished} != 0)" if recipe.result == "b1" else f"{recipe.result}({finished})"
        store += [f"o0[{' + '.join(f'c{a} * so_{a}' for a in range(recipe.kept))}] = {stored}"]
    body += ["if i < m and lane == 0:", *(f"    {line}" for line in store)]
    name = f"{recipe.fold}{'_of_' + '_'.join(step[0] for step in recipe.steps[-3:]) if recipe.steps and not final else ''}_{recipe.stage}"
    return compile_text(name, f"def {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in body))


def _threads(recipe: Recipe) -> list[str]:
    if recipe.along:
        return [f"lane = tid % {recipe.lanes}", f"column = tid // {recipe.lanes}"]
    return [f"column = tid % {recipe.columns}", f"lane = tid // {recipe.columns}"]


def _tree(recipe: Recipe, fold: Fold) -> list[str]:
    """The lanes of each result come together in its first."""
    threads, T = recipe.columns * recipe.lanes, recipe.accumulator
    apart = 1 if recipe.along else recipe.columns
    lines = [f"shared = cuda.shared.array({threads}, {T})", "shared[tid] = a0"]
    if fold.position:
        lines += [f"places = cuda.shared.array({threads}, i8)", "places[tid] = a0i"]
    lines += ["cuda.syncthreads()", f"half = {recipe.lanes // 2}", "while half > 0:", "    if lane < half:"]
    lines += [f"        z = shared[tid + half * {apart}]"]
    lines += [f"        zi = places[tid + half * {apart}]"] if fold.position else []
    lines += [f"        {line}" for line in fold.lines(T, "a0", "z")]
    lines += ["        shared[tid] = a0", *(["        places[tid] = a0i"] if fold.position else [])]
    return [*lines, "    cuda.syncthreads()", "    half //= 2"]


def _element(recipe: Recipe, fold: Fold) -> list[str]:
    """Lines that make the accumulator ``z`` of the element at the index ``h`` of its result."""
    lines = _coordinates("h", recipe.reduced, "e", recipe.wide, "g")
    for p, letter in enumerate(recipe.varies):
        if letter == "a":
            lines.append(_load(p, f"b{p} + " + " + ".join(f"g{a} * r{p}_{a}" for a in range(recipe.reduced)), recipe.dtypes[p]))
    if recipe.stage == "final":
        return [*lines, "z = v0", *(["zi = v1"] if fold.position else [])]
    text, letters = "v0", recipe.dtypes[0]
    if recipe.steps:
        computed, names = element(recipe.steps, recipe.dtypes)
        lines += computed
        text, letters = names[len(recipe.steps) - 1], recipe.steps[-1][1][-1]
    T = recipe.accumulator
    if fold.truth:
        single = computed_in(letters)  # compared with a number of its own precision, not with Python's
        nonzero = text if letters == "b1" else f"({single}({text}) != zero_{single})" if letters[0] == "f" else f"({text} != 0)"
        lines.append("z = " + converted(nonzero, "b1", T, T))
    else:
        lines.append(f"z = {T}({converted(text, letters, computed_in(recipe.taken), recipe.taken)})")
    return [*lines, *(["zi = h"] if fold.position else [])]


def _coordinates(index: str, axes: int, extents: str, wide: bool, name: str = "c") -> list[str]:
    """Take an index apart into one along each axis, ``c0``, ``c1``, ..."""
    if axes == 1:
        return [f"{name}0 = {index}"]
    unsigned = "u8" if wide else "u4"
    lines = [f"rest = {unsigned}({index})"]
    for axis in range(axes - 1, 0, -1):
        lines += [f"quotient = {unsigned}(rest // {unsigned}({extents}{axis}))"]
        lines += [f"{name}{axis} = i8(rest - quotient * {unsigned}({extents}{axis}))", "rest = quotient"]
    return [*lines, f"{name}0 = i8(rest)"]


def _load(place: int, where: str, letters: str) -> str:
    return f"v{place} = x{place}[{where}]" + (" != 0" if letters == "b1" else "")
