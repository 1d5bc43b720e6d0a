"""Training with fewer devices in the Trainer than processes started by a launcher."""

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_ptdp.strategy import PTDPStrategy
from tests.conformance.toys import LitNet, loader
from tests.parity import make_trainer

VARIABLES = (
    *(
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "MV2_COMM_WORLD_SIZE",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS",
        "SLURM_JOB_NAME",
    ),
    *(
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "SLURM_NNODES",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
    ),
)


class RayLike(LightningEnvironment):
    """Environment whose processes are started externally."""

    @property
    def creates_processes_externally(self):
        return True

    def world_size(self):
        return 2


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def trainer(*, devices="auto", plugin=None):
    return make_trainer(PTDPStrategy(), devices, plugins=plugin, max_steps=1)


@pytest.mark.parametrize("devices", ["auto", 2])
@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_mpirun_is_refused_with_working_command(monkeypatch, name, devices):
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        ValueError, match=f"{name}=2.*Trainer\\(devices=2.*torchrun --nproc-per-node 2 --no-python"
    ):
        trainer(devices=devices).fit(LitNet(), loader())


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"},
        {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
    ],
)
def test_launch_with_more_processes_than_devices_is_refused(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"each of the 2 processes.*with devices \* num_nodes = 2"):
        trainer().fit(LitNet(), loader())


def test_environment_with_larger_world_size_is_refused():
    with pytest.raises(ValueError, match=r"RayLike.world_size\(\)=2"):
        trainer(plugin=RayLike()).fit(LitNet(), loader())


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
        {
            "SLURM_NTASKS": "1",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
        # batch script or salloc shell without srun
        {
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
        },
        {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"},
    ],
)
def test_single_process_trains(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    one = trainer()
    one.fit(LitNet(), loader())
    assert one.global_step == 1


def test_validation_in_one_of_several_processes_is_accepted(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer(devices=1).validate(LitNet(), loader(), verbose=False)


def test_matching_number_of_processes_is_accepted(monkeypatch):
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "SLURM_STEP_NUM_TASKS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    strategy = trainer(devices=2).strategy
    strategy.check_processes()


@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1", "RANK": "5"}, (4, 2)),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "1"}, (1, 2)),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, (1, 1)),  # nothing joins its processes
    ],
)
def test_sizes_follow_launcher(monkeypatch, variables, sizes):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = L.Trainer(
        strategy=PTDPStrategy(start_method="fork"), accelerator="cpu", logger=False
    ).strategy
    assert (strategy.num_processes, strategy.num_nodes) == sizes
    assert strategy.config.start_method == ("fork" if sizes == (1, 1) else "popen")


@pytest.mark.parametrize(("visible", "processes"), [(1, 8), (8, 1)])
def test_only_visible_gpu_belongs_to_one_of_several_processes(monkeypatch, visible, processes):
    """With several GPUs, all processes of the node would use the first one."""
    strategy = trainer().strategy
    for name, value in {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(RayLike, "world_size", lambda _: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    strategy.cluster_environment, gpu = RayLike(), torch.device("cuda", 0)
    strategy.parallel_devices = [gpu]
    strategy.follow_launcher()
    assert strategy.parallel_devices == [gpu] * processes


def test_sizes_in_trainer_remain(monkeypatch):
    variables = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1", "RANK": "5"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = trainer(devices=2).strategy
    assert (strategy.num_processes, strategy.num_nodes) == (2, 1)


def test_one_process_per_node_needs_master_addr(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    strategy = L.Trainer(
        strategy=PTDPStrategy(), accelerator="cpu", devices=2, num_nodes=2, logger=False
    ).strategy
    with pytest.raises(ValueError, match="num_nodes=2, but MASTER_ADDR is not set"):
        strategy.check_processes()
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    strategy.check_processes()
