"""StepRandom: the random numbers of one step, the same for any order and any place of its stages.

Ranks run side by side, so the numbers that each draws from one generator would depend on timing. Instead every forward of a stage has a default
generator of its own; its seed is made of the step's seed and the numbers of stage and microbatch. The step's seed comes from the default
generator of the caller of the step, by forking it: the next step has another one. A recomputation (of a checkpointed part of a stage, of a stage of a
lost worker) draws the same numbers again. So does the next step after one that was not committed: it takes that step again. Where the default
generator is another one by then, or was put into a state from outside, the next step forks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.running.random import drawing_from, forked_seed, generator_of
from aiograd.running.random_streams import RandomStream

_WORD = 2**63


class StepRandom:
    """Default generators for the stages and microbatches of one step.

    A `Pipeline` makes one for each step and evaluation, and the same for a step that is taken again, since it was not committed. Make one yourself to
    draw the same numbers in a serial run, in the place of the step::

        random = StepRandom()
        for m, (x, target) in enumerate(microbatches):
            for s, stage in enumerate(stages):
                with random.at(s, m):
                    x = stage(x)
            with random.at(None, m):
                loss = loss_fn(x, target)
            await (loss / len(microbatches)).backward()

    Args:
        seed: two ints from 0 to 2**63 - 1; None: forked from the default generator, as a pipeline does.

    Raises:
        ArgumentError: something else.

    >>> random = ag.pipeline.StepRandom(seed=(1, 2))
    >>> with random.at(0, 1):
    ...     first = ag.rand(3)
    >>> with random.at(0, 1):
    ...     second = ag.rand(3)
    >>> (first == second).all()
    tensor(True)
    """

    __slots__ = ("seed", "first")

    def __init__(self, seed: Sequence[int] | None = None) -> None:
        words: Any = forked_seed() if seed is None else seed
        if not isinstance(words, (list, tuple)) or len(words) != 2 or not all(type(word) is int and 0 <= word < _WORD for word in words):
            raise ArgumentError(f"StepRandom(seed={seed!r}): expected two ints from 0 to 2**63 - 1")
        self.seed: tuple[int, ...] = tuple(words)
        #: the number of the first microbatch of this replica, where each of several has a part of them
        self.first: int = 0

    def at(self, stage: int | None, microbatch: int) -> AbstractContextManager[None]:
        """Make the generator of a stage and microbatch, from its start, the default one within the block.

        Args:
            stage: its number; None: of the loss function.
            microbatch: its number.

        Returns:
            A context manager.
        """
        return drawing_from(generator_of(RandomStream((*self.seed, 0 if stage is None else stage + 1, self.first + microbatch))))
