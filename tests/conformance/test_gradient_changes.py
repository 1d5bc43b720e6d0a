"""Hooks that read or change gradients act on the whole model, or are refused."""

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.conformance.blocks import LAYOUTS, LitBlocks, batches
from tests.conformance.toys import assert_weights, make_trainer, weights

pytestmark = pytest.mark.thorough


class LitHook(LitBlocks):
    """Uses SGD, whose steps depend on the scale of the gradients."""

    def __init__(self):
        super().__init__()
        self.norms = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


class LitClips(LitHook):
    def configure_gradient_clipping(self, *_, **__):
        self.norms.append(float(clip_grad_norm_(self.parameters(), 0.1)))


class LitClipsPieces(LitHook):
    """Clips parts of the model by other norms."""

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(clip_grad_norm_(self.h.parameters(), 0.01, norm_type=float("inf"))))
        for block in self.h:
            self.norms.append(
                float(torch.nn.utils.clip_grad_norm_(block.parameters(), 0.05, norm_type=1))
            )
        # some ranks of a sharded optimizer have no gradient of some parameters
        gradients = [p.grad for p in self.h.parameters()]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


class LitClipsOptimizer(LitHook):
    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)))


class LitClipsValues(LitHook):
    def on_after_backward(self):
        clip_grad_value_(self.parameters(), 0.003)


class LitClipsNumbers(LitHook):
    """Clips a parameter of one element together with parts of others."""

    def __init__(self):
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(1))

    def loss(self, batch):
        return super().loss(batch) * self.temperature

    def on_before_optimizer_step(self, optimizer):
        clip_grad_value_(self.parameters(), 0.01)
        self.norms.append(float(clip_grad_norm_(self.parameters(), 0.02)))


class LitScales(LitHook):
    def on_after_backward(self):
        for name, parameter in self.named_parameters():
            if parameter.grad is None:
                continue
            if "norm" in name:
                parameter.grad = 3 * parameter.grad
            else:
                parameter.grad.data.mul_(0.5).clamp_(min=-0.002)


def train(rank, place, kind):
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=1)
    module = kind()
    trainer.fit(module, batches(place, rank))
    return module.norms, weights(trainer)


CASES = [
    *((layout, LitClips) for layout in ("p2v2", "t2", "t2p2", "d2 sharded", "d2p2 sharded")),
    *((layout, LitClipsPieces) for layout in ("t2p2", "d2p2 sharded")),
    *((layout, LitClipsOptimizer) for layout in ("p2", "d2p2 sharded")),
    *((layout, LitClipsValues) for layout in ("t2p2", "d2 sharded")),
    *((layout, LitClipsNumbers) for layout in ("t2", "d2 sharded", "d2 sharded gradients")),
    *((layout, LitScales) for layout in ("p2v2", "d2 sharded")),
]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_gradients_changed_by_hooks_match_single_process(layout, kind, conformance):
    for (found_norms, found), (norms, expected) in conformance.pairs(train, LAYOUTS[layout], kind):
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert_weights(found, expected)


class LitLogsNorms(LitHook):
    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, norm_type=2))


class LitAdds(LitHook):
    def gradients(self):
        return (p.grad for p in self.parameters() if p.grad is not None)

    def on_after_backward(self):
        self.norms.append(float(sum(g.detach().pow(2).sum() for g in self.gradients()) ** 0.5))


class LitLooksForNaN(LitHook):
    def on_after_backward(self):
        if any(p.grad.isnan().any() for p in self.parameters() if p.grad is not None):
            self.zero_grad()


def refused(rank, place, kind):
    try:
        make_trainer(place, use_distributed_sampler=False, max_epochs=1).fit(
            kind(), batches(place, rank)
        )
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class LitCentresRows(LitHook):
    """Centres each row of each matrix. A rank has a part of each row of ``down``."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))


class LitFreezesTokens(LitHook):
    """Does not change the first tokens, of which each rank has others."""

    def on_before_optimizer_step(self, optimizer):
        self.wte.weight.grad[:3] = 0


class LitOrthogonalizes(LitHook):
    def on_before_optimizer_step(self, optimizer):
        gradient = self.h[0].up.weight.grad
        gradient.copy_(gradient @ gradient.T @ gradient)


class LitAlongWhole(LitHook):
    """Works along dimensions that no rank divides, and with masks of elements."""

    def on_before_optimizer_step(self, optimizer):
        for name, parameter in self.named_parameters():
            if name.endswith("up.weight"):
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
            if name.endswith("down.weight"):
                parameter.grad[2:4] = 0
                parameter.grad[parameter.grad > 0.01] = 0.01


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (LitCentresRows, "'h.0.down.weight' (mean along dimension 1)"),
        (LitFreezesTokens, "'wte.weight' (__setitem__ along dimension 0)"),
        (LitOrthogonalizes, "'h.0.up.weight' (matmul)"),
    ],
)
def test_functions_along_divided_dimensions_are_refused(kind, call, conformance):
    for message in conformance.ranks(refused, LAYOUTS["t2"], kind):
        assert call in message


@pytest.mark.parametrize("layout", ["t2", "t2p2"])
def test_functions_along_whole_dimensions_match_single_process(layout, conformance):
    for (_, found), (_, expected) in conformance.pairs(train, LAYOUTS[layout], LitAlongWhole):
        assert_weights(found, expected)


@pytest.mark.parametrize(
    ("layout", "kind"), [("p2", LitLogsNorms), ("t2", LitAdds), ("d2 sharded", LitLooksForNaN)]
)
def test_numbers_computed_from_partial_gradients_are_refused(layout, kind, conformance):
    for message in conformance.ranks(refused, LAYOUTS[layout], kind):
        assert message.startswith("PartialModelError: a hook needs the whole gradient of '")
        assert "self.clip_gradients" in message
