"""Short names of the strategy, which keeps its options from the configuration, and the logger."""

from collections.abc import Mapping

import pytest
import yaml

from lightning_ptdp.cli.lightning_cli import parsed_values

OURS = (
    "trainer:\n  strategy:\n    class_path: lightning_ptdp.PTDPStrategy\n    init_args: "
    "{num_microbatches: 4}\n"
)
OTHER = "trainer:\n  strategy: ddp\n"
MODEL = "--model=LitGPT"


@pytest.mark.parametrize(
    ("arguments", "microbatches"),
    [
        ([f"--config={OURS}", "--trainer.strategy=PTDPStrategy"], 4),
        ([f"--config={OURS}", "--trainer.strategy", "lightning_ptdp.PTDPStrategy"], 4),
        ([f"--config={OURS}", "--trainer.strategy=ptdp"], 4),
        ([f"--config={OURS}", "--config=sample: null\n", "--trainer.strategy=ptdp"], 4),
        ([f"--config={OURS}", f"--config={OTHER}", "--trainer.strategy=PTDPStrategy"], 1),
        (["--trainer.strategy=ptdp"], 1),
        (["--trainer.strategy=ptdp", "--trainer.strategy.num_microbatches=2"], 2),
        (["--trainer.strategy=PTDPStrategy", "--trainer.strategy.num_microbatches=2"], 2),
        ([f"--config={OURS}", "--trainer.strategy=ddp"], None),
    ],
)
def test_strategy_keeps_options_of_configuration(arguments, microbatches):
    strategy = parsed_values([MODEL, *arguments])["trainer"]["strategy"]
    if microbatches is None:
        assert strategy == "ddp"
        return
    assert isinstance(strategy, Mapping)
    assert strategy["class_path"] == "lightning_ptdp.PTDPStrategy"
    assert (strategy["init_args"]["num_microbatches"] or 1) == microbatches


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config=trainer: {logger: {class_path: MLFlowLogger}}\n"],
        ["--config=trainer: {logger: [{class_path: MLFlowLogger}]}\n"],
        ["--trainer.logger=MLFlowLogger"],
        ["--trainer.logger.class_path=MLFlowLogger"],
        ["--trainer.logger+=MLFlowLogger"],
    ],
)
def test_mlflow_logger_without_module_is_ours(arguments):
    logger = parsed_values([MODEL, *arguments, "--trainer.logger.save_dir=here"])["trainer"][
        "logger"
    ]
    (logger,) = logger if isinstance(logger, list) else [logger]
    assert logger["class_path"] == "lightning_ptdp.loggers.MLFlowLogger"
    assert logger["init_args"]["save_dir"] == "here"


@pytest.mark.parametrize("value", ["lightning_ptdp.PTDPStrategy", "PTDPStrategy", "ptdp"])
def test_recipe_keeps_layout_if_strategy_is_repeated(ptdp, value):
    code, out, err = ptdp(
        "fit",
        "--config",
        "gpt/nano",
        "--trainer.strategy",
        value,
        "--trainer.strategy.bucket_mb=3",
        "--print_config",
    )
    assert code == 0, err
    options = yaml.safe_load(out)["trainer"]["strategy"]["init_args"]
    assert (
        options["tensor_parallel_size"],
        options["virtual_pipeline_size"],
        options["bucket_mb"],
    ) == (2, 2, 3.0)


def test_class_name_selects_strategy(ptdp, config, tmp_path):
    code, out, err = ptdp(
        "fit", "--config", config, "--trainer.strategy=PTDPStrategy", "--print_config"
    )
    assert code == 0, err
    assert yaml.safe_load(out)["trainer"]["strategy"]["class_path"] == "lightning_ptdp.PTDPStrategy"
