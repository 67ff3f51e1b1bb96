"""Recording: running a row forward on Tensors and attaching its node.

Note [Three ways in]
    `call` handles every row and argument. `unary` and `binary` make functions for rows of one or two arrays without static arguments: the
    same steps with everything that can be known beforehand unrolled, because for small arrays this code, not numpy, is the cost of
    a forward pass. Whatever is not the common case (modes other than plain, devices, complex numbers, views, saved-tensor hooks) falls
    back to `call`. Measured by ``tests/benchmarks/small_graphs.py``.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd import devices
from aiograd.engine.run import current_task_name
from aiograd.errors import ArgumentError, ArgumentTypeError, DeviceMismatchError, ShapeError
from aiograd.graph.current import CURRENT
from aiograd.graph.node import InputMetadata, Node, _next_sequence
from aiograd.graph.saved import Packed, PackedValue, SavedTensorHooks
from aiograd.modes import Mode, ModeScope, current_mode
from aiograd.ops.op import ROWS, Fused, Op
from aiograd.tensors.core import TENSOR_CLASS, SpecialView, TensorCore, TensorExtra, View, counter_of, host_array, make, plain_array, refresh
from aiograd.tensors.op_node import GeneralOpNode, OpNode, check_complex, node_class, versions_of
from aiograd.tensors.refusal import NONE_ADVICE, REFUSALS, raise_refusal
from aiograd.tensors.rowcode import compile_binder

_new = object.__new__
_ndarray = np.ndarray
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)

# -------------------------------------------------------------------- constants

_constants32: dict[float, TensorCore] = {}
_constants64: dict[float, TensorCore] = {}


def constant(value: Any, like: np.dtype[Any] | None) -> TensorCore:
    """A Tensor of a Python number or array-like that needs no gradient.

    A number takes the dtype numpy's promotion gives it next to an array of dtype `like` (None: the default dtype for floats). Small caches
    save making the same 0-d array for every ``x * 2``.
    """
    cls = value.__class__
    if (cls is float or cls is int) and value:  # 0.0 and -0.0 are equal as keys
        cache = _constants32 if like is _FLOAT32 else _constants64 if like is _FLOAT64 else None
        if cache is not None:
            found = cache.get(value)
            if found is not None:
                return found
            tensor = make(np.array(value, dtype=number_dtype(value, like)))
            if len(cache) >= 1024:
                cache.clear()
            cache[value] = tensor
            return tensor  # type: ignore[no-any-return]
    if isinstance(value, (bool, complex, float, int)):
        return make(np.array(value, dtype=number_dtype(value, like)))  # type: ignore[no-any-return]
    if isinstance(value, (_ndarray, np.generic)) or hasattr(value, "__aiograd_device__"):
        return make(check_numbers(value))  # type: ignore[no-any-return]
    if isinstance(value, (list, tuple)):
        return make(array_of(value))  # type: ignore[no-any-return]
    if value is None:
        raise ArgumentTypeError(f"an argument {NONE_ADVICE}")
    raise ArgumentTypeError(f"expected a Tensor, array or number, found {type(value).__name__}")


def check_numbers(array: Any) -> Any:
    """`array` as a Tensor may hold it (see `plain_array`), if its elements are numbers or booleans; copied where its byte order is not native.

    Raises:
        ArgumentTypeError
    """
    array = plain_array(array)
    dtype = array.dtype
    if dtype.kind in "OSUmM" or dtype.names is not None:
        raise ArgumentTypeError(
            f"making a tensor: expected numbers, found elements of dtype {dtype}. Convert them first, with .astype() for example."
        )
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def number_dtype(value: Any, like: np.dtype[Any] | None) -> np.dtype[Any]:
    """The dtype of a Python number next to an array of dtype `like`, or alone."""
    if like is not None:
        return np.result_type(like, value)
    if isinstance(value, bool):
        return np.dtype(np.bool_)
    if isinstance(value, int):
        return np.dtype(np.int64)
    real = current_mode().dtype
    return np.result_type(real, np.complex64) if isinstance(value, complex) else real


def array_of(value: Any, dtype: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
    """An ndarray of a number or nested lists; where `dtype` is None, Python floats become the default dtype."""
    value = _plain_items(value)
    try:
        array = np.array(value)
    except ValueError as error:
        raise ShapeError(f"making a tensor of a nested list: {error}. Give every row the same length.") from None
    if array.dtype == object or array.dtype.kind not in "biufc":
        raise ArgumentTypeError(f"making a tensor: expected numbers, found {array.dtype} elements")
    if dtype is not None:
        if array.dtype.kind == "c" and dtype.kind != "c":
            raise ArgumentTypeError(f"making a tensor: complex numbers do not fit dtype {dtype}. Take their real parts.")
        return array.astype(dtype)
    if array.dtype.kind in "fc" and not _holds_arrays(value):
        array = array.astype(number_dtype(0.0 if array.dtype.kind == "f" else 0j, None))
    return array


def _plain_items(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain_items(item) for item in value]
    return plain_array(value)


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_arrays, value))
    return isinstance(value, (np.ndarray, np.generic))


# -------------------------------------------------------------------- any row


def call(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a row on Tensors and whatever goes with them; records where a gradient is wanted.

    Returns:
        A Tensor, or a tuple of Tensors for a row with several outputs.
    """
    tensors, statics = _bind(op, args, kwargs)
    mode = current_mode()
    arrays: list[Any] = []
    needs: list[bool] = []
    lean = op.outputs == 1 and (mode.plain or (not mode.grad and mode.profiler is None))
    for tensor in tensors:
        if tensor is None:
            arrays.append(None)
            needs.append(False)
            continue
        data = tensor._data
        arrays.append(data)
        needs.append(tensor._node is not None)
        if data.__class__ is not _ndarray:
            lean = False
    if not lean:
        return _call_general(op, tensors, arrays, statics, mode, args, kwargs)
    fused = op.fused
    residuals: Any = ()
    try:
        if fused is None:
            result = op.forward(*arrays, **statics)
        else:
            result, *residuals = fused.forward(*arrays, **statics)
    except REFUSALS as error:
        raise_refusal(op.name, arrays, statics, error, op.arrays)
    crosses = False
    if result.__class__ is not _ndarray:
        crosses = hasattr(result, "__aiograd_device__")
        if not crosses:
            result = np.asarray(result)
    output = make(result)
    if mode.grad and True in needs and op.differentiable:
        dtype = result.dtype
        if (dtype is _FLOAT32 or dtype is _FLOAT64) and not crosses and (op.complex == "explicit" or not _has_complex(arrays)):
            _attach_lean(op, tensors, tuple(needs), statics, output, residuals)
        else:
            _attach(op, tensors, statics, [output], tuple(residuals), mode, "cpu", fused)
    if op.view and _shares(result, arrays[0]):
        _make_view(op, tensors[0], (output,), args[1:], kwargs)
    return output


def _has_complex(arrays: list[Any]) -> bool:
    for array in arrays:
        if array is not None and array.dtype.kind == "c":
            return True
    return False


def _call_general(
    op: Op, tensors: list[Any], arrays: list[Any], statics: dict[str, Any], mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The rest of `call` where a device, several outputs, or a mode other than plain is involved."""
    device = _device_of(op, arrays)
    records = mode.grad and op.differentiable and any(tensor is not None and tensor._node is not None for tensor in tensors)
    if device != "cpu":
        _move_along(op, tensors, arrays, args, device)
    fused = op.fused if device == "cpu" else devices.device(device).fused(op.name)  # type: ignore[union-attr]
    profiler = mode.profiler
    started = profiler.begin_forward() if profiler is not None else None
    residuals: tuple[Any, ...] = ()
    try:
        if fused is not None:
            result, *rest = fused.forward(*arrays, **statics)
            residuals = tuple(rest)
        elif device == "cpu":
            result = op.forward(*arrays, **statics)
        else:
            result = op(*arrays, **statics)
    except REFUSALS as error:
        raise_refusal(op.name, arrays, statics, error, op.arrays)
    outputs = [make(output) for output in (result if op.outputs != 1 else (result,))]
    node = _attach(op, tensors, statics, outputs, residuals, mode, device, fused) if records else None
    if op.view and outputs and _shares(outputs[0]._data, arrays[0]):
        _make_view(op, tensors[0], outputs, args[1:], kwargs)
    if profiler is not None:
        profiler.end_forward(started, op.name, node, outputs)
    return outputs[0] if op.outputs == 1 else tuple(outputs)


def _bind(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Array arguments as Tensors (None where absent) and static arguments by name."""
    binder = op.binder
    if binder is None:
        binder = op.binder = compile_binder(op, _PLAIN, static)
    try:
        arrays, statics = binder(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(f"{error}; {op.name} takes {op.signature()}") from None
    for i, array in enumerate(arrays):
        if isinstance(array, TensorCore):
            if array._x is not None:
                refresh(array)
        elif array is not None:
            return _with_constants(arrays, i), statics
    return arrays, statics


def _with_constants(arrays: list[Any], first: int) -> list[Any]:
    """The arguments with those from `first` on that are no Tensors made into some."""
    like = None
    for array in arrays:
        if isinstance(array, (TensorCore, _ndarray, np.generic)):
            like = array.dtype if like is None else np.result_type(like, array.dtype)
    for i in range(first, len(arrays)):
        array = arrays[i]
        if isinstance(array, TensorCore):
            if array._x is not None:
                refresh(array)
        elif array is not None:
            arrays[i] = constant(array, like)
    return arrays


#: classes of static arguments that hold no Tensors
_PLAIN: frozenset[type] = frozenset((int, bool, float, str, type(None)))


def static(value: Any) -> Any:
    """A static argument with Tensors (such as indices) replaced by their arrays, and arrays of subclasses by plain ones."""
    if isinstance(value, TensorCore):
        return host_array(value)
    if isinstance(value, _ndarray):
        return plain_array(value)
    if value.__class__ is tuple:
        return tuple(map(static, value))
    if value.__class__ is list:
        return list(map(static, value))
    if value.__class__ is slice:
        return slice(static(value.start), static(value.stop), static(value.step))
    return value


def _device_of(op: Op, arrays: list[Any]) -> str:
    """The device that arguments live on, beside the host."""
    found = "cpu"
    for array in arrays:
        if array is None or array.__class__ is _ndarray:
            continue
        name = devices.device_name_of(array)
        if name == "cpu" or name == found:
            continue
        if found != "cpu":
            raise DeviceMismatchError(f"{op.name}: arguments live on {found} and {name}; move them to one device with .to()")
        found = name
    return found


def _move_along(op: Op, tensors: list[Any], arrays: list[Any], args: tuple[Any, ...], device: str) -> None:
    """Bring the host arguments of a row that runs on a device there.

    Arrays that are no Tensors are constants and go along, and so do numbers; a number that wants a gradient by a recorded row, so that its
    gradient finds the way back.
    """
    for i, array in enumerate(arrays):
        if array.__class__ is not _ndarray:
            continue
        tensor = tensors[i]
        if not array.ndim:
            if tensor._node is None or not current_mode().grad:
                continue
            tensors[i] = call(ROWS["to_device"], (tensor,), {"device": device, "source": "cpu"})
        elif tensor is args[i]:
            raise DeviceMismatchError(f"{op.name}: arguments live on {device} and cpu; move them to one device with .to()")
        else:
            tensors[i] = make(devices.device(device).from_host(array))  # type: ignore[union-attr]
        arrays[i] = tensors[i]._data


def _attach_lean(op: Op, tensors: list[Any], needs: tuple[bool, ...], statics: dict[str, Any], output: TensorCore, residuals: Any) -> None:
    """`_attach` for one real output on the host in plain mode."""
    entries = op.lean
    if op.variadic:
        needs = (True,)
    try:
        entry = entries[needs]
    except KeyError:
        names = (op.variadic,) if op.variadic else op.arrays
        if any(need and _has_rule(op, name) for need, name in zip(needs, names, strict=True) if name):
            cls = node_class(op, needs, fused=op.fused)
            entry = (cls, cls.row.save, cls.row.saves_output, len(cls.row.values))
        else:
            entry = None
        entries[needs] = entry
    if entry is None:
        return
    cls, save, saves_output, count = entry
    node = _new(cls)
    node._seq = _next_sequence()
    node._extra = None
    node.next_nodes = tuple([None if tensor is None else tensor._node for tensor in tensors])
    node.next_nrs = tuple([0 if tensor is None else tensor._nr for tensor in tensors])
    data = output._data
    node.shape = data.shape
    node.dtype = data.dtype
    options = dict(statics)
    if saves_output:
        options["out"] = data
        output._vc = options["out_versions"] = [0]
    if residuals:
        options.update(zip(op.fused.residuals, residuals, strict=True))  # type: ignore[union-attr]
    node._saved = saved = save(tuple(tensors), **options) if op.variadic else save(*tensors, **options)
    node._version = versions_of(saved[:count]) if count else 0
    output._node = node


def _attach(
    op: Op, tensors: list[Any], statics: dict[str, Any], outputs: list[Any], residuals: tuple[Any, ...], mode: Mode, device: str, fused: Fused | None
) -> OpNode | None:
    """Make the node and hang the outputs on it."""
    carriers = range(len(outputs)) if op.differentiable_outputs is None else op.differentiable_outputs
    if not any(outputs[i]._data.dtype.kind in "fc" for i in carriers):
        return None
    needs = (True,) if op.variadic else tuple(tensor is not None and tensor._node is not None for tensor in tensors)
    if not op.variadic and not any(need and _has_rule(op, name) for need, name in zip(needs, op.arrays, strict=True)):
        return None
    wanted = [tensor for tensor in tensors if tensor is not None and tensor._node is not None]
    is_complex = any(tensor._data.dtype.kind == "c" for tensor in (*outputs, *wanted))
    if is_complex:
        check_complex(op)
    crosses = any(devices.device_name_of(output._data) != "cpu" for output in outputs) or device != "cpu"
    general = is_complex or crosses or op.outputs != 1
    cls = node_class(op, needs, general=general, conjugates=is_complex and op.complex == "holomorphic", fused=fused)
    node = _new(cls)
    node._seq = _next_sequence()
    node._extra = None
    node.next_nodes = tuple([None if tensor is None else tensor._node for tensor in tensors])
    node.next_nrs = tuple([0 if tensor is None else tensor._nr for tensor in tensors])
    if isinstance(node, GeneralOpNode):
        node.metadata_list = tuple([InputMetadata(o._data.shape, o._data.dtype, devices.device_name_of(o._data)) for o in outputs])
        node.stream = getattr(outputs[0]._data, "__aiograd_stream__", None)
    node.shape = outputs[0]._data.shape
    node.dtype = outputs[0]._data.dtype
    row = cls.row
    for i in carriers:
        if outputs[i]._data.dtype.kind in "fc":
            outputs[i]._node = node
            outputs[i]._nr = i
    options: dict[str, Any] = dict(statics)
    if row.saves_output:
        options["out"] = outputs[0]._data if op.outputs == 1 else tuple([output._data for output in outputs])
        options["out_versions"] = counter_of(outputs[0]) if op.outputs == 1 else tuple(map(counter_of, outputs))
    if op.variadic:
        saved = row.save(tuple(tensors), **options)
    else:
        saved = row.save(*tensors, **options, **dict(zip(fused.residuals, residuals, strict=True)) if fused is not None else {})
    node._version = versions_of(saved[: len(row.values)])
    if mode.saved_hooks is None:
        node._saved = saved
    else:
        node._saved = _pack(row, saved, mode)
        _ = node.extra  # the sweep runs no hooks, and passes by nodes that have an extra
    if not mode.plain:
        note(node, mode)
    return node


def _has_rule(op: Op, name: str) -> bool:
    return name in op.rules or any(name in arguments for arguments in op.joint)


def _pack(row: Any, saved: tuple[Any, ...], mode: Mode) -> Any:
    """Saved values, the output and residuals through the innermost pair of saved-tensor hooks."""
    hooks = mode.saved_hooks
    packs = {*row.values, "out", *row.residuals}
    values: list[Any] = []
    for i, (name, value) in enumerate(zip(row.layout, saved, strict=True)):
        if name not in packs:
            values.append(value)
            continue
        counters = saved[i + 1] if name == "out" else None
        if value.__class__ is tuple:
            values.append(tuple([_pack_part(part, hooks, name, None if counters is None else counters[k]) for k, part in enumerate(value)]))
        else:
            values.append(_pack_part(value, hooks, name, counters))
    return Packed(tuple(values)) if packs.intersection(row.layout) else saved


def _pack_part(value: Any, hooks: SavedTensorHooks, name: str, counter: list[int] | None) -> Any:
    """One value packed; what is no array stays as it is."""
    if isinstance(value, TensorCore):
        tensor: Any = value
    elif isinstance(value, _ndarray) or hasattr(value, "__aiograd_device__"):
        tensor = make(value)
        tensor._vc = counter
    else:
        return value
    packed = pack_value(tensor, hooks)
    packed.is_output = name == "out"
    return packed


def pack_value(tensor: TensorCore, hooks: SavedTensorHooks) -> PackedValue:
    """What ``hooks.pack`` makes of a tensor; nothing the hook does is recorded."""
    version = tensor.version
    with ModeScope(grad=False, saved_hooks=None):
        packed = hooks.pack(tensor)
    if tensor.version != version:
        raise ArgumentError("a saved tensor pack hook modified its input in place: return a new value and leave the tensor as it is")
    return PackedValue(packed, hooks, False)


def note(node: Node, mode: Mode) -> None:
    """Tell whoever wants to know that a node was made, and where."""
    if mode.collect is not None:
        mode.collect(node)
    if mode.anomaly is not None:
        current = CURRENT.get()
        stack = "".join(traceback.format_list(traceback.extract_stack()[:-3]))
        node.extra.anomaly = (stack, None if current is None else current.node)
    if mode.anomaly is not None or mode.profiler is not None:
        node.extra.recorder = (threading.get_ident(), current_task_name())


# -------------------------------------------------------------------- views


def _shares(result: Any, source: Any) -> bool:
    """Whether a row marked ``view`` returned the memory of its argument."""
    return result is source or (result.base is not None and (result.base is source or result.base is source.base))


def _make_view(op: Op, parent: TensorCore, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    counter = parent._vc
    if counter is None:
        counter = parent._vc = [0]
    for i, output in enumerate(outputs):
        output._vc = counter
        if (output._node is None and parent._node is not None) or op.outputs != 1 or output._data.dtype is not parent._data.dtype:
            view: View = _special_view(op, parent, output, None if op.outputs == 1 else i, args, kwargs)
        else:
            view = _new(View)
            view.parent, view.op, view.args, view.kwargs, view.version = parent, op, args, kwargs, counter[0]
        output._x = extra = _new(TensorExtra)
        extra.grad = extra.retains = None
        extra.view = view


def _special_view(op: Op, parent: TensorCore, output: TensorCore, nr: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SpecialView:
    unrecorded = output._node is None and parent._node is not None
    obstacle = None
    if unrecorded:
        obstacle = "was taken of a tensor that requires grad while no graph was recorded"
    elif output._data.dtype != parent._data.dtype:
        obstacle = f"was taken by {op.name}() of a tensor of another dtype"
    return SpecialView(parent, op, args, kwargs, counter_of(parent)[0], output=nr, is_frozen=unrecorded, obstacle=obstacle)


def attach(op: Op, tensors: list[Any], statics: dict[str, Any], data: Any) -> tuple[Node | None, int]:
    """The place in the graph of ``op(*tensors, **statics)`` whose result is in `data` already: the row is recorded and not run."""
    output = make(data)
    _attach(op, tensors, statics, [output], (), current_mode(), output.device, None)
    return output._node, output._nr


# -------------------------------------------------------------------- the fast ways in

#: input numbers of edges to nodes with one input: nearly always, so shared
_FIRST, _FIRST_TWO = (0,), (0, 0)

#: what a binary row that saves nothing but tensors saves, as a bit mask
_SAVES = {(): 0, ("x1",): 1, ("x2",): 2, ("x1", "x2"): 3}


def _lean_dtypes(op: Op) -> tuple[np.dtype[Any] | None, np.dtype[Any] | None]:
    """The dtypes of results that need no closer look; none where an argument has no rule, so that there may be nothing to record."""
    return (_FLOAT32, _FLOAT64) if all(_has_rule(op, name) for name in op.arrays) else (None, None)


def unary(op: Op) -> Callable[[Any], Any]:
    """A function of one Tensor for a row of one array without static arguments."""
    forward = op.forward
    tensor_class = TENSOR_CLASS
    classes: list[Any] = []
    float32, float64 = _lean_dtypes(op)

    def apply(x: Any) -> Any:
        mode = current_mode()
        data = x._data
        if (not mode.plain and (mode.grad or mode.profiler is not None)) or data.__class__ is not _ndarray:
            return call(op, (x,), {})
        if x._x is not None:
            refresh(x)
        node = x._node
        try:
            out = forward(data)
        except REFUSALS as error:
            raise_refusal(op.name, (data,), {}, error)
        if out.__class__ is not _ndarray:
            out = np.asarray(out)
        tensor = tensor_class[0]()
        tensor._data = out
        tensor._vc = tensor._x = None
        tensor._nr = 0
        if node is None or not mode.grad:
            tensor._node = None
            return tensor
        dtype = out.dtype
        if dtype is not float32 and dtype is not float64:
            tensor._node = None
            _attach(op, [x], {}, [tensor], (), mode, "cpu", None)
            return tensor
        if not classes:
            compiled = node_class(op, (True,))
            classes.append((compiled, compiled.row.save, compiled.row.saves_output))
        cls, save, saves_output = classes[0]
        made = _new(cls)
        made._seq = _next_sequence()
        made._extra = None
        made.next_nodes = (node,)
        made.next_nrs = (x._nr,) if x._nr else _FIRST
        made.shape = out.shape
        made.dtype = dtype
        if saves_output:
            tensor._vc = counter = [0]
            made._saved = saved = save(x, out=out, out_versions=counter)
        else:
            made._saved = saved = save(x)
        made._version = 0 if x._vc is None or not saved else versions_of(saved[: len(cls.row.values)])
        tensor._node = made
        return tensor

    return apply


def binary(op: Op) -> Callable[[Any, Any], Any]:
    """A function of two Tensors (or a Tensor and a number or array) for a row of two arrays without static arguments."""
    forward = op.forward
    tensor_class = TENSOR_CLASS
    classes: list[Any] = [None, None, None, None]
    float32, float64 = _lean_dtypes(op)

    def classes_for(needs: int) -> Any:
        cls = node_class(op, (bool(needs & 1), bool(needs & 2)))
        values = cls.row.values
        lean = len(cls.row.layout) == len(values)  # nothing but tensors is saved
        kind = _SAVES[values] if lean else -1
        classes[needs] = found = (cls, kind, cls.row.save, cls.row.saves_output)
        return found

    def apply(a: Any, b: Any) -> Any:
        mode = current_mode()
        given = b
        if b.__class__ is not tensor_class[0] and not isinstance(b, TensorCore):
            try:
                b = constant(b, a._data.dtype)
            except ArgumentTypeError:
                return NotImplemented
        x1 = a._data
        x2 = b._data
        if (not mode.plain and (mode.grad or mode.profiler is not None)) or x1.__class__ is not _ndarray or x2.__class__ is not _ndarray:
            return call(op, (a, given), {})
        if a._x is not None:
            refresh(a)
        if b._x is not None:
            refresh(b)
        a_node = a._node
        b_node = b._node
        try:
            out = forward(x1, x2)
        except REFUSALS as error:
            raise_refusal(op.name, (x1, x2), {}, error)
        if out.__class__ is not _ndarray:
            out = np.asarray(out)
        tensor = tensor_class[0]()
        tensor._data = out
        tensor._vc = tensor._x = None
        tensor._nr = 0
        needs = (a_node is not None) + 2 * (b_node is not None)
        if not needs or not mode.grad:
            tensor._node = None
            return tensor
        dtype = out.dtype
        if dtype is not float32 and dtype is not float64:
            tensor._node = None
            _attach(op, [a, b], {}, [tensor], (), mode, "cpu", None)
            return tensor
        cls, kind, save, saves_output = classes[needs] or classes_for(needs)
        made = _new(cls)
        made._seq = _next_sequence()
        made._extra = None
        made.next_nodes = (a_node, b_node)
        made.next_nrs = (a._nr, b._nr) if a._nr or b._nr else _FIRST_TWO
        made.shape = out.shape
        made.dtype = dtype
        made._version = 0
        saved: tuple[Any, ...]
        if kind == 0:
            made._saved = ()
        else:
            if kind == 3:
                made._saved = saved = (a, b)
            elif kind == 1:
                made._saved = saved = (a,)
            elif kind == 2:
                made._saved = saved = (b,)
            elif saves_output:
                tensor._vc = counter = [0]
                made._saved = saved = save(a, b, out=out, out_versions=counter)
            else:
                made._saved = saved = save(a, b)
            if a._vc is not None or b._vc is not None:
                made._version = versions_of(saved[: len(cls.row.values)])
        tensor._node = made
        return tensor

    return apply


def getitem(op: Op, x: Any, index: Any) -> Any:
    """``x[index]`` for a basic index; `op` is the row of it."""
    mode = current_mode()
    data = x._data
    if (not mode.plain and (mode.grad or mode.profiler is not None)) or data.__class__ is not _ndarray:
        return call(op, (x, index), {})
    if x._x is not None:
        refresh(x)
    node = x._node if mode.grad else None
    if node is not None:
        dtype = data.dtype
        entry: Any = op.lean.get(_NEEDED)
        if entry is None or (dtype is not _FLOAT32 and dtype is not _FLOAT64):
            return call(op, (x, index), {})
    try:
        out = data[index]
    except REFUSALS as error:
        raise_refusal("indexing", (data,), {"index": index}, error)
    if out.__class__ is not _ndarray:
        return call(op, (x, index), {})
    tensor = TENSOR_CLASS[0]()
    tensor._data = out
    tensor._node = None
    tensor._nr = 0
    if node is not None:
        made = _new(entry[0])
        made._seq = _next_sequence()
        made._extra = None
        made.next_nodes = (node,)
        made.next_nrs = (x._nr,) if x._nr else _FIRST
        made.shape = out.shape
        made.dtype = dtype
        made._saved = entry[1](x, index)
        made._version = 0  # a view saves no values
        tensor._node = made
    _make_view(op, x, (tensor,), (index,), {})
    return tensor


_NEEDED = (True,)
