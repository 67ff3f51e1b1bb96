"""Batch and BatchSpecs: the arguments of a step in microbatches, before they leave for the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import ArgumentError
from aiograd.pipeline.microbatch import Call, merge_microbatches, microbatches_of
from aiograd.pipeline.run.remote_stages import owner_of
from aiograd.pipeline.run.work import PipelineWork
from aiograd.pipeline.step.links import StageLinks
from aiograd.pipeline.step.rank import ENTRY, TARGET
from aiograd.pipeline.step.stage import MICROBATCH_INDEX, STAGE_INDEX, Stage
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import TensorCore
from aiograd.tensors.creation import asarray


class Batch(NamedTuple):
    """A batch in microbatches."""

    #: arguments of stages, by microbatch of all replicas
    calls: list[Call]
    #: by microbatch of all replicas; None: there are none
    targets: list[Any] | None

    def put(
        self, work: PipelineWork, replicas: int, links: StageLinks, last: int, address: Callable[[int, int, int], tuple[int, int]], keeps: bool
    ) -> None:  # fmt: skip
        """Send the microbatches to the stages that take arguments, and the targets to the last ones.

        Args:
            work: of the step.
            replicas: the number of replicas.
            links: say which stage takes which arguments.
            last: the stage that gets the targets.
            address: gives for a replica, a stage and a microbatch the rank, and the number of the stage there.
            keeps: the step may have to be repeated; otherwise the batch keeps no microbatch.
        """
        count = len(self.calls)
        size = count // replicas
        for index, call in enumerate(self.calls):
            for each in sorted({0, *links.entries}):
                rank, stage = address(index // size, each, index % size)
                work.put(rank, (ENTRY, stage, index % size), links.entry(each, *call))
        if not keeps:
            self.calls.clear()
        for index in range(count):
            target = () if self.targets is None else (self.targets[index],)
            rank, stage = address(index // size, last, index % size)
            work.put(rank, (TARGET, stage, index % size), target)


class BatchSpecs(NamedTuple):
    """Rules for splitting arguments and putting results together; see `aiograd.pipeline.microbatch`."""

    args: Any
    kwargs: Mapping[str, Any] | None
    results: Any

    def split(
        self, stages: Mapping[int, Stage], last: int, links: StageLinks, count: int,
        x: Any, kwargs: dict[str, Any], target: Any, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any,
    ) -> Batch:  # fmt: skip
        """Split the arguments of a step.

        Args:
            stages: of a replica, by number.
            last: the stage that gets the targets.
            links: say which stage takes which arguments.
            count: the number of microbatches of all replicas.
            x, kwargs, target, arg_mbs, kwarg_mbs, target_mbs: as for `Pipeline.step`.

        Returns:
            The microbatches, with arrays for other workers as Tensors.

        Raises:
            ArgumentError, ArgumentTypeError, MicrobatchError: the arguments cannot be split.
        """
        args = x if x.__class__ is tuple else (x,)
        takes = {name for names in links.entries.values() for name in names}
        own = kwarg_mbs if not takes or not isinstance(kwarg_mbs, (list, tuple)) else []
        check_arguments((args, arg_mbs, own), owner_of(stages[0]) is not None)
        check_arguments((target, target_mbs), owner_of(stages[last]) is not None)
        for part in (kwargs, *(() if own is kwarg_mbs else kwarg_mbs)):
            links.check_arguments(part)
            for each in {0, *links.entries}:
                check_arguments(links.entry(each, (), part)[1], owner_of(stages[each]) is not None)
        calls, targets = microbatches_of(
            args, kwargs, target, count,
            arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs, arg_specs=self.args, kwarg_specs=self.kwargs,
        )  # fmt: skip
        if stages[0].pass_indices and any(name in call[1] for call in calls for name in (STAGE_INDEX, MICROBATCH_INDEX)):
            raise ArgumentError(f"Stage(pass_indices=True) reserves the arguments {STAGE_INDEX} and {MICROBATCH_INDEX}: give them other names")
        if any(owner_of(stages[each]) is not None for each in {0, *links.entries}):
            calls = as_tensors(calls)
        return Batch(calls, as_tensors(targets) if owner_of(stages[last]) is not None else targets)

    def merge(self, outputs: Sequence[Any]) -> Any:
        """The outputs of the whole batch, from the outputs of its microbatches in order."""
        return merge_microbatches(outputs, self.results)


def check_arguments(tree: Any, leaves_process: bool) -> None:
    """Raise if an argument requires grad and cannot get its gradient.

    Args:
        tree: arguments of the first stage.
        leaves_process: they are sent to another worker.

    Raises:
        ArgumentError: an argument requires grad.
    """
    for tensor in leaves_of(tree, TensorCore):
        if tensor.requires_grad and (leaves_process or not tensor.is_leaf):
            why = (
                "its stage is on another worker"
                if leaves_process
                else "it was made by an operation, whose graph each microbatch would run through"
            )
            raise ArgumentError(
                f"an argument of shape {list(tensor.shape)} requires grad, and {why}: detach() it, or make it part of the first stage"
            )


def as_tensors(tree: Any) -> Any:
    """A tree with Tensors in the place of arrays and of numpy's numbers, as it can be sent."""
    return map_tree(asarray, tree, (np.ndarray, np.generic))


def rows_of(call: Call) -> int:
    """The rows of a microbatch, i.e. of its first Tensor."""
    first = next((tensor for tensor in leaves_of(call, TensorCore) if tensor.ndim), None)
    return 0 if first is None else int(first.shape[0])


def as_it_is(*values: Any) -> Any:
    """The output of a pipeline, to be compared with the target."""
    return values[0] if len(values) == 1 else values
