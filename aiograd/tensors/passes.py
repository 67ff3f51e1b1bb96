"""Starting passes: `backward`, `grad`, and the checks that they make before anything runs.

Both are plain functions that check their arguments and the running loop and return a coroutine; nothing runs until it is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.engine.graph_task import GraphTask
from aiograd.engine.run import check_can_run, current_engine, new_graph_task
from aiograd.engine.selection import unused_input
from aiograd.engine.validate import device_of
from aiograd.errors import ArgumentError, ArgumentTypeError, DeviceMismatchError, NoGraphError, ShapeError
from aiograd.graph.gradient_edge import GradientEdge
from aiograd.graph.input_metadata import InputMetadata
from aiograd.graph.node import Node
from aiograd.graph.programs import opened_at
from aiograd.running import devices
from aiograd.running.caller import called, type_found, warn_caller
from aiograd.running.modes import current_mode
from aiograd.tensors.core import TensorCore, _Retainer, make, refresh
from aiograd.tensors.plain import plain_array

Root = "TensorCore | GradientEdge"


def backward(
    tensors: Any, grad_tensors: Any = None, *, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> Coroutine[Any, Any, None]:
    """Accumulate the gradients of `tensors` into the leaves they were computed from.

    Args:
        tensors: a Tensor or GradientEdge, or a sequence of them; they may repeat and depend on each other.
        grad_tensors: one gradient for each of `tensors`, of its shape; may be None for tensors of one element.
        retain_graph: keep saved values for another pass; by default the value of `create_graph`.
        create_graph: record the pass itself, so that the gradients can be differentiated.
        inputs: accumulate only into these Tensors (for a non-leaf, ``grad`` is set as well); a sequence, or a mapping of names to Tensors.

    Returns:
        A coroutine. Either it returns and every gradient has been added exactly once, or it raises and no ``grad`` has changed.
        Cancelling it stops the pass.

    Raises:
        NoGraphError, ShapeError, ArgumentError: the arguments are wrong. LoopError: there is no running loop.
        When awaited: `GraphError` and `GradientError`, and exceptions of rules and hooks, with notes that name the node.
    """
    return called(start_backward(tensors, grad_tensors, retain_graph, create_graph, inputs), "backward")


def start_backward(tensors: Any, grad_tensors: Any, retain_graph: bool | None, create_graph: bool, inputs: Any) -> Coroutine[Any, Any, None]:
    """Check the arguments of `backward`, and return its coroutine, for public functions that name it by `called`."""
    trace = current_mode().trace
    if trace is not None:
        if create_graph:
            trace.breaks("it accumulates gradients that have a graph, by backward(create_graph=True); ag.grad(..., create_graph=True) is recorded")
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        return trace.awaits("backward", backward, tensors, grad_tensors, **options)  # type: ignore[no-any-return]
    roots, seeds = roots_and_seeds("backward()", tensors, grad_tensors, create_graph)
    keepers: list[Any] = []
    wanted = None
    if inputs is not None:
        listed = _listed("backward(inputs=...)", inputs)
        if not listed:
            raise ArgumentError("`inputs` argument to `backward()` cannot be empty.")
        wanted = [_input_edge("backward(inputs=...)", i, item) for i, item in enumerate(listed)]
        kept: set[int] = set()
        for item, (node, _) in zip(listed, wanted, strict=True):
            if node.is_leaf:
                keepers.append(None)
            elif isinstance(item, TensorCore):
                keepers.append(_kept_already if item.retains_grad or id(item) in kept else _Retainer(item))
                kept.add(id(item))
            else:
                raise ArgumentError(
                    "backward(inputs=...): a GradientEdge of a non-leaf has no tensor to accumulate into. Pass the tensor, or use grad()."
                )
    check_can_run("backward()")
    if create_graph:
        warn_caller(
            "Using backward() with create_graph=True will create a reference cycle between the parameter and its gradient which can cause a memory "
            "leak. Use aiograd.grad instead, or set .grad to None after use to break the cycle."
        )
    return _backward(roots, seeds, wanted, keepers, create_graph if retain_graph is None else retain_graph, create_graph)


def _kept_already(grad: Any) -> None:
    """Do nothing: the keeper of a tensor that retains its gradient already."""


async def _backward(roots: Any, seeds: Any, inputs: Any, keepers: Any, keep_graph: bool, create_graph: bool) -> None:
    engine = current_engine()
    if inputs is None and len(roots) == 1 and not create_graph and engine.run_at_once(roots[0], seeds[0], keep_graph):
        return
    options = {"inputs": inputs, "keepers": keepers, "keep_graph": keep_graph, "create_graph": create_graph}
    running = engine.run_new(roots, seeds, accumulate=True, **options)
    del roots, seeds
    await running


def grad(
    outputs: Any,
    inputs: Any = None,
    grad_outputs: Any = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
) -> Coroutine[Any, Any, tuple[Any, ...]]:
    """The gradients of `outputs` with respect to `inputs`; no ``grad`` is touched. Of a function: `value_and_grad`.

    Args:
        outputs: a Tensor or GradientEdge, or a sequence of them.
        inputs: a Tensor or GradientEdge, or a sequence (or mapping) of them; leaves or not. Never left out: None is an error that says so.
        grad_outputs: gradient of each output; may be None for tensors of one element.
        retain_graph: keep saved values for another pass; by default the value of `create_graph`.
        create_graph: record the pass, so that the results can be differentiated.
        allow_unused: return None for inputs the outputs do not depend on instead of raising; by default the value of `materialize_grads`.
        materialize_grads: return zeros instead of None.

    Returns:
        A coroutine that returns a tuple with one Tensor (or None) per input. Gradients are taken after the hooks on the inputs. If the graph between
        outputs and inputs goes through other workers, so does the pass, and nothing is accumulated there either.

    Raises:
        NoGraphError, ShapeError, ArgumentError, LoopError: at once. When awaited: `UnusedInputError`, and the errors of the pass.

    Cancelling the coroutine stops the pass.
    """
    trace = current_mode().trace
    if trace is not None:
        options = {
            "retain_graph": retain_graph, "create_graph": create_graph, "allow_unused": allow_unused, "materialize_grads": materialize_grads
        }  # fmt: skip
        if create_graph:
            return called(trace.follows(outputs, inputs, grad_outputs, **options), "grad")
        return called(trace.awaits("grad", grad, outputs, inputs, grad_outputs, **options), "grad")
    return called(
        start_grad(
            "grad()", outputs, inputs, grad_outputs, retain_graph=retain_graph, create_graph=create_graph, allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        ),
        "grad",
    )  # fmt: skip


def start_grad(
    what: str,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any,
    *,
    retain_graph: bool | None,
    create_graph: bool,
    allow_unused: bool | None,
    materialize_grads: bool,
    run: Callable[[GraphTask], Coroutine[Any, Any, list[Any]]] | None = None,
) -> Coroutine[Any, Any, tuple[Any, ...]]:
    """Start a pass as `grad` does, for callers that run the GraphTask in another way.

    Args:
        what: name of the called function, for messages.
        run: runs a GraphTask and returns the captured gradients; the current engine by default.
    """
    if materialize_grads and allow_unused is False:
        raise ArgumentError(f"{what}: expected allow_unused to be True or not passed when materialize_grads=True, but got allow_unused=False.")
    allow = materialize_grads if allow_unused is None else allow_unused
    roots, seeds = roots_and_seeds(what, outputs, grad_outputs, create_graph)
    if inputs is None:
        raise ArgumentTypeError(f"{what}: the inputs are missing, the tensors to differentiate by, as in `await ag.grad(loss, [x])`")
    listed = _listed(what, inputs)
    if not listed:
        raise ArgumentError(f"{what} requires non-empty inputs.")
    wanted = [_input_edge(what, i, item) for i, item in enumerate(listed)]
    check_can_run(what)
    keep = create_graph if retain_graph is None else retain_graph
    records = create_graph
    if not create_graph:
        for seed, edge in zip(seeds, roots, strict=True):
            if seed.__class__ is not np.ndarray and _is_batched(seed, edge):
                seeds, records = list(map(make, seeds)), True  # rules for Tensors: kernels take plain arrays
                break
    return _grad(roots, seeds, listed, wanted, keep, create_graph, allow, materialize_grads, run, records)


async def _grad(
    roots: Any, seeds: Any, inputs: list[Any], wanted: Any, keep_graph: bool, create_graph: bool, allow_unused: bool, materialize: bool, run: Any,
    records: bool,
) -> tuple[Any, ...]:  # fmt: skip
    options = {"inputs": wanted, "require_inputs": not allow_unused, "keep_graph": keep_graph, "create_graph": records}
    running = current_engine().run_new(roots, seeds, **options) if run is None else run(new_graph_task(roots, seeds, **options))
    del roots, seeds
    results = await running
    for i, result in enumerate(results):
        if result is not None:
            continue
        if not allow_unused:
            raise unused_input(i)
        if materialize:
            if not isinstance(inputs[i], TensorCore):
                raise ArgumentError("grad(): materialize_grads cannot be used when an unused input is a GradientEdge: its shape is not known")
            results[i] = make(np.zeros_like(inputs[i]._data))
            if create_graph:
                results[i].requires_grad_()
    return tuple(results)


# -------------------------------------------------------------------- arguments

#: the seed of a 0-d loss, by dtype number; nothing writes to seeds, and a leaf gets a copy
ONE = {np.dtype(dtype).num: np.ones((), dtype) for dtype in (np.float32, np.float64)}
for _one in ONE.values():
    _one.flags.writeable = False


def _listed(what: str, items: Any) -> list[Any]:
    if isinstance(items, (TensorCore, GradientEdge)):
        return [items]
    if isinstance(items, Mapping):
        return list(items.values())
    if isinstance(items, Sequence) or hasattr(items, "__iter__"):
        return list(items)
    advice = ""
    if callable(items):
        name = getattr(items, "__name__", "")
        name = name if name.isidentifier() else "f"
        advice = f". Differentiate what it returns: `await ag.grad({name}(x), [x])`, or `await ag.value_and_grad({name}, x)`"
    raise ArgumentTypeError(f"{what}: expected a Tensor, a GradientEdge or a sequence of them, found {type_found(items)}{advice}")


def edge_of(what: str, i: int, item: Any) -> tuple[Node, int]:
    """The gradient edge ``(node, input number)`` of a Tensor or GradientEdge."""
    if isinstance(item, TensorCore):
        if item._vc is not None:
            refresh(item)
        if item._node is None:
            raise NoGraphError(
                f"{what}: element {i} of tensors does not require grad and does not have a grad_fn. Record it from tensors that require grad."
            )
        return item._node, item._nr
    if isinstance(item, GradientEdge):
        node, nr = item
        if not isinstance(node, Node) or not isinstance(nr, int) or not 0 <= nr < node.num_inputs:
            found = f"{node.name}, which has {node.num_inputs} input(s)" if isinstance(node, Node) else type(node).__name__
            raise ArgumentError(f"{what}: element {i} is a GradientEdge to input {nr!r} of {found}; expected one made by get_gradient_edge()")
        return node, nr
    raise ArgumentTypeError(f"{what}: element {i} is a {type_found(item)}; expected a Tensor or GradientEdge")


def _input_edge(what: str, i: int, item: Any) -> tuple[Node, int]:
    if isinstance(item, TensorCore) and item._node is None:
        raise NoGraphError(f"{what}: One of the differentiated Tensors, the input at index {i}, does not require grad")
    node, nr = edge_of(what, i, item)
    return opened_at(node, nr)


def roots_and_seeds(what: str, tensors: Any, grads: Any, create_graph: bool) -> tuple[list[tuple[Node, int]], list[Any]]:
    """The gradient edges of Tensors or GradientEdges to start from, and their gradients (None: ones, for one element), checked.

    Raises:
        NoGraphError, ShapeError, ArgumentError, DeviceMismatchError: they do not fit; the message starts with `what`.
    """
    if grads is None and isinstance(tensors, TensorCore):
        edge = edge_of(what, 0, tensors)
        return [edge], [_seed(what, 0, tensors, edge, None, create_graph)]
    if isinstance(tensors, TensorCore):
        listed: list[Any] = [tensors]
        given = [grads]
        if grads is not None and not isinstance(grads, TensorCore) and isinstance(grads, Sequence):
            given = list(grads)
    else:
        listed = _listed(what, tensors)
        given = [None] * len(listed) if grads is None else _listed(what, grads)
    if not listed:
        raise ArgumentError(f"{what}: expected at least one tensor to differentiate")
    if len(given) != len(listed):
        raise ArgumentError(f"{what}: got {len(listed)} tensors and {len(given)} gradients; expected one gradient (or None) per tensor")
    roots = [edge_of(what, i, item) for i, item in enumerate(listed)]
    seeds = [_seed(what, i, item, edge, gradient, create_graph) for i, (item, edge, gradient) in enumerate(zip(listed, roots, given, strict=True))]
    return roots, seeds


def _seed(what: str, i: int, item: Any, edge: tuple[Node, int], gradient: Any, create_graph: bool) -> Any:
    if gradient is None and isinstance(item, TensorCore):
        data = item._data
        if data.size != 1:
            raise ShapeError(
                f"{what}: grad can be implicitly created only for scalar outputs; output {i} has shape {list(data.shape)}. Pass its gradient."
            )
        if data.dtype.kind != "f":
            raise ArgumentTypeError(f"{what}: grad can be implicitly created only for real scalar outputs; output {i} has dtype {data.dtype}")
        seed = ONE.get(data.dtype.num) if data.ndim == 0 and data.__class__ is np.ndarray else None
        if seed is None:
            seed = np.ones_like(data)
        return make(seed) if create_graph else seed
    metadata = edge[0].metadata_of(edge[1])
    if gradient is None:
        if metadata is None or int(np.prod(metadata.shape)) != 1 or metadata.dtype.kind != "f":
            raise ShapeError(f"{what}: grad can be implicitly created only for scalar outputs; GradientEdge {i} requires output gradients")
        seed = np.ones(metadata.shape, metadata.dtype)
        device = devices.device(metadata.device)
        if device is not None:
            seed = device.from_host(seed)
        return make(seed) if create_graph else seed
    if not isinstance(gradient, TensorCore):
        if not isinstance(gradient, (np.ndarray, np.generic, float, int)):
            raise ArgumentTypeError(f"{what}: gradients can be either Tensors or None, but gradient {i} is a {type_found(gradient)}")
        gradient = make(np.array(plain_array(gradient), dtype=None if metadata is None else metadata.dtype))
    if metadata is not None:
        _check_seed(what, i, gradient, metadata)
    if not create_graph:
        return gradient._data
    return gradient.clone() if what == "backward()" else gradient  # an array of the caller is never stored as a .grad


def _is_batched(seed: Any, edge: tuple[Node, int]) -> bool:
    """True if the gradient of a root lives on a device other than the root's, with operations that take the root's Tensors as they are."""
    name = devices.device_name_of(seed)
    metadata = edge[0].metadata_of(edge[1])
    return metadata is not None and name != metadata.device and devices.adopts(name)


def _check_seed(what: str, i: int, gradient: TensorCore, metadata: InputMetadata) -> None:
    if gradient.shape != metadata.shape:
        raise ShapeError(
            f"{what}: Mismatch in shape: grad_output[{i}] has a shape of {list(gradient.shape)} and output[{i}] has a shape of "
            f"{list(metadata.shape)}."
        )
    if gradient.dtype.kind in "fc" and (gradient.dtype.kind == "c") != (metadata.dtype.kind == "c"):
        raise ArgumentTypeError(
            f"{what}: For complex Tensors, both grad_output and output are required to have the same dtype. Mismatch in dtype: "
            f"grad_output[{i}] has dtype {gradient.dtype} and output[{i}] has dtype {metadata.dtype}."
        )
    if gradient.dtype != metadata.dtype:
        raise ArgumentTypeError(
            f"{what}: grad_output[{i}] has dtype {gradient.dtype} and output[{i}] has dtype {metadata.dtype}. Cast it with .astype()."
        )
    if device_of(gradient) != metadata.device and not devices.adopts(device_of(gradient)):
        raise DeviceMismatchError(
            f"{what}: grad_output[{i}] lives on {device_of(gradient)} and output[{i}] on {metadata.device}. Move it with .to()."
        )
