"""Expert loads that the callback ``ExpertLoad`` logs.

Every layout logs the same numbers. The loggers of rank 0 receive them even if other ranks hold the
layers."""

import json
import logging
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from PIL import Image
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ptdp.callbacks import ExpertLoad
from lightning_ptdp.callbacks.expert_counts import ExpertCounts, LayerLoad, load_metrics
from lightning_ptdp.callbacks.expert_load import draw_loads
from lightning_ptdp.models import GPTConfig, LitGPT
from tests.expert_parallel.toy import EXPERTS, LENGTH, VOCABULARY, LitMixture, Run
from tests.huggingface import unseen
from tests.huggingface.architectures import Samples
from tests.letters import SP, C, E, M, P, R, S, T, V

pytestmark = pytest.mark.thorough

STEPS, EVERY = 4, 2
NAMES = (
    "expert_load_max",
    "expert_load_min",
    "expert_load_entropy",
    "dead_experts",
    "router_entropy",
)


class MLFlowLogger(DummyLogger):
    """A logger that records metrics, and files like MLflow's logger."""

    run_id = "r1"

    def __init__(self):
        super().__init__()
        self.metrics = {}
        self.kept = []

    @property
    def experiment(self):
        return self

    def log_metrics(self, metrics, step=None):
        found = {
            name: float(value)
            for name, value in metrics.items()
            if name.removeprefix("val_") in NAMES
        }
        if found:
            self.metrics.setdefault(step or 0, {}).update(found)

    def log_artifact(self, run_id, path, folder):
        self.kept.append((Path(path).name, folder))


class LitHuggingFace(unseen.LitUnseen):
    """A Hugging Face module with a validation step."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)


class OwnGPT(LitGPT):
    """A GPT with a capacity: each kept choice is dispatched as a separate token."""

    def __init__(self):
        experts = {
            "num_experts": 4,
            "dense_layers": 1,
            "router_score": "sigmoid",
            "balance": "bias",
            "capacity_factor": 1.25,
        }
        sizes = {
            "vocabulary_size": VOCABULARY,
            "sequence_length": LENGTH,
            "num_layers": 3,
            "hidden_size": 16,
            "num_heads": 2,
        }
        super().__init__(GPTConfig(**sizes, **experts, mlp="swiglu", bias=False))

    def configure_model(self):
        super().configure_model()
        self.double()


class LitBatched(LitHuggingFace):
    """Experts as batched products, which every release of torch and transformers can compile."""

    def configure_model(self):
        if self.model is None:
            super().configure_model()
            self.model.config._experts_implementation = "batched_mm"
            self.float()


@dataclass(frozen=True, kw_only=True)
class OwnRun(Run):
    """A run that trains an ``OwnGPT``."""


def fit(rank, run, folder):
    """Train with ``ExpertLoad`` and return the metrics and files that this rank recorded.

    "logged" and "kept" come from the rank's logger, "known" from the Trainer's callback metrics.
    "counted" holds the loads that the test counts itself, for a ``Run`` in one process."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(3, verbose=False)
    toy = run if isinstance(run, Run) else Run(world_size=run.world_size, layout=run.layout)
    store = MLFlowLogger()
    trainer = replace(toy, steps=STEPS).make_trainer(ExpertLoad(dirpath=folder))
    trainer.loggers, trainer.log_every_n_steps = [store], EVERY
    ids = torch.randint(VOCABULARY, (32, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    module: Any
    data: Any
    if isinstance(run, OwnRun):
        module, data = OwnGPT(), [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
    elif isinstance(run, Run):
        module, data = LitMixture(run), TensorDataset(ids)
    else:
        module, data = LitHuggingFace(run), Samples(run.task, 32)
    sampler = DistributedSampler(data, **trainer.strategy.distributed_sampler_kwargs, shuffle=False)
    trainer.fit(
        module,
        *(
            DataLoader(data, batch_size=8 // sampler.num_replicas, sampler=sampler)
            for _ in range(2)
        ),
    )
    known = {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if name.removeprefix("val_") in NAMES
    }
    counted = _counted(module, ids) if type(run) is Run and run.world_size == 1 else {}
    return {"logged": store.metrics, "kept": store.kept, "known": known, "counted": counted}


def _counted(module, ids):
    """Return the loads relative to the mean, recomputed from the router outputs."""
    x, found = module.embedding(ids[:, :-1]), {}
    for number, layer in enumerate(module.layers):
        chosen = (
            layer.router(x.flatten(0, 1)).topk(2).indices
            if layer.routing == "own"
            else torch.full((x[..., 0].numel(), 1), 3)
        )
        counts = Counter(chosen.flatten().tolist())
        found[f"layers.{number}.experts"] = [
            EXPERTS * counts[i] / chosen.numel() for i in range(EXPERTS)
        ]
        x = layer(x)
    return found


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """Return a function that trains in one process and returns the results and the folder."""

    results = {}

    def train(run):
        if str(run) not in results:
            folder = tmp_path_factory.mktemp("one")
            results[str(run)] = pool.run(fit, world_size=1, args=(run, str(folder)))[0], folder
        return results[str(run)]

    return train


def _same(found, expected):
    assert list(expected["logged"]) == [EVERY - 1, STEPS - 1]
    assert set(expected["logged"][STEPS - 1]) == {*NAMES, *(f"val_{name}" for name in NAMES)}
    for step, values in expected["logged"].items():
        assert found[0]["logged"][step] == pytest.approx(values, rel=1e-6)
    for one in found:
        assert one["known"] == pytest.approx(expected["known"], rel=1e-6)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {E: 2, R: "full"}),
        (4, {E: 2, P: 2, V: 2, M: 2, R: "full", "recompute_layers": 1}),
        (2, {P: 2, M: 2, S: "zb_h1"}),
    ],
    ids=["e2 recompute", "p2 v2 e2", "p2 zb_h1"],
)
def test_loads_equal_single_process(world_size, layout, pool, alone, tmp_path):
    expected, folder = alone(Run())
    run = Run(world_size=world_size, layout=layout)
    found = pool.run(fit, world_size=world_size, args=(run, str(tmp_path)))
    _same(found, expected)
    one, many = (
        json.loads((path / f"step-{STEPS:06d}.json").read_text()) for path in (folder, tmp_path)
    )
    assert one == many
    assert all(one[name] == pytest.approx(loads) for name, loads in expected["counted"].items())
    assert list(one) == [f"layers.{number}.experts" for number in range(4)]
    assert found[0]["kept"] == [
        (f"step-{STEPS:06d}{suffix}", "experts") for suffix in (".png", ".json")
    ]
    assert [one["kept"] for one in found[1:]] == [[]] * (world_size - 1)
    with Image.open(tmp_path / f"step-{STEPS:06d}.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    [
        ("mixtral", 4, {T: 2, E: 2}),
        ("qwen3_moe", 2, {T: 2, SP: True}),
        ("mixtral", 2, {C: 2, E: 2}),
    ],
    ids=["t2 e2", "t2 sp", "c2 e2"],
)
def test_hugging_face_loads_equal_single_process(name, world_size, layout, pool, alone, tmp_path):
    pytest.importorskip("transformers")
    run = unseen.Run(architecture=name, world_size=world_size, layout=layout)
    expected, _ = alone(unseen.Run(architecture=name))
    _same(pool.run(fit, world_size=world_size, args=(run, str(tmp_path))), expected)


def test_lit_gpt_loads_equal_single_process(pool, tmp_path):
    layout = {E: 2, P: 2, M: 2}
    (expected,) = pool.run(fit, world_size=1, args=(OwnRun(), str(tmp_path)))
    _same(
        pool.run(fit, world_size=4, args=(OwnRun(world_size=4, layout=layout), str(tmp_path))),
        expected,
    )


def _fit_compiled(rank, compiled, folder):
    layout = {"compile": "blocks", "compile_options": {"backend": "aot_eager"}} if compiled else {}
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "LitHuggingFace", LitBatched)
        found = fit(rank, unseen.Run(architecture="mixtral", layout=layout), folder)
    return {
        **found,
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def test_compiled_blocks_count_without_graph_breaks(pool, tmp_path):
    pytest.importorskip("transformers")
    expected, found = (
        pool.run(_fit_compiled, world_size=1, args=(compiled, str(tmp_path)))[0]
        for compiled in (False, True)
    )
    assert (found["graphs"], found["breaks"]) == (2, 0), (
        "expected one graph for training and one for evaluation"
    )
    assert found["logged"] == {
        step: pytest.approx(values, rel=1e-5) for step, values in expected["logged"].items()
    }


def _fit_by_lightning(rank, world_size, folder):
    L.seed_everything(3, verbose=False)
    ids = torch.randint(VOCABULARY, (32, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        strategy="ddp" if world_size > 1 else "auto",
        accelerator="cpu",
        devices=world_size,
        max_steps=1,
        val_check_interval=1,
        callbacks=[ExpertLoad(dirpath=folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    data = DataLoader(TensorDataset(ids), batch_size=32 // world_size)
    module = LitMixture(Run())
    module.configure_model()
    for layer in module.layers:
        layer.experts.reset_parameters()
    vars(module)["configure_model"] = lambda: None  # the model is already built
    module.scripted = torch.jit.script(torch.nn.Identity())
    trainer.fit(module, data, data)
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if name.removeprefix("val_") in NAMES
    }


def test_ddp_loads_equal_single_device(pool, tmp_path):
    (expected,) = pool.run(_fit_by_lightning, world_size=1, args=(1, str(tmp_path)))
    assert len(expected) == 2 * len(NAMES)
    for found in pool.run(_fit_by_lightning, world_size=2, args=(2, str(tmp_path))):
        assert found == pytest.approx(expected, rel=1e-6)


def test_load_metrics_with_all_tokens_on_one_expert(pool, tmp_path):
    (found,) = pool.run(fit, world_size=1, args=(Run(routing="one"), str(tmp_path)))
    values = {
        "expert_load_max": EXPERTS,
        "expert_load_min": 0,
        "expert_load_entropy": 0,
        "dead_experts": 4 * (EXPERTS - 1),
    }
    assert {name: found["known"][f"val_{name}"] for name in values} == values
    assert 0 < found["known"]["val_router_entropy"] < 1


def test_taken_and_set_aside_counts_are_excluded():
    module = LitMixture(Run())
    module.configure_model()
    for layer in module.layers:
        layer.experts.reset_parameters()
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device="cpu", reduce=lambda table, *_: table)
    )
    some, others = torch.randint(
        VOCABULARY, (2, 16, LENGTH), generator=torch.Generator().manual_seed(1)
    )

    def loads(ids):
        return [tuple(load) for load in _counted(module, torch.cat([ids, ids[:, :1]], 1)).values()]

    expected = loads(some)
    counts = ExpertCounts.attach(trainer, module)
    module._loss([torch.cat([some, some[:, :1]], 1)])
    go_on = counts.aside()
    module._loss([torch.cat([others, others[:, :1]], 1)])
    go_on()
    assert [layer.loads for layer in counts.take(trainer)] == [
        pytest.approx(one) for one in expected
    ]
    assert counts.take(trainer) == []
    counts.detach()
    module._loss([some])
    assert counts.take(trainer) == []


def test_metrics_of_even_and_uneven_loads():
    even = LayerLoad(name="a", loads=(1.0,) * 4, router_entropy=None)
    half = LayerLoad(name="b", loads=(2.0, 0.0, 2.0, 0.0), router_entropy=0.25)
    assert even.entropy == pytest.approx(1)
    assert half.entropy == pytest.approx(math.log(2) / math.log(4))
    found = load_metrics([even, half])
    assert found == {
        "expert_load_max": 2,
        "expert_load_min": 0,
        "expert_load_entropy": pytest.approx(0.75),
        "dead_experts": 2,
        "router_entropy": 0.25,
    }
    assert load_metrics([]) == {}


def test_plot_of_layers_with_different_numbers_of_experts(tmp_path):
    loads = [(1.0, 1.0), (4.0, 0.0, 0.0, 0.0)]
    layers = tuple(
        LayerLoad(name=f"layers.{i}.experts", loads=load, router_entropy=None)
        for i, load in enumerate(loads)
    )
    draw_loads(layers, tmp_path / "a.png", title="step 1")
    with Image.open(tmp_path / "a.png") as picture:
        colours = {
            colour for count, colour in picture.convert("RGB").getcolors(2**16) or [] if count > 500
        }
    assert (0, 0, 0) in colours, "experts without tokens must be black"
