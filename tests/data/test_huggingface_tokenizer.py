"""Text for pretraining with a tokenizer of Hugging Face's."""

from __future__ import annotations

import pickle
import sysconfig
from pathlib import Path

import pytest

from lightning_ptdp.data import PrepareConfig, TextDataModule, TokenStream, prepare
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer, load_tokenizer
from lightning_ptdp.models import make_tiny

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    make_tiny(folder, vocabulary_size=600)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three real files, and text in other scripts."""
    folder = tmp_path_factory.mktemp("texts")
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("bisect.py", "keyword.py", "this.py"):
        (folder / f"{name}.txt").write_text((library / name).read_text())
    (folder / "z.txt").write_text("Grüße, 你好 😀 \t  \n\n ende\u2581")
    return folder


def test_ids_are_those_of_transformers_and_documents_end_with_its_end_token(model: Path, texts: Path, tmp_path: Path) -> None:
    made = prepare(
        PrepareConfig(
            output=tmp_path / "store", source=str(texts), tokenizer_dir=model, vocabulary_size=None, validation_fraction=0.2
        )
    )
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    split = {name: TokenStream(made.folder, split=name, sequence_length=1)._chunks for name in ("train", "validation")}
    stored = {name: [int(token) for chunk in chunks for token in chunk] for name, chunks in split.items()}
    documents = [_until(tokens, theirs.eos_token_id) for tokens in stored.values()]
    found = sorted("".join(theirs.decode(ids)) for group in documents for ids in group)
    expected = {file.read_text(): theirs(file.read_text(), add_special_tokens=False)["input_ids"] for file in texts.iterdir()}
    whole = [text for text in found if text in expected]
    assert len(whole) >= 3, "one document may be divided"
    ids = [ids for group in documents for ids in group]
    assert all(expected[text] in ids for text in whole)
    assert made.manifest.vocabulary_size == 600 == len(theirs)


def _until(tokens: list[int], end: int) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == end:
            documents.append([])
        else:
            documents[-1].append(token)
    assert not documents[-1], "the end token is the last"
    return documents[:-1]


def test_the_prepared_folder_holds_the_tokenizer_itself(model: Path, texts: Path, tmp_path: Path) -> None:
    data = TextDataModule(
        data_dir=str(tmp_path / "store"), source=str(texts), tokenizer_dir=str(model), vocabulary_size=None, sequence_length=16,
        micro_batch_size=2, validation_fraction=0.2, prepare_workers=2,
    )  # fmt: skip
    data.check()
    data.prepare_data()
    data.setup()
    assert data.vocabulary_size == 600
    kept = load_tokenizer(tmp_path / "store")
    assert isinstance(kept, HuggingFaceTokenizer) and kept.fingerprint == HuggingFaceTokenizer(model).fingerprint
    assert pickle.loads(pickle.dumps(kept)).decode(kept.encode("def f(x): ...")) == "def f(x): ..."
    file = tmp_path / "store" / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer.json has"):
        data.setup()


def test_what_cannot_be_a_tokenizer_is_named(model: Path, texts: Path, tmp_path: Path) -> None:
    def config(**changes: object) -> PrepareConfig:
        return PrepareConfig(**{"output": tmp_path / "store", "source": str(texts), "tokenizer_dir": model, **changes})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="has a vocabulary of 600, not vocabulary_size=8192: use that number"):
        prepare(config())
    with pytest.raises(ValueError, match=r"is Hugging Face's, and has no control symbol '\[MASK\]'"):
        prepare(config(vocabulary_size=None, control_symbols=("[MASK]",)))
    with pytest.raises(ValueError, match="vocabulary_size=None is that of tokenizer_dir, which names no folder"):
        config(vocabulary_size=None, tokenizer_dir=None)
    with pytest.raises(ValueError, match="cannot be read"):
        prepare(config(tokenizer_dir=texts))
    bare = transformers.AutoTokenizer.from_pretrained(model)
    bare.eos_token = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="has no eos_token to end documents with"):
        prepare(config(tokenizer_dir=tmp_path / "bare", vocabulary_size=None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare"]
