"""The verb ``ptdp convert``: conversion between our checkpoints and other file formats."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from lightning_ptdp.base.errors import one_line
from lightning_ptdp.base.option_types import check_writable_folder
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.cli.command_line import DTYPE, VerbOption, dtype_of, verb_parser
from lightning_ptdp.cli.failures import UserError

_DESCRIPTION = """\
Convert between a checkpoint (a folder, or the single file that one process writes) and

  a Hugging Face folder   config.json and safetensors, sharded or not (GPT-2, Llama, Mixtral and BERT for models of this package; any for
                          LitCausalLM and LitMaskedLM, and another LightningModule that wraps such a model, with --names hf and --config)
  a peft adapter          adapter_model.safetensors and adapter_config.json, from a checkpoint of adapters; --merge writes the
                          complete Hugging Face folder instead
  a state dict            .pt, .pth, .bin or .safetensors
  a Lightning checkpoint  one .ckpt file, as LightningModule.load_from_checkpoint reads it

on one process, for any layout in which the checkpoint was trained. The values do not change, unless --dtype converts them.

examples:
  ptdp convert runs/last.ckpt gpt2-hf                  for AutoModelForCausalLM.from_pretrained("gpt2-hf")
  ptdp convert llama-hf start.ckpt                     then: ptdp fit --init_from start.ckpt …
  ptdp convert bert-hf start.ckpt --names hf           for a LightningModule with self.model = BertForMaskedLM(…)
  ptdp convert runs/last.ckpt model.safetensors --prefix model."""
_OPTIONS = (
    VerbOption(
        "to",
        Literal["checkpoint", "huggingface", "adapter", "state_dict", "lightning"],
        "kind of the target (default: derived from the source and the target's suffix)",
    ),
    VerbOption(
        "names",
        Literal["ptdp", "hf"],
        "from Hugging Face: use names of the model of this package (default), or keep "
        "those of Hugging Face",
        "ptdp",
    ),
    VerbOption(
        "prefix",
        str,
        "attribute of the model in the LightningModule, with a dot (default: for Hugging "
        "Face, 'model.' when reading and the common prefix of all names when writing; "
        "for state dicts none)",
    ),
    VerbOption(
        "config",
        str,
        "to Hugging Face, for your own module that wraps a Hugging Face model: its "
        "config.json or its folder",
    ),
    VerbOption(
        "merge",
        None,
        "from a checkpoint of adapters: write the full model, with the adapters merged "
        "into its weights",
    ),
    VerbOption(
        "verify",
        None,
        "to Hugging Face: load the folder with transformers and compare it with the checkpoint",
    ),
    VerbOption(
        "register",
        str,
        "to Hugging Face: add it to MLflow's registry, as the next version of this model",
    ),
    VerbOption(
        "tracking_uri", str, "MLflow store of --register (default: that of the checkpoint's run)"
    ),
    VerbOption(
        "shard_size",
        str,
        "maximum bytes of one Hugging Face file, such as 500MB (default 5GB)",
        "5GB",
    ),
    DTYPE,
)
_CARD = "README.md"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def run(verb: str, arguments: list[str]) -> int:
    """Parse the command line and convert."""
    parser = verb_parser(verb, _DESCRIPTION, _OPTIONS)
    parser.add_argument("source", help="the source")
    parser.add_argument(
        "destination", help="the target; an existing file, checkpoint or export there is replaced"
    )
    parser.add_argument(
        "--push_to_hub",
        "--push-to-hub",
        metavar="REPOSITORY",
        help="to Hugging Face: upload it to this repository of the Hugging Face Hub (user/model), "
        "which is made as a private one if it does not exist",
    )
    args = vars(parser.parse_args(arguments))
    shard_bytes = _bytes(args.pop("shard_size"))
    verify = args.pop("verify")
    if verify and args["merge"]:
        raise UserError(
            "--verify compares a folder with the checkpoint, but with --merge the checkpoint "
            "has only the adapters. Leave --verify out"
        )
    if "://" not in args["destination"]:
        place = Path(args["destination"]).absolute()
        check_writable_folder(place.parent, f"destination {args['destination']}")
    name = args.pop("register")
    store = args.pop("tracking_uri")
    registry = _registry(name, args["source"], store) if name is not None else None
    repository = args.pop("push_to_hub")
    from lightning_ptdp.exchange import convert, kind_of_result, verify_export

    if verify or registry or repository:
        result = kind_of_result(
            **{key: args[key] for key in ("source", "destination", "to", "merge")}
        )
        if result != "huggingface":
            raise UserError(
                "--verify, --register and --push_to_hub need a Hugging Face folder, but "
                f"{args['destination']} would be of the kind {result!r}"
            )
    if repository is not None:
        client = _make_repository(repository)
    kind = convert(**args | {"dtype": dtype_of(args["dtype"])}, shard_bytes=shard_bytes)
    print(f"written: {args['destination']} ({kind})")
    if verify:
        report = verify_export(
            args["source"], args["destination"], config=args["config"], prefix=args["prefix"]
        )
        print(f"verified: {report}")
    if registry is not None:
        _register(args["destination"], str(name), registry, source=args["source"])
    if repository is not None:
        _push_folder(client, repository, args["destination"], source=args["source"])
        print(f"uploaded: {repository}")
    return 0


def _registry(name: str, source: str, store: str | None) -> tuple[str, str | None]:
    """Return the MLflow store in which the model is registered, and the run in it."""
    from lightning_ptdp.loggers.mlflow_entities import store_of
    from lightning_ptdp.loggers.tracking_store import check_store

    registry = store_of(source) if store is None else (store, None)
    if registry is None:
        raise UserError(
            f"--register {name}: {source} is not beside an MLflow store. Give the store with "
            "--tracking_uri"
        )
    check_store(registry[0])
    return registry


def _register(folder: str, name: str, registry: tuple[str, str | None], *, source: str) -> None:
    from lightning_ptdp.loggers.mlflow_entities import log_folder

    uri, run_id = registry
    call = log_folder(folder, name=name, tracking_uri=uri, run_id=run_id, version_of=source)
    print(f"registered: {call}, store {uri}")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", text.strip(), re.IGNORECASE)
    if match is None or float(match.group(1)) * _UNITS[match.group(2).upper()] < 1:
        raise UserError(f"--shard_size {text} is not a size. Use a form like 500MB or 5GB")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def _make_repository(repository: str) -> Any:
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


def _push_folder(client: Any, repository: str, folder: str, *, source: str) -> None:
    """Upload a folder, and a model card if the repository has none.

    Raises:
        UserError: The upload failed; the folder remains.
    """
    try:
        if not client.file_exists(repository, _CARD):
            card = _model_card(repository, source).encode()
            client.upload_file(path_or_fileobj=card, path_in_repo=_CARD, repo_id=repository)
        client.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:
        raise UserError(
            f"{folder} is written, but its upload failed ({one_line(error)}). Try again with: "
            f"hf upload {repository} {folder}"
        ) from error


def _model_card(repository: str, source: str) -> str:
    """Return a model card with the layout and the steps of the checkpoint ``source``."""
    from lightning_ptdp.checkpoint import read_metadata
    from lightning_ptdp.checkpoint.metadata import METADATA_FILE

    run = read_metadata(source).run if Path(source, METADATA_FILE).is_file() else {}
    names = {"layout": "layout", "global_step": "steps"}
    lines = "".join(f"\n- {label}: {run[key]}" for key, label in names.items() if key in run)
    return (
        "---\nlibrary_name: transformers\ntags: [lightning-ptdp]\n---\n\n"
        f"# {repository.rpartition('/')[2]}\n\nTrained with lightning-ptdp.\n{lines}\n"
    )
