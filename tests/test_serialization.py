"""Saving and loading: round trips, atomicity, and files that are not what they should be."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError, ArgumentTypeError, NotReadyError
from aiograd.saving.serialization import load, load_metadata, save
from tests.support import assert_raises
from tests.toy_device import ToyDevice


def raw(path: Path, header: dict[str, Any], data: bytes = b"") -> None:
    """A file with a header of one's own."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def same(ours: Any, theirs: Any) -> bool:
    """True if types, keys and every bit are the same."""
    if isinstance(theirs, (ag.Tensor, np.ndarray)):
        values = theirs.detach().numpy() if isinstance(theirs, ag.Tensor) else theirs
        facts = [(array.dtype, array.shape, array.tobytes()) for array in (ours.numpy(), values)]
        return isinstance(ours, ag.Tensor) and facts[0] == facts[1]
    if isinstance(theirs, dict):
        return type(ours) is dict and ours.keys() == theirs.keys() and all(same(ours[key], value) for key, value in theirs.items())
    if isinstance(theirs, (list, tuple)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return type(ours) is type(theirs) and ours == theirs


DTYPES = "float64 float32 float16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64".split()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 2)])
def test_arrays_come_back_to_the_bit(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.random.default_rng(0).standard_normal(shape) * 10).astype(dtype)
    path = tmp_path / "state.safetensors"
    save({"x": array, "t": ag.tensor(array)}, path)
    assert same(load(path), {"x": array, "t": array})


def test_layouts_and_byte_orders_do_not_matter(tmp_path: Path) -> None:
    base = np.arange(12.0).reshape(3, 4)
    arrays = {"turned": base.T, "strided": base[:, ::2], "reversed": base[::-1], "big endian": base.astype(">f8")}
    save(arrays, tmp_path / "x")
    for name, value in load(tmp_path / "x").items():
        np.testing.assert_array_equal(value.numpy(), arrays[name])
        assert value.dtype == np.float64


async def test_a_nested_state_comes_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = optim.Adam(model.parameters(), betas=(0.8, 0.9))
    schedule = optim.StepLR(optimizer, 3)
    await model(ag.tensor(np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32))).square().sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "epoch": 3, "best": 0.25,
        "never": float("inf"), "name": "ünï", "flags": (True, None, [1, ag.tensor([1.0])]), "empty": {},
    }  # fmt: skip
    path = tmp_path / "checkpoint.safetensors"
    save(state, path)
    loaded = load(path)
    assert same(loaded, state)
    assert list(loaded) == list(state), "in the same order"
    assert "model.0.weight" in load_file(path), "other tools find the arrays by their path"
    twin = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    twin.load_state_dict(loaded["model"])
    other = optim.Adam(twin.parameters())
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["betas"] == (0.8, 0.9)
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_flat_state_is_an_ordinary_file_and_ordinary_files_load(tmp_path: Path) -> None:
    weights = {"a": np.ones((2, 2), np.float32), "b.c": np.arange(3)}
    save(weights, tmp_path / "ours")
    header = json.loads((tmp_path / "ours").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert "__metadata__" not in header
    assert {name: value.tolist() for name, value in load_file(tmp_path / "ours").items()} == {name: value.tolist() for name, value in weights.items()}
    save_file(weights, tmp_path / "theirs", {"format": "np"})
    assert same(load(tmp_path / "theirs"), weights)
    assert load_metadata(tmp_path / "theirs") == {"format": "np"}


def test_metadata(tmp_path: Path) -> None:
    save({"epoch": 1}, tmp_path / "x", {"author": "me"})
    assert load_metadata(tmp_path / "x") == {"author": "me"}
    assert load(tmp_path / "x") == {"epoch": 1}
    for wrong in ({"aiograd": "x"}, {"a": 1}):
        with pytest.raises(ArgumentTypeError, match="metadata"):
            save({}, tmp_path / "y", wrong)  # type: ignore[dict-item]
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": object()}}, "a.b is a object"), ({"a": [1, {2, 3}]}, "a.1 is a set"), ({"a": {1.5: 2}}, "a has a key of type float"),
        ({"a": np.array(["text"])}, "a has dtype <U4"), ({"a": np.ones(1, np.complex128)}, "a has dtype complex128"), ([1, 2], "found list"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: Path, state: Any, where: str) -> None:
    assert_raises(ArgumentTypeError, where, lambda: save(state, tmp_path / "x"))
    assert os.listdir(tmp_path) == []


def nested(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _ in range(levels):
        state = {"a": state}
    return state


def test_a_state_without_end_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    endless = nested(1)
    endless["b"] = [endless]
    for state in (endless, nested(3000)):
        assert_raises(ArgumentError, "nested too deeply", lambda state=state: save(state, tmp_path / "x"))
    assert os.listdir(tmp_path) == []
    save(nested(100), tmp_path / "x")
    assert load(tmp_path / "x") == nested(100)


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for place, error in ((tmp_path / "nowhere" / "x", FileNotFoundError), (tmp_path / "folder", IsADirectoryError)):
        with pytest.raises(error) as caught:
            save({"a": np.ones(1)}, place)
        assert caught.value.filename == str(place) and ".tmp" not in str(caught.value)
    assert os.listdir(tmp_path) == ["folder"]


def test_two_arrays_with_one_path_are_refused(tmp_path: Path) -> None:
    assert_raises(ArgumentError, r"'a\.b'", lambda: save({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, tmp_path / "x"))


async def test_what_is_still_being_computed_is_not_waited_for(tmp_path: Path) -> None:
    with ToyDevice("toy:0", delay=0.001):
        t = ag.tensor(np.ones(3), device="toy:0") * 2
        assert_raises(NotReadyError, None, lambda: save({"t": t}, tmp_path / "x"))
        await t
        save({"t": t}, tmp_path / "x")
    assert load(tmp_path / "x")["t"].tolist() == [2.0, 2.0, 2.0]


# ---- writing


def test_a_failed_save_leaves_the_old_file_and_no_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    save({"a": np.ones(2)}, path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_raises(OSError, "No space", lambda: save({"a": np.zeros(2)}, path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]


def test_a_save_replaces_the_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save({"a": np.ones(2)}, path)
    with open(path, "rb") as reader:  # whoever reads the old file goes on reading it
        old = reader.read(8)
        save({"a": np.zeros(2000)}, path)
        reader.seek(0)
        assert reader.read(8) == old
    assert load(path)["a"].shape == (2000,)
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask, "as any other new file"


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert_raises(FileNotFoundError, None, lambda: save({"a": np.ones(1)}, tmp_path / "nowhere" / "x"))


def test_loaded_tensors_are_independent_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save({"a": np.ones(3)}, path)
    first = load(path)["a"]
    first += 1
    assert load(path)["a"].tolist() == [1, 1, 1]
    path.unlink()
    assert first.tolist() == [2, 2, 2]


# ---- reading what is not as it should be


def test_files_that_are_missing_or_folders(tmp_path: Path) -> None:
    assert_raises(FileNotFoundError, None, lambda: load(tmp_path / "nothing"))
    assert_raises(IsADirectoryError, None, load, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x80\x04\x95pickle", b"\xff" * 64, struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]"]
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    for read in (load, load_metadata):
        assert_raises(ArgumentError, "not a whole safetensors file", read, path)


def test_files_cut_short_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save({"a": np.arange(20.0), "n": 3}, path)
    whole = path.read_bytes()
    for length in [*range(0, 40), *range(40, len(whole), 13)]:
        path.write_bytes(whole[:length])
        assert_raises(ArgumentError, None, load, path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 4]},
        {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]},
    ],
)
def test_headers_that_lie(tmp_path: Path, entry: dict[str, Any]) -> None:
    raw(tmp_path / "x", {"a": entry}, b"\0\0\0\0")
    assert_raises(ArgumentError, None, lambda: load(tmp_path / "x"))


@pytest.mark.parametrize(
    "description",
    [
        "not json", "{}", '{"version": 2, "state": 3}', '{"version": 1, "state": {"tensor": "missing"}}',
        '{"version": 1, "state": {"module": "os"}}', '{"version": 1, "state": {"dict": [1, 2]}}', '{"version": 1, "state": [1]}',
        '{"version": 1, "state": {"dict": [[["key"], 1]]}}', '{"version": 1, "state": ' + '{"list": [' * 3000 + "1" + "]}" * 3000 + "}",
    ],
)  # fmt: skip
def test_descriptions_that_do_not_fit(tmp_path: Path, description: str) -> None:
    raw(tmp_path / "x", {"__metadata__": {"aiograd": description}})
    assert_raises(ArgumentError, None, lambda: load(tmp_path / "x"))


def test_bfloat16(tmp_path: Path) -> None:
    raw(tmp_path / "x", {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}, b"\x80\x3f\x00\xc0")
    try:
        import ml_dtypes
    except ImportError:
        assert_raises(ArgumentError, "ml_dtypes", lambda: load(tmp_path / "x"))
        return
    value = load(tmp_path / "x")["a"]
    assert value.dtype == ml_dtypes.bfloat16
    assert value.numpy().astype(np.float32).tolist() == [1.0, -2.0]
    save({"a": value}, tmp_path / "y")
    assert same(load(tmp_path / "y"), {"a": value})


@pytest.mark.parametrize("beginning", [b"PK\x03\x04", b"\x80\x02\x8a\x0a"])
def test_a_file_of_pytorch_is_called_that(tmp_path: Path, beginning: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(beginning + bytes(100))
    assert_raises(ArgumentError, r"model.pt was written by torch.save.*safetensors.torch.save_file\(torch.load", ag.load, path)


def test_the_name_that_the_format_keeps_for_itself_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    save({"x": ag.ones(1)}, tmp_path / "x")
    assert_raises(ArgumentError, "'__metadata__', which the format keeps for itself", save, {"__metadata__": ag.ones(1), "x": 1}, tmp_path / "x")
    save({"x": {"__metadata__": ag.zeros(1)}}, tmp_path / "y")
    assert same(load(tmp_path / "x"), {"x": ag.ones(1)}) and same(load(tmp_path / "y"), {"x": {"__metadata__": ag.zeros(1)}})
