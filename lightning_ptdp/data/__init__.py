"""Data modules, and everything between text on disk and batches of tokens.

- ``prepare(PrepareConfig(output=..., source=...))`` tokenizes text once, into a folder.
- ``TextDataModule`` (for a GPT) and ``BertDataModule`` read such a folder for a Trainer.
- ``MixtureDataModule`` reads several such folders.
- ``IndexedDataModule`` reads files that Megatron-LM prepared.
- ``ChatDataModule`` reads conversations, written with the model's own tokenizer.
  ``ImageChatDataModule`` reads those with images, and ``PreferenceDataModule`` reads pairs.

Lower layers: ``Corpus`` reads documents. ``Tokenizer`` turns text into ids. ``TokenStream`` returns
blocks of tokens by number, ``BertStream`` masked pairs. ``TokenLoader`` and ``EvaluationLoader``
distribute samples over the replicas.

litdata, sentencepiece, transformers and datasets are imported on first use.
"""

from lightning_ptdp.data.bert_datamodule import BertDataModule, BertStream
from lightning_ptdp.data.chat_datamodule import ChatDataModule, PreferenceDataModule
from lightning_ptdp.data.chat_stream import ChatStream
from lightning_ptdp.data.corpus import Corpus, Document, ReadReport
from lightning_ptdp.data.corpus_build import PrepareConfig
from lightning_ptdp.data.data_error import CorpusError, DataError, StoreError, TokenizerError
from lightning_ptdp.data.datamodule import PreparedDataModule, TextDataModule, fetch
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer
from lightning_ptdp.data.image_chat_datamodule import ImageChatDataModule
from lightning_ptdp.data.indexed_datamodule import IndexedDataModule, IndexedFile, indexed_stream
from lightning_ptdp.data.loader import EvaluationLoader, TokenLoader
from lightning_ptdp.data.manifest import Manifest, verify_store
from lightning_ptdp.data.mixture import CorpusOptions, MixtureDataModule, MixtureStream
from lightning_ptdp.data.prepare import PreparedData, check_prepare, prepare
from lightning_ptdp.data.stream import TokenStream
from lightning_ptdp.data.stream_datamodule import StreamDataModule
from lightning_ptdp.data.tokenizer import Tokenizer

__all__ = [
    "BertDataModule",
    "BertStream",
    "ChatDataModule",
    "ChatStream",
    "Corpus",
    "CorpusError",
    "CorpusOptions",
    "DataError",
    "Document",
    "EvaluationLoader",
    "HuggingFaceTokenizer",
    "ImageChatDataModule",
    "IndexedDataModule",
    "IndexedFile",
    "Manifest",
    "MixtureDataModule",
    "MixtureStream",
    "PreferenceDataModule",
    "PrepareConfig",
    "PreparedData",
    "PreparedDataModule",
    "ReadReport",
    "StoreError",
    "StreamDataModule",
    "TextDataModule",
    "TokenLoader",
    "TokenStream",
    "Tokenizer",
    "TokenizerError",
    "check_prepare",
    "fetch",
    "indexed_stream",
    "prepare",
    "verify_store",
]
