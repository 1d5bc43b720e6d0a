"""What a pickle says, without doing it: no name is looked up, no object made, nothing called.

Python's own reader runs what a file tells it, and sets aside as much memory as a file asks for. Here objects come back as records of what
would have been called with what, for the reader to judge.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_ptdp.checked_json import Misfit

__all__ = ["Made", "Name", "Pairs", "Persistent", "read_pickle"]


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names: ``"torch.Size"``."""

    text: str


@dataclass(eq=False)
class Made:
    """What calling ``maker`` with ``arguments`` would give, with the state that would be set on it and the items that it would hold."""

    maker: Any
    arguments: Any
    state: Any = None
    items: Any = None


@dataclass(frozen=True, eq=False)
class Persistent:
    """Something that the pickle leaves to its reader, such as a tensor's storage."""

    id: Any


class Pairs(list[tuple[Any, Any]]):
    """A dictionary, whose keys nobody has hashed yet."""


def read_pickle(content: bytes) -> Any:
    """The value that a pickle of protocol 2 to 4 describes.

    Raises:
        Misfit: It is cut off or damaged, or of a kind that neither torch nor this package writes.
    """
    reader = _Reader(content)
    try:
        while (code := content[reader.at]) != _STOP:
            reader.at += 1
            _STEPS[code](reader)
        (value,) = reader.stack
    except Misfit:
        raise
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        raise Misfit(f"is not a whole pickle of those that are read ({type(error).__name__} at byte {reader.at})") from error
    return value


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self.at = content, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def take(self, count: int) -> bytes:
        part = self._content[self.at : self.at + count]
        if len(part) != count:
            raise ValueError
        self.at += count
        return part

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self._content.index(b"\n", self.at)
        text = self._content[self.at : end].decode()
        self.at = end + 1
        return text

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def make(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = Made(self.stack[-1], arguments)

    def build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, Made) or made.state is not None:
            raise Misfit("sets a state on what is not an object of its own")
        made.state = state

    def name(self) -> None:
        member = self.stack.pop()
        if type(member) is not str or type(self.stack[-1]) is not str:
            raise Misfit("names something without text")
        self.stack[-1] = Name(f"{self.stack[-1]}.{member}")

    def fill(self, kind: type[list[Any]], items: list[Any]) -> None:
        """Put items into the list or dictionary on top of the stack, or into an object that is filled like one."""
        into = self.stack[-1]
        if isinstance(into, Made):
            into.items = kind() if into.items is None else into.items
            into = into.items
        if type(into) is not kind:
            raise Misfit(f"fills a {type(into).__name__} like a {kind.__name__}")
        into.extend(zip(items[::2], items[1::2], strict=True) if kind is Pairs else items)


def _tuple(count: int) -> Callable[[_Reader], None]:
    def step(reader: _Reader) -> None:
        if len(reader.stack) < count:
            raise IndexError
        reader.stack[-count:] = [tuple(reader.stack[-count:])]

    return step


def _pushed(value: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(value(reader))


_MARK = object()
_STOP = pickle.STOP[0]
_STEPS: dict[int, Callable[[_Reader], None]] = {
    code[0]: step
    for code, step in {
        pickle.PROTO: lambda r: r.take(1),
        pickle.FRAME: lambda r: r.take(8),
        pickle.MARK: _pushed(lambda r: _MARK),
        pickle.NONE: _pushed(lambda r: None),
        pickle.NEWTRUE: _pushed(lambda r: True),
        pickle.NEWFALSE: _pushed(lambda r: False),
        pickle.BININT: _pushed(lambda r: struct.unpack("<i", r.take(4))[0]),
        pickle.BININT1: _pushed(lambda r: r.number(1)),
        pickle.BININT2: _pushed(lambda r: r.number(2)),
        pickle.LONG1: _pushed(lambda r: pickle.decode_long(r.take(r.number(1)))),
        pickle.LONG4: _pushed(lambda r: pickle.decode_long(r.take(r.number(4)))),
        pickle.BINFLOAT: _pushed(lambda r: struct.unpack(">d", r.take(8))[0]),
        pickle.SHORT_BINUNICODE: _pushed(lambda r: r.take(r.number(1)).decode("utf-8", "surrogatepass")),
        pickle.BINUNICODE: _pushed(lambda r: r.take(r.number(4)).decode("utf-8", "surrogatepass")),
        pickle.BINUNICODE8: _pushed(lambda r: r.take(r.number(8)).decode("utf-8", "surrogatepass")),
        pickle.SHORT_BINBYTES: _pushed(lambda r: r.take(r.number(1))),
        pickle.BINBYTES: _pushed(lambda r: r.take(r.number(4))),
        pickle.MEMOIZE: lambda r: r.memo.__setitem__(len(r.memo), r.stack[-1]),
        pickle.BINPUT: lambda r: r.memo.__setitem__(r.number(1), r.stack[-1]),
        pickle.LONG_BINPUT: lambda r: r.memo.__setitem__(r.number(4), r.stack[-1]),
        pickle.BINGET: _pushed(lambda r: r.memo[r.number(1)]),
        pickle.LONG_BINGET: _pushed(lambda r: r.memo[r.number(4)]),
        pickle.EMPTY_TUPLE: _pushed(lambda r: ()),
        pickle.TUPLE1: _tuple(1),
        pickle.TUPLE2: _tuple(2),
        pickle.TUPLE3: _tuple(3),
        pickle.TUPLE: lambda r: r.stack.append(tuple(r.since_mark())),
        pickle.EMPTY_LIST: _pushed(lambda r: []),
        pickle.APPEND: lambda r: r.fill(list, [r.stack.pop()]),
        pickle.APPENDS: lambda r: r.fill(list, r.since_mark()),
        pickle.EMPTY_DICT: _pushed(lambda r: Pairs()),
        pickle.SETITEM: lambda r: r.fill(Pairs, [r.stack.pop(-2), r.stack.pop()]),
        pickle.SETITEMS: lambda r: r.fill(Pairs, r.since_mark()),
        pickle.GLOBAL: _pushed(lambda r: Name(f"{r.line()}.{r.line()}")),
        pickle.STACK_GLOBAL: _Reader.name,
        pickle.REDUCE: _Reader.make,
        pickle.NEWOBJ: _Reader.make,
        pickle.BUILD: _Reader.build,
        pickle.BINPERSID: lambda r: r.stack.append(Persistent(r.stack.pop())),
    }.items()
}
