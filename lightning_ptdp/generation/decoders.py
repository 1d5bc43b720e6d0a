"""Next-token calls of a model for rows of tokens: with a cache if the model's arguments are known,
else without.

Rows of different lengths are padded: on the left where the model is told so by a mask, so that all
new tokens stand in one column; on the right where it is not, since what comes behind a token does
not reach it::

    cached       . . a b c   then  d      and positions 0 0 0 1 2  3
                 a b c d e         f                    0 1 2 3 4  5
    not cached   a b c . .         a b c d . .
                 a b c d e         a b c d e f
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_ptdp.models.bert import Bert
from lightning_ptdp.models.cache import KeyValueCache
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.shims.transformers import (
    advance_cache,
    is_causal_model,
    is_huggingface_model,
    new_cache,
)

__all__ = ["Call", "Decoder", "decoder_of", "language_model", "longest_sequence"]

Rows = Sequence[Sequence[int]]
Call = Callable[[int], Tensor]
"""Runs the model as a pipeline stage; on the last one it returns the logits of each row's next
token, (b, V)."""


class Decoder(Protocol):
    """A model that is asked."""

    def step(self, rows: Rows, device: torch.device) -> tuple[Call, Hashable]:
        """Return the call that computes the next token of each row, and the shape of its result;
        with each call of ``step`` every row has one token more."""


def decoder_of(module: nn.Module, *, sequence_multiple: int = 1) -> Decoder:
    """Return the decoder for the language model in ``module``: a GPT or a causal model of
    transformers in it, else ``module`` itself.

    Args:
        module: The LightningModule, or a model.
        sequence_multiple: What sequences have to be divisible by, as under sequence parallelism;
            above 1 there is no cache.

    Raises:
        ValueError: There are several, or one that does not say what follows a token.
    """
    model = language_model(module) or module
    config: Any = getattr(model, "config", None)
    cached: _CachedModel | None = None
    if isinstance(model, GPT):
        cached = _CachedGPT(model)
    elif is_causal_model(model) and new_cache(config) is not None:
        cached = _CachedHuggingFace(model)
    limit = longest_sequence(model)
    if cached is None or sequence_multiple > 1:
        return Uncached(model, limit, sequence_multiple)
    return Cached(cached, limit)


def longest_sequence(module: nn.Module) -> int | None:
    """Most tokens that the language model in ``module``, or else ``module`` itself, takes; None: it
    does not say.

    Raises:
        ValueError: Of ``language_model``.
    """
    model = language_model(module) or module
    config: Any = getattr(model, "config", None)
    if is_causal_model(model):
        config = config.get_text_config(decoder=True)
    found: int | None = getattr(
        config, "max_position_embeddings" if is_causal_model(model) else "sequence_length", None
    )
    return found


def language_model(module: nn.Module) -> nn.Module | None:
    """The GPT, or the causal model of transformers, in ``module``; None if there is none.

    Raises:
        ValueError: There are several, or one that does not say what follows a token.
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not inside and (isinstance(child, GPT | Bert) or is_huggingface_model(child)):
            found[name] = child
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in found)
        raise ValueError(
            f"there are several models, {names}: give the one that shall write, such as "
            f"module.{next(iter(found))}"
        )
    model = next(iter(found.values()), None)
    if model is not None and not (isinstance(model, GPT) or is_causal_model(model)):
        raise ValueError(
            f"a {type(model).__name__} writes no text: it is no causal language model (GPT, "
            "Llama, Qwen, …)"
        )
    return model


@dataclass
class Uncached:
    """Computes all tokens again for every new one.

    Attributes:
        model: Token ids (b, s) -> logits (b, s, V), or an output that has them; causal.
        limit: Most tokens that it takes, older ones are dropped; None: any number.
        multiple: What s has to be divisible by.
    """

    model: nn.Module
    limit: int | None
    multiple: int = 1

    def step(self, rows: Rows, device: torch.device) -> tuple[Call, Hashable]:
        """See ``Decoder``."""
        rows = [row[-self.limit :] if self.limit else row for row in rows]
        width = -(-max(map(len, rows)) // self.multiple) * self.multiple
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]).to(
            device, non_blocking=True
        )
        last = torch.tensor([len(row) - 1 for row in rows]).to(device, non_blocking=True)
        every = torch.arange(len(rows), device=device)

        def call(stage: int) -> Tensor:
            output: Any = self.model(ids)
            logits: Tensor = getattr(output, "logits", output)
            return logits[every, last]

        return call, tuple(ids.shape)


class _CachedModel(Protocol):
    def forget(self) -> None: ...

    def __call__(
        self, stage: int, ids: Tensor, real: Tensor, places: Tensor, *, padded: bool
    ) -> Tensor: ...


@dataclass
class Cached:
    """Computes the new tokens alone.

    Attributes:
        model: Takes ids (b, q), which of all s tokens are no padding (b, s) bool, and the places of
            the new ones (b, q).
        limit: Most tokens that it takes; beyond, the last so many are computed again for every new
            one.
    """

    model: _CachedModel
    limit: int | None
    _done: int = field(default=0, init=False)

    def step(self, rows: Rows, device: torch.device) -> tuple[Call, Hashable]:
        """See ``Decoder``."""
        width = max(map(len, rows))
        if self.limit is not None and width > self.limit:
            rows, width, self._done = [row[-self.limit :] for row in rows], self.limit, 0
        if not self._done:
            self.model.forget()
        padding = torch.tensor([width - len(row) for row in rows])
        real = torch.arange(width) >= padding[:, None]
        places = (real.cumsum(1) - 1).clamp(min=0)[:, self._done :]
        ids = torch.tensor([[*[0] * (width - len(row)), *row][self._done :] for row in rows])
        self._done = width
        ids, real, places = (tensor.to(device, non_blocking=True) for tensor in (ids, real, places))
        return partial(self._call, ids, real, places, padded=bool(padding.any())), tuple(ids.shape)

    def _call(
        self, ids: Tensor, real: Tensor, places: Tensor, stage: int, *, padded: bool
    ) -> Tensor:
        return self.model(stage, ids, real, places, padded=padded)


class _CachedGPT:
    def __init__(self, model: GPT) -> None:
        self._model = model

    def forget(self) -> None:
        self._cache = KeyValueCache()

    def __call__(
        self, stage: int, ids: Tensor, real: Tensor, places: Tensor, *, padded: bool
    ) -> Tensor:
        self._cache.begin(real, ids.size(1))
        return self._model(ids, places, cache=self._cache)[:, -1]


class _CachedHuggingFace:
    def __init__(self, model: nn.Module) -> None:
        self._model, self._takes = model, inspect.signature(type(model).forward).parameters

    def forget(self) -> None:
        self._caches: dict[int, Any] = {}

    def __call__(
        self, stage: int, ids: Tensor, real: Tensor, places: Tensor, *, padded: bool
    ) -> Tensor:
        config: Any = self._model.config
        # Each stage of a rank has its own, in which all layers have seen as many tokens whenever
        # the model asks one of them.
        cache = self._caches.setdefault(stage, new_cache(config))
        told: dict[str, Any] = {"position_ids": places, "logits_to_keep": 1}
        told = {name: value for name, value in told.items() if name in self._takes}
        try:
            # Without padding there is no mask: transformers would read its values.
            output = self._model(
                ids,
                attention_mask=real.long() if padded else None,
                past_key_values=cache,
                use_cache=True,
                **told,
            )
        finally:
            advance_cache(cache, real.size(1), ids.device)
        logits: Tensor = output.logits
        return logits[:, -1]
