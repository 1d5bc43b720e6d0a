"""Generation loop from prompts to tokens, with one forward pass per token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.base.random import derive_seed
from lightning_ptdp.forward.frozen_forward import evaluating
from lightning_ptdp.generation.decoders import Call, decoder_of, language_model
from lightning_ptdp.generation.generation_options import Sampling

_DEFAULT = Sampling()

Forward = Callable[..., Tensor]


def _never(new: Sequence[int]) -> bool:
    return False


@torch.no_grad()
def generate(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = _DEFAULT,
    *,
    eos_ids: Collection[int] = (),
    ends: Callable[[Sequence[int]], bool] = _never,
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
        ends: Returns True if a text ends after these new tokens. All ranks must give the same
            function.

    Raises:
        ValueError: A prompt is empty, the module cannot generate text, or the module is split and
            therefore needs a run of the Trainer.
    """
    rows = [[int(token) for token in prompt] for prompt in prompts]
    if not all(rows):
        raise ValueError("a prompt has no token. Begin it with the tokenizer's start token")
    with running(module, (rows, sampling)) as run:
        if not rows or not sampling.max_new_tokens:
            return [[] for _ in rows]
        return _write(module, rows, sampling, run, lambda new: new[-1] in eos_ids or ends(new))


@dataclass(frozen=True, kw_only=True)
class RunningModel:
    """The way in which a module's forwards are run.

    Attributes:
        forward: Runs a forward through all stages and returns its result on all ranks, as
            ``strategy.decode`` does.
        device: Device of the inputs.
        multiple: Divisor that sequence lengths must have.
    """

    forward: Forward
    device: torch.device
    multiple: int = 1


@contextlib.contextmanager
def running(module: nn.Module, inputs: object) -> Iterator[RunningModel]:
    """Set a module to evaluation mode and return a way to run it; restore modes afterwards.

    Raises:
        ValueError: The module is split and therefore needs a run of the Trainer.
        MisconfigurationException: Ranks that run it together have different ``inputs``.
    """
    strategy: Any = _running_strategy(module)
    with evaluating(module):
        if strategy is None:
            device = next(
                (parameter.device for parameter in module.parameters()), torch.device("cpu")
            )
            yield RunningModel(forward=_alone, device=device)
        else:
            strategy.check_decoded(inputs)
            layout = strategy.layout
            yield RunningModel(
                forward=strategy.decode,
                device=strategy.root_device,
                multiple=layout.size("tensor") if layout.sequence_parallel else 1,
            )


def _write(
    module: nn.Module,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    run: RunningModel,
    is_end: Callable[[Sequence[int]], bool],
) -> list[list[int]]:
    check_ids(module, prompts)
    decoder = decoder_of(module, sequence_multiple=run.multiple)
    rows = [list(prompt) for prompt in prompts]
    draws_bn = draw_numbers(sampling, len(rows)).to(run.device, non_blocking=True)
    lengths: list[int | None] = [None] * len(rows)
    for step in range(sampling.max_new_tokens):
        call, key = decoder.step(rows, run.device)
        tokens = run.forward(
            call,
            partial(choose, draws_b=draws_bn[:, step], sampling=sampling),
            rows=len(rows),
            key=key,
        )
        for row, (tokens_of_row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            tokens_of_row.append(token)
            if lengths[row] is None and is_end(tokens_of_row[len(prompts[row]) :]):
                lengths[row] = step + 1
        if None not in lengths:
            break
    return [
        row[len(prompt) :][:length]
        for row, prompt, length in zip(rows, prompts, lengths, strict=True)
    ]


def check_ids(module: nn.Module, prompts: Sequence[Sequence[int]]) -> None:
    """Check that the model in ``module`` has all tokens.

    Raises:
        ValueError: A token is beyond its vocabulary.
    """
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


# ---- Choice of the next token --------------------------------------------------------------------
#
# It is a pure function of the logits and of numbers that are drawn beforehand. No random state
# changes, and all ranks with the same logits choose the same token.


_ONE = 2**52
"""Probability of 1; sums up to it are exact in float64."""


def draw_numbers(sampling: Sampling, rows: int) -> Tensor:
    """Draw a number in [0, 1) for every row and new token, (b, n) float64 on the CPU.

    The numbers of a row do not depend on the other rows.
    """
    draws = []
    for row in range(rows):
        generator = torch.Generator().manual_seed(derive_seed(sampling.seed, row))
        draws.append(torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator))
    return torch.stack(draws)


def choose(logits_bv: Tensor, draws_b: Tensor, sampling: Sampling) -> Tensor:
    """Return the next token of each row, (b) int64.

    It is the token at which the cumulative probability exceeds the row's number.
    """
    if sampling.temperature == 0:
        return logits_bv.argmax(-1)
    k = min(sampling.top_k or logits_bv.size(-1), logits_bv.size(-1))
    values_bk, tokens_bk = logits_bv.topk(k)
    # Integers, because a GPU adds floating-point numbers in any order, but all ranks must agree.
    shares_bk = ((values_bk.double() / sampling.temperature).softmax(-1) * _ONE).long()
    shares_bk = shares_bk * (shares_bk.cumsum(-1) - shares_bk < int(sampling.top_p * _ONE))
    cumulated_bk = shares_bk.cumsum(-1)
    drawn_b1 = (draws_b[:, None] * cumulated_bk[:, -1:]).long()
    at_b1 = torch.searchsorted(cumulated_bk, drawn_b1, right=True)
    # With NaN logits no share may exceed the number, so the position must be limited.
    return tokens_bk.gather(1, at_b1.clamp(max=k - 1))[:, 0]
