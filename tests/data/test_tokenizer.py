"""Tokenizer: lossless encoding, and errors for bad vocabularies and files."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.data import CorpusError, Tokenizer, TokenizerError
from tests.data.conftest import WORDS

LINES = [" ".join(WORDS[i % 17 :] + WORDS[: i % 5]) + f"\n\t    indented {i}\n" for i in range(100)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, vocabulary_size=360, control_symbols=["[MASK]"])


AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "\ttabs\t\tand\n\n\nnewlines\r\n",
    "emoji 😀👩‍👩‍👧 and combining e\u0301",
    "<s></s><unk><pad> [MASK] <0x41>",
    "\u2581 the mark of a space \u2581\u2581",
    "\x00\x7f\x85\u2028\ufeff\uffff",
    "漢字かな عربى",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_unusual_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # Text never produces padding, unknown, begin, end or control symbols.
    assert not {0, 1, 2, 3, tokenizer.control_id("[MASK]")} & set(ids)


def test_long_text_in_pieces_has_same_encoding(tokenizer):
    short = ["".join(LINES[:7]), "", "x" * 100, "no newline"]
    long = "".join(LINES * 20) + "z" * 50_000
    assert tokenizer.encode_many([*short, long], num_threads=2) == [
        tokenizer.encode(text) for text in [*short, long]
    ]
    assert tokenizer.encode(long) == tokenizer._processor.encode(long)
    assert tokenizer.decode(tokenizer.encode(long)) == long


def test_training_is_reproducible(tokenizer):
    again = Tokenizer.train(iter(LINES), vocabulary_size=360, control_symbols=["[MASK]"])
    assert again.fingerprint == tokenizer.fingerprint
    assert again.model == tokenizer.model
    assert Tokenizer.train(LINES, vocabulary_size=350).fingerprint != tokenizer.fingerprint


def test_special_ids(tokenizer):
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 3)
    assert tokenizer.vocabulary_size == 360
    assert (
        tokenizer.decode(
            [tokenizer.bos_id, *tokenizer.encode("the fox"), tokenizer.eos_id, tokenizer.pad_id]
        )
        == "the fox"
    )
    with pytest.raises(TokenizerError, match=r"no control symbol '\[CLS\]'"):
        tokenizer.control_id("[CLS]")
    with pytest.raises(TokenizerError, match="id 360 is outside the vocabulary of 360"):
        tokenizer.decode([5, 360])


def test_vocabulary_size_error_suggests_valid_size():
    with pytest.raises(TokenizerError, match=r"vocabulary_size=9000 .* Use at most (\d+)") as error:
        Tokenizer.train(LINES, vocabulary_size=9000)
    largest = int(str(error.value).split("at most ")[1].split(",")[0])
    assert Tokenizer.train(LINES, vocabulary_size=largest).vocabulary_size == largest
    with pytest.raises(TokenizerError, match=r"vocabulary_size=265 .* at least (\d+)") as error:
        Tokenizer.train(LINES, vocabulary_size=265)
    smallest = int(str(error.value).rsplit(" ", 1)[1])
    assert Tokenizer.train(LINES, vocabulary_size=smallest).vocabulary_size == smallest
    with pytest.raises(TokenizerError, match="no text"):
        Tokenizer.train(["", "\n\n"], vocabulary_size=300)


def test_key_error_of_text_iterator_is_raised():
    def texts():
        yield LINES[0]
        raise KeyError("a file vanished")

    with pytest.raises(KeyError, match="vanished"):
        Tokenizer.train(texts(), vocabulary_size=300)


def test_save_load_and_pickle(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new")
    for other in (Tokenizer.load(tmp_path / "new"), pickle.loads(pickle.dumps(tokenizer))):
        assert other.fingerprint == tokenizer.fingerprint
        assert other.encode(LINES[0]) == tokenizer.encode(LINES[0])


def test_damaged_models_are_refused(tokenizer, tmp_path):
    model = tokenizer.model
    for bad in (b"", b"not a model", model[:100], model[:-50]):
        with pytest.raises(TokenizerError):
            Tokenizer(bad)
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.model"
    for bad in (
        b"",
        model[:-1],
        bytes([model[0] ^ 1]) + model[1:],
        model[:2000] + bytes([model[2000] ^ 1]) + model[2001:],
    ):
        file.write_bytes(bad)
        with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
            Tokenizer.load(tmp_path)
    file.unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.model cannot be read"):
        Tokenizer.load(tmp_path)
    file.write_bytes(model)
    for bad_record in ("{", "[]", json.dumps({"fingerprint": "x"})):
        (tmp_path / "tokenizer.json").write_text(bad_record)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json is damaged"):
            Tokenizer.load(tmp_path)


def test_foreign_model_without_byte_pieces_is_refused():
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=100,
        model_type="bpe",
        minloglevel=2,
    )
    with pytest.raises(TokenizerError, match="lacks byte pieces"):
        Tokenizer(model.getvalue())


@pytest.mark.parametrize("error", [CorpusError("gone"), KeyboardInterrupt()])
def test_corpus_error_and_interrupt_in_training_are_raised(error):
    def texts():
        yield "some words " * 100
        raise error

    with pytest.raises(type(error)):
        Tokenizer.train(texts(), vocabulary_size=300)
