"""Tangents in remote calls: the arrays of forward mode taken apart where they leave a worker, and put together where they arrive.

Note [Tangents beside the arguments]
    A function is differentiated where it runs. So a call within forward mode sends the values as it always does, and their tangents in one more list;
    the worker opens a level of its own for each level that the caller is in, calls the function on dual arrays, and sends the result and its tangents
    back in the same way. Nothing is committed afterwards, so no context is needed. A value may have tangents of several levels (a derivative within
    another), and tangents have tangents themselves; each entry of the list names its level and the tensor that it belongs to.

Note [Numbers of tensors]
    Tensors have numbers in the order in which they appear, each once: first the tensors of the values, then the list's. Every tensor is sent as an
    object of its own, so that both sides count the same.

Note [Calls of linearize]
    Within `ag.linearize` tangents come later. So the call is made with the values alone, and once more, with values and tangents, for each push.

Note [Recorded tangents]
    With ``create_graph`` values and tangents are differentiable Tensors like others, on the other worker too: the function runs without recording
    dual arrays, and its level records the values and tangents within them. A backward pass within forward mode does not cross, since it would
    have to carry dual gradients: a dual array that requires grad itself is refused, and so is a call in a context while gradients are recorded.

An array of `vmap` is refused: the list has tangents, no batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from aiograd.coordination.device_copies import level_of, on_host
from aiograd.distributed.messages.calls import SentTangent
from aiograd.distributed.payload import NotOnHostError, Packing, Unpacking, UnsendableError, device_tensors
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.errors import ArgumentTypeError, ProtocolError
from aiograd.forward.dual import DualArray, ForwardLevel, Pending
from aiograd.forward.rows import defer
from aiograd.running.modes import current_mode
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import TensorCore, make


class DeferredCallError(Exception):
    """A tangent of the level is not known yet; `call_later` makes the call."""

    def __init__(self, level: ForwardLevel) -> None:
        super().__init__(level.name)
        self.level = level


class TakenApart:
    """Values without the tangents of forward mode, and these.

    Args:
        value: a tree of values.
        levels: the levels with tangents that may be sent, the outermost first; None: all.

    Raises:
        UnsendableError: a dual array of another level, or one that requires grad itself.
    """

    def __init__(self, value: Any, levels: Sequence[ForwardLevel] | None = None) -> None:
        self._allowed = levels
        self._made: dict[int, Any] = {}
        self._count = 0
        #: level, number of the tensor, tangent
        self._found: list[tuple[ForwardLevel, int, Any]] = []
        #: the inputs that the tangents come from, by level; see `ForwardLevel.dual`
        self.inputs: dict[ForwardLevel, int] = {}
        self.value = map_tree(self._value, value, TensorCore)
        #: the levels of the tangents, the outermost first
        self.levels: list[ForwardLevel] = []

    def _value(self, tensor: Any) -> Any:
        made = self._made.get(id(tensor))
        if made is None:
            made = self._made[id(tensor)] = self._apart(tensor)
        return made

    def _apart(self, tensor: Any) -> Any:
        """The value of a tensor on no level, as a Tensor of its own; takes the next number."""
        number, follows = self._count, current_mode().tangents
        self._count += 1
        if tensor._data.__class__ is DualArray and tensor._data.level.deferred and self._allowed is None:
            raise DeferredCallError(tensor._data.level)
        while tensor._data.__class__ is DualArray:
            level = tensor._data.level
            if tensor._node is not None or level.deferred or (self._allowed is not None and level not in self._allowed):
                raise UnsendableError(tensor)
            tensor, tangent, inputs = level.parts(tensor)
            if tangent is not None and follows:
                self._found.append((level, number, tangent))
                self.inputs[level] = self.inputs.get(level, 0) | inputs
        alone = make(tensor._data, shared_with=tensor)
        alone._node, alone._nr = tensor._node, tensor._nr
        return alone

    async def tangents(self) -> list[tuple[int, int, Any]]:
        """The tangents with the numbers of their levels and tensors. Waits for tangents that a rule of a custom function has yet to compute."""
        settled: dict[ForwardLevel, Mapping[int, Any]] = {}
        taken: list[tuple[ForwardLevel, int, Any]] = []
        for level, number, tangent in self._found:  # grows: a tangent may have tangents
            if tangent.__class__ is Pending:
                if level not in settled:
                    settled[level] = await level.settle()
                tangent = settled[level][tangent.number]
                if tangent is None:
                    continue
            taken.append((level, number, self._apart(tangent if isinstance(tangent, TensorCore) else make(tangent))))
        self.levels = sorted({level for level, _, _ in taken} if self._allowed is None else self._allowed, key=lambda level: level.depth)
        return [(self.levels.index(level), number, tangent) for level, number, tangent in taken]


#: the most levels of forward mode that a call may be in
MOST_LEVELS = 16


def put_together(
    value: Any, tensors: Sequence[Any], sent: Sequence[tuple[SentTangent, Any]], levels: Sequence[ForwardLevel], inputs: Mapping[ForwardLevel, int]
) -> Any:
    """Values with their tangents, on levels of this worker.

    Args:
        value: the tree of values.
        tensors: all tensors that were sent, by number.
        sent: entries of the list and their tangents.
        levels: the levels, the outermost first.
        inputs: the inputs that tangents come from, by level.

    Raises:
        ProtocolError: an entry does not fit.
    """
    first = len(tensors) - len(sent)
    whole = list(tensors)
    seen: set[tuple[int, int]] = set()
    for position in range(len(levels)):
        for i, (entry, tangent) in enumerate(sent):
            if entry.level != position:
                continue
            number, of = first + i, entry.of
            if of >= number or (entry.level, of) in seen:
                raise ProtocolError(f"a tangent of tensor {of}, which is no earlier one, or has one already", code="call")
            target = tensors[of]
            if target.shape != tangent.shape or target.dtype != tangent.dtype or target.dtype.kind not in "fc":
                raise ProtocolError(f"a tangent of another shape or dtype than its value, tensor {of}, or of one without", code="call")
            seen.add((entry.level, of))
            level = levels[position]
            whole[of] = level.dual(whole[of], whole[number], inputs.get(level, 0))
    numbers = {id(tensor): i for i, tensor in enumerate(tensors)}
    return map_tree(lambda tensor: whole[numbers[id(tensor)]], value, TensorCore)


def new_levels(sent: Iterable[SentTangent], records: bool, stack: contextlib.ExitStack) -> list[ForwardLevel]:
    """Levels for a function that is called with tangents, the outermost first.

    Args:
        sent: the tangents.
        records: the values are recorded.
        stack: closes the levels.

    Raises:
        ProtocolError: there would be more than there may be.
    """
    count = max(entry.level for entry in sent) + 1
    if count > MOST_LEVELS:
        raise ProtocolError(f"tangents of {count} levels; at most {MOST_LEVELS}", code="call")
    return [stack.enter_context(ForwardLevel(records=records)) for _ in range(count)]


async def pack(
    value: Any, records: bool, encoding: Encoding, levels: Sequence[ForwardLevel] | None = (), *, crosses: bool = False
) -> tuple[Packing, Any]:
    """A value as it is sent, and its packing.

    Args:
        value: a tree of values.
        records: True if differentiable Tensors stay connected to the graph.
        encoding: the wire encoding of floating-point tensors.
        levels: the levels with tangents that may be sent; None: all.
        crosses: True if the message has room for tangents.

    Raises:
        UnsendableError, RecursionError: it cannot be sent.
    """
    try:
        packing = Packing(records, encoding, {})
        return packing, packing.pack(value)
    except NotOnHostError:
        pass
    apart, entries = None, []
    if crosses and any(tensor._data.__class__ is DualArray for tensor in device_tensors(value)):
        apart = TakenApart(value, levels)
        entries = await apart.tangents()
        value = apart.value
    hosted: dict[int, Any] = {}
    for tensor in device_tensors((value, [tangent for _, _, tangent in entries])):
        if level_of(tensor._data) is not None:
            raise UnsendableError(tensor)
        hosted[id(tensor)] = await on_host(tensor._data)
    if entries and not levels:
        records = any(level.records for level in apart.levels)  # type: ignore[union-attr]
    packing = Packing(records, encoding, hosted)
    packed = packing.pack(value)
    if apart is not None:
        packing.levels, packing.inputs = apart.levels, apart.inputs
        packing.tangents = [SentTangent(level, of, packing.pack(tangent)) for level, of, tangent in entries]
    return packing, packed


def unpack_tangents(
    unpacking: Unpacking, value: Any, sent: Sequence[SentTangent] | None, levels: Sequence[ForwardLevel], inputs: Mapping[ForwardLevel, int]
) -> Callable[[], Any]:
    """Unpack the tangents of unpacked values; returns a function that puts both together, for when differentiable tensors are in the graph.

    Args:
        unpacking: which has unpacked the values, and nothing else.
        value: the values.
        sent: the list of tangents, or None.
        levels: the levels, the outermost first.
        inputs: see `put_together`.

    Raises:
        ProtocolError: the list does not fit.
    """
    if not sent:
        return lambda: value
    if max(entry.level for entry in sent) >= len(levels):
        raise ProtocolError("tangents of levels that the call does not have", code="call")
    before = len(unpacking.tensors)
    tangents = [unpacking.unpack(entry.value) for entry in sent]
    tensors = unpacking.tensors
    if len(tensors) != before + len(sent) or any(a is not b for a, b in zip(tensors[before:], tangents, strict=True)):
        raise ProtocolError("tangents that are no tensors of their own", code="call")
    return lambda: put_together(value, tensors, list(zip(sent, tangents, strict=True)), levels, inputs)


async def call_later(call: Callable[[Any], Coroutine[Any, Any, Any]], value: Any, level: ForwardLevel) -> Any:
    """A call within `ag.linearize`; see Note [Calls of linearize].

    Args:
        call: makes the call with a tree of arguments.
        value: the arguments.
        level: the innermost level, which is deferred.

    Returns:
        The result, its floating Tensors on the level.
    """

    def is_followed(tensor: Any) -> bool:
        return tensor._data.__class__ is DualArray and tensor._data.level is level

    given: list[Any] = [level.parts(tensor)[1] for tensor in leaves_of(value, TensorCore) if is_followed(tensor)]
    result = await call(map_tree(lambda tensor: level.parts(tensor)[0] if is_followed(tensor) else tensor, value, TensorCore))
    outputs = [tensor for tensor in leaves_of(result, TensorCore) if tensor.dtype.kind == "f"]

    async def push(tangents: list[Any]) -> list[Any]:
        with ForwardLevel() as again:
            pushed = iter(tangents)

            def dual(tensor: Any) -> Any:
                return again.dual(level.parts(tensor)[0], next(pushed)) if is_followed(tensor) else tensor

            found = await call(map_tree(dual, value, TensorCore))
            parts = [again.parts(tensor) for tensor in leaves_of(found, TensorCore) if tensor.dtype.kind == "f"]
        if len(parts) != len(outputs):
            raise ArgumentTypeError(f"a remote function returned {len(outputs)} tensors within linearize(), then {len(parts)} for the same values")
        return [tangent for _, tangent, _ in parts]

    places = iter(defer(level, push, given, len(outputs), range(len(outputs))))
    return map_tree(lambda tensor: level.dual(tensor, next(places)) if tensor.dtype.kind == "f" else tensor, result, TensorCore)
