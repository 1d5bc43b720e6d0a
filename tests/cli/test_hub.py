"""``ptdp convert --push_to_hub`` with a stand-in of the Hub's client."""

from pathlib import Path

import huggingface_hub
import pytest

from tests.models.hf_models import hf_gpt2

pytestmark = pytest.mark.thorough


class Client:
    """Records the calls of ``HfApi``."""

    def __init__(self):
        self.made = []
        self.files = {}
        self.error = None

    def create_repo(self, repo_id, *, private, exist_ok):
        if self.error is not None:
            raise self.error
        self.made.append((repo_id, private, exist_ok))

    def file_exists(self, repo_id, name):
        return name in self.files

    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id):
        self.files[path_in_repo] = path_or_fileobj

    def upload_folder(self, *, repo_id, folder_path):
        self.files |= {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}


@pytest.fixture
def client(monkeypatch):
    found = Client()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    return found


def test_export_is_uploaded_with_model_card(ptdp, client, config, tmp_path):
    options = ["--trainer.strategy=ptdp", "--trainer.max_steps=2", "--sample=null"]
    assert ptdp("fit", "--config", config, *options)[0] == 0
    (run,) = (tmp_path / "runs" / "tiny").iterdir()
    checkpoint = run / "checkpoints" / "last.ckpt"
    out = tmp_path / "out"
    arguments = ["convert", str(checkpoint), str(out), "--push_to_hub", "me/mine"]
    code, printed, err = ptdp(*arguments)
    assert code == 0, err
    assert printed.splitlines()[-1] == "uploaded: me/mine"
    assert client.made == [("me/mine", True, True)]
    card = client.files.pop("README.md").decode()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# mine\n" in card
    assert "\n\n- layout: t1 p1 d1\n- steps: 2\n" in card
    assert client.files == {path.name: path.read_bytes() for path in out.iterdir()}
    client.files["README.md"] = b"mine"
    assert ptdp(*arguments)[0] == 0
    assert client.files["README.md"] == b"mine", "an edited card is replaced"


def test_impossible_upload_is_refused_before_conversion(ptdp, client, tmp_path, monkeypatch):
    hf_gpt2().save_pretrained(tmp_path / "theirs")
    assert ptdp("convert", str(tmp_path / "theirs"), str(tmp_path / "start"))[0] == 0
    out = tmp_path / "out"
    arguments = ["convert", str(tmp_path / "start"), str(out), "--push-to-hub", "me/mine"]
    client.error = ConnectionError("no route")
    refusals = [("the Hub does not accept it (no route)", arguments)]
    refusals.append(("need a Hugging Face folder", [*arguments, "--to", "state_dict"]))
    for words, line in refusals:
        code, printed, err = ptdp(*line)
        assert (code, printed) == (2, "")
        assert words in err
        assert not out.exists()
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    code, printed, err = ptdp(*arguments)
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert "--push_to_hub me/mine needs a token of the Hugging Face Hub" in err
    assert not out.exists()
    assert client.made == []
