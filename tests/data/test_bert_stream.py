"""BERT samples: fields, published mask shares, whole-word masks, next-sentence labels and
reproducibility."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from lightning_ptdp.data import BertStream, PrepareConfig, StoreError, TokenizerError, prepare
from lightning_ptdp.data.pairs import (
    SPECIAL_PIECES,
    Draws,
    WordVocabulary,
    choose_words,
    find_windows,
)
from lightning_ptdp.data.stream import PADDING
from lightning_ptdp.data.tokenizer import Tokenizer
from tests.data.conftest import config_of

LENGTH = 64


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("bert") / "store"
    return prepare(config_of(corpus, output, control_symbols=SPECIAL_PIECES)).folder


@pytest.fixture(scope="module")
def vocabulary(folder):
    return WordVocabulary.of(Tokenizer.load(folder))


def stream(folder, **changes):
    return BertStream(folder, **{"sequence_length": LENGTH, **changes})


def rows(made, epoch=0):
    """Return a whole epoch as one batch."""
    return made.as_batch(
        made.__getitems__([epoch * len(made) + sample for sample in range(len(made))])
    )


def original(batch):
    """Return the tokens before masking."""
    return torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])


def segments(batch, row):
    tokens, types = original(batch)[row], batch["token_type_ids"][row]
    second = torch.nonzero(types).flatten()
    begin, end = int(second[0]), int(second[-1])
    return tokens[1 : begin - 1].tolist(), tokens[begin:end].tolist()


def test_fields_and_special_tokens_of_sample(folder, vocabulary):
    made = stream(folder)
    batch = rows(made)
    assert {name: tuple(value.shape[1:]) for name, value in batch.items()} == {
        "input_ids": (LENGTH,),
        "token_type_ids": (LENGTH,),
        "attention_mask": (LENGTH,),
        "labels": (LENGTH,),
        "masked_positions": (9,),  # 15 % of 61
        "next_sentence_label": (),
    }
    assert all(value.dtype == torch.int64 for value in batch.values())
    tokens = original(batch)
    special = torch.tensor([vocabulary.cls, vocabulary.sep, vocabulary.pad, vocabulary.mask])
    assert (tokens[:, 0] == vocabulary.cls).all()
    assert ((tokens == vocabulary.sep).sum(1) == 2).all()
    assert ((tokens == vocabulary.pad) == (batch["attention_mask"] == 0)).all()
    assert not torch.isin(tokens, torch.tensor([vocabulary.mask, vocabulary.end])).any()
    assert not torch.isin(batch["labels"], special).any()
    for row in range(len(made)):
        first, second = segments(batch, row)
        assert first
        assert second
        positions = batch["masked_positions"][row]
        labelled = torch.nonzero(batch["labels"][row] != -100).flatten()
        assert positions[positions > 0].tolist() == labelled.tolist()
        assert 0 < len(labelled) <= max(1, round(0.15 * (len(first) + len(second))))


def test_windows_cover_documents_without_crossing_them(folder, vocabulary):
    made = stream(folder, split="validation")
    chunks = [np.array(chunk) for chunk in made._tokens]
    documents = "|".join(" ".join(map(str, chunk)) for chunk in chunks)
    text = " ".join(map(str, np.concatenate(chunks)))
    batch = rows(made)
    seen = 0
    for row in range(len(made)):
        first, second = segments(batch, row)
        pair = second + first if batch["next_sentence_label"][row] else first + second
        assert vocabulary.end not in pair
        assert " ".join(map(str, pair)) in documents
        seen += len(pair)
    assert seen > 0.97 * (len(text.split()) - text.split().count(str(vocabulary.end)))


def test_windows_of_small_example():
    end, newline = 3, 4
    chunk = [10] * 9 + [newline] + [11] * 9 + [newline, end] + [12] * 7 + [end] + [13] * 50
    windows = find_windows(
        [np.array(chunk), np.array([14] * 8 + [end] + [15] * 8)],
        end=end,
        newline=newline,
        longest=16,
    )
    assert windows.starts.tolist() == [0, 10, 29, 45, 61, 79, 88]
    assert windows.lengths.tolist() == [10, 10, 16, 16, 16, 8, 8]
    assert windows.documents.tolist() == [0, 0, 2, 2, 2, 2, 3]


def test_mask_shares_match_published_values(folder, vocabulary):
    made = stream(folder, max_samples=150)
    counts = Counter()
    for epoch in range(12):
        batch = rows(made, epoch)
        chosen = batch["labels"] != -100
        seen, label = batch["input_ids"][chosen], batch["labels"][chosen]
        counts["tokens"] += int(batch["attention_mask"].sum()) - 3 * len(made)
        counts["chosen"] += len(label)
        counts["mask"] += int((seen == vocabulary.mask).sum())
        counts["same"] += int((seen == label).sum())
        random = seen[(seen != vocabulary.mask) & (seen != label)]
        counts["random"] += len(random)
        assert torch.isin(random, torch.from_numpy(vocabulary.ordinary).long()).all()
    assert counts["chosen"] > 12_000
    assert counts["chosen"] / counts["tokens"] == pytest.approx(0.15, abs=0.005)
    for name, share in (("mask", 0.8), ("same", 0.1), ("random", 0.1)):
        # At least four standard deviations; a random token equals the original in 1 of 300 cases.
        assert counts[name] / counts["chosen"] == pytest.approx(share, abs=0.015), name


def test_masks_cover_whole_words(folder, vocabulary):
    batch = rows(stream(folder, mask_probability=0.3))
    long_words = 0
    for row in range(len(batch["labels"])):
        first, second = segments(batch, row)
        for begin, segment in ((1, first), (len(first) + 2, second)):
            starts = vocabulary.word_starts(np.array(segment)).tolist()
            for start, stop in zip(starts, [*starts[1:], len(segment)], strict=True):
                masked = (batch["labels"][row, begin + start : begin + stop] != -100).tolist()
                assert all(masked) or not any(masked)
                long_words += stop - start > 1 and all(masked)
    assert long_words > 50


def test_word_starts_of_source_code():
    tokenizer = Tokenizer.train(
        ["def one_two(x):\n    return x + one_two\n" * 20],
        vocabulary_size=300,
        control_symbols=SPECIAL_PIECES,
    )
    vocabulary, ids = WordVocabulary.of(tokenizer), tokenizer.encode("    one_two(x) één\n")
    starts = vocabulary.word_starts(np.array(ids))
    words = [
        tokenizer.decode(ids[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)
    ]
    assert "".join(words) == "    one_two(x) één\n"
    assert [word.strip(" ") for word in words if word.strip(" ")] == [
        "one_two",
        "(",
        "x",
        ")",
        "één",
        "\n",
    ]


def test_words_longer_than_budget_are_skipped():
    starts, sizes = np.array([1, 4, 5]), np.array([3, 1, 2])
    for seed in range(20):
        one, three, all_six = (
            choose_words(starts, sizes, budget=budget, draws=Draws(seed)).tolist()
            for budget in (1, 3, 6)
        )
        assert (one, len(three), all_six) == ([4], 3, list(range(1, 7)))
    assert choose_words(starts[:1], sizes[:1], budget=2, draws=Draws(0)).tolist() == []


def test_half_of_pairs_are_swapped(folder):
    made = stream(folder, max_samples=100)
    window = [made._window(sample).tolist() for sample in range(len(made))]
    swapped, both = 0, set()
    for epoch in range(8):
        batch = rows(made, epoch)
        for row in range(len(made)):
            first, second = segments(batch, row)
            label = int(batch["next_sentence_label"][row])
            assert (second + first if label else first + second) == window[row]
            swapped += label
            both.add((row, label))
    assert swapped / (8 * len(made)) == pytest.approx(0.5, abs=0.07)
    assert len(both) > 1.9 * len(made)


def test_half_of_second_segments_are_from_another_document(folder):
    made = stream(folder, pairs="next", max_samples=100)
    places = {}
    for sample in range(len(made._windows.starts)):
        tokens = made._window(sample).tolist()
        for start in range(len(tokens) - 5):
            places.setdefault(tuple(tokens[start : start + 6]), set()).add(
                int(made._windows.documents[sample])
            )
    random = checked = 0
    for epoch in range(4):
        batch = rows(made, epoch)
        for row in range(len(made)):
            first, second = segments(batch, row)
            document = int(made._windows.documents[row])
            label = int(batch["next_sentence_label"][row])
            random += label
            if not label:
                assert first + second == made._window(row).tolist()
            elif len(second) >= 6:
                checked += 1
                found = places[tuple(second[:6])]
                assert found != {document}
            assert len(first) + len(second) <= LENGTH - 3
    assert random / (4 * len(made)) == pytest.approx(0.5, abs=0.1)
    assert checked > 50


def test_draws_depend_only_on_seed_epoch_and_sample(folder):
    made = stream(folder, max_samples=100)
    again = pickle.loads(pickle.dumps(made))
    first = made.__getitems__(range(len(made)))
    assert np.array_equal(first, again.__getitems__(range(len(again))))
    backwards = again.__getitems__(list(reversed(range(len(again)))))
    assert np.array_equal(first, backwards[::-1])
    other_epoch = made.__getitems__(range(len(made), 2 * len(made)))
    other_seed = stream(folder, seed=1, max_samples=100).__getitems__(range(len(made)))
    labels = slice(LENGTH, 2 * LENGTH)
    for other in (other_epoch, other_seed):
        assert (first[:, labels] != other[:, labels]).any(1).mean() > 0.95
    # Golden values: a library update must not change a resumed run.
    assert Draws(0, "x", 1).uniform(3) == pytest.approx(
        [0.418420766977, 0.489385764959, 0.742073361099], abs=1e-12
    )


def test_padding_rows_have_no_labels(folder):
    batch = stream(folder).as_batch(stream(folder).__getitems__([PADDING, 0]))
    assert (batch["labels"][0] == -100).all()
    assert batch["next_sentence_label"][0] == -100
    assert not batch["masked_positions"][0].any()
    assert batch["attention_mask"][0].tolist() == [1] * 3 + [0] * (LENGTH - 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_length": 10}, "sequence_length=10 .*at least 11"),
        ({"pairs": "order"}, "pairs='order' must be one of 'next', 'swap'"),
        ({"mask_probability": 0.0}, r"mask_probability=0\.0 must be greater than 0"),
        ({"max_samples": 0}, "max_samples=0"),
    ],
)
def test_bad_options_are_refused(folder, changes, words):
    with pytest.raises(ValueError, match=words):
        stream(folder, **changes)


def test_unsuitable_data_are_refused(corpus, prepared, tmp_path):
    with pytest.raises(TokenizerError, match=r"no control symbol '\[CLS\]'"):
        stream(prepared.folder)
    (tmp_path / "one.txt").write_text("one document of several words\n" * 500, "utf-8")
    settings = {
        "source": str(tmp_path / "one.txt"),
        "vocabulary_size": 290,
        "control_symbols": SPECIAL_PIECES,
    }
    one = prepare(PrepareConfig(output=tmp_path / "store", **settings)).folder
    assert len(stream(one)) > 10
    with pytest.raises(
        StoreError, match="has only one document, but pairs='next' needs segments of two"
    ):
        stream(one, pairs="next")
    with pytest.raises(ValueError, match="control_symbols"):
        config_of(corpus, tmp_path / "x", control_symbols=("[A]", "[A]"))
