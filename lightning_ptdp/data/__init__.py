"""Text to token batches.

``prepare(PrepareConfig(output=..., source=...))`` turns text into a folder of tokens once;
``TextDataModule`` (for a GPT) or ``BertDataModule`` hands it to a Trainer, ``MixtureDataModule``
several such folders, ``IndexedDataModule`` what Megatron-LM has prepared, and ``ChatDataModule``
conversations with a model's own tokenizer.
Below them: ``Corpus`` reads documents, ``Tokenizer`` makes ids, ``TokenStream`` gives blocks of
tokens and ``BertStream`` masked pairs by number, and ``TokenLoader`` and ``EvaluationLoader``
decide which replica reads which. litdata, sentencepiece, transformers and datasets are imported
when they are used."""

from lightning_ptdp.data.bert_datamodule import BertDataModule
from lightning_ptdp.data.bert_stream import BertStream
from lightning_ptdp.data.chat_datamodule import ChatDataModule
from lightning_ptdp.data.chat_stream import ChatStream
from lightning_ptdp.data.corpus import Corpus, Document, ReadReport
from lightning_ptdp.data.data_config import PrepareConfig
from lightning_ptdp.data.data_error import CorpusError, DataError, StoreError, TokenizerError
from lightning_ptdp.data.datamodule import TextDataModule
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer
from lightning_ptdp.data.indexed import IndexedFile
from lightning_ptdp.data.indexed_datamodule import IndexedDataModule
from lightning_ptdp.data.indexed_stream import IndexedStream
from lightning_ptdp.data.loader import EvaluationLoader, TokenLoader
from lightning_ptdp.data.manifest import Manifest, verify_store
from lightning_ptdp.data.mixture_datamodule import CorpusOptions, MixtureDataModule
from lightning_ptdp.data.mixture_stream import MixtureStream
from lightning_ptdp.data.prepare import PreparedData, check_prepare, prepare
from lightning_ptdp.data.remote import fetch
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
    "IndexedDataModule",
    "IndexedFile",
    "IndexedStream",
    "Manifest",
    "MixtureDataModule",
    "MixtureStream",
    "PrepareConfig",
    "PreparedData",
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
    "prepare",
    "verify_store",
]
