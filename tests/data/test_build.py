"""Preparation in parallel, after a kill and in bounded memory yields the same bytes."""

import errno
import json
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest

from lightning_ptdp.data import PrepareConfig, StoreError, corpus_build, prepare
from lightning_ptdp.data.preparation_work import work_folder
from tests.data.conftest import config_of, write_corpus
from tests.data.folders import contents

pytestmark = pytest.mark.thorough

WORK = ".store.preparing"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Write small files, a large file, large JSON lines and one text that is not UTF-8."""
    folder = write_corpus(tmp_path_factory.mktemp("mixed") / "text", documents=12)
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    (folder / "big.txt").write_text("".join(texts[:5]))
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[5:])
    )
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 20)
    return folder


def mixed_config(mixed, output, **changes):
    given = {"document_bytes": 4096, "part_bytes": 6000, "tokenizer_characters": 15_000, **changes}
    return config_of(mixed, output, **given)


@pytest.fixture(scope="module")
def single(mixed, tmp_path_factory):
    """Return data prepared by one process in one part."""
    made = prepare(
        mixed_config(mixed, tmp_path_factory.mktemp("single") / "store", part_bytes=1 << 30)
    )
    assert made.manifest.corpus.undecodable == 1
    return made


@pytest.mark.parametrize(("num_workers", "part_bytes"), [(1, 6000), (3, 1), (2, 20_000)])
def test_workers_and_parts_do_not_change_prepared_bytes(
    mixed, single, tmp_path, num_workers, part_bytes
):
    lines = []
    config = mixed_config(mixed, tmp_path / "store", num_workers=num_workers, part_bytes=part_bytes)
    made = prepare(config, progress=lines.append)
    assert contents(made.folder) == contents(single.folder)
    assert os.listdir(tmp_path) == ["store"]
    assert any(line.startswith("tokenize: ") for line in lines)
    assert any("1 texts are not UTF-8" in line for line in lines)


def prepare_until(stop_at, mixed, output, num_workers):
    """Prepare data and kill this process at a line of progress."""

    def progress(line):
        if line.startswith(stop_at):
            os.kill(os.getpid(), signal.SIGKILL)

    prepare(mixed_config(Path(mixed), Path(output), num_workers=num_workers), progress=progress)


def kill_at(stop_at, mixed, output, num_workers):
    process = multiprocessing.get_context("fork").Process(
        target=prepare_until, args=(stop_at, str(mixed), str(output), num_workers)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("stop_at", "num_workers"),
    [
        ("read: 50", 1),
        ("sample: 50", 1),
        ("tokenize: 50", 1),
        ("tokenize: 50", 2),
        ("tokenized", 1),
    ],
)
def test_preparation_resumes_after_kill(mixed, single, tmp_path, stop_at, num_workers):
    kill_at(stop_at, mixed, tmp_path / "store", num_workers)
    assert os.listdir(tmp_path) == [WORK]
    finished = {
        path: path.stat().st_mtime_ns for path in (tmp_path / WORK / "parts").glob("*.json")
    }
    assert bool(finished) == stop_at.startswith("tokenize")
    kept = {path: path.stat().st_mtime_ns for path in finished}
    lines = []

    def look(line):
        lines.append(line)
        if line.startswith("tokenized"):
            kept.update({path: path.stat().st_mtime_ns for path in finished})

    made = prepare(mixed_config(mixed, tmp_path / "store", num_workers=num_workers), progress=look)
    assert kept == finished
    assert any("read before" in line for line in lines) == (stop_at != "read: 50")
    assert contents(made.folder) == contents(single.folder)
    assert os.listdir(tmp_path) == ["store"]


def test_damaged_or_foreign_work_folder_is_not_reused(mixed, single, tmp_path):
    kill_at("tokenized", mixed, tmp_path / "store", 1)
    part = next((tmp_path / WORK / "parts").glob("*.train.bin"))
    part.write_bytes(part.read_bytes()[:-2])
    assert contents(prepare(mixed_config(mixed, tmp_path / "store")).folder) == contents(
        single.folder
    )
    other = mixed_config(mixed, tmp_path / "store", vocabulary_size=300, overwrite=True)
    kill_at("tokenized", mixed, tmp_path / "other", 1)
    (tmp_path / ".other.preparing").rename(tmp_path / WORK)
    assert prepare(other).manifest.vocabulary_size == 300
    assert os.listdir(tmp_path) == ["store"]


def test_full_disk_is_reported_and_preparation_resumes(mixed, single, tmp_path, monkeypatch):
    def full(*_, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_build, "write_chunks", full)
        with pytest.raises(StoreError, match=r"store cannot be written: .*No space left"):
            prepare(mixed_config(mixed, tmp_path / "store"))
    assert os.listdir(tmp_path) == [WORK]
    lines = []
    assert contents(
        prepare(mixed_config(mixed, tmp_path / "store"), progress=lines.append).folder
    ) == contents(single.folder)
    assert any("read before" in line for line in lines)


def hold(output, ready, release):
    with work_folder(Path(output), {}):
        ready()
        release()


def test_concurrent_processes_do_not_share_work_folder(mixed, single, tmp_path):
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(tmp_path / "store"), ready.set, release.wait))
    process.start()
    assert ready.wait(60), "the first process does not start"
    assert contents(prepare(mixed_config(mixed, tmp_path / "store")).folder) == contents(
        single.folder
    )
    assert sorted(os.listdir(tmp_path)) == [WORK, "store"]
    release.set()
    process.join()
    assert os.listdir(tmp_path) == ["store"]


def peak_of(source, output, queue):
    # Memory must hold one chunk, one document and one part, all smaller than the smaller text.
    bounds = {"chunk_tokens": 100_000, "document_bytes": 1 << 19, "part_bytes": 1 << 21}
    config = PrepareConfig(
        output=output, source=source, vocabulary_size=300, tokenizer_characters=50_000, **bounds
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prepare(config)
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_memory_does_not_grow_with_text(tmp_path):
    """Peaks (in KiB) for files of 5 and 20 MB differ by much less than the file sizes."""
    context = multiprocessing.get_context("fork")
    peaks = []
    for megabytes in (5, 20):
        with open(tmp_path / f"{megabytes}.txt", "w") as stream:
            for number in range(megabytes * 100):
                stream.write(
                    f"{number} is the number of this block of text\n"
                    + "some words that come again and again\n" * 270
                )
        queue = context.Queue()
        process = context.Process(
            target=peak_of,
            args=(str(tmp_path / f"{megabytes}.txt"), str(tmp_path / str(megabytes)), queue),
        )
        process.start()
        peaks.append(queue.get(timeout=60))
        process.join()
    assert peaks[0] > 0 and peaks[1] - peaks[0] < 5 * 1024, peaks
