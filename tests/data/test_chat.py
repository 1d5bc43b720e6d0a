"""Chat data: sources, templates, learned tokens, packing and refused input."""

import itertools
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_ptdp.cli import main
from lightning_ptdp.data import (
    ChatDataModule,
    ChatStream,
    TokenStream,
    chat_format,
    prepare,
)
from lightning_ptdp.data.chat_format import ChatFormat
from lightning_ptdp.data.chat_stream import pack
from lightning_ptdp.data.conversations import Columns, FaultyRow
from lightning_ptdp.data.data_error import CorpusError, StoreError, TokenizerError
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer, load_tokenizer
from lightning_ptdp.data.manifest import Manifest, record_files
from lightning_ptdp.models import make_tiny
from tests.data.conftest import config_of
from tests.data.folders import flip, write_rows

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model folder whose template marks answers, next to templates that do not."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    make_tiny(folder)
    marked = transformers.AutoTokenizer.from_pretrained(folder).chat_template
    plain = re.sub(r"\{% (end)?generation %\}", "", marked)
    (folder.parent / "plain.jinja").write_text(plain)
    # Like Qwen3's: only the last answer is rendered with its reasoning.
    thinking = plain.replace(
        "assistant' %}{{", "assistant' %}{{ ('<think>' if loop.last else '') +"
    )
    (folder.parent / "thinking.jinja").write_text(thinking)
    strict = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% "
        "endif %}" + plain
    )
    (folder.parent / "strict.jinja").write_text(strict)
    deaf = plain.replace(
        "{{ message['content'] + '<|im_end|>' }}{% endif",
        "{% if message['role'] == 'user' %}{{ message['content'] }}{% endif %}{% endif",
    )
    (folder.parent / "deaf.jinja").write_text(deaf)
    return folder


@pytest.fixture(scope="module")
def text(corpus, tmp_path_factory):
    return prepare(config_of(corpus, tmp_path_factory.mktemp("text") / "store"))


def turns(number):
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": f"It is {number}, " + "more " * (number % 7)},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
        ]
    }


ROWS = [turns(number) for number in range(40)]


@pytest.fixture(scope="module")
def chat(model):
    file = model.parent / "chat.jsonl"
    write_rows(file, ROWS)
    return file


def conversations(model, path, folder, **changes):
    settings = {
        "data_dir": str(folder),
        "tokenizer_dir": str(model),
        "path": path and str(path),
        "sequence_length": 128,
        "micro_batch_size": 2,
        "validation_fraction": 0.2,
    }
    return ChatDataModule(**{**settings, **changes})


@pytest.fixture
def data(model, chat, tmp_path):
    """Return a factory of data modules, by default for conversations in the folder ``store``."""

    def make(path=chat, folder="store", **changes):
        return conversations(model, path and tmp_path / path, tmp_path / folder, **changes)

    return make


@pytest.fixture(scope="module")
def whole(model, chat):
    """Return the folder of prepared conversations."""
    made = prepared(conversations(model, chat, model.parent / "prepared"))
    return Path(made.data_dir)


@pytest.fixture
def store(whole, tmp_path):
    """Return a copy of the prepared conversations that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "store"))


def prepared(made):
    made.check()
    made.prepare_data()
    made.setup()
    return made


def encoded(model, template, **options):
    """Return the ids of a conversation and the mask of learned tokens."""
    chat = ChatFormat(HuggingFaceTokenizer(model), template=template, **options)
    return chat.encode(ROWS[3]["messages"])


@pytest.mark.parametrize("template", [None, "plain.jinja"])
def test_chat_ids_match_template_and_only_answers_are_learned(model, template):
    """Template marks and the comparison of prefixes find the same answers."""
    given = None if template is None else str(model.parent / template)
    ids, learned = encoded(model, given)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert ids.tolist() == tokenizer.apply_chat_template(ROWS[3]["messages"])["input_ids"]
    assert tokenizer.decode(ids[learned]) == "It is 3, more more more <|im_end|>Yes.<|im_end|>"
    _, last = encoded(model, given, learn="last_answer")
    assert tokenizer.decode(ids[last]) == "Yes.<|im_end|>"


def test_template_with_unstable_prefix_learns_only_last_answer(model):
    template = str(model.parent / "thinking.jinja")
    with pytest.raises(FaultyRow, match=r"is unknown.*generation.*last_answer"):
        encoded(model, template)
    ids, learned = encoded(model, template, learn="last_answer")
    decode = HuggingFaceTokenizer(model).of_transformers.decode
    assert decode(ids[learned]) == "<think>Yes.<|im_end|>"


def test_all_file_and_column_formats_give_same_samples(data, tmp_path):
    import datasets

    frame = datasets.Dataset.from_list(ROWS)
    frame.to_parquet(tmp_path / "chat.parquet")
    frame.save_to_disk(str(tmp_path / "saved"))
    # A dataset with only a validation split, used as validation data.
    datasets.DatasetDict({"validation": frame}).save_to_disk(str(tmp_path / "validation"))
    apart = prepared(data(folder="apart", validation_path=str(tmp_path / "validation")))
    assert len(apart._stream("validation")) > 0
    shared = [
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]}
                for m in row["messages"]
            ]
        }
        for row in ROWS
    ]
    write_rows(tmp_path / "shared.jsonl", shared)
    made = {"chat.jsonl": data(), "two workers": data(folder="2w", prepare_workers=2)} | {
        name: data(name, f"store of {name}") for name in ("chat.parquet", "saved", "shared.jsonl")
    }
    found = {name: prepared(one)._stream("train").fingerprint for name, one in made.items()}
    assert found == dict.fromkeys(made, found["chat.jsonl"])


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"prompt": "A?", "response": "B", "system": "C"}, {}, "system C user A? assistant B"),
        (
            {"question": "A?", "answer": "B"},
            {"columns": {"prompt": "question", "response": "answer"}},
            "user A? assistant B",
        ),
        ({"instruction": "A", "input": "D", "output": "B"}, {}, "user A\n\nD assistant B"),
        ({"instruction": "A", "input": "", "output": "B"}, {}, "user A assistant B"),
    ],
)
def test_instructions_become_conversations(data, tmp_path, row, options, said):
    write_rows(tmp_path / "data.jsonl", [row, {key: f"{value} " for key, value in row.items()}])
    made = prepared(data("data.jsonl", **options))
    tokenizer = made.prepare_config.given_tokenizer().of_transformers
    texts = [tokenizer.decode(made._stream(split).read(0)[0]) for split in ("train", "validation")]
    short = min(texts, key=len)
    assert short == "".join(f"<|im_start|>{part}<|im_end|>\n" for part in _parts(said))


def test_input_follows_the_question_and_not_the_system_message():
    row = {
        "instruction": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
        "input": "I",
        "output": "A",
    }
    messages = Columns.of(row, {}, where="row").content(row)
    assert [message["content"] for message in messages] == ["S", "Q\n\nI", "A"]


def _parts(said):
    return [re.sub(r"^(\w+) ", r"\1\n", part) for part in re.split(r" (?=assistant|user)", said)]


def test_packing_keeps_samples_and_restarts_positions(model, data, store):
    alone = data()._stream("train")
    packed = prepared(data(packing=True))._stream("train")
    assert len(packed) < len(alone) == packed.samples
    rows = packed.as_batch(packed.__getitems__(range(len(packed))))
    found = []
    for tokens, labels, places in zip(
        rows["input_ids"], rows["labels"], rows["position_ids"], strict=True
    ):
        starts = [*torch.where(places == 0)[0].tolist(), len(places)]
        for begin, end in itertools.pairwise(starts):
            assert places[begin:end].tolist() == list(range(end - begin))
            if (labels[begin:end] >= 0).any():
                found.append((tokens[begin:end].tolist(), labels[begin:end].tolist()))
    single = alone.as_batch(alone.__getitems__(range(len(alone))))
    sizes = {len(tokens) for tokens, _ in found}
    expected = []
    for index, (tokens, labels) in enumerate(
        zip(single["input_ids"].tolist(), single["labels"].tolist(), strict=True)
    ):
        size = int(alone.lengths[index]) - 1
        assert size in sizes
        expected.append((tokens[:size], labels[:size]))
    assert sorted(found) == sorted(expected)
    decode = HuggingFaceTokenizer(model).of_transformers.decode
    for _, labels in expected:
        said = decode([label for label in labels if label >= 0])
        assert re.fullmatch(r"It is \d+, (more )*<\|im_end\|>Yes\.<\|im_end\|>", said)


def test_packing_is_dense_and_keeps_every_sample():
    sizes = np.random.default_rng(0).integers(1, 24, 500)
    order, begins = pack(sizes, 64)
    assert sorted(order.tolist()) == list(range(500))
    assert np.add.reduceat(sizes[order], begins[:-1]).max() <= 64
    assert len(begins) - 1 <= 1.03 * sizes.sum() / 64 + 1


def test_long_samples_are_refused_dropped_or_cut(data, store, caplog):
    lengths = data()._stream("train").lengths
    length = int(np.median(lengths)) - 1
    longer = int((lengths > length + 1).sum())
    with pytest.raises(
        ValueError,
        match=f"{longer} of {len(lengths)} train samples are longer than "
        f"sequence_length={length}.*too_long",
    ):
        data(sequence_length=length).check()
    dropped, cut = (data(sequence_length=length, too_long=how) for how in ("drop", "cut"))
    assert len(dropped._stream("train")) == len(lengths) - longer
    assert len(cut._stream("train")) == len(lengths)
    with caplog.at_level("INFO"):
        dropped.prepare_data()
    assert f"{longer} longer than {length} tokens: drop" in caplog.text
    with pytest.raises(ValueError, match="have no answer left to learn"):
        data(sequence_length=6, too_long="cut")._stream("train")


def test_equal_conversations_are_never_in_both_splits(data, tmp_path):
    write_rows(tmp_path / "twice.jsonl", ROWS[:10] * 4)
    made = prepared(data("twice.jsonl"))
    held = {
        name: {tuple(stream.read(i)[0]) for i in range(stream.samples)}
        for name in ("train", "validation")
        for stream in [made._stream(name)]
    }
    assert held["train"] and held["validation"] and not held["train"] & held["validation"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("no json at all\n", {}, r"bad.jsonl cannot be read: line 1: it is not valid JSON"),
        ("", {}, r"path=.*bad.jsonl has no row"),
        ("\n\n", {}, r"path=.*bad.jsonl has no row"),
        ('{"mesages": []}\n', {}, r"no column messages.*did you mean 'mesages'"),
        (
            '{"prompt": "a", "response": "b"}\n',
            {"columns": {"promt": "x"}},
            r"columns: 'promt' is not one of .*did you mean 'prompt'",
        ),
        (
            '{"asked": "a", "told": "b"}\n',
            {"columns": {"prompt": "ask", "response": "told"}},
            r"no column 'ask'.*did you mean 'asked'",
        ),
        (
            '{"prompt": "a", "response": " "}\n',
            {},
            r"row 1: message 2, an answer, is empty.*faulty: drop",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            {},
            r"row 1: there is nothing to learn.*the roles are user",
        ),
        ('{"messages": "a"}\n', {}, r"must be a list of messages"),
        (
            '{"instruction": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], '
            '"input": "b", "output": "c"}\n',
            {},
            r"row 1: column 'input' is appended to the last message of the user, which must be a text",
        ),
        (
            '{"prompt": "a", "response": "b", "system": "c"}\n',
            {"chat_template": "strict.jinja"},
            r"failed.*begin with the user",
        ),
        (
            '{"prompt": "a", "response": "b", "system": "ccc"}\n',
            {"chat_template": "deaf.jinja"},
            r"leaves out messages of the role 'system'",
        ),
        (
            '{"prompt": "a", "response": "b"}\n',
            {"chat_template": "none.jinja"},
            r"chat_template=.*none.jinja cannot be read",
        ),
        ('{"prompt": "a", "response": "b"}\n', {"learn": "some"}, r"learn='some' must be one of"),
    ],
)
def test_bad_chat_data_are_refused_before_writing(
    model, data, tmp_path, caplog, text, options, message
):
    (tmp_path / "bad.jsonl").write_text(text)
    if "chat_template" in options:
        options = {**options, "chat_template": str(model.parent / options["chat_template"])}
    with pytest.raises(ValueError, match=message):
        data("bad.jsonl", **options).check()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]
    assert not caplog.records


def test_single_conversation_cannot_be_split(data, tmp_path):
    for rows, said in (
        (ROWS[:1], "have 1 conversation,"),
        (ROWS[:1] * 20, "have 1 different conversation,"),
    ):
        write_rows(tmp_path / "few.jsonl", rows)
        with pytest.raises(ValueError, match=said):
            data("few.jsonl").prepare_data()
    assert not (tmp_path / "store").exists()


def test_missing_template_is_reported_without_data_dir(model, chat, tmp_path):
    with pytest.raises(ValueError, match=r"chat_template=none.jinja cannot be read: No such file"):
        ChatDataModule(tokenizer_dir=str(model), path=str(chat), chat_template="none.jinja")


def test_faulty_row_is_reported_or_dropped(data, tmp_path, caplog):
    rows = [
        *ROWS[:5],
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
        *ROWS[5:9],
    ]
    write_rows(tmp_path / "chat.jsonl", rows)
    with pytest.raises(ValueError, match=r"row 6: message 2, an answer, is empty"):
        data("chat.jsonl").prepare_data()
    assert not (tmp_path / "store").exists()
    with caplog.at_level("INFO"):
        made = prepared(data("chat.jsonl", faulty="drop"))
    assert "1 rows were left out" in caplog.text
    assert sum(made._stream(split).samples for split in ("train", "validation")) == 9


def test_missing_template_tokenizer_or_source_is_reported(model, chat, data, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    bare, other = {"tokenizer_dir": str(tmp_path / "bare")}, {"folder": "other"}
    for options, words in (
        (bare, r"has no chat template. Give a file with one \(chat_template"),
        (
            other | {"tokenizer_dir": str(tmp_path / "nowhere")},
            "tokenizer folder .*nowhere does not exist",
        ),
        (
            other | {"path": chat.with_name("chat.json")},
            "source path .*chat.json does not exist; did you mean 'chat.jsonl'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            data(**options).check()
    prepared(data(**bare, chat_template=str(model.parent / "plain.jinja")))


def test_outdated_or_damaged_folder_is_refused(data, store):
    with pytest.raises(
        ValueError, match=r"other settings .*learn was 'answers' and is now 'last_answer'"
    ):
        data(learn="last_answer").check()
    prepared(data(learn="last_answer", overwrite=True))
    flip(store / "train" / "chunk-0-0.bin")
    with pytest.raises(ValueError, match=r"chunk-0-0.bin is damaged"):
        data(learn="last_answer").check()


def test_cli_prepares_with_tokenizer_of_model(model, chat, tmp_path, monkeypatch, capsys):
    """The tokenizer is used for conversations and for text."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "text.jsonl", [{"text": "some words"}, {"text": "some other words"}])
    commands = (
        f"--config hf/sft --data.path {chat} --data.validation_fraction 0.2",
        "--config hf/nano --data.source text.jsonl --data.data_dir text"
        " --data.validation_fraction 0.5",
    )
    said = []
    for command in commands:
        assert main(["prepare", *command.split(), "--model.path", str(model)]) == 0
        said.append(capsys.readouterr().out)
    assert re.search(r"train: 32 samples in \d+ sequences", said[0])
    (store,) = (tmp_path / "ptdp-data").iterdir()
    assert store.name.startswith("chat-")
    assert (
        load_tokenizer("text").fingerprint
        == load_tokenizer(store).fingerprint
        == HuggingFaceTokenizer(model).fingerprint
    )


def test_token_outside_vocabulary_is_refused_on_opening(data, store):
    made = prepared(data())
    file = store / "train" / "chunk-0-0.bin"
    tokens = np.fromfile(file, "int32")
    tokens[8] |= 60_000  # after a header of three numbers
    tokens.tofile(file)
    replace(Manifest.read(store), files=record_files(store)).write(store)
    made.setup()  # like another process, which does not read all tokens again
    for opened in (
        data().check,
        data().prepare_data,
        lambda: ChatStream(store, sequence_length=128).read(0),
    ):
        with pytest.raises(
            StoreError, match=r"train/chunk-0-0\.bin has token 6\d\d\d\d, but vocabulary_size=\d+"
        ):
            opened()


def test_prepared_conversations_are_copied_from_remote_store(data, store):
    copied = prepared(data(None, "copy", remote=f"local:{store}"))
    copied.check()
    assert copied._stream("train").fingerprint == data()._stream("train").fingerprint


def test_conversation_count_must_match_manifest(data, store):
    manifest = Manifest.read(store)
    more = replace(manifest.splits["train"], documents=manifest.splits["train"].documents + 1)
    replace(manifest, splits={**manifest.splits, "train": more}).write(store)
    with pytest.raises(StoreError, match=r"train is damaged: it does not have 33 conversations"):
        data().check()


def test_chat_and_text_data_are_not_interchangeable(data, store, text):
    with pytest.raises(StoreError, match=r"of the form 'chat'.*Read it with ChatDataModule"):
        TokenStream(store, sequence_length=8)
    with pytest.raises(StoreError, match=r"of the form 'text'.*Read it with TextDataModule"):
        ChatStream(text.folder, sequence_length=8)
    with pytest.raises(StoreError, match=r"form was 'text' and is now 'chat'"):
        data(folder=text.folder).check()


@pytest.mark.parametrize(
    "loop",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(99999) %}{{ f(n) if n else '' }}{% endfor %}{% "
        "endmacro %}{% for i in range(99999) %}"
        "{{ f(0) }}{% endfor %}",
    ],
)
def test_template_exceeding_time_limit_is_stopped(model, data, tmp_path, loop, monkeypatch):
    monkeypatch.setattr(chat_format, "LIMIT_S", 0.2)
    (tmp_path / "loop.jinja").write_text(loop + (model.parent / "plain.jinja").read_text())
    for faulty in ("error", "drop"):
        with pytest.raises(
            TokenizerError,
            match=r"the chat template did not finish \(not finished after 0\.2 s\) for one conversation. Use another",
        ):
            data(chat_template=str(tmp_path / "loop.jinja"), faulty=faulty).check()


def test_template_with_power_operator_is_refused(model, data, tmp_path):
    plain = (model.parent / "plain.jinja").read_text()
    (tmp_path / "power.jinja").write_text("{{ 9 ** 9 ** 9 ** 9 }}" + plain)
    with pytest.raises(
        TokenizerError, match=r"the chat template of .*power\.jinja computes a power \(\*\*\)"
    ):
        data(chat_template=str(tmp_path / "power.jinja")).check()
    (tmp_path / "bold.jinja").write_text(plain + "{# **bold** #}{{ '**bold**' if false else '' }}")
    data(chat_template=str(tmp_path / "bold.jinja")).check()


GOOD = b'{"prompt": "a", "response": "b"}\n'
DEEP = "line 2: its brackets are nested more than 64 levels deep"


@pytest.mark.parametrize(
    ("content", "names", "words"),
    [
        *(
            (GOOD + b'{"prompt": ' + brackets + b"}\n", ("bad.jsonl", "bad.json"), DEEP)
            for brackets in (
                b"[" * 100_000 + b"]" * 100_000,
                b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
                b"[" * 100_000,
            )
        ),
        (b"[3]", ("bad.json",), "entry 1 of its list is a int"),
        (b"[{]", ("bad.json",), "it is not valid JSON"),
        (
            GOOD + b'{"prompt": "\xff", "response": "b"}\n',
            ("bad.jsonl",),
            r"line 2: not UTF-8 \(byte 13: 0xff\). A file of JSON lines",
        ),
    ],
)
def test_invalid_json_is_refused_with_line_number(data, tmp_path, content, names, words):
    for name in names:
        (tmp_path / name).write_bytes(content)
        for read in (data(name).check, data(name).prepare_data):
            with pytest.raises(CorpusError, match=rf"path=.*{name} cannot be read: {words}"):
                read()


def test_brackets_in_strings_do_not_count_as_nesting(data, tmp_path):
    rows = [
        {"prompt": f"{number} " + "[{" * 500 + '"\\', "response": "}" * 70} for number in range(4)
    ]
    write_rows(tmp_path / "good.jsonl", rows)
    (tmp_path / "good.json").write_text(json.dumps(rows, indent=1))
    for name in ("good.jsonl", "good.json"):
        data(name, sequence_length=4096).check()


@pytest.mark.parametrize("name", ["marked.json", "OTHER.JSON", "OTHER.JSONL"])
def test_byte_order_mark_and_capital_suffix_are_accepted(data, tmp_path, name):
    rows = [{"prompt": f"{number}", "response": "b"} for number in range(4)]
    lines = "\n".join(map(json.dumps, rows))
    text = lines if name.endswith("L") else json.dumps(rows)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    data(name).check()


def test_optional_columns_of_later_rows_are_read(data, tmp_path):
    rows = [{"instruction": f"Say {number}", "output": "B"} for number in range(300)]
    rows.append({"instruction": "Say", "input": "D", "output": "B", "system": "C"})
    write_rows(tmp_path / "rows.jsonl", rows)
    made = prepared(data("rows.jsonl", split_seed=1))
    decode = made.prepare_config.given_tokenizer().of_transformers.decode
    streams = [made._stream(split) for split in ("train", "validation")]
    texts = [decode(stream.read(i)[0]) for stream in streams for i in range(stream.samples)]
    assert sum("system\nC<" in text and "Say\n\nD<" in text for text in texts) == 1
    assert sum("system" in text for text in texts) == 1


def test_pipe_and_sparse_file_are_refused(data, tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(CorpusError, match=r"a\.jsonl is neither a file nor a folder"):
        data("a.jsonl").check()
    with open(tmp_path / "b.jsonl", "wb") as stream:
        stream.truncate(1 << 42)
    with pytest.raises(
        CorpusError,
        match=r"b\.jsonl cannot be read: line 1: more than 67108864 bytes",
    ):
        data("b.jsonl").check()
