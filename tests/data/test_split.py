"""Split into training and validation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptdp.data import CorpusError, Document
from lightning_ptdp.data.split import scan
from lightning_ptdp.data.split import survey as survey_of_scans

TEXTS = st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=30).filter(
    lambda texts: max(map(len, texts)) > 1
)


def survey(found, *, validation_fraction, seed):
    """Survey documents that are scanned in two parts."""
    middle = len(found) // 2
    scans = [scan(part, seed=seed, undecodable=[]) for part in (found[:middle], found[middle:])]
    return survey_of_scans(scans, validation_fraction=validation_fraction, seed=seed)


def documents(texts):
    return [Document(str(number), text) for number, text in enumerate(texts)]


@settings(deadline=None)
@given(TEXTS, st.floats(0.01, 0.5), st.integers(0, 3))
def test_splits_partition_text_and_are_not_empty(texts, fraction, seed):
    found = survey(documents(texts), validation_fraction=fraction, seed=seed)
    parts = [found.split.parts(document) for document in documents(texts)]
    assert [train + validation for train, validation in parts] == texts
    assert any(train for train, _ in parts)
    assert any(validation for _, validation in parts)
    assert found.documents == len(texts)


@settings(deadline=None)
@given(TEXTS, st.integers(0, 3))
def test_equal_documents_are_never_in_both_splits(texts, seed):
    twice = documents(texts + texts)
    split = survey(twice, validation_fraction=0.3, seed=seed).split
    training = {document.text for document in twice if not split.parts(document)[1]}
    validation = {document.text for document in twice if not split.parts(document)[0]}
    assert not training & validation


def test_validation_fraction_is_met_with_whole_documents():
    texts = [f"document {number} " * 50 for number in range(400)]
    split = survey(documents(texts), validation_fraction=0.05, seed=0).split
    parts = [split.parts(document) for document in documents(texts)]
    assert all(not train or not validation for train, validation in parts)
    share = sum(len(validation) for _, validation in parts) / sum(map(len, texts))
    assert 0.025 <= share <= 0.05


def test_split_depends_on_seed_but_not_on_reading_order():
    texts = [f"document {number}" for number in range(200)]

    def chosen(texts, seed):
        split = survey(documents(texts), validation_fraction=0.1, seed=seed).split
        return {text for text in texts if split.parts(Document("", text))[1]}

    assert chosen(texts, 0) == chosen(texts[::-1], 0)
    assert chosen(texts, 0) != chosen(texts, 1)


def test_single_document_is_split_at_line_end():
    text = "a line of the only document\n" * 100
    split = survey(documents([text]), validation_fraction=0.1, seed=0).split
    train, validation = split.parts(Document("0", text))
    assert train + validation == text
    assert train.endswith("\n")
    assert len(validation) == pytest.approx(0.1 * len(text), abs=30)


def test_too_little_text_is_refused():
    with pytest.raises(CorpusError, match="1 characters"):
        survey(documents(["x"]), validation_fraction=0.1, seed=0)
    with pytest.raises(CorpusError, match="no text"):
        survey([], validation_fraction=0.1, seed=0)
