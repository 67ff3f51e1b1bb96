"""The data of the demo: scikit-learn's handwritten digits, which come with it, so nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.errors import AiogradError

#: images in a batch, about
BATCH = 64
#: images to learn from, of 1,797; the rest is for testing
TRAINING = 1437


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) float32 from 0 to 1, and labels (n,) int64; made by `load`."""

    images: Any
    labels: Any
    test_images: Any
    test_labels: Any

    def batches(self, epoch: int) -> list[tuple[Any, Any]]:
        """The images and labels of each batch of an epoch."""
        return [(self.images[batch], self.labels[batch]) for batch in batches(len(self.labels), epoch)]

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return len(batches(len(self.labels), 0))

    @staticmethod
    def load() -> Digits:
        """The digits, cut into training and test by a fixed seed.

        Raises:
            AiogradError: scikit-learn is not installed.
        """
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise AiogradError("the demo takes its digits from scikit-learn, which is not installed: pip install 'aiograd[demo]'") from None
        raw = load_digits()
        images = (raw.images / 16).astype(np.float32)[:, None]
        labels = raw.target.astype(np.int64)
        order = np.random.default_rng(0).permutation(len(labels))
        train, test = order[:TRAINING], order[TRAINING:]
        return Digits(images[train], labels[train], images[test], labels[test])


def batches(count: int, epoch: int) -> list[Any]:
    """Which of `count` images are in each batch of an epoch; depends on nothing but these two numbers."""
    return np.array_split(np.random.default_rng(epoch).permutation(count), max(count // BATCH, 1))
