"""One call of a torch module on Tensors: the way in, the run, the way out, and the node.

Note [Bad inputs and bad modules]
    A module that modifies an input in place, or returns a view of one, would do so behind the back of aiograd's graph. Torch refuses the first before
    anything is written where the input requires grad; else it is seen by torch's count of writes after the fact: the Tensor's version says
    so, and the call raises. An output that is an input itself is returned as the Tensor it was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiograd.errors import AiogradError, DeviceMismatchError, GraphError, InPlaceError
from aiograd.functional.function_tangents import through_nodes
from aiograd.interop.containers import leaves_of_object, map_nested, nested_leaves
from aiograd.interop.extras import from_extra
from aiograd.interop.torch.conversion import over_array, refuse_graph, same_memory, writeable
from aiograd.interop.torch.graph import TorchGraph, Watched
from aiograd.interop.torch.modes import noted_modes
from aiograd.interop.torch.node import Recomputed, TorchNode, recorded
from aiograd.running.modes import Mode, current_mode
from aiograd.running.random import draws_are_steered, foreign_draws
from aiograd.running.random_streams import Draws, Replay, is_replaying
from aiograd.tensors.core import TensorCore, counter_of, refresh
from aiograd.tensors.followed import follows_writes
from aiograd.tensors.saved_hooks import pack_value

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")


class Passed(NamedTuple):
    """A Tensor that a module was called with, or a plain array (then `tensor` is None)."""

    tensor: Any
    #: torch's tensor over its memory, and the version that torch counts
    given: Any
    version: int
    #: aiograd's version counter, where the two are not one, and the object that it counts for
    counter: Any
    counted: int


def call(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], instead: Mapping[str, Any]) -> Any:
    """Call the torch module of a `TorchModule`, with Tensors in the place of some of its parameters and buffers; see its `forward`."""
    mode = current_mode()
    profiler = mode.profiler
    began = None if profiler is None else profiler.begin_forward()
    records = mode.grad and torch.is_grad_enabled()
    parameters = layer.shared_parameters()
    passed: list[Passed] = []
    plain: list[Passed] = []
    place = functools.partial(_pass, passed, plain, records)
    kinds = (TensorCore, np.ndarray, torch.Tensor)
    try:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # tensors of inference count no writes
            tree = (map_nested(place, args, kinds), *[map_nested(place, named, kinds) if named else named for named in (kwargs, instead)])
    except _FollowedError:
        return _in_forward_mode(layer, (args, kwargs, instead))
    trained = [parameter for parameter in parameters if parameter.torch_parameter.requires_grad] if records else []
    if instead:
        used = {id(parameter) for path, parameter in layer._own_parameters() if path not in instead}
        trained = [parameter for parameter in trained if id(parameter) in used]
    hooks = mode.saved_hooks if records else None
    states: list[Any] = []
    result, elapsed_ns = _run(layer, tree, records, [each.given for each in passed], None if hooks is None else states)
    inputs = [*passed, *plain]
    _check_inputs(layer, inputs)
    if records:
        layer.refuse_graphs_in_buffers()
    returned: list[Any] = []
    refuse = functools.partial(_refuse_hidden, layer) if records else None
    result = map_nested(functools.partial(_take, layer, inputs, returned), result, torch.Tensor, refuse)
    line = _line() if records else None
    wanted = [each for each in passed if each.tensor._node is not None] if records else []
    edges = [*[(each.tensor._node, each.tensor._nr) for each in wanted], *[parameter.edge() for parameter in trained]]
    sources = [*[each.given for each in wanted], *[parameter.torch_parameter for parameter in trained]]
    watched = [Watched(each.counter, each.counted, each.given) for each in passed if each.counter is not None]
    graph = TorchGraph((), sources, watched)
    tensors = recorded(returned, graph, edges, mode, line, elapsed_ns)
    result = map_nested(lambda place: place.of(tensors), result, (_Placeholder, _Itself))
    if hooks is not None:
        node = next((tensor._node for tensor in tensors if isinstance(tensor._node, TorchNode)), None)
        if node is not None:
            _recompute(node, layer, (args, kwargs, instead), passed, trained, states[0], mode)
    if profiler is not None:
        made = next((tensor._node for tensor in tensors if tensor._node is not None), None)
        profiler.end_forward(began, type(layer.module).__name__, made, nested_leaves(result, TensorCore))
    return result


class _FollowedError(Exception):
    """A Tensor among the arguments has a tangent."""


def _in_forward_mode(layer: Any, tree: Any) -> Any:
    """The call on values with tangents; the tangents of its results come from the transposed node."""
    tensors = nested_leaves(tree, TensorCore)

    def run(instead: Mapping[int, Any]) -> Any:
        return call(layer, *map_nested(lambda tensor: instead[id(tensor)], tree, TensorCore))

    result, places = through_nodes(tensors, run, lambda made: nested_leaves(made, TensorCore))
    return map_nested(lambda tensor: places[id(tensor)], result, TensorCore)


# -------------------------------------------------------------------- the way in


def _pass(passed: list[Passed], plain: list[Passed], records: bool, leaf: Any) -> Any:
    """The torch tensor for an argument, noted among the Tensors or the plain arrays."""
    if isinstance(leaf, TensorCore):
        if leaf._x is not None:
            refresh(leaf)
        if follows_writes(leaf._data):
            raise _FollowedError
        given, counter, count = same_memory(leaf)
        if records and leaf._node is not None:
            given.requires_grad_()
        passed.append(Passed(leaf, given, given._version, counter, count))
        return given
    if isinstance(leaf, np.ndarray):
        given = over_array(writeable(leaf))
        plain.append(Passed(None, given, given._version, None, 0))
        return given
    if leaf.requires_grad and records:
        refuse_graph("an argument of a wrapped torch module: a torch tensor that")
    return leaf


def _run(layer: Any, tree: Any, records: bool, given: Sequence[Any], states: list[Any] | None = None) -> tuple[Any, int]:
    """The result of the torch module, and the nanoseconds that it took; the state of the random numbers that it draws from goes to `states`."""
    if states is None and not draws_are_steered() and records == torch.is_grad_enabled():
        return _timed(layer, tree, given)
    with foreign_draws(random_state, go_to_state, torch.manual_seed), torch.set_grad_enabled(records):
        if states is not None:
            states.append(random_state())
        with _keeping_buffers(layer.module) if is_replaying() else nullcontext():
            return _timed(layer, tree, given)


def _timed(layer: Any, tree: Any, given: Sequence[Any]) -> tuple[Any, int]:
    args, kwargs, instead = tree
    began = perf_counter_ns()
    try:
        result = torch.func.functional_call(layer.module, instead, args, kwargs) if instead else layer.module(*args, **kwargs)
        return result, perf_counter_ns() - began
    except AiogradError:
        raise
    except Exception as error:
        raised = _explained(layer, error, [*given, *nested_leaves(tree, torch.Tensor)])
        if raised is None:
            raise
        raise raised from error


def _explained(layer: Any, error: Exception, given: Sequence[Any]) -> Exception | None:
    """The error of aiograd for one that a torch module has raised because of its arguments; None for any other."""
    name = type(layer.module).__name__
    if "leaf Variable that requires grad" in str(error) and "in-place operation" in str(error):
        is_input = any(each.requires_grad for each in given)
        return _modified(name, " or a parameter that needs a gradient,") if is_input else InPlaceError(
            f"the torch module {name} writes to a parameter in place, where that needs a gradient. Write to it in a block of torch.no_grad(), or "
            "compute with a new tensor."
        )
    places = {str(parameter.torch_parameter.device) for parameter in layer.shared_parameters()}
    inputs = {str(each.device) for each in given}
    if len(places | inputs) > 1:
        return DeviceMismatchError(
            f"calling the torch module {name}: its parameters are on {', '.join(sorted(places)) or 'no device'}, its arguments on "
            f"{', '.join(sorted(inputs))}. Move one to the other, with tensor.to() or module.to()."
        )
    return None


def _modified(name: str, other: str = "") -> InPlaceError:
    return InPlaceError(
        f"the torch module {name} modifies its input in place,{other} which aiograd's graph cannot follow. Let it work on a copy (x = x.clone()), "
        "or set inplace=False in its layers."
    )


def _check_inputs(layer: Any, passed: Sequence[Passed]) -> None:
    """Raise if the module has written to an input."""
    modified = [each for each in passed if each.given._version != each.version]
    if modified:
        for each in modified:
            if each.counter is not None:
                counter_of(each.tensor)[0] += 1
        raise _modified(type(layer.module).__name__)


# -------------------------------------------------------------------- the way out


class _Placeholder(NamedTuple):
    """In the place of an output: its number among them."""

    number: int

    def of(self, tensors: Sequence[Any]) -> Any:
        return tensors[self.number]


class _Itself:
    """In the place of an output that is an input: the Tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def of(self, tensors: Sequence[Any]) -> Any:
        return self.tensor


def _take(layer: Any, passed: Sequence[Passed], returned: list[Any], result: Any) -> Any:
    """A placeholder for a torch tensor that the module has returned."""
    for number, other in enumerate(returned):
        if other is result:
            return _Placeholder(number)  # the same tensor twice
    for each in passed:
        if each.given is result:
            if each.tensor is None:
                break  # a Tensor over the array, as of ag.asarray()
            return _Itself(each.tensor)
        if _is_view(result, each.given):
            raise InPlaceError(
                f"the torch module {type(layer.module).__name__} returns a view of its input, of shape {list(result.shape)}: the two would share "
                "memory behind the back of aiograd's graph. Return a copy (.clone()), or take the view of the Tensor outside of the module."
            )
    returned.append(result)
    return _Placeholder(len(returned) - 1)


def _refuse_hidden(layer: Any, other: Any) -> None:
    """Raise if an object that the module has returned, or that is in its result, keeps tensors of torch's graph."""
    if isinstance(other, torch.nn.Module):
        return
    is_iterator = isinstance(other, Iterator)
    if is_iterator or any(leaf.grad_fn is not None for leaf in leaves_of_object(other, torch.Tensor)):
        holds = "yields torch tensors" if is_iterator else "has torch tensors with a graph among its attributes"
        raise GraphError(
            f"the torch module {type(layer.module).__name__} returns a {type(other).__name__}, which {holds}: their gradients would stop here. "
            "Return tensors in tuples, lists, dicts, deques, sets or dataclasses, or wrap a module that returns the tensors."
        )


def _is_view(result: Any, given: Any) -> bool:
    """True if two torch tensors share memory."""
    if result.layout is not torch.strided:
        return False
    place = result.untyped_storage().data_ptr()
    return place != 0 and bool(given.untyped_storage().data_ptr() == place)


# -------------------------------------------------------------------- the same call again


def random_state() -> tuple[Any, Any]:
    """The state of torch's random numbers, on the host and on the devices that are in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None


def go_to_state(state: tuple[Any, Any]) -> None:
    """Put torch's random numbers into a state."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])


@contextmanager
def _keeping_buffers(module: Any) -> Iterator[None]:
    """A block after which the module's buffers have their old values: running statistics count each batch once."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)  # behind the counter: for nodes that have saved the buffer, nothing has changed


@contextmanager
def _in_modes(modes: Sequence[tuple[Any, bool]]) -> Iterator[None]:
    """A block in which torch modules train, or not, as they did when their modes were noted."""
    before = [(module, module.training) for module, mode in modes if module.training != mode]
    for module, mode in before:
        module.training = not mode
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def _recompute(node: TorchNode, layer: Any, tree: Any, passed: Sequence[Passed], trained: Sequence[Any], state: Any, mode: Mode) -> None:
    """Let a node keep its inputs, packed by saved-tensor hooks, in the place of torch's graph. See Note [Recomputed] of `node`."""
    needs = [each.tensor._node is not None for each in passed]
    numbers = iter(range(len(passed)))
    places = map_nested(lambda _: _Placeholder(next(numbers)), tree, TensorCore)
    parameters = [parameter.torch_parameter for parameter in trained]
    modes = [(each, each.training) for each in layer.module.modules()]
    surroundings = noted_modes()
    draws = Draws()
    draws.foreign.append(state)

    def again(values: Sequence[Any]) -> TorchGraph:
        shared = [same_memory(value) for value in values]
        given = [each.requires_grad_() if need else each for (each, _, _), need in zip(shared, needs, strict=True)]
        kinds = (_Placeholder, np.ndarray)
        filled = map_nested(lambda leaf: given[leaf.number] if isinstance(leaf, _Placeholder) else over_array(writeable(leaf)), places, kinds)
        with nullcontext() if surroundings is None else surroundings(), Replay(draws).playing(), _in_modes(modes):
            result, _ = _run(layer, filled, True, given)
        outputs = [each for each in nested_leaves(result, torch.Tensor) if each.requires_grad and not any(each is other for other in given)]
        watched = [Watched(counter, count, each) for each, counter, count in shared if counter is not None]
        sources = [*[each for each, need in zip(given, needs, strict=True) if need], *parameters]
        return TorchGraph(list(dict.fromkeys(outputs)), sources, watched)

    node.recompute(Recomputed(again, parameters), tuple([pack_value(each.tensor, mode.saved_hooks) for each in passed]))


def _line() -> str | None:
    """File and line of the code that called the module, three frames above `call`."""
    frame: Any = sys._getframe(1)
    for _ in range(3):
        frame = frame and frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
