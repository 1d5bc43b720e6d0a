"""Generation loop from prompts to tokens, with one forward pass per token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.generation.decoders import Call, decoder_of, language_model
from lightning_ptdp.generation.generation_options import Sampling
from lightning_ptdp.generation.sampling import choose, draw_numbers

__all__ = ["generate"]

_DEFAULT = Sampling()

Forward = Callable[..., Tensor]


@torch.no_grad()
def generate(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = _DEFAULT,
    *,
    eos_ids: Collection[int] = (),
) -> list[list[int]]:
    """Return the tokens that follow each prompt.

    The result is the same in every layout, and does not depend on the other prompts.

    While a Trainer runs the module in a layout of ours, in a callback or a hook such as
    ``on_validation_epoch_end``, all ranks must call this with the same arguments. The model stays
    distributed. Every replica generates all tokens, and every rank receives them. Training is not
    affected: modes and random states are restored.

    A GPT of ours or a causal model of transformers (the only one in ``module``) keeps the keys and
    values of earlier tokens. Any other module is called with token ids (b, s) for logits (b, s, V),
    with all tokens for every new one. This also applies to the former under sequence parallelism.
    Tokens beyond the longest sequence of the model are dropped, the oldest first.

    Args:
        module: A LightningModule, or a model.
        prompts: Token ids, at least one per prompt.
        sampling: Options of the choice of tokens. ``temperature=0`` gives the result of
            ``transformers`` with ``do_sample=False``.
        eos_ids: Tokens that end a text; the ending token is returned too.

    Raises:
        ValueError: A prompt is empty, the module cannot generate text, or the module is split and
            therefore needs a run of the Trainer.
    """
    rows = [[int(token) for token in prompt] for prompt in prompts]
    if not all(rows):
        raise ValueError("a prompt has no token. Begin it with the tokenizer's start token")
    if not rows or not sampling.max_new_tokens:
        return [[] for _ in rows]
    strategy: Any = _running_strategy(module)
    with _evaluating(module):
        if strategy is None:
            device = next(
                (parameter.device for parameter in module.parameters()), torch.device("cpu")
            )
            return _write(module, rows, sampling, eos_ids, _alone, device, multiple=1)
        layout = strategy.layout
        multiple = layout.size("tensor") if layout.sequence_parallel else 1
        return _write(
            module,
            rows,
            sampling,
            eos_ids,
            strategy.decode,
            strategy.root_device,
            multiple=multiple,
        )


def _write(
    module: nn.Module,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    eos_ids: Collection[int],
    forward: Forward,
    device: torch.device,
    *,
    multiple: int,
) -> list[list[int]]:
    _check_ids(module, prompts)
    decoder, rows = (
        decoder_of(module, sequence_multiple=multiple),
        [list(prompt) for prompt in prompts],
    )
    draws_bn = draw_numbers(sampling, len(rows)).to(device, non_blocking=True)
    lengths: list[int | None] = [None] * len(rows)
    for number in range(sampling.max_new_tokens):
        call, key = decoder.step(rows, device)
        tokens = forward(
            call,
            partial(choose, draws_b=draws_bn[:, number], sampling=sampling),
            rows=len(rows),
            key=key,
        )
        for row, (tokens_of_row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            tokens_of_row.append(token)
            if token in eos_ids and lengths[row] is None:
                lengths[row] = number + 1
        if None not in lengths:
            break
    return [
        row[len(prompt) :][:length]
        for row, prompt, length in zip(rows, prompts, lengths, strict=True)
    ]


def _check_ids(module: nn.Module, prompts: Sequence[list[int]]) -> None:
    config: Any = getattr(language_model(module), "config", None)
    size = getattr(config, "vocabulary_size", None) or getattr(config, "vocab_size", None)
    largest = max(map(max, prompts))
    if isinstance(size, int) and largest >= size:
        raise ValueError(
            f"a prompt has the token {largest}, but the model has a vocabulary of {size}. Use "
            "the tokenizer with which the model was trained"
        )


def _alone(call: Call, choose: Callable[[Tensor], Tensor], **_: object) -> Tensor:
    return choose(call(0).float())


def _running_strategy(module: nn.Module) -> object:
    """Return the strategy that runs the module in a layout of ours; None if there is none."""
    try:
        strategy: Any = getattr(getattr(module, "trainer", None), "strategy", None)
    except RuntimeError:  # no Trainer is attached to the LightningModule
        return None
    return strategy if hasattr(strategy, "decodes") and strategy.decodes() else None


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode inside, and restore their modes afterwards."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training
