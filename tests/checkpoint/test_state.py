"""Tests of the types that Lightning's state may hold, and of their values after loading."""

import collections
import datetime
import enum
import json
import sys
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    portable,
    read_full,
    read_state,
    reshard_checkpoint,
)
from lightning_ptdp.checkpoint.tagged_json import decode
from tests.checkpoint.layouts import save


class Colour(enum.StrEnum):
    RED = "red"


class Pair(NamedTuple):
    one: int
    two: Any


class Attributes(dict[str, Any]):
    pass


class Registered:
    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __eq__(self, other):
        return isinstance(other, Registered) and other.inner == self.inner

    __hash__ = None


class Mode(enum.Enum):
    FAST = object()
    SLOW = (1, 2)


STORED = [
    ({"a": [1, (2.5, None)], 3: {True, False}}, {"a": [1, (2.5, None)], 3: {True, False}}),
    (Path("runs") / "1", "runs/1"),
    (np.float64(0.5), 0.5),
    (np.int32(7), 7),
    (np.bool_(True), True),
    (Colour.RED, "red"),
    (Mode.SLOW, "SLOW"),
    ({Colour.RED: [Path("a")]}, {"red": ["a"]}),
    ({Path("a"), Path("b")}, {"a", "b"}),
    ({"$path": ["", "a"], "$": 1}, {"$path": ["", "a"], "$": 1}),
    ({"$path": ["", "a"]}, {"$path": ["", "a"]}),
    (b"\0\xff", b"\0\xff"),
    (b"", bytearray()),
    (bytearray(b"a"), bytearray(b"a")),
    (collections.OrderedDict(a=Colour.RED), collections.OrderedDict(a="red")),
    (Pair(1, Path("x")), (1, "x")),
    (Attributes(lr=0.1), {"lr": 0.1}),
    (collections.defaultdict(list, a=[1]), {"a": [1]}),
    (frozenset({1}), {1}),
    (np.float32(0.5), 0.5),
    (np.str_("a"), "a"),
    (torch.Size([2, 3]), torch.Size([2, 3])),
    (torch.bfloat16, torch.bfloat16),
    (torch.device("cpu"), torch.device("cpu")),
    (1 + 2j, 1 + 2j),
    (float("inf"), float("inf")),
    (complex("inf"), complex("inf")),
    (2**70, 2**70),
]


def kept(path, value):
    """Save a value as state and return it as read from the checkpoint."""
    return read_state(save(path, state={"key": value}))["key"]


@pytest.mark.parametrize(("value", "stored"), STORED, ids=lambda value: type(value).__name__)
def test_common_types_are_restored(tmp_path, value, stored):
    """``portable`` makes plain values, which torch reads without this package."""
    (found,) = kept(tmp_path / "c", [value])
    assert found == value
    assert type(found) is type(value)
    assert isinstance(value, set | frozenset) or repr(found) == repr(value)  # a set has no order
    (plain,) = portable([value])
    assert plain == stored and type(plain) is type(stored)
    torch.save(plain, tmp_path / "plain.pt")
    assert torch.load(tmp_path / "plain.pt", weights_only=True) == stored


def test_defaultdict_keeps_its_factory(tmp_path):
    found = kept(tmp_path / "c", collections.defaultdict(list, a=[1]))
    found["b"].append(2)
    assert found == {"a": [1], "b": [2]}


def test_lossy_types_are_refused_by_name(tmp_path):
    class Local(enum.Enum):
        ONE = 1

    attributes = Attributes(lr=0.1)
    attributes.more = 2
    for value in (
        Local.ONE,
        attributes,
        collections.defaultdict(lambda: 3),
        collections.deque([1]),
    ):
        with pytest.raises(
            CheckpointError, match=r"state\['key'\] is a .*(Local|Attributes|defaultdict|deque)"
        ):
            kept(tmp_path / "c", value)


def test_unimported_class_gives_plain_value_and_survives_reshard(tmp_path, monkeypatch):
    save(tmp_path / "c", state={"key": {"colour": Colour.RED, "root": Path("a")}})
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.warns(
        UserWarning, match=r"values of .*test_state:Colour, which is not imported in this process"
    ):
        found = read_state(tmp_path / "c")
    assert found["key"] == {"colour": "red", "root": Path("a")}
    reshard_checkpoint(tmp_path / "c", tmp_path / "d")
    monkeypatch.undo()
    assert read_state(tmp_path / "d") == {"key": {"colour": Colour.RED, "root": Path("a")}}


class Called(dict[str, Any]):
    """Container that records every instantiation."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, *args):
        self.calls.append(args)

    def __del__(self):
        self.calls.append(self)


@pytest.mark.parametrize(
    ("tag", "parts", "plain"),
    [
        ("class", ["os:environ", {}], {}),
        ("class", [f"{__name__}:Registered", {}], {}),
        ("class", ["subprocess:Popen", [1]], [1]),
        ("class", [f"{__name__}:Called", {}], {}),
        ("enum", ["os:environ", "a", 1], 1),
        ("enum", ["collections:OrderedDict", "a", 1], 1),
        ("enum", [f"{__name__}:Attributes", "a", 1], None),
        ("class", [f"{__name__}:Pair", {"$tuple": [1]}], None),
        ("class", [f"{__name__}:Pair", [1, 2]], None),
        ("class", [[], {}], None),
        ("call", ["os:system", "echo"], None),
        ("number", ["O", "a"], None),
        ("number", ["<f8"], None),
        ("dtype", ["nn"], None),
        ("tensor", [0], None),
        ("array", [[]], None),
        ("set", [[1]], None),
        ("dict", [[1, 2, 3]], None),
        ("path", 1, None),
        ("registered", ["x"], None),
        ("registered", [1000], None),
        ("bytearray", [3], None),
    ],
)
def test_tags_create_only_enums_and_containers(tag, parts, plain):
    text = json.dumps({"a": {f"${tag}": parts}}).encode()
    if plain is None:
        with pytest.raises(ValueError):
            decode(text, [])
        return
    found, missing = decode(text, [])
    assert missing == {parts[0]} and found == {"a": plain} and not Called.calls


def test_empty_bytes_are_restored(tmp_path):
    """torch itself cannot read empty bytes with weights_only=True."""
    assert kept(tmp_path / "c", b"") == b""


def test_tensor_referenced_twice_is_refused():
    with pytest.raises(ValueError, match="has a tensor that cannot be created"):
        decode(b'[{"$tensor":[0]},{"$tensor":[0]}]', [torch.ones(1)])


@pytest.mark.parametrize("parts", [[], [None], [1], [["cpu"]], [{}], ["cpu", "cpu"], ["outside"]])
def test_invalid_device_is_refused_in_one_line(parts):
    with pytest.raises(ValueError, match="has a device that cannot be created") as error:
        decode(json.dumps({"$device": parts}).encode(), [])
    assert "\n" not in str(error.value)


def test_self_referencing_value_is_refused_by_name(tmp_path):
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match=r"state\['key'\]\[0\].* contains itself"):
        kept(tmp_path / "c", value)


def test_deepest_allowed_nesting_is_restored(tmp_path):
    value = 0
    for number in range(39):
        value = {1: (value,)} if number % 2 else ([value],)
    assert kept(tmp_path / "c", value) == value


def test_ordered_dict_keeps_order_and_type(tmp_path):
    items = [("b", 1), ("a", collections.Counter("aab"))]
    found = kept(tmp_path / "c", collections.OrderedDict(items))
    assert type(found) is collections.OrderedDict
    assert list(found.items()) == items


def test_tensors_are_stored_as_plain_copies(tmp_path):
    big = torch.zeros(1_000_000)
    state = {
        "slice": big[3:5],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(3, dtype=np.uint32),
    }
    found = read_state(save(tmp_path / "c", state=state))
    assert torch.equal(found["slice"], torch.zeros(2))
    assert type(found["parameter"]) is torch.Tensor
    assert found["array"].dtype == np.uint32 and found["array"].tolist() == [0, 1, 2]
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 10_000


def test_tensors_of_every_kind_are_restored(tmp_path):
    dtypes = (torch.bfloat16, torch.complex128, torch.bool, torch.uint16, torch.float8_e4m3fn)
    value = [torch.ones(2, 3).to(dtype) for dtype in dtypes]
    value += [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(6).view(2, 3).T,
        torch.ones(2).expand(3, 2),
    ]
    for one, found in zip(value, kept(tmp_path / "c", value), strict=True):
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        if one.dtype.itemsize == 1:
            one, found = (each.contiguous().view(torch.uint8) for each in (one, found))
        assert torch.equal(found, one)
    with pytest.raises(CheckpointError, match="it has \\['state/'\\]"):
        read_full(tmp_path / "c")


def test_numpy_random_state_is_restored(tmp_path):
    generator = np.random.RandomState(3)
    found = kept(tmp_path / "c", generator.get_state(legacy=True))
    expected = generator.rand(5)
    generator.set_state(found)
    assert np.array_equal(generator.rand(5), expected)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"mine": {"loss": torch.nn.MSELoss()}},
            r"state\['mine'\]\['loss'\] is a torch\.nn.*MSELoss",
        ),
        (
            {"a": [0, {"b": datetime.date(2020, 1, 1)}]},
            r"state\['a'\]\[1\]\['b'\] is a datetime\.date",
        ),
        ({"f": len}, r"state\['f'\] is a builtins\.builtin_function_or_method"),
        ({"d": {Registered: 1}}, r"state\['d'\] \(one of its keys\) is a builtins\.type"),
        ({"n": np.array([object()])}, r"state\['n'\] is a numpy\.ndarray"),
    ],
)
def test_unsupported_types_are_refused_by_name(tmp_path, state, words):
    for write in (lambda: save(tmp_path / "c", state=state), lambda: portable(state)):
        with pytest.raises(CheckpointError, match=words):
            write()


def test_registered_classes_are_restored(tmp_path):
    with torch.serialization.safe_globals([Registered]):
        assert kept(tmp_path / "c", Registered(3)) == Registered(3)
        with pytest.raises(
            CheckpointError,
            match=r"state\['key'\] cannot be written in a form that can be restored",
        ):
            kept(tmp_path / "d", Registered(len))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: .*it has .*Registered"):
        read_state(tmp_path / "c")
