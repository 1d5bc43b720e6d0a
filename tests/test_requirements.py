"""Installed versions, checked against the declared ranges."""

import os
import sys
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import lightning as L
import pytest
from packaging.requirements import Requirement
from torch import nn

from lightning_ptdp.base.requirements import (
    RequirementError,
    check_installed,
    check_python,
    find_problem,
    import_optional,
    read_declared,
)
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.strategy.checks.model import check_model
from lightning_ptdp.world.layout import ParallelLayout
from tests import processes

ROOT = Path(__file__).resolve().parents[1]
TORCH = read_declared(["torch<3,>=2.11"])[0]


def has(version):
    return lambda name: version


def has_nothing(name):
    raise metadata.PackageNotFoundError(name)


def declared_ranges():
    """Return the ranges of each library by extra ("" for the dependencies)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = defaultdict(dict)
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in map(Requirement, lines):
            ranges[requirement.name][extra] = str(requirement.specifier)
    return ranges


def test_extras_declare_same_version_range():
    ranges = declared_ranges()
    assert set(ranges["transformers"]) == {"eval", "hf", "test"}
    assert {name: found for name, found in ranges.items() if len(set(found.values())) > 1} == {}


def test_every_dependency_has_lower_bound():
    missing = [
        name
        for name, found in declared_ranges().items()
        for text in found.values()
        if ">=" not in text
    ]
    assert missing == []


def test_lightning_has_same_range_under_both_names():
    ranges = declared_ranges()
    assert ranges["pytorch-lightning"]["test"] == ranges["lightning"][""]


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.15.0", "2.16.0.dev20261101+cpu"])
def test_version_in_range_is_accepted(version):
    assert find_problem(TORCH, has(version)) is None


@pytest.mark.parametrize("version", ["2.10.1", "3.0.0", "2.9.1+cu128"])
def test_problem_names_versions_and_command(version):
    expected = (
        f"torch {version} is installed, but lightning-ptdp needs >=2.11,<3. Run: pip install "
        "'torch>=2.11,<3'"
    )
    assert find_problem(TORCH, has(version)) == expected


def test_missing_library_is_reported():
    assert (
        find_problem(TORCH, has_nothing)
        == "torch is not installed. lightning-ptdp needs >=2.11,<3. Run: pip install 'torch>=2.11,<3'"
    )


def test_python_outside_range_is_refused():
    check_python()
    with pytest.raises(
        RequirementError, match=r"This is Python 3\.10\.4, but lightning-ptdp needs >=3\.11"
    ):
        check_python("3.10.4")


def test_optional_library_is_checked_before_import(monkeypatch):
    monkeypatch.setattr(metadata, "version", has("0.1"))
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    with pytest.raises(
        RequirementError, match=r"peft 0\.1 is installed, but .* pip install 'peft>="
    ):
        import_optional("peft")
    assert "peft" not in sys.modules
    check_installed("a_library_that_is_not_declared")


def test_model_from_outdated_library_is_refused(monkeypatch):
    """Old releases of transformers give wrong results in a pipeline, without an error."""

    class Block(nn.Linear):
        __module__ = "transformers.models.t5"

    model = L.LightningModule()
    model.blocks = nn.Sequential(Block(4, 4), Block(4, 4))
    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "4.0.0" if name == "transformers" else version(name)
    )
    config = PTDPConfig(pipeline_parallel_size=2)
    with pytest.raises(RequirementError, match=r"transformers 4\.0\.0 is installed"):
        check_model(model, config, ParallelLayout(world_size=2, pipeline_parallel_size=2))


@pytest.fixture
def old_torch(tmp_path):
    """Return an environment in which torch's metadata reports version 2.9.1."""
    info = tmp_path / "torch-2.9.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }


def run(code, environment):
    return processes.run([sys.executable, *code], env=environment)


def test_import_with_old_torch_is_refused(old_torch):
    done = run(["-c", "import lightning_ptdp"], old_torch)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "torch 2.9.1 is installed, but lightning-ptdp needs >=2.11,<3. Run: pip install 'torch>=2.11,<3'"
    )


def test_command_line_with_old_torch_prints_one_line(old_torch):
    done = run(["-m", "lightning_ptdp", "recipes", "list"], old_torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ptdp: torch 2.9.1 is installed, but")
    assert done.stderr.count("\n") == 1
    assert run(["-m", "lightning_ptdp", "--help"], old_torch).returncode == 0


def test_importing_old_torch_alone_works(old_torch):
    """The package's entry point runs during every ``import torch`` in the environment."""
    code = (
        "import torch, lightning_ptdp\ntry:\n    lightning_ptdp.PTDPStrategy\nexcept ImportError "
        "as error:\n    print(error)"
    )
    done = run(["-c", code], old_torch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch 2.9.1 is installed")
