"""Shares of requests that versions answer."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from itertools import accumulate

from aiograd.errors import ArgumentError, ArgumentTypeError, VersionNotFoundError


class VersionSplit:
    """Chooses the version that answers a request, by shares that add up to 1.

    A key always gets the same version. Requests without a key are spread evenly: after any number of them, each version has answered its
    share to less than one request (Tijdeman, "The chairman assignment problem", 1980).
    """

    def __init__(self, shares: Mapping[int, float], known: Collection[int]) -> None:
        expected = "expected shares of at least 0 by numbers of versions, 1 in all"
        try:
            weights = {number: float(share) for number, share in sorted(shares.items())}
        except (AttributeError, TypeError, ValueError) as error:
            raise ArgumentTypeError(f"split({shares!r}): {expected}") from error
        total = math.fsum(weights.values()) if all(0 <= weight <= 2 for weight in weights.values()) else math.nan
        if not abs(total - 1) <= 1e-6:
            raise ArgumentError(f"split({shares!r}): {expected}")
        unknown = [number for number in weights if number not in known]
        if unknown:
            raise VersionNotFoundError(f"split({shares!r}): versions {unknown} are not kept; kept: {sorted(known)}")
        #: number -> share, without shares of 0
        self.shares = {number: weight / total for number, weight in weights.items() if weight}
        self._numbers = list(self.shares)
        self._bounds = list(accumulate(self.shares.values()))[:-1]
        self._owed = dict.fromkeys(self.shares, 0.0)

    def choose(self, key: str | bytes | int | None = None) -> int:
        """The number of the version that answers; None for a key spreads requests evenly."""
        if key is not None:
            if not isinstance(key, (str, bytes, int)):
                raise ArgumentTypeError(f"the key of a request: expected str, bytes or int, found {type(key).__name__}")
            text = key if isinstance(key, bytes) else str(key).encode("utf-8", "surrogatepass")
            place = (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) / (1 << 53)  # in [0, 1)
            return self._numbers[bisect_right(self._bounds, place)]
        least = 1 / max(2 * len(self._numbers) - 2, 1)
        for number, share in self.shares.items():
            self._owed[number] += share
        due = [number for number, owed in self._owed.items() if owed >= least - 1e-9]
        chosen = min(due, key=lambda number: (1 - least - self._owed[number]) / self.shares[number])
        self._owed[chosen] -= 1
        return chosen
