"""BatchOrder: the examples of each batch of each epoch, as every member and the coordinating process know them. Pure.

Note [The order of an epoch]
    The order of a shuffled epoch e is drawn from the e-th fork of the loader's generator, as in a loop over the loader. So its state is all that is
    needed to know every order. A sampler is iterated anew for each epoch; only members know its batches. So they send a digest of each epoch that
    they read from, and the coordinating process compares them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from aiograd.distributed.local_steps.round_messages import LoaderOutline
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.random import Generator, default_generator

#: epochs of which the order is kept
KEPT = 3


class BatchOrder:
    """The examples of batches.

    Args:
        outline: of the loader.
        sample: returns the batches of the sampler in the next epoch; None: there is no sampler, or it is elsewhere.
    """

    def __init__(self, outline: LoaderOutline, sample: Callable[[], list[list[int]]] | None = None) -> None:
        self.outline = outline
        self._sample = sample
        self._sampled: list[list[list[int]]] = []
        self._orders: dict[int, Sequence[int]] = {}
        self._digests: dict[int, str] = {}

    def indices(self, epoch: int, number: int) -> list[int]:
        """The examples of a batch, in order."""
        if self._sample is not None:
            while len(self._sampled) <= epoch:
                self._sampled.append(self._sample())
            return self._sampled[epoch][number]
        size = self.outline.batch_size
        return list(self._order(epoch)[number * size : (number + 1) * size])

    def digest(self, epoch: int) -> str:
        """SHA-256 over all batches of an epoch."""
        if epoch not in self._digests:
            digest = hashlib.sha256()
            for number in range(self.outline.batches):
                batch = self.indices(epoch, number)
                digest.update(np.array([len(batch), *batch], np.int64).tobytes())
            self._digests[epoch] = digest.hexdigest()
        return self._digests[epoch]

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.outline.generator:
            return range(self.outline.examples)
        if epoch not in self._orders:
            fork = Generator(0).load_state_dict(json.loads(self.outline.generator)).spawn(epoch + 1)[epoch]
            self._orders = {each: order for each, order in self._orders.items() if abs(each - epoch) < KEPT}
            self._orders[epoch] = fork.permutation(self.outline.examples).tolist()
        return self._orders[epoch]


def order_of(loader: Any, what: str) -> BatchOrder:
    """The order of the batches of a loader.

    Args:
        loader: a DataLoader over a sequence.
        what: the method that has returned it, in words.

    Returns:
        The order.

    Raises:
        ArgumentError, ArgumentTypeError: it is no such loader.
    """
    if not all(hasattr(loader, name) for name in ("batch_sampler", "batch_size", "drop_last", "shuffle", "source", "read")):
        raise ArgumentTypeError(f"{what} returned a {type(loader).__name__}; expected an ag.data.DataLoader")
    if not hasattr(loader.source, "__len__") or not hasattr(loader.source, "__getitem__"):
        raise ArgumentTypeError(f"{what} returned a loader of a stream ({type(loader.source).__name__}); expected a source with len() and indices")
    sampler = loader.batch_sampler
    if sampler is None and loader.batch_size is None:
        raise ArgumentError(f"{what} returned a loader without batches; expected a batch_size or a batch_sampler")
    if not len(loader):
        raise ArgumentError(f"{what} returned a loader with no batch in an epoch ({len(loader.source)} examples)")
    generator = json.dumps((loader.generator or default_generator()).state_dict()) if loader.shuffle else ""
    order = BatchOrder(
        LoaderOutline(len(loader.source), len(loader), loader.batch_size or 0, loader.drop_last, generator, ""),
        None if sampler is None else lambda: _sampled(sampler, what, len(loader)),
    )
    if sampler is not None:
        order.outline = dataclasses.replace(order.outline, sampler=order.digest(0))
    return order


def _sampled(sampler: Iterable[Sequence[int]], what: str, count: int) -> list[list[int]]:
    batches = [list(map(int, batch)) for batch in sampler]
    if len(batches) != count or not all(batches):
        raise ArgumentError(f"{what}: its sampler gave {len(batches)} batches, some of them empty or not; expected {count} that are not empty")
    return batches


def loader_difference(expected: LoaderOutline, found: LoaderOutline) -> str | None:
    """The first difference between the data sets of two members, in words; None if there is none."""
    for name, text in (("examples", "examples"), ("batches", "batches in an epoch"), ("batch_size", "examples in a batch")):
        one, other = getattr(expected, name), getattr(found, name)
        if one != other:
            return f"{other} {text} instead of {one}"
    if (expected.drop_last, not expected.generator) != (found.drop_last, not found.generator):
        return "another order: only one of the two loaders shuffles, or leaves a last batch out"
    if (expected.generator, expected.sampler) != (found.generator, found.sampler):
        return "another order of batches: give the loaders generators of the same seed, ag.data.DataLoader(..., generator=ag.Generator(0))"
    return None
