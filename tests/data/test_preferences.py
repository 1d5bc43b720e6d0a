"""Pairs of answers: forms of rows, learned tokens, batches and refused rows."""

import math
from types import SimpleNamespace

import pytest

from lightning_ptdp import ParallelLayout
from lightning_ptdp.data import (
    ChatDataModule,
    EvaluationLoader,
    PreferenceDataModule,
    chat_build,
)
from lightning_ptdp.data.data_error import CorpusError, StoreError
from lightning_ptdp.models import make_tiny
from tests.data.folders import write_rows

pytestmark = pytest.mark.thorough

pytest.importorskip("transformers")


def message(role, content):
    return {"role": role, "content": content}


def pair(number, **changes):
    question = message("user", f"Is {number} odd?")
    answers = {"chosen": f"Yes, {number} is.", "rejected": "No."}
    row = {key: [question, message("assistant", text)] for key, text in answers.items()}
    return {**row, **changes}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences") / "model"
    make_tiny(folder, vocabulary_size=300, hidden_size=16, intermediate_size=16)
    return folder


@pytest.fixture
def data(model, tmp_path):
    """Return a factory of data modules for rows, in a new folder each."""

    def make(rows, **changes):
        number = len(list(tmp_path.iterdir()))
        file = tmp_path / f"{number}.jsonl"
        write_rows(file, rows)
        settings = {
            "path": str(file),
            "data_dir": str(tmp_path / f"store{number}"),
            "tokenizer_dir": str(model),
            "sequence_length": 100,
            "micro_batch_size": 2,
            "validation_fraction": 0.2,
        }
        return PreferenceDataModule(**settings | changes)

    return make


def texts(module):
    """Return the prompts and the two answers of all training pairs."""
    decode = module.prepare_config.given_tokenizer().of_transformers.decode
    stream = module._stream("train")
    batch = stream.as_batch(stream.__getitems__(range(len(stream))))
    found = []
    for row in range(len(stream)):
        labels = {key: batch[f"{key}_labels"][row] for key in ("chosen", "rejected")}
        begin = int((labels["chosen"] >= 0).nonzero()[0]) + 1
        assert batch["chosen_ids"][row, :begin].equal(batch["rejected_ids"][row, :begin])
        prompt = decode(batch["chosen_ids"][row, :begin])
        found.append((prompt, *(decode(label[label >= 0]) for label in labels.values())))
    return found


def test_forms_of_rows_give_same_pairs(data):
    rows = [pair(number) for number in range(20)]
    answers = [{key: row[key][1:] for key in row} for row in rows]
    prompts = [row["chosen"][:1] for row in rows]
    plain = [{key: row[key][1]["content"] for key in row} for row in rows]
    found = []
    for form in (
        rows,
        [{"prompt": p, **a} for p, a in zip(prompts, answers, strict=True)],
        [{"prompt": p[0]["content"], **a} for p, a in zip(prompts, plain, strict=True)],
        # some data sets have the question twice
        [{"prompt": p[0]["content"], **row} for p, row in zip(prompts, rows, strict=True)],
    ):
        module = data(form)
        module.check()
        module.prepare_data()
        found.append(sorted(texts(module)))
    assert len(found[0]) == 16
    for prompt, chosen, rejected in found[0]:
        number = chosen.split()[1]
        assert prompt.endswith("<|im_start|>assistant\n") and f"Is {number} odd?" in prompt
        assert (chosen, rejected) == (f"Yes, {number} is.<|im_end|>", "No.<|im_end|>")
    assert all(other == found[0] for other in found)


def test_batches_are_numbered_and_as_long_as_needed(data):
    module = data([pair(number) for number in range(23)])
    module.prepare_data()
    for split, size in (("train", 18), ("validation", 5)):
        loader = module.numbered_pairs()[split]
        assert isinstance(loader, EvaluationLoader)
        batches = list(loader)
        numbers = [int(number) for batch in batches for number in batch["pair"]]
        assert sorted(number for number in numbers if number >= 0) == list(range(size))
        for batch in batches:
            assert batch["rejected_ids"].shape == (2, 64)
            filled = batch["pair"] < 0
            assert (batch["chosen_labels"][filled] == -100).all()


@pytest.mark.parametrize(
    ("length", "options", "expected"),
    [
        (256, {"context_parallel_size": 3}, 192),
        (256, {"context_parallel_size": 8, "tensor_parallel_size": 8}, 64),
        (
            256,
            {"context_parallel_size": 8, "tensor_parallel_size": 8, "sequence_parallel": True},
            128,
        ),
        (90, {"context_parallel_size": 3}, 90),
    ],
)
def test_layout_can_split_batches(length, options, expected, data):
    module = data([pair(number) for number in range(8)], sequence_length=length)
    module.prepare_data()
    world_size = math.prod(size for size in options.values() if size is not True)
    layout = ParallelLayout(world_size=world_size, **options)
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(layout=layout))
    stream = module._stream("train")
    assert stream.as_batch(stream.__getitems__([0, 1]))["chosen_ids"].shape == (2, expected)


def test_default_pairs_need_no_file(model, tmp_path):
    config = PreferenceDataModule(tokenizer_dir=str(model)).prepare_config
    row = next(config.rows(None, "train"))
    assert row["chosen"].split() == row["rejected"].split()[::-1]
    assert config.folder != ChatDataModule(tokenizer_dir=str(model)).prepare_config.folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rejected": None}, "column 'rejected' has no answer, but a pair needs"),
        ({"chosen": []}, "column 'chosen' has no answer, but a pair needs"),
        ({"rejected": "No."}, "column 'rejected' begins with an answer, and there is no column"),
        ({"rejected": pair(3)["chosen"]}, "the chosen and the rejected answer are equal"),
        ({"rejected": pair(4)["rejected"]}, "differ before their last answer"),
        ({"chosen": [message("user", "Is 3 odd?")]}, "ends with a message of the role 'user'"),
        (
            {"chosen": [message("user", "Is 3 odd?"), message("assistant", " ")]},
            "message 2, an answer, is empty",
        ),
    ],
)
def test_faulty_pair_is_refused_before_launch(changes, reason, data, monkeypatch):
    monkeypatch.setattr(chat_build, "ROWS_AT_ONCE", 2)  # tokenized before launch
    rows = [pair(1), pair(2), pair(3, **changes)]
    module = data(rows)
    with pytest.raises(CorpusError, match=rf"{module.prepare_config.path}, row 3: .*{reason}"):
        module.check()
    data(rows, faulty="drop").check()


def test_long_pairs_are_dropped_or_refused(data):
    rows = [pair(number) for number in range(20)]
    rows[3]["rejected"][1]["content"] = "No. " * 60
    module = data(rows, too_long="drop")
    module.prepare_data()
    assert sum(len(module._stream(split)) for split in ("train", "validation")) == 19
    with pytest.raises(StoreError, match=r"1 of [0-9]+ [a-z]+ samples are longer than"):
        data(rows).prepare_data()
    rows[3]["chosen"][0]["content"] = rows[3]["rejected"][0]["content"] = "Odd? " * 60
    with pytest.raises(StoreError, match="2 of them have no answer left to learn"):
        data(rows, too_long="cut").prepare_data()


def test_store_of_pairs_is_refused_as_chats(data, model):
    module = data([pair(number) for number in range(20)])
    module.prepare_data()
    chat = ChatDataModule(data_dir=str(module.data_dir), tokenizer_dir=str(model))
    with pytest.raises(StoreError, match="Read it with PreferenceDataModule"):
        chat._stream("train")
