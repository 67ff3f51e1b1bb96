"""Links: named values from any stage to any later one, beside the outputs, and arguments of a batch for any stage.

Note [Values for stages that are no neighbours]
    A schedule moves the output of a stage to the next one. A named value goes from the rank of its stage straight to the rank of each stage
    with the name among its `takes`. Its bytes travel once, however many stages lie between, and its gradient comes back the same way. Named values
    are no actions of the schedule: they wait in the mailbox of the receiver, like targets, and the action that needs them takes them from there.
    Every schedule that can run computes a stage after all earlier ones, and in backward before them, so nothing can get stuck. The loss of a stage
    is a named value for the stage that computes the loss of the pipeline and adds up all of them.

    Gradients of a named value are added up from the farthest stage to the nearest, and the gradient of the output comes last: the order of a model
    that is not cut. So the sum has the same bits, if each stage uses the value once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.pipeline.step.stage import LOSS, Stage
from aiograd.tensors.core import TensorCore


class StageLink(NamedTuple):
    """A named value from one stage to another."""

    name: str
    source: int
    destination: int


class StageLinks(NamedTuple):
    """The named values between the stages of a pipeline, and the arguments of the batch by stage."""

    #: by name, in the order of the sources' `gives`
    links: tuple[StageLink, ...] = ()
    #: for the stages that take arguments of the batch, the names of these; where there are any, for the first stage too
    entries: Mapping[int, tuple[str, ...]] = {}

    def of(self, index: int, *, trains: bool) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
        """The named values of one stage.

        Args:
            index: of the stage.
            trains: with losses.

        Returns:
            Names by source, ascending; and by destination, descending.
        """
        taken: dict[int, tuple[str, ...]] = {}
        given: dict[int, tuple[str, ...]] = {}
        for name, source, destination in self.links:
            if (trains or name != LOSS) and source != destination:  # the last stage adds a loss of its own
                if destination == index:
                    taken[source] = (*taken.get(source, ()), name)
                elif source == index:
                    given[destination] = (*given.get(destination, ()), name)
        return dict(sorted(taken.items())), dict(sorted(given.items(), reverse=True))

    def entry(self, stage: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a batch for one stage, from the arguments for all stages."""
        own = self.entries.get(stage, ())
        if stage:
            return (), {name: value for name, value in kwargs.items() if name in own}
        others = {name for names in self.entries.values() for name in names}.difference(own)
        return args, {name: value for name, value in kwargs.items() if name not in others}

    def check_arguments(self, names: Sequence[str]) -> None:
        """Raise if an argument of a batch has the name of a value that a stage gives."""
        for name, source, destination in self.links:
            if name in names:
                raise ArgumentError(
                    f"an argument {name!r} of a batch, and stage {destination} takes what stage {source} gives by this name; leave it out"
                )


def links_of(stages: Mapping[int, Stage], last: int, loss_stage: int, has_loss_fn: bool) -> StageLinks:
    """The links between the stages of a pipeline.

    Args:
        stages: by number.
        last: the last one.
        loss_stage: the stage that computes the loss.
        has_loss_fn: it does so by a function of its own.

    Raises:
        ArgumentError: a value is given twice, or not taken by a later stage.
    """
    givers: dict[str, int] = {}
    for index, stage in stages.items():
        for name in stage.gives:
            if name != LOSS and givers.setdefault(name, index) != index:
                raise ArgumentError(f"Pipeline: stages {givers[name]} and {index} both give {name!r}; give their values different names")
    takers = {name: [index for index, stage in stages.items() if name in stage.takes] for name in givers}
    links: list[StageLink] = []
    for index, stage in stages.items():
        for name in stage.gives:
            if name == LOSS:
                if index == last and not has_loss_fn:
                    raise ArgumentError(
                        f"Pipeline: stage {index} gives {LOSS!r}, and without loss_fn the last stage returns the loss itself; add it there"
                    )
                links.append(StageLink(name, index, loss_stage))
                continue
            early = [each for each in takers[name] if each <= index]
            if early or not takers[name]:
                what = f"stage {early[0]} takes it, which comes no later" if early else "no stage takes it"
                raise ArgumentError(
                    f"Pipeline: stage {index} gives {name!r}, and {what}; expected a later stage with {name!r} among its `takes`"
                )
            links += [StageLink(name, index, each) for each in takers[name]]
    entries = {index: tuple(name for name in stage.takes if name not in givers) for index, stage in stages.items()}
    return StageLinks(tuple(links), {index: names for index, names in entries.items() if names})


def parted(output: Any, names: Sequence[str], what: str) -> tuple[Any, dict[str, Any]]:
    """The output of a stage, and the values that it gives beside it.

    Args:
        output: as the stage has returned it.
        names: of the values.
        what: the stage, in words.

    Raises:
        ArgumentTypeError: it has not returned a tuple of these. ShapeError: a loss has more than one element.
    """
    if output is None:
        return output, {}
    if output.__class__ is not tuple or len(output) != 1 + len(names):
        found = f"a tuple of {len(output)}" if isinstance(output, tuple) else f"a {type(output).__name__}"
        raise ArgumentTypeError(f"{what} gives {', '.join(map(repr, names))}: expected a tuple of its output and {len(names)} more, found {found}")
    given = dict(zip(names, output[1:], strict=True))
    loss = given.get(LOSS)
    if loss is not None:
        if not isinstance(loss, TensorCore) or loss.dtype.kind != "f":
            kind = f"dtype {loss.dtype}" if isinstance(loss, TensorCore) else f"a {type(loss).__name__}"
            raise ArgumentTypeError(f"{what} gives a loss, and it is {kind}; expected a real Tensor of one element, or None")
        if loss.size != 1:
            raise ShapeError(f"{what} gives a loss of shape {list(loss.shape)}; expected a Tensor of one element")
    return output[0], given
