"""Evaluation of one node on the general path, as a generator that yields commands to the runner.

Note [Commands instead of awaits]
    Hooks, unpacking and rules may suspend or need another thread, but the order of steps at a node needs neither. So `evaluate` is a
    generator: it yields `Run` (run this node's rule; the runner chooses where) and `Await` (wait for this awaitable) and is sent the results. A
    node with synchronous hooks only is evaluated without ever suspending, in the documented order; only a node that waits for something
    becomes concurrent with the others. The same generator serves asyncio, a simulated loop and a test that drives it by hand.

Order at a node: hooks of the tensor, retained gradient, capture, node prehooks, rule, node posthooks. The rule of a leaf stages its gradient, unless
a reducer takes it (see `aiograd.graph.reducing`). Where
the gradient of a non-leaf is accumulated and its node is not run, its prehooks run all the same, as they do before a leaf accumulates.

Source: PyTorch ``engine.cpp`` evaluate_function, ``function.h`` Note [Hooks ordering].
"""

from __future__ import annotations

import types
from collections.abc import Generator
from contextvars import Token
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aiograd.engine.graph_task import GraphTask
from aiograd.engine.validate import check_outputs, device_of, fit_outputs
from aiograd.errors import DeviceMismatchError, HookError, HookTypeError, NaNGradientError
from aiograd.graph.accumulate_grad import AccumulateGrad, Staged, commit
from aiograd.graph.boundary import BOUNDARY, to_array, to_tensor
from aiograd.graph.current import CURRENT, Current
from aiograd.graph.hooks import Hook, hook_name
from aiograd.graph.node import Node
from aiograd.graph.saved import Packed, PackedValue
from aiograd.ops.slice_gradient import SliceGradient, dense


class Run(NamedTuple):
    """A command: call `run_node` with these arguments, on the thread that suits the node, and send back its result."""

    node: Node
    grads: list[Any]
    values: tuple[Any, ...] | None


class Await(NamedTuple):
    """A command: wait for this coroutine or future and send back its result."""

    awaitable: Any


Evaluation: TypeAlias = Generator[Run | Await, Any, list[Any]]


def suspends(value: Any) -> bool:
    """True if the engine awaits this: coroutine objects and futures, never Tensors."""
    return isinstance(value, types.CoroutineType) or getattr(value, "_asyncio_future_blocking", None) is not None


def is_simple(task: GraphTask, node: Node) -> bool:
    """True if the node needs no evaluation beyond its rule."""
    return (
        node._extra is None
        and task.anomaly is None
        and (node.is_builtin or node.is_leaf or (node.is_inlet and not task.create_graph))  # the gradients of an inlet have been checked
        and node not in task.plan.captures.at
        and not (node.is_leaf and task.is_eager(node))  # type: ignore[arg-type]
        and getattr(node, "_saved", None).__class__ is not Packed
    )


def run_node(task: GraphTask, node: Node, grads: list[Any], values: tuple[Any, ...] | None) -> Any:
    """Run the node's rule; called on the loop, an executor thread or a device's thread. For a leaf, stage its gradient.

    Returns:
        Fitted gradients, one per edge; for a node of user code its unchecked result, which may be awaitable.
    """
    if node.is_leaf:
        if grads[0] is not None:
            task.records_for(node)
            task.stage(node, grads)  # type: ignore[arg-type]
        return ()
    if node.is_inlet and not task.create_graph:
        return node.apply(grads)
    if node.is_builtin and not node.spans_devices and not task.create_graph:
        return _run_builtin(task, node, grads, values)
    # user code may ask for the current node; a device names it when an operation fails; new nodes are numbered by it
    token = CURRENT.set(Current(task, node, in_sync_rule=not getattr(node, "is_async", True)))
    try:
        if node.is_builtin:
            return _run_builtin(task, node, grads, values)
        return node.apply(grads) if values is None else node.apply(grads, values)  # type: ignore[call-arg]
    finally:
        CURRENT.reset(token)


def _run_builtin(task: GraphTask, node: Node, grads: list[Any], values: tuple[Any, ...] | None) -> Any:
    if node.heeds_keeping:
        node.keeps_graph = task.keep_graph or node in task.plan.kept  # type: ignore[attr-defined]
    if grads and grads[0] is None and all(grad is None for grad in grads):
        outputs: Any = (None,) * node.num_outputs
    elif values is None and not task.create_graph and task.plan.exec_info is None and not node.has_repeats:
        outputs = node.apply(grads)
    else:
        needs = tuple(task.plan.should_compute(node, i) for i in range(node.num_outputs))
        if node.has_repeats and not task.create_graph:
            outputs = node.run_repeats(grads, needs, _begins_sums(task, node))  # type: ignore[attr-defined]
        else:
            outputs = node.compute(grads, needs, values, task.create_graph)  # type: ignore[attr-defined]
    outputs = fit_outputs(node, outputs)
    for i, output in enumerate(outputs):
        if output.__class__ is SliceGradient and node.next_nodes[i] not in task.plan.expected:
            outputs[i] = output.dense()
    task.release_saved(node)
    return outputs


def _begins_sums(task: GraphTask, node: Node) -> tuple[bool, ...]:
    """Per edge, True if the node's gradient is the first in the sum at its target."""
    expected = task.plan.expected
    return tuple([child is None or child not in expected or expected[child][0] == (-node._seq, i) for i, child in enumerate(node.next_nodes)])


def evaluate(task: GraphTask, node: Node, grads: list[Any]) -> Evaluation:
    """Carry out all steps at a node; returns the gradients for its edges."""
    extra, plan = node._extra, task.plan
    if extra is not None and node not in plan.resumed:
        for nr, hooks in list(extra.tensor_hooks.items()):
            for hook in hooks.calls():
                if grads[nr] is not None or getattr(hook, "takes_none", False):
                    grads[nr] = yield from _tensor_hook(task, node, hook, grads[nr])
        for nr, keep in list(extra.retain_hooks.items()):
            if grads[nr] is not None:
                task.staged.retain(keep, to_tensor(grads[nr]))
    if node in plan.captures.at:
        plan.capture(node, grads, task.staged)
    runs = plan.runs(node)
    if extra is not None and extra.prehooks and (runs or plan.captures.ends_at(node)):
        for hook in extra.prehooks.calls():
            grads = yield from _prehook(task, node, hook, grads)
    if not runs:
        return []
    given = list(grads)
    if extra is not None and extra.reducer is not None and extra.reducer.take(task, node, grads[0]):
        grads = [None]  # the reducer stages what becomes of it
    values = None
    saved = getattr(node, "_saved", None)
    if saved.__class__ is Packed:
        values = plan.unpacked(node)
        if values is None:
            values = yield from _unpack(task, node, saved)
            plan.keep_unpacked(node, values)
    raw = yield Run(node, grads, values)
    if suspends(raw):
        profiler = task.profiler
        began = None if profiler is None else profiler.begin_wait()
        raw = yield Await(raw)
        if profiler is not None:
            profiler.end_wait(began, task, node)
    if node.is_builtin or node.is_leaf:
        is_seen = bool(task.anomaly) or (extra is not None and bool(extra.posthooks))
        outputs = list(map(dense, raw)) if is_seen else list(raw)
    else:
        task.records_for(node)
        outputs = check_outputs(node, raw, task.create_graph)
        task.release_saved(node)
    if node.is_leaf and task.is_eager(node):  # type: ignore[arg-type]
        yield from _accumulate_now(task, node)  # type: ignore[arg-type]
    if extra is not None and extra.posthooks:
        for hook in extra.posthooks.calls():
            outputs = yield from _posthook(task, node, hook, outputs, given)
    if task.anomaly:
        yield from _check_nan(node, outputs)
    return outputs


def _call(task: GraphTask, node: Node | None, function: Hook, *args: Any) -> Generator[Await, Any, Any]:
    """Call user code; if its result is awaitable, wait for it."""
    token: Token[Any] = CURRENT.set(Current(task, node))
    try:
        result = function(*args)
    finally:
        CURRENT.reset(token)
    if suspends(result):
        result = yield Await(result)
    return result


def _tensor_hook(task: GraphTask, node: Node, hook: Hook, grad: Any) -> Generator[Await, Any, Any]:
    result = yield from _call(task, node, hook, to_tensor(grad))
    return grad if result is None or getattr(hook, "ignores_result", False) else _replacement(task, hook, result, grad)


def _replacement(task: GraphTask, hook: Hook, result: Any, grad: Any) -> Any:
    """The gradient a hook returned in place of `grad`, checked."""
    name = hook_name(hook)
    if not BOUNDARY.is_tensor(result):
        raise HookTypeError(f"hook '{name}' returned {type(result).__name__}; expected a Tensor, or None to leave the gradient as it is")
    if grad is None:
        return to_array(result, task.create_graph)
    if result.shape != grad.shape:
        raise HookError(f"hook '{name}' has changed the size of value: got {list(result.shape)}, expected {list(grad.shape)}. Return the same shape.")
    if result.dtype != grad.dtype:
        raise HookTypeError(f"hook '{name}' has changed the type of value: got {result.dtype}, expected {grad.dtype}. Cast it back with .astype().")
    if device_of(result) != device_of(grad):
        raise DeviceMismatchError(f"hook '{name}' has moved the gradient to {device_of(result)}; expected {device_of(grad)}")
    return to_array(result, task.create_graph)


def _several(task: GraphTask, hook: Hook, result: Any, grads: list[Any], what: str) -> list[Any]:
    if not isinstance(result, (tuple, list)):
        if len(grads) != 1:
            raise HookTypeError(f"hook '{hook_name(hook)}' returned {type(result).__name__}; expected None or a tuple of {len(grads)} {what}")
        result = (result,)
    if len(result) != len(grads):
        raise HookError(f"hook '{hook_name(hook)}' returned {len(result)} {what}, expected {len(grads)}")
    return [None if new is None else _replacement(task, hook, new, old) for new, old in zip(result, grads, strict=True)]


def _prehook(task: GraphTask, node: Node, hook: Hook, grads: list[Any]) -> Generator[Await, Any, list[Any]]:
    result = yield from _call(task, node, hook, tuple(map(to_tensor, grads)))
    return grads if result is None else _several(task, hook, result, grads, "gradients of the node's inputs")


def _posthook(task: GraphTask, node: Node, hook: Hook, outputs: list[Any], given: list[Any]) -> Generator[Await, Any, list[Any]]:
    result = yield from _call(task, node, hook, tuple(map(to_tensor, outputs)), tuple(map(to_tensor, given)))
    return outputs if result is None else _several(task, hook, result, outputs, "gradients of the node's outputs")


def _unpack(task: GraphTask, node: Node, saved: Packed) -> Generator[Await, Any, tuple[Any, ...]]:
    values: list[Any] = []
    for value in saved.values:
        if value.__class__ is tuple:
            parts: list[Any] = []
            for part in value:
                parts.append((yield from _unpack_value(task, node, part)))
            values.append(tuple(parts))
        else:
            values.append((yield from _unpack_value(task, node, value)))
    return tuple(values)


def _unpack_value(task: GraphTask, node: Node, value: Any) -> Generator[Await, Any, Any]:
    if value.__class__ is not PackedValue:
        return value
    tensor = yield from _call(task, node, value.hooks.unpack, value.packed)
    if not BOUNDARY.is_tensor(tensor):
        raise HookTypeError(f"unpack hook '{hook_name(value.hooks.unpack)}' returned {type(tensor).__name__}; expected the Tensor that was packed")
    return tensor


def _accumulate_now(task: GraphTask, leaf: AccumulateGrad) -> Generator[Await, Any, None]:
    """Write the gradient of an eager leaf and call its hooks now, before the commit (optimizer in backward)."""
    staged: Staged | None = task.staged.gradients.pop(leaf, None)
    if staged is not None:
        commit([staged])
        yield from post_accumulate(task, leaf)


def post_accumulate(task: GraphTask, leaf: AccumulateGrad) -> Generator[Await, Any, None]:
    """Call the leaf's post-accumulate hooks with the leaf."""
    tensor = leaf.leaf()
    if tensor is None or not leaf.post_accumulate_hooks:
        return
    for hook in leaf.post_accumulate_hooks.calls():
        result = yield from _call(task, leaf, hook, tensor)
        if result is not None:
            raise HookError(f"hook '{hook_name(hook)}' returned {type(result).__name__}: post accumulate grad hooks should return None.")


def final_callback(task: GraphTask, callback: Hook) -> Generator[Await, Any, None]:
    """Call a callback that was queued for the end of the pass."""
    yield from _call(task, None, callback)


def _check_nan(node: Node, outputs: list[Any]) -> Generator[Await, Any, None]:
    for i, output in enumerate(outputs):
        if output is not None:
            found = np.any(np.isnan(BOUNDARY.unwrap(output) if BOUNDARY.is_tensor(output) else output))
            wait = getattr(found, "__aiograd_wait__", None)
            if wait is not None:
                yield Await(wait())
            if found:
                raise NaNGradientError(f"Function '{node.name}' returned nan values in its {i}th output.")


def annotate(error: BaseException, task: GraphTask, node: Node | None) -> None:
    """Add a note to an exception, once, that names the pass and the node it came from; `node` is None for a final callback."""
    if getattr(error, "_aiograd_task", None) == task.id:
        return
    try:
        error._aiograd_task = task.id  # type: ignore[attr-defined]
        error._aiograd_node = "final callback" if node is None else node.name  # type: ignore[attr-defined]
    except AttributeError:
        return
    if node is None:
        error.add_note(f"in a final callback of graph task {task.id}")
        return
    where = f"in the backward of {node.name} (sequence number {node.sequence_nr}) of graph task {task.id}"
    lines = [f"{where}, recorded at {line}" if (line := getattr(node, "forward_line", None)) else where]
    if task.anomaly is not None:
        stacks = _forward_stacks(node)
        lines.extend(stacks)
        for line in stacks:
            task.warn(line)
    for line in lines:
        error.add_note(line)


def _forward_stacks(node: Node) -> list[str]:
    anomaly = None if node._extra is None else node._extra.anomaly
    if anomaly is None:
        return [f"No forward pass information for {node.name}: enable detect_anomaly during the forward pass as well."]
    lines = [f"Error detected in {node.name}. Traceback of forward call that caused the error:\n{anomaly[0]}"]
    parent = anomaly[1]
    while parent is not None:
        record = None if parent._extra is None else parent._extra.anomaly
        stack = record[0] if record else "(no forward pass information)"
        lines.append(f"Previous calculation was induced by {parent.name}. Traceback of forward call that induced the previous calculation:\n{stack}")
        parent = record[1] if record else None
    return lines
