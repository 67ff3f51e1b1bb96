"""StageRun: one stage during one step: what it keeps of each microbatch between forward and backward, and lets go of as early as it can."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from aiograd import devices
from aiograd.checkpointing import leaves_of, map_tree
from aiograd.engine.evaluate import suspends
from aiograd.engine.halves import InputHalf, ParameterGroup, WeightHalf, weight_half
from aiograd.engine.run import current_engine, new_graph_task
from aiograd.errors import ArgumentTypeError, GraphError, NoGraphError, ShapeError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.parcel import EdgeOf, Parcel, check_gradients, pack, tensors_of, unpack
from aiograd.pipeline.stage import MICROBATCH_INDEX, STAGE_INDEX, Stage, runs_on_loop
from aiograd.pipeline.staging import Staging
from aiograd.pipeline.step_random import StepRandom
from aiograd.tensors.core import TensorCore, make
from aiograd.types import Array


class Kept:
    """What a stage keeps of one microbatch between forward and backward."""

    __slots__ = ("edges", "seeds", "leaves")

    def __init__(self, edges: list[EdgeOf], seeds: list[Array] | None, leaves: list[AccumulateGrad]) -> None:
        #: where gradients of its outputs arrive
        self.edges = edges
        #: those gradients, where the stage ends in the loss
        self.seeds = seeds
        #: where gradients of its inputs arrive
        self.leaves = leaves


class StageRun:
    """One stage during one step, or during one evaluation.

    Args:
        stage: what is run.
        index: its number.
        staging: takes the gradients of its leaves; None: an evaluation.
        is_last: it ends in the loss (in an evaluation: in the results).
        loss_fn: ``loss_fn(output, target)`` of the last stage; None: the stage returns the loss itself.
        scale: what the loss is multiplied by.
        keep_outputs: of the last stage, for the caller.
        random: the default generators of forwards; None: that of the caller, whatever it is.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        staging: Staging | None,
        *,
        is_last: bool = False,
        loss_fn: Callable[..., Any] | None = None,
        scale: float = 1.0,
        keep_outputs: bool = False,
        random: StepRandom | None = None,
    ) -> None:
        self.stage = stage
        self.index = index
        self.is_last = is_last
        #: by microbatch; results for the caller
        self.losses: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        self._staging = staging
        self._loss_fn = loss_fn
        self._scale = scale
        self._keeps_outputs = keep_outputs
        self._random = random
        self._kept: dict[int, Kept] = {}
        #: what is left to W, by microbatch
        self._groups: dict[int, list[ParameterGroup]] = {}
        #: what `Stage.weight_backward` has given for W, by microbatch
        self._runners: dict[int, Callable[[], Any]] = {}

    @property
    def takes_target(self) -> bool:
        """Whether forward waits for a target."""
        return self.is_last and self._staging is not None

    def clear(self) -> None:
        """Let go of what is kept for microbatches."""
        for kept in (self.losses, self.outputs, self._kept, self._groups, self._runners):
            kept.clear()

    # ---------------------------------------------------------------- forward

    async def forward(self, microbatch: int, parcel: Parcel, target: tuple[Any, ...] = ()) -> Parcel | None:
        """Run the stage on what the stage before gave.

        Args:
            target: nothing, or the target of the microbatch, where this is the last stage.

        Returns:
            What goes to the next stage; None after the last.
        """
        moved = None if self.stage.device is None else [await to_device(tensor, self.stage.device) for tensor in tensors_of(parcel)]
        args, leaves = unpack(parcel, moved)
        return await self.enter(microbatch, args, {}, target, [leaf._node for leaf in leaves])

    async def enter(
        self, microbatch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: tuple[Any, ...], leaves: list[AccumulateGrad]
    ) -> Parcel | None:
        """As `forward`, with arguments in place of a parcel."""
        if self.stage.device is not None:
            args, kwargs, target = await self._arrive((args, kwargs, target))
        if self.stage.pass_indices:
            kwargs = {**kwargs, STAGE_INDEX: self.index, MICROBATCH_INDEX: microbatch}
        trains = self._staging is not None
        with self._drawing(self.index, microbatch):
            output, loss = await self._compute(microbatch, args, kwargs, target if trains and self.is_last else None)
        if output is None:
            raise ArgumentTypeError(f"stage {self.index} ({self.stage.name}) returned None; expected a Tensor or several. Was `return` forgotten?")
        if not self.is_last:
            parcel, edges = pack(output)
            if trains:
                self._kept[microbatch] = Kept(edges, None, leaves)
            return parcel
        if self._keeps_outputs or not trains:
            self.outputs[microbatch] = pack(output)[0].values
        if trains:
            edge, seed = self._seed(loss)
            self._kept[microbatch] = Kept([edge], [seed], leaves)
            self.losses[microbatch] = make(loss._data, shared_with=loss)
        return None

    async def _arrive(self, tree: Any) -> Any:
        """The Tensors of a tree on the device of the stage, within the graph that they belong to."""
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
            output, loss = await current_engine().offload(functools.partial(_both, module, args, kwargs, loss_fn, target, drawing))
            if not suspends(output):
                if suspends(loss):
                    with self._drawing(None, microbatch):
                        loss = await loss
                return output, loss
        else:
            output = await current_engine().offload(functools.partial(module, *args, **kwargs))
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
            grads: of the outputs, as they came back; None for the last stage.

        Returns:
            The gradients of the inputs, as they go back.
        """
        kept = self._take(microbatch)
        roots, seeds = await self._roots(kept, grads)
        slots: dict[AccumulateGrad, _Slot] = {}
        if roots:
            running = current_engine().run(new_graph_task(roots, seeds, slots=lambda leaf: slots.setdefault(leaf, _Slot()), post_hooks=False))
            del roots, seeds, kept.edges, kept.seeds
            await running
        found = {leaf: slot.grad for leaf, slot in slots.items()}
        slots.clear()
        inputs = [None if (grad := found.pop(leaf, None)) is None else make(grad) for leaf in kept.leaves]
        await self._build_weight_runner(microbatch)
        await self._run_weight_runner(microbatch)
        await self._deliver(microbatch, found)
        return inputs

    async def backward_input(self, microbatch: int, grads: Any) -> list[Any]:
        """The backward to the inputs; `backward_weight` does the rest."""
        kept = self._take(microbatch)
        roots, seeds = await self._roots(kept, grads)
        inputs: list[Any] = [None] * len(kept.leaves)
        if roots:
            task = new_graph_task(roots, seeds, kind=InputHalf, inputs=[(leaf, 0) for leaf in kept.leaves])
            del roots, seeds, kept
            inputs = await current_engine().run(task)
            self._groups[microbatch] = task.groups()
        else:
            self._groups[microbatch] = []
        await self._build_weight_runner(microbatch)
        return inputs

    async def backward_weight(self, microbatch: int) -> None:
        """The backward to the weights."""
        groups = self._groups.pop(microbatch, None)
        if groups is None:
            raise GraphError(f"W of stage {self.index}, microbatch {microbatch}, without an I before it; or use B, which does both at once")
        slots: dict[AccumulateGrad, _Slot] = {}
        if groups:
            roots, seeds, options = weight_half(groups, False)
            options |= {"slots": lambda leaf: slots.setdefault(leaf, _Slot()), "post_hooks": False}
            running = current_engine().run(new_graph_task(roots, seeds, kind=WeightHalf, **options))
            del roots, seeds, options
            await running
        await self._run_weight_runner(microbatch)
        await self._deliver(microbatch, {leaf: slot.grad for leaf, slot in slots.items()})

    async def _build_weight_runner(self, microbatch: int) -> None:
        if self.stage.weight_backward is not None:
            runner = self.stage.weight_backward()
            self._runners[microbatch] = await runner if suspends(runner) else runner

    async def _run_weight_runner(self, microbatch: int) -> None:
        runner = self._runners.pop(microbatch, None)
        if runner is not None and suspends(result := runner()):
            await result

    def _take(self, microbatch: int) -> Kept:
        kept = self._kept.pop(microbatch, None)
        if kept is None:
            raise GraphError(f"backward of stage {self.index}, microbatch {microbatch}: its forward has not been run, or its backward has")
        return kept

    async def _roots(self, kept: Kept, grads: Any) -> tuple[list[EdgeOf], list[Array]]:
        if kept.seeds is not None:
            return kept.edges, kept.seeds
        roots: list[EdgeOf] = []
        seeds: list[Array] = []
        for index, (edge, grad) in enumerate(zip(kept.edges, check_gradients(grads, len(kept.edges)), strict=True)):
            if grad is not None:
                roots.append(edge)
                seeds.append(await fitted(grad, edge, index))
        return roots, seeds

    async def _deliver(self, microbatch: int, grads: Mapping[AccumulateGrad, Array]) -> None:
        if self._staging is not None:
            self._staging.deliver(self.index, microbatch, grads)
            await self._staging.fold()


class _Slot:
    """Where the gradient of one leaf arrives in one pass."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Any = None


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
    """A gradient that has come back, as the pass takes it.

    Raises:
        ShapeError, ArgumentTypeError: it is not that of the output.
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
    """The values of a Tensor on a device, outside of any graph; waits for what is still being computed."""
    if tensor.device == device:
        return tensor
    await tensor
    return await current_engine().offload(functools.partial(_copy, tensor, device))


def _copy(tensor: Any, device: str) -> Any:
    source, target = devices.device(tensor.device), devices.device(device)
    array = tensor._data if source is None else source.to_host(tensor._data)
    return make(array if target is None else target.from_host(array))
