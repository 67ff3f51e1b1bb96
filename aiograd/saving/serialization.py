"""Saving and loading state: safetensors files, written atomically, with nothing in them that could be executed.

Note [Nested states in a flat format]
    A safetensors file is a table of named arrays with text beside it. A saved state may be nested: a module's state beside an optimizer's,
    step counters and options. Arrays are stored under their path, keys joined by dots (``model.0.weight``), so other tools can read them;
    the nesting and all values that are no arrays are JSON in the file's metadata, under the key ``aiograd``. A
    flat dict of arrays has no such metadata. Files of other tools load as flat dicts.

Note [Atomic]
    The new file is written beside the old one, flushed to the disk and put in its place by one rename: readers see the old state
    or the new one, even after a crash midway.

Note [Saves of one path]
    A save that was given up runs to its end on its thread, perhaps after a later one. So the saves of a path have numbers, in the order in which they
    were begun, and one that is ready after a newer one was put in place is dropped. The numbers are kept as long as a save of the path is under way.

Rejected: pickle and everything built on it, which executes code from the file; ``.npz``, which cannot be mapped into memory.

Source: the format of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.plain import plain_array

#: key of the metadata entry that holds the nesting
STRUCTURE = "aiograd"

_DTYPES = frozenset("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64".split())


def save(state: Mapping[str, Any], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Write a state to a safetensors file, replacing an older one atomically.

    Blocks while it writes: in a service, ``await ag.offload(ag.save, state, path)``.

    Args:
        state: a dict of Tensors or arrays, such as a module's ``state_dict()``; or nested dicts, lists and tuples of them, of numbers,
            strings, booleans and None, such as ``{"model": ..., "optimizer": ..., "epoch": 3}``.
        path: path of the file.
        metadata: text to store beside it, read by `load_metadata`.

    Raises:
        ArgumentTypeError: a value that cannot be saved, with its path. ArgumentError: a nesting without end, or too deep. OSError: the file cannot be
            written; an older one is unchanged.
    """
    save_in_turn(state, SaveTurn(path), metadata)


class SaveTurn:
    """The turn of a save among those of a path, see Note [Saves of one path]. Any thread may make and use it.

    Args:
        path: path of the file.
    """

    __slots__ = ("target", "_saves", "_number")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.target = Path(path)
        with _saves_lock:
            self._saves = _saves_of_paths.setdefault(os.path.join(os.path.realpath(self.target.parent), self.target.name), _Saves())
            self._saves.begun += 1
            self._number = self._saves.begun

    def put(self, beside: Path) -> None:
        """Put a file into the place of the target; where a newer one is there, remove it instead."""
        with self._saves.lock:
            if self._saves.newest < self._number:
                os.replace(beside, self.target)
                self._saves.newest = self._number
                return
        beside.unlink()


class _Saves:
    """How many saves of a path were begun, and the number of the newest that is in place."""

    __slots__ = ("lock", "begun", "newest", "__weakref__")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.begun = self.newest = 0


_saves_lock = threading.Lock()
_saves_of_paths: WeakValueDictionary[str, _Saves] = WeakValueDictionary()


def save_in_turn(state: Mapping[str, Any], turn: SaveTurn, metadata: Mapping[str, str] | None = None) -> None:
    """`save` to the path of a turn.

    Args:
        state, metadata: as of `save`.
        turn: begun with the save.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"save: expected a dict such as state_dict(), found {type(state).__name__}")
    notes = dict(metadata or {})
    if STRUCTURE in notes or not all(isinstance(text, str) for pair in notes.items() for text in pair):
        raise ArgumentTypeError(f"save: metadata is a dict of strings without the key {STRUCTURE!r}")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    try:
        structure = _taken_apart(state, (), arrays)
        if not all(isinstance(key, str) and _is_array(value) for key, value in state.items()):
            notes[STRUCTURE] = json.dumps({"version": 1, "state": structure}, allow_nan=True)
    except RecursionError:
        raise ArgumentError(
            "save: the state is nested too deeply, or a dict or list in it contains itself; expected a few levels, such as state_dict()"
        ) from None
    try:
        with replacing(turn.target, turn) as beside:
            with open(beside, "xb") as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777  # of new files of this process; the library's files are private
            save_file(arrays, beside, notes or None)
            os.chmod(beside, mode)
    except SafetensorError as error:
        raise OSError(f"save: cannot write {turn.target.name}: {error}") from error


@contextmanager
def replacing(target: Path, turn: SaveTurn | None = None) -> Iterator[Path]:
    """A path to write a file to, which then takes the place of `target`, see Note [Atomic]; with a `turn` unless a newer one has done so."""
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield beside
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        (turn or SaveTurn(target)).put(beside)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is not None and os.fspath(error.filename) == os.fspath(beside):
            raise OSError(error.errno, error.strerror, os.fspath(target)) from None
        raise
    flush_folder(target.parent)


def flush_folder(folder: Path) -> None:
    """Make the rename durable, where the system can open folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a safetensors file: the state given to `save`, with Tensors for all arrays; for files of other tools, a flat dict of Tensors.

    Blocks while it reads: in a service, ``await ag.offload(ag.load, path)``.

    Args:
        path: path of the file.

    Returns:
        The state, nested as it was given to `save`.

    Raises:
        ArgumentError: not a safetensors file (such as one of ``torch.save``), damaged or truncated, or of a dtype that numpy lacks.
            FileNotFoundError: no such file.
    """
    arrays, metadata = _read(Path(path), with_arrays=True)
    tensors = {name: make(array) for name, array in arrays.items()}
    text = metadata.get(STRUCTURE)
    if text is None:
        return tensors
    try:
        document = json.loads(text)
        if document["version"] != 1:
            raise ArgumentError(f"load: {Path(path).name} was written by a later version of aiograd (format {document['version']}); update it")
        return _put_together(document["state"], tensors)  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"load: {Path(path).name}: the description of the state does not fit the arrays in the file ({error})") from None


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the text that was stored beside a state; arrays are not read.

    Args:
        path: path of the file.

    Returns:
        The entries by name.

    Raises:
        ArgumentError: not a safetensors file, or damaged. FileNotFoundError: no such file.
    """
    return {key: text for key, text in _read(Path(path), with_arrays=False)[1].items() if key != STRUCTURE}


def _read(path: Path, *, with_arrays: bool) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    if path.is_dir():
        raise IsADirectoryError(f"load: {path} is a folder, expected a safetensors file")
    if not path.exists():
        raise FileNotFoundError(f"load: there is no file {path}")
    try:
        with safe_open(path, framework="np") as file:
            metadata: dict[str, str] = file.metadata() or {}
            names = list(file.keys()) if with_arrays else []
            if any(file.get_slice(name).get_dtype() == "BF16" for name in names):
                import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
            return {name: np.array(file.get_tensor(name)) for name in names}, metadata
    except SafetensorError as error:
        if _is_of_pytorch(path):
            raise ArgumentError(
                f"load: {path.name} was written by torch.save and holds pickled code, which aiograd does not run. Convert it where PyTorch is: "
                "`safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')`, and load that."
            ) from None
        raise ArgumentError(
            f"load: {path.name} ({path.stat().st_size} bytes) is not a whole safetensors file ({error}). "
            "Was it cut short, or written by something else?"
        ) from None
    except (TypeError, AttributeError, ImportError) as error:
        raise ArgumentError(f"load: {path.name} holds a dtype that numpy lacks ({error}); bfloat16 needs the package ml_dtypes") from None


def _is_of_pytorch(path: Path) -> bool:
    """True if a file begins like the files of ``torch.save``: as a zip archive, or in old versions as a pickle."""
    with open(path, "rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def taken_apart(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The nesting of a state as JSON; its arrays are moved to `arrays` under their paths.

    Raises:
        ArgumentTypeError: a value that cannot be saved, with its path.
    """
    return _taken_apart(value, (), arrays)


def put_together(value: Any, tensors: dict[str, Any]) -> Any:
    """The state of which `taken_apart` made the nesting, with `tensors` for its arrays."""
    return _put_together(value, tensors)


def _is_array(value: Any) -> bool:
    return isinstance(value, (TensorCore, np.ndarray))


def _taken_apart(value: Any, path: tuple[str, ...], arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The nesting of `value` as JSON; arrays are moved to `arrays` and replaced by their name."""
    where = ".".join(path) or "the state"
    if _is_array(value):
        name = ".".join(path)
        if name in arrays:
            raise ArgumentError(f"save: two arrays have the path {name!r}; rename a key")
        if name == "__metadata__":
            raise ArgumentError("save: an array has the path '__metadata__', which the format keeps for itself; rename the key")
        arrays[name] = _plain(value, where)
        return {"tensor": name}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, Mapping):
        entries = []
        for key, item in value.items():
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise ArgumentTypeError(f"save: {where} has a key of type {type(key).__name__}; expected strings or ints")
            entries.append([key, _taken_apart(item, (*path, str(key)), arrays)])
        return {"dict": entries}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_taken_apart(item, (*path, str(i)), arrays) for i, item in enumerate(value)]}
    raise ArgumentTypeError(
        f"save: {where} is a {type(value).__name__}; expected Tensors, arrays, numbers, strings, None, and dicts and lists of them"
    )


def _put_together(value: Any, tensors: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list outside of any kind")
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _put_together(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_put_together(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"unknown kind {kind!r}")


def _plain(value: Any, where: str) -> np.ndarray[Any, Any]:
    """The values as a contiguous host array of a dtype that the format has."""
    array = host_array(value) if isinstance(value, TensorCore) else plain_array(value)
    if array.dtype.name not in _DTYPES:
        raise ArgumentTypeError(f"save: {where} has dtype {array.dtype}, which safetensors files cannot hold; cast it first")
    return np.asarray(array, order="C")
