"""Changes of module state in a step: detection, transfer to other ranks and restoration."""

import copy
import pickle
from collections import Counter, defaultdict, deque

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torchmetrics import CatMetric, MeanSquaredError, MetricCollection

from lightning_ptdp.engine.sharing import pack, unpack
from lightning_ptdp.engine.step_state import StepState, apply_changes, find_owners


class Meter:
    def __init__(self):
        self.total, self.values = 0.0, [1]


class Holder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.number, self.text, self.nothing, self.pair = 1, "a", None, (1, 2)
        self.numbers, self.long, self.nested = (
            [1, 2],
            list(range(1000)),
            {"a": [1], "b": {"c": [torch.ones(1)]}},
        )
        self.counts, self.lists, self.recent, self.names = (
            Counter("ab"),
            defaultdict(list),
            deque([1, 2], maxlen=2),
            {"x"},
        )
        self.array, self.tensor, self.meter, self.late = np.zeros(2), torch.zeros(2), Meter(), {}
        self.same = self.numbers
        self.register_buffer("buffer", torch.zeros(2))
        self.metrics = MetricCollection([CatMetric(), MeanSquaredError()], compute_groups=False)
        self.model = torch.nn.Linear(2, 2)


def change(module):
    """Make one change of each kind."""
    module.number, module.text, module.nothing, module.pair = (
        module.number + 1,
        "b",
        torch.ones(3, dtype=torch.bfloat16),
        (3,),
    )
    module.numbers += [3, torch.tensor(4)]
    module.long.append(5)
    module.nested["a"].append(2)
    module.nested["b"]["c"][0] = torch.zeros(1)
    del module.nested["a"][0]
    module.counts.update("bc")
    module.lists["new"].append(torch.ones(2, 2).bool())
    module.recent.append(3)
    module.names.add("y")
    module.array += 1
    module.meter.total += 2
    module.meter.values.append(3)
    module.late = {"deep": [{"er": torch.ones(())}]}
    module.fresh = module.late["deep"]
    module.metrics["CatMetric"].update(torch.ones(2))


def state(module):
    found = {}
    for owner in find_owners(module):
        attributes = {
            name: vars(value) if isinstance(value, Meter) else value
            for name, value in owner.attributes().items()
        }
        attributes = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in attributes.items()
        }
        found[owner.name] = {
            name: value for name, value in attributes.items() if not callable(value)
        }
    return found


def test_only_changed_state_is_sent_to_other_ranks():
    module, other = Holder(), Holder()
    for _ in range(2):
        before = StepState(find_owners(module))
        assert before.changes() == []
        change(module)
        module.tensor += 1
        module.buffer += 1
        module.metrics["MeanSquaredError"].update(torch.ones(2), torch.zeros(2))
        changes = before.changes()
        names = [found.name for found in changes]
        assert "self.model" not in names
        assert next(found.value for found in changes if found.name == "self.long") == [5]
        form, tensors, numbers = pack(changes)
        apply_changes(other, unpack(form, [tensor.clone() for tensor in tensors], numbers))
        assert repr(state(other)) == repr(state(module))
        assert other.same is other.numbers
        assert other.fresh is other.late["deep"]


def test_attributes_changed_by_step_are_restored():
    module = Holder()
    change(module)
    expected = copy.deepcopy(state(module))
    held = module.numbers
    before = StepState(find_owners(module))
    change(module)
    module.extra = 5
    before.restore()
    assert repr(state(module)) == repr(expected)
    assert module.numbers is held is module.same


def test_inapplicable_change_is_refused():
    module, other = Holder(), Holder()
    before = StepState(find_owners(module))
    module.nested["b"]["c"].append(1)
    other.nested = {}
    with pytest.raises(ValueError, match=r"self\.nested\['b'\]\['c'\] on the last pipeline stage"):
        apply_changes(other, pickle.loads(pickle.dumps(before.changes())))


class Dice:
    """A callable metric that keeps its inputs and belongs to no library."""

    def __init__(self):
        self.buffers = None

    def __call__(self, value):
        if self.buffers is None:
            self.buffers = [[]]
        self.buffers[0].append(value)
        return value


class LitRecent(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.recent, self.dice, self.cat = deque(range(1000), maxlen=1000), Dice(), CatMetric()


@pytest.mark.parametrize("added", [1, 3, 1000, 1500])
def test_overflowing_deque_is_sent_and_restored(added):
    module, other = LitRecent(), LitRecent()
    before = StepState(find_owners(module))
    module.recent.extend(range(1000, 1000 + added))
    changes = before.changes()
    form, tensors, numbers = pack(changes)
    apply_changes(other, unpack(form, tensors, numbers))
    assert other.recent == module.recent
    assert other.recent.maxlen == 1000
    before.restore()
    assert module.recent == deque(range(1000))
    assert before.changes() == []


def test_state_of_callable_object_is_sent():
    module, other = LitRecent(), LitRecent()
    for step in range(2):
        before = StepState(find_owners(module))
        module.dice(torch.full((2,), float(step)))
        form, tensors, numbers = pack(before.changes())
        apply_changes(other, unpack(form, [tensor.clone() for tensor in tensors], numbers))
    assert repr(other.dice.buffers) == repr(module.dice.buffers)
