"""A strategy named on the command line keeps the options that the configuration gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from lightning_ptdp.cli.strategy_option import keep_strategy_options

Run = Callable[..., tuple[int, str, str]]

OURS = (
    "trainer:\n  strategy:\n    class_path: lightning_ptdp.PTDPStrategy\n    init_args: "
    "{num_microbatches: 4}\n"
)
BARE = '--trainer.strategy={"class_path": "lightning_ptdp.PTDPStrategy"}'


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (
            [f"--config={OURS}", "--trainer.strategy=PTDPStrategy", "--x=1"],
            [f"--config={OURS}", "--x=1"],
        ),
        (
            [f"--config={OURS}", "--trainer.strategy", "lightning_ptdp.PTDPStrategy"],
            [f"--config={OURS}"],
        ),
        ([f"--config={OURS}", "--trainer.strategy=ptdp"], [f"--config={OURS}"]),
        (
            [f"--config={OURS}", "--trainer.strategy=ddp"],
            [f"--config={OURS}", "--trainer.strategy=ddp"],
        ),
        (["--trainer.strategy=ptdp"], ["--trainer.strategy=ptdp"]),
        (
            ["--trainer.strategy=PTDPStrategy", "--trainer.strategy.seed=1"],
            [BARE, "--trainer.strategy.seed=1"],
        ),
        (
            [
                f"--config={OURS}",
                "--config=trainer:\n  strategy: ddp\n",
                "--trainer.strategy=PTDPStrategy",
            ],
            [f"--config={OURS}", "--config=trainer:\n  strategy: ddp\n", BARE],
        ),
        (
            [f"--config={OURS}", "--config=sample: null\n", "--trainer.strategy=ptdp"],
            [f"--config={OURS}", "--config=sample: null\n"],
        ),
    ],
)
def test_arguments(arguments: list[str], kept: list[str]) -> None:
    assert keep_strategy_options(arguments) == kept


@pytest.mark.parametrize("value", ["lightning_ptdp.PTDPStrategy", "PTDPStrategy", "ptdp"])
def test_a_recipe_keeps_its_layout(ptdp: Run, value: str) -> None:
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


def test_the_class_alone_is_the_strategy(ptdp: Run, config: str, tmp_path: Path) -> None:
    code, out, err = ptdp(
        "fit", "--config", config, "--trainer.strategy=PTDPStrategy", "--print_config"
    )
    assert code == 0, err
    assert yaml.safe_load(out)["trainer"]["strategy"]["class_path"] == "lightning_ptdp.PTDPStrategy"
