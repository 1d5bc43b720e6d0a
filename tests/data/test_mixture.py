"""Mixture of corpora: shares, epochs per corpus, resume in any layout, common tokenizer."""

import pickle
import re
from collections import Counter

import numpy as np
import pytest
import torch
import yaml

from lightning_ptdp.cli import main
from lightning_ptdp.data import (
    DataError,
    EvaluationLoader,
    MixtureDataModule,
    MixtureStream,
    StoreError,
    TokenizerError,
    TokenLoader,
    TokenStream,
    prepare,
)
from tests.data.conftest import config_of, write_corpus
from tests.data.fits import Recorder, check_overfitting, continued, saved_at, trainer

LENGTH = 31


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Prepare a large and a small corpus with one tokenizer."""
    root = tmp_path_factory.mktemp("mixture")
    big = prepare(config_of(write_corpus(root / "a", documents=24, seed=1), root / "big"))
    config = config_of(
        write_corpus(root / "b", documents=8, seed=2), root / "small", tokenizer_dir=big.folder
    )
    return [big.folder, prepare(config).folder]


def streams(folders, split="train"):
    return [TokenStream(folder, split=split, sequence_length=LENGTH) for folder in folders]


def sources(batch, of):
    """Return (corpus, sample) of every row."""
    where = {
        tuple(stream[index]["input_ids"].tolist()): (corpus, index)
        for corpus, stream in enumerate(of)
        for index in range(len(stream))
    }
    return [where[tuple(row)] for row in batch.tolist()]


def test_corpus_has_its_share_and_own_epochs(folders):
    parts = streams(folders)
    big, small = map(len, parts)
    mixture = MixtureStream(parts, [0.25, 0.75])
    assert len(mixture) == big + small
    loader = TokenLoader(mixture, batch_size=1, seed=3)
    found = sources(torch.cat([batch["input_ids"] for _ in range(2) for batch in loader]), parts)
    for length in range(1, len(found) + 1):
        assert abs(sum(corpus for corpus, _ in found[:length]) - 0.75 * length) < 1
    own = [sample for corpus, sample in found if corpus == 1]
    assert len(own) > 2 * small
    epochs = [own[start : start + small] for start in range(0, len(own) - small + 1, small)]
    assert all(sorted(epoch) == list(range(small)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    other = TokenLoader(mixture, batch_size=1, seed=4)
    assert (
        sources(torch.cat([batch["input_ids"] for batch in other]), parts) != found[: len(mixture)]
    )


def test_sample_order_is_equal_in_every_layout_and_after_resume(folders):
    mixture = MixtureStream(streams(folders), [2, 1])
    assert np.array_equal(pickle.loads(pickle.dumps(mixture)).turns.order, mixture.turns.order)

    def rows(d, batch_size, count, state):
        loaders = [
            TokenLoader(mixture, batch_size=batch_size, num_replicas=d, replica_rank=rank)
            for rank in range(d)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        found = []
        for _, *batches in zip(range(count), *loaders, strict=False):
            found += [row for batch in batches for row in batch["input_ids"].tolist()]
        return found, loaders[0].state_dict()

    whole, _ = rows(1, 1, 36, None)
    first, state = rows(4, 3, 1, None)
    second, state = rows(2, 6, 1, state)
    third, _ = rows(1, 12, 1, state)
    assert first + second + third == whole


def test_validation_mixes_corpora_without_repetition(folders):
    parts = streams(folders, "validation")
    mixture = MixtureStream(parts, [1, 1], repeat=False)
    assert len(mixture) in (2 * min(map(len, parts)), 2 * min(map(len, parts)) + 1)
    for d in (1, 3):
        loaders = [
            EvaluationLoader(mixture, batch_size=4, num_replicas=d, replica_rank=rank)
            for rank in range(d)
        ]
        batches = [batch for loader in loaders for batch in loader]
        seen = sources(
            torch.cat([batch["input_ids"][(batch["labels"] >= 0).any(1)] for batch in batches]),
            parts,
        )
        assert max(Counter(seen).values()) == 1
        assert len(seen) == len(mixture)
        shares = Counter(corpus for corpus, _ in seen)
        assert abs(shares[0] - shares[1]) <= 1


def data(folders, weights=(0.7, 0.3), **changes):
    settings = {
        "vocabulary_size": 320,
        "sequence_length": LENGTH,
        "micro_batch_size": 4,
        "num_microbatches": 2,
        **changes,
    }
    corpora = [
        {"data_dir": str(folder), "weight": weight}
        for folder, weight in zip(folders, weights, strict=True)
    ]
    return MixtureDataModule(corpora=corpora, **settings)


def test_fit_resumes_in_mid_epoch_and_refuses_other_weights(folders, tmp_path):
    whole = Recorder()
    trainer(tmp_path, max_epochs=-1, max_steps=9).fit(whole, datamodule=data(folders))
    _, checkpoint = saved_at(4, data(folders), tmp_path)
    rest = continued(checkpoint, data(folders, num_workers=1), tmp_path, max_epochs=-1, max_steps=9)
    assert rest == whole.seen[4:]
    with pytest.raises(DataError, match=r"data is .* in the checkpoint"):
        continued(checkpoint, data(folders, (0.6, 0.4)), tmp_path)


def test_overfitting_repeats_same_samples(folders, tmp_path):
    check_overfitting(data(folders), tmp_path)


def test_corpora_with_different_tokenizers_are_refused(folders, tmp_path):
    other = prepare(
        config_of(
            write_corpus(tmp_path / "text", documents=4, seed=5),
            tmp_path / "other",
            vocabulary_size=300,
        )
    )
    with pytest.raises(
        StoreError,
        match=f"{re.escape(str(other.folder))} has tokenizer .*{re.escape(str(folders[0]))} has",
    ):
        data([folders[0], other.folder]).check()
    with pytest.raises(StoreError, match="but vocabulary_size=400"):
        data(folders, vocabulary_size=400).setup()
    with pytest.raises(StoreError, match="not a folder of prepared data"):
        data([folders[0], tmp_path / "nowhere"]).check()
    data(folders).check(num_replicas=2)


def test_unsuitable_tokenizer_is_refused_before_writing(folders, tmp_path):
    text = write_corpus(tmp_path / "text", documents=4)
    for changes, words in (
        ({"vocabulary_size": 300}, "vocabulary of 320, but vocabulary_size=300"),
        ({"control_symbols": ("[MASK]",)}, "no control symbol"),
        ({"tokenizer_dir": tmp_path}, "has no tokenizer"),
    ):
        given = {"tokenizer_dir": folders[0], **changes}
        with pytest.raises(TokenizerError, match=words):
            prepare(config_of(text, tmp_path / "x", **given))
    config = config_of(text, tmp_path / "y", tokenizer_dir=folders[0])
    assert not prepare(config).reused
    assert prepare(config).reused
    with pytest.raises(StoreError, match=r"tokenizer_dir was .* and is now None"):
        prepare(config_of(text, tmp_path / "y"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("corpora", "words"),
    [
        ([], "empty"),
        ([{"data_dir": "x"}], "must be a list of .*data_dir .*weight"),
        ([{"data_dir": "x", "weight": 0}], "weight=0"),
    ],
)
def test_bad_corpora_are_refused(corpora, words):
    with pytest.raises(ValueError, match=words):
        MixtureDataModule(corpora=corpora)


def test_cli_prepares_mixture_from_yaml(folders, tmp_path):
    corpora = [{"data_dir": str(folder), "weight": 0.5} for folder in folders]
    arguments = {"corpora": corpora, "vocabulary_size": 320, "sequence_length": LENGTH}
    config = {
        "trainer": {"logger": False},
        "model": {"class_path": "LitGPT"},
        "data": {"class_path": "MixtureDataModule", "init_args": arguments},
    }
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(config))
    assert main(["prepare", "--config", str(tmp_path / "mixture.yaml")]) == 0
