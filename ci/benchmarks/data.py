"""Speed of the data room beside what it is built on.

    python ci/benchmarks/data.py [--repeats 5]

Prepares the default corpus (the standard library's sources) and reads it. Peers, on the same text or the same chunks in the same
run, alternating with ours:

- preparing: sentencepiece alone, learning the same vocabulary from the same lines and encoding the same documents with as many
  threads, which then writes nothing and checks nothing;
- reading: litdata's own StreamingDataLoader, shuffled, over the same chunks with the same block and batch size, with 0 and 2
  workers (new worker processes for every pass, as for every epoch).

The last line is a JSON array; ``ours`` and ``peer`` are median times, so that a ratio below 1 is faster.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SEQUENCE_LENGTH = 256
BATCH_SIZE = 16
VOCABULARY = 8192


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="passes of each reader; preparing is repeated at most three times")
    repeats = parser.parse_args().repeats
    # Imports are not what is measured.
    import litdata  # noqa: F401
    import sentencepiece  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        results = [prepare_result(Path(folder), min(repeats, 3))]
        results += [read_result(Path(folder, "0"), num_workers, repeats) for num_workers in (0, 2)]
    for result in results:
        rates = f"{result.pop('ours_rate'):>9.2f} {result.pop('peer_rate'):>9.2f} {result.pop('rate_unit')}"
        print(f"{result['name']:<24} {result['ours']:>8.3f} s {result['peer']:>8.3f} s  {result['ratio']:>5.2f}   {rates}")
    print(json.dumps(results))


def prepare_result(folder: Path, repeats: int) -> dict:
    """Preparing the default corpus; leaves a prepared folder ``0``."""
    from lightning_ptdp.data import Corpus, PrepareConfig, prepare

    texts = [document.text for document in Corpus().documents()]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    numbers = iter(range(repeats))

    def ours() -> None:
        prepare(PrepareConfig(output=folder / str(next(numbers)), vocabulary_size=VOCABULARY))

    times = alternate(ours, lambda: sentencepiece_alone(texts), repeats)
    return result("prepare default corpus", times, megabytes, "MB/s", "sentencepiece train + encode")


def sentencepiece_alone(texts: list[str]) -> None:
    """Learn and encode with the settings of lightning_ptdp.data.tokenizer."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n"],
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        max_sentence_length=1 << 18,
        num_threads=4,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    processor.encode(texts, out_type=int, num_threads=os.cpu_count() or 1)


def read_result(folder: Path, num_workers: int, repeats: int) -> dict:
    """One epoch of the training split."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    from lightning_ptdp.data import TokenLoader, TokenStream

    stream = TokenStream(folder, sequence_length=SEQUENCE_LENGTH)
    loader = TokenLoader(stream, batch_size=BATCH_SIZE, num_workers=num_workers)
    dataset = StreamingDataset(
        str(folder / "train"), item_loader=TokensLoader(block_size=SEQUENCE_LENGTH + 1), shuffle=True, drop_last=True
    )
    peer = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=num_workers)

    def theirs() -> None:
        # The peer hands out blocks of its stored type; a model needs inputs and labels as int64.
        for block in peer:
            tokens = block.long()
            _ = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    times = alternate(lambda: [None for _ in loader], theirs, repeats)
    tokens = len(loader) * BATCH_SIZE * SEQUENCE_LENGTH / 1e6
    return result(f"read, {num_workers} workers", times, tokens, "M tokens/s", "litdata StreamingDataLoader")


def alternate(ours: Callable[[], object], peer: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of each, measured in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for taken, run in zip(seconds, (ours, peer), strict=True):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def result(name: str, times: tuple[float, float], work: float, rate_unit: str, peer_name: str) -> dict:
    """One entry, with the rates for the table."""
    ours, peer = times
    return {
        "name": name,
        "ours": round(ours, 4),
        "peer": round(peer, 4),
        "peer_name": peer_name,
        "ratio": round(ours / peer, 3),
        "unit": "s",
        "ours_rate": work / ours,
        "peer_rate": work / peer,
        "rate_unit": rate_unit,
    }


if __name__ == "__main__":
    main()
