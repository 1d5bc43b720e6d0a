"""Steps and models that combine the tokens of a sequence while ranks hold slices of it."""

import copy
import threading
import warnings
from dataclasses import dataclass
from typing import ClassVar

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassRecall, MulticlassStatScores

from lightning_ptdp import ParallelPlan
from lightning_ptdp.attention import ContextParallelError
from lightning_ptdp.base.partial_values import PartialModelError
from lightning_ptdp.forward.token_mixing import SplitTokens, TokenMixing
from lightning_ptdp.tensor_parallel import Column
from tests.letters import SP, C, M, P, T
from tests.parity import Training

VOCABULARY, LENGTH, WIDTH, CLASSES = 40, 12, 16, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(x)
        b, s, _ = qkv.shape
        q, k, v = (part.view(b, s, -1, 8).transpose(1, 2) for part in qkv.chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mix) -> None:
        super().__init__()
        self.norm, self.attention, self.mix = nn.LayerNorm(WIDTH), Attention(), mix

    def forward(self, x):
        return x + self.attention(self.norm(self.mix(x)))


class LitTokens(L.LightningModule):
    """A model whose blocks begin with ``mix`` and whose loss is made by ``score``."""

    def __init__(self, mix, score, *, attends: bool = True) -> None:
        super().__init__()
        self.score, self.attends = score, attends
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mix) for _ in range(2))
        self.head, self.classifier = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, CLASSES)

    def configure_parallel(self):
        attention = {
            "blocks.*.attention.qkv": Column(parts=(WIDTH,) * 3, heads=(2,) * 3),
            "blocks.*.attention.out": "row",
        }
        return ParallelPlan(
            blocks="blocks",
            tensor={
                "tokens": "vocabulary",
                "places": "position",
                "head": "vocabulary",
                **(attention if self.attends else {}),
            },
        )

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch["ids"]) + self.places(batch["position_ids"])
        for block in self.blocks:
            x = block(x)
        return self.score(self, x, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def same(x):
    return x


def token_loss(module, x, batch):
    return F.cross_entropy(module.head(x).flatten(0, 1), batch["labels"].flatten())


def of_class(pool):
    """Return a step's loss: a classification of what ``pool`` makes of (b, s, h)."""
    return lambda module, x, batch: F.cross_entropy(
        module.classifier(pool(x, batch)), batch["label"] % CLASSES
    )


def masked_mean(x, batch):
    kept = (batch["ids"] > VOCABULARY // 3).unsqueeze(-1)
    return (x * kept).sum(1) / kept.sum(1)


def sentence_losses(module, x, batch):
    losses = F.cross_entropy(module.head(x).transpose(1, 2), batch["labels"], reduction="none")
    return losses.unsqueeze(-1).mean(1).squeeze(-1).square().mean()


def centred(x):
    return x - x.mean(1, keepdim=True)


SUMS = {
    "mean": (same, of_class(lambda x, batch: x.mean(1))),
    "torch.mean": (same, of_class(lambda x, batch: torch.mean(x, dim=1))),
    "sum": (same, of_class(lambda x, batch: torch.sum(x, -2))),
    "masked mean": (same, of_class(masked_mean)),
    "first token": (same, of_class(lambda x, batch: x[:, 0])),
    "loss of each sentence": (same, sentence_losses),
    "over two dimensions": (same, lambda module, x, batch: x.square().mean((1, 2)).square().mean()),
    "in a block": (centred, token_loss),
}


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    kind: str = "mean"
    precision: str = "64-true"
    clip: float | None = None

    smallest: ClassVar[float] = 1e-9

    def make_module(self):
        return LitTokens(*SUMS[self.kind])

    def make_data(self):
        rows = torch.randint(VOCABULARY, (32, LENGTH + 1))
        return [
            {
                "ids": row[:-1],
                "labels": row[1:],
                "position_ids": torch.arange(LENGTH),
                "label": row[0],
            }
            for row in rows
        ]


@pytest.mark.parametrize("kind", SUMS)
def test_sums_over_time_equal_single_process(kind, parity):
    parity.check(Run(kind=kind), (2, {C: 2}))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["c2 m2", "t2 c2", "p2 c2"])
def test_masked_mean_equals_single_process_in_layouts(name, parity):
    layouts = {
        "c2 m2": (2, {C: 2, M: 2}),
        "t2 c2": (4, {T: 2, C: 2}),
        "p2 c2": (4, {P: 2, C: 2, M: 2}),
    }
    parity.check(Run(kind="masked mean"), layouts[name])


# ---- metrics -------------------------------------------------------------------------------------


def of_classes(**options):
    return MulticlassStatScores(CLASSES, average="micro", **options)


class LitMeasured(LitTokens):
    """Counts samples and tokens, in the step and in a hook."""

    def __init__(self) -> None:
        super().__init__(same, None)
        self.samples, self.batches, self.called = of_classes(), of_classes(), of_classes()
        self.both = MetricCollection({"one": of_classes(), "two": MulticlassRecall(CLASSES)})
        self.words = MulticlassStatScores(VOCABULARY, average="micro")
        self.number = SumMetric()

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch["ids"]) + self.places(batch["position_ids"])
        for block in self.blocks:
            x = block(x)
        scores, words = self.classifier(x.mean(1)), self.head(x)
        classes = batch["label"] % CLASSES
        self.samples.update(scores, classes)
        self.both.update(scores, classes)
        self.words.update(words.flatten(0, 1), batch["labels"].flatten())
        self.number.update(batch["ids"].numel())
        self.called(scores, classes)
        loss = F.cross_entropy(scores, classes)
        return {"loss": loss, "scores": scores, "classes": classes}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches.update(outputs["scores"], outputs["classes"])

    def on_train_epoch_end(self):
        both = self.both.compute()
        self.log("number", self.number.compute())
        self.log("recall", both["two"].double())
        counts = {
            "samples": self.samples,
            "called": self.called,
            "words": self.words,
            "batches": self.batches,
        }
        values = {name: metric.compute() for name, metric in counts.items()}
        for name, value in (values | {"one": both["one"]}).items():
            for index in (0, 1, 4):  # true positives, false positives, samples
                self.log(f"{name}_{index}", value[index].double())


@dataclass(frozen=True, kw_only=True)
class Measured(Run):
    def make_module(self):
        return LitMeasured()


@pytest.mark.parametrize("name", ["c2", "c2 m2", "c2 p2", "c2 d2"])
def test_metrics_count_samples_and_tokens_once(name, parity):
    layouts = {
        "c2": (2, {C: 2}),
        "c2 m2": (2, {C: 2, M: 2}),
        "c2 p2": (4, {C: 2, P: 2, M: 2}),
        "c2 d2": (4, {C: 2}),
    }
    parity.check(Measured(), layouts[name])


def mixes_kinds(rank):
    class LitMixed(LitMeasured):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.words.update(torch.tensor([1]), torch.tensor([1]))

    run = Measured(layout={C: 2}, world_size=2)
    trainer = run.make_trainer()
    with pytest.raises(ContextParallelError, match="Use one metric for each"):
        trainer.fit(LitMixed(), *run.make_loaders(trainer))


def test_metric_of_samples_and_tokens_is_refused(pool):
    pool.run(mixes_kinds, world_size=2)


# ---- labels --------------------------------------------------------------------------------------


def ignoring_step(rank, layout, size):
    def score(module, x, batch):
        labels = batch["labels"].masked_fill(batch["labels"] < VOCABULARY // 2, -100)
        return F.cross_entropy(module.head(x).flatten(0, 1), labels.flatten())

    run = Run(layout=layout, world_size=size)
    trainer = run.make_trainer()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(LitTokens(same, score), *run.make_loaders(trainer))
    return [text for one in told if (text := str(one.message)).startswith("the loss is a mean")]


def test_labels_that_the_step_ignores_warn_on_slices(pool):
    (text,), others = pool.run(ignoring_step, world_size=2, args=({C: 2}, 2))
    assert "but the parts of the batch are averaged as if it were 48" in text
    assert others == []


# ---- refusals ------------------------------------------------------------------------------------

CALLS = {
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1).values,
    "softmax": lambda x: F.softmax(x, dim=1),
    "std": lambda x: x.std(-2),
    "cumsum": lambda x: torch.cumsum(x, 1),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(2, 1),
    "flip": lambda x: x.flip(1),
    "diff": lambda x: x.diff(dim=1),
    "norm": lambda x: x.norm(2, 1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "unbind": lambda x: x.unbind(1),
    "losses": lambda x: x[..., 0].amax(-1),
    "cat": lambda x: torch.cat((x[:, :1], x), 1),
    "pad": lambda x: F.pad(x, (0, 0, 1, 0)),
    "bmm": lambda x: torch.bmm(x.new_ones(3, 1, LENGTH), x),
    "scores": lambda x: x @ x.transpose(1, 2),
    "einsum": lambda x: torch.einsum("bsh,bs->bh", x, x[..., 0]),
    "conv1d": lambda x: F.conv1d(x.transpose(1, 2), x.new_ones(WIDTH, WIDTH, 3)),
    "conv1d by name": lambda x: F.conv1d(
        input=x.transpose(1, 2), weight=x.new_ones(WIDTH, WIDTH, 3), bias=None
    ),
    "pool": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1),
    "instance_norm": lambda x: F.instance_norm(x.transpose(1, 2)),
    "lstm": lambda x: nn.LSTM(WIDTH, WIDTH, batch_first=True)(x),
    "first token": lambda x: x[:, 0],
    "shift": lambda x: x[:, 1:],
    "nn.MultiheadAttention": lambda x: nn.MultiheadAttention(WIDTH, 2, batch_first=True)(x, x, x),
    "gather": lambda x: x.gather(1, torch.zeros(3, 1, WIDTH, dtype=torch.long)),
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 2])),
    "select": lambda x: x.select(1, 3),
    "chunk": lambda x: x.chunk(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "scatter": lambda x: torch.zeros(3, 7, WIDTH).scatter_add(
        1, torch.zeros(x.shape, dtype=torch.long), x
    ),
    "features first": lambda x: x.transpose(1, 2).amax(-1),
    "softmax of transposed": lambda x: x.transpose(1, 2).softmax(-1),
    "heads": lambda x: torch.einsum("bsne,bsnf->bnef", *2 * (x.reshape(3, 12, 2, 8),)),
    "fft": lambda x: torch.fft.rfft(x, dim=1),
    "pairs": lambda x: x.reshape(3, LENGTH // 2, 2 * WIDTH),
    "row of a sample": lambda x: x.requires_grad_()[0].mean(0),
    "ids": lambda x: (x[..., 0] > 0).any(1),
    "ctc": lambda x: F.ctc_loss(
        x.transpose(0, 1).log_softmax(-1), torch.ones(3, 2).long(), (LENGTH,) * 3, (2,) * 3
    ),
    "gradient of a weight": lambda x: torch.autograd.grad(
        (x @ (w := nn.Parameter(torch.ones(WIDTH)))).mean(), w
    ),
    "drawn tokens": lambda x: torch.multinomial(x[..., 0], 2),
    "place of the last id": lambda x: x[..., 0].long().argmax(1),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
}
TOKENWISE = {
    "of features": lambda x: (x.sum(-1), x.amax(2), x.softmax(-1), x.sort(-1), x.norm(2, -1)),
    "of samples": lambda x: (x.amax(0), x.flip(0), x.cumsum(0)),
    "loss": lambda x: (x.sum(), x.mean(), x.square().mean((0, 1, 2))),
    "products": lambda x: (F.linear(x, x.new_ones(3, WIDTH)), x @ x.new_ones(WIDTH, 4)),
    "features": lambda x: torch.cat((x, x[..., :4]), -1)[:, :, 1:],
    "gradient of tokens": lambda x: torch.autograd.grad(
        (y := x.detach().requires_grad_()).square().sum(), y
    ),
    "drawn classes": lambda x: torch.multinomial(x.flatten(0, 1), 1),
    "kernel of one": lambda x: F.conv1d(x.transpose(1, 2), x.new_ones(4, WIDTH, 1)),
    "positions": lambda x: (x[..., 0] > 0).long().cumsum(1),
    "pad features": lambda x: F.pad(x, (0, 1)),
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "heads": lambda x: x.reshape(3, LENGTH, 2, 8).transpose(1, 2).flatten(0, 1).softmax(-1),
    "flat": lambda x: x.flatten(0, 1).flatten(),
    "masked": lambda x: (x[x[..., 0] > 0.5], x.flatten(0, 1)[:7], x.masked_select(x > 0.5)),
    "other length": lambda x: x.new_ones(3, LENGTH + 1, WIDTH).amax(1),
}


TOTALS = {
    "mean": lambda x: x.square().mean(),
    "sum": lambda x: x.sum(),
    "of three dimensions": lambda x: x.square().mean((0, 1, 2)),
    "loss": lambda x: F.mse_loss(x, x.new_zeros(x.shape)),
}
"""Functions to one number of which ranks have the mean, but not inside of a block."""
NUMBERS = {
    "norm": lambda x: x.norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "std": lambda x: x.std(),
    "amax": lambda x: x.abs().amax(),
    "logsumexp": lambda x: x.logsumexp((0, 1, 2)),
    "einsum": lambda x: torch.einsum("bsh,bsh->", x, x),
    "of losses": lambda x: x[..., 0].std(),
    "rows": lambda x: x.flatten(0, 1).mean(0),
    "largest losses": lambda x: x[..., 0].flatten().topk(4).values,
    "norm of losses": lambda x: x[..., 0].flatten().norm(),
    "variance of rows": lambda x: x.reshape(-1, WIDTH).var(0),
    "covariance": lambda x: x.flatten(0, 1).T @ x.flatten(0, 1),
}


def watching(
    tokens: int = LENGTH,
    sizes: tuple[int, ...] = (WIDTH,),
    averages: tuple[nn.Module, ...] | None = (),
) -> TokenMixing:
    return TokenMixing(
        ValueError,
        refused_positions=ValueError,
        sizes=sizes,
        averages=averages,
        tokens=tokens,
        samples=3,
    )


def refused(call, **options):
    x = torch.rand(3, LENGTH, WIDTH, requires_grad=True)
    with pytest.raises(ValueError, match=r"test_token_mixing\.py, line"), watching(**options):
        call(x)


@pytest.mark.parametrize("name", NUMBERS)
def test_number_that_is_no_mean_over_ranks_is_refused(name):
    refused(NUMBERS[name])


def test_largest_number_warns_because_it_may_be_logged():
    x = torch.rand(3, LENGTH, WIDTH, requires_grad=True)
    with pytest.warns(UserWarning, match=r"line \d+, calls max on a tensor") as told, watching():
        x[..., 0].flatten().max()
    assert told[0].filename == __file__
    refused(lambda x: x.max(), averages=None)


def test_copy_of_block_does_not_copy_the_whole_module():
    module = nn.ModuleDict({"block": nn.Linear(WIDTH, WIDTH)})
    module.lock = threading.Lock()
    detach = SplitTokens(["block"]).attach(module)
    copy.deepcopy(module["block"])
    detach()


@pytest.mark.parametrize("name", TOTALS)
def test_mean_of_all_tokens_is_refused_in_blocks_and_without_average(name):
    class Inside(nn.Module):
        def forward(self, x):
            return TOTALS[name](x)

    block = Inside()
    refused(block, averages=(block,))
    refused(TOTALS[name], averages=None)
    with watching():
        block(torch.rand(3, LENGTH, WIDTH, requires_grad=True))


def test_numbers_of_weights_and_without_gradient_are_accepted():
    with watching():
        nn.Parameter(torch.rand(3, LENGTH, WIDTH)).norm()
        torch.rand(3, LENGTH, WIDTH).max()
        torch.rand(3 * LENGTH, WIDTH).mean(0)


@pytest.mark.parametrize("name", CALLS)
def test_function_that_combines_tokens_is_refused_with_its_line(name):
    x = torch.rand(3, LENGTH, WIDTH)
    with (
        pytest.raises(ValueError, match=r"test_token_mixing.py, line \d+, calls \w+ on a tensor"),
        watching(),
    ):
        CALLS[name](x)


@pytest.mark.parametrize("name", TOKENWISE)
def test_function_of_single_tokens_is_accepted(name):
    with watching():
        TOKENWISE[name](torch.rand(3, LENGTH, WIDTH))


def test_features_as_many_as_tokens_are_accepted():
    pooled = torch.rand(3, WIDTH)
    with watching(tokens=WIDTH):
        F.normalize(pooled, dim=-1)
        pooled.softmax(1)
        torch.bmm(torch.rand(3, 5, WIDTH), torch.rand(3, WIDTH, 2))
    with pytest.raises(ValueError, match="softmax"), watching(tokens=WIDTH, sizes=()):
        pooled.softmax(1)


def refusal(rank, module, layout, size, error):
    run = Run(layout=layout, world_size=size)
    trainer = run.make_trainer()
    with pytest.raises(error) as caught:
        trainer.fit(module(), *run.make_loaders(trainer))
    return str(caught.value)


def running_sum():
    return LitTokens(lambda x: x.cumsum(1), token_loss)


def best_token():
    return LitTokens(same, of_class(lambda x, batch: x.amax(1)))


def first_token():
    return LitTokens(same, of_class(lambda x, batch: x[:, 0]))


def attention_without_plan():
    return LitTokens(same, token_loss, attends=False)


def mean_in_block():
    return LitTokens(lambda x: x * x.square().mean(), token_loss)


def mean_of_states():
    return LitTokens(same, lambda module, x, batch: token_loss(module, x, batch) + x.mean())


def norm_of_states():
    return LitTokens(same, lambda module, x, batch: token_loss(module, x, batch) + x.norm())


def number_of_tokens():
    return LitTokens(
        same,
        lambda module, x, batch: token_loss(module, x, batch) / (batch["labels"] > 5).sum(1).sum(),
    )


@pytest.mark.parametrize(
    ("module", "layout", "text"),
    [
        (running_sum, {C: 2}, "calls cumsum on a tensor (8, 6, 16), which combines tokens"),
        (best_token, {C: 2}, "calls amax on a tensor (8, 6, 16)"),
        (mean_in_block, {C: 2}, "calls mean on a tensor (8, 6, 16)"),
        (norm_of_states, {C: 2}, "calls norm on a tensor (8, 6, 16)"),
        (mean_in_block, {T: 2, SP: True}, "calls mean on a tensor (8, 6, 16)"),
        (mean_of_states, {T: 2, SP: True}, "calls mean on a tensor (8, 6, 16)"),
        (number_of_tokens, {C: 2}, "the sum over dimension 1 of a tensor (8, 6)"),
        (running_sum, {T: 2, SP: True}, "calls cumsum on a tensor (8, 6, 16)"),
        (best_token, {T: 2, SP: True}, "calls amax on a tensor (8, 6, 16)"),
        (first_token, {T: 2, SP: True}, "calls __getitem__ on a tensor (8, 6, 16)"),
        (attention_without_plan, {T: 2, SP: True}, "calls scaled_dot_product_attention"),
    ],
)
def test_training_that_combines_tokens_is_refused(module, layout, text, pool):
    error = ContextParallelError if C in layout else PartialModelError
    for told in pool.run(refusal, world_size=2, args=(module, layout, 2, error)):
        assert text in told
