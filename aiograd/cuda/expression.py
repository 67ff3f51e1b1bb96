"""Pending element-wise operations, and how a chain of them becomes one launch.

Note [Pending]
    An element-wise operation is not launched when it is called: its result's buffer remembers an expression. An operation on that result of the
    same shape takes the expression in; any other use of the memory flushes it, which launches one kernel for the whole chain. The same kernel writes
    the intermediate results that are still referenced; others are never in memory at all. A result that is never used is never computed.

Note [The same bits]
    Whether operations end up in one kernel or in several depends on the reads in between, so it must not change a bit: each
    operation rounds to its dtype, and multiplications are not contracted with additions (`aiograd.cuda.kernels.scalar`).

Note [Writes]
    An expression reads its sources when it is launched. Every buffer it reads knows it (`Buffer.readers`), and is written only after it was
    launched.

Rejected: launching each operation (a chain is bound by memory traffic, so it costs its length); tracing whole functions (nothing may depend on
values then).

Source: the lazily fused elementwise graphs of tinygrad and of JAX's XLA; limits as in PyTorch's TensorIterator.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.cuda import generate
from aiograd.cuda.array import CudaArray, check_same
from aiograd.cuda.buffer import Buffer, PendingWork
from aiograd.cuda.command import enqueue
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.driver.protocol import DeviceDriver, Pointer
from aiograd.cuda.layout import contiguous_strides, lowest
from aiograd.cuda.stream_state import StreamState
from aiograd.graph import current_node
from aiograd.running.types import Shape

#: a chain is launched when it would grow beyond so many operations, or so many arrays to read
MAX_OPERATIONS = 24
MAX_ARRAYS = 10
#: how many kernels with their arguments a device remembers, by operations, shapes and strides
_PLANS = 10_000

_Size = tuple[int, int, int]

#: types of numbers without a dtype
NUMBERS = frozenset({int, float, bool})


class Expression:
    """One element-wise operation on arrays, scalars and other expressions of the same shape.

    Args:
        operation: name of its template.
        args: the arguments of the operation.
        loop: dtypes of its arguments, then of its result.
        shape: the shape of its result.
        stream_state, node: the stream, and the node of the graph, that it was asked for on.
    """

    __slots__ = ("operation", "args", "loop", "shape", "stream_state", "node", "owner", "count", "arrays", "inner", "filled", "__weakref__")

    def __init__(
        self, operation: str, args: tuple[Any, ...], loop: tuple[np.dtype[Any], ...], shape: Shape, stream_state: StreamState, node: Any
    ) -> None:
        self.operation = operation
        self.args = args
        self.loop = loop
        self.shape = shape
        self.stream_state = stream_state
        self.node = node
        #: the buffer it would fill
        self.owner: weakref.ref[Buffer] | None = None
        #: set when it has been launched: the buffer with its values
        self.filled: Buffer | None = None
        #: arrays that it and the expressions in it read
        self.arrays: dict[int, CudaArray] = {}
        #: expressions that it takes in, innermost first
        self.inner: dict[int, Expression] = {}
        for arg in args:
            if arg.__class__ is Expression:
                self.inner |= arg.inner
                self.inner[id(arg)] = arg
                self.arrays |= arg.arrays
            elif arg.__class__ is CudaArray:
                self.arrays[id(arg)] = arg
        self.count = 1 + len(self.inner)

    @property
    def result(self) -> CudaArray | None:
        """An array with its values, once it has been launched."""
        if self.filled is None:
            return None
        dtype = self.loop[-1]
        return CudaArray(self.filled, 0, self.shape, contiguous_strides(self.shape, dtype.itemsize), dtype, None)

    def flush(self) -> None:
        """Launch it; the kernel also writes the results of the operations in it that are still referenced. A second call does nothing."""
        buffer = None if self.owner is None else self.owner()
        if buffer is None or buffer.expression is not self:
            return
        with buffer.device.lock:
            if buffer.expression is self:
                _launch(buffer.device, self, buffer)


def pending(device: DeviceCore, operation: str, inputs: tuple[Any, ...], loop: tuple[np.dtype[Any], ...], shape: Shape) -> CudaArray:
    """A new array with a pending operation for its values.

    Raises:
        DeviceMismatchError: the arrays live on several devices.
    """
    check_same(device, operation, inputs)
    result = CudaArray.make(device, shape, loop[-1])
    buffer = result.buffer
    if not buffer.nbytes:
        return result
    with device.lock:
        args = [
            dtype.type(value) if value.__class__ in NUMBERS else _argument(device, value, dtype, shape)
            for value, dtype in zip(inputs, loop, strict=False)  # the last dtype is the result's
        ]
        inner = [arg for arg in args if arg.__class__ is Expression]
        if inner and _are_many(args, inner):
            for i, (arg, value) in enumerate(zip(args, inputs, strict=True)):
                if arg.__class__ is Expression:
                    arg.flush()
                    args[i] = value
        expression = Expression(operation, tuple(args), loop, shape, device.current_stream_state(), current_node())
        expression.owner = weakref.ref(buffer)
        buffer.expression = expression
        reference: weakref.ref[PendingWork] = weakref.ref(expression)
        for array in expression.arrays.values():
            _remember(array.buffer, reference)
        for taken_in in expression.inner.values():
            owner = None if taken_in.owner is None else taken_in.owner()
            if owner is not None:
                _remember(owner, reference)
    return result


def _are_many(args: Sequence[Any], inner: Sequence[Expression]) -> bool:
    """True for arguments that would make too large a chain."""
    arrays = {id(arg) for arg in args if arg.__class__ is CudaArray}
    return 1 + sum(each.count for each in inner) > MAX_OPERATIONS or len(arrays.union(*[each.arrays for each in inner])) > MAX_ARRAYS


def _remember(buffer: Buffer, reader: weakref.ref[PendingWork]) -> None:
    readers = buffer.readers
    if len(readers) > 32 and len(readers).bit_count() == 1:  # at each power of two, so that many readers are not gone through for each of them
        readers[:] = [each for each in readers if each() is not None and each().filled is None]  # type: ignore[union-attr]
    readers.append(reader)


def _argument(device: DeviceCore, value: Any, dtype: np.dtype[Any], shape: Shape) -> Any:
    """An argument of an expression: an expression to take in, an array to read, or a scalar."""
    if value.__class__ is not CudaArray:
        if isinstance(value, np.ndarray) and value.ndim:
            return CudaArray.from_host(device, value)
        return dtype.type(value) if value.__class__ in NUMBERS else np.asarray(value).astype(dtype)[()]
    expression = value.buffer.expression
    if not isinstance(expression, Expression):
        return value
    if value.shape == shape and value.dtype == expression.loop[-1] and value.is_whole and expression.shape == shape:
        return expression
    expression.flush()
    return value


def _launch(device: DeviceCore, root: Expression, buffer: Buffer) -> None:
    """Launch one kernel for `root` and the expressions in it; the lock is held."""
    steps: list[Expression] = [root]
    arrays = root.arrays
    outputs: list[tuple[int, Buffer]] = [(0, buffer)]
    if root.count > 1:
        steps, arrays, outputs = [], {}, []
        order(root, steps, arrays, set())
        for place, step in enumerate(steps):
            owner = None if step.owner is None else step.owner()
            if owner is not None and owner.expression is step:
                outputs.append((place, owner))
    kernel, grid, block, arguments = chain(device, steps, arrays, tuple([place for place, _ in outputs]), root.shape)
    read, reads = [], {}
    for array in arrays.values():
        source = array.buffer
        reads[id(source)] = source
        offset = array.offset + lowest(array.shape, array.strides)
        read.append((source, offset, array.dtype, (source.nbytes - offset) // array.dtype.itemsize))
    writes, results = [], []
    for place, owner in outputs:
        dtype = steps[place].loop[-1]
        writes.append(owner)
        results.append((owner, 0, dtype, owner.nbytes // dtype.itemsize))

    def run(driver: DeviceDriver, stream: Any) -> None:
        pointers = [Pointer(owner.memory, offset, dtype, extent) for owner, offset, dtype, extent in (*results, *read)]
        driver.launch(kernel, grid, block, (*pointers, *arguments), stream)

    for place, owner in outputs:
        owner.expression = None
        steps[place].filled = owner
    enqueue(device, kernel.__name__, run, tuple(reads.values()), tuple(writes), root.stream_state, root.node)
    for place, _ in outputs:
        step = steps[place]
        step.args, step.arrays, step.inner = (), {}, {}


def order(root: Expression, steps: list[Expression], arrays: dict[int, CudaArray], seen: set[int]) -> None:
    """Expressions to compute, arguments first, and arrays to read, by the identity of the argument that they are.

    Expressions that were launched in the meantime are among the arrays.
    """
    for arg in root.args:
        if arg.__class__ is Expression:
            if id(arg) in seen:
                continue
            seen.add(id(arg))
            values = arg.result
            if values is None:
                order(arg, steps, arrays, seen)
            else:
                arrays[id(arg)] = values
        elif arg.__class__ is CudaArray:
            arrays[id(arg)] = arg
    steps.append(root)


def chain(
    device: DeviceCore, steps: Sequence[Expression], arrays: Mapping[int, CudaArray], outputs: tuple[int, ...], shape: Shape
) -> tuple[Callable[..., None], _Size, _Size, tuple[Any, ...]]:
    """A kernel for operations, its grid and block, and its arguments after the pointers.

    Args:
        device: the device of the kernel.
        steps: operations, arguments first.
        arrays: the arrays that they read, see `order`.
        outputs: the steps with a result that is written; their pointers come first, then the pointers of `arrays`.
        shape: the shape of every result.
    """
    described, scalars = describe(steps, arrays)
    key = (described, outputs, shape, *[(array.dtype, array.shape, array.strides) for array in arrays.values()])
    plan = device.plans.get(key)
    if plan is None:
        found = tuple(arrays.values())
        layouts, extents, strides = generate.layout(shape, found)
        wide = math.prod(shape) >= 2**31
        dtypes = tuple(generate.dtype_letters(array.dtype) for array in found)
        kernel = generate.kernel_of(described, dtypes, layouts, len(extents), outputs, len(scalars), wide, False)
        if len(device.plans) > _PLANS:
            device.plans.clear()
        tail = (*extents, *strides, *generate.starts(layouts, found))
        plan = device.plans[key] = (kernel, *generate.grid_of(device.properties, shape), math.prod(shape), tail)
    kernel, grid, block, n, tail = plan
    return kernel, grid, block, (n, *scalars, *tail)


def describe(steps: Sequence[Expression], arrays: Mapping[int, CudaArray]) -> tuple[tuple[generate.Step, ...], list[Any]]:
    """A description of `steps` without their values, and the scalars they use."""
    array_places = {key: place for place, key in enumerate(arrays)}
    step_places = {id(step): place for place, step in enumerate(steps)}
    scalars: list[Any] = []
    described: list[generate.Step] = []
    for step in steps:
        args: list[tuple[str, int]] = []
        for arg in step.args:
            key = id(arg)
            if key in array_places:
                args.append(("x", array_places[key]))
            elif key in step_places:
                args.append(("t", step_places[key]))
            else:
                args.append(("k", len(scalars)))
                scalars.append(arg)
        letters = _loops.get(step.loop)
        if letters is None:
            letters = _loops[step.loop] = tuple(generate.dtype_letters(dtype) for dtype in step.loop)
        described.append((step.operation, letters, tuple(args)))
    return tuple(described), scalars


_loops: dict[tuple[np.dtype[Any], ...], tuple[str, ...]] = {}
