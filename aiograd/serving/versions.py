"""Versions of the weights of a service: snapshots, the store that numbers and retains them, and the shares of requests that they answer.

Note [Copy on write]
    A snapshot compares each array with the array of the same path in the version before, bit by bit, and takes that array if they agree. So a
    version costs as much memory as it differs from the one before, and two versions of one state share all arrays. Arrays of a version
    are read-only and die with the last version, batch or answer that refers to them.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, RejectedVersionError, VersionNotFoundError
from aiograd.serving.arguments import checked_number, checked_real

Array = np.ndarray[Any, Any]
Precision = Literal["exact", "bfloat16"]

#: words that are compared or rounded at once, so that temporary arrays stay in the cache
_CHUNK = 1 << 16
#: words that are compared first: of an array that has changed, these differ in most cases
_FIRST = 1 << 8
#: differences that an error names
_NAMED = 3


@dataclass(frozen=True, eq=False)
class Version:
    """A committed state of a model. Versions compare by identity: a state that is published twice gives two versions with one digest.

        >>> version = ag.serving.Version.of(17, {"weight": np.ones(3, np.float32)}, digest="0f3c", metrics={"loss": 0.5})
        >>> version.number, version.nbytes, version.is_finite, dict(version.metrics)
        (17, 12, True, {'loss': 0.5})

    Attributes:
        number: its number; numbers rise by one and are never given twice.
        digest: `aiograd.running.digest.state_digest` of the state.
        parent: number of the version that served when this one was published; None for the first.
        state: read-only arrays by path.
        metrics: read-only numbers by name, given when it was published.
        created: seconds since the epoch.
        nbytes: bytes of its arrays; an array under two paths counts once.
        is_finite: True if the state has neither NaN nor infinity.
    """

    number: int
    digest: str
    parent: int | None
    state: Mapping[str, Array]
    metrics: Mapping[str, float]
    created: float
    nbytes: int
    is_finite: bool

    @classmethod
    def of(
        cls, number: int, state: Mapping[str, Array], *, digest: str, parent: int | None = None, metrics: Mapping[str, float] | None = None,
        created: float = 0.0, is_finite: bool | None = None,
    ) -> Version:  # fmt: skip
        """A version of a state; its arrays become read-only and are not copied.

        Args:
            number, state, digest, parent, metrics, created: see `Version`.
            is_finite: True if the state is known to be finite; None to look.

        Returns:
            The version.

        Raises:
            ArgumentTypeError: the metrics are no numbers by name.
        """
        try:
            measured = {str(name): float(value) for name, value in dict(metrics or {}).items()}
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(f"metrics of version {number}: expected numbers by name, found {metrics!r}") from error
        for array in state.values():
            array.setflags(write=False)
        nbytes = sum({id(array): array.nbytes for array in state.values()}.values())
        finite = all_finite(state) if is_finite is None else is_finite
        return cls(number, digest, parent, MappingProxyType(dict(state)), MappingProxyType(measured), created, nbytes, finite)


def copies(tensors: Mapping[str, Array], base: Version | None = None, precision: Precision = "exact") -> Iterator[tuple[str, Array]]:
    """Paths and read-only copies of arrays in C order, one after the other; an array with the bits of base's of that path is base's array.

    Paths that share one array share one copy, as tied weights do. With the precision "bfloat16", float32 arrays are rounded to the nearest
    bfloat16, ties to even, and stay float32 arrays with low 16 bits of zero.
    """
    before: Mapping[str, Array] = {} if base is None else base.state
    copied: dict[object, Array] = {}
    for path, array in tensors.items():
        memory = (array.__array_interface__["data"][0], array.strides, array.shape, array.dtype)
        if memory not in copied:
            copied[memory] = _copy_on_write(array, before.get(path), precision)
        yield path, copied[memory]


def snapshot(tensors: Mapping[str, Array], base: Version | None = None, precision: Precision = "exact") -> dict[str, Array]:
    """All `copies`."""
    return dict(copies(tensors, base, precision))


def _copy_on_write(array: Array, before: Array | None, precision: Precision) -> Array:
    copy = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    if precision == "bfloat16" and copy.dtype == np.float32:
        copy = np.array(copy, order="C")
        _round_to_bfloat16(copy.reshape(-1).view(np.uint32))
    if before is not None and _same_bits(copy, before):
        return before
    if np.may_share_memory(copy, array):
        copy = copy.copy(order="C")
    copy.setflags(write=False)
    return copy


def _round_to_bfloat16(words: Array) -> None:
    """Round the bits of float32 numbers in place. NaN becomes a quiet NaN, and the largest numbers become infinite."""
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        is_nan = (chunk & 0x7FFFFFFF) > 0x7F800000
        quiet = chunk[is_nan] | 0x00400000
        chunk += ((chunk >> 16) & 1) + np.uint32(0x7FFF)
        chunk[is_nan] = quiet
        chunk &= 0xFFFF0000


def _same_bits(left: Array, right: Array) -> bool:
    """True if two arrays have one shape, one dtype and the same bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    bytes_left, bytes_right = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (left, right))
    whole = left.nbytes & ~7
    words_left, words_right = bytes_left[:whole].view(np.uint64), bytes_right[:whole].view(np.uint64)
    chunks = pairwise((0, _FIRST, *range(_CHUNK, len(words_left), _CHUNK), len(words_left)))
    is_same = (bytes_left[whole:] == bytes_right[whole:]).all()
    return bool(is_same and all((words_left[start:stop] == words_right[start:stop]).all() for start, stop in chunks))


def all_finite(state: Mapping[str, Array], base: Version | None = None) -> bool:
    """True if a state has neither NaN nor infinity; arrays of a `base` that is finite are not looked at again."""
    known: Mapping[str, Array] = base.state if base is not None and base.is_finite else {}
    return all(known.get(path) is array or is_finite(array) for path, array in state.items())


def is_finite(array: Array) -> bool:
    """True if an array has neither NaN nor infinity."""
    dtype = array.dtype
    if dtype.kind in "biu" or not array.size:
        return True
    with np.errstate(all="ignore"):
        if dtype.char in "fd" and array.flags.c_contiguous:
            flat = array.reshape(-1)
            if math.isfinite(flat.dot(flat)):  # a sum of squares is finite only if all of them are; of large numbers it may be infinite
                return True
        if dtype.name == "bfloat16":
            return bool(((array.view(np.uint16) & 0x7F80) != 0x7F80).all())
        parts = (array.real, array.imag) if dtype.kind == "c" else (array,)
        return all(math.isfinite(part.min()) and math.isfinite(part.max()) for part in parts)  # a NaN among the numbers is the minimum


def check_fits(state: Mapping[str, Array], template: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of `state` in the order of `template`; an ArgumentError names the first differences in paths, shapes and dtypes."""
    faults = [f"no {path!r}" for path in template if path not in state] + [f"unexpected {path!r}" for path in state if path not in template]
    for path, wanted in template.items():
        array = state.get(path, wanted)
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            faults.append(f"{path!r} is {array.dtype} {list(array.shape)}, expected {wanted.dtype} {list(wanted.shape)}")
    if faults:
        more = f", and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise ArgumentError(f"the state is of another model: {', '.join(faults[:_NAMED])}{more}. Give a state with the paths of the served model.")
    return {path: state[path] for path in template}


class VersionStore:
    """The versions of a server. Kept are the last `keep` that arrived, the one that serves, and the pinned ones."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        #: number of the next version
        self.next_number = 1
        self._kept: dict[int, Version] = {}  # in the order of arrival
        self._served: list[int] = []  # each number once, the present one last
        self.pinned: frozenset[int] = frozenset()
        #: numbers of kept versions that have never served
        self.candidates: set[int] = set()

    @property
    def current(self) -> Version:
        """The version that serves."""
        if not self._served:
            raise VersionNotFoundError("no version serves yet: add or adopt one first")
        return self._kept[self._served[-1]]

    @property
    def versions(self) -> tuple[Version, ...]:
        """All versions that are kept, candidates too, by number."""
        return tuple(self._kept[number] for number in sorted(self._kept))

    def get(self, number: int) -> Version:
        """The version of a number; a VersionNotFoundError says which are kept."""
        version = self._kept.get(int(number)) if isinstance(number, Integral) and not isinstance(number, bool) else None
        if version is None:
            kept = ", ".join(map(str, sorted(self._kept))) or "none"
            raise VersionNotFoundError(f"version {number!r} is not kept; kept: {kept}. Keep more with `keep`.")
        return version

    def admit(self, version: Version, *, promote: bool) -> None:
        """Keep a version; it serves if `promote`, otherwise it is a candidate. One of a leader or a log replaces another of its number."""
        if promote:
            self._serve(version)
        else:
            self.candidates.add(version.number)
        self._kept.pop(version.number, None)  # the last in the order of arrival is the new one
        self._kept[version.number] = version
        self.skip(version.number)
        self.retain()

    def skip(self, number: int) -> None:
        """Give only higher numbers than this one from now on."""
        self.next_number = max(self.next_number, number + 1)

    def promote(self, number: int) -> Version:
        """Let a version serve that is kept."""
        version = self.get(number)
        self._serve(version)
        self.retain()
        return version

    def rollback(self, number: int | None = None) -> Version:
        """Let the version serve that served before the present one, or `number`; a second rollback goes one further back."""
        if number is None:
            if len(self._served) < 2:
                raise VersionNotFoundError(f"rollback from version {self.current.number}: none that is kept served before it")
            number = self._served[-2]
        version = self.get(number)
        if version.number not in self._served:
            return self.promote(version.number)
        del self._served[self._served.index(version.number) + 1 :]
        self.retain()
        return version

    def _serve(self, version: Version) -> None:
        if not version.is_finite:
            raise RejectedVersionError(f"version {version.number} may not serve: its state has NaN or infinity. Publish a finite one or a candidate.")
        self._served = [each for each in self._served if each != version.number] + [version.number]
        self.candidates.discard(version.number)

    def retain(self, pinned: Iterable[int] | None = None) -> None:
        """Drop all but the last versions, the present one and the pinned; forget what served before a version that was dropped.

        `pinned` are the numbers that are pinned from now on, such as the versions of a split or a shadow; None: the pinned versions stay pinned.
        """
        self.pinned = self.pinned if pinned is None else frozenset(pinned)
        stay = {*list(self._kept)[-self._keep :], *self._served[-1:], *self.pinned}
        self._kept = {number: version for number, version in self._kept.items() if number in stay}
        self.candidates &= stay
        dropped = [place for place, number in enumerate(self._served) if number not in stay]
        del self._served[: dropped[-1] + 1 if dropped else 0]


class VersionSplit:
    """Chooses the version that answers a request, by shares that add up to 1.

    A key always gets the same version. Requests without a key are spread evenly: after any number of them, each version has answered its
    share to less than one request (Tijdeman, "The chairman assignment problem", 1980).
    """

    def __init__(self, shares: Mapping[int, float], known: Collection[int]) -> None:
        expected = "expected shares of at least 0 by numbers of versions, 1 in all"
        if not isinstance(shares, Mapping):
            raise ArgumentTypeError(f"split({shares!r}): {expected}")
        checked = [(checked_number("split", number), checked_real("split", share, expected, most=2.0)) for number, share in shares.items()]
        weights = dict(sorted(checked))
        total = math.fsum(weights.values())
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
            if not isinstance(key, (str, bytes, Integral)):
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
