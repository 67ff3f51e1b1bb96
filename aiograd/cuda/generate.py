"""Source text of kernels for chains of element-wise operations, made from the templates; the only module of this package that compiles text.

The text is a function of the operations, dtypes and layouts alone, never of values or of anything a user wrote: scalars are arguments, sizes
and strides as well, so a chain is compiled once for all sizes.

Note [Layouts]
    ``c``  elements in C order, read at the index of the result
    ``b``  one element for all
    ``s``  anything else: neighbouring axes that every such array passes through alike are merged, then the index is taken apart once for all
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import cuda

from aiograd.cuda.driver.protocol import Properties
from aiograd.cuda.kernels import scalar
from aiograd.cuda.layout import lowest, merged
from aiograd.cuda.templates import TEMPLATES
from aiograd.cuda.view import BufferView
from aiograd.running.types import Shape

#: elements that a thread computes before the grid is made larger
_PER_THREAD = 4

#: (operation, letters of its dtypes, what its arguments are)
Step = tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]]


def assignment(target: BufferView, source: BufferView) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """A kernel that copies `source`, broadcast and converted, into `target`, which may lie anyhow; and its arguments after the two pointers."""
    layouts, extents, strides = layout(target.shape, (source, target))
    letters = dtype_letters(source.dtype)
    described: tuple[Step, ...] = (("cast", (letters, dtype_letters(target.dtype)), (("x", 0),)),)
    scattered = layouts[1] == "s"
    kernel = kernel_of(
        described, (letters,), layouts if scattered else layouts[0], len(extents), (0,), 0, math.prod(target.shape) >= 2**31, scattered
    )
    return kernel, (math.prod(target.shape), *extents, *strides, *starts(layouts, (source, target)))


def layout(shape: Shape, arrays: Sequence[BufferView]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The layouts of arrays under `shape`: a letter for each, the extents of the merged axes, and strides; see Note [Layouts].

    Strides are given for each ``s`` array, in elements, along all merged axes.
    """
    letters: list[str] = []
    strided: list[tuple[int, ...]] = []
    for array in arrays:
        if array.shape == shape and array.is_contiguous:
            letters.append("c")
        elif array.size == 1:
            letters.append("b")
        else:
            letters.append("s")
            missing = len(shape) - len(array.shape)
            strided.append((0,) * missing + tuple(
                0 if extent == 1 and wanted != 1 else stride // array.itemsize
                for extent, wanted, stride in zip(array.shape, shape[missing:], array.strides, strict=True)
            ))  # fmt: skip
    if not strided:
        return "".join(letters), (), ()
    extents, strides = merged(shape, strided)
    return "".join(letters), extents, tuple(itertools.chain(*strides))


def starts(layouts: str, arrays: Sequence[BufferView]) -> tuple[int, ...]:
    """Where the first element of each strided array is, from its pointer, in elements."""
    return tuple(-lowest(array.shape, array.strides) // array.itemsize for letter, array in zip(layouts, arrays, strict=True) if letter == "s")


def grid_of(properties: Properties, shape: Shape) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Blocks and threads for a kernel over a shape."""
    threads = properties.threads
    size = math.prod(shape)
    blocks = math.ceil(size / threads)
    if blocks > properties.multiprocessors:
        blocks = max(properties.multiprocessors, math.ceil(size / (threads * _PER_THREAD)))
    return (min(blocks, properties.blocks), 1, 1), (threads, 1, 1)


def element(described: tuple[Step, ...], dtypes: tuple[str, ...]) -> tuple[list[str], dict[int, str]]:
    """Lines that compute one element from ``x<place>`` loaded as ``v<place>`` and scalars ``k<place>``; and the name of each step's result."""
    lines: list[str] = []
    names: dict[int, str] = {}
    letters_of: dict[int, str] = {}
    counter = iter(range(10**6))

    def let(text: str) -> str:
        name = f"t{next(counter)}"
        lines.append(f"{name} = {text}")
        return name

    for place, (operation, loop, args) in enumerate(described):
        precision = computed_in(loop[0] if operation != "where" else loop[1])
        texts: list[str] = []
        for (kind, number), wanted in zip(args, loop[:-1], strict=True):
            if kind == "t":
                texts.append(let(converted(names[number], letters_of[number], computed_in(wanted), wanted)))
            elif kind == "x":
                texts.append(let(converted(f"v{number}", dtypes[number], computed_in(wanted), wanted)))
            else:
                texts.append(let(converted(f"k{number}", wanted, computed_in(wanted), wanted)))
        result = let(TEMPLATES[operation](let, precision, *texts))
        made = loop[-1]
        names[place] = let(_rounded(result, operation, precision, made))
        letters_of[place] = made
    return lines, names


def converted(text: str, found: str, computed: str, wanted: str) -> str:
    """A value of dtype `found` as the operation takes it: rounded to `wanted`, then in the precision it computes in."""
    if found == wanted:
        return text if found == computed or found == "b1" else f"{computed}({text})"
    if wanted == "b1":
        return f"({text} != 0)"
    if found == "b1":
        text = f"u1({text})"
    if wanted == "f2":
        return f"f4(f2({text}))"
    return f"{wanted}({text})"


def _rounded(text: str, operation: str, precision: str, made: str) -> str:
    if made == "b1":
        return text if operation != "cast" or precision == "b1" else f"({text} != 0)"
    if precision == "b1":
        return f"{made}({text})"
    return f"f2({text})" if made == "f2" else f"{made}({text})"


@functools.lru_cache(maxsize=4096)
def kernel_of(
    described: tuple[Step, ...], dtypes: tuple[str, ...], layouts: str, axes: int, outputs: tuple[int, ...], scalars: int, wide: bool, scattered: bool
) -> Callable[..., None]:
    """Build the kernel of some steps; `scattered` says that the last layout belongs to the only output."""
    lines, names = element(described, dtypes)
    strided = [place for place, letter in enumerate(layouts) if letter == "s"]
    parameters = [f"o{i}" for i in range(len(outputs))] + [f"x{i}" for i in range(len(dtypes))] + ["n"] + [f"k{i}" for i in range(scalars)]
    parameters += [f"d{axis}" for axis in range(axes)] + [f"s{place}_{axis}" for place in strided for axis in range(axes)]
    parameters += [f"b{place}" for place in strided]
    index = "u8" if wide else "u4"
    body: list[str] = []
    if strided:
        body.append(f"r = {index}(i)")
        for axis in range(axes - 1, 0, -1):
            body += [f"q = {index}(r // {index}(d{axis}))", f"c{axis} = i8(r - q * {index}(d{axis}))", "r = q"]
        body.append("c0 = i8(r)")
    for place, letter in enumerate(layouts[: len(dtypes)]):
        where = "i" if letter == "c" else "0" if letter == "b" else " + ".join((f"b{place}", *(f"c{axis} * s{place}_{axis}" for axis in range(axes))))
        body.append(f"v{place} = x{place}[{where}]" + (" != 0" if dtypes[place] == "b1" else ""))
    body += lines
    there = " + ".join((f"b{len(dtypes)}", *(f"c{axis} * s{len(dtypes)}_{axis}" for axis in range(axes)))) if scattered else "i"
    for number, place in enumerate(outputs):
        body.append(f"o{number}[{there}] = " + (f"u1({names[place]})" if described[place][1][-1] == "b1" else names[place]))
    name = "_".join(step[0] for step in described[-4:]) if len(described) <= 4 else f"{described[0][0]}_to_{described[-1][0]}_{len(described)}"
    head = f"def {name}({', '.join(parameters)}):\n    for i in range(cuda.grid(1), n, cuda.gridsize(1)):\n"
    return compile_text(name, head + "".join(f"        {line}\n" for line in body))


_namespace: dict[str, Any] = {}
_CONSTANTS = {
    "zero": 0.0, "one": 1.0, "half": 0.5, "ln2": math.log(2), "log2e": 1 / math.log(2), "deg2rad": math.pi / 180, "rad2deg": 180 / math.pi,
}  # fmt: skip


def compile_text(name: str, text: str) -> Callable[..., None]:
    """The function that a text defines, with what templates may name."""
    if not _namespace:
        _namespace.update(scalar.TYPES)
        for precision, kind in (("f4", np.float32), ("f8", np.float64)):
            _namespace.update({f"{each}_{precision}": scalar.function(each, precision) for each in scalar.names()})
            for constant, value in _CONSTANTS.items():
                _namespace[f"{constant}_{precision}"] = kind(value)
    space = {**_namespace, "cuda": cuda, "__name__": "aiograd.cuda.generated"}
    filename = f"<aiograd kernel {name} {abs(hash(text)):x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)  # numba reads a kernel's source
    exec(compile(text, filename, "exec"), space)  # noqa: S102  # made from the templates alone
    return space[name]  # type: ignore[no-any-return]


def dtype_letters(dtype: np.dtype[Any]) -> str:
    """The kind and size of a dtype, ``f4``."""
    return f"{dtype.kind}{dtype.itemsize}"


def computed_in(letters: str) -> str:
    """In which precision elements of a dtype are computed."""
    return "f4" if letters == "f2" else letters

