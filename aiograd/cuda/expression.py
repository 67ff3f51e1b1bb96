"""Pending element-wise operations, and how a chain of them becomes one launch.

Note [Pending]
    An element-wise operation is not launched when it is called: its result's buffer remembers an expression. An operation on that result of the
    same shape takes the expression in; whatever else needs the memory flushes it, which launches one kernel for the whole chain. Intermediate
    results that somebody still holds are written by the same kernel; those that nobody holds are never in memory at all. A result that nobody
    ever needs is never computed.

Note [The same bits]
    Whether operations end up in one kernel or in several depends on who looked at what in between, so it must not change a bit: each
    operation rounds to its dtype, and multiplications are not contracted with additions (`aiograd.cuda.kernels.scalar`).

Note [Writes]
    An expression reads its sources when it is launched. Every buffer it reads knows it (`Buffer.readers`), and is written only after it was
    launched.

Rejected: launching each operation (a chain is bound by memory traffic, so it costs its length); tracing whole functions (nothing may depend on
values then).

Source: the lazily fused elementwise graphs of tinygrad and of JAX's XLA; limits as in PyTorch's TensorIterator.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.cuda import generate
from aiograd.cuda.array import CudaArray, contiguous_strides
from aiograd.cuda.buffer import Buffer
from aiograd.cuda.driver.protocol import Driver, Pointer
from aiograd.graph import current_node
from aiograd.types import Shape

if TYPE_CHECKING:
    from aiograd.cuda.command import Lane
    from aiograd.cuda.device import CudaDevice

#: a chain is launched when it would grow beyond so many operations, or so many arrays to read
MAX_OPERATIONS = 24
MAX_ARRAYS = 10


_NUMBERS = frozenset({int, float, bool})


class Expression:
    """One element-wise operation on arrays, scalars and other expressions of the same shape.

    Args:
        operation: name of its template.
        args: what it is applied to.
        loop: dtypes of its arguments, then of its result.
        shape: of its result.
        lane, node: where and for which node of the graph it was asked for.
    """

    __slots__ = ("operation", "args", "loop", "shape", "lane", "node", "owner", "count", "arrays", "inner", "filled", "__weakref__")

    def __init__(self, operation: str, args: tuple[Any, ...], loop: tuple[np.dtype[Any], ...], shape: Shape, lane: Lane, node: Any) -> None:
        self.operation = operation
        self.args = args
        self.loop = loop
        self.shape = shape
        self.lane = lane
        self.node = node
        #: the buffer it would fill
        self.owner: weakref.ref[Buffer] | None = None
        #: set when it has been launched: the buffer with its values
        self.filled: Buffer | None = None
        #: arrays that it reads, its own and those of the expressions it takes in
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
        """Launch it, and with it every operation it takes in whose result somebody holds. Does nothing when that was done already."""
        buffer = None if self.owner is None else self.owner()
        if buffer is None or buffer.expression is not self:
            return
        with buffer.device.lock:
            if buffer.expression is self:
                _launch(buffer.device, self, buffer)


def pending(device: CudaDevice, operation: str, inputs: tuple[Any, ...], loop: tuple[np.dtype[Any], ...], shape: Shape) -> CudaArray:
    """A new array whose values an operation will give.

    Raises:
        DeviceMismatchError: the arrays live on several devices.
    """
    device.check_same(operation, inputs)
    result = CudaArray.make(device, shape, loop[-1])
    buffer = result.buffer
    if not buffer.nbytes:
        return result
    with device.lock:
        args = [_argument(device, value, dtype, shape) for value, dtype in zip(inputs, loop[:-1], strict=True)]
        operations = 1
        arrays: set[int] = set()
        for arg in args:
            if arg.__class__ is Expression:
                operations += arg.count
                arrays.update(arg.arrays)
            elif arg.__class__ is CudaArray:
                arrays.add(id(arg))
        if operations > MAX_OPERATIONS or len(arrays) > MAX_ARRAYS:
            for i, (arg, value) in enumerate(zip(args, inputs, strict=True)):
                if arg.__class__ is Expression:
                    arg.flush()
                    args[i] = value
        expression = Expression(operation, tuple(args), loop, shape, device.current_lane(), current_node())
        expression.owner = weakref.ref(buffer)
        buffer.expression = expression
        reference = weakref.ref(expression)
        for array in expression.arrays.values():
            _remember(array.buffer, reference)
        for inner in expression.inner.values():
            owner = None if inner.owner is None else inner.owner()
            if owner is not None:
                _remember(owner, reference)
    return result


def _remember(buffer: Buffer, reader: weakref.ref[Expression]) -> None:
    if len(buffer.readers) > 32:
        buffer.readers = [each for each in buffer.readers if each() is not None and each().filled is None]  # type: ignore[union-attr]
    buffer.readers.append(reader)


def _argument(device: CudaDevice, value: Any, dtype: np.dtype[Any], shape: Shape) -> Any:
    """An expression to take in, an array to read, or a scalar."""
    if value.__class__ is not CudaArray:
        if isinstance(value, np.ndarray) and value.ndim:
            return device.from_host(value)
        return dtype.type(value) if value.__class__ in _NUMBERS else np.asarray(value).astype(dtype)[()]
    expression = value.buffer.expression
    if expression is None:
        return value
    if value.shape == shape and value.dtype == expression.loop[-1] and value.is_whole and expression.shape == shape:
        return expression
    expression.flush()
    return value


def _launch(device: CudaDevice, root: Expression, buffer: Buffer) -> None:
    """One kernel for `root` and what it takes in; the lock is held."""
    steps: list[Expression] = []
    arrays: dict[int, CudaArray] = {}
    seen: set[int] = set()
    order(root, steps, arrays, seen)
    outputs: list[tuple[int, Buffer]] = []
    for place, step in enumerate(steps):
        owner = None if step.owner is None else step.owner()
        if owner is not None and owner.expression is step:
            outputs.append((place, owner))
    kernel, grid, block, arguments = generate.chain(device, steps, arrays, tuple([place for place, _ in outputs]), root.shape)
    reads = tuple({id(array.buffer): array.buffer for array in arrays.values()}.values())
    writes = tuple(owner for _, owner in outputs)
    results = [(owner, step.loop[-1]) for (_, owner), step in ((output, steps[output[0]]) for output in outputs)]
    read = [(array.buffer, array.offset - generate.lowest(array), array.dtype) for array in arrays.values()]

    def run(driver: Driver, stream: Any) -> None:
        pointers = [Pointer(owner.memory, 0, dtype, owner.nbytes // dtype.itemsize) for owner, dtype in results]
        pointers += [Pointer(source.memory, offset, dtype, (source.nbytes - offset) // dtype.itemsize) for source, offset, dtype in read]
        driver.launch(kernel, grid, block, (*pointers, *arguments), stream)

    for place, owner in outputs:
        owner.expression = None
        steps[place].filled = owner
    device.enqueue(kernel.__name__, run, reads, writes, root.lane, root.node)
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
