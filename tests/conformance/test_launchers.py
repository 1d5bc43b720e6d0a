"""Behaviours 19, 21, 23 and 24: starting and ending processes (fork is in test_names.py)."""

import contextlib
import os
import signal
import socket

import pytest
import torch

from tests.conformance.launched import results, started, started_afresh, trained_alone
from tests.processes import listening

pytestmark = pytest.mark.thorough

UNUSED = {
    "accelerate",
    "datasets",
    "jsonargparse",
    "litdata",
    "matplotlib",
    "mlflow",
    "onnx",
    "pandas",
    "peft",
    "scipy",
    "sentencepiece",
    "sklearn",
    "torchao",
    "torchvision",
    "transformers",
    "wandb",
}
"""Libraries that a rank imports only if it logs, exports or reads data with them."""

P2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(folder, settings, prefix=(), **env):
    with started_afresh(folder, settings, prefix, **env) as script:
        assert script.finish() == 0, script.output
    return results(folder)


def assert_trained(ranks, environment, world_size=2):
    assert [r["rank"] for r in ranks] == list(range(world_size))
    for result in ranks:
        assert (result["world_size"], result["steps"]) == (2, 6)
        assert result["strategy"] == "PTDPStrategy"
        assert result["environment"] == environment


def test_popen_by_name_without_importing_package(tmp_path):
    ranks = run(tmp_path, {"strategy": "ptdp"})
    assert_trained(ranks, "LightningEnvironment")
    assert ranks[0]["weights"] == ranks[1]["weights"]
    for rank in ranks:
        assert not UNUSED.intersection(rank["libraries"]), (
            "a rank imports libraries that it does not use"
        )


def test_torchrun_with_pytorch_lightning_namespace(tmp_path):
    prefix = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    ranks = run(tmp_path, {"namespace": "pytorch_lightning", "layout": P2}, prefix)
    assert_trained(ranks, "TorchElasticEnvironment")
    assert ranks[0]["parameters"] != ranks[1]["parameters"], (
        "both ranks hold the same number of parameters"
    )


def test_slurm_launch_without_torch_backend_autoload(tmp_path):
    settings = {"strategy": "ptdp", "import_package": True}
    common = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NNODES": "1",
        "MASTER_PORT": free_port(),
    }
    with contextlib.ExitStack() as stack:
        tasks = [  # one of them imports torch while the variable is set
            stack.enter_context(
                start(tmp_path, settings, **common, SLURM_PROCID=str(i), SLURM_LOCALID=str(i))
            )
            for i, start in enumerate((started_afresh, started))
        ]
        codes = [task.finish() for task in tasks]
        assert codes == [0, 0], [task.output for task in tasks]
    assert_trained(results(tmp_path), "SLURMEnvironment")


def flat_net():
    """Build the model of ``script.py``."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    )


def even_net():
    """Build the model that ``script.py`` builds in ``configure_model``."""
    net = flat_net()
    for parameter in net.parameters():
        parameter.data.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
    return net


@pytest.mark.parametrize(
    ("start_method", "configure_model", "then"),
    [("spawn", False, None), ("forkserver", False, "test"), ("forkserver", True, "validate")],
)
def test_parent_process_gets_whole_model_from_spawned_ranks(
    start_method, configure_model, then, tmp_path
):
    settings = {
        "layout": {**P2, "start_method": start_method},
        "configure_model": configure_model,
        "evaluate": then,
    }
    with started(tmp_path, settings) as script:
        assert script.finish() == 0, script.output
    (result,) = results(tmp_path)
    assert result["parameters"] == 8 * 9 * 2 + 9, "the parent's module is incomplete"
    net = flat_net()
    alone = trained_alone(even_net if configure_model else flat_net)
    for name, value in alone.items():
        torch.testing.assert_close(
            torch.tensor(result["weights"][name]), value, rtol=1e-5, atol=1e-6
        )
        net.get_parameter(name.removeprefix("net.")).data.copy_(value)
    if then is None:  # an evaluation would spawn two further interpreters
        return
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    loss = net(x).sub(x.sum(-1, keepdim=True)).square().mean().item()
    assert result["evaluated"] == pytest.approx(loss, rel=1e-5), (
        "the next call of the same Trainer uses another model"
    )


def wait_until_running(folder, script):
    script.wait_until(
        lambda: len(list(folder.glob("running-*"))) == 2, "both ranks made three steps"
    )


def test_single_machine_listens_on_loopback_only(tmp_path):
    with started(tmp_path, {"layout": {**P2, "start_method": "fork"}, "max_steps": -1}) as script:
        wait_until_running(tmp_path, script)
        found = listening([process.pid for process in script.alive])
    assert len(found) >= 3  # the store's socket and gloo's of each rank
    assert all(address.startswith("127.") for address in found), found


def test_exception_in_first_process_ends_all_and_is_shown(tmp_path):
    with started(tmp_path, {"layout": P2, "fail_on_ranks": [0], "max_steps": -1}) as script:
        assert script.finish() != 0
    assert "ZeroDivisionError: the user's own mistake" in script.output
    assert "in training_step" in script.output


def test_ctrl_c_ends_all_processes(tmp_path):
    with started(tmp_path, {"layout": {**P2, "start_method": "fork"}, "max_steps": -1}) as script:
        wait_until_running(tmp_path, script)
        # a terminal signals the whole process group
        os.killpg(script.process.pid, signal.SIGINT)
        assert script.finish(40) != 0


def test_sigterm_to_first_process_ends_all(tmp_path):
    with started(tmp_path, {"layout": P2, "max_steps": -1}) as script:
        wait_until_running(tmp_path, script)
        script.process.send_signal(signal.SIGTERM)
        script.finish(40)


@pytest.mark.parametrize(
    ("ranks", "start_method"), [([0], "popen"), ([1], "fork"), ([0, 1], "fork")], ids=str
)
def test_sigterm_ends_all_stages_at_same_step(tmp_path, ranks, start_method):
    settings = {
        "layout": {**P2, "start_method": start_method},
        "max_steps": -1,
        "terminate_ranks": ranks,
    }
    with started(tmp_path, settings) as script:
        script.finish()
    assert [(tmp_path / f"step-{rank}").read_text() for rank in range(2)] == ["4", "4"], (
        script.output
    )
    assert not results(tmp_path), "fit returned as if training had completed"


def test_sigterm_before_training_leaves_no_process(tmp_path):
    with started(tmp_path, {"layout": P2, "terminate_at_start": True}) as script:
        assert script.finish() == -signal.SIGTERM
    assert not list(tmp_path.glob("*-*"))
