"""Loading of checkpoints: reads stored tensors by global name, and fills this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptdp.checkpoint import (
    CheckpointError,
    InMemory,
    Stored,
    StoredOptimizers,
    StoredWeights,
    TensorReader,
    choose_checkpoint,
    files,
    keeps_history,
    load_history,
    load_indexed_optimizer,
    load_optimizer,
    load_tensors,
    read_state,
    same_outcome,
    verify_checkpoint,
)
from lightning_ptdp.checkpoint.latest import OnDamage, is_folder_of_checkpoints
from lightning_ptdp.checkpoint.optimizer import MASTER, check_same_options
from lightning_ptdp.checkpoint.remote_path import Place, located
from lightning_ptdp.checkpoint.save_agreement import gather, is_rank_zero, own_rank
from lightning_ptdp.checkpoint.tensor_files import load_saved
from lightning_ptdp.exchange import (
    HuggingFaceNames,
    HuggingFaceWeights,
    reads_as_huggingface,
    weights_opener,
)
from lightning_ptdp.models.pretrained_folder import ADAPTER_NAMES
from lightning_ptdp.parameters.rectangle import Rectangle
from lightning_ptdp.shims.lightning import StrategyBase
from lightning_ptdp.strategy.model_space import (
    MODEL,
    Checkpoint,
    GroupNames,
    ModelSpace,
    NamedTensors,
    PathLike,
)


def read_checkpoint(path: Place, strategy: StrategyBase, *, resuming: bool) -> Checkpoint:
    """Read the parts of a checkpoint folder that are not tensors; collective.

    Args:
        path: The folder, the same on all ranks.
        strategy: The strategy. Its option ``on_damage`` applies if training resumes.
        resuming: Whether training resumes from it. Interrupted saves beside it are then completed
            or removed.

    Returns:
        Its content; ``"state_dict"`` is the whole model's, and its tensors are read on access.

    Raises:
        CheckpointError: It is damaged; the same on all ranks. A MissingCheckpointError, also a
            FileNotFoundError: There is none.
    """
    folders = strategy._saves.folders
    if resuming:
        action = f"completing interrupted saves beside {path}"
        with strategy.waiting_in(action), same_outcome(action):
            if is_rank_zero():
                folders.tidy(path if is_folder_of_checkpoints(path) else path.parent)
        path = files.settled(path) if isinstance(path, Path) else path
    with strategy.waiting_in(f"verifying the checkpoint {path}"):
        verify = partial(_verify, ranks=strategy.layout.world_size)
        on_damage: OnDamage = strategy.config.on_damage if resuming else "refuse"
        path = choose_checkpoint(path, on_damage=on_damage, verify=verify)
    if resuming and is_rank_zero():
        folders.go_on_from(path)
    state = read_state(path)
    if resuming:
        check_trained(state, path)
    if "optimizer_states" in state:
        state["optimizer_states"] = StoredOptimizers(state["optimizer_states"], path)
    return {**state, "state_dict": StoredWeights(path)}


def check_trained(state: Mapping[str, object], path: PathLike) -> None:
    """Check that training can resume from a checkpoint.

    Raises:
        CheckpointError: It has only weights.
    """
    if "optimizer_states" not in state:
        raise CheckpointError(
            f"{path} has weights but no training state, so it cannot be resumed. Start a new "
            "training from it with InitFrom(path) among the Trainer's callbacks (ptdp fit "
            "--init_from)"
        )


def _verify(path: Place, *, ranks: int) -> None:
    """Verify a checkpoint, of which every rank reads a share.

    Data files in object storage are verified when the tensors are loaded, so that no byte is
    fetched twice.
    """
    with same_outcome(f"verifying the checkpoint {path}"):
        verify_checkpoint(path, part=own_rank(), parts=ranks, fetches=False)


def fill_from_state(space: ModelSpace, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Cut this rank's part out of the unsharded tensors of a ``state_dict``; collective."""
    with same_outcome("loading the model"):
        tensors = space.tensors()
        missing = [name for name in tensors if name not in state]
        if missing and strict:
            raise CheckpointError(
                f"the checkpoint has no {missing[:3]}; it has {len(state)} tensors such as "
                f"{list(state)[:3]}"
            )
        for name, (tensor, placement) in tensors.items():
            if name not in state:
                continue
            if tuple(state[name].shape) != placement.full_shape:
                raise CheckpointError(
                    f"'{name}' has shape {tuple(state[name].shape)} in the checkpoint, but "
                    f"{placement.full_shape} in the model"
                )
            for offset, view in placement.held(tensor):
                view.copy_(state[name][Rectangle.at(offset, view.shape).slices])
        _set_extra_states(space, tensors, missing)
    model_names = set().union(*gather(set(tensors))) | space.part.aliases.keys()
    if strict and (unexpected := sorted(state.keys() - model_names)):
        raise CheckpointError(f"the checkpoint has {unexpected[:3]}, which the model does not have")


def fill_part(
    space: ModelSpace, path: PathLike, *, strict: bool, rename: Mapping[str, str] | None = None
) -> list[str]:
    """Fill this rank's part of the model from a stored one; collective.

    The arguments and the result are those of ``PTDPStrategy.load_weights``. The values on which the
    optimizer steps are not changed."""
    tensors = space.tensors()
    if reads_as_huggingface(path) and not rename:  # a Hugging Face folder contains no adapters
        tensors = {
            name: entry
            for name, entry in tensors.items()
            if not any(fnmatchcase(MODEL + name, pattern) for pattern in ADAPTER_NAMES)
        }
    renames = {MODEL + local: MODEL + stored for local, stored in (rename or {}).items()}
    absent = load_tensors(
        path,
        {MODEL + name: entry for name, entry in tensors.items()},
        strict=strict,
        prefix=MODEL if strict and not rename else None,
        rename=renames,
        aliases=[MODEL + alias for alias in space.part.aliases],
        open_stored=_opener(space, path, rename),
    )
    missing = [name.removeprefix(MODEL) for name in absent]
    _set_extra_states(space, tensors, missing)
    return missing


def load_initial_weights(space: ModelSpace, weights: HuggingFaceWeights) -> None:
    """Load the values of ``initial_weights()`` into a module that was built without values."""
    tensors = {MODEL + name: entry for name, entry in space.tensors().items()}
    with space.waiting_in("loading the initial weights"):
        load_tensors("the initial weights", tensors, strict=False, open_stored=lambda _: weights)


def needs_initial_values(module: object) -> bool:
    """Return True if ``on_fit_start`` reads the initial values, even if the fit is resumed.

    A module says so with the attribute ``needs_initial_values``.
    """
    return bool(getattr(module, "needs_initial_values", False))


def _set_extra_states(space: ModelSpace, tensors: NamedTensors, missing: Collection[str]) -> None:
    """Pass the loaded extra states to ``set_extra_state`` of their modules.

    Filling the tensors that ``get_extra_state`` returned is not enough, because they may be
    copies."""
    for name, module in space.module.named_modules():
        key = f"{name}." * bool(name) + "_extra_state"
        if key in tensors and key not in missing:
            module.set_extra_state(tensors[key][0])


def _opener(
    space: ModelSpace, path: PathLike, rename: Mapping[str, str] | None
) -> Callable[..., Stored]:
    if located(path).is_file():
        return partial(_open_file, tied=() if rename else space.part.aliases)
    if not reads_as_huggingface(path):
        return TensorReader
    if rename:
        return partial(HuggingFaceWeights.open, names=HuggingFaceNames(aliases={}))
    return weights_opener(space.module, space.part.aliases, space.part.names)


def _open_file(path: PathLike, *, tied: Collection[str]) -> InMemory:
    """Read the weights of Lightning's single file, without the names ``tied``.

    Each tied name is a further name of a parameter.

    Raises:
        CheckpointError: The file has no weights, or holds objects that cannot be read without
            trusting it.
    """
    content = load_saved(files.local_path(path))
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(f"{path} cannot be read: it has no 'state_dict'")
    values = {
        MODEL + name: value
        for name, value in content["state_dict"].items()
        if isinstance(value, Tensor) and name not in tied
    }
    return InMemory(values)


# ---- Optimizers ----------------------------------------------------------------------------------


def load_optimizers(
    space: ModelSpace,
    states: StoredOptimizers | list[Checkpoint],
    of_groups: GroupNames | None,
) -> None:
    """Fill this rank's part of the optimizers, by parameter name.

    Args:
        space: The model and its optimizers.
        states: The stored states, or those of Lightning's single file, whose states are keyed by
            position.
        of_groups: Names of the parameters of a single file, group by group; None: unknown.

    Raises:
        CheckpointError: The states do not fit.
        ValueError: They are those of another strategy, whose parameters are not named.
    """
    folder = states.path if isinstance(states, StoredOptimizers) else None
    if len(states) != len(space.optimizers) and (states or folder is not None):
        raise CheckpointError(
            f"{folder or 'the checkpoint'} has the states of {len(states)} optimizer(s), but the "
            f"module has {len(space.optimizers)}"
        )
    if not isinstance(states, StoredOptimizers):
        _load_indexed(space, states, of_groups)
        return
    names, placements = space.optimizer_records()
    for index, (optimizer, saved) in enumerate(zip(space.optimizers, states, strict=True)):
        check_same_options(optimizer, saved.get("groups", []))
        with space.waiting_in(f"loading optimizer {index} from {states.path}"):
            load_optimizer(
                states.path,
                optimizer,
                names=names,
                placements=placements,
                groups=saved.get("groups", []),
                index=index,
            )
            load_history(optimizer, saved)
            _take_masters(space, optimizer)


def _load_indexed(
    space: ModelSpace, states: list[Checkpoint], of_groups: GroupNames | None
) -> None:
    if of_groups is None and space.layout.divides_model:
        raise ValueError(
            "this checkpoint was written by a strategy that stores optimizer states by index, "
            "which tensor and pipeline parallel ranks cannot assign to their parameters. Load "
            "only its weights (module.load_state_dict(torch.load(path)['state_dict']) before "
            "fit), or resume it once under PTDPStrategy() without model parallelism and save"
        )
    names, placements = space.optimizer_records()
    by_position = (
        not space.layout.divides_model
        and not space.steps_on_copies
        and (of_groups is None or _in_order(space, of_groups))
    )
    for index, (optimizer, state) in enumerate(zip(space.optimizers, states, strict=False)):
        check_same_options(optimizer, state.get("param_groups", []))
        if by_position:
            optimizer.load_state_dict(state)
            continue
        if keeps_history(optimizer):
            raise CheckpointError(
                f"the states of {type(optimizer).__name__} are in one file, which cannot "
                "be resumed with parameters that are cut or in another order"
            )
        of_groups = space.named_groups if of_groups is None else of_groups
        with space.waiting_in(f"loading optimizer {index}"):
            load_indexed_optimizer(
                state, optimizer, names=names, placements=placements, of_groups=of_groups[index]
            )
            _take_masters(space, optimizer)


def _in_order(space: ModelSpace, of_groups: GroupNames) -> bool:
    """Return True if a single file's states fit the optimizers by position.

    Names that the model no longer has are those of renamed parameters."""
    saved, own = (list(chain(*groups)) for groups in (of_groups, space.names_of_groups()))
    known = {name for name, _ in space.module.named_parameters(remove_duplicate=False)}
    return [*map(len, saved)] == [*map(len, own)] and all(
        before == after or before not in known
        for before, after in zip(chain(*saved), chain(*own), strict=True)
    )


def _take_masters(space: ModelSpace, optimizer: Optimizer) -> None:
    """Copy masters that were loaded as states to the values that the optimizer steps on.

    These values may be a parameter in float32."""
    with torch.no_grad():
        for value, state in list(optimizer.state.items()):
            if MASTER in state:
                value.copy_(state.pop(MASTER))
                if not state:
                    del optimizer.state[value]
    if space.engine is not None and space.engine.gradients.stepped is not None:
        space.engine.gradients.stepped.publish()
