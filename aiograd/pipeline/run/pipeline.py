"""Pipeline: trains and evaluates a model that is cut into stages, by a schedule.

::

    pipe = Pipeline([embed, *blocks, head], make_schedule("1F1B", ranks=4, microbatches=8), loss_fn=cross_entropy)
    losses = await pipe.step(x, target)      # gradients are in .grad
    optimizer.step()

Note [One commit point]
    Each step has a `GradientAccumulator`. When every rank is done its sums are written to the leaves in one synchronous step;
    before that nothing has changed, and any failure leaves it so. Across workers: see Note [Commit across workers] in
    `aiograd.coordination.coordinator`.

Note [Scaling]
    Losses are means over their microbatches as a rule, so that the mean of the losses is the loss of the batch: 1/m scales the seed of each
    microbatch's backward. Gradients of earlier steps are never touched, so they accumulate as they should.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self, overload

from aiograd.engine.run import check_can_run
from aiograd.engine.run.failures import clear_frames
from aiograd.errors import ArgumentError, ArgumentTypeError, CommitUnknown, ModeError, PipelineError, WorkerLostError
from aiograd.pipeline.run.action_handlers import ActionHandlers
from aiograd.pipeline.run.batch import Batch, BatchSpecs, as_it_is
from aiograd.pipeline.run.coordinator import PipelineCoordinator, PipelineDecision
from aiograd.pipeline.run.lost_ranks import LostRanks
from aiograd.pipeline.run.messages import StageResults
from aiograd.pipeline.run.pipeline_replicas import PipelineReplicas
from aiograd.pipeline.run.stage_assignment import ExecutedAction, StageAssignment
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.plan import StepPlan
from aiograd.pipeline.schedule.schedule import Schedule
from aiograd.pipeline.schedule.timeline.timeline import Timeline
from aiograd.pipeline.step.stage import Stage, numbered_stages, stage_list
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.running import foreign_modes, tracing
from aiograd.running.modes import current_mode, no_grad
from aiograd.running.random import default_generator
from aiograd.running.random_streams import RandomStream
from aiograd.tensors.norms import checked_norm
from aiograd.transaction import TransactionState


class Pipeline(PipelineReplicas):
    """A model cut into stages, with the schedule by which microbatches pass through them.

    With stages on other workers, leave it with ``async with`` or `aclose`, so that these forget it.

    *Replicas.* A list of lists of stages is a pipeline in replicas, for data parallelism::

        pipe = Pipeline([[a0, a1], [b0, b1]], make_schedule("ZB-H1", ranks=2, microbatches=4))    # two replicas of two stages, on four workers
        losses = await pipe.step(x, target)                                                       # of eight microbatches

    Each replica carries out the schedule for its part of the microbatches. The workers that have the same stage add up its gradients among
    themselves, while other stages still compute, and all replicas have the same gradients then, or none has any: everything is one step, with one
    commit. The bits are the same as in one process that computes the gradient of each replica, microbatch by microbatch, and adds them up in the
    order of the replicas. A replica weighs by its part of the rows of the batch. All replicas begin with the parameters of the first.

    Args:
        stages: one for each stage of the schedule: modules, callables, `Stage` objects, and RemoteModules or RemoteRefs to modules on other workers.
            Or a list of such lists, one for each replica: modules on workers, each of which has stages of one replica. Modules of one stage have the
            same parameters and buffers; after every step buffers have the first replica's values.
        schedule: the actions of each rank in order; from `make_schedule` or your own.
        loss_fn: ``loss_fn(output, target)`` gives the loss of a microbatch, a Tensor of one element; ``def`` or ``async def``. It runs here, also
            where the last stage does not: then every output comes here and every gradient goes back. Without one the last stage returns the loss
            itself, where it lives, and gets the target as its last argument; so it has to be in replicas.
        scale_gradients: divide by the number of microbatches, for losses that are means. See Note [Scaling].
        arg_specs, kwarg_specs, result_specs: how arguments are split and results put together, where that is not along the first axis; see
            `aiograd.pipeline.microbatch`.
        worker: this process's Worker, for stages on others; None: the RemoteModules' Worker.
        respawn: ``respawn(stage)``, ``def`` or ``async def``: called when the worker of a stage is lost in the middle of a step; returns another
            module (or `Stage`) in its place, on another worker, with the same parameters. The step then goes on, and workers keep their sent values
            until it is over. None: the loss of a worker is an error. Not with replicas, of which another can take the place of one that has lost a
            worker: see `remove` and `add`.
        clip_norm: the gradients that a step has added to are scaled so that their norm, over all stages together, is at most this; each parameter
            counts once, for any number of replicas. None: they are not scaled.
        timeout: seconds that a step may take on other workers; None: their default.
        absorb: True, with at least two replicas: when a worker is lost before a step is decided, workers of other replicas with the same stages
            compute its microbatches, in the same call and from then on, to the same bits; see `absorbed` and `replace`. The others repeat nothing
            that they have done in the step; for that the batch, and the values between stages, are kept until the step is over. Steps fail with a
            PipelineError where forwards change buffers of these stages, such as running statistics: a replica's microbatches change them one after
            another, and here they are computed on several workers, among others. Members of other stages with such buffers begin the step anew.

    Attributes:
        clip_norm: may be changed between steps, for instance where only the last of several steps before the optimizer's is to scale.

    Raises:
        ArgumentError, ArgumentTypeError: stages and schedule do not fit. ScheduleError: the schedule cannot run.

    >>> stages = [ag.nn.Linear(8, 8), ag.nn.Tanh(), ag.nn.Linear(8, 1)]
    >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=3, microbatches=4)
    >>> async with ag.pipeline.Pipeline(stages, schedule, loss_fn=ag.nn.functional.mse_loss) as pipe:
    ...     losses = await pipe.step(ag.ones(12, 8), ag.ones(12, 1))
    >>> len(losses), stages[0].weight.grad.shape
    (4, (8, 8))
    """

    def __init__(
        self,
        stages: Iterable[Any],
        schedule: Schedule,
        *,
        loss_fn: Callable[..., Any] | None = None,
        scale_gradients: bool = True,
        arg_specs: Any = None,
        kwarg_specs: Mapping[str, Any] | None = None,
        result_specs: Any = None,
        worker: Any = None,
        respawn: Callable[[int], Any] | None = None,
        clip_norm: float | None = None,
        timeout: float | None = None,
        absorb: bool = False,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise ArgumentTypeError(f"Pipeline: expected a Schedule such as make_schedule() gives, found {type(schedule).__name__}")
        for name, function in (("loss_fn", loss_fn), ("respawn", respawn)):
            if function is not None and not callable(function):
                raise ArgumentTypeError(f"Pipeline({name}=...): expected a callable, found {type(function).__name__}")
        given = stage_list(stages)
        is_replicated = bool(given) and all(isinstance(each, (list, tuple)) for each in given)
        if is_replicated and (loss_fn is not None or respawn is not None):
            raise ArgumentError(
                "Pipeline: with replicas the last stage computes the loss, and the loss of a worker is an error; leave out loss_fn and respawn"
            )
        if absorb and (not is_replicated or len(given) < 2):
            raise ArgumentError(
                "Pipeline(absorb=True): the stages of a lost worker are computed by other replicas, and there are none; give at least two replicas, "
                "a list of lists of stages"
            )
        replicas = [numbered_stages(each, schedule.num_stages) for each in (given if is_replicated else [given])]
        self.schedule = schedule
        self.loss_fn = loss_fn
        self.clip_norm: float | None = checked_norm("Pipeline", clip_norm)
        last = schedule.num_stages - 1
        listed = replicas[0]
        #: the events of the last step or evaluation in this process
        self.events: list[ExecutedAction] = []
        self._scales = scale_gradients
        self._specs = BatchSpecs(arg_specs, kwarg_specs, result_specs)
        self._plan = StepPlan(schedule, loss_apart=loss_fn is not None and listed[last].is_remote)
        if self._plan.loss_apart:
            listed[last + 1] = Stage(as_it_is, where="loop")
        self._handlers = ActionHandlers()
        assignment = StageAssignment(
            stages=listed,
            training=dict(enumerate(self._plan.training)),
            evaluation=dict(enumerate(self._plan.evaluation)),
            stage_to_rank=self._plan.stage_to_rank,
            microbatches=self._plan.microbatches,
            loss_stage=last + self._plan.loss_apart,
            last_stage=last,
            loss_fn=loss_fn,
            scale=1.0 / self._plan.microbatches if scale_gradients else 1.0,
            recovers=respawn is not None,
            absorbs=True if absorb else None,
            handlers=self._handlers,
            events=self.events,
        ).linked()
        self._assignment = assignment
        #: how many replicas there have been
        self._made = len(replicas)
        numbered = [assignment.numbered(number, each) for number, each in enumerate(replicas)]
        lost = LostRanks(schedule, self._plan.forward) if absorb else None
        self._coordinator = PipelineCoordinator(numbered, is_replicated, respawn, worker, timeout, lost)
        self._turn = asyncio.Lock()
        self._steps = 0
        #: the seed of a step that was not committed, and the stream that it was forked from
        self._seed: tuple[RandomStream, tuple[int, ...]] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let other workers forget the pipeline. Waits for a step that is under way. Idempotent; cancelled, some may keep their stages.

        >>> stages = [ag.nn.Linear(2, 2), ag.nn.Linear(2, 1)]
        >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=3)
        >>> pipe = ag.pipeline.Pipeline(stages, schedule, loss_fn=ag.nn.functional.mse_loss)
        >>> await pipe.aclose()
        """
        async with self._turn:
            self._closed = True
            await self._coordinator.aclose()

    @property
    def timeline(self) -> Timeline:
        """When the ranks of this process did what in the last step or evaluation, in seconds of the loop's clock.

        Raises:
            ArgumentError: there has been none.
        """
        return Timeline.from_events(self.events, name=self.schedule.name)

    def register_action(self, kind: ActionKind, handler: Callable[[Action], Any]) -> None:
        """Let ``await handler(action)`` carry out the actions of one kind, in place of the pipeline: to gather sharded parameters, for instance.

        Args:
            kind: UNSHARD, RESHARD, REDUCE_GRAD, or what computes. Stages that live in this process only.
            handler: an ``async def``.

        Raises:
            ArgumentError: a kind that cannot be handled. ArgumentTypeError: no callable.
        """
        self._handlers.register(kind, handler)

    async def settle(self) -> None:
        """Find out what became of a step that is in doubt: returns when every worker is known to have committed it, at once if there is none.

        After a step that raised `CommitUnknown` the gradients are there, except perhaps on the workers that the error names. These find out by
        themselves or are told here; then everything goes on: ``await pipe.settle()``, then the optimizer. With ``absorb=True`` lost ones are left
        out, since all others have taken the step. Until then steps and evaluations of the
        pipeline, and steps of a `DistributedOptimizer` over these workers, raise `CommitUnknown` and change nothing. Cancelled midway, call it again.

        Raises:
            CommitUnknown: some cannot be reached yet, or have lost their gradients: then restore all workers from one checkpoint, and make a
            new Pipeline.

        >>> stages = [ag.nn.Linear(2, 2), ag.nn.Linear(2, 1)]
        >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=3)
        >>> pipe = ag.pipeline.Pipeline(stages, schedule, loss_fn=ag.nn.functional.mse_loss)
        >>> await pipe.settle()
        """
        async with self._turn:
            while True:
                try:
                    return await self._coordinator.settle()
                except CommitUnknown as error:
                    if not self._coordinator.lose(error):
                        raise

    # ---------------------------------------------------------------- training

    @overload
    async def step(
        self,
        x: Any = ...,
        target: Any = ...,
        *,
        return_outputs: Literal[False] = ...,
        arg_mbs: Any = ...,
        kwarg_mbs: Any = ...,
        target_mbs: Any = ...,
        **kwargs: Any,
    ) -> list[Any]: ...

    @overload
    async def step(
        self,
        x: Any = ...,
        target: Any = ...,
        *,
        return_outputs: Literal[True],
        arg_mbs: Any = ...,
        kwarg_mbs: Any = ...,
        target_mbs: Any = ...,
        **kwargs: Any,
    ) -> tuple[list[Any], Any]: ...

    async def step(
        self,
        x: Any = (),
        target: Any = None,
        *,
        return_outputs: bool = False,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a batch: adds its gradients to the ``grad`` of every leaf.

        Either it returns and every gradient has been added once, or it raises and no ``grad`` has changed, nor any buffer of the stages' modules,
        such as running statistics, once the calls on the executor have ended that a cancellation leaves behind. Other changes by forwards persist,
        such as the states of generators that stages have of their own. Random numbers of the default generator, as for dropout, are drawn by
        stage and microbatch and the same under every schedule, and when a step that failed is taken again; see `StepRandom`. Cancelling stops every
        rank. Steps of one pipeline run one after the other.

        After a step that failed or was cancelled, a worker that could not be told of it has the step's buffers until it is told:
        ``await pipe.settle()`` comes before states are read.

        Args:
            x: the batch; a tuple where the first stage takes several arguments. It is split along its first axis. Leaves that require grad get
                theirs, if the first stage is in this process.
            target: of the whole batch; split like `x`.
            return_outputs: also return the outputs of the last stage, put together from its microbatches as by `eval`, outside of any graph. Else
                it is kept no longer than its microbatch needs it.
            arg_mbs, kwarg_mbs, target_mbs: lists of tuples, dicts and targets: the microbatches, where they are split already, in place of `x`,
                `kwargs` and `target`.
            kwargs: further arguments, of the stages that have them among their `takes`, else of the first one; split like `x`.

        Returns:
            The loss of each microbatch, losses of stages included, in order; outside of any graph, and not scaled. With `return_outputs` a tuple
            of these and the outputs.

        Raises:
            ModeError: grad mode is off. ArgumentError, ArgumentTypeError, MicrobatchError: the batch cannot be split. PipelineError: a stage failed;
            says which. WorkerLostError, DeadlineError: nothing has changed anywhere. With ``committed`` True, when the gradients are there:
            the error of a post-accumulate hook, and CommitUnknown where a worker did not confirm; see `settle`. CommitUnknown with ``committed``
            False: an earlier step is still in doubt, and this one was not begun.

        >>> stages = [ag.nn.Linear(2, 2), ag.nn.Linear(2, 1)]
        >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=3)
        >>> pipe = ag.pipeline.Pipeline(stages, schedule, loss_fn=ag.nn.functional.mse_loss)
        >>> losses = await pipe.step(ag.ones(6, 2), ag.ones(6, 1))
        >>> len(losses), stages[0].weight.grad.shape
        (3, (2, 2))
        """
        check_can_run("Pipeline.step()")
        if not current_mode().grad:
            raise ModeError("Pipeline.step() computes gradients, but grad mode is off; call eval() for the forward alone")
        if not self._plan.training:
            raise ArgumentError("Pipeline.step(): the schedule has forwards only; call eval(), or use a schedule with backwards")
        if return_outputs and self.loss_fn is None:
            raise ArgumentError(
                "Pipeline.step(return_outputs=True): the last stage returns the loss itself, so there are no other outputs; pass the loss function "
                "as loss_fn, or leave return_outputs out"
            )
        running = self._step(self._split(x, kwargs, target, arg_mbs, kwarg_mbs, target_mbs), bool(return_outputs))
        del x, target, arg_mbs, kwarg_mbs, target_mbs, kwargs
        try:
            with tracing.span("pipeline step", attributes={"aiograd.microbatches": self._count}), foreign_modes.noting():
                return await running
        except BaseException as error:
            clear_frames(error, "aiograd.pipeline.")
            raise

    async def _step(self, batch: Batch, keeps_outputs: bool) -> Any:
        async with self._turn:
            profiler, began = current_mode().profiler, time.perf_counter_ns()
            decision, results = await self._carry_out(batch, True, keeps_outputs)
            losses = results.losses
            if losses is None or len(losses) != self._count:
                await self._coordinator.abort(decision)
                raise PipelineError(f"a step of a pipeline gave {len(losses or ())} losses for {self._count} microbatches")
            try:
                outputs = self._specs.merge(results.outputs or []) if keeps_outputs else None
            except BaseException:
                await self._coordinator.abort(decision)
                raise
            try:
                await self._coordinator.commit(decision)
            finally:
                if decision.state is TransactionState.COMMITTED:
                    self._seed = None
            if profiler is not None:
                profiler.end_pipeline_step(began, self, self._coordinator.seed, self._coordinator.computations)
            return (list(losses), outputs) if keeps_outputs else list(losses)

    async def eval(self, x: Any = (), *, arg_mbs: Any = None, kwarg_mbs: Any = None, **kwargs: Any) -> Any:
        """Forward of a batch, without gradients. Modules stay in the mode that they are in. Cancelling stops every rank.

        Args:
            x, arg_mbs, kwarg_mbs, kwargs: as for `step`.

        Returns:
            The outputs of the last stage, put together from its microbatches.

        Raises:
            As `step`.

        >>> stages = [ag.nn.Linear(2, 2), ag.nn.Linear(2, 1)]
        >>> schedule = ag.pipeline.make_schedule("1F1B", ranks=2, microbatches=3)
        >>> pipe = ag.pipeline.Pipeline(stages, schedule, loss_fn=ag.nn.functional.mse_loss)
        >>> (await pipe.eval(ag.ones(6, 2))).shape
        (6, 1)
        """
        check_can_run("Pipeline.eval()")
        with no_grad():
            running = self._eval(self._split(x, kwargs, None, arg_mbs, kwarg_mbs, None)._replace(targets=None))
            del x, arg_mbs, kwarg_mbs, kwargs
            try:
                with foreign_modes.noting():
                    return await running
            except BaseException as error:
                clear_frames(error, "aiograd.pipeline.")
                raise

    async def _eval(self, batch: Batch) -> Any:
        async with self._turn:
            decision, results = await self._carry_out(batch, False)
            await self._coordinator.abort(decision)  # there is nothing to commit
        return self._specs.merge(results.outputs or [])

    # ---------------------------------------------------------------- parts

    @property
    def _count(self) -> int:
        """The number of microbatches of all replicas."""
        return self._plan.microbatches * len(self._coordinator.replicas)

    async def _carry_out(self, batch: Batch, trains: bool, keeps_outputs: bool = False) -> tuple[PipelineDecision, StageResults]:
        """A step that is prepared everywhere, and its results; repeated without workers that are lost, if they are absorbed."""
        shares = self._coordinator.shares(batch.calls, self._scales)
        random: StepRandom | None = None
        repeats: int | None = None
        while True:
            try:
                decision = await self._begin(batch, trains, repeats)
                repeats = (repeats or decision.step) if trains else None
                decision.work.keeps_outputs = keeps_outputs
                random = random or (self._step_random() if trains else StepRandom())
                return decision, await self._coordinator.run(decision, trains, random, shares, self.clip_norm if trains else None)
            except (WorkerLostError, CommitUnknown) as error:
                if not self._coordinator.lose(error):
                    raise

    def _step_random(self) -> StepRandom:
        """The random numbers of a step: those of the last one, if it was not committed, and the default generator has not been seeded since."""
        stream = default_generator()._stream
        if self._seed is not None and self._seed[0] is stream:
            return StepRandom(self._seed[1])
        random = StepRandom()
        self._seed = stream, random.seed
        return random

    async def _begin(self, batch: Batch, trains: bool, repeats: int | None) -> PipelineDecision:
        """A new step, with the microbatches on their way to the first stage and the targets to the last, as far as these have not got them.

        Args:
            batch: the batch.
            trains: with backward.
            repeats: the number of the step that it repeats.
        """
        coordinator = self._open()
        await coordinator.settle()
        await coordinator.connect()
        await coordinator.ask_known(repeats)
        self.events.clear()
        self._steps += 1
        decision = coordinator.open(self._steps, trains)
        links, last = self._assignment.links, self._assignment.loss_stage
        batch.put(decision.work, len(coordinator.replicas), links, last, coordinator.address, coordinator.lost is not None)
        return decision

    def _split(self, *arguments: Any) -> Batch:
        assignment = self._assignment
        return self._specs.split(self._coordinator.stages, assignment.loss_stage, assignment.links, self._count, *arguments)
