"""Packing of samples into sequences: best fit, longest first.

The result is the same for every layout and every epoch.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

__all__ = ["pack"]


def pack(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Group samples into few groups of at most ``capacity`` tokens.

    Each sample, the longest first, joins the group with the least sufficient room. Samples keep
    their order within a group, and groups are ordered by their first samples. A sample takes
    microseconds: the bits of one integer show which amounts of room exist.

    Args:
        sizes: Tokens of every sample, 1 to ``capacity``.
        capacity: Tokens of a group.

    Returns:
        The samples, group after group, and the beginnings of the groups with the end of the last
        one; both int64.
    """
    groups: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: a group has room for r tokens
    for sample in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[sample])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            group = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, group = capacity, len(groups)
            groups.append([])
        groups[group].append(sample)
        left = room - size
        if left:
            by_room.setdefault(left, []).append(group)
            rooms |= 1 << left
    groups = sorted(map(sorted, groups))
    ends = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    return np.fromiter(chain.from_iterable(groups), np.int64, len(sizes)), ends
