"""Reader of a pickle's content that executes nothing.

No name is looked up, no object is created, and nothing is called. Python's own reader executes the
file's instructions, and allocates as much memory as the file requests. This reader returns objects
as records of the calls and their arguments, for the caller to judge.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_ptdp.base.checked_json import Misfit

__all__ = ["Made", "Name", "Pairs", "Persistent", "read_pickle"]


@dataclass(frozen=True)
class Name:
    """Name of a class or function in a pickle: ``"torch.Size"``."""

    text: str


@dataclass(eq=False)
class Made:
    """Description of a call of ``maker`` with ``arguments``.

    ``state`` and ``items`` would be set on the result.
    """

    maker: Any
    arguments: Any
    state: Any = None
    items: Any = None


@dataclass(frozen=True, eq=False)
class Persistent:
    """Value that a pickle leaves to its reader, such as a tensor's storage."""

    id: Any


class Pairs(list[tuple[Any, Any]]):
    """A dictionary whose keys have not been hashed yet."""


def read_pickle(content: bytes) -> object:
    """Return the value that a pickle of protocol 2 to 4 describes.

    Raises:
        Misfit: The pickle is truncated or damaged, or of a kind that neither torch nor this package
            writes.
    """
    reader, at = _Reader(), 0
    try:
        for code, argument, position in pickletools.genops(content):
            at = position or 0
            _STEPS[code.name](reader, argument)
        (value,) = reader.stack
    except Misfit:
        raise
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise Misfit(
            f"is not a whole pickle of those that are read ({type(error).__name__} at byte {at})"
        ) from error
    return value


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, object] = {}

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def last(self, count: int) -> tuple[object, ...]:
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def make(self, _: object) -> None:
        maker, arguments = self.last(2)
        self.stack.append(Made(maker, arguments))

    def build(self, _: object) -> None:
        made, state = self.last(2)
        if not isinstance(made, Made) or made.state is not None:
            raise Misfit("sets a state on what is not an object of its own")
        made.state = state
        self.stack.append(made)

    def name(self, _: object) -> None:
        module, member = self.last(2)
        if type(member) is not str or type(module) is not str:
            raise Misfit("names something without text")
        self.stack.append(Name(f"{module}.{member}"))

    def fill(self, kind: type[list[Any]], items: list[Any] | tuple[object, ...]) -> None:
        """Put items into the container on top of the stack.

        The container is a list, a dictionary, or an object that is filled like one.
        """
        into = self.stack[-1]
        if isinstance(into, Made):
            into.items = kind() if into.items is None else into.items
            into = into.items
        if type(into) is not kind:
            raise Misfit(f"fills a {type(into).__name__} like a {kind.__name__}")
        into.extend(zip(items[::2], items[1::2], strict=True) if kind is Pairs else items)


_Step = Callable[[_Reader, Any], object]


def _push(make: Callable[[_Reader, Any], object]) -> _Step:
    return lambda reader, argument: reader.stack.append(make(reader, argument))


_MARK = object()
_ITSELF = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"),
)
"""Operations whose argument is the value."""
_STEPS: dict[str, _Step] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda r, a: None),
    **dict.fromkeys(_ITSELF, _push(lambda r, a: a)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda r, a: r.memo.__setitem__(a, r.stack[-1])),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _push(lambda r, a: r.memo[a])),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Reader.make),
    "MARK": _push(lambda r, a: _MARK),
    "NONE": _push(lambda r, a: None),
    "NEWTRUE": _push(lambda r, a: True),
    "NEWFALSE": _push(lambda r, a: False),
    "MEMOIZE": lambda r, a: r.memo.__setitem__(len(r.memo), r.stack[-1]),
    "EMPTY_TUPLE": _push(lambda r, a: ()),
    "TUPLE1": _push(lambda r, a: r.last(1)),
    "TUPLE2": _push(lambda r, a: r.last(2)),
    "TUPLE3": _push(lambda r, a: r.last(3)),
    "TUPLE": _push(lambda r, a: tuple(r.since_mark())),
    "EMPTY_LIST": _push(lambda r, a: []),
    "APPEND": lambda r, a: r.fill(list, r.last(1)),
    "APPENDS": lambda r, a: r.fill(list, r.since_mark()),
    "EMPTY_DICT": _push(lambda r, a: Pairs()),
    "SETITEM": lambda r, a: r.fill(Pairs, r.last(2)),
    "SETITEMS": lambda r, a: r.fill(Pairs, r.since_mark()),
    "GLOBAL": _push(lambda r, a: Name(a.replace(" ", ".", 1))),
    "STACK_GLOBAL": _Reader.name,
    "BUILD": _Reader.build,
    "BINPERSID": _push(lambda r, a: Persistent(r.last(1)[0])),
}
