"""Tests of the action recorder, its clock alignment and the ideal timeline."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_ptdp.data_parallel.reduction import Reduction
from lightning_ptdp.pipeline import action_recorder as recorder_module
from lightning_ptdp.pipeline.action_recorder import ActionRecorder, ideal_timeline
from lightning_ptdp.pipeline.program_observers import Observers
from lightning_ptdp.schedule import Action, Costs, Timeline, build_schedule, simulate
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import Group, ProcessMesh

CPU = torch.device("cpu")


class Clock:
    """Replacement for ``time`` that the test sets."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def perf_counter_ns(self):
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(recorder_module, "time", made)
    return made


class Work:
    """Reduction that ends when the test calls ``end``."""

    def __init__(self):
        self._told = []

    def when_done(self, tell):
        self._told.append(tell)

    def end(self):
        for tell in self._told:
            tell()


def alone(microbatches=2):
    return build_schedule("auto", pipeline_parallel_size=1, num_microbatches=microbatches)


def played(clock, recorder, schedule, *, wait=0.0):
    """Record ``schedule``: forwards take 1 and backwards 2, each after a wait."""
    recorder.began(schedule)
    for action in schedule.programs[0]:
        recorder.started(action)
        clock.now += wait
        recorder.waiting(str(action), 7)
        clock.now += wait
        recorder.waiting(str(action), None)
        clock.now += {"F": 1, "B": 2}.get(action.kind, 0.5)
        recorder.finished(action)
    recorder.ended()


def spans(timeline):
    return [
        (str(span.action), round(float(span.start), 6), round(float(span.end), 6))
        for span in timeline.spans[0]
    ]


def test_only_computations_are_recorded(clock):
    recorder = ActionRecorder(CPU)
    played(clock, recorder, alone())
    timeline = recorder.gather(Group())
    assert spans(timeline) == [("F0.0", 0, 1), ("B0.0", 1, 3), ("F0.1", 3, 4), ("B0.1", 4, 6)]
    assert timeline.reductions == ()
    assert timeline.schedule is alone()


def test_wait_counts_as_idle_time(clock):
    recorder = ActionRecorder(CPU)
    played(clock, recorder, alone(), wait=5)
    assert spans(recorder.gather(Group())) == [
        ("F0.0", 0, 1),
        ("B0.0", 11, 13),
        ("F0.1", 23, 24),
        ("B0.1", 34, 36),
    ]


def test_wait_outside_of_computation_is_ignored(clock):
    recorder = ActionRecorder(CPU)
    recorder.began(alone(1))
    for text in ("F0.0", "SF0.0", "B0.0"):
        recorder.started(Action.parse(text))
        if text[0] == "S":
            recorder.waiting("F1.0", 1)
            recorder.waiting("F1.0", None)
        clock.now += 1
        recorder.finished(Action.parse(text))
    recorder.waiting("F1.0", 1)
    recorder.waiting("F1.0", None)
    recorder.ended()
    assert spans(recorder.gather(Group())) == [("F0.0", 0, 1), ("B0.0", 2, 3)]


def test_timeline_covers_last_program_if_complete(clock):
    recorder = ActionRecorder(CPU)
    assert recorder.gather(Group()) is None
    played(clock, recorder, alone(3))
    played(clock, recorder, alone(1))
    assert spans(recorder.gather(Group())) == [("F0.0", 0, 1), ("B0.0", 1, 3)]
    recorder.began(alone(1))
    recorder.started(Action.parse("F0.0"))
    assert recorder.gather(Group()) is None


def test_reduction_spans_first_launch_to_last_end(clock):
    recorder, works = ActionRecorder(CPU), [Work() for _ in range(4)]
    recorder.began(alone(1))
    recorder.started(Action.parse("F0.0"))
    clock.now += 1
    recorder.finished(Action.parse("F0.0"))
    for stage, work in zip((3, 3, 0, None), works, strict=True):
        recorder.reducing(stage, work)
        clock.now += 1
    recorder.ended()
    for work, now in ((works[0], 110.0), (works[2], 111.0), (works[1], 112.5)):
        clock.now = now
        work.end()
    timeline = recorder.gather(Group())
    assert [(str(s.action), s.start, s.end) for s in timeline.reductions[0]] == [
        ("R3", 1, 12.5),
        ("R0", 3, 11),
    ]
    assert timeline.step_time == 12.5


def test_reduction_of_earlier_program_is_ignored(clock):
    recorder, late = ActionRecorder(CPU), Work()
    recorder.began(alone(1))
    recorder.reducing(0, late)
    played(clock, recorder, alone(1))
    late.end()
    timeline = recorder.gather(Group())
    assert timeline.reductions == ()


def test_observers_are_notified_in_order_until_removed():
    told = []

    events = ("began", "started", "waiting", "finished", "reducing", "ended")

    def observer(name):
        return SimpleNamespace(
            **{event: lambda *_, event=event: told.append((name, event)) for event in events}
        )

    first, second = observer("first"), observer("second")
    observers = Observers([first])
    observers.add(second)
    schedule, action = alone(1), Action.parse("F0.0")
    observers.began(schedule)
    observers.started(action)
    observers.waiting("F0.0", 1)
    observers.finished(action)
    observers.reducing(0, None)
    observers.ended()
    assert told == list(
        itertools.chain.from_iterable([("first", event), ("second", event)] for event in events)
    )
    observers.remove(first)
    observers.remove(first)
    told.clear()
    observers.ended()
    assert told == [("second", "ended")]


# ---- ideal timeline ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_ideal_of_simulated_step_equals_simulation(name, v):
    schedule = build_schedule(
        name, pipeline_parallel_size=2, virtual_pipeline_size=v, num_microbatches=4
    )
    costs = {
        "forward": range(2, 2 + 2 * v),
        "backward": range(3, 3 + 2 * v),
        "weight": range(1, 1 + 2 * v),
    }
    exact = simulate(schedule, Costs(**costs, reduce=range(5, 5 + 2 * v)))
    ideal = ideal_timeline(exact)
    assert ideal.step_time == pytest.approx(float(exact.step_time))
    assert ideal.bubble_fraction == pytest.approx(float(exact.bubble_fraction))
    slow = simulate(schedule, Costs(**costs, latency=3, send=1))
    assert slow.step_time > exact.step_time - 20
    assert ideal_timeline(slow).step_time == pytest.approx(
        float(simulate(schedule, Costs(**costs)).step_time)
    )


def test_ideal_timeline_uses_mean_costs():
    schedule = alone(2)
    costs = iter((1.0, 5.0, 3.0, 1.0))
    at, found = 0.0, []
    for action in (action for action in schedule.programs[0] if action.kind in "FB"):
        end = at + next(costs)
        found.append(recorder_module.Span(action, at, end))
        at = end + 10
    ideal = ideal_timeline(Timeline(schedule, (tuple(found),)))
    assert [(span.start, span.end) for span in ideal.spans[0]] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert ideal.bubble_fraction == 0


def test_ideal_timeline_counts_only_exposed_reduction():
    schedule = alone(1)
    first, last = (Action.parse(text) for text in ("F0.0", "B0.0"))
    measured = Timeline(
        schedule,
        ((recorder_module.Span(first, 0, 1), recorder_module.Span(last, 1, 3)),),
        ((recorder_module.Span(Action.parse("R0"), 2, 3.5),),),
    )
    assert ideal_timeline(measured).step_time == measured.step_time == 3.5


# ---- real processes ------------------------------------------------------------------------------


def _late_clock(seconds):
    return SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + seconds,
        perf_counter_ns=lambda: time.perf_counter_ns() + round(seconds * 1e9),
    )


def _recorded_ring(rank, world_size, broken):
    """Run 1F1B with real messages and one clock per rank; rank ``broken`` does not finish."""
    recorder_module.time = _late_clock(1e4 * rank)
    try:
        layout = ParallelLayout(world_size=world_size, pipeline_parallel_size=world_size)
        group = ProcessMesh.create(layout=layout, rank=rank).group("pipeline")
        schedule = build_schedule("1f1b", pipeline_parallel_size=world_size, num_microbatches=3)
        recorder = ActionRecorder(CPU)
        sent = []
        recorder.began(schedule)
        for action in schedule.programs[rank]:
            recorder.started(action)
            _perform(action, rank, world_size, recorder, sent)
            recorder.finished(action)
        if rank != broken:
            recorder.ended()
        for _, work in sent:
            work.wait()
        reduction = Reduction(inner=group).prepare(torch.zeros(3))
        recorder.reducing(rank, reduction)
        reduction.wait()
        timeline = recorder.gather(group)
        return timeline, [str(action) for action, _, _ in recorder._notes]
    finally:
        recorder_module.time = time


def _perform(action, rank, world_size, recorder, sent):
    message = torch.zeros(1)
    source = {"F": rank - 1, "B": rank + 1}.get(action.kind)
    if source is not None and 0 <= source < world_size:
        recorder.waiting(str(action), source)
        dist.recv(message, source, tag=action.microbatch or 0)
        recorder.waiting(str(action), None)
    target = {"SF": rank + 1, "SB": rank - 1}.get(action.kind)
    if target is not None:
        sent.append((message, dist.isend(message, target, tag=action.microbatch or 0)))


def test_clocks_of_ranks_are_aligned(pool):
    results = pool.run(_recorded_ring, world_size=3, args=(3, -1))
    timeline = results[0][0]
    assert results[1][0] is results[2][0] is None
    assert [[str(span.action) for span in spans] for spans in timeline.spans] == [
        noted for _, noted in results
    ]
    assert [[str(span.action) for span in spans] for spans in timeline.reductions] == [
        ["R0"],
        ["R1"],
        ["R2"],
    ]
    assert timeline.spans[0][0].start == 0
    assert 0 < timeline.step_time < 1e3
    ends = {str(span.action): span.end for spans in timeline.spans for span in spans}
    starts = {str(span.action): span.start for spans in timeline.spans for span in spans}
    slack = 0.02  # at most half of the fastest round trip
    for microbatch, stage in itertools.product(range(3), range(2)):
        assert starts[f"F{stage + 1}.{microbatch}"] > ends[f"F{stage}.{microbatch}"] - slack
        assert starts[f"B{stage}.{microbatch}"] > ends[f"B{stage + 1}.{microbatch}"] - slack
    assert all(0 <= span.start <= span.end for spans in timeline.spans for span in spans)


def test_unfinished_rank_yields_no_timeline(pool):
    assert [timeline for timeline, _ in pool.run(_recorded_ring, world_size=2, args=(2, 1))] == [
        None,
        None,
    ]


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="times CUDA events: on a CPU there are none, and the host's clock is tested above",
)
def test_cuda_events_are_converted_to_host_time():
    device = torch.device("cuda", 0)
    big = torch.randn(4096, 4096, device=device)
    recorder = ActionRecorder(device)
    torch.cuda.synchronize()
    before = time.perf_counter()
    recorder.began(alone(1))
    for text in ("F0.0", "B0.0"):
        recorder.started(Action.parse(text))
        big @ big  # queued, not waited for
        recorder.finished(Action.parse(text))
    recorder.ended()
    part = recorder._recorded()
    after = time.perf_counter()
    forward, backward = part.spans
    assert (
        before - 1e-3 < forward.start < forward.end <= backward.start < backward.end < after + 1e-3
    )
