"""Parallel axes as table rows: a layout with a custom axis trains without further changes."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import lightning_ptdp
from lightning_ptdp.base.option_types import Size
from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.world.axes import AXES, Axis
from lightning_ptdp.world.layout import ParallelLayout
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough


@dataclass(frozen=True, kw_only=True)
class Regions(ParallelLayout):
    """Layout with replicas along two axes."""

    axes: ClassVar[tuple[Axis, ...]] = (
        *AXES,
        Axis(name="region", letter="r", place=5, reads="samples"),
    )
    region_parallel_size: Size = 2


@dataclass(frozen=True, kw_only=True)
class Spares(ParallelLayout):
    """Layout with ranks that duplicate the work of others."""

    axes: ClassVar[tuple[Axis, ...]] = (*AXES, Axis(name="spare", letter="s", place=25))
    spare_parallel_size: Size = 2


def with_layout(kind):
    class Strategy(PTDPStrategy):
        @property
        def layout(self):
            world = max(1, self.num_nodes * self.num_processes)
            return kind(world_size=world, **{key: getattr(self.config, key) for key in DEGREES})

    return Strategy


def test_custom_axis_appears_in_description_and_error():
    assert Regions(world_size=8, tensor_parallel_size=2).describe() == "t2 p1 d2 r2"
    assert Regions(world_size=8).groups("replicas") == (tuple(range(8)),)
    with pytest.raises(
        ValueError,
        match="pipeline_parallel_size \\* context_parallel_size \\* region_parallel_size = 1 \\* "
        "1 \\* 1 \\* 2",
    ):
        Regions(world_size=3)


DEGREES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
    "context_parallel_size",
    "sequence_parallel",
)


@dataclass(frozen=True, kw_only=True)
class AxisRun(Run):
    """Training under a layout with a custom axis."""

    kind: type[ParallelLayout]

    def make_strategy(self):
        return with_layout(self.kind)(**self.layout)


@pytest.mark.parametrize(
    ("kind", "world_size", "options"),
    [
        (Regions, 4, {"num_microbatches": 2}),
        (Regions, 4, {"shard": "optimizer", "bucket_mb": 1e-2}),
        (Regions, 4, {"pipeline_parallel_size": 2}),
        (Spares, 4, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    ],
)
def test_training_with_custom_axis_matches_single_process(kind, world_size, options, parity):
    settings = {"layers": 2, "steps": 4, "accumulate": 2}
    run = AxisRun(kind=kind, **settings)
    parity.check(run, (world_size, options), expected=parity.result(Run(**settings)))


ROOMS = ("tensor_parallel", "context_parallel", "schedule", "pipeline")
CONFIGURATION = (
    "world",
    "config.py",
    "parallelize.py",
    "strategy",
    "cli",
    "planner",
    "models",
    "data",
)


def test_axis_degrees_are_used_only_in_allowed_packages():
    package, degrees = (
        Path(lightning_ptdp.__file__).parent,
        {f"{axis.name}_parallel_size" for axis in AXES},
    )
    for file in package.rglob("*.py"):
        if file.relative_to(package).parts[0] not in (*ROOMS, *CONFIGURATION):
            nodes = ast.walk(ast.parse(file.read_text()))
            named = {
                n.attr if isinstance(n, ast.Attribute) else n.arg
                for n in nodes
                if isinstance(n, ast.Attribute | ast.keyword)
            }
            assert not named & degrees, file


def test_axis_degrees_are_listed_only_in_layout():
    degrees = {f"{axis.name}_parallel_size{many}" for axis in AXES for many in ("", "s")}
    for room in ("cli", "planner", "strategy"):
        for file in (Path(lightning_ptdp.__file__).parent / room).rglob("*.py"):
            texts = {
                node.value
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Constant)
            }
            assert len(texts & degrees) < 2, file
