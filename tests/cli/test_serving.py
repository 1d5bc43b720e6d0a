"""``ptdp generate``, ``ptdp chat`` and samples during training, with and without a layout."""

import json
import shutil
import signal
from queue import SimpleQueue

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_ptdp import PTDPStrategy, Sampling
from lightning_ptdp.callbacks import WriteSamples
from lightning_ptdp.cli import main
from lightning_ptdp.models import AdamWConfig, LitCausalLM
from lightning_ptdp.models.tiny import make_tiny

pytestmark = pytest.mark.thorough


GREEDY = ["--temperature", "0", "--max_new_tokens", "8"]
PROMPTS = ["def main(", "import"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a Hugging Face folder."""
    place = tmp_path_factory.mktemp("served") / "model"
    make_tiny(place, vocabulary_size=400, num_hidden_layers=2, seed=5)
    return place


@pytest.fixture
def said(capfd):
    """Run ``ptdp`` and return its exit code, stdout and stderr, child processes included."""

    def run(*arguments):
        capfd.readouterr()
        code = main(arguments)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def test_generated_text_equals_transformers(said, folder):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = model.generate(
        **tokenizer(PROMPTS[0], return_tensors="pt"), do_sample=False, max_new_tokens=8
    )[0]
    expected = tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    arguments = ["generate", "--checkpoint", str(folder), "--prompt", PROMPTS[0], *GREEDY]
    assert said(*arguments)[:2] == (0, expected)
    code, written, err = said(*arguments, "-t", "2", "-p", "2", "--start_method", "fork")
    assert (code, written) == (0, expected), err


def test_generate_loads_peft_adapter_and_refuses_invalid_one(said, folder, tmp_path):
    import peft
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    options = peft.LoraConfig(
        r=2,
        lora_alpha=64,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["norm"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, options).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_()
    ids = model.generate(
        **tokenizer(PROMPTS[0], return_tensors="pt"), do_sample=False, max_new_tokens=8
    )[0]
    model.save_pretrained(tmp_path / "adapter")
    arguments = [
        "generate",
        "--checkpoint",
        str(tmp_path / "adapter"),
        "--prompt",
        PROMPTS[0],
        *GREEDY,
    ]
    expected = tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    assert said("generate", "--checkpoint", str(folder), *arguments[3:])[1] != expected, (
        "the adapter does not change the text"
    )
    for layout in ([], ["-t", "2", "-p", "2", "--start_method", "fork"]):
        code, written, err = said(*arguments, *layout)
        assert (code, written) == (0, expected), err
    config = tmp_path / "adapter" / "adapter_config.json"
    given = json.loads(config.read_text())
    for change, words in [
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"peft_type": "IA3"}, "only LoRA"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' has changed the base model"),
        ({"r": "many"}, "r='many'"),
        ({"base_model_name_or_path": str(tmp_path / "nowhere")}, "nowhere"),
    ]:
        config.write_text(json.dumps({**given, **change}))
        code, _, err = said(*arguments)
        assert code == 2, err
        assert words in err.splitlines()[-1]


def test_truncated_prompt_is_reported(said, folder):
    code, _, err = said("generate", "--checkpoint", str(folder), "--prompt", "a " * 300, *GREEDY)
    assert code == 0
    assert "(the model accepts 256 tokens and ignores the first" in err
    assert "(256 tokens read, 8 generated" in err
    assert "indexing errors" not in err


def test_chat_answers_each_line_and_resets_on_new(said, folder, tmp_path, monkeypatch):
    file = tmp_path / "questions"
    file.write_text("hello\nand you\n/new\nhello\n")

    def chat(*options):
        with file.open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            code, answers, err = said(
                "chat", "--checkpoint", str(folder), "--system", "be short", *GREEDY, *options
            )
        assert code == 0, err
        assert err.count("tokens read") == 3
        return answers.splitlines()

    alone = chat()
    assert chat("-p", "2", "--start_method", "fork") == alone
    assert alone[0] == alone[-1], "/new did not reset the conversation"
    monkeypatch.setattr("sys.stdin", None)  # closed by the parent process
    assert said("chat", "--checkpoint", str(folder), *GREEDY)[:2] == (0, "")


def test_ctrl_c_ends_chat_after_current_answer():
    from lightning_ptdp.cli.serving import _stopper

    lines = SimpleQueue()
    lines.put("a question that is piped")
    stop = _stopper(lines)
    stop(signal.SIGINT, None)
    assert lines.get_nowait() is None
    stop(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        stop(signal.SIGINT, None)


class Rows(L.LightningDataModule):
    def train_dataloader(self):
        ids = torch.arange(4 * 9).view(4, 9)
        return DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in ids], batch_size=2)

    val_dataloader = train_dataloader


def test_samples_during_training_equal_text_from_checkpoint(said, folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join([*PROMPTS, "", ""]))
    trainer = L.Trainer(
        strategy=PTDPStrategy(tensor_parallel_size=2, start_method="fork"),
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        callbacks=[
            WriteSamples(
                str(file), Sampling(temperature=0.0, max_new_tokens=8), every_n_validations=2
            )
        ],
        logger=CSVLogger(tmp_path, "log", "1"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # At this learning rate six steps change the text for any initial weights.
    trainer.fit(
        LitCausalLM(str(folder), optimizer=AdamWConfig(learning_rate=0.05)), datamodule=Rows()
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "log" / "1" / "samples.jsonl").read_text().splitlines()
    ]
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (step, prompt) for step in (2, 6) for prompt in PROMPTS
    ]
    assert rows[0]["text"] != rows[2]["text"], "training did not change the text"
    latest = tmp_path / "log" / "1" / "checkpoints" / "latest"
    code, written, err = said(
        "generate", "--checkpoint", str(latest), "--prompt", PROMPTS[0], *GREEDY
    )
    assert (code, written) == (0, rows[2]["text"] + "\n"), err


def test_invalid_arguments_are_refused(said, folder, tmp_path):
    bert = tmp_path / "bert.ckpt"
    torch.save(
        {"state_dict": {"w": torch.zeros(1)}, "hyper_parameters": {"config": {}, "masking": {}}},
        bert,
    )
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    (plain / "chat_template.jinja").unlink()
    no_tokenizer = tmp_path / "no tokenizer"
    no_tokenizer.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, no_tokenizer)
    for arguments, words in [
        (
            ["generate", "--checkpoint", str(bert), "--tokenizer", str(folder)],
            "cannot generate text",
        ),
        (["generate", "--checkpoint", str(tmp_path / "nothing")], "does not exist"),
        (["chat", "--checkpoint", str(plain)], "has no chat template"),
        (
            ["generate", "--checkpoint", str(no_tokenizer)],
            "has no tokenizer: neither a tokenizer_config.json of Hugging Face",
        ),
        (["generate", "--checkpoint", str(folder), "-t", "3"], "tensor_parallel_size=3"),
        (["generate", "--checkpoint", str(folder), "--top_p", "2"], "top_p=2"),
        (
            ["generate", "--checkpoint", str(folder), "--accelerator", "gpu"],
            "--accelerator gpu: torch finds no GPU",
        ),
    ]:
        code, written, err = said(*arguments)
        assert (code, written) == (2, ""), err
        assert words in err.splitlines()[-1]
    with pytest.raises(ValueError, match=r"prompts=\[\] must be"):
        WriteSamples([])
