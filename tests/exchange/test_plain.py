"""Conversion from and to state dicts and Lightning's single file, in Python and by the CLI."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_ptdp.checkpoint import (
    CheckpointError,
    read_full,
    read_metadata,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)
from lightning_ptdp.cli import main
from lightning_ptdp.exchange import convert, kind_of, open_state_dict
from lightning_ptdp.parameters.placement import Placement
from tests.checkpoint.layouts import replicated


class Lit(pl.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = torch.nn.Embedding(5, width)
        self.head = torch.nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))


@pytest.fixture
def checkpoint(tmp_path):
    weight = torch.arange(20.0).view(5, 4)
    tensors = replicated({"embedding.weight": weight, "scale": torch.tensor(3.0)})
    moment = (weight.square(), Placement.replicated((5, 4)))
    tensors["optimizer/0/exp_avg/embedding.weight"] = moment
    state = {
        "hyper_parameters": {"width": 4},
        "epoch": 2,
        "global_step": 7,
        "optimizer_states": [{}],
        "lr_schedulers": [],
    }
    metadata = {"aliases": {"head.weight": "embedding.weight"}, "layout": "t1"}
    save_checkpoint(tmp_path / "c", tensors=tensors, state=state, metadata=metadata)
    return tmp_path / "c"


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.ckpt"])
def test_round_trip_through_state_dict_or_lightning_file(checkpoint, tmp_path, name):
    convert(checkpoint, tmp_path / name)
    assert kind_of(tmp_path / name) == ("lightning" if name == "x.ckpt" else "state_dict")
    module = Lit(4)
    module.load_state_dict(open_state_dict(tmp_path / name)[0])
    assert torch.equal(module.head.weight, torch.arange(20.0).view(5, 4))
    if name == "x.ckpt":
        assert Lit.load_from_checkpoint(tmp_path / name).scale == 3.0
    convert(tmp_path / name, tmp_path / "back")
    found = read_full(tmp_path / "back")
    assert found.keys() == read_full(checkpoint).keys()
    assert all(torch.equal(value, found[key]) for key, value in read_full(checkpoint).items())
    assert verify_checkpoint(tmp_path / "back").run.get("aliases") == (
        {} if name == "x.safetensors" else {"head.weight": "embedding.weight"}
    )
    if name == "x.ckpt":
        assert read_state(tmp_path / "back")["hyper_parameters"] == {"width": 4}
    assert "optimizer_states" not in read_state(tmp_path / "back")


def test_target_below_file_is_refused(checkpoint, tmp_path):
    (tmp_path / "notes").write_text("")
    with pytest.raises(CheckpointError, match=r"writing .*x\.pt failed: .*notes"):
        convert(checkpoint, tmp_path / "notes" / "new" / "x.pt")


def test_tied_parameters_stay_one_tensor_in_another_dtype(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "x.pt", dtype=torch.bfloat16)
    state = torch.load(tmp_path / "x.pt")
    assert state["head.weight"].dtype == torch.bfloat16
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()


def test_prefix_is_removed_and_added(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "x.pt", prefix="embedding.", dtype=torch.bfloat16)
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(state) == ["weight"]
    assert state["weight"].dtype == torch.bfloat16
    convert(tmp_path / "x.pt", tmp_path / "back", prefix="other.")
    assert list(read_full(tmp_path / "back")) == ["other.weight"]
    with pytest.raises(
        CheckpointError, match=r"starts with 'nothing\.'; it has \['embedding\.weight'"
    ):
        convert(checkpoint, tmp_path / "y.pt", prefix="nothing.")
    assert not (tmp_path / "y.pt").exists()


def test_unconvertible_source_or_target_is_refused(checkpoint, tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": {"b": 1}}, tmp_path / "nested.pt")
    torch.save({"f": Lit}, tmp_path / "class.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "nested.pt").read_bytes()[:100])
    (tmp_path / "empty").mkdir()
    for source, words in (
        ("list.pt", "contains a list"),
        ("nested.pt", r"'a' is a dict"),
        ("class.pt", "cannot be read"),
        ("torn.pt", "cannot be read"),
        ("nothing", "does not exist"),
        ("empty", "is not a checkpoint folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            convert(tmp_path / source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="there is nothing to convert"):
        convert(checkpoint, tmp_path / "out", to="checkpoint")
    with pytest.raises(CheckpointError, match="first convert to a checkpoint"):
        convert(tmp_path / "nested.pt", tmp_path / "out", to="huggingface")
    with pytest.raises(CheckpointError, match=r"out.safetensors is a state_dict: there is nothing"):
        convert(tmp_path / "nested.pt", tmp_path / "out.safetensors")
    assert not (tmp_path / "out").exists()


def test_command_line_converts_and_reports_errors(checkpoint, tmp_path, capsys):
    converted = str(tmp_path / "x.safetensors")
    assert main(["convert", str(checkpoint), converted, "--dtype", "float16"]) == 0
    assert "x.safetensors (state_dict)" in capsys.readouterr().out
    assert open_state_dict(converted)[0]["scale"].dtype == torch.float16
    for arguments, words in (
        (["convert", str(tmp_path / "no"), "x"], "no does not exist"),
        (
            ["convert", str(checkpoint), str(tmp_path / "hf")],
            "have no configuration of a model of this package",
        ),
        (
            ["convert", str(checkpoint), "x", "--shard_size", "big"],
            "--shard_size big is not a size",
        ),
        (["ckpt", "inspect", str(tmp_path)], "is not a checkpoint, or is incomplete"),
        (["ckpt", "reshard", str(checkpoint), str(checkpoint)], "which is the source"),
        (
            ["ckpt", "reshard", str(checkpoint), str(tmp_path / "r"), "--files", "0"],
            "num_files=0 must be",
        ),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said


def test_inspect_and_verify_commands(checkpoint, capsys):
    assert main(["ckpt", "inspect", str(checkpoint), "--tensors"]) == 0
    said = capsys.readouterr().out
    for words in (
        "layout          t1",
        "21 elements in 2 tensors (float32)",
        "model/embedding.weight  5x4  float32",
        "scalar",
    ):
        assert words in said
    assert main(["ckpt", "inspect", str(checkpoint), "--json"]) == 0
    assert '"optimizer/0/exp_avg/embedding.weight"' in capsys.readouterr().out
    assert main(["ckpt", "verify", str(checkpoint)]) == 0
    assert "c: undamaged, " in capsys.readouterr().out
    data = checkpoint / "rank0-0.safetensors"
    content = bytearray(data.read_bytes())
    content[-200] ^= 16
    data.write_bytes(content)
    assert main(["ckpt", "verify", str(checkpoint)]) == 2
    captured = capsys.readouterr()
    assert "c: damaged" in captured.out
    assert "rank0-0.safetensors is damaged: the CRC-32 of bytes" in captured.err


def test_reshard_command(checkpoint, tmp_path):
    out = tmp_path / "out"
    assert (
        main(["ckpt", "reshard", str(checkpoint), str(out), "--files", "2", "--dtype", "bfloat16"])
        == 0
    )
    assert len(list(out.glob("rank*.safetensors"))) == 2
    assert torch.equal(
        read_full(out)["embedding.weight"], read_full(checkpoint)["embedding.weight"].bfloat16()
    )
    assert read_full(out, prefix="optimizer/0/exp_avg/")["embedding.weight"].dtype == torch.float32
    assert read_metadata(out).run == read_metadata(checkpoint).run
    assert read_state(out) == read_state(checkpoint)
    assert main(["ckpt", "reshard", str(checkpoint), str(out), "--weights_only"]) == 0
    assert set(read_metadata(out).tensors) == {"model/embedding.weight", "model/scale"}
    assert "optimizer_states" not in read_state(out)
