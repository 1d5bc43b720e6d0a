"""Point-to-point messages between stages: headers only for new forms, scatter over tensor-parallel
ranks, short-lived buffers. Real processes over gloo."""

from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch

from lightning_ptdp.pipeline.crossing import Crossing, Form, TensorForm, rebuild
from lightning_ptdp.pipeline.discover import find_parts
from lightning_ptdp.pipeline.p2p import PeerError, Transport
from lightning_ptdp.pipeline.runtime import PipelineRuntime
from lightning_ptdp.pipeline.stage import PipelineCut
from lightning_ptdp.schedule import Action, Schedule, build_schedule
from lightning_ptdp.schedule.actions import receives_ahead
from lightning_ptdp.world.layout import ParallelLayout
from lightning_ptdp.world.mesh import ProcessMesh
from tests.pipeline.crossing_models import Memory, Nest, Pair, build, crossing_of
from tests.pipeline.crossing_models import ids as batch_of
from tests.pipeline.jobs import SumJob

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass
class Measured(Transport):
    """Transport that counts sent bytes, receive buffers and outstanding messages."""

    sent_bytes: int = 0
    posted: list[int] = field(default_factory=list)
    peak_receives: int = 0
    peak_receive_bytes: int = 0
    peak_outstanding_sends: int = 0

    def buffer(self, form):
        buffer = super().buffer(form)
        self.posted.append(buffer.nbytes)
        self.peak_receives = max(self.peak_receives, len(self.posted))
        self.peak_receive_bytes = max(self.peak_receive_bytes, sum(self.posted))
        return buffer

    def assemble(self, buffer, form):
        self.posted.remove(buffer.nbytes)
        return super().assemble(buffer, form)

    def _send(self, what, crossing, target, direction, header):
        super()._send(what, crossing, target, direction, header)
        self.sent_bytes += sum(
            tensor.nbytes
            for tensor in self._outstanding[self.mesh.rank, target, direction][-1].tensors
        )
        self.peak_outstanding_sends = max(
            self.peak_outstanding_sends, sum(map(len, self._outstanding.values()))
        )


def transport(rank, *, tensor=1, **options):
    """Return the transport of one of two pipeline ranks."""
    layout = ParallelLayout(
        world_size=2 * tensor, pipeline_parallel_size=2, tensor_parallel_size=tensor
    )
    return Measured(
        mesh=ProcessMesh.create(layout=layout, rank=rank, timeout=timedelta(seconds=30)),
        device=CPU,
        **options,
    )


def outputs():
    """Return typical outputs of a block, by the signature of their microbatch."""
    x = torch.arange(6.0).view(2, 3)
    return {
        "tensor": x,
        "strided": x.t(),
        "tuple": (x + 1, None),
        "nest": {"a": [x, {"b": x[0, 0], 3: True}], "again": x, "n": 0.5},
        "empty": (x, torch.zeros(0, 4)),
        "dtypes": [(torch.arange(5) - 1).to(dtype) for dtype in DTYPES],
    }


def same(found, expected):
    """Return True if structure, constants, shapes and dtypes are equal, and tensors bitwise."""
    one, other = crossing_of(found), crossing_of(expected)
    pairs = zip(one.tensors, other.tensors, strict=True)
    return one.form == other.form and all(torch.equal(a, b) for a, b in pairs)


def exchange_new_and_known_forms(rank):
    link, order = (
        transport(rank),
        ["tensor", "nest", "tensor", "strided", "dtypes", "nest", "empty", "tuple"],
    )
    if rank == 0:
        sizes = []
        for step in range(2):
            for index, name in enumerate(order):
                before = link.sent_bytes
                link.send_forward(
                    f"F1.{index}", crossing_of(outputs()[name]), target=1, signature=name
                )
                payload = sum(tensor.nbytes for tensor in crossing_of(outputs()[name]).tensors)
                sizes.append((step, name, link.sent_bytes - before > payload))
            link.flush()
        return sizes
    found = []
    for _ in range(2):
        # All receives are requested at once. Those behind an unknown header must wait.
        receipts = [
            link.receive_forward(f"F1.{i}", source=0, signature=name)
            for i, name in enumerate(order)
        ]
        for receipt, name in zip(receipts, order, strict=True):
            crossing = receipt.wait()
            output = rebuild(crossing.form.output, crossing.tensors, lambda: torch.empty(0))
            found.append((name, same(output, outputs()[name])))
    return found


def test_header_is_sent_once_per_form(pool):
    sent, received = pool.run(exchange_new_and_known_forms, world_size=2)
    assert [name for name, equal in received if not equal] == []
    assert len(received) == 16
    seen = set()
    for step, name, with_header in sent:
        assert with_header == (name not in seen), f"step {step}, {name}"
        seen.add(name)


def exchange_gradients(rank):
    link = transport(rank)
    x, n = torch.randn(3, 2, dtype=torch.float64, requires_grad=True), torch.arange(3)
    if rank == 0:
        crossing = crossing_of((x, n, (x * 2)[0]))
        link.send_forward("F1.0", crossing, target=1, signature=0)
        back = link.receive_backward("B0.0", source=1, awaited=crossing.awaited).wait()
        link.flush()
        return [tensor.tolist() for tensor in back.tensors]
    entered = link.receive_forward("F1.0", source=0, signature=0).wait().entering()
    (entered.tensors[0].t() * 3).sum().backward()
    link.send_backward("B0.0", entered.gradients(), target=0)
    link.flush()
    return [tensor.requires_grad for tensor in entered.tensors]


def test_differentiable_tensors_receive_gradients_or_zeros(pool):
    gradients, needs = pool.run(exchange_gradients, world_size=2)
    assert needs == [True, False, True]
    assert gradients == [[[3.0, 3.0]] * 3, [0.0, 0.0]]


# ---- scatter -------------------------------------------------------------------------------------

HIDDEN, SMALL, ODD = (2, 8, 6), (4,), (3, 11)


def exchange_alike_on_tensor_ranks(rank, scatter, alike):
    link = transport(rank, tensor=2, scatter=scatter, scatter_minimum=16)
    generator = torch.Generator().manual_seed(3)
    shapes = (HIDDEN, SMALL, ODD, HIDDEN[::-1])
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
    tensors[3] = tensors[3].transpose(0, 2)  # not contiguous
    crossing = crossing_of((*tensors, torch.arange(64)), replicated=alike)
    whole = [tensor.detach().clone() for tensor in crossing.tensors]
    source, target = rank % 2, rank % 2 + 2
    if rank < 2:
        link.send_forward("F1.0", crossing, target=target, signature=0)
        before = link.sent_bytes
        link.send_forward("F1.1", crossing, target=target, signature=0)
        awaited = crossing.awaited
        receipts = [
            link.receive_backward(f"B0.{i}", source=target, awaited=awaited) for i in range(2)
        ]
        back = [receipt.wait() for receipt in receipts]
        link.flush()
        good = all(
            torch.equal(g, t * 2)
            for found in back
            for g, t in zip(found.tensors, whole[:4], strict=True)
        )
        return good, link.sent_bytes - before
    receipts = [link.receive_forward(f"F1.{i}", source=source, signature=0) for i in range(2)]
    found = [receipt.wait() for receipt in receipts]
    before = link.sent_bytes
    for index, arrived in enumerate(found):
        gradients = Crossing(
            tuple(tensor * 2 for tensor in arrived.tensors[:4]), Form(tensors=arrived.awaited)
        )
        link.send_backward(f"B0.{index}", gradients, target=source)
    link.flush()
    good = all(
        torch.equal(a, b) for arrived in found for a, b in zip(arrived.tensors, whole, strict=True)
    )
    return good, (link.sent_bytes - before) // 2


def test_tensor_parallel_ranks_scatter_replicated_tensors(pool):
    hidden, rest, integers = 2 * 96 * 2, (4 + 33) * 2, 64 * 8
    for scatter, alike, divisor in ((False, True, 1), (True, True, 2), (True, False, 1)):
        for rank, (good, size) in enumerate(
            pool.run(exchange_alike_on_tensor_ranks, world_size=4, args=(scatter, alike))
        ):
            assert good, f"rank {rank} received wrong values"
            assert size == hidden // divisor + rest + (integers if rank < 2 else 0), f"rank {rank}"


# ---- lifetimes -----------------------------------------------------------------------------------


def send_many(rank):
    link, count = transport(rank), 20
    x = torch.zeros(100)
    if rank == 0:
        for index in range(count):
            link.send_forward(f"F1.{index}", crossing_of(x + index), target=1, signature=0)
        link.flush()
        return (
            link.peak_outstanding_sends,
            link.peak_receives,
            [len(queue) for queue in link._outstanding.values()],
        )
    values, pending = [], []
    for index in range(count):
        pending.append(link.receive_forward(f"F1.{index}", source=0, signature=0))
        if len(pending) == 2:
            values.append(pending.pop(0).wait().tensors[0][0].item())
    values.append(pending.pop(0).wait().tensors[0][0].item())
    return link.peak_receives, link.peak_receive_bytes, values, link.posted


def test_outstanding_sends_and_receive_buffers_are_bounded(pool):
    sender, receiver = pool.run(send_many, world_size=2)
    outstanding, receives, left = sender
    assert outstanding == 4
    assert receives == 0
    assert left == [0]
    assert receiver == (2, 800, [float(index) for index in range(20)], [])


def test_send_limit_covers_receives_posted_ahead():
    def asking_for_all(count):
        every = range(count)
        programs = (
            [Action.parse(f"{kind}.{i}") for i in every for kind in ("F0", "SF0")],
            [Action.parse(f"{kind}.{i}") for kind in ("RF1", "F1") for i in every],
        )
        return Schedule("own", 2, 1, count, tuple(map(tuple, programs)))

    link = Transport(mesh=ProcessMesh(layout=ParallelLayout(world_size=1)), device=CPU)
    for count, limit in ((3, 4), (9, 9)):
        assert receives_ahead(asking_for_all(count)) == count
        link.begin(asking_for_all(count))
        assert link._limit == limit
    assert (
        receives_ahead(build_schedule("1f1b", pipeline_parallel_size=4, num_microbatches=16)) <= 2
    )


# ---- refusals ------------------------------------------------------------------------------------


def change_the_shape(rank):
    link = transport(rank)
    if rank == 1:
        return link.receive_forward("F1.0", source=0, signature=0).wait().tensors[0].shape
    link.send_forward("F1.0", crossing_of(torch.zeros(2, 3)), target=1, signature=0)
    messages = []
    for other in (torch.zeros(2, 4), (torch.zeros(2, 3), None)):
        with pytest.raises(ValueError) as caught:
            link.send_forward("F1.1", crossing_of(other), target=1, signature=0)
        messages.append(str(caught.value))
    link.flush()
    return messages


def test_changed_form_with_same_signature_is_refused(pool):
    (shape, structure), received = pool.run(change_the_shape, world_size=2)
    assert received == (2, 3)
    for words in ("F1.1", "(2, 4)", "(2, 3)", "not on its values"):
        assert words in shape
    assert "another structure" in structure


class Handle(torch.distributed.Work):
    """Handle of a message that arrives, or fails with ``error``."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self.error = error

    def wait(self):
        if self.error:
            raise RuntimeError(self.error)


def test_lost_peer_is_named_with_state_of_other_ranks():
    told = []
    link = Transport(
        mesh=ProcessMesh(layout=ParallelLayout(world_size=4, pipeline_parallel_size=4), rank=2),
        device=CPU,
        waiting=lambda what, peer: told.append((what, peer)),
        explain=lambda: "rank 1: frozen in F1.3",
    )
    with pytest.raises(
        PeerError,
        match=r"(?s)rank 2 .*action F2.3 for rank 1.*Connection closed.*\nrank 1: frozen in F1.3",
    ):
        link.wait(Handle("Connection closed by peer"), "F2.3", 1)
    assert told == [("F2.3", 1)]
    link.wait(Handle(), "F2.3", 1)
    assert told[1:] == [("F2.3", 1), ("F2.3", None)]


# ---- with the runtime ----------------------------------------------------------------------------


KINDS = {"Memory": Memory, "Nest": Nest, "Pair": Pair}
BATCHES = [batch_of(2, 5), batch_of(3, 4), batch_of(2, 5), batch_of(1, 7), batch_of(3, 4)]


def train(rank, name, schedule):
    model = build(KINDS[name])
    sizes = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
    program = build_schedule(schedule, num_microbatches=len(BATCHES), **sizes)
    evaluation = build_schedule(schedule, num_microbatches=len(BATCHES), training=False, **sizes)
    layout = ParallelLayout(world_size=2, placement=program.placement, **sizes)
    mesh = ProcessMesh.create(layout=layout, rank=rank)
    ranges = tuple((stage, stage + 1) for stage in range(4))
    cut = PipelineCut(
        model, parts=find_parts(model), ranges=ranges, stages=tuple(program.stages_of(rank))
    )
    link = Transport(mesh=mesh, device=CPU)
    runtime = PipelineRuntime(cut=cut, transport=link, group=mesh.group("pipeline"))
    losses = []
    for training in (False, True, True, False):
        job = SumJob(model, BATCHES, training=training)
        with torch.set_grad_enabled(training):
            runtime.run(program if training else evaluation, job)
        losses.append(job.losses)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("Memory", "interleaved_1f1b"), ("Nest", "zb_v"), ("Memory", "zb_v"), ("Pair", "gpipe")],
)
def test_crossings_under_schedule_match_whole_model(name, schedule, pool):
    ranks = pool.run(train, world_size=2, args=(name, schedule))
    whole = build(KINDS[name])
    expected = [whole(batch).square().sum() for batch in BATCHES]
    (2 * torch.stack(expected).sum()).backward()
    for losses in next(losses for losses, _ in ranks if losses[0]):
        assert losses == {index: loss.item() for index, loss in enumerate(expected)}
    for parameter_name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            found = [
                gradients[parameter_name] for _, gradients in ranks if parameter_name in gradients
            ]
            torch.testing.assert_close(
                torch.stack(found).sum(0), parameter.grad, rtol=1e-11, atol=1e-11
            )


def test_empty_crossing_needs_no_message():
    link = Transport(mesh=ProcessMesh(layout=ParallelLayout(world_size=1)), device=CPU)
    assert link.buffer(TensorForm((2, 3), torch.float32)).shape == (2, 3)
    assert link.receive_backward("B0.0", source=1, awaited=()).wait() == Crossing((), Form())
