"""Messages of replicas that do not fit are refused by name, field and bound."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from aiograd.coordination.compression import Blockwise, Compressor, TopK
from aiograd.coordination.compressor_message import CompressorForm, received_form, sent_form
from aiograd.coordination.message_form import WireMessage, encode, parse
from aiograd.coordination.message_json import from_json, to_json
from aiograd.distributed.data_parallel.replica_messages import (
    PartOutline,
    PartStamp,
    ReplicaOptions,
    ReplicaOutline,
    ReplicaVersion,
    StateEntry,
)
from aiograd.distributed.objects.references import RemoteRef
from aiograd.errors import ArgumentError, ProtocolError

OPTIONS: dict[str, Any] = {"method": "loss", "clip_norm": None, "accumulate": 1, "bucket_bytes": 9, "shard_optimizer": False, "absorb": False}
OPTIONS |= {"optimizer": RemoteRef.__new__(RemoteRef)}
STATE = {"names": ["w"], "groups": [], "states": [[0, "step", False, 3]], "running": [0], "version": [1, 2]}


def as_bytes(text: bytes) -> Any:
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize(
    ("cls", "value", "text"),
    [
        (ReplicaOptions, OPTIONS | {"method": "_loss"}, "field method is '_loss' of type str; expected the name of a public method"),
        (ReplicaOptions, OPTIONS | {"clip_norm": float("inf")}, "field clip_norm is inf of type float; expected a finite number above 0"),
        (ReplicaOptions, OPTIONS | {"accumulate": 0}, "field accumulate is 0 of type int; expected an int from 1"),
        (ReplicaOptions, OPTIONS | {"optimizer": None}, "field optimizer is None; expected RemoteRef"),
        (ReplicaOptions, OPTIONS | {"compress": [0.5, 0, 64, 1.0]}, r"field compress\.bits is 0 of type int; expected an int from 1"),
        (ReplicaVersion, [1, -1], "field taken is -1 of type int; expected an int from 0"),
        (PartStamp, [0, -1, 2, [0, -1]], r"field shards\[1\] is -1 of type int; expected an int from 0"),
    ],
)
def test_messages_that_do_not_fit(cls: type[WireMessage], value: Any, text: str) -> None:
    with pytest.raises(ProtocolError, match=f"^a malformed {cls.__name__}: {text}"):
        parse(cls, value)


@pytest.mark.parametrize("compressor", [None, TopK(), TopK(1 / 16, bits=4, block=64, decay=0.9), Blockwise(4, block=77)], ids=repr)
def test_compressors_travel(compressor: Compressor | None) -> None:
    given = OPTIONS | ({} if compressor is None else {"compress": encode(sent_form(compressor))})
    options = parse(ReplicaOptions, encode(parse(ReplicaOptions, given)))
    assert received_form(options.compress) == compressor and sent_form(compressor) == options.compress


@pytest.mark.parametrize("wrong", [(0.5, 3, 64, 1.0), (2.0, 2, 64, 1.0), (0.5, 2, 64, -1.0), (None, 2, 64, 1.0), (None, 8, 9, 1.0)])
def test_compressors_that_do_not_exist(wrong: Any) -> None:
    with pytest.raises(ProtocolError, match="a message with a compressor that does not exist: "):
        received_form(CompressorForm(*wrong))


def test_outlines_of_states() -> None:
    outline = ReplicaOutline(["w"], [], [StateEntry(0, "step", False, np.int64(3))], [0], ReplicaVersion(1, 2))
    assert json.loads(to_json(outline)) == STATE, "numbers of numpy are plain"
    assert from_json(ReplicaOutline, as_bytes(to_json(outline))) == outline
    with pytest.raises(ArgumentError, match="^PartOutline: a value of type complex has no JSON"):
        to_json(PartOutline([{"lr": 1j}], []))
    for text, found in (
        (b"{", "it is 1 bytes; expected JSON"),
        (b"[]", "it is of type list; expected a dict"),
        (json.dumps(STATE | {"running": [-1]}).encode(), r"field running\[0\] is -1 of type int"),
        (json.dumps(STATE | {"states": [[0, 1, True, None]]}).encode(), r"field states\[0\].name is 1 of type int; expected str"),
    ):
        with pytest.raises(ProtocolError, match=f"a malformed ReplicaOutline: {found}"):
            from_json(ReplicaOutline, as_bytes(text))
