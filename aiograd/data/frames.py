"""Frames between a `ProcessSource` and its processes: a status, a length, and a nested value as safetensors."""

from __future__ import annotations

import json
import struct
from typing import Any

from safetensors.numpy import load, save

from aiograd.saving.serialization import put_together, taken_apart
from aiograd.tensors.core import make

#: status and length of an answer
HEADER = struct.Struct("<BQ")
_INDEX = struct.Struct("<q")
#: status: a value, or the text of an error
VALUE, SHOWN = 0, 1


def index_frame(index: int) -> bytes:
    """A request for an example."""
    return _INDEX.pack(index)


def index_of(frame: bytes) -> int:
    """The index in a request."""
    index: int = _INDEX.unpack(frame)[0]
    return index


INDEX_SIZE = _INDEX.size


def packed(value: Any) -> bytes:
    """A nested value of arrays, Tensors, numbers and texts as bytes."""
    arrays: dict[str, Any] = {}
    structure = json.dumps(taken_apart({"value": value}, arrays)).encode()
    return struct.pack("<Q", len(structure)) + structure + save(arrays)


def unpacked(content: bytes) -> Any:
    """The value of `packed`, with Tensors for arrays."""
    (length,) = struct.unpack_from("<Q", content)
    tensors = {name: make(array) for name, array in load(content[8 + length :]).items()}
    return put_together(json.loads(content[8 : 8 + length]), tensors)["value"]
