"""Tests of the report that the last stage shares with every stage."""

from inspect import signature

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule

from lightning_ptdp.engine.sharing import ReportSharing
from lightning_ptdp.engine.step_report import (
    LogCall,
    LogRecorder,
    ReportStream,
    StepReport,
    average_calls,
    numbers_on,
    read_numbers,
)
from lightning_ptdp.world.mesh import Group

CPU = torch.device("cpu")
SUM = {"reduce_fx": "sum"}
DTYPES = (torch.int64, torch.int16, torch.bfloat16, torch.float64, torch.bool)


def no_metrics(_):
    raise AssertionError("no metric was logged")


def test_logged_values_are_reduced_by_weight_or_reduce_fx():
    recorded = [
        [
            LogCall("loss", torch.tensor(1.0), {}),
            LogCall("count", 2, SUM),
            LogCall("worst", 3.0, {"reduce_fx": "max"}),
        ],
        [
            LogCall("loss", torch.tensor(4.0), {}),
            LogCall("count", 5, SUM),
            LogCall("worst", 1.0, {"reduce_fx": max}),
        ],
    ]
    numbers = numbers_on(CPU, [call.value for calls in recorded for call in calls])
    calls = average_calls(recorded, numbers, numbers_on(CPU, (2.0, 1.0)), metric_path=no_metrics)
    assert [(call.name, call.value) for call in calls] == [
        ("loss", 2.0),
        ("count", 7.0),
        ("worst", 3.0),
    ]


def test_unsupported_reduce_fx_is_refused():
    with pytest.raises(ValueError, match=r"self.log\('a', reduce_fx=median\).*torchmetrics.Metric"):
        average_calls(
            [[LogCall("a", 1.0, {"reduce_fx": torch.median})]],
            torch.ones(1),
            torch.ones(1),
            metric_path=no_metrics,
        )


def test_different_names_across_microbatches_are_refused():
    with pytest.raises(ValueError, match="different names"):
        average_calls(
            [[LogCall("a", 1.0, {})], [LogCall("b", 1.0, {})]],
            torch.ones(2),
            torch.ones(2),
            metric_path=no_metrics,
        )


def test_read_numbers_returns_rows_of_floats():
    values = (
        [torch.tensor(3), 2],
        (),
        [torch.tensor([0.5]), None, torch.tensor(1.5, dtype=torch.bfloat16)],
    )
    rows = read_numbers(*(numbers_on(CPU, row) for row in values))
    assert rows == [[3.0, 2.0], [], [0.5, 0.0, 1.5]]


def _share(rank):
    group = Group(dist.new_group([0, 1, 2]), (0, 1, 2), rank)
    sharing, seen = ReportSharing(group, source=2, stream=ReportStream(CPU)), []
    reports = [
        StepReport(1.0, 2.0, False, [LogCall("a", 3.0, {"prog_bar": True})]),
        StepReport(1.5, 2.0, False, [LogCall("a", 4.0, {"prog_bar": True})]),  # only values change
        # more calls than fit
        StepReport(2.0, 8.0, True, [LogCall(f"n{i}", float(i), {}) for i in range(100)]),
        StepReport(
            0.0,
            0.0,
            False,
            [],
            {
                "prediction": [torch.arange(3).to(dtype) for dtype in DTYPES]
                + [torch.ones(()), torch.ones(0)]
            },
        ),
    ]
    for report in reports:
        shared = sharing.share(report if rank == 2 else None)
        extras = (
            None
            if shared.extras is None
            else [(t.tolist(), t.dtype) for t in shared.extras["prediction"]]
        )
        seen.append((shared.loss, shared.weight, shared.counted, shared.calls, extras))
    return seen


def test_every_stage_gets_same_report(pool):
    first, second, last = pool.run(_share, world_size=3)
    assert first == second == last
    assert last[1][3] == [LogCall("a", 4.0, {"prog_bar": True})]
    assert [call.value for call in last[2][3]] == [float(i) for i in range(100)]
    numbers = [([0, 1, 2], dtype) for dtype in DTYPES[:-1]] + [([False, True, True], torch.bool)]
    assert last[3][4] == [*numbers, (1.0, torch.float32), ([], torch.float32)]


@pytest.mark.parametrize("value", [None, "foo", {"a": 1}, [1, 2], torch.ones(2), torch.ones(0)])
def test_unsupported_logged_value_is_refused(value):
    recorder = LogRecorder(object())
    with pytest.raises(ValueError, match=r"self\.log\(loss, .*was called, but"):
        recorder("loss", value)
    for good in (1, 2.0, True, torch.ones(()), torch.ones(1), np.float32(3)):
        recorder("loss", good)
    assert len(recorder.calls) == 6


def test_positional_options_have_lightnings_order():
    recorder = LogRecorder(object())
    options = list(signature(LightningModule.log).parameters)[3:]
    recorder("loss", 1.0, *options)
    assert recorder.calls == [LogCall("loss", 1.0, {name: name for name in options})]


def test_sample_mean_is_weighted_by_batch_size_not_by_tokens():
    sizes = {"batch_size": 2}, {"batch_size": 1}
    recorded = [
        [LogCall("loss", loss, size), LogCall("accuracy", right, size)]
        for loss, right, size in zip((1.0, 4.0), (0.0, 1.0), sizes, strict=True)
    ]
    numbers = numbers_on(CPU, [call.value for calls in recorded for call in calls])
    options = {"metric_path": no_metrics, "counted": True, "losses": numbers_on(CPU, (1.0, 4.0))}
    calls = average_calls(recorded, numbers, numbers_on(CPU, (10.0, 30.0)), **options)
    assert [float(call.value) for call in calls] == pytest.approx([(10 + 120) / 40, 1 / 3])


def _share_column(rank):
    group = Group(dist.new_group([0, 1]), (0, 1), rank)
    report = StepReport(0.0, 0.0, False, [], {"column": torch.arange(6.0).view(2, 3)[:1, 1]})
    return (
        ReportSharing(group, source=1, stream=ReportStream(CPU))
        .share(report if rank else None)
        .extras["column"]
        .tolist()
    )


def test_column_of_one_sample_is_sent(pool):
    assert pool.run(_share_column, world_size=2) == [[1.0]] * 2
