"""What transformers reads of the tokenizer that goes along with an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ptdp.data import Tokenizer
from lightning_ptdp.exchange.tokenizers import tokenizer_of

TEXTS = [
    "def main():\n    return 1\n",
    "  h\u00e9llo w\u00f6rld\t x",
    "\u65e5\u672c\u8a9e and \U0001f600",
    "a  b   c\n\n\nclass X: pass",
    "",
]


def test_transformers_gives_the_same_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    ours = Tokenizer.train(TEXTS * 20, vocabulary_size=300)
    (tmp_path / "data").mkdir()
    ours.save(tmp_path / "data")
    written = tokenizer_of({"datamodule_hyper_parameters": {"data_dir": str(tmp_path / "data")}})
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eos_id


def test_there_is_none_where_the_data_are_gone(tmp_path: Path) -> None:
    assert tokenizer_of({}) == tokenizer_of({"datamodule_hyper_parameters": {"data_dir": str(tmp_path / "gone")}}) == {}
