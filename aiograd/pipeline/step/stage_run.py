"""StageRun: one stage during one step. It keeps the values of each microbatch between forward and backward, and drops them as early as it can."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from aiograd.engine.evaluate import suspends
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.run import current_engine, new_graph_task
from aiograd.engine.split_backward import InputPlan, ParameterGroup, WeightPlan
from aiograd.errors import ArgumentTypeError, GraphError, NoGraphError, ShapeError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.step.message import EdgeOf, StageMessage, check_gradients, pack, tensors_of, unpack
from aiograd.pipeline.step.stage import MICROBATCH_INDEX, STAGE_INDEX, Stage, runs_on_loop
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.running import devices, foreign_modes
from aiograd.running.trees import leaves_of, map_tree
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make


class SavedMicrobatch:
    """The state of one microbatch that a stage keeps between forward and backward."""

    __slots__ = ("edges", "seeds", "leaves")

    def __init__(self, edges: list[EdgeOf], seeds: list[Array] | None, leaves: list[AccumulateGrad]) -> None:
        #: the gradient edges of its outputs
        self.edges = edges
        #: those gradients, where the stage ends in the loss
        self.seeds = seeds
        #: where gradients of its inputs arrive
        self.leaves = leaves


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
    ) -> None:
        self.stage = stage
        self.index = index
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

    async def forward(self, microbatch: int, message: StageMessage, target: tuple[Any, ...] = ()) -> StageMessage | None:
        """Run the stage on the outputs of the stage before.

        Args:
            target: nothing, or the target of the microbatch, where this is the last stage.

        Returns:
            What goes to the next stage; None after the last.
        """
        moved = None if self.stage.device is None else [await to_device(tensor, self.stage.device) for tensor in tensors_of(message)]
        args, leaves = unpack(message, moved)
        return await self.enter(microbatch, args, {}, target, [leaf._node for leaf in leaves])

    async def enter(
        self, microbatch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: tuple[Any, ...], leaves: list[AccumulateGrad]
    ) -> StageMessage | None:
        """As `forward`, with arguments in place of a message."""
        if self.stage.device is not None:
            args, kwargs, target = await self._arrive((args, kwargs, target))
        if self.stage.pass_indices:
            kwargs = {**kwargs, STAGE_INDEX: self.index, MICROBATCH_INDEX: microbatch}
        trains = self._accumulator is not None
        with self._drawing(self.index, microbatch):
            output, loss = await self._compute(microbatch, args, kwargs, target if trains and self.is_last else None)
        if output is None:
            raise ArgumentTypeError(f"stage {self.index} ({self.stage.name}) returned None; expected a Tensor or several. Was `return` forgotten?")
        if not self.is_last:
            message, edges = pack(output)
            if trains:
                self._saved[microbatch] = SavedMicrobatch(edges, None, leaves)
            return message
        if self._keeps_outputs or not trains:
            self.outputs[microbatch] = pack(output)[0].values
        if trains:
            edge, seed = self._seed(loss)
            self._saved[microbatch] = SavedMicrobatch([edge], [seed], leaves)
            self.losses[microbatch] = make(loss._data, shared_with=loss)
        return None

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
    ) -> tuple[Any, Any]:
        """The output, and the loss where there is a target to take (which may be none: ``()``)."""
        module, loss_fn = self.stage.module, self._loss_fn
        if target is not None and loss_fn is None:
            args = (*args, *target)
        if self.stage.where == "loop":
            output = module(*args, **kwargs)
        elif target is not None and loss_fn is not None and not runs_on_loop(loss_fn):
            drawing = self._drawing(None, microbatch)
            output, loss = await self._offload(foreign_modes.within(functools.partial(_both, module, args, kwargs, loss_fn, target, drawing)))
            if not suspends(output):
                if suspends(loss):
                    with self._drawing(None, microbatch):
                        loss = await loss
                return output, loss
        else:
            output = await self._offload(foreign_modes.within(functools.partial(module, *args, **kwargs)))
        if suspends(output):
            output = await output
        if target is None:
            return output, None
        if loss_fn is None or output is None:
            return output, output
        with self._drawing(None, microbatch):
            loss = loss_fn(output, *target)
            return output, await loss if suspends(loss) else loss

    def _seed(self, loss: Any) -> tuple[EdgeOf, Array]:
        what = "what the last stage returned" if self._loss_fn is None else "what loss_fn returned"
        if loss is None:
            raise ArgumentTypeError(f"{what} is None; expected the loss of the microbatch, a Tensor of one element. Was `return` forgotten?")
        if not isinstance(loss, TensorCore):
            raise ArgumentTypeError(f"{what} is a {type(loss).__name__}; expected the loss of the microbatch, a Tensor of one element")
        if loss.size != 1:
            raise ShapeError(f"{what} has shape {list(loss.shape)}; expected the loss of the microbatch, a Tensor of one element")
        if loss.dtype.kind != "f":
            raise ArgumentTypeError(f"{what} has dtype {loss.dtype}; expected a real loss")
        if not loss.requires_grad or loss._node is None:
            raise NoGraphError(f"{what} does not require grad, so there is nothing to differentiate; use eval() for the forward alone")
        seed: Array = np.full(loss.shape, self._scale, loss.dtype)
        device = devices.device(loss.device)
        return (loss._node, loss._nr), seed if device is None else device.from_host(seed)

    # ---------------------------------------------------------------- backward

    async def backward(self, microbatch: int, grads: Any) -> list[Any]:
        """The full backward.

        Args:
            grads: the gradients of the outputs, as they came back; None for the last stage.

        Returns:
            The gradients of the inputs, as they go back.
        """
        saved = self._take(microbatch)
        roots, seeds = await self._roots(saved, grads)
        hooks = _StageHooks()
        if roots:
            running = current_engine().run(new_graph_task(roots, seeds, hooks=hooks))
            del roots, seeds, saved.edges, saved.seeds
            await running
        found = hooks.take()
        inputs = [None if (grad := found.pop(leaf, None)) is None else make(grad) for leaf in saved.leaves]
        if self.stage.weight_backward is not None:
            await self._build_weight_runner(microbatch)
            await self._run_weight_runner(microbatch)
        await self._deliver(microbatch, found)
        return inputs

    async def backward_input(self, microbatch: int, grads: Any) -> list[Any]:
        """The backward to the inputs; `backward_weight` does the rest."""
        saved = self._take(microbatch)
        roots, seeds = await self._roots(saved, grads)
        inputs: list[Any] = [None] * len(saved.leaves)
        if roots:
            plan = InputPlan(roots, seeds, [(leaf, 0) for leaf in saved.leaves])
            del roots, seeds, saved
            inputs = await current_engine().run(new_graph_task(plan=plan))
            self._groups[microbatch] = plan.groups()
        else:
            self._groups[microbatch] = []
        if self.stage.weight_backward is not None:
            await self._build_weight_runner(microbatch)
        return inputs

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

    async def _roots(self, saved: SavedMicrobatch, grads: Any) -> tuple[list[EdgeOf], list[Array]]:
        if saved.seeds is not None:
            return saved.edges, saved.seeds
        roots: list[EdgeOf] = []
        seeds: list[Array] = []
        for index, (edge, grad) in enumerate(zip(saved.edges, check_gradients(grads, len(saved.edges)), strict=True)):
            if grad is not None:
                roots.append(edge)
                seeds.append(await fitted(grad, edge, index))
        return roots, seeds

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
    loss_fn: Callable[..., Any],
    target: tuple[Any, ...],
    drawing: AbstractContextManager[None],
) -> tuple[Any, Any]:
    """The output of a stage and its loss, on one thread."""
    output = module(*args, **kwargs)
    if output is None or suspends(output):
        return output, None
    with drawing:
        return output, loss_fn(output, *target)


async def fitted(grad: Any, edge: EdgeOf, index: int) -> Array:
    """The array of a gradient from the next stage, checked against the output.

    Raises:
        ShapeError, ArgumentTypeError: the gradient does not fit the output.
    """
    metadata = edge[0].metadata_of(edge[1])
    if metadata is None:
        return grad._data
    if grad.shape != metadata.shape:
        raise ShapeError(f"shape mismatch: the gradient of output {index} has shape {list(grad.shape)}, the output has {list(metadata.shape)}")
    if grad.dtype != metadata.dtype:
        raise ArgumentTypeError(f"dtype mismatch: the gradient of output {index} has dtype {grad.dtype}, the output has {metadata.dtype}")
    return (await to_device(grad, metadata.device))._data


async def to_device(tensor: Any, device: str) -> Any:
    """The values of a Tensor on a device, outside of any graph; waits until they are computed."""
    if tensor.device == device:
        return tensor
    await tensor
    return await current_engine().offload(functools.partial(_copy, tensor, device))


def _copy(tensor: Any, device: str) -> Any:
    source, target = devices.device(tensor.device), devices.device(device)
    array = tensor._data if source is None else source.to_host(tensor._data)
    return make(array if target is None else target.from_host(array))
