"""Random numbers from an explicit `Generator`; `aiograd.running.random_streams` has their streams and the replay of draws.

Note [State belongs to objects, and the default to the caller]
    A `Generator` is an object that is passed around. The default generator is in a ContextVar, so `seed` in one task changes nothing for another,
    and a task inherits the generator of the task that started it. Tasks and threads without one use the generator of the process, which `seed` sets
    at the top level (Note [Top level] in `aiograd.running.top_level`).

Source: numpy's PCG64 and SeedSequence. Streams of bits are the same on every platform and numpy version; numpy may improve how it makes a
distribution of them (NEP 19).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import index
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running import devices
from aiograd.running.modes import ModeScope, current_mode, get_default_dtype, tell_compiler
from aiograd.running.random_parameters import check, check_interval, check_normal, check_probability, checked_shape, in_unit_steps
from aiograd.running.random_streams import RandomStream, entropy_of, is_recording_or_replaying, stream_now, stream_of, tapes
from aiograd.running.top_level import is_top_level
from aiograd.tensors.core import make
from aiograd.tensors.tensor import Tensor

D = TypeVar("D", bound=Callable[..., Any])


def _drawing(method: D) -> D:
    """A method that draws Tensors; a function that is being compiled repeats the draw at every run, from the generator that is the default then."""

    @functools.wraps(method)
    def draw(self: Generator, *args: Any, **kwargs: Any) -> Any:
        trace = current_mode().trace
        if trace is None:
            return method(self, *args, **kwargs)
        if "device" in kwargs and devices.adopts(kwargs["device"]):
            kwargs["device"] = "cpu"  # the device is there for this call alone, and takes tensors of the host
        with ModeScope(trace=None):
            tensor = method(self, *args, **kwargs)
        is_default = self is (_default.get() or _process_default)
        trace.drew(method.__name__, lambda: method(default_generator() if is_default else self, *args, **kwargs), tensor)
        return tensor

    return draw  # type: ignore[return-value]


class Generator:
    """A reproducible source of random Tensors.

    The same seed gives the same numbers in the same order. Draws are atomic: threads and tasks may share a generator, but then the order of their
    draws depends on timing; `spawn` gives each its own.

    Args:
        seed: an int of at least 0, or a sequence of them; None takes fresh entropy of the operating system (`state_dict` contains it).

    >>> first, second = ag.Generator(0), ag.Generator(0)
    >>> (ag.rand(3, generator=first) == ag.rand(3, generator=second)).all()
    tensor(True)
    """

    __slots__ = ("_stream", "_lock", "__weakref__")

    def __init__(self, seed: int | Sequence[int] | None = None) -> None:
        tell_compiler("makes a generator of random numbers")
        self._stream = RandomStream(entropy_of(seed))
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        entropy, key = self._stream.entropy, self._stream.spawn_key
        return f"Generator(seed={entropy}{f', spawn_key={key}' if key else ''})"

    @_drawing
    def normal(self, shape: int | Sequence[int] = (), *, mean: float = 0.0, std: float = 1.0, dtype: Any = None) -> Tensor:
        """Normally distributed numbers.

        Args:
            shape: of the result.
            mean, std: of the distribution; `std` at least 0.
            dtype: a real floating dtype; the default dtype if None.

        Returns:
            A Tensor without gradient.

        Raises:
            ArgumentError: a `mean` or `std` that is not finite, or a `std` below 0.
        """
        check_normal("normal", mean, std)
        size, wanted, drawn = checked_shape(shape), *_float_dtypes(dtype)
        array = self._draw(lambda rng: rng.standard_normal(size, dtype=drawn))
        return _tensor(array * drawn.type(std) + drawn.type(mean), wanted)

    @_drawing
    def uniform(self, shape: int | Sequence[int] = (), *, low: float = 0.0, high: float = 1.0, dtype: Any = None) -> Tensor:
        """Numbers uniformly distributed between `low` and `high`.

        Args:
            shape: of the result.
            low, high: ends of the interval, ``low <= high``; `high` is met only by rounding.
            dtype: a real floating dtype; the default dtype if None.

        Returns:
            A Tensor without gradient.

        Raises:
            ArgumentError: no such interval.
        """
        check_interval("uniform", low, high)
        size, wanted, drawn = checked_shape(shape), *_float_dtypes(dtype)
        array = in_unit_steps(self._draw(lambda rng: rng.random(size, dtype=drawn)), wanted)
        return _tensor(array * drawn.type(high - low) + drawn.type(low), wanted)

    @_drawing
    def integers(self, low: int, high: int, shape: int | Sequence[int] = (), *, dtype: Any = np.int64) -> Tensor:
        """Integers uniformly distributed in [low, high).

        Args:
            low, high: ends of the interval, ``low < high``.
            shape: of the result.
            dtype: an integer dtype.

        Returns:
            A Tensor.

        Raises:
            ArgumentError: no such interval, or one that the dtype does not hold.
            ArgumentTypeError: `dtype` is no integer dtype.
        """
        size, wanted = checked_shape(shape), np.dtype(dtype)
        if wanted.kind not in "iu":
            raise ArgumentTypeError(f"integers(dtype={wanted}): expected an integer dtype")
        limits = np.iinfo(wanted)
        check(
            f"integers({low}, {high}, dtype={wanted})", "ints with low < high within the range of the dtype",
            lambda: limits.min <= index(low) < index(high) <= limits.max + 1,
        )  # fmt: skip
        return _tensor(self._draw(lambda rng: rng.integers(low, high, size, dtype=wanted.type)), wanted)

    @_drawing
    def bernoulli(self, p: float, shape: int | Sequence[int] = (), *, dtype: Any = None) -> Tensor:
        """Numbers that are 1 with probability `p`, else 0.

        Args:
            p: in [0, 1].
            shape: of the result.
            dtype: of the result, bool included; the default dtype if None.

        Returns:
            A Tensor without gradient.
        """
        check_probability("bernoulli", p)
        size, wanted = checked_shape(shape), get_default_dtype() if dtype is None else np.dtype(dtype)
        return _tensor(self._draw(lambda rng: rng.random(size)) < p if 0 < p < 1 else np.full(size, p == 1), wanted)

    @_drawing
    def dropout_mask(self, shape: int | Sequence[int], p: float, *, dtype: Any = None, device: str = "cpu") -> Tensor:
        """A mask for dropout: 0 with probability `p`, else ``1 / (1 - p)``, so that the mean is 1.

        Args:
            shape: of the result.
            p: probability of dropping, in [0, 1]; 1 drops everything.
            dtype: a real floating dtype; the default dtype if None.
            device: device of the mask. A device that draws masks itself gets a seed from this generator: its masks are as reproducible
                as masks of the host, but differ from them.

        Returns:
            A Tensor without gradient.
        """
        check_probability("dropout_mask", p)
        size, wanted = checked_shape(shape), _float_dtypes(dtype)[0]
        there = devices.device(device)
        if there is not None:
            if p in (0, 1) or not isinstance(there, devices.DrawsMasks):
                return self.dropout_mask(shape, p, dtype=dtype).to(device)
            first, second = self._draw(lambda rng: rng.integers(0, 2**64, 2, dtype=np.uint64)).tolist()
            mask: Tensor = make(there.dropout_mask((first, second), size, p, wanted))
            return mask
        if p in (0, 1):
            return _tensor(np.full(size, 1 - p), wanted)
        keep = self._draw(lambda rng: rng.random(size, dtype=np.float32)) >= np.float32(p)
        return _tensor(keep * wanted.type(1 / (1 - p)), wanted)

    @_drawing
    def standard_gamma(self, concentration: Any) -> Tensor:
        """Numbers of gamma distributions with scale 1.

        Args:
            concentration: an array of float32 or float64, above 0; the result has its shape and dtype.

        Returns:
            A Tensor without gradient.

        Raises:
            ArgumentError: numbers not above 0, or another dtype.
        """
        alpha = np.asarray(concentration)
        if alpha.dtype.kind != "f" or not np.all(alpha > 0):
            raise ArgumentError(f"standard_gamma: found dtype {alpha.dtype}, expected real floating numbers above 0")
        drawn = _float_dtypes(alpha.dtype)[1]
        return _tensor(self._draw(lambda rng: rng.standard_gamma(alpha.astype(drawn, copy=False), dtype=drawn)), alpha.dtype)

    @_drawing
    def permutation(self, n: int) -> Tensor:
        """The numbers 0 to `n` - 1 in random order, int64: ``x[generator.permutation(len(x))]`` shuffles.

        Args:
            n: how many, at least 0.

        Returns:
            A vector.

        Raises:
            ArgumentError: no such number.
        """
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
            raise ArgumentError(f"permutation({n!r}): expected an int of at least 0")
        return _tensor(self._draw(lambda rng: rng.permutation(int(n))), np.dtype(np.int64))

    def _draw(self, make_array: Callable[[np.random.Generator], Any]) -> Any:
        with self._lock:
            return make_array(stream_now(self, self._stream).numpy)

    def spawn(self, count: int) -> list[Generator]:
        """Generators independent of this one and of each other, one per worker or task. Draws nothing; a second call gives others.

        Args:
            count: how many, at least 0.

        Returns:
            The generators.

        Raises:
            ArgumentError: no such number.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ArgumentError(f"spawn({count!r}): expected an int of at least 0")
        with self._lock:
            return [generator_of(stream) for stream in stream_now(self, self._stream).spawn(count)]

    def fork(self) -> Generator:
        """One generator independent of this one; see `spawn`.

        Returns:
            The generator.
        """
        return self.spawn(1)[0]

    def clone(self) -> Generator:
        """A generator that will give the same numbers as this one from here on.

        Returns:
            The generator.
        """
        with self._lock:
            return generator_of(self._stream.clone())

    def __copy__(self) -> Generator:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Generator:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ArgumentTypeError(
            "generators cannot be pickled: pickles execute code when they are loaded. Send generator.state_dict(), and call load_state_dict() of "
            "another there; spawn() gives each worker a generator of its own."
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator, as ints, lists and strings that JSON can hold.

        Returns:
            A dict for `load_state_dict`.
        """
        with self._lock:
            return self._stream.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Continue from `state`, made by `state_dict`; returns the generator.

        Args:
            state: the state.

        Returns:
            The generator itself.

        Raises:
            ArgumentError: `state` is no state of a Generator. Nothing has changed.
        """
        stream = stream_of(state)
        tell_compiler("sets the state of a generator of random numbers")
        with self._lock:
            self._stream = stream
        return self


def generator_of(stream: RandomStream) -> Generator:
    """A generator that draws from a stream."""
    tell_compiler("makes a generator of random numbers")
    generator = Generator.__new__(Generator)
    generator._stream = stream
    generator._lock = threading.Lock()
    return generator


def _float_dtypes(dtype: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The dtype of the result, and the one to draw in."""
    wanted = get_default_dtype() if dtype is None else np.dtype(dtype)
    if wanted.kind != "f":
        raise ArgumentTypeError(f"dtype {wanted}: expected a real floating dtype such as float32 or float64")
    return wanted, np.dtype(np.float64 if wanted.itemsize > 4 else np.float32)


def _tensor(array: Any, dtype: np.dtype[Any]) -> Tensor:
    return make(np.asarray(array, dtype=dtype))  # type: ignore[no-any-return]


_default: ContextVar[Generator | None] = ContextVar("aiograd_default_generator", default=None)
#: True within `drawing_from`
_is_scoped: ContextVar[bool] = ContextVar("aiograd_default_generator_of_a_block", default=False)
_foreign_lock = threading.Lock()
#: the generator of tasks and threads that have set none; made when it is first asked for, from fresh entropy, unless `seed` was called
_process_default: Generator | None = None
_making_default = threading.Lock()


def _default_of_process() -> Generator:
    global _process_default
    if _process_default is None:
        with _making_default:
            if _process_default is None:
                with ModeScope(trace=None):
                    _process_default = Generator()
    return _process_default


def default_generator() -> Generator:
    """The generator used where none is given: the one that `seed` set in the running task or in the one that started it, else in the process.

    Returns:
        The generator.
    """
    recordings, source = tapes()
    generator = None if source is None else source.next_default()
    if generator is None:
        generator = _default.get() or _default_of_process()
    for recording in recordings:
        recording.draws.defaults.append(generator)
    return generator


def seed(number: int | Sequence[int]) -> Generator:
    """Make a new default generator with this seed and return it.

    At the top level (a line of a script, a REPL, a notebook cell, or a function that such a line calls) it is set for the process: for every task
    and thread that has not set its own. In a task, a thread or a callback it is set for that one and the tasks it starts from now on.

    Args:
        number: an int of at least 0, or a sequence of them.

    Returns:
        The generator.
    """
    global _process_default
    generator = Generator(number)
    if is_top_level():
        _process_default = generator
        _default.set(None)
    else:
        _default.set(generator)
    return generator


@contextmanager
def drawing_from(generator: Generator) -> Iterator[None]:
    """Within the block `generator` is the default generator of the running task, and of those it starts."""
    tell_compiler("draws from another generator for a while")
    token, within = _default.set(generator), _is_scoped.set(True)
    try:
        yield
    finally:
        _default.reset(token)
        _is_scoped.reset(within)


@contextmanager
def foreign_draws(state: Callable[[], Any], go_to: Callable[[Any], None], reseed: Callable[[int], Any]) -> Iterator[None]:
    """A block that draws from the random numbers of another library, with a generator that belongs to the process.

    As a rule it draws from where that generator is. Where a region is recomputed, it draws the same numbers as the first time; where the default
    generator belongs to a block (`drawing_from`), the other one is seeded from it. In both cases it is put back afterwards, and one block runs at a
    time.

    Args:
        state: returns the state of the other generator.
        go_to: puts it into such a state.
        reseed: seeds it with an int.
    """
    recordings, source = tapes()
    is_scoped = source is None and _is_scoped.get()
    if not recordings and source is None and not is_scoped:
        yield
        return
    with _foreign_lock:
        before = state()
        try:
            if source is not None:
                again = source.next_foreign()
                if again is not None:
                    go_to(again)
            elif is_scoped:
                reseed(int(default_generator().integers(0, 2**63 - 1).item()))
            if recordings:
                began = state()
                for recording in recordings:
                    recording.draws.note(None, began)
            yield
        finally:
            if source is not None or is_scoped:
                go_to(before)


def forked_seed() -> tuple[int, ...]:
    """Two ints from 0 to 2**63 - 2, from a fork of the default generator."""
    return tuple(default_generator().fork().integers(0, 2**63 - 1, 2).tolist())


def draws_are_steered() -> bool:
    """True if `foreign_draws` would do anything here."""
    return is_recording_or_replaying() or _is_scoped.get()
