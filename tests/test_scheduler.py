"""Linux's scheduling of threads during a training on a CPU."""

import os

import lightning.pytorch as L
import pytest

from lightning_ptdp.shims.glibc import compute_without_preemption
from lightning_ptdp.strategy import PTDPStrategy
from tests.conformance.toys import LitNet, loader
from tests.parity import make_trainer

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="another system")


class Policies(L.Callback):
    """Callback that notes the policy during the training."""

    def __init__(self):
        self.found = []

    def on_train_batch_start(self, *_):
        self.found.append(os.sched_getscheduler(0))


@pytest.fixture(params=["SCHED_OTHER", "SCHED_BATCH"])
def policy(request):
    """Run the test in a policy."""
    usual, chosen = os.sched_getscheduler(0), getattr(os, request.param)
    os.sched_setscheduler(0, chosen, os.sched_param(0))
    try:
        yield chosen
    finally:
        os.sched_setscheduler(0, usual, os.sched_param(0))


def test_system_may_refuse(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    compute_without_preemption()()


def test_policy_is_batch_in_training_and_then_as_before(policy):
    policies = Policies()
    trainer = make_trainer(PTDPStrategy(), max_steps=1, callbacks=[policies])
    trainer.fit(LitNet(), loader())
    assert policies.found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == policy
