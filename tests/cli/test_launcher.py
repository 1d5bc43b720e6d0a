"""Launch scripts: their text, and a run of those for SLURM and torchrun."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_ptdp.checkpoint import read_metadata
from tests.processes import run

pytestmark = pytest.mark.thorough


STRATEGY = [
    "--trainer.strategy=lightning_ptdp.PTDPStrategy",
    "--trainer.strategy.pipeline_parallel_size=2",
]
SUBMITS = [("slurm", "sbatch"), ("kubernetes", "kubectl")]
# Fake srun forks two tasks with the variables of SLURM, so that they share the imports; fake scontrol
# prints the only host.
SRUN = f"""#!{sys.executable}
import os, runpy, sys
import lightning_ptdp.strategy.ptdp
for task in "01":
    if not os.fork():
        os.environ.update(SLURM_PROCID=task, SLURM_LOCALID=task)
        sys.argv = sys.argv[sys.argv.index("-m") + 1:]
        sys.exit(runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in "01"))
"""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\n"


def script(ptdp, *arguments):
    code, out, err = ptdp("fit", *arguments, "--dry-run")
    assert code == 0, err
    assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0
    return out


def words(text):
    """Return the words of the command that the script executes."""
    (command,) = [
        line for line in text.replace("\\\n", " ").splitlines() if line.startswith("exec ")
    ]
    return shlex.split(command)


def test_slurm_script_has_directives_and_command(ptdp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [
        "--nodes",
        "32",
        "--gpus-per-node",
        "8",
        "--partition",
        "a100",
        "--time=24:00:00",
        "--sbatch=--qos=high",
    ]
    text = script(
        ptdp,
        "--config",
        "gpt/ptdp-18.4b",
        "--launcher",
        "slurm",
        *options,
        "--data.source",
        "my text",
    )
    asked = [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")
    ]
    assert asked == [
        "--job-name=gpt-ptdp-18.4b",
        "--nodes=32",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=8",
        f"--chdir={tmp_path}",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--requeue",
        "--signal=SIGUSR1@120",
        "--partition=a100",
        "--time=24:00:00",
        "--qos=high",
    ]
    command = words(text)
    assert command[1] == "srun"
    assert command[command.index("fit") :] == [
        "fit",
        "--config",
        "gpt/ptdp-18.4b",
        "--data.source",
        "my text",
        "--trainer.num_nodes=32",
        "--trainer.devices=8",
        "--resume=auto",
    ]


def test_documented_script_equals_generated_script(ptdp):
    page = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
    (command,) = [
        line
        for line in page.splitlines()
        if "--launcher slurm" in line and line.startswith("ptdp fit --config")
    ]
    code, made, err = ptdp(*shlex.split(command)[1:])
    assert code == 0, err
    shown = page.partition('title="train.sbatch"\n')[2].partition("```")[0]
    assert shown == made.replace(sys.executable, "/shared/venv/bin/python").replace(
        str(Path.cwd()), "/shared/project"
    )


def test_torchrun_script_has_launch_options_and_resume(ptdp):
    one = words(script(ptdp, "--launcher=torchrun", "-c", "gpt/nano", "--ckpt_path", "x.ckpt"))
    assert one[1:5] == [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
    assert {"--nproc-per-node=4", "--standalone", "--max-restarts=3"} <= set(one)
    assert "--resume=auto" in one, "a restarted job would load the named checkpoint again"
    chosen = words(script(ptdp, "--launcher=torchrun", "-c", "gpt/nano", "--resume=auto"))
    assert chosen.count("--resume=auto") == 1
    many = script(ptdp, "--launcher=torchrun", "--config=gpt/nano", "--nodes=2", "--max-restarts=0")
    assert '--rdzv-endpoint="${MASTER_ADDR:?the first node}:${MASTER_PORT:-29500}"' in many
    assert "--nnodes=2" in many
    at = words(
        script(
            ptdp,
            "--launcher=torchrun",
            "--config=gpt/nano",
            "--nodes=2",
            "--rdzv-endpoint=node0:1234",
        )
    )
    assert "--rdzv-endpoint=node0:1234" in at
    assert not [word for word in many.split() if word.startswith("--trainer.")], (
        "an elastic job would wait for nodes that are gone"
    )


def test_kubernetes_job_fits_schema_of_kubeflow(ptdp):
    options = ["--launcher=kubernetes", "--nodes=2", "--gpus-per-node=8", "--image=our/image:1"]
    code, out, err = ptdp(
        "fit", "--config=gpt/124m", "--data.source", "my text", *options, "--dry-run"
    )
    assert code == 0, err
    made = yaml.safe_load(out)
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    job = TrainerV1alpha1TrainJob.from_dict(made)
    assert job is not None and job.to_dict() == made, "a field is unknown"
    assert (job.metadata.name, job.spec.runtime_ref.name) == ("gpt-124m", "torch-distributed")
    trainer = job.spec.trainer
    assert (trainer.image, trainer.num_nodes, trainer.num_proc_per_node) == ("our/image:1", 2, 8)
    assert trainer.command == [
        *("torchrun", "-m", "lightning_ptdp", "fit", "--config=gpt/124m"),
        *("--data.source", "my text", "--resume=auto"),
    ]


def test_kubernetes_job_on_cpus_has_valid_name(ptdp):
    options = ["--launcher=kubernetes", "--trainer.accelerator=cpu", "--job-name=My job_1!"]
    code, out, err = ptdp("fit", "--config=gpt/nano", *options, "--dry-run")
    assert code == 0, err
    made = yaml.safe_load(out)
    assert made["metadata"] == {"name": "my-job-1"}
    assert made["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"cpu": 4}}


def test_skypilot_task_runs_torchrun_on_every_node(ptdp, tmp_path):
    """The schema of SkyPilot is not checked, because its package needs older versions of others."""
    options = ["--launcher=skypilot", "--nodes=2", "--gpus-per-node=8", "--gpu-type=A100"]
    code, out, err = ptdp(
        "fit", "--config=gpt/124m", "--data.source", "my text", *options, "--dry-run"
    )
    assert code == 0, err
    task = yaml.safe_load(out)
    assert (task["name"], task["num_nodes"]) == ("gpt-124m", 2)
    assert task["resources"] == {"accelerators": {"A100": 8}}
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "a\nb"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", task["run"]], env={"PATH": path, **node}, capture_output=True, text=True
    )
    assert ran.stdout.splitlines() == [
        *("--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=a"),
        *("--master-port=29500", "-m", "lightning_ptdp", "fit", "--config=gpt/124m"),
        *("--data.source", "my text", "--resume=auto"),
    ]


def test_script_uses_trainer_sizes_and_keeps_other_strategy(ptdp):
    text = script(
        ptdp,
        "--launcher=slurm",
        "--config=gpt/124m",
        "--trainer.devices=2",
        "--trainer.num_nodes",
        "3",
    )
    assert "--nodes=3" in text
    assert "--ntasks-per-node=2" in text
    text = script(
        ptdp,
        "--launcher=slurm",
        "--config=gpt/124m",
        "--trainer.strategy=ddp",
        "--trainer.accelerator=cpu",
    )
    assert "start_method" not in text
    assert "resume" not in text
    assert "gpus" not in text


def test_script_uses_all_configurations(ptdp, tmp_path):
    changes = tmp_path / "changes.yaml"
    changes.write_text("trainer: {max_steps: 3, num_nodes: 2}")
    text = script(ptdp, "--launcher=torchrun", "--config=gpt/nano", "-c", str(changes))
    assert "--nnodes=2 --nproc-per-node=4" in text
    assert "OMP_NUM_THREADS:-1}" in text
    assert words(text)[-1] == "--resume=auto"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--config=gpt/nano", "--trainer.strategy.tensor_parallel_size={a: ["],
            "is not YAML",
        ),
        (["--config=gpt/nano", "--gpus-per-node=3"], "world_size=3 is not divisible"),
        (
            ["--config=gpt/nano", "--trainer.strategy.tensor_parallel_size=8"],
            "world_size=4 is not divisible",
        ),
        (
            ["--config=gpt/nano", "--trainer.devices=auto"],
            "trainer.devices='auto' is not a number of processes",
        ),
        (
            ["--config=gpt/nano", "--nodes=4", "--trainer.num_nodes=2"],
            "--nodes 4 and --trainer.num_nodes 2 contradict",
        ),
        (["--config=gpt/nani"], "did you mean 'gpt/nano'?"),
        (
            ["--config=gpt/nano", "--image=our/image:1"],
            "--image is an option of --launcher kubernetes and skypilot. Leave it out with",
        ),
        (["--config=gpt/nano", "--sbatch=--qos=high"], "--sbatch is an option of --launcher slurm"),
        (
            ["--config=gpt/nano", "--launcher=kubernetes", "--max-restarts=1"],
            "--max-restarts is an option of --launcher torchrun",
        ),
        (
            ["--config=gpt/nano", "--launcher=kubernetes", "--job-name=?!"],
            "job-name='?!' needs a letter or a digit",
        ),
        (["--config=gpt/124m", "--launcher=skypilot", "--dry-run"], "Add --gpu-type, such as A100"),
        (["--config=gpt/nano", "--launcher=skypilot"], "Add --output FILE, then: sky launch FILE"),
        ([], "Use --config"),
    ],
)
def test_invalid_launch_options_are_refused(ptdp, arguments, said):
    code, _, err = ptdp("fit", "--launcher=torchrun", *arguments)
    assert (code, said in err) == (2, True), err


@pytest.mark.parametrize(("launcher", "program"), SUBMITS)
def test_missing_program_is_reported(launcher, program, ptdp, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = ptdp("fit", f"--launcher={launcher}", "--config=gpt/nano")
    assert (code, f"there is no {program}" in err) == (2, True)


@pytest.mark.parametrize(("launcher", "program"), SUBMITS)
def test_script_is_submitted(launcher, program, ptdp, monkeypatch, tmp_path):
    install(tmp_path, program, f"#!/bin/bash\ncat > {tmp_path}/submitted\nexit 3\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = ["fit", f"--launcher={launcher}", "--config=gpt/nano"]
    assert ptdp(*command)[0] == 3
    assert (tmp_path / "submitted").read_text() == ptdp(*command, "--dry-run")[1]


def install(folder, name, text):
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def steps(folder):
    found = {path.resolve() for path in folder.glob("runs/tiny/*/checkpoints/latest")}
    return sorted(read_metadata(path).run["global_step"] for path in found)


@pytest.mark.timeout(400)
def test_slurm_job_resumes_torchrun_run(ptdp, config, tmp_path, monkeypatch):
    install(tmp_path, "srun", SRUN)
    install(tmp_path, "scontrol", SCONTROL)
    package = Path(__file__).resolve().parents[2]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in names and not key.startswith("SLURM")
    }
    clean |= {
        "PATH": f"{tmp_path}:{clean['PATH']}",
        "PYTHONPATH": f"{clean['PYTHONPATH']}:{package}",
    }
    monkeypatch.chdir(tmp_path)
    common = ["fit", "--config", config, *STRATEGY, "--sample=null"]

    alone = ["--gpus-per-node=1", "--trainer.strategy.pipeline_parallel_size=1"]
    assert (
        ptdp(*common, *alone, "--launcher=torchrun", "--output=train.sh", "--trainer.max_steps=2")[
            0
        ]
        == 0
    )
    done = run(["./train.sh"], env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(tmp_path) == [2]

    assert (
        ptdp(
            *common,
            "--gpus-per-node=2",
            "--launcher=slurm",
            "--output=train.sbatch",
            "--trainer.max_steps=3",
        )[0]
        == 0
    )
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
    }
    done = run(["./train.sbatch"], env=clean | slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps(tmp_path) == [3], "the second job did not resume the run of the first"
