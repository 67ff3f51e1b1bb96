"""Pipeline: trains and evaluates a model that is cut into stages, by a schedule.

::

    pipe = Pipeline([embed, *blocks, head], make_schedule("1F1B", ranks=4, microbatches=8), loss_fn=cross_entropy)
    losses = await pipe.step(x, target)      # gradients are in .grad
    optimizer.step()

Note [One commit point]
    Gradients of a step accumulate in a staging of its own. When every rank is done they are written to the leaves in one synchronous step;
    before that nothing has changed, and whatever goes wrong leaves it so.

Note [Scaling]
    Losses are means over their microbatches as a rule, so that the mean of the losses is the loss of the batch: 1/m scales the seed of each
    microbatch's backward. Gradients of earlier steps are never touched, so they accumulate as they should.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiograd.engine.run import check_can_run
from aiograd.engine.run.failures import mark_committed
from aiograd.errors import ArgumentError, ArgumentTypeError, ModeError
from aiograd.modes import current_mode, no_grad
from aiograd.offloading import ready
from aiograd.pipeline.action import Action, ActionKind
from aiograd.pipeline.plan import Plan
from aiograd.pipeline.rank import ENTRY, TARGET
from aiograd.pipeline.run.local import Event, Site, Work
from aiograd.pipeline.schedule import Schedule
from aiograd.pipeline.stage import as_stage


class Pipeline:
    """A model cut into stages, with the schedule by which microbatches pass through them.

    Args:
        stages: one for each stage of the schedule: modules, callables, `Stage` objects.
        schedule: who does what when; from `make_schedule` or your own.
        loss_fn: ``loss_fn(output, target)`` gives the loss of a microbatch, a Tensor of one element; ``def`` or ``async def``. Without one the
            last stage returns the loss itself, and gets the target as its last argument.
        scale_gradients: divide by the number of microbatches, for losses that are means. See Note [Scaling].

    Raises:
        ArgumentError, ArgumentTypeError: stages and schedule do not fit. ScheduleError: the schedule cannot run.
    """

    def __init__(
        self, stages: Iterable[Any], schedule: Schedule, *, loss_fn: Callable[..., Any] | None = None, scale_gradients: bool = True
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise ArgumentTypeError(f"Pipeline: expected a Schedule such as make_schedule() gives, found {type(schedule).__name__}")
        if loss_fn is not None and not callable(loss_fn):
            raise ArgumentTypeError(f"Pipeline(loss_fn=...): expected a callable, found {type(loss_fn).__name__}")
        self.stages = tuple(as_stage(item) for item in stages)
        if len(self.stages) != schedule.num_stages:
            raise ArgumentError(f"Pipeline: got {len(self.stages)} stages for a schedule of {schedule.num_stages}")
        self.schedule = schedule
        self.loss_fn = loss_fn
        self.scale_gradients = scale_gradients
        #: what the last step or evaluation has done and when, on this process
        self.events: list[Event] = []
        self._plan = Plan(schedule)
        self._handlers: dict[ActionKind, Callable[[Action], Any]] = {}
        self._turn = asyncio.Lock()

    # ---------------------------------------------------------------- training

    async def step(
        self,
        x: Any = (),
        target: Any = None,
        *,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Forward and backward of a batch: adds its gradients to the ``grad`` of every leaf.

        Either it returns and every gradient has been added once, or it raises and no ``grad`` has changed. Cancelling stops every rank. Steps of
        one pipeline run one after the other.

        Args:
            x: the batch; a tuple where the first stage takes several arguments. It is split along its first axis.
            target: of the whole batch; split like `x`.
            arg_mbs, kwarg_mbs, target_mbs: the microbatches, where they are split already, in place of `x`, `kwargs` and `target`.
            kwargs: further arguments of the first stage.

        Returns:
            The loss of each microbatch, in order; outside of any graph, and not scaled.

        Raises:
            ModeError: grad mode is off. ArgumentError, ArgumentTypeError: the batch cannot be split. PipelineError: a stage failed; says which.
            An error raised by a post-accumulate hook has ``committed`` True: the gradients are there.
        """
        check_can_run("Pipeline.step()")
        if not current_mode().grad:
            raise ModeError("Pipeline.step() computes gradients, but grad mode is off; call eval() for the forward alone")
        if not self._plan.training:
            raise ArgumentError("Pipeline.step(): the schedule has forwards only; call eval(), or use a schedule with backwards")
        entries, targets = self._split(x, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        async with self._turn:
            site = self._site(trains=True)
            self._feed(site, entries, targets)
            del entries, targets
            await site.run()
            await site.prepare()
            losses, _ = site.results()
            await ready(losses)
            site.commit()
            try:
                await site.after_commit()
            except BaseException as error:
                mark_committed(error)
                raise
            return losses or []

    async def eval(
        self, x: Any = (), *, arg_mbs: Sequence[tuple[Any, ...]] | None = None, kwarg_mbs: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> Any:
        """Forward of a batch, without gradients. Modules stay in the mode that they are in.

        Args:
            x, arg_mbs, kwarg_mbs, kwargs: as for `step`.

        Returns:
            What the last stage returned, put together from its microbatches.
        """
        check_can_run("Pipeline.eval()")
        entries, _ = self._split(x, kwargs, None, arg_mbs, kwarg_mbs, None)
        async with self._turn:
            with no_grad():
                site = self._site(trains=False)
                self._feed(site, entries, None)
                del entries
                await site.run()
            _, outputs = site.results()
            return _merge(outputs or [])

    # ---------------------------------------------------------------- parts

    def _site(self, trains: bool) -> Site:
        self.events = []
        plan = self._plan
        rows = plan.training if trains else plan.evaluation
        work = Work(
            rows=dict(enumerate(rows)),
            stages=dict(enumerate(self.stages)),
            stage_to_rank=plan.stage_to_rank,
            microbatches=plan.microbatches,
            last=len(self.stages) - 1,
            trains=trains,
            loss_fn=self.loss_fn,
            scale=1.0 / plan.microbatches if self.scale_gradients else 1.0,
            keep_outputs=False,
            handlers=self._handlers,
        )
        return Site(work, None, self.events)

    def _feed(self, site: Site, entries: list[Any], targets: list[tuple[Any, ...]] | None) -> None:
        ranks = self._plan.stage_to_rank
        for microbatch, entry in enumerate(entries):
            site.put(ranks[0], (ENTRY, 0, microbatch), entry)
        for microbatch, target in enumerate(targets or ()):
            site.put(ranks[-1], (TARGET, len(self.stages) - 1, microbatch), target)

    def _split(self, x: Any, kwargs: Any, target: Any, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any) -> tuple[list[Any], list[tuple[Any, ...]]]:
        m = self._plan.microbatches
        if arg_mbs is None:
            args = x if x.__class__ is tuple else (x,)
            arg_mbs = list(zip(*[_chunks(a, m) for a in args], strict=True)) if args else [()] * m
        if target_mbs is None:
            target_mbs = [()] * m if target is None else [(t,) for t in _chunks(target, m)]
        else:
            target_mbs = [(t,) for t in target_mbs]
        return [(args, {}) for args in arg_mbs], target_mbs


def _chunks(value: Any, m: int) -> list[Any]:
    n = value.shape[0]
    k, r = divmod(n, m)
    out, at = [], 0
    for i in range(m):
        size = k + (i < r)
        out.append(value[at : at + size])
        at += size
    return out


def _merge(outputs: list[Any]) -> Any:
    import aiograd as ag
    return ag.concat(outputs)
