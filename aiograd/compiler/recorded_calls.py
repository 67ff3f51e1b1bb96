"""CallRecorder: how a recording treats gradients that are read or forgotten, and calls between rows: passes, optimizers' steps."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from aiograd.compiler.effects import ArgumentPlace, CalledOp, RepeatedCall, caller, statement_op
from aiograd.compiler.lines import async_block, described_line, is_of_package, quoted, user_line
from aiograd.compiler.program import Statement, Value, ValueKind
from aiograd.compiler.recorded_pass import RecordedPass, obstacle_in
from aiograd.compiler.recording import ProgramRecorder, array_of
from aiograd.compiler.results import others_in
from aiograd.compiler.watching.kinds import ATTRIBUTE, HAS_GRADIENT, HAS_HOOKS
from aiograd.compiler.watching.reads import Read
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.run.current import current_engine
from aiograd.graph.node import Node
from aiograd.running.modes import ModeScope
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.accumulated import gradient_of
from aiograd.tensors.core import TensorCore
from aiograd.tensors.passes import grad, start_grad

_AWAITING = "aiograd.compiler.awaiting"


class CallRecorder(ProgramRecorder):
    """A recorder that follows calls between rows."""

    #: inputs that the function differentiates by in a pass that is rows
    differentiated: tuple[int, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: the places in the graph, from before the call, that passes which are rows have differentiated by, with the lines of these passes
        self._ends: dict[tuple[Node, int], str] = {}

    def forgets_grad(self, tensor: TensorCore, forget: Callable[[TensorCore], None]) -> None:
        """Note that `forget` sets the gradient of a tensor to None; for a captured leaf this is a statement, which needs no part of its own."""
        known, node = self._find(tensor), tensor._node
        self._keep_gradient(tensor)
        if node is None or not node.is_leaf or (known is not None and known.kind is not ValueKind.CAPTURED):
            self.acts("setting .grad", forget, tensor)
            return
        forget_here = functools.partial(forget, tensor)
        with ModeScope(trace=None):
            forget_here()
        if self.broken is None:
            self.has_called = True
            self._add(statement_op("setting .grad", forget_here), (), ())

    def looks_at_grad(self, tensor: TensorCore, grad: TensorCore | None) -> None:
        """Note that a gradient is read or tested: the rest of the call may depend on its presence, unless the call has made it itself."""
        known = self._values.get(id(tensor))
        if id(tensor._node) in self._leaves or any([tensor is each for each in self._of_call]):
            self.breaks("it reads the gradient of an argument")
        elif (known is not None and known.kind is ValueKind.COMPUTED) or id(tensor) in self._created:
            if grad is not None:
                self.breaks("it reads the gradient of a tensor that it has made")
            return
        if array_of(gradient_of(tensor)) is self._keep_gradient(tensor):
            self._own_reads.append(Read(HAS_GRADIENT, tensor, None, gradient_of(tensor) is not None, self.watcher.where))
        if grad is not None:
            found = self._find(grad)
            if found is not None and found.kind is not ValueKind.COMPUTED:
                self.breaks("it uses a gradient, or a tensor with its memory, that is an argument or that it finds by another name than .grad")
            self._read[id(grad._data)] = grad, tensor
            self._alive += [grad, grad._data]

    def acts(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function for its effect on its own state, such as an optimizer's step; a program calls it at every run.

        Args:
            name: of the effect, for people.
            function: returns None or a Tensor; it is called with the other arguments, in which iterators become lists.
        """
        args, kwargs = _listed(args), _listed(kwargs)
        call = self._call(function, args, kwargs)
        with ModeScope(trace=None):
            result = function(*args, **kwargs)
        self._called(name, call, result, is_awaited=False)
        return result

    def applies(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], *, is_async: bool) -> Any:
        """As `acts` and `awaits`, for a function that makes nodes of its own: a program calls it with its Tensors, in the graph."""
        if is_async:
            return self._awaited(name, function, args, {}, has_graph=True)
        call = self._call(function, args, {})
        with ModeScope(trace=None):
            result = call_repeated(function, args)
        self._called(name, call, result, is_awaited=False, has_graph=True)
        return result

    def awaits(self, name: str, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """As `acts`, for a function that returns a coroutine: a backward pass, or a step on the executor."""
        _refuse_async_blocks(sys._getframe(2), self)
        return self._awaited(name, function, _listed(args), _listed(kwargs))

    def follows(self, outputs: Any, inputs: Any, grad_outputs: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        """`ag.grad` with ``create_graph``: see Note [Passes that are rows] in `aiograd.compiler.recorded_pass`."""
        _refuse_async_blocks(sys._getframe(2), self)
        return self._as_rows(_listed((outputs, inputs, grad_outputs)), options)

    async def _as_rows(self, given: tuple[Any, Any, Any], options: dict[str, Any]) -> Any:
        if options["retain_graph"] is False:
            self.breaks("it frees the graph that it differentiates, with retain_graph=False")
        if self.broken is not None:
            with ModeScope(trace=None):
                return await grad(*given, **options)
        seen = RecordedPass(self)
        passes: list[GraphTask] = []

        async def run(task: GraphTask) -> list[Any]:
            passes.append(task)
            with ModeScope(trace=seen):
                return await current_engine().run(task)

        try:
            with ModeScope(trace=None):
                results: tuple[Any, ...] = await start_grad("grad()", *given, **options, run=run)
        except BaseException:
            self.breaks("it goes on after a pass that has failed")
            raise
        self._add_rows(seen, passes[0])
        for result in results:
            if self.broken is None and result is not None and self._find(result) is None:
                if result._node is not None:
                    self.breaks("it gets zeros that require grad, with materialize_grads=True")
                self.made(result)
        return results

    def _add_rows(self, seen: RecordedPass, task: GraphTask) -> None:
        """Take over the rows of a pass that is over."""
        obstacle = obstacle_in(task, self._nodes) or seen.obstacle
        if obstacle is not None:
            self.breaks(f"it differentiates by a pass that {obstacle}")
        inside, line = {*self._nodes, *self._new_leaves.values()}, quoted(*self.watcher.line())
        self._ends.update({end: line for end in task.plan.inputs if end[0] not in inside})  # type: ignore[attr-defined]
        for row in seen.rows(self._array_types):
            self.ran(*row)

    def settle(self) -> tuple[list[Read], Read | None]:
        """As of `ProgramRecorder`; with the reads that passes make which are rows: what they end at, and that no history leads there."""
        differentiated: list[int] = []
        given = [*enumerate(self._of_call), *[(-1, tensor) for tensor in self._tensors]] if self._ends else []
        for i, tensor in given:
            node = tensor._node
            if node is None or id(node) in self._new_leaves:
                continue
            end = node.place_of(tensor._nr)
            ends = [each for each in self._ends if each != end]
            if not node.is_leaf and ends:
                line = self._ends[ends[0]]
                self.breaks(f"it differentiates by a tensor that an argument or captured tensor may be computed from; use detach(): {line}")
            if i >= 0:
                if node.is_leaf:
                    self.leaves[i] = True
                if end in self._ends:
                    differentiated.append(i)
            else:
                if node.is_leaf:
                    self._own_reads.append(Read(ATTRIBUTE, tensor, "is_leaf", True, None))
                if end in self._ends:
                    self._own_reads.append(Read(HAS_HOOKS, *end, False, None))
        self.differentiated = tuple(differentiated)
        return super().settle()

    async def _awaited(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, has_graph: bool = False
    ) -> Any:
        call = self._call(function, args, kwargs)
        try:
            with ModeScope(trace=None):
                result = await function(*args, **kwargs)
        except BaseException:
            self.breaks("it goes on after a pass that has failed")
            raise
        self._called(name, call, result, is_awaited=True, has_graph=has_graph)
        return result

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[RepeatedCall, tuple[Value, ...]] | None:
        """The same call of other Tensors, and the values that it takes: all Tensors but leaves that are no argument.

        Returns:
            None if the recording is broken.
        """
        if self.broken is not None:
            return None
        taken: list[Value] = []

        def place(tensor: TensorCore) -> Any:
            node = tensor._node
            known = self._find(tensor)
            self._keep_gradient(tensor)
            if node is not None and node.is_leaf and (known is None or known.kind is ValueKind.CAPTURED):
                return tensor
            taken.append(self._value_of(tensor))
            return ArgumentPlace(len(taken) - 1)

        for each in (*args, *kwargs.values()):
            for group in getattr(each, "param_groups", ()):
                for parameter in group["params"]:
                    self._keep_gradient(parameter)
        args, kwargs = map_tree(place, (args, kwargs), TensorCore)
        return RepeatedCall(function, args, kwargs, caller(function, args, kwargs)), tuple(taken)

    def _called(self, name: str, call: Any, result: Any, *, is_awaited: bool, has_graph: bool = False) -> None:
        if call is None or self.broken is not None:
            return
        outputs = leaves_of(result, TensorCore)
        others = [type(other).__name__ for other in others_in(result)]
        if others:
            self.breaks(f"{name} returns a {others[0]}")
        for output in outputs:
            if output._node is not None and not has_graph:
                self.breaks(f"{name} returns a tensor that has a graph")
            if self._find(output) is not None:
                self.breaks(f"{name} returns one of its arguments")
        if self.broken is None:
            self.has_called = True
            made = self._made(outputs)
            repeated, values = call
            self._statements.append(Statement(CalledOp(name, repeated, is_awaited=is_awaited), values, {}, None, made, None, *user_line()))


def call_repeated(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function that programs call anew at every run: its reads are not watched, since each run makes them again."""
    return function(*args)


def _listed(arguments: Any) -> Any:
    """Arguments with lists in place of iterators, which can be used only once."""
    return map_tree(list, arguments, Iterator)


def _refuse_async_blocks(frame: Any, recorder: CallRecorder) -> None:
    """Break the recording where a running function has an ``async with`` or ``async for``: its effect would not be repeated."""
    while frame is not None and frame.f_globals.get("__name__") != _AWAITING:
        if not is_of_package(frame):
            found = async_block(frame.f_code)
            if found is not None:
                recorder.waits(*described_line(frame.f_code.co_filename, found, frame.f_globals))
        frame = frame.f_back
