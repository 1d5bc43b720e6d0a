"""Uses of parameters that a rank lacks are refused in steps, averages and gradient hooks."""

import copy
import io
import re
import warnings
from functools import partial, reduce

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import all_reduce
from torch.optim.swa_utils import AveragedModel

from lightning_ptdp.base.partial_values import PartialModelError
from lightning_ptdp.checkpoint import read_full
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.conformance.blocks import LAYOUTS, P2, PLAN, Block, LitBlocks, batches, run_refused
from tests.conformance.toys import ONE, Place, assert_weights, make_trainer, weights
from tests.letters import SP, M, T, Z
from tests.pool import WorkerFailure
from tests.tiny_gpt import LitTiny, Run

pytestmark = pytest.mark.thorough


class LitPenalty(LitBlocks):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 1e-3 * sum(p.square().sum() for p in self.parameters())


class LitBlocksPenalty(LitBlocks):
    def training_step(self, batch, batch_idx):
        penalty = sum(p.square().sum() for name, p in self.h.named_parameters() if "up" in name)
        return self.loss(batch) + 1e-3 * penalty


class LitLogsNorm(LitBlocks):
    def validation_step(self, batch, batch_idx):
        self.log(
            "norm", torch.stack([p.norm() for p in self.parameters()]).norm() + 0 * self.loss(batch)
        )


class LitModulesPenalty(LitBlocks):
    def training_step(self, batch, batch_idx):
        layers = [m for m in self.h.modules() if isinstance(m, torch.nn.Linear)]
        return self.loss(batch) + 1e-3 * self.penalty(layers)

    def penalty(self, layers):
        return sum(layer.weight.abs().sum() for layer in layers)


class LitDirectPenalty(LitBlocks):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) + 1e-3 * self.h[1].up.weight.square().sum()


class LitHeadByHand(LitBlocks):
    def training_step(self, batch, batch_idx):
        logits = self.norm(self.wte(batch[:, :-1])) @ self.head.weight.T
        return logits.logsumexp(-1).mean()


class LitInForward(LitBlocks):
    def forward(self, batch):
        return self.loss(batch) + 1e-3 * self.h[1].down.weight.square().sum()

    def training_step(self, batch, batch_idx):
        return self(batch)


def run(rank, place, kind):
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=1)
    trainer.fit(kind(), batches(place, rank), batches(place, rank))


@pytest.mark.parametrize(
    ("kind", "layout", "call"),
    [
        (LitPenalty, "p2", "training_step loops over self.parameters()"),
        (LitPenalty, "t2", "training_step computes a number (sum) from 'wte.weight'"),
        (LitBlocksPenalty, "p2v2", "training_step loops over self.h.parameters()"),
        (LitLogsNorm, "t2", "validation_step computes a number (norm) from 'wte.weight'"),
        (LitLogsNorm, "p2", "validation_step loops over self.parameters()"),
        (LitModulesPenalty, "p2", "training_step loops over self.h.modules()"),
        (LitModulesPenalty, "t2", "training_step loops over self.h.modules()"),
        (LitDirectPenalty, "t2", "training_step computes a number (sum) from 'h.1.up.weight'"),
        (LitInForward, "t2", "training_step computes a number (sum) from 'h.1.down.weight'"),
        (LitHeadByHand, "t2", "LitHeadByHand calls matmul with the weight 'wte.weight'"),
    ],
)
def test_number_from_part_of_model_in_step_is_refused(kind, layout, call, conformance):
    place, said = LAYOUTS[layout], f"PartialModelError: {call}, but this rank has only a part of"
    if layout == "t2":
        for message in conformance.ranks(run_refused, place, kind):
            assert message.startswith(said)
        return
    # stages before the last one leave the step before the loop, and wait
    with pytest.raises(WorkerFailure, match=re.escape(said)):
        conformance.ranks(run, place, kind)


class LitGradientPenalty(LitBlocks):
    def training_step(self, batch, batch_idx):
        scale = torch.ones((*batch.shape, 1), requires_grad=True)
        hidden = self.wte(batch) * scale
        for block in self.h:
            hidden = block(hidden)
        scores = self.head(self.norm(hidden)).logsumexp(-1)
        gradient = torch.autograd.grad(scores.sum(), scale, create_graph=True)
        return scores.mean() + gradient[0].square().mean()


def test_gradient_penalty_under_a_pipeline_is_refused(conformance):
    message = "PartialModelError: training_step differentiates with respect to a tensor that"
    with pytest.raises(WorkerFailure, match=message):
        conformance.ranks(run, LAYOUTS["p2"], LitGradientPenalty)


class LitNormPenalty(LitTiny):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] + self.model.norm.weight.square().sum()}


class NormPenalty(Run):
    def make_module(self):
        return LitNormPenalty(self)


def test_number_whose_gradient_would_count_twice_is_refused(parity):
    parity.check(NormPenalty(), (2, {T: 2}))
    with pytest.raises(WorkerFailure, match="but its gradient is summed over tensor ranks"):
        parity.ranks(NormPenalty().on((2, {T: 2, SP: True})))


class LitHarmlessLoops(LitBlocks):
    """Loops that compute nothing from parameters."""

    def training_step(self, batch, batch_idx):
        for module in self.modules():
            module.progress = batch_idx
        return self.loss(batch)

    def on_train_batch_start(self, *_):
        assert all(p.isfinite().all() for p in self.parameters())


@pytest.mark.parametrize("layout", ["t2", "p2"])
def test_loops_that_compute_nothing_are_allowed(layout, conformance):
    (expected,) = conformance.expected(train, ONE, LitBlocks)
    for found in conformance.ranks(train, LAYOUTS[layout], LitHarmlessLoops):
        assert_weights(found, expected)


class LitRemedy(LitBlocks):
    """The penalty of ``LitPenalty`` as the error recommends it. The step reads the device and dtype
    of a parameter."""

    def training_step(self, batch, batch_idx):
        first = next(self.parameters())
        return self.loss(batch.to(first.device)).to(first.dtype)

    def on_before_optimizer_step(self, optimizer):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad.add_(parameter.detach(), alpha=2e-3)


def train(rank, place, kind):
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=1)
    trainer.fit(kind(), batches(place, rank))
    return weights(trainer)


@pytest.mark.parametrize("layout", ["t2p2", "d2p2 sharded"])
def test_recommended_penalty_matches_loop_in_single_process(layout, conformance):
    (expected,) = conformance.expected(train, ONE, LitPenalty)
    for found in conformance.ranks(train, LAYOUTS[layout], LitRemedy):
        assert_weights(found, expected)


class LitAveraged(LitBlocks):
    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.h).requires_grad_(False)

    def on_train_batch_end(self, *_):
        self.average.update_parameters(self.h)


EVERYWHERE = ParallelPlan(
    blocks="h", tensor=PLAN.tensor, before=PLAN.before, after=PLAN.after, everywhere=("average",)
)


def test_weight_average_of_partial_model_is_refused(conformance):
    place = Place(world_size=2, layout={**P2, "plan": EVERYWHERE})
    for message in conformance.ranks(run_refused, place, LitAveraged):
        assert message.startswith("UnequalCopiesError: 'average.module.")


class LitDataDependent(LitBlocks):
    """Initializes a weight from its first samples, as an activation normalization does."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        if not batch_idx:
            with torch.no_grad():
                self.shift.fill_(batch.float().mean())
        return self.loss(batch) + 1e-3 * self.shift


class _Plain(torch.optim.Optimizer):
    """Gradient descent; a group may leave the rate out, as Adafactor's does."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] or 1e-3)
        return loss


class LitOwnRate(LitBlocks):
    """Derives the learning rate from a replica's samples, as a scheduler may from its metric."""

    def configure_optimizers(self):
        parameters = [*self.parameters()]
        groups = [{"params": parameters[:1], "lr": None}, {"params": parameters[1:]}]
        return _Plain(groups, {"lr": 1e-3})

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().param_groups[1]["lr"] = 1e-3 * batch.float().mean().item()


class LitOwnGradients(LitBlocks):
    """Writes the gradients of torch.autograd.grad, as gradient surgery does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        parameters = [*self.parameters()]
        gradients = torch.autograd.grad(self.loss(batch), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizers().step()


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        ({}, LitDataDependent, "shift"),
        ({}, LitOwnGradients, "wte.weight"),
        ({"tensor_parallel_size": 2, "plan": PLAN}, LitDataDependent, "shift"),
        ({"shard": "optimizer"}, LitOwnRate, "learning rate of parameter group 1"),
    ],
)
def test_value_of_one_replicas_samples_is_refused(options, kind, name, conformance):
    place = Place(world_size=2 * options.get("tensor_parallel_size", 1), layout=options)
    # The replicas are compared after 16 batches, under manual optimization also after the first.
    batches = 2 if kind is LitOwnGradients else 17
    for message in conformance.ranks(run_refused, place, kind, batches):
        assert message.startswith(f"UnequalCopiesError: '{name}' is the same on all replicas")


class LitHooked(LitBlocks):
    """Scales the gradient of a weight by ten with a tensor hook."""

    def __init__(self, name: str, late: bool) -> None:
        super().__init__()
        self.name, self.hooked = name, False
        if not late:
            self.configure_model()

    def configure_model(self):
        if not self.hooked:
            self.hooked = True
            self.get_parameter(self.name).register_hook(lambda gradient: 10 * gradient)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class LitHookedBlock(LitHooked):
    def __init__(self):
        super().__init__("h.2.up.weight", late=False)


class LitHookedNorm(LitHooked):
    def __init__(self):
        super().__init__("h.2.norm.weight", late=True)


@pytest.mark.parametrize(("layout", "kind"), [("p2", LitHookedBlock), ("t2", LitHookedNorm)])
def test_gradient_hook_of_whole_parameter_is_called(layout, kind, conformance):
    conformance.check(train, LAYOUTS[layout], kind)


def test_gradient_hook_of_split_parameter_is_refused():
    with pytest.raises(
        ValueError, match=r"'h\.2\.up\.weight' has a hook on its gradient .*tensor_parallel_size=1"
    ):
        make_trainer(LAYOUTS["t2"]).strategy.check(LitHookedBlock())


class LitAccumulatedLate(LitBlocks):
    """Changes gradients after their accumulation."""

    def configure_optimizers(self):
        self.h[3].up.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(10))
        return super().configure_optimizers()


@pytest.mark.parametrize("layout", ["p2", "m2"])
def test_hook_on_accumulated_gradient_is_refused_with_microbatches(layout, conformance):
    place = Place(layout={M: 2}) if layout == "m2" else LAYOUTS[layout]
    for message in conformance.ranks(run_refused, place, LitAccumulatedLate):
        assert message.startswith("ValueError: 'h.3.up.weight' has a hook on its accumulated gradi")
    hooked = LitAccumulatedLate()
    hooked.configure_optimizers()
    with pytest.raises(ValueError, match=r"'h\.3\.up\.weight' .* once for each microbatch"):
        make_trainer(place).strategy.check(hooked)


class LitClamped(LitBlocks):
    def configure_optimizers(self):
        for parameter in self.h[2].parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("layout", "part"), [("p2", "one microbatch"), ("z1", "one replica"), ("t2", None)]
)
def test_hook_on_gradient_of_part_of_batch_causes_warning(layout, part, conformance):
    place = Place(world_size=2, layout={Z: "optimizer"}) if layout == "z1" else LAYOUTS[layout]
    first, *others = conformance.ranks(hook_warnings, place)
    assert all("h.2." in text and f"see those of {part}." in text for text in first)
    assert (len(first), others) == (part is not None, [[]])


def hook_warnings(rank, place):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run(rank, place, LitClamped)
    return [str(one.message) for one in caught if "hooks on the gradients" in str(one.message)]


def block_of(forward):
    """Return a LightningModule whose blocks have another forward."""

    class OtherBlock(Block):
        pass

    OtherBlock.forward = forward

    class LitDirect(LitBlocks):
        def __init__(self):
            super().__init__()
            for block in self.h:
                block.__class__ = OtherBlock

    return LitDirect


DIRECT = {
    "linear": lambda self, x: x + self.down(F.linear(self.norm(x), self.up.weight, self.up.bias)),
    "matmul": lambda self, x: x + self.down(self.norm(x) @ self.up.weight.t().contiguous()),
    "row": lambda self, x: x + F.linear(self.up(self.norm(x)).relu(), self.down.weight),
}


@pytest.mark.parametrize("name", DIRECT)
def test_weight_used_without_its_layer_is_refused(name, conformance):
    weight = "down" if name == "row" else "up"
    for message in conformance.ranks(run_direct, LAYOUTS["t2"], name):
        assert f"Block calls {'linear' if name == 'row' else name} with the weight 'h.0." in message
        assert f".{weight}.weight'" in message


def run_direct(rank, place, name):
    return run_refused(rank, place, block_of(DIRECT[name]))


def test_layer_may_use_type_of_other_weight(conformance):
    conformance.check(train_typed, LAYOUTS["t2"])


def train_typed(rank, place):
    def forward(self, x):
        return x + self.down(self.up(self.norm(x.to(self.down.weight.dtype))).relu())

    return train(rank, place, block_of(forward))


class LitMonitor(LitBlocks):
    def on_train_batch_end(self, *_):
        self.size = sum(p.square().sum() for p in self.parameters())


@pytest.mark.parametrize("layout", ["p2", "t2"])
def test_number_in_hook_causes_warning(layout, conformance):
    for found in conformance.ranks(warnings_of, LAYOUTS[layout], LitMonitor, "is that of the part"):
        assert found == ["on_train_batch_end loops over self.parameters()"]


def warnings_of(rank, place, kind, words):
    """Return the beginnings of a fit's warnings that contain the words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run(rank, place, kind)
    texts = [str(one.message) for one in caught if words in str(one.message)]
    return [text.partition(",")[0] for text in texts]


class LitBroadcasts(LitBlocks):
    def on_train_start(self):
        for parameter in self.parameters():
            torch.distributed.broadcast(parameter.data, 0)


class LitAverages(LitBlocks):
    def on_after_backward(self):
        average(self)


def average(module):
    [torch.distributed.all_reduce(p.grad) for p in module.parameters() if p.grad is not None]


class LitImported(LitBlocks):
    def on_after_backward(self):
        for parameter in self.h.parameters():
            all_reduce(parameter.grad)


class LitReduces(LitBlocks):
    def on_after_backward(self):
        self.largest = reduce(max, (float(p.abs().max()) for p in self.parameters()))
        self.trainer.strategy.barrier()


@pytest.mark.parametrize("layout", ["p2", "t2"])
@pytest.mark.parametrize(
    ("kind", "call"),
    [(LitBroadcasts, "broadcast"), (LitAverages, "all_reduce"), (LitImported, "all_reduce")],
)
def test_collective_over_parameters_in_hook_is_refused(layout, kind, call, conformance):
    for found in conformance.ranks(run_refused, LAYOUTS[layout], kind):
        assert found.startswith("PartialModelError: on_")
        assert f"parameters() and calls torch.distributed.{call}, but" in found
    assert conformance.ranks(run_refused, LAYOUTS[layout], LitReduces) == ["", ""]


class LitScaled(LitBlocks):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.trainer.world_size


def test_number_of_ranks_in_step_causes_warning(conformance):
    words = "'num_replicas'"
    first, second = conformance.ranks(warnings_of, LAYOUTS["t2"], LitScaled, words)
    assert first == second == ["training_step reads world_size"]
    for kind, place in ((LitScaled, Place(world_size=2, layout={})), (LitMonitor, LAYOUTS["t2"])):
        assert conformance.ranks(warnings_of, place, kind, words) == [[], []]


class LitApplies(LitBlocks):
    def on_train_start(self):
        self.apply(set_bias)


class LitLoops(LitBlocks):
    def on_train_epoch_start(self):
        for module in self.h.modules():
            set_bias(module)


def set_bias(module):
    if isinstance(module, torch.nn.Linear) and module.bias is not None:
        torch.nn.init.constant_(module.bias, 0.1)


class LitNorms(LitBlocks):
    def on_train_start(self):
        for module in self.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.bias.data.fill_(0.1)
        self.apply(lambda module: module.train())


@pytest.mark.parametrize("kind", [LitApplies, LitLoops])
def test_hook_that_looks_for_layers_of_tensor_ranks_is_refused(kind, conformance):
    for found in conformance.ranks(run_refused, LAYOUTS["t2"], kind):
        assert "a hook looks for layers such as nn.Linear with self." in found
    assert conformance.ranks(run_refused, LAYOUTS["p2"], kind) == ["", ""]
    assert conformance.ranks(run_refused, LAYOUTS["t2"], LitNorms) == ["", ""]


class LitSaves(LitBlocks):
    path = ""

    def training_step(self, batch, batch_idx):
        if self.global_step == 1:
            self.trainer.save_checkpoint(self.path)
        return self.loss(batch)


def save_in_step(rank, place, path):
    LitSaves.path = path
    run(rank, place, LitSaves)
    return sorted(read_full(path))


def test_save_in_step_of_tensor_ranks_is_whole(conformance, tmp_path):
    names = sorted(LitSaves().state_dict())
    found = conformance.ranks(save_in_step, LAYOUTS["t2"], str(tmp_path / "x.ckpt"))
    assert found == [names, names]


class LitTeacher(LitBlocks):
    """Keeps an average of its blocks by hand."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.h).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        for slow, fast in zip(self.teacher.parameters(), self.h.parameters(), strict=False):
            slow.lerp_(fast, 0.5)

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


def test_pairs_of_parameters_of_stage_are_refused(conformance):
    with pytest.raises(WorkerFailure, match=r"a hook pairs self\.h\.parameters\(\) with others"):
        conformance.ranks(run, LAYOUTS["p2"], LitTeacher)
    (expected,) = conformance.expected(train, ONE, LitTeacher)
    for found in conformance.ranks(train, Place(world_size=2, layout={Z: "optimizer"}), LitTeacher):
        assert found.keys() == expected.keys()


class LitSaver(LitBlocks):
    """Saves its state at the end of an epoch, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def on_train_epoch_end(self):
        WAYS[self.way](self)

    def save_pretrained(self):
        return {name: tensor.numel() for name, tensor in self.h.state_dict().items()}

    def state(self):
        return {"model": self.state_dict()}

    def copied(self):
        twin = copy.deepcopy(self.h)
        twin.load_state_dict(self.h.state_dict())
        return copy.deepcopy(self.state_dict())


WAYS = {
    "whole": lambda module: torch.save(module.state_dict(), io.BytesIO()),
    "block": lambda module: torch.save(module.h[1].state_dict(), io.BytesIO()),
    "in a function": lambda module: torch.save(module.state(), io.BytesIO()),
    "save_pretrained": lambda module: module.save_pretrained(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["p2", "t2"])
def test_state_of_partial_model_that_a_hook_saves_is_refused(layout, way, conformance):
    name = {"block": "self.h.1", "save_pretrained": "self.h"}.get(way, "self")
    # The stage that has block 1 saves the whole of it, without an error.
    message = max(conformance.ranks(run_refused, LAYOUTS[layout], partial(LitSaver, way)))
    assert message.startswith(f"PartialModelError: {name}.state_dict() is saved here, but")
    assert "trainer.strategy.gather_state_dict(), all of them on all ranks" in message


def save_after_fit(rank, place):
    trainer = make_trainer(place, use_distributed_sampler=False, max_epochs=1)
    module = LitBlocks()
    trainer.fit(module, batches(place, rank))
    with pytest.raises(PartialModelError, match="is saved here"):
        torch.save(module.state_dict(), io.BytesIO())
    file = io.BytesIO()
    torch.save(trainer.strategy.gather_state_dict(), file)
    file.seek(0)
    return {name: value.numel() for name, value in torch.load(file).items()}


def test_state_of_partial_model_saved_after_fit_is_refused(conformance):
    sizes = {name: value.numel() for name, value in LitBlocks().state_dict().items()}
    for found in conformance.ranks(save_after_fit, LAYOUTS["t2p2"]):
        assert found == sizes


class LitCopier(LitSaver):
    def __init__(self):
        super().__init__("copied")

    def on_train_epoch_end(self):
        self.copied()


def test_copies_of_states_are_allowed(conformance):
    conformance.check(train, LAYOUTS["t2"], LitCopier)
