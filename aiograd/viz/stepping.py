"""Stepping: a backward pass that is recorded step by step.

Note [A pass like any other]
    The engine runs the pass, on its general path and one node at a time, so order, hooks, sums and errors are as in any backward. Its ledger makes
    the record. Gradients land in targets of the pass (`PassHooks.grad_target`), as in a pipeline's microbatch, so no ``.grad`` changes.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from aiograd.engine.input_buffer import Key
from aiograd.engine.ledger import Ledger
from aiograd.engine.pass_hooks import PassHooks
from aiograd.engine.plan import BackwardPlan
from aiograd.engine.run import Engine, check_can_run, new_graph_task
from aiograd.engine.staged_commit import Keeper, StagedCommit
from aiograd.errors import ArgumentError, ArgumentTypeError, GraphFreedError
from aiograd.graph.accumulate_grad import AccumulateGrad, GradTarget
from aiograd.graph.boundary import to_tensor
from aiograd.graph.hooks import hook_name
from aiograd.graph.node import Node
from aiograd.ops.slice_gradient import dense
from aiograd.running.caller import short_place, type_found
from aiograd.running.devices import device_name_of
from aiograd.running.exceptions import text_of
from aiograd.tensors.core import TensorCore
from aiograd.tensors.passes import roots_and_seeds
from aiograd.viz.pass_steps import GradientSummary, PassStep, PassSteps, SentGradient
from aiograd.viz.picture import Picture, picture_of
from aiograd.viz.step_page import Move, StepPicture
from aiograd.viz.svg import picture_svg

_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_PACKAGE = str(Path(__file__).parents[1])


async def step(
    loss: Any,
    gradient: Any = None,
    *,
    params: Mapping[str, Any] | None = None,
    names: Any = None,
    max_elements: int = 24,
    max_nodes: int = 500,
) -> PassSteps:
    """Run a backward pass and record every step of it: the node that runs, the gradients that come and go, and the sums that they are added to.

    The pass is that of ``loss.backward()``, in the same order, one node at a time, and changes nothing: no ``grad`` is written, and the graph is
    kept, so a backward can follow. The hooks on tensors and nodes run, those on accumulated gradients do not. The record ends at nodes whose values
    came from another worker. Lines of code are recorded under ``ag.detect_anomaly()``, and for custom Functions. A compiled function is one step; if
    `step` itself is called under ``ag.detect_anomaly()``, the operations within are steps.

    Args:
        loss: a Tensor with a graph.
        gradient: its gradient, of its shape; None: one, for a tensor of one element.
        params, names: names of parameters, as for `graph_svg`.
        max_elements: gradients with more elements are recorded as shape, norm and range.
        max_nodes: refuse larger graphs.

    Returns:
        The steps: text at the prompt, a page in a notebook, and in a file by ``.save(path)``. If a rule or hook raises, the last step is the one that
        failed, and ``.error`` is the exception, with the notes that a backward's has.

    Raises:
        NoGraphError, ShapeError, ArgumentTypeError, ArgumentError: the arguments are wrong, the graph is too large, or gradients are combined with
            other processes. GraphFreedError: a pass has used the graph up. LoopError: there is no running loop.

    Cancelling stops the pass; then there is no record.

    >>> w = ag.tensor([3.0], requires_grad=True)
    >>> steps = await ag.viz.step((w * w).sum(), params={"w": w})
    >>> steps[-1].title, steps[-1].accumulated.values, w.grad
    ('w', array([6.], dtype=float32), None)
    """
    what = "viz.step()"
    if not isinstance(loss, TensorCore):
        raise ArgumentTypeError(f"{what}: expected one Tensor, the loss, found {type_found(loss)}")
    if isinstance(max_elements, bool) or not isinstance(max_elements, int) or max_elements < 0:
        raise ArgumentError(f"{what}: max_elements is {max_elements!r}; expected an int of at least 0")
    roots, seeds = roots_and_seeds(what, loss, gradient, False)
    check_can_run(what)
    task = new_graph_task(roots, seeds, plan=_StepPlan(roots, seeds), keep_graph=True, hooks=_StepHooks())
    task.may_walk, task.profiler, task.staged = False, None, _StagedLeaves()
    picture = picture_of(what, loss, params=params, names=names, shapes=True, edge_shapes=False, saved=False, max_nodes=max_nodes)
    for node, number in picture.numbers.items():
        if node._extra is not None and node._extra.reducer is not None:
            raise ArgumentError(
                f"{what}: the gradient of {picture.boxes[number].title} is combined with other processes, which take no part in this pass. "
                "Step through a copy of the module, copy.deepcopy(module)."
            )
    task.ledger = ledger = _StepLedger(task.plan, task.staged, picture, max_elements)
    failed: Exception | None = None
    try:
        async with Engine(concurrency=1) as engine:
            await engine.run(task)
    except GraphFreedError:
        raise
    except Exception as error:
        if not ledger.fail(error):
            raise
        trace = error.__traceback__
        failed = error.with_traceback(None if trace is None else trace.tb_next)  # without this frame, which refers to the graph
    else:
        await ledger.read_devices()
    leaves = [number for number, box in enumerate(picture.boxes) if box.kind in ("parameter", "leaf")]
    return PassSteps(tuple(ledger.steps()), ledger.seed, failed, StepPicture(picture_svg(picture, "Backward graph"), leaves, ledger.moves))


class _StepTarget:
    """Takes a gradient in place of a leaf."""

    grad: Any = None


class _StepHooks(PassHooks):
    """Gradients go to targets of the pass."""

    runs_post_accumulate_hooks: ClassVar[bool] = False

    def grad_target(self, leaf: AccumulateGrad) -> GradTarget:
        return _StepTarget()


class _StagedLeaves(StagedCommit):
    """A commit that leaves the ``grad`` of non-leaves as it is."""

    __slots__ = ()

    def retain(self, keep: Keeper, grad: Any) -> None:
        pass


class _StepPlan(BackwardPlan):
    """The whole graph, up to the nodes that send gradients to other workers."""

    def runs(self, node: Node) -> bool:
        return not node.is_outlet


class _StepLedger(Ledger):
    """A ledger that makes the record of what goes through it. Large sums are made at once, so that they are in it.

    Args:
        plan, staged: of the pass.
        picture: of the graph.
        most: elements of gradients that are recorded whole.
    """

    __slots__ = ("seed", "moves", "_staged", "_picture", "_most", "_arrows", "_steps", "_step", "_sent", "_expected", "_pushed", "_on_devices")

    seed: GradientSummary

    def __init__(self, plan: BackwardPlan, staged: StagedCommit, picture: Picture, most: int) -> None:
        super().__init__(plan)
        self.moves: list[Move] = []
        self._staged = staged
        self._picture = picture
        self._most = most
        #: box -> number of the first of its arrows
        self._arrows = {arrow.source: number for number, arrow in reversed([*enumerate(picture.arrows)])}
        #: by node, in the order in which they run: the step without its contributions, and those with their targets
        self._steps: dict[Node, PassStep] = {}
        self._sent: dict[Node, list[tuple[Node, SentGradient]]] = {}
        #: the node that runs
        self._step: Node | None = None
        #: node -> number of gradients that it waits for
        self._expected: dict[Node, int] = {}
        self._pushed: list[Any] = []
        #: gradients of devices, to be read after the pass
        self._on_devices: list[tuple[GradientSummary, Any]] = []

    def begin(self) -> None:
        plan = self._plan
        ((root, nr),) = plan.roots
        self._expected = {**plan.dependencies, root: 1}
        seed = self._summary(plan.root_grads[nr])
        if seed is not None:
            self.seed = seed
        self._push(root, plan.root_grads)

    def pop(self) -> tuple[Node, list[Any]]:
        node, grads = super().pop()
        extra = node._extra
        hooks: Any = () if extra is None else (*extra.tensor_hooks.values(), extra.prehooks or {}, extra.posthooks or {})
        note = f"the values came from {getattr(node, 'peer', '')}: `ctx.backward(loss)` sends the gradient there" if node.is_outlet else ""
        self._step, self._sent[node] = node, []
        self._steps[node] = PassStep(
            len(self._steps) + 1, node.name, self._title(node), node.sequence_nr, *_line_of(node), self._expected[node],
            tuple(map(self._summary, grads)), tuple(hook_name(hook) for each in hooks for hook in each.values()), note,
        )  # fmt: skip
        self.moves.append(Move(self._picture.numbers[node], (), (), ()))
        return node, grads

    def _push(self, node: Node, grads: list[Any], arrival: int | None = None) -> None:
        self._pushed = grads
        super()._push(node, grads, arrival)

    def _arrive(self, child: Node, nr: int, grad: Any, key: Key, left: int) -> None:
        gradient = self._summary(grad)
        super()._arrive(child, nr, grad, key, left)
        while self.folds:
            target, buffer = self.folds.popleft()
            buffer.fold()
            self.fold_done(target, buffer)
        waiting = self._buffers.get(child)
        total = self._summary((self._pushed if waiting is None else waiting.sums)[nr])
        expected = self._expected[child]
        arrived = expected - self._plan.dependencies[child]
        if self._step is not None:
            self._sent[self._step].append((child, SentGradient(key[1], self._title(child), nr, gradient, arrived, expected, total)))

    def complete(self, node: Node, outputs: Any) -> None:
        super().complete(node, outputs)
        numbers, ready, sent = self._picture.numbers, self._ready.nodes(), self._sent[node]
        staged = self._staged.gradients.get(node) if node.is_leaf else None  # type: ignore[call-overload]
        accumulated = None if staged is None else self._summary(staged.grad)
        self._steps[node] = replace(self._steps[node], accumulated=accumulated, ready=tuple(map(self._title, ready)))
        edges = [number for number, child in enumerate(node.next_nodes) if child is not None]
        arrows = [self._arrows[numbers[node]] + edges.index(each.output) for _, each in sent if each.gradient is not None]
        counts = [(numbers[child], each.arrived, each.expected) for child, each in sent]
        self.moves[-1] = Move(numbers[node], arrows, [numbers[each] for each in ready], counts)
        self._step = None

    def fail(self, error: Exception) -> bool:
        """Give the error to the step that runs; returns False if there is none."""
        if self._step is not None:
            self._steps[self._step] = replace(self._steps[self._step], error=f"{type(error).__name__}: {text_of(error)}")
        return self._step is not None

    def steps(self) -> list[PassStep]:
        """The record."""

        def contributions(node: Node) -> tuple[SentGradient, ...]:
            return tuple([replace(each, target_step=self._steps[child].number if child in self._steps else None) for child, each in self._sent[node]])

        return [replace(step, contributions=contributions(node)) for node, step in self._steps.items()]

    def _title(self, node: Node) -> str:
        return self._picture.boxes[self._picture.numbers[node]].title

    def _summary(self, grad: Any) -> GradientSummary | None:
        """A gradient as it is now."""
        if grad is None:
            return None
        grad = dense(grad)
        if isinstance(grad, (np.ndarray, np.generic)):
            return _summary(np.asarray(grad), "cpu", self._most)
        summary = GradientSummary(grad.shape, grad.dtype, device_name_of(grad))
        self._on_devices.append((summary, grad))  # nothing is added to arrays of devices in place
        return summary

    async def read_devices(self) -> None:
        """Complete the summaries of gradients that are on devices."""
        for summary, array in self._on_devices:
            host = await to_tensor(array).to("cpu")
            read = _summary(host._data, summary.device, self._most)
            for name in ("values", "norm", "low", "high"):
                object.__setattr__(summary, name, getattr(read, name))


def _summary(array: np.ndarray[Any, Any], device: str, most: int) -> GradientSummary:
    values = None
    if array.size <= most:
        values = array.copy()
        values.flags.writeable = False
    if not array.size:
        return GradientSummary(array.shape, array.dtype, device, values)
    sizes = np.abs(array) if array.dtype.kind == "c" else array
    norm = float(np.linalg.norm(array.reshape(-1)))
    return GradientSummary(array.shape, array.dtype, device, values, norm, float(sizes.min()), float(sizes.max()))


def _line_of(node: Node) -> tuple[str, str]:
    """File and line of the forward that recorded a node, and that line; empty where they are not known."""
    file, _, line = (getattr(node, "forward_line", None) or "").rpartition(":")
    if not file and node._extra is not None and node._extra.anomaly is not None:
        frames = [frame for frame in _FRAME.findall(node._extra.anomaly[0]) if not frame[0].startswith(_PACKAGE)]
        file, line = frames[-1] if frames else ("", "")
    return (short_place(file, line), linecache.getline(file, int(line)).strip()) if file else ("", "")
