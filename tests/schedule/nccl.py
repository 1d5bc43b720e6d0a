"""Operations that the hosts of a pipeline issue to NCCL for a lowered program.

This model follows the rules of the runtime and its transport, without torch. test_nccl_order.py
compares it with the runtime's own calls. test_nccl.py simulates all sizes with it."""

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from lightning_ptdp.schedule import Action, ActionKind, Channel, Schedule, build_schedule
from tests.schedule.streams import Operation

K = ActionKind
COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Assumptions of the model.

    Attributes:
        first_step: A header precedes the first hidden state of each boundary, and the host reads
            it.
        connected: Communicators were used before. Otherwise their first use blocks both hosts.
        one_communicator: A pair of ranks has one communicator for all directions.
        tensor: Number of ranks that compute every stage together, with a collective in each forward
            and backward. It represents tensor, context and expert groups. A computation waits for
            each collective, so a rank has one at a time.
        replicas: Number of ranks that reduce a stage's gradients together.
        each: They reduce them after every microbatch (sharded gradients). The gradients of the next
            one wait for these sums.
        gathers: They gather the parameters of every forward and backward, half of them ahead of it
            (sharded parameters).
        message_blocks: Thread blocks of a send or receive (``channel_ctas``).
        collective_blocks: Thread blocks of a collective.
    """

    first_step: bool = False
    connected: bool = True
    one_communicator: bool = False
    tensor: int = 1
    replicas: int = 1
    each: bool = False
    gathers: bool = False
    message_blocks: int = 0
    collective_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """A requested receive. ``boundary`` needs a header first; it is None for gradients."""

    what: str
    channel: Channel
    boundary: int | None


@dataclass(kw_only=True)
class Host:
    """One rank and the operations that it issues."""

    schedule: Schedule
    rank: int
    habits: Habits
    side: int = 0
    replica: int = 0
    operations: list[Operation] = field(default_factory=list)
    latest: int = -1
    """Index of the last compute operation, for which operations of other streams wait."""
    reduced: int = -1
    """Index of the last reduction."""
    counts: Counter[Hashable] = field(default_factory=Counter)
    used: set[Hashable] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    announced: set[int] = field(default_factory=set)
    posted: dict[str, int] = field(default_factory=dict)
    headers: dict[str, int] = field(default_factory=dict)
    queues: dict[Channel, deque[Receipt]] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)

    def run(self) -> list[Operation]:
        """Return all operations of a step."""
        program = self.schedule.programs[self.rank]
        split = {(a.stage, a.microbatch) for a in program if a.kind is K.WEIGHT}
        for action in program:
            completes = action.kind is K.WEIGHT or (
                action.kind is K.BACKWARD and (action.stage, action.microbatch) not in split
            )
            if completes and self.habits.each:
                self.give("wait for sums", COMPUTE, (self.reduced,))
            match action.kind:
                case K.FORWARD | K.BACKWARD:
                    self.compute(str(action), self.takes(action), meets="tensor")
                case K.WEIGHT:
                    self.compute(str(action), ())
                case K.SEND_FORWARD:
                    self.send_forward(action)
                case K.SEND_BACKWARD:
                    self.sent.append(
                        self.message(
                            f"B{action.stage - 1}.{action.microbatch}",
                            self.schedule.channel(action),
                        )
                    )
                case K.RECEIVE_FORWARD:
                    self.receive_forward(action)
                case K.RECEIVE_BACKWARD:
                    self.post(
                        Receipt(
                            f"B{action.stage}.{action.microbatch}",
                            self.schedule.channel(action),
                            None,
                        )
                    )
                case K.REDUCE if not self.habits.each:
                    self.collective(str(action), "data", self.habits.replicas)
            if completes and self.habits.each:
                self.reduced = self.collective(str(action), "data", self.habits.replicas)
        self.give("end", COMPUTE, self.sent, holds=True)
        return self.operations

    def give(
        self,
        name: str,
        stream: Hashable,
        waits: Iterable[int] = (),
        meets: Hashable = None,
        parts: int = 1,
        holds: bool = False,
        blocks: int = 0,
    ) -> int:
        waits = tuple(place for place in waits if place >= 0)
        self.operations.append(
            Operation(
                name=name,
                stream=stream,
                waits=waits,
                meets=meets,
                parts=parts,
                holds=holds,
                blocks=blocks,
            )
        )
        if stream == COMPUTE:
            self.latest = len(self.operations) - 1
        return len(self.operations) - 1

    def compute(self, name: str, waits: Iterable[int], *, meets: str = "") -> None:
        if meets and self.habits.gathers:
            first = self.collective(name, "gather", self.habits.replicas)
            self.give(name, COMPUTE, (*waits, first))
            waits = (self.collective(f"next {name}", "gather", self.habits.replicas),)
        self.give(name, COMPUTE, waits)
        if meets and self.habits.tensor > 1:
            done = self.collective(name, "tensor", self.habits.tensor)
            self.give(name, COMPUTE, (done,))

    def collective(self, name: str, group: str, size: int) -> int:
        place = self.replica if group == "tensor" else self.side
        communicator = (group, self.rank, place)
        self.counts[communicator] += 1
        return self.give(
            f"{group} {name}",
            group,
            (self.latest,),
            (communicator, self.counts[communicator]),
            size,
            blocks=self.habits.collective_blocks if size > 1 else 0,
        )

    def message(self, name: str, channel: Channel) -> int:
        line = (channel, self.side, self.replica)
        communicator = (
            (frozenset(channel[:2]), self.side, self.replica)
            if self.habits.one_communicator
            else line
        )
        if not self.habits.connected and communicator not in self.used:
            self.used.add(communicator)
            self.give(
                f"connect {name}",
                communicator,
                meets=("connect", communicator),
                parts=2,
                holds=True,
            )
        self.counts[line] += 1
        return self.give(
            name,
            communicator,
            (self.latest,),
            (line, self.counts[line]),
            2,
            blocks=self.habits.message_blocks,
        )

    def takes(self, action: Action) -> tuple[int, ...]:
        """Return the messages that a computation waits for."""
        forward = action.kind is K.FORWARD
        source = action.stage - 1 if forward else action.stage + 1
        if (
            source not in range(self.schedule.num_stages)
            or self.schedule.rank_of(source) == self.rank
        ):
            return ()
        kind = K.RECEIVE_FORWARD if forward else K.RECEIVE_BACKWARD
        what, channel = (
            str(action),
            self.schedule.channel(Action(kind, action.stage, action.microbatch)),
        )
        while what not in self.posted:
            queue = self.queues[channel]
            self.learn(queue.popleft())
            while queue and self.post(queue[0]):
                queue.popleft()
        return (self.posted.pop(what),)

    def send_forward(self, action: Action) -> None:
        channel, stage = self.schedule.channel(action), action.stage + 1
        what = f"F{stage}.{action.microbatch}"
        if self.habits.first_step and stage not in self.announced:
            self.announced.add(stage)
            self.sent += [
                self.message(f"{what} length", channel),
                self.message(f"{what} form", channel),
            ]
        self.sent.append(self.message(what, channel))

    def receive_forward(self, action: Action) -> None:
        channel = self.schedule.channel(action)
        if not self.habits.first_step:
            self.known.add(action.stage)
        receipt, queue = (
            Receipt(f"F{action.stage}.{action.microbatch}", channel, action.stage),
            self.queues.setdefault(channel, deque()),
        )
        if queue or not self.post(receipt):
            queue.append(receipt)

    def post(self, receipt: Receipt) -> bool:
        """Post the receive of the tensors and return True.

        If the boundary is not known yet, post the receive of its header and return False.
        """
        if receipt.boundary is None or receipt.boundary in self.known:
            self.posted[receipt.what] = self.message(receipt.what, receipt.channel)
            return True
        self.headers[receipt.what] = self.message(f"{receipt.what} length", receipt.channel)
        return False

    def learn(self, receipt: Receipt) -> None:
        self.give("read length", COMPUTE, (self.headers[receipt.what],), holds=True)
        form = self.message(f"{receipt.what} form", receipt.channel)
        self.give("read form", COMPUTE, (form,), holds=True)
        self.known.add(receipt.boundary)
        self.post(receipt)


def operations(schedule: Schedule, habits: Habits) -> list[list[Operation]]:
    """Return the operations of every rank, with the pipeline rank changing fastest.

    Tensor rank and replica follow.
    """
    return [
        Host(schedule=schedule, rank=rank, habits=habits, side=side, replica=replica).run()
        for replica in range(habits.replicas)
        for side in range(habits.tensor)
        for rank in range(schedule.pipeline_parallel_size)
    ]


def every(
    name: str, sizes: Iterable[tuple[int, int]], chunks: Iterable[int] = (1, 2, 3)
) -> Iterator[Schedule]:
    """Yield the supported schedules of all (p, m) and v, in training and evaluation."""
    for (p, m), v, training in itertools.product(sizes, chunks, (True, False)):
        with contextlib.suppress(ValueError):  # the schedule does not support this size
            yield build_schedule(
                name,
                pipeline_parallel_size=p,
                virtual_pipeline_size=v,
                num_microbatches=m,
                training=training,
            )
