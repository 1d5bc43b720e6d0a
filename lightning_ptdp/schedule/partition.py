"""Partition of the layers into stages.

Every layer is in exactly one stage, and the order of layers is kept.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of layers, one per stage."""


def check_num_layers(
    num_layers: int, *, pipeline_parallel_size: int, virtual_pipeline_size: int = 1
) -> None:
    """Check that there is a layer for every stage.

    Raises:
        ValueError: There are fewer layers than p * v; the message proposes sizes that fit.
    """
    p = pipeline_parallel_size
    v = virtual_pipeline_size
    if num_layers >= p * v:
        return
    remedies = [f"at least {p * v} layers"]
    if num_layers >= p:
        remedies.append(f"virtual_pipeline_size={num_layers // p}")
    if num_layers >= 2 * v:
        remedies.append(f"pipeline_parallel_size={num_layers // v}")
    if 0 < num_layers < min(p, 2 * v):
        remedies.append(f"pipeline_parallel_size={num_layers} with virtual_pipeline_size=1")
    raise ValueError(
        f"num_layers={num_layers} cannot fill pipeline_parallel_size * virtual_pipeline_size = "
        f"{p} * {v} = {p * v} stages with at least one layer each. Use {' or '.join(remedies)}"
    )


def partition_layers(
    costs: Sequence[float], *, num_stages: int, first_cost: float = 0.0, last_cost: float = 0.0
) -> Ranges:
    """Split layers into contiguous stages with the cheapest possible most expensive stage.

    Among these splits, the stages are made as even as possible (least sum of squares). Then the
    first and the last stage are made as cheap as possible. Then the later stages get the
    remainders, because earlier ones hold more activations::

        partition_layers([1] * 10, num_stages=4)                 ((0, 2), (2, 5), (5, 8), (8, 10))      2 3 3 2
        partition_layers([1] * 8, num_stages=4, last_cost=1)     ((0, 2), (2, 4), (4, 7), (7, 8))       2 2 3 1

    The arithmetic is exact (0.1 is a tenth), so every rank finds the same split.

    Args:
        costs: Time (or any additive cost) of each layer.
        num_stages: p * v.
        first_cost: Additional cost of the first stage, such as an embedding.
        last_cost: Additional cost of the last stage, such as an output head.

    Returns:
        One half-open range (first layer, one past the last layer) per stage.

    Raises:
        ValueError: Fewer layers than stages, or a cost that is negative or not finite.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} must be a positive integer")
    if len(costs) < num_stages:
        raise ValueError(
            f"num_layers={len(costs)} cannot fill num_stages={num_stages} "
            "(pipeline_parallel_size * virtual_pipeline_size) with at least one layer each. "
            f"Use at least {num_stages} layers, or at most {len(costs)} stages"
        )
    for name, values in {
        "costs": costs,
        "first_cost": [first_cost],
        "last_cost": [last_cost],
    }.items():
        for value in values:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{name} has the cost {value!r}, but costs must be finite and not negative"
                )
    first, last, *layers = _as_integers([first_cost, last_cost, *costs])
    sums = [0, *accumulate(layers)]
    # The extra cost of each end is part of its end layer: no split can separate the two.
    sums = [0, *(total + first for total in sums[1:-1]), sums[-1] + first + last]
    return _most_even(sums, num_stages, _smallest_limit(sums, num_stages))


def explicit_partition(
    partition: Sequence[int] | Sequence[str], *, layers: Sequence[str], num_stages: int
) -> Ranges:
    """Return the split that the user gives.

    The user gives the number of layers of each stage, or the first layer of each stage::

        explicit_partition([1, 3, 2], layers=names, num_stages=3)                             ((0, 1), (1, 4), (4, 6))
        explicit_partition(["blocks.0", "blocks.1", "blocks.4"], layers=names, num_stages=3)  ((0,
        1), (1, 4), (4, 6))

    Args:
        partition: Numbers of layers, or names of layers: the full dotted name or its end
            ("model.blocks.4", "blocks.4", "4").
        layers: Full dotted name of each layer, in order.
        num_stages: p * v.

    Raises:
        ValueError: Not one entry per stage, or numbers and names mixed; a number below 1, or
            numbers that do not add up to the number of layers; an unknown name (with the nearest
            names), a first stage that does not start with the first layer, or names out of order.
    """
    if len(partition) != num_stages:
        raise ValueError(
            f"partition={list(partition)} has {len(partition)} entries for num_stages={num_stages} "
            "(pipeline_parallel_size * virtual_pipeline_size). Give one entry per stage"
        )
    is_name = [isinstance(entry, str) for entry in partition]
    if any(is_name) and not all(is_name):
        raise ValueError(
            f"partition={list(partition)} mixes numbers and names. Give numbers of layers, or "
            "names of first layers"
        )
    bounds = (
        _named_bounds([str(name) for name in partition], layers)
        if any(is_name)
        else _counted_bounds(partition, len(layers))
    )
    return tuple(pairwise(bounds))


def _counted_bounds(counts: Sequence[Any], num_layers: int) -> list[int]:
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"partition={list(counts)} has {count!r}, but every stage needs at least one layer"
            )
    if sum(counts) != num_layers:
        raise ValueError(
            f"the layers of partition={list(counts)} sum to {sum(counts)}, but "
            f"num_layers={num_layers}. {'Add' if sum(counts) < num_layers else 'Remove'} "
            f"{abs(num_layers - sum(counts))}"
        )
    return list(accumulate(counts, initial=0))


def _named_bounds(names: Sequence[str], layers: Sequence[str]) -> list[int]:
    starts = [_find_layer(name, layers, names) for name in names]
    if starts[0] != 0:
        raise ValueError(
            f"partition={list(names)} starts with layer {layers[starts[0]]!r}, so no stage has "
            f"the layers before it. Start with {layers[0]!r}"
        )
    for stage, (start, next_start) in enumerate(pairwise(starts)):
        if next_start <= start:
            raise ValueError(
                f"partition={list(names)} is out of order: stage {stage + 1} starts with "
                f"{names[stage + 1]!r}, which does not come after {names[stage]!r}, the first "
                f"layer of stage {stage}. Name the first layer of each stage in the model's order"
            )
    return [*starts, len(layers)]


def _find_layer(name: str, layers: Sequence[str], names: Sequence[str]) -> int:
    """Return the position of the layer whose dotted name ends with ``name``.

    Raises:
        ValueError: There is none, or there are several, as in an encoder and a decoder.
    """
    if name in layers:
        return layers.index(name)
    matches = [index for index, layer in enumerate(layers) if layer.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(
            f"partition={list(names)} has {name!r}, which may be {layers[matches[0]]!r} or "
            f"{layers[matches[1]]!r}. Write the full name"
        )
    depth = name.count(".") + 1
    tails = [".".join(layer.split(".")[-depth:]) for layer in layers]
    nearest = difflib.get_close_matches(name, tails, n=3, cutoff=0.4) or tails[:3]
    raise ValueError(
        f"partition={list(names)} has {name!r}, which is not a layer; nearest: "
        f"{', '.join(nearest)} (the {len(layers)} layers are {layers[0]!r} to {layers[-1]!r})"
    )


def _as_integers(values: Sequence[float]) -> list[int]:
    """Return the values times a common factor that makes all of them integers.

    The values are read as printed, so that 3 * 0.1 ties with 0.3.
    """
    fractions = [Fraction(repr(float(value))) for value in values]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * scale) for fraction in fractions]


def _smallest_limit(sums: Sequence[int], num_stages: int) -> int:
    """Return the least L for which a split exists whose stages all cost at most L.

    It is found by bisection; each step fills the stages greedily.
    """
    num_layers = len(sums) - 1

    def possible(limit: int) -> bool:
        start = 0
        for remaining in reversed(range(num_stages)):
            stop = bisect_right(sums, sums[start] + limit) - 1
            if stop == start:
                return False
            # Leave one layer for each following stage.
            start = min(stop, num_layers - remaining)
        return start == num_layers

    low = 0
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle + 1, high)
    return low


def _most_even(sums: Sequence[int], num_stages: int, limit: int) -> Ranges:
    """Return the most even split whose stages all cost at most ``limit``.

    Dynamic programming from the last stage: best[i] is the best way to put the layers from i on
    into the remaining stages.
    """
    num_layers = len(sums) - 1
    # Entries are (sum of squares, cost of the ends); a choice is the layer after the stage.
    best: list[tuple[int, int] | None] = [None] * num_layers + [(0, 0)]
    choices: list[dict[int, int]] = []
    for stage in reversed(range(num_stages)):
        stage_best: list[tuple[int, int] | None] = [None] * (num_layers + 1)
        choice: dict[int, int] = {}
        is_end = stage in (0, num_stages - 1)
        for start in range(num_layers):
            for stop in range(start + 1, num_layers + 1):
                cost = sums[stop] - sums[start]
                if cost > limit:
                    break
                tail = best[stop]
                if tail is None:
                    continue
                key = (tail[0] + cost * cost, tail[1] + cost * is_end)
                current = stage_best[start]
                if current is None or key < current:
                    stage_best[start], choice[start] = key, stop
        best = stage_best
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(pairwise(bounds))
