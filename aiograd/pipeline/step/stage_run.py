"""StageRun: one stage during one step. It keeps the values of each microbatch between forward and backward, and drops them as early as it can."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from aiograd.engine.evaluate import suspends
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.run import current_engine, new_graph_task
from aiograd.engine.split_backward import InputPlan, ParameterGroup, WeightPlan
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError, NoGraphError, ShapeError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.step.links import StageLinks, parted
from aiograd.pipeline.step.message import EdgeOf, StageMessage, check_gradients, pack, tensors_of, unpack
from aiograd.pipeline.step.microbatch_state import SavedMicrobatch, StageOutput, fitted, to_device
from aiograd.pipeline.step.stage import LOSS, MICROBATCH_INDEX, STAGE_INDEX, Stage, runs_on_loop
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.running import devices, foreign_modes
from aiograd.running.trees import leaves_of, map_tree
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make


class StageProgress(NamedTuple):
    """How far the microbatches of a stage are in a step, by microbatch."""

    #: those with a forward, and no backward to the inputs
    saved: dict[int, SavedMicrobatch]
    #: those with a backward to the inputs, and none to the weights
    groups: dict[int, list[ParameterGroup]]
    runners: dict[int, Callable[[], Any]]
    losses: dict[int, Any]
    outputs: dict[int, Any]


class GradientTaker(Protocol):
    """Takes the gradients of a stage by microbatch, such as a `GradientAccumulator`."""

    def deliver(self, stage: int, microbatch: int, grads: Mapping[AccumulateGrad, Array]) -> None:
        """See `GradientAccumulator.deliver`."""

    async def fold(self) -> None:
        """See `GradientAccumulator.fold`. Cancelled midway, the step cannot continue."""


class StageRun:
    """One stage during one step, or during one evaluation.

    Args:
        stage: the stage to run.
        index: its number.
        accumulator: takes the gradients of its leaves; None: an evaluation.
        is_last: it ends in the loss (in an evaluation: in the results).
        loss_fn: ``loss_fn(output, target)`` of the last stage; None: the stage returns the loss itself.
        scale: the factor of the loss.
        keep_outputs: True to keep the outputs of the last stage for the caller.
        random: the default generators of forwards; None: the caller's.
        offload: calls the stage on the executor; None: the engine's.
        links: the named values between the stages of the pipeline.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        accumulator: GradientTaker | None,
        *,
        is_last: bool = False,
        loss_fn: Callable[..., Any] | None = None,
        scale: float = 1.0,
        keep_outputs: bool = False,
        random: StepRandom | None = None,
        offload: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None,
        links: StageLinks | None = None,
    ) -> None:
        links = links or StageLinks()
        self.stage = stage
        self.index = index
        #: True if arguments of the batch come
        self.takes_entry = index == 0 or index in links.entries
        #: the names of the values from and to other stages, by number
        self.sources, self.destinations = links.of(index, trains=accumulator is not None)
        #: the names of all values that it returns beside its output
        self._gives = tuple(dict.fromkeys(name for name, source, _ in links.links if source == index))
        self.is_last = is_last
        #: by microbatch; results for the caller
        self.losses: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        self._accumulator = accumulator
        self._loss_fn = loss_fn
        self._scale = scale
        self._keeps_outputs = keep_outputs
        self._random = random
        self._offload = offload or current_engine().offload
        self._saved: dict[int, SavedMicrobatch] = {}
        #: microbatch -> the groups of parameters left to W
        self._groups: dict[int, list[ParameterGroup]] = {}
        #: microbatch -> the function that `Stage.weight_backward` has returned for W
        self._runners: dict[int, Callable[[], Any]] = {}

    @property
    def takes_target(self) -> bool:
        """True if forward waits for a target."""
        return self.is_last and self._accumulator is not None

    def _held(self) -> tuple[dict[int, Any], ...]:
        return self._saved, self._groups, self._runners, self.losses, self.outputs

    def clear(self) -> None:
        """Drop the values of all microbatches."""
        for held in self._held():
            held.clear()

    def progress(self) -> StageProgress:
        """How far its microbatches are."""
        return StageProgress(*map(dict, self._held()))

    def resume(self, progress: StageProgress) -> None:
        """Go on where a run of the same step has come to."""
        values: tuple[dict[int, Any], ...] = progress
        for held, value in zip(self._held(), values, strict=True):
            held.update(value)

    # ---------------------------------------------------------------- forward

    async def forward(
        self,
        microbatch: int,
        message: StageMessage,
        target: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        taken: Mapping[int, StageMessage] | None = None,
    ) -> StageOutput:
        """Run the stage on the outputs of the stage before.

        Args:
            target: nothing, or the target of the microbatch, where this is the last stage.
            kwargs: arguments of the batch.
            taken: the values of other stages, by number.
        """
        args, leaves = await self._unpacked(message)
        own = dict(kwargs or {})
        losses: list[Any] = []
        arrived: dict[int, list[AccumulateGrad]] = {}
        for source, each in (taken or {}).items():
            (values,), wanted = await self._unpacked(each)
            if values.__class__ is not dict or values.keys() != set(self.sources[source]):
                raise ArgumentError(f"the values of stage {source} for stage {self.index}: expected {', '.join(self.sources[source])}")
            loss = values.pop(LOSS, None)
            losses += [] if loss is None else [loss]
            own |= values
            arrived[source] = [leaf._node for leaf in wanted]
        return await self.enter(microbatch, args, own, target, [leaf._node for leaf in leaves], arrived, losses)

    async def _unpacked(self, message: StageMessage) -> tuple[tuple[Any, ...], list[Any]]:
        device = self.stage.device
        return unpack(message, None if device is None else [await to_device(tensor, device) for tensor in tensors_of(message)])

    async def enter(
        self,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: tuple[Any, ...],
        leaves: list[AccumulateGrad],
        taken: Mapping[int, list[AccumulateGrad]] | None = None,
        losses: Sequence[Any] = (),
    ) -> StageOutput:
        """As `forward`, with arguments in place of messages, and where their gradients arrive.

        Args:
            losses: of other stages.
        """
        if self.stage.device is not None:
            args, kwargs, target = await self._arrive((args, kwargs, target))
        if self.stage.pass_indices:
            kwargs = {**kwargs, STAGE_INDEX: self.index, MICROBATCH_INDEX: microbatch}
        trains = self._accumulator is not None
        with self._drawing(self.index, microbatch):
            output, values, loss = await self._compute(microbatch, args, kwargs, target if trains and self.is_last else None)
        if output is None:
            raise ArgumentTypeError(f"{self._name} returned None; expected a Tensor or several. Was `return` forgotten?")
        messages: dict[int, StageMessage] = {}
        edges: dict[int, list[EdgeOf]] = {}
        for to, names in self.destinations.items():
            messages[to], edges[to] = pack({name: values[name] for name in names})
        if not self.is_last:
            message, own = pack(output)
            if trains:
                self._saved[microbatch] = SavedMicrobatch(own, None, leaves, taken or {}, edges)
            return StageOutput(message, messages)
        if self._keeps_outputs or not trains:
            self.outputs[microbatch] = pack(output)[0].values
        if trains:
            self._check_loss(loss)
            own_loss = values.get(LOSS)
            for each in (*losses, *(() if own_loss is None else (own_loss,))):
                loss = loss + each
            edge, seed = self._seed(loss)
            self._saved[microbatch] = SavedMicrobatch([edge], [seed], leaves, taken or {}, edges)
            self.losses[microbatch] = make(loss._data, shared_with=loss)
        return StageOutput(None, messages)

    @property
    def _name(self) -> str:
        return f"stage {self.index} ({self.stage.name})"

    def _parted(self, output: Any) -> tuple[Any, dict[str, Any]]:
        return parted(output, self._gives, self._name) if self._gives else (output, {})

    async def _arrive(self, tree: Any) -> Any:
        """The tree with its Tensors moved to the device of the stage, within their graph."""
        moved: dict[int, Any] = {}
        for tensor in leaves_of(tree, TensorCore):
            if tensor.device != self.stage.device and id(tensor) not in moved:
                moved[id(tensor)] = await current_engine().offload(functools.partial((await tensor).to, self.stage.device))
        return map_tree(lambda tensor: moved.get(id(tensor), tensor), tree, TensorCore)

    def _drawing(self, stage: int | None, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self._random is None else self._random.at(stage, microbatch)

    async def _compute(
        self, microbatch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: tuple[Any, ...] | None
    ) -> tuple[Any, dict[str, Any], Any]:
        """The output, the values beside it by name, and the loss where there is a target to take (which may be none: ``()``)."""
        module, loss_fn, part = self.stage.module, self._loss_fn, self._parted
        if target is not None and loss_fn is None:
            args = (*args, *target)
        if self.stage.where == "loop":
            output = module(*args, **kwargs)
        elif target is not None and loss_fn is not None and not runs_on_loop(loss_fn):
            drawing = self._drawing(None, microbatch)
            output, loss = await self._offload(foreign_modes.within(functools.partial(_both, module, args, kwargs, part, loss_fn, target, drawing)))
            if not suspends(output):
                if suspends(loss):
                    with self._drawing(None, microbatch):
                        loss = await loss
                return *part(output), loss
        else:
            output = await self._offload(foreign_modes.within(functools.partial(module, *args, **kwargs)))
        if suspends(output):
            output = await output
        output, values = part(output)
        if target is None:
            return output, values, None
        if loss_fn is None or output is None:
            return output, values, output
        with self._drawing(None, microbatch):
            loss = loss_fn(output, *target)
            return output, values, await loss if suspends(loss) else loss

    def _check_loss(self, loss: Any) -> None:
        what = self._loss_name
        if loss is None:
            raise ArgumentTypeError(f"{what} is None; expected the loss of the microbatch, a Tensor of one element. Was `return` forgotten?")
        if not isinstance(loss, TensorCore):
            raise ArgumentTypeError(f"{what} is a {type(loss).__name__}; expected the loss of the microbatch, a Tensor of one element")
        if loss.size != 1:
            raise ShapeError(f"{what} has shape {list(loss.shape)}; expected the loss of the microbatch, a Tensor of one element")
        if loss.dtype.kind != "f":
            raise ArgumentTypeError(f"{what} has dtype {loss.dtype}; expected a real loss")

    @property
    def _loss_name(self) -> str:
        return "what the last stage returned" if self._loss_fn is None else "what loss_fn returned"

    def _seed(self, loss: Any) -> tuple[EdgeOf, Array]:
        if not loss.requires_grad or loss._node is None:
            raise NoGraphError(f"{self._loss_name} does not require grad, so there is nothing to differentiate; use eval() for the forward alone")
        seed: Array = np.full(loss.shape, self._scale, loss.dtype)
        device = devices.device(loss.device)
        return (loss._node, loss._nr), seed if device is None else device.from_host(seed)

    # ---------------------------------------------------------------- backward

    async def backward(
        self, microbatch: int, grads: Any, returned: Mapping[int, Any] | None = None
    ) -> tuple[list[Any], dict[int, list[Any]]]:
        """The full backward.

        Args:
            grads: the gradients of the outputs, as they came back; None for the last stage.
            returned: the gradients of values for other stages, by number.

        Returns:
            The gradients of the inputs, as they go back; and of values from other stages, by number.
        """
        saved = self._take(microbatch)
        roots, seeds = await self._roots(saved, grads, returned or {})
        hooks = _StageHooks()
        if roots:
            running = current_engine().run(new_graph_task(roots, seeds, hooks=hooks))
            del roots, seeds, saved.edges, saved.seeds, saved.given
            await running
        found = hooks.take()
        inputs = saved.parted([None if (grad := found.pop(leaf, None)) is None else make(grad) for leaf in saved.all_leaves])
        if self.stage.weight_backward is not None:
            await self._build_weight_runner(microbatch)
            await self._run_weight_runner(microbatch)
        await self._deliver(microbatch, found)
        return inputs

    async def backward_input(
        self, microbatch: int, grads: Any, returned: Mapping[int, Any] | None = None
    ) -> tuple[list[Any], dict[int, list[Any]]]:
        """The backward to the inputs, as `backward`; `backward_weight` does the rest."""
        saved = self._take(microbatch)
        roots, seeds = await self._roots(saved, grads, returned or {})
        inputs: list[Any] = [None] * len(saved.all_leaves)
        if roots:
            plan = InputPlan(roots, seeds, [(leaf, 0) for leaf in saved.all_leaves])
            del roots, seeds, saved.edges, saved.seeds, saved.given
            inputs = await current_engine().run(new_graph_task(plan=plan))
            self._groups[microbatch] = plan.groups()
        else:
            self._groups[microbatch] = []
        if self.stage.weight_backward is not None:
            await self._build_weight_runner(microbatch)
        return saved.parted(inputs)

    async def backward_weight(self, microbatch: int) -> None:
        """The backward to the weights."""
        groups = self._groups.pop(microbatch, None)
        if groups is None:
            raise GraphError(f"W of stage {self.index}, microbatch {microbatch}, without an I before it; or use B, which does both at once")
        hooks = _StageHooks()
        if groups:
            await current_engine().run(new_graph_task(plan=WeightPlan(groups), hooks=hooks))
        if self._runners:
            await self._run_weight_runner(microbatch)
        await self._deliver(microbatch, hooks.take())

    async def _build_weight_runner(self, microbatch: int) -> None:
        runner = self.stage.weight_backward()  # type: ignore[misc]
        self._runners[microbatch] = await runner if suspends(runner) else runner

    async def _run_weight_runner(self, microbatch: int) -> None:
        runner = self._runners.pop(microbatch, None)
        if runner is not None and suspends(result := runner()):
            await result

    def _take(self, microbatch: int) -> SavedMicrobatch:
        saved = self._saved.pop(microbatch, None)
        if saved is None:
            raise GraphError(f"backward of stage {self.index}, microbatch {microbatch}: its forward has not been run, or its backward has")
        return saved

    async def _roots(self, saved: SavedMicrobatch, grads: Any, returned: Mapping[int, Any]) -> tuple[list[EdgeOf], list[Array]]:
        roots: list[EdgeOf] = []
        seeds: list[Array] = []
        parts = [(edges, returned.get(to)) for to, edges in saved.given.items()]
        if saved.seeds is None:
            parts.append((saved.edges, grads))
        for edges, found in parts:
            for index, (edge, grad) in enumerate(zip(edges, check_gradients(found, len(edges)), strict=True)):
                if grad is not None:
                    roots.append(edge)
                    seeds.append(await fitted(grad, edge, index))
        return (roots, seeds) if saved.seeds is None else (roots + saved.edges, seeds + saved.seeds)

    async def _deliver(self, microbatch: int, grads: Mapping[AccumulateGrad, Array]) -> None:
        if self._accumulator is not None:
            self._accumulator.deliver(self.index, microbatch, grads)
            await self._accumulator.fold()


class _Target:
    """Where the gradient of one leaf arrives in one pass."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Any = None


class _StageHooks(PassHooks):
    """Hooks of a pass that collect its gradients here instead of in the leaves."""

    runs_post_accumulate_hooks = False

    def __init__(self) -> None:
        self._targets: dict[AccumulateGrad, _Target] = {}

    def grad_target(self, leaf: AccumulateGrad) -> _Target:
        """The target of the gradient of one leaf."""
        target = self._targets.get(leaf)
        if target is None:
            target = self._targets[leaf] = _Target()
        return target

    def take(self) -> dict[AccumulateGrad, Any]:
        """The gradients that have arrived; they are held here no longer."""
        targets, self._targets = self._targets, {}
        return {leaf: target.grad for leaf, target in targets.items()}


def _both(
    module: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    part: Callable[[Any], tuple[Any, dict[str, Any]]],
    loss_fn: Callable[..., Any],
    target: tuple[Any, ...],
    drawing: AbstractContextManager[None],
) -> tuple[Any, Any]:
    """The result of a stage with all that it gives, and its loss, on one thread."""
    output = module(*args, **kwargs)
    if output is None or suspends(output):
        return output, None
    with drawing:
        return output, loss_fn(part(output)[0], *target)
