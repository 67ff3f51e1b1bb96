"""PoissonSampler: batches in which every example is with the same probability, independently of all others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.random import Generator, default_generator


class PoissonSampler:
    """Index arrays of batches, as the accounting of `aiograd.optim.Private` supposes them: of any length, 0 included.

    Every loop draws new batches. A `DataLoader` takes it as ``batch_sampler``, where no batch can be empty; without a `generator` the loader's
    generator of the epoch draws, so that an epoch that is resumed has the same batches.

    Args:
        dataset_size: examples of the data set, at least 1.
        sample_rate: probability of an example to be in a batch, above 0 and at most 1.
        steps: batches of a loop, at least 0; ``len(sampler)``.
        generator: draws the batches; None: the default generator at the time of the draw.

    Raises:
        ArgumentError: a setting out of its range. ArgumentTypeError: no such generator.

    Source: Poisson sampling, as in Mironov, Talwar and Zhang, Rényi differential privacy of the sampled Gaussian mechanism (2019).

    >>> sampler = ag.data.PoissonSampler(1000, 0.1, 2, generator=ag.Generator(0))
    >>> [len(batch) for batch in sampler]
    [89, 121]
    """

    def __init__(self, dataset_size: int, sample_rate: float, steps: int, *, generator: Generator | None = None) -> None:
        for name, number, least in (("dataset_size", dataset_size, 1), ("steps", steps, 0)):
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least:
                raise ArgumentError(f"PoissonSampler({name}={number!r}): expected a whole number of at least {least}")
        if isinstance(sample_rate, bool) or not isinstance(sample_rate, (int, float, np.floating)) or not 0 < sample_rate <= 1:
            raise ArgumentError(f"PoissonSampler(sample_rate={sample_rate!r}): expected a probability above 0 and at most 1")
        if generator is not None and not isinstance(generator, Generator):
            raise ArgumentTypeError(f"PoissonSampler: expected a Generator or None, found {type(generator).__name__}")
        self.dataset_size: int = int(dataset_size)
        self.sample_rate: float = float(sample_rate)
        self.steps: int = int(steps)
        self.generator = generator

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        for _ in range(self.steps):
            draws = (self.generator or default_generator()).uniform(self.dataset_size, dtype=np.float64).numpy()
            yield np.flatnonzero(draws < self.sample_rate).astype(np.int64)
