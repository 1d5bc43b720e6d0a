"""Dropout masks: equal on replicated activations, different on sharded ones."""

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptdp.strategy import PTDPStrategy
from lightning_ptdp.tensor_parallel import ParallelPlan
from tests.errors import raises_with
from tests.huggingface.runs import Samples, make_model
from tests.parity import make_trainer

WIDTH = 32


class Mlp(nn.Module):
    """An MLP with dropout on a sharded and on a replicated activation."""

    def __init__(self):
        super().__init__()
        self.up, self.inside, self.down, self.outside = (
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.5),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.5),
        )

    def forward(self, x):
        return x + self.outside(self.down(self.inside(self.up(x))))


class LitBase(L.LightningModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitMlp(LitBase):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Mlp(), Mlp())

    def configure_parallel(self):
        return ParallelPlan(
            tensor={"blocks.*.up": "column", "blocks.*.down": "row"}, blocks="blocks"
        )

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.blocks(batch), batch.flip(-1))


class Mixed(Mlp):
    """An MLP with dropout on a whole activation inside a split sequence."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x):
        return super().forward(x + self.mix(x))


class LitMixed(LitMlp):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Mixed(), Mixed())

    def configure_parallel(self):
        tensor = {"blocks.*.up": "column", "blocks.*.down": "row", "blocks.*.mix": "whole"}
        return ParallelPlan(tensor=tensor, blocks="blocks", sequence="blocks")


class Split(Mixed):
    """An MLP with dropout on split features of a whole module inside a split sequence."""

    def __init__(self):
        super().__init__()
        self.mix = Mlp()


class LitSplit(LitMlp):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Split(), Split())

    def configure_parallel(self):
        tensor = {"blocks.*.up": "column", "blocks.*.down": "row", "blocks.*.mix": "whole"}
        tensor |= {"blocks.*.mix.up": "column", "blocks.*.mix.down": "row"}
        return ParallelPlan(tensor=tensor, blocks="blocks", sequence="blocks")


class LitEnds(LitMixed):
    """A model whose sequence is split from the embedding to the head."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def configure_parallel(self):
        ends = {"words": "vocabulary", "head": "vocabulary"}
        plan = super().configure_parallel()
        return ParallelPlan(tensor={**plan.tensor, **ends}, blocks="blocks")


class LitBert(LitBase):
    def __init__(self):
        super().__init__()
        self.model = make_model("bert", hidden_dropout_prob=0.5)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss


class Masks(L.Callback):
    """Callback that records dropout masks by module, in call order."""

    def __init__(self):
        self.seen = {}

    def on_train_start(self, trainer, module):
        for name, child in module.named_modules():
            if isinstance(child, nn.Dropout):
                child.register_forward_hook(
                    lambda _, args, out, n=name: self.seen.setdefault(n, []).append(out == 0)
                )


def _fit(rank, kind, layout, world_size):
    L.seed_everything(3, verbose=False)
    masks = Masks()
    module = kind()
    trainer = make_trainer(PTDPStrategy(**layout), world_size, max_steps=2, callbacks=[masks])
    data = (
        Samples("bert")
        if kind is LitBert
        else torch.randn(8, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    )
    trainer.fit(module, DataLoader(data, batch_size=4))
    return masks.seen, trainer.strategy.gather_state_dict()


def _equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"pipeline_parallel_size": 2, "num_microbatches": 2}], ids=["t2", "t2p2"]
)
def test_dropout_masks_differ_only_inside_parallel_region(options, pool):
    world_size = 4 if options else 2
    ranks = [
        seen
        for seen, _ in pool.run(
            _fit,
            world_size=world_size,
            args=(LitMlp, {"tensor_parallel_size": 2, **options}, world_size),
        )
    ]
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        assert first.keys() == second.keys()
        for name in first:
            assert _equal(first[name], second[name]) == ("outside" in name), name
            assert not torch.equal(first[name][0], first[name][1]), (
                f"{name} has the same mask twice"
            )


def test_recomputation_replays_dropout(pool):
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}
    _, kept = pool.run(_fit, world_size=4, args=(LitMlp, layout, 4))[0]
    _, found = pool.run(_fit, world_size=4, args=(LitMlp, {**layout, "recompute": "full"}, 4))[0]
    assert all(torch.equal(found[name], value) for name, value in kept.items())


def test_recomputation_replays_dropout_of_whole_module(pool):
    layout = {"tensor_parallel_size": 2, "sequence_parallel": True}
    (first, kept), (second, _) = pool.run(_fit, world_size=2, args=(LitMixed, layout, 2))
    for name in first:
        assert _equal(first[name], second[name]) == ("mix" in name), name
    _, found = pool.run(_fit, world_size=2, args=(LitMixed, {**layout, "recompute": "full"}, 2))[0]
    assert all(torch.equal(found[name], value) for name, value in kept.items())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_split_features_of_whole_module_have_different_masks(recompute, pool):
    layout = {"tensor_parallel_size": 2, "sequence_parallel": True, "recompute": recompute}
    (first, kept), (second, same) = pool.run(_fit, world_size=2, args=(LitSplit, layout, 2))
    for name in first:
        assert _equal(first[name], second[name]) == ("mix.outside" in name), name
    assert all(torch.equal(same[name], value) for name, value in kept.items())


def test_dropout_of_whole_module_between_split_ends_is_refused():
    strategy = PTDPStrategy(tensor_parallel_size=2, sequence_parallel=True)
    with raises_with(["'blocks.0.mix' is 'whole' and has dropout", "sequence='blocks'"]):
        make_trainer(strategy, 2).strategy.check(LitEnds())


def test_dropout_outside_sequence_parallel_blocks_is_equal(pool):
    """BERT's embeddings are replicated on all ranks. Its blocks get slices."""
    layout = {"tensor_parallel_size": 2, "sequence_parallel": True}
    (first, _), (second, _) = pool.run(_fit, world_size=2, args=(LitBert, layout, 2))
    for name in first:
        assert _equal(first[name], second[name]) == ("embeddings" in name), name
