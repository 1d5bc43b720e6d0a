"""The verb ``ptdp ckpt``: inspect, verify or reshard a checkpoint."""

from __future__ import annotations

import json
import math
import zipfile
from argparse import Namespace
from datetime import datetime
from typing import TYPE_CHECKING

from rich.filesize import decimal

from lightning_ptdp.cli.command_line import DTYPE, VerbOption, add_options, dtype_of, verb_parser
from lightning_ptdp.cli.failures import UserError

if TYPE_CHECKING:
    from lightning_ptdp.checkpoint import CheckpointMetadata


_EXIT_CODES = "Exit codes: 0 no problem found, 2 damaged or not a checkpoint."
_INSPECT_OPTIONS = (
    VerbOption("tensors", None, "list every tensor with its shape and dtype"),
    VerbOption("json", None, "print the output as JSON"),
)
_RESHARD_OPTIONS = (
    VerbOption("files", int, "number of data files (default 1)", 1, dest="num_files"),
    VerbOption("weights_only", None, "leave out the optimizer and the schedulers"),
    DTYPE,
)


def run(verb: str, arguments: list[str]) -> int:
    """Parse the command line and run the chosen command."""
    parser = verb_parser(verb, "Inspect, verify or reshard a checkpoint.", epilog=_EXIT_CODES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="show the content and the run that wrote it",
        description="Show the content of a checkpoint, without reading its tensors.",
    )
    inspect.add_argument(
        "path", help="a checkpoint folder, the link 'latest', or Lightning's single file"
    )
    add_options(inspect, _INSPECT_OPTIONS)
    inspect.set_defaults(action=_inspect)
    verify = commands.add_parser(
        "verify",
        help="check all data against the checksums",
        description="Read every byte of a checkpoint and compare it with its checksums.",
        epilog=_EXIT_CODES,
    )
    verify.add_argument("path", nargs="+", help="checkpoint folders or Lightning's single files")
    verify.set_defaults(action=_verify)
    reshard = commands.add_parser(
        "reshard",
        help="rewrite with another number of files or dtype, or weights only",
        description="Rewrite a checkpoint, tensor by tensor. Every layout can read every "
        "checkpoint without this; the result is easier to move or smaller.",
    )
    reshard.add_argument("source", help="a checkpoint folder, or Lightning's single file")
    reshard.add_argument("destination", help="the folder to create")
    add_options(reshard, _RESHARD_OPTIONS)
    reshard.set_defaults(action=_reshard)
    options = parser.parse_args(arguments)
    return int(options.action(options))


def _inspect(options: Namespace) -> int:
    from lightning_ptdp.checkpoint import read_metadata
    from lightning_ptdp.checkpoint.remote_path import located
    from lightning_ptdp.exchange.state_dict_files import file_metadata

    metadata = (file_metadata if located(options.path).is_file() else read_metadata)(options.path)
    if options.json:
        print(json.dumps(_summary(metadata) | {"tensors": _tensors(metadata)}, indent=1))
        return 0
    for key, value in _summary(metadata).items():
        if key == "experiment":  # one line per option; --json prints them
            continue
        print(f"{key:<16}{_shown(value)}")
    if options.tensors:
        print()
        for name, (shape, dtype) in _tensors(metadata).items():
            print(f"{name}  {'x'.join(map(str, shape)) or 'scalar'}  {dtype}")
    return 0


def _verify(options: Namespace) -> int:
    from lightning_ptdp.checkpoint import CheckpointError, verify_checkpoint
    from lightning_ptdp.checkpoint.remote_path import located
    from lightning_ptdp.exchange.state_dict_files import verify_file

    failed: list[CheckpointError] = []
    for path in options.path:
        try:
            metadata = (verify_file if located(path).is_file() else verify_checkpoint)(path)
        except CheckpointError as error:
            failed.append(error)
            print(f"{path}: damaged or not a checkpoint", flush=True)
        else:
            print(
                f"{path}: undamaged, {decimal(sum(entry.size for entry in metadata.files.values()))}",
                flush=True,
            )
    if failed:
        raise CheckpointError("\n".join(map(str, failed)))
    return 0


def _reshard(options: Namespace) -> int:
    from lightning_ptdp.checkpoint import files, read_metadata, reshard_checkpoint
    from lightning_ptdp.checkpoint.metadata import METADATA_FILE
    from lightning_ptdp.checkpoint.remote_path import located
    from lightning_ptdp.exchange.state_dict_files import as_folder

    if located(options.source).is_file() and not options.weights_only:
        raise UserError(
            f"{options.source} is a file, in which optimizer states have positions instead of "
            "names. Add --weights_only"
        )
    # A checkpoint of a training run may be replaced, as training itself does. No other file may.
    files.check_replaceable(
        options.destination, marker=METADATA_FILE, or_file=zipfile.is_zipfile(options.destination)
    )
    arguments = {name: value for name, value in vars(options).items() if name != "action"}
    with as_folder(options.source, target=options.destination) as source:
        reshard_checkpoint(**arguments | {"source": source, "dtype": dtype_of(options.dtype)})
    entries = read_metadata(options.destination).files
    print(
        f"written: {options.destination} ({decimal(sum(entry.size for entry in entries.values()))} "
        f"in {len(entries) + 1} files)"
    )
    return 0


def _summary(metadata: CheckpointMetadata) -> dict[str, object]:
    """Return the printed properties of a checkpoint by key."""
    dtypes = {
        str(entry.dtype).removeprefix("torch.")
        for name, entry in metadata.tensors.items()
        if name.startswith("model/")
    }
    return {
        "written": datetime.fromtimestamp(metadata.created)
        .astimezone()
        .isoformat(timespec="seconds"),
        **{key: value for key, value in metadata.run.items() if key != "aliases"},
        "model": f"{_count(metadata, 'model/')} ({', '.join(sorted(dtypes))})",
        "optimizer": _count(metadata, "optimizer/"),
        "tied": dict(metadata.aliases),
        "files": {name: entry.size for name, entry in metadata.files.items()},
        "packages": dict(metadata.packages),
        "format": metadata.format_version,
    }


def _count(metadata: CheckpointMetadata, prefix: str) -> str:
    sizes = [math.prod(metadata.tensors[name].shape) for name in metadata.names(prefix)]
    return f"{sum(sizes):,} elements in {len(sizes)} tensors" if sizes else "none"


def _tensors(metadata: CheckpointMetadata) -> dict[str, tuple[list[int], str]]:
    return {
        name: (list(entry.shape), str(entry.dtype).removeprefix("torch."))
        for name, entry in sorted(metadata.tensors.items())
    }


def _shown(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    return (
        ", ".join(
            f"{key} {decimal(item) if isinstance(item, int) else item}"
            for key, item in value.items()
        )
        or "none"
    )
