"""Sharded weights of products in float8: gathered in float8, with the values of whole weights."""

from collections import Counter
from dataclasses import dataclass, replace
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor

from lightning_ptdp.data_parallel import reduction
from lightning_ptdp.forward.deferred_weight_gradients import WeightGradients
from tests.letters import D, M, P, R, S, T, V, Z
from tests.parity import assert_near, assert_weights_near, distance
from tests.tiny_gpt import LitTiny, Run

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:fp8 on a CPU")]

FP8 = {"fp8": "tensorwise"}
COMPILED = {"compile": "blocks", "compile_options": {"backend": "aot_eager"}}
PLACES = {
    "d2": (2, {}),
    "d3, two microbatches": (3, {M: 2}),
    "two levels": (4, {D: 2}),
    "recomputed": (2, {R: "full"}),
    "compiled": (2, COMPILED),
    "pipeline": (4, {P: 2, V: 2, M: 2}),
    "split backward": (4, {P: 2, M: 2, S: "zb_h1"}),
    "tensor parallel": (4, {T: 2}),
}
RUN = Run(hidden=32, clip=None, steps=2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", PLACES)
def test_training_equals_that_of_whole_weights(name, precision, parity):
    world_size, layout = PLACES[name]
    layers = 2 if "compile" in layout else RUN.layers  # each block is compiled on its own
    run = replace(RUN, precision=precision, global_batch=world_size * 4, layers=layers)
    whole, gathered = (
        parity.ranks(run.on((world_size, {**layout, **FP8, Z: shard})))
        for shard in ("optimizer", "parameters")
    )
    for one, other in zip(whole, gathered, strict=True):
        if M in layout:  # the gradients of microbatches are added in another order
            assert_near(other["losses"], one["losses"], 1e-6, "losses")
            assert distance(other["final"], one["final"], one["initial"]) < 1e-3
            continue
        assert one["losses"] == other["losses"]
        assert_weights_near(other["final"], one["final"], tolerance=0)


class Penalized(LitTiny):
    """Its loss has a penalty of a weight that products in float8 use."""

    def training_step(self, batch, batch_idx):
        result = super().training_step(batch, batch_idx)
        penalty = self.model.blocks[1].mlp.up.weight.square().sum()
        if isinstance(result, Tensor):
            return result + penalty
        return {**result, "loss": result["loss"] + penalty}


class Doubling(LitTiny):
    """Its step doubles a weight that products in float8 use, before its forward or after it."""

    def training_step(self, batch, batch_idx):
        weight = self.model.blocks[2].mlp.up.weight
        if batch_idx == 0:
            with torch.no_grad():
                weight.mul_(2)
        result = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            weight.data.mul_(2)
        return result


class Marked(torch.nn.Parameter):
    """A parameter of the user's own class, which replicas do not shard."""


class OwnClass(LitTiny):
    """Has a weight of products in float8 that is not sharded."""

    def __init__(self, run):
        super().__init__(run)
        layer = self.model.blocks[1].mlp.up
        layer.weight = Marked(layer.weight.detach())


MODULES = {"reads": Penalized, "writes": Doubling, "own class": OwnClass}


@dataclass(frozen=True, kw_only=True)
class OtherRun(Run):
    module: str

    def make_module(self):
        return MODULES[self.module](self)


@pytest.mark.parametrize("module", MODULES)
def test_other_code_has_unrounded_weights(module, parity):
    run = OtherRun(hidden=32, clip=None, steps=3, eager=True, module=module)
    whole, gathered = (
        parity.ranks(run.on((2, {**FP8, Z: shard}))) for shard in ("optimizer", "parameters")
    )
    for one, other in zip(whole, gathered, strict=True):
        assert one["losses"] == other["losses"]
        assert_weights_near(other["final"], one["final"], tolerance=0)


@dataclass(frozen=True, kw_only=True)
class Counted(Run):
    """A training that counts the elements that are gathered, and the deferred products."""

    def make_callbacks(self):
        return [Counting()]

    def results(self, trainer, module):
        (counting,) = (c for c in trainer.callbacks if isinstance(c, Counting))
        weights = [
            p.numel()
            for name, p in module.named_parameters()
            if ".blocks." in name and p.dim() == 2
        ]
        return {"sent": counting.sent, "deferred": counting.deferred, "weights": sum(weights)}


class Counting(L.Callback):
    def on_train_start(self, trainer, module):
        self.sent = Counter[torch.dtype]()
        self.deferred = 0
        gather, defer = reduction.start_all_gather, WeightGradients.defer_product

        def gathering(buffer, group):
            self.sent[buffer.dtype] += buffer.numel()
            return gather(buffer, group)

        def deferring(*args):
            self.deferred += 1
            defer(*args)

        self.patches = [
            mock.patch.object(reduction, "start_all_gather", gathering),
            mock.patch.object(WeightGradients, "defer_product", deferring),
        ]
        for patch in self.patches:
            patch.start()

    def on_train_end(self, trainer, module):
        for patch in self.patches:
            patch.stop()


def test_weights_travel_as_one_byte_per_element(parity):
    run = Counted(hidden=32, clip=None, steps=1).on((2, {**FP8, Z: "parameters"}))
    for found in parity.ranks(run):
        # Before the forward, and before the backward but for the last block, which is still whole.
        weights = found["weights"]
        assert found["sent"][torch.uint8] == weights * (2 * RUN.layers - 1) / RUN.layers
        assert found["sent"][torch.float32] < weights / 4


def test_split_backward_defers_their_gradients(parity):
    layout = {**FP8, Z: "parameters", P: 2, M: 2, S: "zb_h1"}
    for found in parity.ranks(Counted(hidden=32, clip=None, steps=1).on((4, layout))):
        assert found["deferred"] > 0
