"""``generate``, ``convert`` and ``--init_from`` with a single-file checkpoint of Lightning."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file

from lightning_ptdp.checkpoint import CheckpointError
from lightning_ptdp.cli import main
from lightning_ptdp.exchange import convert
from tests.cli.conftest import tiny

pytestmark = pytest.mark.thorough

FORMATS = ("file", "folder")
STRATEGY = "--trainer.strategy=lightning_ptdp.PTDPStrategy"


@pytest.fixture(scope="module")
def written(corpus, prepared, tmp_path_factory):
    """Return checkpoints of the same training as a file and as a folder."""
    found = {}
    for kind in FORMATS:
        folder = tmp_path_factory.mktemp(kind)
        (folder / "tiny.yaml").write_text(tiny(corpus, prepared, folder))
        options = [STRATEGY, f"--trainer.strategy.checkpoint_format={kind}"]
        assert main(["fit", "--config", str(folder / "tiny.yaml"), *options]) == 0
        (found[kind],) = folder.glob("runs/tiny/*/checkpoints/last.ckpt")
    assert found["file"].is_file() and found["folder"].is_dir()
    return found


def test_generated_text_is_equal_for_file_and_folder(written, ptdp):
    texts = []
    for kind in FORMATS:
        code, text, err = ptdp(
            "generate",
            "--checkpoint",
            str(written[kind]),
            "--prompt",
            "a rank",
            "--max_new_tokens",
            "5",
        )
        assert code == 0, err
        texts.append(text)
    assert texts[0] == texts[1]
    assert texts[0].startswith("a rank")


@pytest.mark.parametrize("name", ["hf", "x.safetensors"])
def test_converted_weights_are_equal_for_file_and_folder(written, ptdp, tmp_path, name):
    for kind in FORMATS:
        code, said, err = ptdp("convert", str(written[kind]), str(tmp_path / kind / name))
        assert code == 0, err
        assert ("huggingface" if name == "hf" else "state_dict") in said
        assert [path.name for path in (tmp_path / kind).iterdir()] == [name]
    one, other = (
        sorted(path for path in (tmp_path / kind).rglob("*") if path.is_file()) for kind in FORMATS
    )
    assert [path.name for path in one] == [path.name for path in other]
    for mine, theirs in zip(one, other, strict=True):
        if mine.suffix == ".safetensors":
            found, expected = load_file(mine), load_file(theirs)
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[key]) for key, value in found.items())
        else:
            assert mine.read_bytes() == theirs.read_bytes()


def test_convert_verifies_file_and_writes_folder(written, ptdp, tmp_path):
    code, said, err = ptdp("convert", str(written["file"]), str(tmp_path / "hf"), "--verify")
    assert code == 0, err
    assert "verified" in said
    assert ptdp("convert", str(written["file"]), str(tmp_path / "start.ckpt"))[0] == 0
    assert (tmp_path / "start.ckpt" / "metadata.json").is_file()


def test_file_is_inspected_verified_and_resharded(written, ptdp, tmp_path):
    said = {}
    for kind in FORMATS:
        code, out, err = ptdp("ckpt", "inspect", str(written[kind]), "--json")
        assert code == 0, err
        said[kind] = json.loads(out)
    for key in ("model", "global_step", "epoch"):
        assert said["file"][key] == said["folder"][key]
    models = [
        {name: entry for name, entry in said[kind]["tensors"].items() if name.startswith("model/")}
        for kind in FORMATS
    ]
    assert models[0] == models[1]
    assert said["file"]["optimizer"] != "none"
    assert "undamaged" in ptdp("ckpt", "verify", str(written["file"]))[1]
    content = bytearray(written["file"].read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.ckpt").write_bytes(content)
    assert ptdp("ckpt", "verify", str(tmp_path / "damaged.ckpt"))[0] == 2
    reshard = [
        "ckpt",
        "reshard",
        str(written["file"]),
        str(tmp_path / "small.ckpt"),
        "--dtype",
        "bfloat16",
    ]
    code, _, err = ptdp(*reshard)
    assert (code, "Add --weights_only" in err) == (2, True)
    code, _, err = ptdp(*reshard, "--weights_only")
    assert code == 0, err
    assert (tmp_path / "small.ckpt" / "metadata.json").is_file()


def test_init_from_accepts_file(written, ptdp):
    options = [
        "--config",
        str(written["file"].parents[4] / "tiny.yaml"),
        STRATEGY,
        "--init_from",
        str(written["file"]),
    ]
    code, _, err = ptdp("fit", *options, "--trainer.max_steps", "1")
    assert code == 0, err
    code, _, err = ptdp("fit", *options, "--model.config.hidden_size", "64")
    assert (code, "has the shape" in err) == (2, True)


def test_code_in_file_is_not_executed(tmp_path):
    class Runs:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    content = {
        "state_dict": {"w": torch.zeros(2)},
        "hyper_parameters": {"x": Runs()},
        "lightning_ptdp_parameters": [],
    }
    torch.save(content, tmp_path / "last.ckpt", pickle_module=pickle)
    with pytest.raises(CheckpointError, match="only tensors and plain values are loaded"):
        convert(tmp_path / "last.ckpt", tmp_path / "hf")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "hf").exists()
