"""Corpus and configuration that train within a second."""

import gc
import random
import shutil
from pathlib import Path

import pytest
import yaml

from lightning_ptdp.cli import main
from lightning_ptdp.loggers.tracking_store import create_database

WORDS = [
    "the",
    "a",
    "stage",
    "rank",
    "layer",
    "sends",
    "waits",
    "holds",
    "its",
    "gradient",
    "forward",
    "backward",
    "then",
    "of",
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for number in range(40):
        sentences = [" ".join(draw.choices(WORDS, k=12)) + "." for _ in range(20)]
        (folder / f"{number}.txt").write_text("\n".join(sentences))
    return folder


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory):
    """Return the folder of the tokenized corpus, prepared once."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    config = tmp_path_factory.mktemp("config") / "tiny.yaml"
    config.write_text(tiny(corpus, folder, folder.parent))
    assert main(["prepare", "--config", str(config)]) == 0
    return folder


def tiny(corpus: Path, data_dir: Path, folder: Path) -> str:
    """Return the configuration as YAML."""
    config = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 4,
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "gradient_clip_val": 1.0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "logger": {
                "class_path": "lightning_ptdp.loggers.MLFlowLogger",
                "init_args": {"save_dir": str(folder / "runs"), "experiment_name": "tiny"},
            },
            "callbacks": [
                {
                    "class_path": "ModelCheckpoint",
                    "init_args": {"save_last": True, "monitor": "val_loss"},
                },
            ],
        },
        "model": {
            "class_path": "LitGPT",
            "init_args": {
                "config": {
                    "vocabulary_size": 320,
                    "sequence_length": 16,
                    "num_layers": 4,
                    "hidden_size": 32,
                    "num_heads": 2,
                },
                "optimizer": {"learning_rate": 0.01},
            },
        },
        "data": {
            "class_path": "TextDataModule",
            "init_args": {
                "data_dir": str(data_dir),
                "source": str(corpus),
                "vocabulary_size": 320,
                "sequence_length": 16,
                "micro_batch_size": 2,
                "num_microbatches": 4,
                "validation_samples": 8,
            },
        },
        "sample": {"prompt": "the stage", "max_new_tokens": 8},
    }
    return yaml.safe_dump(config)


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """Return an MLflow database without runs, which takes a second to create.

    This also imports MLflow's store, which every forked rank 0 would import otherwise.
    """
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    create_database(path)
    gc.freeze()  # as at the end of the collection (tests/conftest.py)
    return path


@pytest.fixture
def config(corpus, prepared, database, tmp_path):
    """Return a configuration file whose run writes only below ``tmp_path``."""
    path = tmp_path / "tiny.yaml"
    (tmp_path / "runs").mkdir()
    shutil.copy(database, tmp_path / "runs")
    path.write_text(tiny(corpus, prepared, tmp_path))
    return str(path)


@pytest.fixture
def ptdp(capsys):
    """Run ``ptdp`` in this process and return its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
