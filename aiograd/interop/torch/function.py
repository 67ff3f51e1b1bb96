"""aiograd's functions in torch's graph: a torch model calls a remote expert, a worker's stage or a service in the middle of its forward.

Note [Two graphs]
    A call runs the function on detached Tensors over torch's memory and records a graph of its own. The node in torch's graph pulls gradients
    through that graph in one pass, which gives the gradients of the arguments; gradients of other Tensors, such as the function's parameters, are
    held back until torch's whole pass has succeeded, and are then committed, all calls of the pass together (one commit for each loop, where
    calls are on several). A torch pass that fails changes no ``grad`` of aiograd.

    Where the function has called other workers with what requires grad, its graph cannot be run apart: its pass is `Context.backward` of the
    context in which it was called. All gradients but the arguments' go to the context's `grads` then, on every worker, at one commit
    of that pass.

Note [Memory]
    Arguments share torch's memory and its version counter, so a write into them is noticed by both libraries. Results and gradients that go to torch
    are copies: a torch module may overwrite its inputs, which aiograd's graph may have saved, and torch accumulates into gradients in place,
    which two arguments may have in common.

Note [Waiting]
    The calling thread waits for the loop, in forward and in backward, in which torch may use threads of its own: each call waits only for its own
    coroutine. See the notes of `aiograd.interop.background`.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from aiograd.distributed.scope import current_context
from aiograd.engine.run import current_engine, new_graph_task
from aiograd.errors import ArgumentTypeError, GraphError, InPlaceError, OnceDifferentiableError
from aiograd.functional.isolation.passes import IsolatedContext, call_in_place, isolate
from aiograd.graph.node import _next_sequence
from aiograd.interop.background import AnyLoop, LoopChoice, run_on
from aiograd.interop.containers import leaves_of_object, map_nested, nested_leaves
from aiograd.interop.extras import from_extra
from aiograd.interop.torch.conversion import from_torch, to_torch
from aiograd.running.modes import enable_grad, no_grad
from aiograd.tensors.core import TensorCore, make

if TYPE_CHECKING:
    import torch

    from aiograd.distributed.autograd.context import Context
else:
    torch = from_extra("torch", "torch")


def function(f: Callable[..., Any], *, loop: AnyLoop | None = None) -> Callable[..., Any]:
    """An aiograd function, ``def`` or ``async def``, as a function of torch tensors: one node of torch's graph.

    It runs on an event loop in another thread, and the calling thread waits. Gradients of the arguments go on into torch's graph. Gradients of
    Tensors that the function uses besides, such as the parameters of a module, arrive in their ``.grad`` when torch's pass has succeeded; called
    inside a distributed context (``with worker.within(ctx):``, or in a thread that was started in its block) and with calls of other workers, in
    `ctx.grads` on every worker. The backward cannot be differentiated itself.

    Where torch records nothing (``torch.no_grad()``), neither does aiograd.

    Args:
        f: takes Tensors in the places of the torch tensors among its arguments, which may be nested in tuples, lists, dicts, deques, sets and
            dataclasses; other arguments reach it as they are. It returns Tensors, one or nested.
        loop: where `f` runs. By default on the loop in which `function` was called, where the connections are that `f` uses, as long as calls come
            from other threads (``await asyncio.to_thread(train)``); else on a background loop of the process.

    Returns:
        The function on torch tensors. Its results are tensors on the devices of f's results; arrays of integers and bools carry no gradient.
        Exceptions of `f` and of its backward pass through torch as they are. `LoopError`: the loop has ended, or is the calling thread's own and
        was named. `InPlaceError`: `f` has modified an argument. `ArgumentTypeError`: a dtype that the other library does not have.

    Raises:
        ArgumentTypeError: `f` cannot be called, or `loop` is no loop.
    """
    if not callable(f):
        raise ArgumentTypeError(f"interop.torch.function: expected a function on Tensors, found {type(f).__name__}")
    return AiogradFunction(f, LoopChoice(loop))


class AiogradFunction:
    """An aiograd function on torch tensors, made by `function`.

    Args:
        f: the function.
        choice: where it runs.

    >>> import torch
    >>> squares = ag.interop.torch.function(lambda x: x * x)
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> squares(x).sum().backward()
    >>> x.grad
    tensor([2., 4.])
    """

    def __init__(self, f: Callable[..., Any], choice: LoopChoice) -> None:
        functools.update_wrapper(self, f, updated=())
        self.f = f
        self.choice = choice
        self._call = _not_compiled()

    def __repr__(self) -> str:
        return f"<{getattr(self.f, '__name__', type(self.f).__name__)} of aiograd on torch tensors>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self, args, kwargs)

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function.

        Args:
            args, kwargs: of the call.

        Returns:
            The result, with torch tensors in the place of Tensors.
        """
        tensors = nested_leaves((args, kwargs), torch.Tensor)
        call = BridgedCall(self, args, kwargs)
        if torch.is_grad_enabled():
            # torch records a node only if an argument requires grad, and the function may have parameters while its arguments do not
            results = _torch_function().apply(call, torch.empty(0, requires_grad=True), *tensors)
        else:
            results, _ = call.forward(tensors, [False] * len(tensors), records=False)
        given = iter(results)
        return map_nested(lambda _: next(given), call.nesting, _ResultPlace)


@functools.cache
def _not_compiled() -> Callable[..., Any]:
    """`AiogradFunction.called`, before which a graph of torch's compiler ends; another begins after it."""
    call: Callable[..., Any] = torch.compiler.disable(AiogradFunction.called)
    return call


class _ResultPlace:
    """Stands for a Tensor in the nesting of a function's result."""


class BridgedCall:
    """One call of a function: its part of the graph, and what torch's node asks of it.

    Args:
        owner: the function.
        args, kwargs: of the call.
    """

    def __init__(self, owner: AiogradFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.owner = owner
        self.arguments: Any = args, kwargs
        #: the result, with a place for each Tensor
        self.nesting: Any = None
        self.loop = owner.choice.pick()
        self.surroundings = contextvars.copy_context()
        self.isolated: IsolatedContext | None = None
        #: where the function has called other workers: the context, the arguments as leaves in it, and the results
        self.crossing: tuple[Context, Sequence[Any], Sequence[Any]] | None = None

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the call's loop, in the surroundings of the call."""
        return run_on(self.loop, main, self.surroundings)

    # ---------------------------------------------------------------- in the thread that torch calls from

    def forward(self, tensors: Sequence[Any], needs: Sequence[bool], *, records: bool) -> tuple[list[Any], list[bool]]:
        """Call the function.

        Args:
            tensors: the torch tensors among its arguments.
            needs: True for each that requires grad.
            records: False: without a graph.

        Returns:
            The torch tensors of its results, and for each True if it carries gradients.

        Raises:
            InPlaceError: the function has written into an argument.
        """
        versions = [tensor._version for tensor in tensors]
        inputs = [from_torch(tensor.detach()) for tensor in tensors]
        for tensor, need in zip(inputs, needs, strict=True):
            tensor.requires_grad_(need)
        outputs = self.run(self._record(inputs) if records else self._plain(inputs))
        self.arguments = None
        for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if tensor._version != version:
                raise InPlaceError(
                    f"{self.owner!r} has modified argument {i} of shape {list(tensor.shape)} in place, which torch's graph may have saved. "
                    "Compute a new tensor, or clone() it first."
                )
        carries = [False] * len(outputs) if self.isolated is None else self.isolated.carries_gradients
        return [to_torch(output.detach().clone()) for output in outputs], carries

    def backward(self, grads: Sequence[Any], *, keep: bool, accumulates: bool) -> list[Any]:
        """Pull the gradients of the results back.

        Args:
            grads: torch's gradients of the results that carry gradients, or None.
            keep: True if there may be another pass.
            accumulates: True if torch's pass accumulates into leaves; else it wants certain gradients only.

        Returns:
            The gradient of each argument, or None.
        """
        seeds = [None if grad is None else from_torch(grad.detach()) for grad in grads]
        found, held_back = self.run(self._pull_back(seeds, keep, accumulates))
        if held_back and accumulates:
            HeldBack.of_running_pass().add(self, held_back, keep)
        return [None if grad is None else to_torch(grad.detach().clone()) for grad in found]

    # ---------------------------------------------------------------- on the loop

    async def _call(self, *tensors: Any) -> tuple[Any, ...]:
        """The Tensors among the results of the function."""
        given = iter(tensors)
        args, kwargs = map_nested(lambda _: next(given), self.arguments, torch.Tensor)
        result = await call_in_place(self.owner.f, functools.partial(self.owner.f, *args, **kwargs))
        outputs = nested_leaves(result, TensorCore)
        if not outputs:
            raise ArgumentTypeError(f"{self.owner!r} returned a {type(result).__name__}; expected a Tensor, or Tensors in containers")
        self.nesting = map_nested(lambda _: _ResultPlace(), result, TensorCore, self._refuse_hidden)
        return tuple(outputs)

    def _refuse_hidden(self, other: Any) -> None:
        """Raise if an object that the function has returned keeps Tensors of a graph."""
        if any(tensor._node is not None and not tensor.is_leaf for tensor in leaves_of_object(other, TensorCore)):
            raise GraphError(
                f"{self.owner!r} returned a {type(other).__name__}, which has Tensors with a graph among its attributes: their gradients would stop "
                "here. Return Tensors in tuples, lists, dicts, deques, sets or dataclasses."
            )

    async def _plain(self, inputs: Sequence[Any]) -> Sequence[Any]:
        with no_grad():
            return await self._call(*inputs)

    async def _record(self, inputs: Sequence[Any]) -> Sequence[Any]:
        sequence = _next_sequence()  # lower than the numbers of the nodes that the function records
        self.isolated, outputs = await isolate(self._call, *inputs)
        if self.isolated.is_crossed:
            context = current_context()
            if context is None:
                self.isolated.check_local()
            else:
                self.isolated.join(inputs, outputs, sequence)
                self.crossing = context, inputs, outputs
        return outputs

    async def _pull_back(self, seeds: Sequence[Any], keep: bool, accumulates: bool) -> tuple[Sequence[Any], list[tuple[Any, Any]]]:
        """The gradients of the arguments, and the edges that others go to, with these gradients."""
        if self.isolated is None:
            raise ArgumentTypeError("a call that recorded nothing has no backward")
        if self.crossing is not None:
            return await self._cross(*self.crossing, seeds, keep, accumulates), []
        captured = await self.isolated.run(seeds, keep)
        held_back = [(target, captured[number]) for number, target in self.isolated.closure if captured[number] is not None]
        return self.isolated.of_arguments(captured), held_back

    async def _cross(
        self, context: Context, inputs: Sequence[Any], outputs: Sequence[Any], seeds: Sequence[Any], keep: bool, accumulates: bool
    ) -> list[Any]:
        """The gradients of the arguments, from a pass of the distributed context."""
        pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if seed is not None and output.requires_grad]
        if not pairs:
            return [None] * len(inputs)
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        if accumulates:
            with enable_grad():
                products = [(output * seed.conj()).real.sum() if output.dtype.kind == "c" else (output * seed).sum() for output, seed in pairs]
            await context.backward(*products, retain_graph=keep)
            slots = [context.slots.pop(leaf._node, None) for leaf in leaves]  # they are leaves of this call alone
            found = [None if slot is None else slot.grad for slot in slots]
        else:
            ends, given = zip(*pairs, strict=True)
            found = list(await context.grad(ends, leaves, given, retain_graph=keep, allow_unused=True)) if leaves else []
        left = iter([None if grad is None else grad if isinstance(grad, TensorCore) else make(grad) for grad in found])
        return [next(left) if tensor.requires_grad else None for tensor in inputs]


class HeldBack:
    """The gradients that the calls in one pass of torch hold back, until torch calls back at its end."""

    _lock = threading.Lock()
    #: by torch's number of the pass; torch's callback keeps it, and drops it where the pass fails
    _of_passes: ClassVar[weakref.WeakValueDictionary[int, HeldBack]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        #: by loop: a call, in the surroundings of the commit, the edges with their gradients in the order of the pass, and whether to keep graphs
        self._of_loops: dict[AnyLoop, tuple[BridgedCall, list[tuple[Any, Any]], bool]] = {}

    @classmethod
    def of_running_pass(cls) -> HeldBack:
        """The calls of the pass that torch runs in this thread."""
        number = torch._C._current_graph_task_id()
        with cls._lock:  # the threads of torch's devices share a pass
            found = cls._of_passes.get(number)
            if found is None:
                found = cls._of_passes[number] = cls()
                torch.autograd.Variable._execution_engine.queue_callback(found.commit)
        return found

    def add(self, call: BridgedCall, grads: list[tuple[Any, Any]], keep: bool) -> None:
        """Hold gradients of a call back."""
        with self._lock:
            _, held_back, _ = self._of_loops.setdefault(call.loop, (call, [], keep))
            held_back += grads

    def commit(self) -> None:
        """Accumulate the gradients held back; all of a loop at one commit."""
        for call, held_back, keep in self._of_loops.values():
            call.run(_accumulate(held_back, keep))


async def _accumulate(held_back: Sequence[tuple[Any, Any]], keep: bool) -> None:
    task = new_graph_task([target for target, _ in held_back], [grad._data for _, grad in held_back], keep_graph=keep)
    await current_engine().run(task)


@functools.cache
def _torch_function() -> Any:
    """The class of torch's nodes, which can be made where torch is there."""

    class AiogradCall(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: BridgedCall, anchor: Any, *tensors: Any) -> Any:
            ctx.call = call
            ctx.set_materialize_grads(False)
            results, carries = call.forward(tensors, ctx.needs_input_grad[2:], records=True)
            ctx.mark_non_differentiable(*[result for result, carrying in zip(results, carries, strict=True) if not carrying])
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            accumulates = torch._C._will_engine_execute_node(ctx.next_functions[0][0])  # the anchor's leaf
            with torch.no_grad():
                found = ctx.call.backward(grads, keep=keep, accumulates=accumulates)
            if torch.is_grad_enabled():  # the pass is recorded, which this is not: a derivative of it is refused
                found = _refusing().apply(repr(ctx.call.owner), torch.empty(0, requires_grad=True), *found)
            return None, None, *found

    return AiogradCall


@functools.cache
def _refusing() -> Any:
    """The class of nodes that refuse to be differentiated."""

    class AiogradCallBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, name: str, anchor: Any, *grads: Any) -> Any:
            ctx.name = name
            return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise OnceDifferentiableError(
                f"trying to differentiate the backward of {ctx.name}: a call of aiograd in torch's graph has first derivatives only. "
                "Compute second ones in aiograd, with the torch model in interop.torch.wrap()."
            )

    return AiogradCallBackward
