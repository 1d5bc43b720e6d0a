"""Contexts around a forward, called for every forward and its recomputation."""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ptdp.forward.surroundings import Forward, Surrounding, Surroundings
from lightning_ptdp.strategy import setup_hooks
from tests.letters import C, M, P, R, S, T
from tests.parity import fit
from tests.tiny_gpt import Run

pytestmark = pytest.mark.thorough

STEPS = 2


class Counting(Surrounding):
    """Entry that counts forwards and recomputations by hook, stage and microbatch."""

    def __init__(self):
        self.forwards = Counter()
        self.again = Counter()
        self.attached = self.most_attached = 0

    def attach(self, module):
        self.attached += 1
        self.most_attached = max(self.attached, self.most_attached)
        return self.detach

    def detach(self):
        self.attached -= 1

    def around(self, forward):
        assert forward.batch["input_ids"].size(0) == forward.full_batch["input_ids"].size(0)
        return self.counted(self.forwards, forward)

    def recomputation(self, forward):
        return contextlib.nullcontext(), self.counted(self.again, forward)

    @contextlib.contextmanager
    def counted(self, counter, forward):
        counter[forward.hook, forward.stage, forward.microbatch] += 1
        yield


def _fit_counted(rank, run):
    entry, make = Counting(), setup_hooks.make_surroundings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            setup_hooks,
            "make_surroundings",
            lambda strategy: Surroundings([*make(strategy).entries, entry]),
        )
        found = fit(rank, run)
    assert (entry.attached, entry.most_attached) == (0, 1)
    return entry.forwards, entry.again, found


LAYOUTS = {
    # processes, options, microbatches of training, of evaluation, stages
    "straight": (1, {R: "full"}, 1, 1, 1),
    "d2": (2, {R: "full"}, 1, 1, 1),
    "m4": (1, {M: 4, R: "full"}, 4, 1, 1),
    "c2": (2, {C: 2, R: "full"}, 1, 1, 1),
    "t2p2 zb_h1": (4, {T: 2, P: 2, M: 4, S: "zb_h1", R: "full"}, 4, 4, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_custom_entry_is_called_for_every_forward(name, pool):
    world_size, layout, trained, evaluated, stages = LAYOUTS[name]
    run = Run(
        world_size=world_size, layout=layout, steps=STEPS, validate_every=STEPS, samples=8 * STEPS
    )
    forwards, again = Counter[Any](), Counter[Any]()
    for stage_forwards, stage_again, _ in pool.run(
        _fit_counted, world_size=world_size, args=(run,)
    ):
        forwards += stage_forwards
        again += stage_again
    ranks = world_size // stages
    expected = Counter(
        {("training_step", s, m): STEPS * ranks for s in range(stages) for m in range(trained)}
    )
    assert again == Counter(
        {unit: count * run.layers // stages for unit, count in expected.items()}
    )
    # Once before the training and once during it.
    expected += Counter(
        {("validation_step", s, m): 2 * ranks for s in range(stages) for m in range(evaluated)}
    )
    assert forwards == expected


class Noting(Surrounding):
    """Entry that records when it is entered and left."""

    def __init__(self, name: str, noted: list[str], *, fails: bool = False) -> None:
        self.name, self.noted, self.fails = name, noted, fails

    def attach(self, module):
        if self.fails:
            raise ValueError(f"{self.name} cannot run this")
        self.noted.append(f"attach {self.name}")
        return lambda: self.noted.append(f"detach {self.name}")

    @contextlib.contextmanager
    def around(self, forward):
        self.noted.append(f"enter {self.name}")
        try:
            yield
        finally:  # torch ends a recomputation with an exception
            self.noted.append(f"leave {self.name}")


class Repeating(Noting):
    """Entry that is also entered in the recomputation."""

    def recomputation(self, forward):
        return None if forward.microbatch else (contextlib.nullcontext(), self.around(forward))


def test_entries_keep_order_and_reenter_for_recomputation():
    noted = []
    surroundings = Surroundings([Noting("a", noted), Repeating("b", noted), Repeating("c", noted)])
    x = torch.ones(2, requires_grad=True)
    for microbatch in range(2):
        with surroundings.around(Forward(hook="training_step", microbatch=microbatch)):
            y = checkpoint(torch.exp, x, use_reentrant=False, context_fn=surroundings.recomputation)
        y.sum().backward()
        entered, again = ["enter a", "enter b", "enter c", "leave c", "leave b", "leave a"], []
        if not microbatch:
            again = ["enter b", "enter c", "leave c", "leave b"]
        assert noted == entered + again
        noted.clear()
    assert surroundings.recompute
    assert not Surroundings([Noting("a", noted)]).recompute


def test_attached_entry_is_detached_if_another_refuses_model():
    noted = []
    with pytest.raises(ValueError, match="a cannot run this"):
        Surroundings([Noting("a", noted, fails=True), Noting("b", noted)]).attach(nn.Linear(1, 1))
    assert noted == ["attach b", "detach b"]
