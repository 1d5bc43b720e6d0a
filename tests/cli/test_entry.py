"""Verbs, help, recipes and their error messages."""

import ast
import errno
import inspect
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch import Trainer
from torch.multiprocessing import ProcessExitedException

import lightning_ptdp
from lightning_ptdp import PTDPError
from lightning_ptdp.base.option_types import nearest
from lightning_ptdp.cli import config_files, failures, recipe_folder
from lightning_ptdp.cli.config_errors import readable
from lightning_ptdp.cli.config_files import resolve_config, resolve_configs
from lightning_ptdp.cli.failures import (
    Terminated,
    UserError,
    ending_workers,
    explain,
    terminate_on_sigterm,
    users_line,
    worker_failure,
)
from lightning_ptdp.cli.short_help import options_in_source
from lightning_ptdp.config import PTDPConfig
from lightning_ptdp.data import StreamDataModule, TextDataModule
from lightning_ptdp.data.stream_datamodule import BatchOptions
from lightning_ptdp.models import AdamWConfig, BertConfig, GPTConfig, LitBert

pytestmark = pytest.mark.thorough


VERBS = [
    "fit",
    "validate",
    "test",
    "predict",
    "prepare",
    "generate",
    "chat",
    "convert",
    "ckpt",
    "recipes",
    "plan",
    "timeline",
    "verify",
    "bench",
    "doctor",
    "completion",
]


def test_help_and_typos_do_not_import_torch():
    code = """
import sys
from lightning_ptdp.cli import main
assert main(["--help"]) == 0 and main([]) == 0 and main(["--version"]) == 0 and main(["recipes", "list"]) == 0
from lightning_ptdp.cli.entry import VERBS
for verb in VERBS:
    assert main([verb, "--help"]) == 0
assert main(["fit", "--launcher", "slurm", "--config", "gpt/124m", "--dry-run"]) == 0
assert main(["docter"]) == 2 and main(["fti"]) == 2 and main(["fit", "--config", "gpt/nanoo"]) == 2 and main(["recipes", "--help"]) == 0
assert "torch" not in sys.modules and "lightning" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    for verb in VERBS:
        assert f"\n  {verb} " in result.stdout
    assert "did you mean 'fit'?" in result.stderr
    assert "did you mean 'doctor'?" in result.stderr
    assert "did you mean 'gpt/nano'?" in result.stderr


def test_light_commands_skip_unneeded_imports(ptdp, tmp_path):
    code = f"""
import sys
import torch
from lightning_ptdp.cli import main
def imported(*names):
    return [name for name in names if name in sys.modules]
assert main(["plan", "--recipe", "gpt/nano", "--world", "2", "--device", "cpu", "--top", "1"]) == 0
torch.save({{"weight": torch.ones(2)}}, "{tmp_path}/x.pt")
assert main(["convert", "{tmp_path}/x.pt", "{tmp_path}/checkpoint"]) == 0
found = imported("lightning.pytorch", "torchmetrics", "transformers")
assert not found, found
print("resolved:")
assert main(["recipes", "show", "gpt/nano", "--resolved"]) == 0
print(imported("mlflow", "transformers", "torchvision", "scipy", "matplotlib", "litdata"))
"""
    # as a user runs it, without tests/starts on the path
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    shown = done.stdout.partition("resolved:\n")[2]
    told, _, imported = shown.rstrip().rpartition("\n")
    assert imported == "[]", done.stderr
    assert ptdp("recipes", "show", "gpt/nano", "--resolved")[1].rstrip() == told
    assert yaml.safe_load(told)["model"]["init_args"]["optimizer"]["betas"] == [0.9, 0.95]


def test_help_of_fit_is_complete(ptdp):
    _, out, _ = ptdp("fit", "--help", "all")
    for key in (
        "--config",
        "--print_config",
        "--trainer.max_steps",
        "--trainer.strategy",
        "--model",
        "--data",
        "--ckpt_path",
        "--throughput.window",
        "--sample",
        "--seed_everything",
    ):
        assert key in out


def test_short_help_matches_class_signatures(ptdp):
    read = options_in_source("PTDPConfig")
    defaults = {name: one.default for name, one in inspect.signature(PTDPConfig).parameters.items()}
    assert {name: ast.literal_eval(one.default) for name, one in read.items()} == defaults
    assert all(one.text for one in read.values())
    shown = ptdp("fit", "-h")[1]
    parts = {
        part.partition(".NAME")[0]: set(re.findall(r"^  (\w[\w.]*)", part, re.MULTILINE))
        for part in shown.split("\n\n")
    }
    assert parts["--trainer.strategy"] == {*defaults}
    for part, prefix, kinds in (
        ("--trainer", "", (Trainer,)),
        ("--model", "config.", (GPTConfig,)),
        ("--model", "optimizer.", (AdamWConfig,)),
        ("--data", "", (TextDataModule, StreamDataModule, BatchOptions)),
    ):
        known = {name for kind in kinds for name in inspect.signature(kind).parameters}
        names = {name.removeprefix(prefix) for name in parts[part] if name.startswith(prefix)}
        assert len(names) > 3
        assert names <= known
    shown = ptdp("fit", "--config", "hf/lora", "--help")[1]
    for key in ("path", "adapter", "adapter.target_modules", "packing", "learn"):
        assert re.search(rf"^  {key} +\S", shown, re.MULTILINE), key
    assert "num_layers" not in shown
    for model in ("LitMaskedLM", "LitImageTextToText"):
        assert all(option.text for option in options_in_source(model).values()), model
    assert "--model.help LitBert" in ptdp("fit", "--config=bert/nano", "-h")[1]
    said = ptdp("generate", "--help")[1]
    assert "--prompt PROMPT       Text to continue." in said
    assert "short form -t" in " ".join(said.split())


def test_debug_shows_traceback(ptdp):
    assert "Traceback" not in ptdp("nothing")[2]
    code, _, err = ptdp("nothing", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_recipes_are_listed_and_shown(ptdp):
    code, out, _ = ptdp("recipes", "list")
    assert code == 0
    assert "gpt/nano" in out
    assert (
        ptdp("recipes", "show", "gpt/nano")[1]
        == (recipe_folder() / "gpt" / "nano.yaml").read_text()
    )


@pytest.mark.parametrize("name", ["gpt/nano", "gpt/nano.yaml", "recipes/gpt/nano.yaml"])
@pytest.mark.parametrize("form", [["--config", "{}"], ["-c", "{}"], ["--config={}"]])
def test_recipe_is_found_by_name_from_any_folder(tmp_path, monkeypatch, name, form):
    monkeypatch.chdir(tmp_path)
    given = [part.format(name) for part in form]
    merged = resolve_config(recipe_folder() / "gpt" / "nano.yaml")
    assert resolve_configs([*given, "--trainer.max_steps", "2"]) == [
        f"--config={merged.text}",
        "--trainer.max_steps",
        "2",
    ]


def test_file_takes_precedence_over_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "nano").write_text("")
    assert config_files.find_config("gpt/nano") == Path("gpt/nano")


def test_installed_package_contains_recipes(tmp_path, monkeypatch):
    module = tmp_path / "lightning_ptdp" / "cli" / "config_files.py"
    monkeypatch.setattr(config_files, "__file__", str(module))
    with pytest.raises(FileNotFoundError, match="Install lightning-ptdp again"):
        config_files.recipe_folder()
    for folder in (tmp_path / "recipes", tmp_path / "lightning_ptdp" / "recipes"):
        folder.mkdir(parents=True)
        assert config_files.recipe_folder() == folder


def test_nearest_name_is_suggested():
    assert nearest("hiden_size", ["hidden_size", "num_heads"]) == "; did you mean 'hidden_size'?"
    assert nearest("zzz", ["hidden_size"]) == ""


def test_jsonargparse_error_becomes_one_line():
    message = (
        'Parser key "model":\n  Does not validate against any of the Union subtypes\n  Errors:\n'
    )
    own = (
        message
        + "    - Problem with given class_path 'lightning_ptdp.models.LitGPT':\n        Group 'config' does not accept option 'x'"
    )
    assert readable(own, []).startswith(
        "there is no key 'model.config.x' (lightning_ptdp.models.LitGPT has no 'config.x'"
    )
    assert readable(
        "Parser key \"trainer.max_steps\":\n  Expected a <class 'int'>. Got value: abc", []
    ) == ("trainer.max_steps: Expected int. Got value: abc")
    choices = (
        'Parser key "resume":\n  Does not validate\n  Errors:\n    - Expected a '
        "typing.Literal['a', 'b']\n    - Expected a "
    )
    assert readable(
        choices + "<class 'NoneType'>\n  Given value type: <class 'str'>\n  Given value: c", []
    ) == ("resume: Expected 'a' or 'b' or null. Got value: c")
    assert readable("something else", []) == "something else"
    of_a_field = (
        "Does not validate against any of the Union subtypes\nErrors:\n  - Does not validate "
        "against any of the Union subtypes\n"
        "    Errors:\n      - r=0 must be a positive integer\n      - Expected a <class "
        "'NoneType'>\n  - Expected a <class 'NoneType'>"
    )
    absent = own.replace("Group 'config' does not accept option 'x'", "No module named 'peft'")
    assert readable(absent, []).startswith("peft is not installed. lightning-ptdp needs >=")
    assert readable(of_a_field, []) == "r=0 must be a positive integer"


class ProcessRaisedException(Exception):
    """Replacement for torch's exception that needs no process."""

    def __init__(self, msg: str) -> None:
        self.msg = msg


TRACE = (
    "\n\n-- Process 2 terminated with the following error:\nTraceback (most recent call last):\n  "
    "File x\n"
)


@pytest.mark.parametrize(
    ("error", "fixable"),
    [
        *(
            (f"lightning_ptdp.{name}", True)
            for name in ("data.data_error.DataError", "schedule.actions.ScheduleError")
        ),
        *(
            (f"lightning_ptdp.{name}", True)
            for name in (
                "expert_parallel.dispatch.ExpertError",
                "keyed_dropout.keyed.KeyedDropoutError",
            )
        ),
        ("FileNotFoundError", True),
        ("lightning.fabric.utilities.exceptions.MisconfigurationException", True),
        ("lightning_ptdp.pipeline.p2p.PeerError", False),
        ("lightning_ptdp.nowhere.Absent", False),
        ("nowhere.Absent", False),
        ("KeyError", False),
    ],
)
def test_worker_errors_are_classified_by_type(error, fixable):
    failure = worker_failure(ProcessRaisedException(f"{TRACE}{error}: so it is\nlayer: 3\n"))
    assert failure.fixable == fixable
    if fixable:
        assert failure.message == "so it is\nlayer: 3"


def test_every_error_derives_from_ptdp_error():
    for module in pkgutil.walk_packages(lightning_ptdp.__path__, "lightning_ptdp."):
        if module.name.endswith("__main__"):
            continue
        for name, value in vars(import_module(module.name)).items():
            if (
                isinstance(value, type)
                and issubclass(value, Exception)
                and value.__module__ == module.name
                and name[0] != "_"
            ):
                assert issubclass(value, PTDPError), f"{module.name}.{name}"


def test_worker_failure_reports_message_or_process():
    trace = TRACE
    ours = ProcessRaisedException(
        trace + "lightning_ptdp.checkpoint.save_agreement.CheckpointError: no 'a'\nin here\n"
    )
    failure = worker_failure(ours)
    assert (failure.message, failure.fixable) == ("no 'a'\nin here", True)
    other = worker_failure(ProcessRaisedException(trace + "ZeroDivisionError: division by zero\n"))
    assert not other.fixable
    assert "Process 2" in other.message
    assert worker_failure(RuntimeError("x")) is None


def test_sigterm_does_not_wait_for_ranks_that_wait_for_this_one(monkeypatch):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        launcher = SimpleNamespace(procs=[process])
        trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))
        # Without limits, the test would not end if the process were waited for before its signal.
        for limit in ("_PATIENCE_S", "_SAVING_S"):
            monkeypatch.setattr(failures, limit, None)
        with pytest.raises(Terminated), ending_workers(trainer):
            raise Terminated


def test_message_names_the_users_line():
    own = '  File "/home/me/lit.py", line 31, in training_step\n'
    library = f'  File "{json.__file__}", line 7, in loads\n'
    compiled = '  File "yaml/_yaml.pyx", line 506, in yaml._yaml.CParser._parse\n'
    place = " (/home/me/lit.py:31, in training_step; --debug shows the traceback)"
    assert users_line(own + library + compiled) == place
    assert not users_line(library + compiled)
    failure = worker_failure(ProcessRaisedException(f"{TRACE}{own}{library}ValueError: bad\n"))
    assert failure.message == f"bad{place}"


def test_killed_worker_is_reported():
    failure = worker_failure(
        ProcessExitedException("process 3 terminated with signal SIGKILL", 3, 99, -9, "SIGKILL")
    )
    assert not failure.fixable
    for words in ("process 3", "SIGKILL", "memory", "--resume auto"):
        assert words in failure.message


def test_output_with_an_encoding_that_lacks_characters():
    done = subprocess.run(
        [sys.executable, "-m", "lightning_ptdp", "recipes", "show", "common"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "checkpoint as last.ckpt ?" in done.stdout


def test_full_disk_is_explained_in_one_sentence():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.ckpt")
    failure = worker_failure(ProcessRaisedException(f"{TRACE}OSError: {full}\n"))
    message = f"{full}. Free space, or write to another disk"
    assert (failure.message, failure.fixable, explain(full)) == (message, True, message)
    assert explain(OSError(errno.EIO, os.strerror(errno.EIO))) is None


def test_only_user_errors_are_explained():
    assert explain(UserError("so")) == "so"
    assert explain(FileNotFoundError("gone")) == "gone"
    assert explain(RuntimeError("broken")) is None
    said = explain(ModuleNotFoundError("No module named 'transformers'", name="transformers"))
    assert said.startswith("transformers is not installed. lightning-ptdp needs >=")
    assert explain(ModuleNotFoundError("No module named 'mine'", name="mine")) is None


def test_bert_recipe_is_resolved(ptdp):
    resolved = yaml.safe_load(ptdp("recipes", "show", "bert/nano", "--resolved")[1])
    model, data = resolved["model"]["init_args"], resolved["data"]["init_args"]
    assert (
        LitBert(
            **{**model, "config": BertConfig(**model["config"]), "optimizer": AdamWConfig()}
        ).num_parameters
        == 965_378
    )
    assert (data["pairs"], data["sequence_length"], data["seed"]) == (
        "swap",
        model["config"]["sequence_length"],
        0,
    )
    assert resolved["sample"] is None


def test_forked_process_with_a_handler_of_its_own_survives_sigterm():
    """Lightning's handler also calls the handler that it replaces."""
    with terminate_on_sigterm():
        child = os.fork()
        if child == 0:
            inherited = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *arguments: inherited(*arguments))
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_forked_process_ends_at_once_by_sigterm():
    """A rank that is forked has the handler of the command line until it sets its own."""
    with terminate_on_sigterm():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
