"""``ptdp evaluate``: results in a layout equal those of the harness with the exported folder."""

import json

import lightning.pytorch as pl
import pytest
import torch

from lightning_ptdp.cli import main, serving
from lightning_ptdp.exchange import convert
from lightning_ptdp.models import GPTConfig, LitGPT
from lightning_ptdp.models.tiny import make_tiny

pytestmark = pytest.mark.thorough


TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list: [{metric: bits_per_byte}]
""",
    "writing": """
output_type: generate_until
doc_to_text: '{{question}}'
doc_to_target: ' x'
generation_kwargs: {until: ["in"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return a folder with tasks of each kind of request, on local data."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": "class Point:\n" * (number % 3) + f"    def f{number}(self, x):\n  ",
            "choices": [" return x", " None", f" x = {number}", ""],
            "answer": number % 3,
            # more than one window of the longest sequence
            "text": f"for i in range({number}):\n    print(i)\n" * (4 * number + 1),
        }
        for number in range(6)
    ]
    for row in rows:
        row["choices"] = row["choices"][:3]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}test_split: test\n{text}")
    return folder


@pytest.fixture
def said(capfd, monkeypatch):
    """Run ``ptdp evaluate`` and return its exit code, stdout and stderr."""
    from lm_eval.tasks import TaskManager

    def known(include_path=None, include_defaults=True):
        return TaskManager(include_path=include_path, include_defaults=False)

    # The index of the harness's own tasks takes 20 s.
    monkeypatch.setattr("lightning_ptdp.cli.harness.TaskManager", known)

    def run(*arguments):
        capfd.readouterr()
        code = main(["evaluate", *arguments])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def make_llama(folder, _):
    make_tiny(folder / "llama", vocabulary_size=400, num_hidden_layers=2, seed=5)
    return folder / "llama", folder / "llama"


def make_gpt(folder, prepared):
    """Return a checkpoint with the tokenizer of prepared data, and its export."""
    torch.manual_seed(7)
    config = GPTConfig(
        vocabulary_size=320, sequence_length=96, num_layers=2, hidden_size=32, num_heads=2
    )
    module = LitGPT(config)
    module.configure_model()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state = {
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "datamodule_hyper_parameters": {"data_dir": str(prepared)},
        "pytorch-lightning_version": pl.__version__,
    }
    torch.save(state, folder / "gpt.ckpt")
    convert(folder / "gpt.ckpt", folder / "exported", to="huggingface")
    return folder / "gpt.ckpt", folder / "exported"


@pytest.mark.parametrize("make", [make_llama, make_gpt])
def test_results_equal_harness_on_exported_folder(said, tasks, tmp_path, prepared, make):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    checkpoint, exported = make(tmp_path, prepared)
    theirs = simple_evaluate(
        "hf",
        model_args=f"pretrained={exported},dtype=float32",
        tasks=[*TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=4,
        num_fewshot=1,
        device="cpu",
    )
    assert theirs is not None
    output = tmp_path / "results.json"
    arguments = ["--checkpoint", str(checkpoint), "--tasks", ",".join(TASKS)]
    arguments += ["--include_path", str(tasks), "--num_fewshot", "1", "--log_samples", "true"]
    layout = ["-t", "2", "-p", "2", "--start_method", "fork", "--batch_size", "5"]
    code, out, err = said(*arguments, *layout, "--output", str(output))
    assert code == 0, err
    ours = json.loads(output.read_text())
    assert ours["config"]["model_args"] == {
        "checkpoint": str(checkpoint),
        "layout": "t2 p2 d1",
    }
    for name in TASKS:
        assert ours["results"][name].keys() == theirs["results"][name].keys()
        for metric, value in theirs["results"][name].items():
            assert ours["results"][name][metric] == (
                value if isinstance(value, str) else pytest.approx(value, rel=1e-6)
            )
        assert f"|{name}" in out
        for own, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert own["prompt_hash"] == other["prompt_hash"]
            answers = zip(leaves(own["resps"]), leaves(other["resps"]), strict=True)
            for answer, expected in answers:
                if not isinstance(answer, str):
                    expected = pytest.approx(expected, rel=1e-6, abs=1e-4)
                assert answer == expected
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["choice"][metric] == theirs["results"]["choice"][metric]
    assert len({tuple(leaves(row["resps"])) for row in ours["samples"]["writing"]}) > 1


def leaves(values):
    if isinstance(values, list | tuple):
        for value in values:
            yield from leaves(value)
    else:
        yield values


def test_impossible_task_is_refused_before_launch(said, tasks, tmp_path, prepared, monkeypatch):
    checkpoint, _ = make_llama(tmp_path, prepared)

    def launched(*_, **__):
        raise AssertionError("a run was started")

    monkeypatch.setattr(serving, "serve", launched)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    remote = tmp_path / "remote"
    remote.mkdir()
    (remote / "remote.yaml").write_text(
        f"task: remote\ndataset_path: nobody/nothing\ntest_split: test\n{TASKS['choice']}"
    )
    beams = (tasks / "writing.yaml").read_text().replace("{until", "{num_beams: 2, until")
    (remote / "beams.yaml").write_text(beams.replace("task: writing", "task: beams"))
    for words, arguments in [
        ("no such task; did you mean 'choice'", ["choise", "--include_path", str(tasks)]),
        ("cannot load its data", ["remote", "--include_path", str(remote)]),
        ("generates with num_beams", ["beams", "--include_path", str(remote)]),
        ("nowhere is not a folder", ["choice", "--include_path", "nowhere"]),
        ("limit=0 must be greater", ["choice", "--limit", "0"]),
        (f"{tasks} is a folder. Give a file", ["choice", "--output", str(tasks)]),
    ]:
        code, out, err = said("--checkpoint", str(checkpoint), "--tasks", *arguments)
        assert (code, out) == (2, ""), err
        assert words in err
        assert len(err.splitlines()) == 1, err


def test_failure_of_harness_ends_all_ranks(said, tasks, tmp_path, prepared):
    checkpoint, _ = make_llama(tmp_path, prepared)
    (tmp_path / "long.yaml").write_text(
        (tasks / "writing.yaml")
        .read_text()
        .replace("task: writing", "task: long")
        .replace("max_gen_toks: 12", "max_gen_toks: 256")
    )
    arguments = ["--checkpoint", str(checkpoint), "--tasks", "long"]
    arguments += ["--include_path", str(tmp_path), "-p", "2", "--start_method", "fork"]
    code, out, err = said(*arguments)
    assert (code, out) == (2, ""), err
    assert "requested max tokens to generate (256) must be less than" in err.splitlines()[-1]
