"""Upload of an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.checkpoint import read_metadata
from lightning_ptdp.checkpoint.metadata import METADATA_FILE
from lightning_ptdp.cli.error_messages import UserError

_CARD = "README.md"


def make_repository(repository: str) -> Any:
    """Make a private repository, unless it exists, and return the client of the Hub.

    Raises:
        UserError: There is no token, or the Hub does not answer or refuses.
    """
    import_optional("transformers")  # installs huggingface_hub
    hub = import_optional("huggingface_hub")
    if hub.get_token() is None:
        raise UserError(
            f"--push_to_hub {repository} needs a token of the Hugging Face Hub. Run hf auth login, "
            "or set HF_TOKEN"
        )
    client = hub.HfApi()
    try:
        client.create_repo(repository, private=True, exist_ok=True)
    except Exception as error:  # of HTTP, of the connection, of the name
        raise UserError(
            f"--push_to_hub {repository}: the Hub does not accept it ({one_line(error)}). Check its "
            "name (user/model), the token's permission to write, and the network"
        ) from error
    return client


def push_folder(client: Any, repository: str, folder: str, *, source: str) -> None:
    """Upload a folder, and a model card if the repository has none.

    Raises:
        UserError: The upload failed; the folder remains.
    """
    try:
        if not client.file_exists(repository, _CARD):
            card = model_card(repository, source).encode()
            client.upload_file(path_or_fileobj=card, path_in_repo=_CARD, repo_id=repository)
        client.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:
        raise UserError(
            f"{folder} is written, but its upload failed ({one_line(error)}). Try again with: "
            f"hf upload {repository} {folder}"
        ) from error


def model_card(repository: str, source: str) -> str:
    """Return a model card with the layout and the steps of the checkpoint ``source``."""
    run = read_metadata(source).run if Path(source, METADATA_FILE).is_file() else {}
    names = {"layout": "layout", "global_step": "steps"}
    lines = "".join(f"\n- {label}: {run[key]}" for key, label in names.items() if key in run)
    return (
        "---\nlibrary_name: transformers\ntags: [lightning-ptdp]\n---\n\n"
        f"# {repository.rpartition('/')[2]}\n\nTrained with lightning-ptdp.\n{lines}\n"
    )
