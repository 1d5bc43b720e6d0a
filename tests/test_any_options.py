"""Any value of an option is accepted or refused by name, quickly and without a crash.

To try more random options: ``python -m tests.test_any_options 10000``.
"""

import dataclasses
import random
import sys
import time
import warnings
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

from lightning_ptdp.base.option_types import shown
from lightning_ptdp.cli.generate import SampleOptions
from lightning_ptdp.cli.launch_scripts import LaunchJob
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data import BertDataModule, IndexedDataModule, MixtureDataModule, TextDataModule
from lightning_ptdp.data.corpus import Corpus
from lightning_ptdp.data.corpus_build import PrepareConfig
from lightning_ptdp.data.stream_datamodule import BatchOptions
from lightning_ptdp.models import BertConfig, GPTConfig
from lightning_ptdp.models.optimizer_setup import AdamWConfig
from lightning_ptdp.planner import DEVICES, SOFTWARE, Cluster, Device, Job, Link, Software, Space
from lightning_ptdp.schedule import CustomSchedule
from lightning_ptdp.schedule.generators import SCHEDULES
from lightning_ptdp.schedule.generators.compute_orders import gpipe
from lightning_ptdp.schedule.simulate import Costs
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import Column, ParallelPlan, Region
from lightning_ptdp.world.axes import divisors
from lightning_ptdp.world.batch_size import BatchPlan, RampUp
from lightning_ptdp.world.layout import ParallelLayout

LIMIT_S = 0.1
PLAN = ParallelPlan(blocks="net", tensor={"net.*": "column"})
TINY = GPTConfig(num_layers=2, hidden_size=8, num_heads=2)
DEVICE = next(iter(DEVICES.values()))


class Hostile:
    """Object whose ``repr`` raises."""

    def __repr__(self):
        raise RuntimeError("no text of me")


STRANGE = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        4,
        6,
        8,
        16,
        64,
        -1,
        2**31,
        2**61 - 1,
        10**12,
        10**30,
        10**5000,
    ),
    *(
        0.0,
        0.5,
        1.0,
        2.5,
        -1.0,
        1e-9,
        1e300,
        float("inf"),
        float("nan"),
        1j,
        Fraction(1, 3),
        np.float32(0.5),
        np.int64(4),
    ),
    *(
        "",
        "2",
        "auto",
        "none",
        "x" * 100_000,
        "a\0b",
        "a\0b.csv",
        "/nowhere/x.csv",
        "\ud800",
        "s3://a/b",
        b"1f1b",
        Path("x"),
        Path("\0"),
    ),
    *(
        [],
        [1],
        [1, 1],
        (2, 2),
        ["a", "b"],
        [None],
        range(3),
        {1, 2},
        {},
        {"a": 1},
        {1: 2},
        {"start": 8, "increment": 8, "samples": 64},
    ),
    *(
        {"start": "8", "increment": 0, "samples": None},
        [{"data_dir": "x", "weight": 1}],
        [{"data_dir": 3, "weight": "x"}],
        [[1], [2]],
    ),
    *(
        object(),
        int,
        len,
        gpipe,
        Hostile(),
        torch.ones(3),
        np.ones(3),
        torch.nn.Linear(1, 1),
        PLAN,
        TINY,
        DEVICE,
    ),
)
GOOD = {
    "schedule": (*SCHEDULES, CustomSchedule("mine", lambda p, v, m: gpipe(p, v, m))),
    "plan": (PLAN, None),
    "order": (gpipe, lambda p, v, m: 3, lambda: None),
    "model": (TINY,),
    "device": tuple(DEVICES.values()),
    "node": (Link(bandwidth=1e9, latency_s=1e-6),),
    "card": (Link(bandwidth=1e9, latency_s=1e-6),),
    "cluster": (DEVICE.cluster,),
    "software": tuple(SOFTWARE.values()),
    "output": ("folder",),
    "data_dir": ("folder",),
    "data_prefix": ("folder/x",),
    "corpora": ([{"data_dir": "x", "weight": 1.0}],),
    "ramp_up": (
        {"start": 8, "increment": 8, "samples": 64},
        {"start": 1, "increment": 1, "samples": 10**12},
    ),
    "partition": ((1, 1), [2, 2], ("net.0", "net.4"), [1] * 8, [-1, 3], [0, 4]),
    "tensor": ({"a.*": "column"}, {"a": Column(parts=(4, 4))}, {"a": "colum"}, {"a": 3}),
    "betas": ((0.9, 0.95), [0.9, 0.95], (2, 3)),
    "arguments": (("--config", "x.yaml"),),
    "folder": (Path("x"),),
}
INNER = dict.fromkeys(("samples", "num_replicas"), (1, 2, 3, 7, 64, 2**31, 10**12))
"""Values that only the package itself passes."""


def strategy(world_size, samples, **options):
    """Create a strategy, its layout and the microbatches of a batch."""
    config = PTDPStrategy(**options).config
    config.layout(world_size)
    config.microbatches(samples)


def batches(num_replicas, **options):
    """Create the batch plans of all steps."""
    BatchOptions(**options).plans(num_replicas)


FRONT_DOORS = {
    "strategy": (strategy, PTDPConfig.__init__, ("world_size", "samples")),
    "config": (PTDPConfig, PTDPConfig.__init__, ()),
    "layout": (ParallelLayout, ParallelLayout.__init__, ()),
    "batch plan": (BatchPlan.derive, BatchPlan.derive, ()),
    "ramp-up": (RampUp, RampUp.__init__, ()),
    "batches": (batches, BatchOptions.__init__, ("num_replicas",)),
    "plan": (ParallelPlan, ParallelPlan.__init__, ()),
    "column": (Column, Column.__init__, ()),
    "region": (Region, Region.__init__, ()),
    "schedule": (CustomSchedule, CustomSchedule.__init__, ()),
    "costs": (Costs, Costs.__init__, ()),
    "GPT": (GPTConfig, GPTConfig.__init__, ()),
    "BERT": (BertConfig, BertConfig.__init__, ()),
    "AdamW": (AdamWConfig, AdamWConfig.__init__, ()),
    "prepare": (PrepareConfig, PrepareConfig, ()),  # its fields are defined in two modules
    "corpus": (Corpus, Corpus.__init__, ()),
    "text": (
        TextDataModule,
        TextDataModule.__init__,
        ("sequence_length", "global_batch_size", "micro_batch_size", "ramp_up"),
    ),
    "pairs": (BertDataModule, BertDataModule.__init__, ("data_dir", "sequence_length")),
    "mixture": (
        MixtureDataModule,
        MixtureDataModule.__init__,
        ("global_batch_size", "micro_batch_size", "ramp_up", "seed"),
    ),
    "indexed": (
        IndexedDataModule,
        IndexedDataModule.__init__,
        ("sequence_length", "num_microbatches", "num_workers"),
    ),
    "space": (Space, Space.__init__, ()),
    "job": (Job, Job.__init__, ()),
    "device": (Device, Device.__init__, ()),
    "link": (Link, Link.__init__, ()),
    "cluster": (Cluster, Cluster.__init__, ()),
    "software": (Software, Software.__init__, ()),
    "sample": (SampleOptions, SampleOptions, ()),  # like those of prepare
    "launch": (LaunchJob, LaunchJob.__init__, ()),
}


def options_of(door):
    _, signature, further = FRONT_DOORS[door]
    hints = get_type_hints(signature)
    names = [
        name
        for name in hints
        if name not in ("return", "kwargs") and get_origin(hints[name]) is not ClassVar
    ]
    return [*names, *(name for name in further if name not in names)]


def required(door):
    """Return the required options of a front door.

    The generator of random options gives each of them a usual value unless it draws another one.
    """
    signature = FRONT_DOORS[door][1]
    given = dict(getattr(signature, "__kwdefaults__", None) or {})
    fields = (
        {f.name: f for f in dataclasses.fields(FRONT_DOORS[door][0])}
        if dataclasses.is_dataclass(FRONT_DOORS[door][0])
        else {}
    )
    optional = {name for name, f in fields.items() if f.default is not f.default_factory}
    further = [
        name
        for name in FRONT_DOORS[door][2]
        if name in ("world_size", "samples", "num_replicas", "data_dir")
    ]
    return [
        name
        for name in options_of(door)
        if name in further or (name not in given and name not in optional)
    ]


def usual(name, hint, draw):
    """Return a value that may be valid."""
    if name in GOOD:
        return draw.choice(GOOD[name])
    hint = (
        draw.choice(get_args(hint))
        if get_args(hint) and not isinstance(get_args(hint)[0], str)
        else hint
    )
    if get_args(hint) and all(isinstance(value, str) for value in get_args(hint)):
        return draw.choice(get_args(hint))
    return {bool: draw.random() < 0.5, str: "text", float: draw.choice((0.1, 0.5, 1, 20.0))}.get(
        hint, draw.choice((1, 2, 3, 4, 8, 16, 64))
    )


def drawn(seed):
    """Generate random front doors with mostly usual and some strange options."""
    draw = random.Random(seed)
    hints = {door: get_type_hints(FRONT_DOORS[door][1]) for door in FRONT_DOORS}
    while True:
        door = draw.choice(("strategy", "strategy", "config", *FRONT_DOORS))
        names = options_of(door)
        chosen = draw.sample(names, k=min(len(names), draw.choice((1, 1, 2, 3, 5))))
        strangeness = draw.choice((0.0, 0.3, 0.7))
        values = {
            name: usual(name, hints[door].get(name, int), draw)
            for name in {*required(door), *chosen}
        }
        for name in chosen:
            if name in INNER:
                values[name] = draw.choice(INNER[name])
            elif draw.random() < strangeness:
                values[name] = draw.choice(STRANGE)
        yield door, values


def verdict(door, values):
    """Call a front door with options and return the fault of its response, or "".

    It must quickly accept the options, or refuse them with a short message that names an option.
    """
    started = time.process_time()
    message = None
    try:
        FRONT_DOORS[door][0](**values)
    except ValueError as error:
        message = str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    took = time.process_time() - started
    if took > LIMIT_S:
        return f"took {took:.2f} s"
    if message is None:
        return ""
    if not any(name in message for name in options_of(door)):
        return f"names no option: {message}"
    return f"says too much: {message[:200]}" if len(message) > 2000 else ""


def campaign(count, seed):
    """Try random options and return the draws by front door and the faults."""
    wrong, doors = [], Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, (door, values) in zip(range(count), drawn(seed), strict=False):
            doors[door] += 1
            # Try twice, since a pause of the machine is not a fault.
            found = verdict(door, values) and verdict(door, values)
            if found:
                wrong.append(
                    f"{door}({', '.join(f'{name}={shown(value)}' for name, value in values.items())}): {found}"
                )
    return doors, wrong


@pytest.mark.parametrize("seed", range(4))
def test_random_options_are_accepted_or_refused_by_name(seed):
    doors, wrong = campaign(150, seed)
    assert len(doors) > 20 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("number", [2**31, 10**12, 2**61 - 1, 6**20])
def test_divisors_of_large_numbers_are_found_quickly(number):
    started = time.process_time()
    found = divisors(number)
    assert time.process_time() - started < LIMIT_S
    assert all(number % k == 0 for k in found) and {1, number} <= set(found)


def test_divisors_match_exhaustive_search():
    for number in (1, 2, 12, 36, 97, 1024, 99_991 * 7):
        assert divisors(number) == [k for k in range(1, number + 1) if number % k == 0]


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    found, faults = campaign(number, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print("\n".join(faults[:40]))
    print(
        f"{sum(found.values())} drawn from {len(found)} front doors, {len(faults)} neither "
        f"accepted nor refused in {LIMIT_S} s"
    )
    raise SystemExit(bool(faults))
