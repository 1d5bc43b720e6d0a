"""``ptdp generate``: text from a checkpoint alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_ptdp.cli.errors import UserError
from lightning_ptdp.generation.sampling import Sampling

__all__ = ["SampleOptions", "run", "write_text"]


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Sampling):
    __doc__ = f"""{Sampling.__doc__}        prompt: Text to continue.
    """

    prompt: str = "def "


def run(verb: str, arguments: list[str]) -> int:
    """Parse the command line and print the text."""
    parser = ArgumentParser(
        prog=f"ptdp {verb}",
        description="Write text with a trained checkpoint, on one process; the layout it was trained in does not matter.",
    )
    parser.add_argument("--checkpoint", type=str, required=True, help="a checkpoint that ptdp fit wrote")
    parser.add_argument(
        "--tokenizer", type=str, help="folder that ptdp prepare made; without it the one that the checkpoint names"
    )
    parser.add_class_arguments(SampleOptions, as_group=False)
    given = vars(parser.parse_args(arguments))
    checkpoint, tokenizer = given.pop("checkpoint"), given.pop("tokenizer")
    print(write_text(checkpoint, SampleOptions(**given), tokenizer_folder=tokenizer))
    return 0


def write_text(checkpoint: str, options: SampleOptions, *, tokenizer_folder: str | None = None) -> str:
    """The prompt and its continuation.

    Args:
        checkpoint: A checkpoint folder, or a single file of Lightning's.
        options: How to write.
        tokenizer_folder: Folder of the tokenizer; None: the data folder that the checkpoint names.

    Raises:
        UserError: The checkpoint is missing, holds no model of ours, or names no tokenizer.
        CheckpointError, TokenizerError: One of them is damaged.
    """
    from lightning_ptdp.data.huggingface_tokenizer import load_tokenizer
    from lightning_ptdp.generation import generate
    from lightning_ptdp.models import GPTConfig

    state, weights = _read(checkpoint)
    tokenizer = load_tokenizer(tokenizer_folder or _tokenizer_folder(state, checkpoint))
    module = _build(state, weights, checkpoint)
    if not isinstance(getattr(module, "config", None), GPTConfig):
        raise UserError(f"--checkpoint {checkpoint} holds a {type(module).__name__}, which is not one of our language models")
    if tokenizer.vocabulary_size > module.config.vocabulary_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocabulary_size} pieces and the model {module.config.vocabulary_size}: name the "
            "tokenizer that the model was trained with (--tokenizer)"
        )
    # A document begins after the end token of the one before it.
    prompt = tokenizer.encode(options.prompt) or [tokenizer.eos_id]
    (written,) = generate(module, [prompt], options, eos_ids=(tokenizer.eos_id,))
    return tokenizer.decode([*prompt, *written])


def _read(checkpoint: str) -> tuple[Mapping[str, Any], Mapping[str, object]]:
    """Lightning's state and the model's whole tensors, by name."""
    from lightning_ptdp.checkpoint import CheckpointError, read_full, read_state
    from lightning_ptdp.cli.checks import check_checkpoint
    from lightning_ptdp.exchange import open_state_dict

    check_checkpoint("--checkpoint", checkpoint)
    if Path(checkpoint).is_dir():
        return read_state(checkpoint), read_full(checkpoint)
    try:
        weights, state = open_state_dict(checkpoint)
    except CheckpointError as error:
        raise UserError(f"--checkpoint {checkpoint} is not a Lightning checkpoint ({error})") from error
    return state, weights


def _build(state: Mapping[str, Any], weights: Mapping[str, object], checkpoint: str) -> Any:
    """The LightningModule with its weights; LitGPT unless the checkpoint names another class."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.cli import instantiate_module

    from lightning_ptdp.models import LitGPT

    arguments = {name: value for name, value in state.get("hyper_parameters", {}).items() if name != "_instantiator"}
    if "_class_path" in arguments:
        module = instantiate_module(LightningModule, arguments)
    elif arguments.keys() - inspect.signature(LitGPT).parameters.keys():
        raise UserError(
            f"--checkpoint {checkpoint} holds no LitGPT (its settings are {', '.join(sorted(arguments))}); a BERT, for one, writes no text"
        )
    elif "config" in arguments:
        module = LitGPT(**arguments)
    else:
        raise UserError(f"--checkpoint {checkpoint} does not say which model it holds: save_hyperparameters() was not called")
    module.configure_model()
    module.load_state_dict(weights)
    return module.eval()


def _tokenizer_folder(state: Mapping[str, Any], checkpoint: str) -> str:
    from lightning_ptdp.exchange.tokenizers import tokenizer_folder

    folder = tokenizer_folder(state)
    if folder is None:
        raise UserError(f"--checkpoint {checkpoint} does not name its tokenizer: give the prepared folder with --tokenizer")
    return folder
