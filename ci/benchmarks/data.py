"""Speed of the data room beside what it is built on.

Run: python ci/benchmarks/data.py [--rounds 5]

Prepares the default corpus (the standard library's sources; with --smoke, one package of it) and
reads it. Peers, on the same text or the same chunks in the same run, alternating with ours:

- preparing: sentencepiece alone, learning the same vocabulary from the same lines and encoding the
  same documents with as many threads, which then writes nothing and checks nothing;
- reading: litdata's own StreamingDataLoader, shuffled, over the same chunks with the same block and
  batch size, with 0 and 2 workers (new worker processes for every pass, as for every epoch).

A ratio below 1 is faster. The last line is the rows as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Comparison, compare, parse_options, report

SEQUENCE_LENGTH = 256
BATCH_SIZE = 16
VOCABULARY = 8192


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="passes of each reader; preparing is repeated at most three times",
    )
    parser.set_defaults(source=None, vocabulary=VOCABULARY)
    small = {"source": str(Path(asyncio.__file__).parent), "vocabulary": 1024}
    options = parse_options(parser, rounds=1, **small)
    rounds = options.rounds
    # Imports are not what is measured.
    import litdata  # noqa: F401
    import sentencepiece  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        rows = [prepare_result(Path(folder), options, min(rounds, 3))]
        rows += [read_result(Path(folder, "0"), num_workers, rounds) for num_workers in (0, 2)]
    report("data: seconds for the same work", rows)


def prepare_result(folder: Path, options: argparse.Namespace, rounds: int) -> Comparison:
    """Preparing the corpus; leaves a prepared folder ``0``."""
    from lightning_ptdp.data import Corpus, PrepareConfig, prepare

    texts = [document.text for document in Corpus(source=options.source).documents()]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    numbers = iter(range(rounds))

    def ours() -> None:
        prepare(
            PrepareConfig(
                output=folder / str(next(numbers)),
                source=options.source,
                vocabulary_size=options.vocabulary,
            )
        )

    times = alternate(ours, lambda: sentencepiece_alone(texts, options.vocabulary), rounds)
    return compared(
        "prepare default corpus", times, megabytes, "MB/s", "sentencepiece train + encode"
    )


def sentencepiece_alone(texts: list[str], vocabulary: int) -> None:
    """Learn and encode with the settings of lightning_ptdp.data.tokenizer."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
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


def read_result(folder: Path, num_workers: int, rounds: int) -> Comparison:
    """One epoch of the training split."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    from lightning_ptdp.data import TokenLoader, TokenStream

    stream = TokenStream(folder, sequence_length=SEQUENCE_LENGTH)
    loader = TokenLoader(stream, batch_size=BATCH_SIZE, num_workers=num_workers)
    dataset = StreamingDataset(
        str(folder / "train"),
        item_loader=TokensLoader(block_size=SEQUENCE_LENGTH + 1),
        shuffle=True,
        drop_last=True,
    )
    peer = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=num_workers)

    def theirs() -> None:
        # The peer hands out blocks of its stored type; a model needs inputs and labels as int64.
        for block in peer:
            tokens = block.long()
            _ = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    times = alternate(lambda: [None for _ in loader], theirs, rounds)
    tokens = len(loader) * BATCH_SIZE * SEQUENCE_LENGTH / 1e6
    return compared(
        f"read, {num_workers} workers", times, tokens, "M tokens/s", "litdata StreamingDataLoader"
    )


def alternate(
    ours: Callable[[], object], peer: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each, measured in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for taken, run in zip(seconds, (ours, peer), strict=True):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
    return seconds


def compared(
    name: str, times: tuple[list[float], list[float]], work: float, rate_unit: str, peer_name: str
) -> Comparison:
    """The row of the report; prints the rates."""
    ours, peer = times
    print(
        f"{name}: {work / statistics.median(ours):.2f} {rate_unit}, {peer_name} "
        f"{work / statistics.median(peer):.2f} {rate_unit}"
    )
    return compare(name=name, ours=ours, peer=peer, peer_name=peer_name, unit="s")


if __name__ == "__main__":
    main()
