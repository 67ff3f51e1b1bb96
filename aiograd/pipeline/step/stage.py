"""Stage: one piece of a model in a pipeline, and how it is to be run.

Note [Where a stage runs]
    A plain function may take any time, so it runs on the engine's executor, as `aiograd.offload` does; an ``async def`` runs on the event loop.
    Stages that are known to be short, or that have to be on the loop's thread, say ``where="loop"`` and save the way to a thread and back
    (some 60 µs). The backward of a stage is an ordinary pass of the engine, which places each rule by itself.

Note [Arguments and outputs of a stage]
    The outputs of a stage are the arguments of the next: a tuple gives several, anything else one. Tensors may occur anywhere in tuples, lists
    and dicts; other values go through unchanged. Tensors arrive outside of any graph, as leaves, and require grad where they did at the
    end of the stage before. A Tensor that occurs twice arrives as one. For named values see Note [Values for stages that are no neighbours]
    in `links`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.running import devices
from aiograd.tensors.core import TensorCore

Where: TypeAlias = Literal["executor", "loop"]

#: names of the arguments that `Stage(pass_indices=True)` adds
STAGE_INDEX, MICROBATCH_INDEX = "stage_idx", "mb_idx"
#: name of the losses that stages give
LOSS = "loss"


class Stage:
    """One stage of a pipeline with options: for a stage that is more than a module or function.

    Args:
        module: called with the outputs of the stage before (the first one: with the microbatch): a module or another callable,
            ``def`` or ``async def``. Its result may be awaitable. Or a module on another worker: a RemoteModule or RemoteRef, for which
            `parameters` and `weight_backward` cannot be given.
        where: "executor" or "loop"; None: the loop for an ``async def``, else the executor. See Note [Where a stage runs].
        device: move the Tensors that come in to this device, targets included; None: leave them where they are.
        parameters: leaves that the stage may use; None: the ``parameters()`` of `module`, if it has any. They are given for functions, so that
            their gradients can be summed early, and for a module that uses a weight of another stage, as an embedding and the head do that share
            one, but does not have it among its own: for bits that no schedule changes. Every leaf gets its gradient, listed or not.
        pass_indices: call with ``stage_idx`` and ``mb_idx`` as well, for instance to draw random numbers by them.
        weight_backward: for weights that are not in the graph: called right after each input-gradient backward (I or B); returns a function that is
            called for the weight-gradient backward of that microbatch (W, or at once after B); both may be ``async def``. Its effects are not part of
            the transaction of the step.
        gives: names of values that the stage returns beside its output, for any later stages: it returns a tuple of the output and one value for
            each name. They go straight to the stages that take them, and their gradients straight back. The name "loss" is for a loss of the
            stage, a Tensor of one element, or None: it is added to the loss of the microbatch, and left out in evaluations.
        takes: names of keyword arguments of the stage that come from an earlier stage that gives them, or from the batch: such arguments of
            `Pipeline.step` and `Pipeline.eval` go to the stages that take them, all others to the first one. Stages of further replicas, and
            stages in the place of lost ones, need not say what they give and take: it is the same.

    Raises:
        ArgumentTypeError, ArgumentError: something that cannot be a stage, or options that do not go together.

    >>> stage = ag.pipeline.Stage(ag.nn.Linear(2, 1), where="loop")
    >>> stage.where
    'loop'

    A value that skips a stage:

    >>> stages = [
    ...     ag.pipeline.Stage(lambda x: (x * 2, x), gives=("skipped",)),
    ...     lambda x: x.exp(),
    ...     ag.pipeline.Stage(lambda x, skipped: x + skipped, takes=("skipped",)),
    ... ]
    >>> pipe = ag.pipeline.Pipeline(stages, ag.pipeline.make_schedule("ForwardOnly", ranks=3, microbatches=2))
    >>> (await pipe.eval(ag.zeros(4))).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    __slots__ = ("module", "where", "device", "parameters", "pass_indices", "weight_backward", "gives", "takes")

    def __init__(
        self,
        module: Any,
        *,
        where: Where | None = None,
        device: str | None = None,
        parameters: Iterable[Any] | None = None,
        pass_indices: bool = False,
        weight_backward: Callable[[], Any] | None = None,
        gives: Iterable[str] = (),
        takes: Iterable[str] = (),
    ) -> None:
        if isinstance(module, Stage):
            raise ArgumentTypeError("Stage(...): it has been made a Stage already; pass the module")
        if not callable(module) and not is_remote(module):
            raise ArgumentTypeError(f"a stage of a pipeline is a module or another callable, or one on another worker, not {type(module).__name__}")
        if where not in (None, "executor", "loop"):
            raise ArgumentError(f"Stage(where={where!r}): expected 'executor', 'loop' or None")
        self.module: Any = module
        self.where = where
        self.device: str | None = device
        self.pass_indices: bool = pass_indices
        self.weight_backward: Callable[[], Any] | None = weight_backward
        self.gives: tuple[str, ...] = _names("gives", gives)
        self.takes: tuple[str, ...] = _names("takes", takes)
        if parameters is not None and (not isinstance(parameters, Iterable) or isinstance(parameters, TensorCore)):
            raise ArgumentTypeError(f"Stage(parameters=...): expected a list of leaf Tensors, found {type(parameters).__name__}")
        #: the argument `parameters`
        self.parameters: tuple[Any, ...] | None = None if parameters is None else tuple(parameters)
        if is_remote(module):
            if parameters is not None or weight_backward is not None:
                raise ArgumentError(
                    "Stage(...): parameters and weight_backward belong to a module of this process, and this one is on another worker"
                )
            return
        if where is None:
            self.where = "loop" if runs_on_loop(module) else "executor"
        if device is not None:
            devices.device(device)
        if pass_indices:
            _check_takes_indices(module)
        for item in self.parameters or ():
            if not isinstance(item, TensorCore) or not item.is_leaf:
                raise ArgumentTypeError(f"Stage(parameters=...): expected leaf Tensors, found {type(item).__name__}")

    def leaves(self) -> dict[AccumulateGrad, None] | None:
        """The leaves where gradients of the stage's parameters arrive, each once and in order; None: its parameters are not known.

        Returns:
            The leaves as keys, or None.
        """
        listed: Iterable[Any] | None = self.parameters
        if listed is None and callable(own := getattr(self.module, "parameters", None)) and not inspect.isclass(self.module):
            listed = own()
        return None if listed is None else {item._node: None for item in listed if isinstance(getattr(item, "_node", None), AccumulateGrad)}

    @property
    def is_remote(self) -> bool:
        """True if the module lives on another worker."""
        return is_remote(self.module)

    @property
    def name(self) -> str:
        """The name of the stage in messages."""
        return getattr(self.module, "__qualname__", None) or type(self.module).__name__

    def __repr__(self) -> str:
        return f"<Stage {self.name} on {'another worker' if self.is_remote else f'the {self.where}'}>"


def _names(option: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names of values, checked."""
    is_listed = isinstance(names, Iterable) and not isinstance(names, str)
    found = tuple(names) if is_listed else ()
    if not is_listed or not all(isinstance(name, str) and name.isidentifier() for name in found):
        raise ArgumentTypeError(f"Stage({option}={names!r}): expected a tuple of names, such as ('features',)")
    reserved = {STAGE_INDEX, MICROBATCH_INDEX} | ({LOSS} if option == "takes" else set())
    for name in found:
        if name in reserved or found.count(name) > 1:
            raise ArgumentError(f"Stage({option}={found!r}): {name!r} {'is reserved' if name in reserved else 'occurs twice'}; take another name")
    return found


def as_stage(item: Any) -> Stage:
    """`item` itself where it is a Stage, else a Stage of it."""
    return item if isinstance(item, Stage) else Stage(item)


def numbered_stages(items: Iterable[Any], count: int) -> dict[int, Stage]:
    """The stages of a model by number.

    Args:
        items: Stages, and modules or callables.
        count: the number of stages of the schedule.

    Raises:
        ArgumentError: there are more or fewer. ArgumentTypeError: it is no list.
    """
    stages = dict(enumerate(map(as_stage, stage_list(items))))
    if len(stages) != count:
        raise ArgumentError(f"Pipeline: got {len(stages)} stages for a schedule of {count}")
    return stages


def stage_list(items: Any) -> list[Any]:
    """Stages, or lists of stages, as a list.

    Raises:
        ArgumentTypeError: they are no list.
    """
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise ArgumentTypeError(f"Pipeline: expected a list of stages, found {type(items).__name__}")
    return list(items)


def is_remote(module: Any) -> bool:
    """True if `module` stands for one on another worker: a RemoteModule (has ``ref``) or a RemoteRef (has ``adapt``)."""
    return callable(getattr(getattr(module, "ref", module), "adapt", None))


def runs_on_loop(function: Any) -> bool:
    """True if calling `function` only makes a coroutine."""
    if inspect.isclass(function):
        return False
    forward = getattr(function, "forward", None)  # of a module: what its __call__ calls
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None), forward)))  # noqa: B004


def _check_takes_indices(function: Any) -> None:
    """Raise if an argument of the stage has a name that `pass_indices` reserves, but cannot be given by name."""
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        return
    taken = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters) and not {STAGE_INDEX, MICROBATCH_INDEX} <= taken:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ArgumentError(f"Stage(pass_indices=True) reserves the arguments {STAGE_INDEX} and {MICROBATCH_INDEX}: {name} has to take both by name")
