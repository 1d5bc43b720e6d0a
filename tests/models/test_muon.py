"""Muon beside AdamW: equal to torch's optimizers, and to one process in every layout it supports."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lightning_ptdp.models import AdamWConfig, MuonWithAdamW
from lightning_ptdp.models.optimizer_setup import build_muon
from tests.letters import SP, C, D, E, M, P, S, T, V, Z
from tests.tiny_gpt import LitTiny, Run

pytestmark = pytest.mark.thorough

PLACES = {
    "d2": (2, {}),
    "d4 sharded, small buckets": (4, {Z: "optimizer", M: 2, "bucket_mb": 1e-2}),
    "d4 sharded gradients": (4, {Z: "gradients", M: 2}),
    "d4 in two levels": (4, {Z: "gradients", D: 2}),
    "t4 sp": (4, {T: 4, SP: True, M: 2}),
    "t2p2": (4, {T: 2, P: 2, M: 2}),
    "t2d2 sharded gradients": (4, {T: 2, Z: "gradients", M: 2}),
    "p2v2": (2, {P: 2, V: 2, M: 4}),
    "d2p2v2 zb_v sharded": (4, {P: 2, V: 2, M: 4, S: "zb_v", Z: "optimizer"}),
    "c2 sharded": (2, {C: 2, Z: "optimizer"}),
    "d2p2 sharded parameters": (4, {P: 2, M: 2, Z: "parameters"}),
    "t2d2 sharded parameters": (4, {T: 2, M: 2, Z: "parameters"}),
    "d4 sharded parameters in two levels": (4, {D: 2, Z: "parameters"}),
    "d8 sharded parameters": (8, {Z: "parameters"}),
}


# Their weights are also written to in each step.
WRITTEN = {
    "t2": (2, {T: 2}),
    "t2d2 sharded": (4, {T: 2, Z: "optimizer", M: 2}),
    "d2 sharded parameters": (2, {Z: "parameters"}),
}


@pytest.mark.parametrize("name", PLACES)
def test_training_equals_single_process(name, parity):
    parity.check(Run(muon=True, steps=2), PLACES[name])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("layout", [{}, {T: 2}], ids=str)
def test_owners_of_matrices_change_nothing(layout, precision, parity):
    """With the same sums of two terms, the weights are bitwise those of whole optimizer states."""
    run = Run(muon=True, clip=None, precision=precision, layers=2, steps=2)
    world_size = 2 * layout.get(T, 1)
    whole, *others = (
        parity.result(run.on((world_size, {**layout, Z: level})))["final"]
        for level in ("none", "optimizer", "gradients", "parameters")
    )
    for owned in others:
        for name, value in whole.items():
            assert torch.equal(owned[name], value), name


@dataclass(frozen=True, kw_only=True)
class Owned(Run):
    """A training that returns the elements of a rank's momenta, by parameter."""

    muon: bool = True
    steps: int = 1

    def results(self, trainer, module):
        names, _ = trainer.strategy.model_space.optimizer_records()
        (optimizer,) = trainer.strategy.optimizers
        states = optimizer.state.items()
        return {
            "momenta": {
                names[parameter]: state["momentum_buffer"].numel()
                for parameter, state in states
                if "momentum_buffer" in state
            },
        }


@pytest.mark.parametrize("level", ["optimizer", "parameters"])
def test_each_matrix_has_one_owner(level, parity):
    (whole,) = parity.ranks(Owned())
    ranks = parity.ranks(Owned().on((2, {Z: level})))
    elements = [sum(found["momenta"].values()) for found in ranks]
    assert not ranks[0]["momenta"].keys() & ranks[1]["momenta"].keys()
    assert ranks[0]["momenta"] | ranks[1]["momenta"] == whole["momenta"]
    assert max(elements) <= 0.6 * sum(elements)


@pytest.mark.parametrize("level", ["none", "optimizer", "parameters"])
def test_experts_are_left_to_adamw(level, parity):
    run = Run(muon=True, llama=True, experts=4, layers=2, steps=2)
    parity.check(run, (4, {E: 2, M: 2, Z: level}))


class LitClips(LitTiny):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for module in self.model.modules():
                for parameter in module.parameters(recurse=False):
                    parameter.clamp_(-0.03, 0.03)
        return super().training_step(batch, batch_idx)


class ClippedRun(Run):
    """A training whose steps write to the weights."""

    always_clips = False

    def make_module(self):
        return LitClips(self)


@pytest.mark.parametrize("name", WRITTEN)
def test_optimizer_continues_from_written_matrices(name, parity):
    parity.check(ClippedRun(muon=True, layers=2, steps=2), WRITTEN[name])


def test_steps_equal_those_of_torch():
    def weights():
        torch.manual_seed(0)
        names = ("wte", "h.0.up", "h.1.down")
        matrices = {name: nn.Parameter(torch.randn(4, 6)) for name in names}
        return {**matrices, "h.0.bias": nn.Parameter(torch.randn(6))}

    found, wanted = weights(), weights()
    module = nn.Module()
    module.named_parameters = lambda: iter(found.items())
    ours = build_muon(module, AdamWConfig(learning_rate=1e-2, weight_decay=0.2))
    peers = [
        torch.optim.Muon(
            [wanted["h.0.up"], wanted["h.1.down"]],
            lr=1e-2,
            weight_decay=0.2,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW([wanted["wte"]], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.2),
        torch.optim.AdamW([wanted["h.0.bias"]], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    restored = None
    for step in range(4):
        for parameters in (found, wanted):
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        (restored or ours).step()
        for peer in peers:
            peer.step()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        if step == 1:  # states survive a copy
            restored = build_muon(module, AdamWConfig(learning_rate=1.0))
            restored.load_state_dict(ours.state_dict())


def test_closure_is_evaluated_with_gradients():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = MuonWithAdamW([{"params": [weight], "muon": True}], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 4.0
    assert not torch.equal(weight, torch.ones(2, 2))


def test_added_group_gets_options_of_its_optimizer():
    matrix, vector = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    optimizer = MuonWithAdamW([{"params": [matrix], "muon": True}], lr=0.1)
    optimizer.add_param_group({"params": [vector], "lr": 0.5})
    vector.grad = torch.ones(2)
    optimizer.step()
    assert float(vector[0]) == pytest.approx(1 * (1 - 0.5 * 0.1) - 0.5)
