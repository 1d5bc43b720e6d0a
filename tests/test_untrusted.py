"""Names, sizes and JSON of untrusted files."""

import os

import pytest

from lightning_ptdp.base.untrusted import inside, parse_json, read_bytes, read_json

_BAD_NAMES = [
    "",
    ".",
    "..",
    "../a",
    "a/../b",
    "/a",
    "a//b",
    "./a",
    "a/",
    "a\0",
    "a\n",
    "\ud800",
    "a\\b",
    "C:a",
    "a" * 256,
    3,
    None,
    ["a"],
]


@pytest.mark.parametrize("name", _BAD_NAMES)
def test_name_outside_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is not the name of a file inside"):
        inside(tmp_path, name)


def test_name_inside_folder_is_accepted_without_links(tmp_path):
    assert inside(tmp_path, "train/chunk-0-1.bin") == tmp_path / "train" / "chunk-0-1.bin"
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "link/a", "dangling"):
        with pytest.raises(ValueError, match="is a link"):
            inside(tmp_path, name)
    # The path of the folder itself may contain links.
    assert inside(tmp_path / "link", "a") == tmp_path / "link" / "a"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 100_000, "64 levels deep"),
        (b"[" * 65 + b"]" * 65, "64 levels deep"),
        (b"1" * 5000, "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[" + b"[]," * 1_100_000 + b"1]", "values"),
    ],
)
def test_invalid_or_oversized_json_is_refused(data, words):
    with pytest.raises(ValueError, match=words):
        parse_json(data)


def test_special_or_oversized_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="not a regular file"):
            read_bytes(tmp_path / name)
    with open(tmp_path / "sparse", "wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match="1099511627776 bytes"):
        read_json(tmp_path / "sparse")
    (tmp_path / "good.json").write_bytes(b"[" * 64 + b"7" + b"]" * 64)
    assert read_json(tmp_path / "good.json")
