"""Attaching: making the node of an operation that has run and setting it as `grad_fn` of its outputs."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import numpy as np

from aiograd.engine.run import current_task_name
from aiograd.errors import NoRuleError
from aiograd.graph.current import CURRENT
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Node
from aiograd.ops.op import Fused, Op
from aiograd.running import devices
from aiograd.running.modes import Mode, current_mode
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.op_node import GeneralOpNode, OpNode, check_complex, node_class
from aiograd.tensors.saved_hooks import pack_saved

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)


def attach_result(
    op: Op, tensors: list[Any], needs: list[bool], statics: dict[str, Any], output: TensorCore, residuals: Any, fused: Fused | None, mode: Mode
) -> None:
    """`attach` for one output on the host in a mode that is plain, or collects and is plain otherwise."""
    dtype = output._data.dtype
    if (dtype is _FLOAT32 or dtype is _FLOAT64) and (op.complex == "explicit" or not _has_complex(tensors)):
        _attach_lean(op, tensors, tuple(needs), statics, output, residuals)
        if mode.collect is not None and output._node is not None:
            mode.collect(output._node)
    else:
        attach(op, tensors, statics, [output], tuple(residuals), mode, "cpu", fused)


def _has_complex(tensors: list[Any]) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor._data.dtype.kind == "c":
            return True
    return False


def _attach_lean(op: Op, tensors: list[Any], needs: tuple[bool, ...], statics: dict[str, Any], output: TensorCore, residuals: Any) -> None:
    """`attach` for one real output on the host, unseen by recordings; the arguments are real too, or the rules handle complex ones."""
    entries = op.lean
    if op.variadic:
        needs = (True,)
    try:
        entry = entries[needs]
    except KeyError:
        if carries(op, tensors, needs):
            entry = node_class(op, needs, fused=op.fused).make
        else:
            entry = None
        entries[needs] = entry
    if entry is None:
        return
    if residuals:
        statics = {**statics, **dict(zip(op.fused.residuals, residuals, strict=True))}  # type: ignore[union-attr]
    output._node = entry(output, tuple(tensors), **statics) if op.variadic else entry(output, *tensors, **statics)


def attach_results(
    op: Op, tensors: list[Any], statics: dict[str, Any], outputs: list[TensorCore], residuals: tuple[Any, ...], fused: Fused | None, mode: Mode
) -> Node | None:
    """`attach` for several outputs on the host in a plain mode: later calls of a kind look up the findings of the first."""
    carriers = range(len(outputs)) if op.differentiable_outputs is None else op.differentiable_outputs
    metadata = []
    for output in outputs:
        data = output._data
        dtype = data.dtype
        if data.__class__ is not np.ndarray or (dtype is not _FLOAT32 and dtype is not _FLOAT64):
            return attach(op, tensors, statics, outputs, residuals, mode, "cpu", fused)
        metadata.append(InputMetadata(data.shape, dtype))
    needs = (True,) if op.variadic else tuple([tensor is not None and tensor._node is not None for tensor in tensors])
    entry = op.lean.get(needs)
    if entry is None or not outputs or _has_complex(tensors):
        node = attach(op, tensors, statics, outputs, residuals, mode, "cpu", fused)
        if node is not None and not node.conjugates and node.fused is op.fused:  # type: ignore[attr-defined]
            op.lean[needs] = type(node).make
        return node
    if residuals:
        statics = {**statics, **dict(zip(fused.residuals, residuals, strict=True))}  # type: ignore[union-attr]
    node = entry(tuple(outputs), tuple(tensors), **statics) if op.variadic else entry(tuple(outputs), *tensors, **statics)
    node.metadata_list = tuple(metadata)
    node.stream = None
    for i in carriers:
        outputs[i]._node = node
        outputs[i]._nr = i
    return node  # type: ignore[no-any-return]


def attach(
    op: Op, tensors: list[Any], statics: dict[str, Any], outputs: list[Any], residuals: tuple[Any, ...], mode: Mode, device: str, fused: Fused | None
) -> OpNode | None:
    """Make the node and set it as `grad_fn` of the outputs."""
    carriers = range(len(outputs)) if op.differentiable_outputs is None else op.differentiable_outputs
    if not any(outputs[i]._data.dtype.kind in "fc" for i in carriers):
        return None
    needs = (True,) if op.variadic else tuple(tensor is not None and tensor._node is not None for tensor in tensors)
    if not carries(op, tensors, needs):
        return None
    wanted = [tensor for tensor in tensors if tensor is not None and tensor._node is not None]
    is_complex = any(tensor._data.dtype.kind == "c" for tensor in (*outputs, *wanted))
    if is_complex:
        check_complex(op)
    crosses = any(devices.device_name_of(output._data) != "cpu" for output in outputs) or device != "cpu"
    general = is_complex or crosses or op.outputs != 1
    cls = node_class(op, needs, general=general, conjugates=is_complex and op.complex == "holomorphic", fused=fused)
    options = statics if fused is None else {**statics, **dict(zip(fused.residuals, residuals, strict=True))}
    output = outputs[0] if op.outputs == 1 else tuple(outputs)
    node: OpNode = cls.make(output, tuple(tensors), **options) if op.variadic else cls.make(output, *tensors, **options)
    if isinstance(node, GeneralOpNode):
        node.metadata_list = tuple([InputMetadata(o._data.shape, o._data.dtype, devices.device_name_of(o._data)) for o in outputs])
        node.stream = getattr(outputs[0]._data, "__aiograd_stream__", None)
    for i in carriers:
        if outputs[i]._data.dtype.kind in "fc":
            outputs[i]._node = node
            outputs[i]._nr = i
    if mode.saved_hooks is not None:
        node._saved = pack_saved(cls.row, node._saved, mode.saved_hooks)
        _ = node.extra  # the walk runs no hooks, and passes by nodes that have an extra
    if not mode.plain:
        note(node, mode)
    return node


def carries(op: Op, tensors: list[Any], needs: tuple[bool, ...]) -> bool:
    """True if the row has a gradient for an argument that needs one.

    Raises:
        NoRuleError: it has none for an argument that needs one, although it has some for others: leaving that one out would drop its gradient.
    """
    if op.variadic:
        return has_rule(op, op.variadic)
    wanted = [(name, tensor) for need, name, tensor in zip(needs, op.arrays, tensors, strict=True) if need]
    lacking = [name for name, tensor in wanted if not has_rule(op, name) and tensor._data.dtype.kind in "fc"]
    if lacking and op.differentiable:
        raise NoRuleError(f"{op.name}: its argument {lacking[0]!r} requires grad, and the row has no gradient for it. Use detach() of it.")
    return any(has_rule(op, name) for name, _ in wanted)


def has_rule(op: Op, name: str) -> bool:
    """True if the row has a rule for an array argument."""
    return name in op.rules or any(name in arguments for arguments in op.joint)


def note(node: Node, mode: Mode) -> None:
    """Record the stack, thread and task of a new node where anomaly mode or a profiler wants them, and report it to a recording pass."""
    if mode.collect is not None:
        mode.collect(node)
    if mode.anomaly is not None:
        current = CURRENT.get()
        stack = "".join(traceback.format_list(traceback.extract_stack()[:-3]))
        node.extra.anomaly = (stack, None if current is None else current.node)
    if mode.anomaly is not None or mode.profiler is not None:
        node.extra.recorder = (threading.get_ident(), current_task_name())


def attach_written(op: Op, tensors: list[Any], statics: dict[str, Any], data: Any) -> tuple[Node | None, int]:
    """The place in the graph of ``op(*tensors, **statics)`` with its result in `data` already: the row is recorded and not run."""
    output = make(data)
    attach(op, tensors, statics, [output], (), current_mode(), output.device, None)
    return output._node, output._nr
