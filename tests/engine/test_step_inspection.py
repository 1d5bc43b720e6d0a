"""Warnings about steps whose result depends on microbatches or replicas."""

import warnings

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassF1Score

from lightning_ptdp.engine.loss_inspection import (
    divisor_of,
    warn_of_counted,
    warn_of_loss,
    warn_of_slices,
)
from lightning_ptdp.strategy import PTDPStrategy
from tests.parity import make_trainer

pytestmark = pytest.mark.thorough


class LitPlain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.teacher, self.seen, self.outputs = (
            nn.Linear(4, 4).requires_grad_(False),
            0,
            [],
        )
        self.register_buffer("queue", torch.zeros(4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += len(x)
        prediction = self.net(x)
        self.outputs.append(prediction.detach())
        return self.loss(prediction, y)

    def loss(self, prediction, y):
        return F.mse_loss(prediction, y)

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.01)


class LitCarried(LitPlain):
    hidden: Tensor | None = None

    def loss(self, prediction, y):
        self.hidden = prediction[0].detach()
        return super().loss(prediction, y)


class LitCarriedPair(LitPlain):
    """A module that carries a pair of states, like an LSTM."""

    hidden: tuple[Tensor, Tensor] | None = None

    def loss(self, prediction, y):
        self.hidden = prediction[0].detach(), y[0]
        return super().loss(prediction, y)


class LitQueue(LitPlain):
    def loss(self, prediction, y):
        with torch.no_grad():
            self.queue.copy_(prediction[0])
        return super().loss(prediction, y)


class LitSchedules(LitPlain):
    def loss(self, prediction, y):
        self.lr_schedulers().step()
        return super().loss(prediction, y)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


class LitTeacher(LitPlain):
    def loss(self, prediction, y):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9)
        return super().loss(prediction, y)


class LitSum(LitPlain):
    def loss(self, prediction, y):
        return F.mse_loss(prediction, y, reduction="sum")


class LitSummed(LitPlain):
    def loss(self, prediction, y):
        return (prediction - y).square().sum() + prediction.mean()


class LitContrastive(LitPlain):
    def loss(self, prediction, y):
        logits, target = prediction @ y.T, torch.arange(len(y))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


class LitTwoViews(LitPlain):
    """NT-Xent: each sample of two views is compared with all others."""

    def loss(self, prediction, y):
        views = torch.cat([prediction, y])
        count = len(views)
        logits = (views @ views.T)[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
        return F.cross_entropy(logits, torch.arange(len(y)).repeat(2))


class LitHardest(LitPlain):
    """Learns from the samples with the largest losses."""

    def loss(self, prediction, y):
        return (prediction - y).square().mean(1).topk(2).values.mean()


class LitWorst(LitPlain):
    """Learns from the sample with the largest loss."""

    def loss(self, prediction, y):
        losses = (prediction - y).square().mean(1)
        return losses.mean() + 0.1 * losses.max()


class LitMedian(LitPlain):
    def loss(self, prediction, y):
        return (prediction - y).square().mean(1).median()


class LitDistances(LitPlain):
    """Compares all pairs of samples."""

    def loss(self, prediction, y):
        return super().loss(prediction, y) - 0.1 * torch.cdist(prediction, y).mean()


class LitProducts(LitPlain):
    """Similarities of all pairs of samples, as supervised contrastive losses compute them."""

    def loss(self, prediction, y):
        rows = F.normalize(prediction)
        return super().loss(prediction, y) + (rows @ rows.T).logsumexp(1).mean()


class LitCosines(LitPlain):
    """Similarities of all pairs of two views."""

    def loss(self, prediction, y):
        rows = torch.cat([prediction, -prediction])
        cosines = F.cosine_similarity(rows[:, None], rows[None], dim=-1)
        return super().loss(prediction, y) + cosines.logsumexp(1).mean()


class LitRanks(LitPlain):
    """Differences of all pairs of scores, as pairwise ranking computes them."""

    def loss(self, prediction, y):
        scores = prediction[:, 0]
        return super().loss(prediction, y) - F.logsigmoid(scores[:, None] - scores).mean()


class LitEinsum(LitPlain):
    def loss(self, prediction, y):
        return (
            super().loss(prediction, y) + torch.einsum("ih,jh->ij", prediction, prediction).mean()
        )


class LitTowers(LitPlain):
    """Similarities of two functions of the samples with a loss for each pair, as in SigLIP."""

    def loss(self, prediction, y):
        logits = prediction @ self.net(y).T
        return -F.logsigmoid((2 * torch.eye(len(y)) - 1) * logits).mean()


class LitCovariance(LitPlain):
    def loss(self, prediction, y):
        return (
            super().loss(prediction, y) + (prediction[:, :3].T @ prediction[:, :3]).square().mean()
        )


class LitWhitens(LitPlain):
    """Advantages with the mean and the deviation of the batch, as in PPO."""

    def loss(self, prediction, y):
        advantages = (y[:, 0] - y[:, 0].mean()) / y[:, 0].std()
        return -(prediction[:, 0] * advantages).mean()


class LitSurvival(LitPlain):
    """The partial likelihood of Cox, over samples in the order of their times."""

    def loss(self, prediction, y):
        risks = prediction[:, 0][y[:, 0].argsort()]
        return -(risks - risks.logcumsumexp(0)).mean()


class LitFeatures(LitPlain):
    """Differences and products that are those of one sample, and the spread of its features."""

    def loss(self, prediction, y):
        pairs = (prediction[:, :, None] - prediction[:, None]).mean()
        products = torch.einsum("bi,bj->bij", prediction, prediction).mean()
        scaled = prediction / prediction.std(1, keepdim=True)
        own = (self.net[0].weight @ self.net[1].weight.T).mean() + self.net[0].weight.std()
        return super().loss(scaled, y) + 0.1 * (pairs + products + own)


class LitOwnRows(LitPlain):
    """Compares rows of one sample with each other, and samples with as many prototypes."""

    def loss(self, prediction, y):
        grams = prediction.new_zeros(())
        for rows in torch.stack([prediction] * len(y), 1):
            grams = grams + (rows @ rows.T).mean() + (rows[:, None] - rows).mean()
        prototypes = F.normalize(self.net[0].weight[: len(y), : prediction.size(1)])
        return super().loss(prediction, y) + grams + (prediction @ prototypes.T).mean()


class LitAnchors(LitPlain):
    """Compares one row of each sample with others of the same sample, and rows of a weight."""

    def loss(self, prediction, y):
        rows = torch.stack([prediction, -prediction, 2 * prediction], 1)
        cosines = F.cosine_similarity(rows[:, :1], rows[:, 1:], dim=-1)
        weight = self.net[0].weight.view(-1, 1)[: len(prediction)]
        return super().loss(prediction, y) + cosines.mean() + (weight @ weight.T).mean()


class LitPairs(LitPlain):
    """Similarities of the two views of each sample, and products of each sample's features."""

    def loss(self, prediction, y):
        first, second = torch.cat([prediction, -prediction]).chunk(2)
        products = torch.bmm(prediction[:, :, None], prediction[:, None])
        return super().loss(first, y) + F.cosine_similarity(first, second).mean() + products.mean()


class LitPrototypes(LitPlain):
    """Distances from as many prototypes as a microbatch has samples, and a largest weight."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("codes", torch.zeros(4, 4))

    def loss(self, prediction, y):
        distances = torch.cdist(prediction, self.prototypes) + torch.cdist(prediction, self.codes)
        return distances.mean() + self.prototypes.abs().max() + distances.max(1).values.mean()


class LitTasks(LitPlain):
    """Losses of several tasks, whose weights are learned."""

    def __init__(self):
        super().__init__()
        self.uncertainty = nn.Parameter(torch.zeros(2))

    def loss(self, prediction, y):
        losses = torch.stack([F.mse_loss(prediction, y), F.l1_loss(prediction, y)])
        return (0.5 * torch.exp(-self.uncertainty) * losses + self.uncertainty).sum()


class LitMetric(LitPlain):
    """A metric that counts the samples of each class."""

    def __init__(self):
        super().__init__()
        self.score = MulticlassF1Score(num_classes=4)

    def loss(self, prediction, y):
        self.score.update(prediction, y.argmax(1))
        return super().loss(prediction, y)


class LitSumOfTasks(LitPlain):
    """A sum of losses with a constant weight, as many as microbatches."""

    def loss(self, prediction, y):
        losses = torch.stack([F.mse_loss(prediction, y), F.l1_loss(prediction, y)])
        return losses.sum() * 0.25 + losses.sum()


class LitStack(LitPlain):
    """A mean over four layers, as many as a microbatch has samples."""

    def loss(self, prediction, y):
        layers = torch.stack([prediction, prediction.square(), y, prediction * y])
        weights = self.net[0].bias.softmax(0).view(4, 1, 1)
        mixed = (weights * layers).sum(0) + layers.mean(0)
        return super().loss(mixed, y)


class LitPerSample(LitPlain):
    """A sum over stacked losses of samples."""

    def loss(self, prediction, y):
        return torch.stack([F.mse_loss(*pair) for pair in zip(prediction, y, strict=True)]).sum()


class LitBarePenalty(LitPlain):
    """Sums of parameters without a factor."""

    def loss(self, prediction, y):
        weight = self.net[0].weight
        return super().loss(prediction, y) + weight.square().sum() + (weight * weight).abs().sum()


class LitOneLabel(LitPlain):
    def loss(self, prediction, y):
        return F.cross_entropy(prediction[0], torch.tensor(1)) + super().loss(prediction, y)


class LitMasked(LitPlain):
    """A mean over the observed values."""

    def loss(self, prediction, y):
        observed = (y > 0).float()
        return (
            F.mse_loss(prediction, y, reduction="none") * observed
        ).sum() / observed.sum().clamp(min=1)


class LitMaskedMean(LitMasked):
    """A masked mean followed by a mean without effect, as in gluonts."""

    def loss(self, prediction, y):
        return super().loss(prediction, y).mean()


class LitNormalized(LitPlain):
    """Targets normalized over the batch."""

    def loss(self, prediction, y):
        return super().loss(prediction, (y - y.mean(dim=0)) / y.std(dim=0))


class LitMeans(LitPlain):
    """Reductions that keep no feature dimension or are not over samples."""

    def loss(self, prediction, y):
        error = (prediction - y).square()
        means = error.mean(1).mean(0) + error.mean((0, 1)) + error[:, :2].T.mean(0).mean()
        return means + F.normalize(error, 2, 1).mean() + torch.max(prediction, y).mean()


class LitWeighted(LitPlain):
    """Classes of different weights."""

    def loss(self, prediction, y):
        return F.cross_entropy(prediction, y.argmax(1), weight=torch.linspace(0.5, 2, 4))


class LitIgnoring(LitPlain):
    """Labels that the step ignores."""

    def loss(self, prediction, y):
        return F.cross_entropy(prediction, y.argmax(1).masked_fill(y[:, 0] > 0, -100))


class LitIgnoringOther(LitPlain):
    """Labels that the step ignores, with another number than torch's."""

    def loss(self, prediction, y):
        labels = y.argmax(1).masked_fill(y[:, 0] > 0, -1)
        return F.cross_entropy(prediction, labels, ignore_index=-1)


class LitConstant(LitPlain):
    """A sum divided by the number of samples, as a constant."""

    def loss(self, prediction, y):
        return F.mse_loss(prediction, y, reduction="sum") / 8


class LitConstantFactor(LitPlain):
    """A sum divided by the number of values in the batch, as a constant."""

    def loss(self, prediction, y):
        return 0.03125 * (prediction - y).square().sum() + 0.1 * prediction.mean()


class LitDivergence(LitPlain):
    """A sum with a factor, divided by the number of samples, as in the loss of VAEs."""

    def loss(self, prediction, y):
        divergence = -0.5 * (prediction - prediction.exp()).sum()
        return (F.mse_loss(prediction, y, reduction="sum") + divergence) / len(y)


class LitPenalty(LitPlain):
    """Small sums that are not over samples."""

    def loss(self, prediction, y):
        penalty = self.net[0].weight.square().sum() + 0.1 * self.net[1].bias.abs().sum() / 3
        return super().loss(prediction, y) + 1e-3 * penalty


class LitRoot(LitPlain):
    def loss(self, prediction, y):
        return F.mse_loss(prediction, y).sqrt()


class LitOverlap(LitPlain):
    """The soft Dice loss over the whole batch."""

    def loss(self, prediction, y):
        p, target = prediction.sigmoid(), y > 0
        return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


class LitNorm(LitPlain):
    def loss(self, prediction, y):
        return 0.1 * (prediction - y).norm() + F.mse_loss(prediction, y)


class LitInnerStep(LitPlain):
    """Takes a step inside of the loss, as meta-learning does."""

    def loss(self, prediction, y):
        loss = F.mse_loss(prediction, y)
        w = self.net[3].weight
        (gradient,) = torch.autograd.grad(loss, [w], create_graph=True)
        return F.mse_loss(y @ (w - 0.1 * gradient), y)


class LitInnerSteps(LitPlain):
    """Takes a step inside of the loss for each sample, that of a task."""

    def loss(self, prediction, y):
        loss = 0
        for row, target in zip(prediction, y, strict=True):
            w = self.net[3].weight
            (gradient,) = torch.autograd.grad(
                F.mse_loss(row[:3], target[:3]), [w], create_graph=True
            )
            loss = loss + F.mse_loss(target @ (w - 0.1 * gradient), target) / len(y)
        return loss


class LitInputGradient(LitPlain):
    """A penalty on the gradient with respect to the samples."""

    def training_step(self, batch, batch_idx):
        x = batch[0].requires_grad_()
        prediction = self.net(x)
        gradient = torch.autograd.grad(prediction.sum(), x, create_graph=True)[0]
        return self.loss(prediction, batch[1]) + gradient.square().sum(1).sqrt().mean()


class LitOrthogonal(LitPlain):
    """Nonlinear functions of parameters, and of the losses of samples."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def loss(self, prediction, y):
        w = self.net[0].weight
        penalty = (w @ w.T - torch.eye(4)).norm() + (w.norm() ** 2 + 1).sqrt()
        errors = (prediction - y).square().mean(1).sqrt()
        return errors.mean() * torch.exp(-self.scale) + self.scale + 0.1 * penalty


class LitSamples(LitPlain):
    """Nonlinear functions of single samples, and a smoothed cross-entropy."""

    def loss(self, prediction, y):
        roots = [(p - t)[:3].square().mean().sqrt() for p, t in zip(prediction, y, strict=True)]
        norms = [p[:, :3].norm() for p in prediction.split(1)] + [prediction[0, 0].exp()]
        smoothed = F.cross_entropy(prediction, y.argmax(1), label_smoothing=0.1)
        return sum(roots) / len(y) + sum(norms) / len(y) + smoothed


class Curriculum:
    def __init__(self):
        self.step = 0


class LitCounter(LitPlain):
    """Counts its steps, as a curriculum does."""

    def __init__(self):
        super().__init__()
        self.state = Curriculum()

    def loss(self, prediction, y):
        self.state.step += 1
        return super().loss(prediction / self.state.step, y)


class Temperature(nn.Module):
    """Counts its calls, and keeps its last output for a plot."""

    steps = 0

    def forward(self, x):
        self.steps += 1
        self.last = x.detach()
        return x / self.steps


class LitCountingPart(LitPlain):
    def __init__(self):
        super().__init__()
        self.temperature = Temperature()

    def loss(self, prediction, y):
        return super().loss(self.temperature(prediction), y)


class LitAdaptive(LitPlain):
    """Weighs a loss by gradients of the last layer, as VQGAN does."""

    def loss(self, prediction, y):
        losses = F.mse_loss(prediction, y), prediction.square().mean()
        last = self.net[3].weight
        first, second = (torch.autograd.grad(one, last, retain_graph=True)[0] for one in losses)
        return losses[0] + (first.norm() / second.norm()).detach() * losses[1]


class LitAuxiliary(LitPlain):
    """A part of the loss that is handed on by an attribute, and numbers for a log."""

    auxiliary: Tensor | None = None

    def __init__(self):
        super().__init__()
        self.last = None
        self.worst = torch.zeros(2)

    def loss(self, prediction, y):
        self.last = self.worst = prediction.mean().item()
        self.auxiliary = prediction.square().mean()
        return super().loss(prediction, y) + self.auxiliary


class LitDivided(LitPlain):
    def loss(self, prediction, y):
        return F.mse_loss(prediction, y, reduction="sum") / len(y)


def fit(rank, kind, layout, size):
    L.seed_everything(1, verbose=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = make_trainer(PTDPStrategy(**layout), size, max_steps=3)
        trainer.fit(
            kind(), DataLoader(TensorDataset(torch.randn(24, 4), torch.randn(24, 4)), batch_size=8)
        )
    return [str(one.message) for one in told if "docs/microbatches.md" in str(one.message)]


M2 = {"num_microbatches": 2}
CASES = {
    LitPlain: None,
    LitDivided: None,
    LitAuxiliary: None,
    LitPenalty: None,
    LitOrthogonal: None,
    LitInputGradient: None,
    LitSamples: None,
    LitInnerSteps: None,
    LitInnerStep: "test_step_inspection.py, line",
    LitRoot: "the loss contains 'sqrt' of a number",
    LitOverlap: "the loss contains 'div' of a number",
    LitNorm: "the loss contains 'linalgvectornorm' of a number",
    LitCounter: "training_step writes self.state['step'], but",
    LitCountingPart: "training_step writes self.temperature.steps, but",
    LitAdaptive: "test_step_inspection.py, line",
    LitMeans: None,
    LitNormalized: "test_step_inspection.py, line",
    LitHardest: "test_step_inspection.py, line",
    LitWorst: "the loss is the maximum over one microbatch",
    LitMedian: "the loss is the median over one microbatch",
    LitDistances: "test_step_inspection.py, line",
    LitProducts: "test_step_inspection.py, line",
    LitCosines: "test_step_inspection.py, line",
    LitRanks: "test_step_inspection.py, line",
    LitEinsum: "test_step_inspection.py, line",
    LitTowers: "test_step_inspection.py, line",
    LitCovariance: "test_step_inspection.py, line",
    LitWhitens: "test_step_inspection.py, line",
    LitSurvival: "test_step_inspection.py, line",
    LitFeatures: None,
    LitOwnRows: None,
    LitPairs: None,
    LitAnchors: None,
    LitDivergence: None,
    LitPrototypes: None,
    LitTasks: None,
    LitMetric: None,
    LitSumOfTasks: None,
    LitStack: None,
    LitPerSample: "the loss is a sum",
    LitBarePenalty: None,
    LitOneLabel: None,
    LitCarried: "training_step writes self.hidden, but",
    LitCarriedPair: "training_step writes self.hidden, but",
    LitQueue: "training_step writes self.queue, but",
    LitSchedules: "training_step writes self.lr_schedulers(), but",
    LitTeacher: "training_step writes self.teacher.weight, but",
    LitSum: "the loss is a sum",
    LitSummed: "the loss is a sum",
    LitConstant: "the loss is a sum",
    LitConstantFactor: "the loss is a sum",
    LitMasked: "the loss is divided by a number that differs between microbatches",
    LitMaskedMean: "the loss is divided by a number that differs between microbatches",
    LitWeighted: "the loss is a mean over labels with a total weight of",
    LitIgnoring: "the loss is divided by a number that differs between microbatches",
    LitIgnoringOther: "the loss is divided by a number that differs between microbatches",
    LitContrastive: "the loss compares samples within their microbatch",
    LitTwoViews: "test_step_inspection.py, line",
}


def check_told(pool, kind, layout, world_size, expected):
    """All ranks together tell one text with the expected beginning, or nothing."""
    ranks = pool.run(fit, world_size=world_size, args=(kind, layout, world_size))
    told = [text for rank in ranks for text in rank]
    assert [text.startswith(expected or "") for text in told] == [True] * (expected is not None), (
        told
    )


@pytest.mark.parametrize("kind", CASES)
def test_microbatch_dependent_step_warns_once(kind, pool):
    check_told(pool, kind, M2, 1, CASES[kind])


@pytest.mark.parametrize("kind", [LitPlain, LitCarried, LitSum, LitQueue, LitNormalized])
def test_microbatch_dependent_pipeline_step_warns_once(kind, pool):
    layout = {**M2, "pipeline_parallel_size": 2}
    check_told(pool, kind, layout, 2, CASES[kind])


@pytest.mark.parametrize(
    "kind", [LitPlain, LitCarried, LitMetric, LitSum, LitContrastive, LitTwoViews, LitNormalized]
)
@pytest.mark.parametrize("layout", [{}, {"shard": "optimizer"}], ids=["d2", "sharded"])
def test_replica_dependent_step_warns_once(kind, layout, pool):
    # Two views are as many rows as the samples of two replicas; the loss still shows them.
    expected = {LitCarried: None, LitTwoViews: CASES[LitContrastive]}.get(kind, CASES[kind])
    expected = expected and expected.replace("microbatch", "replica")
    check_told(pool, kind, layout, 2, expected)


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (LitWeighted, "the loss is a mean over labels with a total weight of"),
        (LitIgnoringOther, "samples have different numbers of labels other than -1,"),
    ],
)
def test_weight_of_labels_warns_with_replicas(kind, start, pool):
    (text,), others = pool.run(fit, world_size=2, args=(kind, {}, 2))
    assert text.startswith(start)
    assert others == []


def test_step_without_microbatches_does_not_warn(pool):
    for kind in CASES:
        assert pool.run(fit, world_size=1, args=(kind, {}, 1)) == [[]]


class LitNormed(LitPlain):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        )


def test_state_change_in_recomputed_block_warns(pool):
    ((text,),) = pool.run(fit, world_size=1, args=(LitNormed, {**M2, "recompute": "full"}, 1))
    assert text.startswith("training_step writes self.net.0.1.num_batches_tracked")
    assert "recomputation runs blocks again" in text


def test_counter_with_one_microbatch_and_recomputation_does_not_warn(pool):
    layout = {"recompute": "full"}
    assert pool.run(fit, world_size=1, args=(LitCounter, layout, 1)) == [[]]


SLICE_SUMS = {
    "per sample": (lambda x: x.square().sum() / 3, True),
    "constant": (lambda x: x.mean() + 0.001 * x.square().sum(), True),
    "of losses": (lambda x: F.mse_loss(x, x.detach(), reduction="sum") / 3, True),
    "of labels": (lambda x: cross_entropy_sum(x) * 0.01, True),
    "negative": (lambda x: -(x * x.exp()).sum() / torch.tensor(3.0), True),
    "mean": (lambda x: x.square().sum() / x.numel(), False),
    "of mask": (
        lambda x: 0.5 * (x.amax(-1) * (x[..., 0] > 0)).sum() / (x[..., 0] > 0).sum(),
        False,
    ),
    "labels": (lambda x: cross_entropy_sum(x) / 12, False),
    "weights": (lambda x: x.mean() + 0.01 * nn.Parameter(torch.ones(5, 7)).square().sum(), False),
    "bare": (lambda x: x.square().sum() + x.mean(), True),
    "pooled": (lambda x: x.mean(1).square().sum() / 3, False),
    "bare pooled": (lambda x: x.mean(1).square().sum(), False),
    "tasks": (lambda x: torch.stack([x.mean(), x.square().mean()]).sum(), False),
    "as many weights": (
        lambda x: x.mean() + 2 * nn.Parameter(torch.ones(12, 7)).square().sum(),
        False,
    ),
}


def cross_entropy_sum(x):
    return F.cross_entropy(x.flatten(0, 1), x.new_zeros(12, dtype=torch.long), reduction="sum")


@pytest.mark.parametrize("name", SLICE_SUMS)
def test_sum_over_slice_warns_unless_divided_by_tokens(name):
    loss, warns = SLICE_SUMS[name]
    x = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_of_slices(loss(x), samples=3, tokens=4, alone=True)
    assert [str(one.message)[:26] for one in told] == ["the loss contains a sum ov"] * warns


class LitPooled(L.LightningModule):
    """Attention, and a loss of whole samples that compares them with each other."""

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.kind = nn.Embedding(8, 4), kind

    def training_step(self, batch, batch_idx):
        (ids,) = batch
        x = self.embedding(ids)
        pooled = (x + F.scaled_dot_product_attention(x, x, x)).mean(1)
        if self.kind == "contrastive":
            return F.cross_entropy(pooled @ pooled.T, torch.arange(len(ids)))
        if self.kind == "sum":
            return pooled.square().sum()
        if self.kind == "normalized":
            return (pooled - pooled.mean(0)).square().mean()
        return pooled.mean() + self.embedding.weight.square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_pooled(rank, kind):
    layout = {"context_parallel_size": 2, "context_parallel_positions": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = make_trainer(PTDPStrategy(**layout), 2, max_steps=1)
        trainer.fit(LitPooled(kind), DataLoader(TensorDataset(torch.ones(4, 12).long()), 4))
    return [text for one in told if "the loss" in (text := str(one.message))]


@pytest.mark.parametrize("kind", ["contrastive", "sum", "normalized", "penalty"])
def test_loss_of_whole_samples_does_not_warn_on_context_ranks(kind, pool):
    """Context ranks have all samples."""
    assert pool.run(fit_pooled, world_size=2, args=(kind,)) == [[], []]


class LitLists(LitPlain):
    def training_step(self, batch, batch_idx):
        samples = torch.stack(list(batch)) if isinstance(batch, list) else batch
        return self.net(samples.reshape(-1, 4)).square().mean()


def fit_collated(rank, collate):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = make_trainer(PTDPStrategy(**M2), 1, max_steps=1)
        try:
            trainer.fit(
                LitLists(), DataLoader(torch.randn(24, 6, 4), batch_size=8, collate_fn=collate)
            )
        except ValueError as error:
            return [str(error)]
    return [text for one in told if "of the batch have" in (text := str(one.message))]


def of_time_first(samples):
    return torch.stack(samples, 1)


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (list, "the batch is a list of 8 samples, so microbatches would get parts"),
        (of_time_first, "all tensors of the batch have 8 elements along dimension 1"),
        (torch.stack, None),
    ],
)
def test_samples_along_another_dimension_are_named(collate, words, pool):
    (told,) = pool.run(fit_collated, world_size=1, args=(collate,))
    assert [text.startswith(words or "") for text in told] == [True] * (words is not None), told


class LitMasks(LitPlain):
    """Labels with ignored entries, beside masks and small integers."""

    def training_step(self, batch, batch_idx):
        x, mask, label, _ = batch
        return F.cross_entropy(self.net(x), label.masked_fill(~mask, -100))


def fit_masks(rank):
    mask = torch.arange(24) % 3 > 0
    data = TensorDataset(torch.randn(24, 4), mask, torch.arange(24) % 4, mask.to(torch.uint8))
    trainer = make_trainer(PTDPStrategy(**M2), 1, max_steps=2)
    trainer.fit(LitMasks(), DataLoader(data, batch_size=8))


def test_masks_of_a_batch_are_inspected_with_cross_entropy(pool):
    pool.run(fit_masks, world_size=1)


@pytest.mark.parametrize(("ignored", "expected"), [(-1, 2.0), (-100, None)])
def test_labels_ignored_by_another_number_are_compared_by_their_means(ignored, expected):
    """Labels -100 are compared before the step."""
    labels = torch.tensor([1, ignored, 2])
    loss = F.cross_entropy(torch.randn(3, 4, requires_grad=True), labels, ignore_index=ignored)
    assert divisor_of(loss, {"labels": labels}) == expected


def test_losses_of_many_terms_are_inspected():
    """A loss may subtract a term per token, or use its terms several times."""
    chain = doubled = torch.ones((), requires_grad=True).exp()
    for _ in range(5000):
        chain = chain - 0.001 * chain.detach()
    for _ in range(60):
        doubled = doubled * doubled - doubled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_loss(chain, samples=4, replicas=True)
        warn_of_loss(doubled, samples=4, replicas=True)


@pytest.mark.parametrize("divides_samples", [True, False])
def test_class_weights_of_whole_samples_warn_if_samples_are_divided(divides_samples):
    logits = torch.randn(4, 2, requires_grad=True)
    loss = F.cross_entropy(logits, torch.tensor([0, 1, 1, 1]), weight=torch.tensor([1.0, 3.0]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_counted(loss, torch.tensor(32), slice_samples=4, divides_samples=divides_samples)
    assert ["class weights" in str(one.message) for one in caught] == [True] * divides_samples
