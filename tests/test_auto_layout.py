"""``layout="auto"``: choice of a layout before launch and check of its forecast."""

import os
from dataclasses import replace
from functools import partial

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lightning_ptdp.callbacks.step_metrics import device_name
from lightning_ptdp.models import GPTConfig, LitGPT
from lightning_ptdp.planner import find_device
from lightning_ptdp.strategy import PTDPStrategy, layout_choice
from lightning_ptdp.strategy.layout_choice import (
    Forecast,
    choose,
    fastest_layouts,
    wants_choice,
)
from lightning_ptdp.strategy.planning import described_job
from tests.tiny_gpt import LitTiny, PaddedTokens, Run


class Metrics(Logger):
    """Logger that stores the metrics."""

    name = version = "memory"

    def __init__(self):
        super().__init__()
        self.logged = {}

    def log_metrics(self, metrics, step=None):
        self.logged |= metrics

    def log_hyperparams(self, *_, **__):
        pass


def trained(rank, options, world_size):
    """Train and return all weights, the chosen options and the logged metrics."""
    logger, strategy = Metrics(), PTDPStrategy(**options)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_steps=6,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    L.seed_everything(3)
    trainer.fit(LitTiny(Run()), DataLoader(PaddedTokens(64), batch_size=8))
    config = strategy.config
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "num_microbatches",
        "recompute",
        "shard",
        "schedule",
    )
    return (
        strategy.gather_state_dict(),
        {name: getattr(config, name) for name in names},
        logger.logged,
    )


def test_auto_layout_trains_like_chosen_options(pool):
    (weights, chosen, logged), *_ = pool.run(trained, world_size=2, args=({"layout": "auto"}, 2))
    (same, _, nothing), *_ = pool.run(trained, world_size=2, args=(chosen, 2))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, same[name])
    assert {"predicted_step_s", "measured_step_s", "predicted_bytes"} <= set(logged)
    assert "predicted_step_s" not in nothing


def chosen_for(memory, *, world_size=4, **options):
    config = PTDPStrategy(**options).config
    module = LitTiny(Run(eager=True, layers=8, hidden=64))
    job = job_of(module, config, world_size=world_size, memory_bytes=memory)
    return choose(job, config, rows=lambda replicas: 32 // replicas, fits=lambda config: None)


def job_of(module, config, *, world_size=2, **device):
    return described_job(
        module,
        config,
        world_size=world_size,
        batch=world_size,
        length=16,
        device=replace(find_device("cpu"), **device),
        precision="32-true",
    )


def test_model_too_large_for_data_parallel_is_split():
    config, forecast = chosen_for(1e9)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (1, 1)
    assert (
        forecast.text.startswith("layout='auto' chose t1 p1 d4")
        and " slower per sample, mostly in " in forecast.text
    )
    config, forecast = chosen_for(3.2e6)
    assert config.tensor_parallel_size * config.pipeline_parallel_size > 1
    assert forecast.memory <= 3.2e6


def test_unsupported_layout_is_skipped():
    def no_data_parallel(config):
        if config.tensor_parallel_size == 1:
            raise ValueError("this model is never whole")

    config = PTDPStrategy().config
    job = job_of(LitTiny(Run(eager=True)), config)
    found, _ = choose(job, config, rows=lambda replicas: 8, fits=no_data_parallel)
    assert found.tensor_parallel_size == 2
    assert len(fastest_layouts(job, lambda replicas: 8)) == 3

    def nothing(config):
        raise ValueError("no")

    with pytest.raises(ValueError, match=r"supports none of the 3 fastest layouts. .*: no"):
        choose(job, config, rows=lambda replicas: 8, fits=nothing)


def test_large_experts_are_distributed():
    """Experts that do not fit on one rank are distributed over several."""
    module = LitGPT(
        GPTConfig.llama(
            vocabulary_size=64,
            sequence_length=16,
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            num_experts=8,
            ffn_hidden_size=256,
        )
    )
    module.configure_model()
    whole = sum(p.numel() for p in module.parameters())
    experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    options = PTDPStrategy().config
    memory = 16.0 * (whole - experts / 2) + 2e6
    job = job_of(module, options, world_size=4, memory_bytes=memory)

    def stays_whole(config):
        if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
            raise ValueError("this model is not cut")

    config, forecast = choose(job, options, rows=lambda replicas: 4, fits=stays_whole)
    assert config.expert_parallel_size > 1
    assert f" e{config.expert_parallel_size}" in forecast.text.partition(";")[0]


class Stop(Exception):
    """Raised instead of launching processes."""


class LitCounted(LitTiny):
    """Module that counts how often it is built."""

    built = 0

    def configure_model(self):
        LitCounted.built += 1
        super().configure_model()


def test_layout_refused_by_trainer_check_is_skipped(monkeypatch):
    """A layout that the Trainer or the module does not support is skipped.

    The model is not built for each candidate. A failed choice is repeated by the next ``fit``.
    """

    def stop(*_, **__):
        raise Stop

    def refuse(strategy, trainer):
        if strategy.config.pipeline_parallel_size == 1:
            raise strategy.refusal("this module wants stages")

    monkeypatch.setattr(
        "lightning.pytorch.strategies.launchers.multiprocessing._MultiProcessingLauncher.launch",
        stop,
    )
    strategy = PTDPStrategy(layout="auto", start_method="fork")
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        barebones=True,
    )
    batches = [[0, 1], [2, 3]]
    for _ in range(2):
        with pytest.raises(ValueError, match="layout='auto' needs the batch size"):
            trainer.fit(LitTiny(Run()), DataLoader(PaddedTokens(4), batch_sampler=batches))
    monkeypatch.setattr("lightning_ptdp.strategy.layout_choice.check_trainer", refuse)
    with pytest.raises(Stop):
        trainer.fit(LitCounted(Run()), DataLoader(PaddedTokens(64), batch_size=8))
    assert strategy.config.pipeline_parallel_size == 2
    assert LitCounted.built == 2  # once to choose, once to check the choice


def test_gpu_name_is_read_in_child_process_before_fork(monkeypatch):
    """Once initialized in the main process, CUDA cannot be used in forked processes."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: str(os.getpid()))
    gpu = torch.device("cuda", 0)
    ask = partial(device_name, gpu)
    assert layout_choice._ask(ask, forks=True) != str(os.getpid())
    assert layout_choice._ask(ask, forks=False) == str(os.getpid())


def test_invalid_auto_layout_requests_are_refused():
    with pytest.raises(
        ValueError,
        match="layout='auto' chooses tensor_parallel_size, but tensor_parallel_size=2 is set",
    ):
        PTDPStrategy(layout="auto", tensor_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"layout='best' must be 'auto'\. To set sizes, leave it out"
    ):
        PTDPStrategy(layout="best")
    assert wants_choice("auto", PTDPStrategy(seed=3, compile="blocks").config)
    with pytest.raises(ValueError, match=r"found no layout that fits on 4 x cpu with .* GiB each"):
        chosen_for(1e3)
    with pytest.raises(ValueError, match="the sizes of LightningModule cannot be determined"):
        job_of(L.LightningModule(), PTDPStrategy().config)


def test_inaccurate_forecast_is_reported():
    forecast = Forecast(seconds=1.0, memory=1.0, text="", figures="calibrated with --devices 2")
    assert forecast.verdict() == "" and forecast.measured is None
    forecast.began = [0.0, 50.0, 60.0, 70.0, 71.1, 72.2, 173.3, 174.4]
    assert forecast.measured == pytest.approx(1.1)
    assert forecast.verdict() == ""
    forecast.seconds = 0.8
    assert "expected 0.8 s per step, but a step took 1.1 s" in forecast.verdict()
    assert forecast.verdict().endswith("calibrated with --devices 2")
