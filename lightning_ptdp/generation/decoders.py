"""Computation of the next token by a model, for rows of tokens.

Models with known arguments use a cache of keys and values, other models do not.

Rows of different lengths are padded. A cached model receives a mask and is padded on the left, so
that all new tokens are in one column. Other models are padded on the right, because a token does
not depend on what follows it::

    cached       . . a b c   then  d      and positions 0 0 0 1 2  3
                 a b c d e         f                    0 1 2 3 4  5
    not cached   a b c . .         a b c d . .
                 a b c d e         a b c d e f
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptdp.exchange.folder_weights import models_in
from lightning_ptdp.models.bert import Bert
from lightning_ptdp.models.gpt import GPT
from lightning_ptdp.models.layers import KeyValueCache
from lightning_ptdp.shims.transformers import (
    advance_cache,
    is_causal_model,
    is_huggingface_model,
    new_cache,
)

Rows = Sequence[Sequence[int]]
Call = Callable[[int], Tensor]
"""Function that runs the model as a pipeline stage.

On the last stage, it returns the logits of each row's next token, (b, V).
"""
Caches = dict[int, Any]
"""Stage of this rank -> its cache.

Each stage has its own cache, because a model may ask any layer of a cache for the number of tokens
seen: all layers in it must agree.
"""


def decoder_of(module: nn.Module, *, sequence_multiple: int = 1) -> Cached | Uncached:
    """Return the decoder for the language model in ``module``.

    This is a GPT or a causal model of transformers in it, or else ``module`` itself.

    Args:
        module: The LightningModule, or a model.
        sequence_multiple: Divisor that all sequence lengths must have, as under sequence
            parallelism. Above 1 there is no cache.

    Raises:
        ValueError: There are several models, or the model is not a causal language model.
    """
    model = language_model(module) or module
    config: Any = getattr(model, "config", None)
    has_cache = isinstance(model, GPT) or (is_causal_model(model) and new_cache(config) is not None)
    limit = longest_sequence(model)
    if not has_cache or sequence_multiple > 1:
        return Uncached(model, limit, sequence_multiple)
    return Cached(model, limit)


def longest_sequence(module: nn.Module) -> int | None:
    """Return the maximum number of tokens of the language model in ``module``.

    Without such a model, it is that of ``module`` itself; None if it is not known.

    Raises:
        ValueError: As for ``language_model``.
    """
    model = language_model(module) or module
    config: Any = getattr(model, "config", None)
    if is_causal_model(model):
        config = config.get_text_config(decoder=True)
    return getattr(
        config, "max_position_embeddings" if is_causal_model(model) else "sequence_length", None
    )


def language_model(module: nn.Module) -> nn.Module | None:
    """Return the GPT or the causal model of transformers in ``module``, or None.

    Raises:
        ValueError: There are several models, or the model is not a causal language model.
    """
    models = models_in(
        module, lambda child: isinstance(child, GPT | Bert) or is_huggingface_model(child)
    )
    if len(models) > 1:
        names = " and ".join(f"'{name}'" for name in models)
        raise ValueError(
            f"there are several models, {names}. Pass one of them, such as "
            f"module.{next(iter(models))}"
        )
    model = next(iter(models.values()), None)
    if model is not None and not (isinstance(model, GPT) or is_causal_model(model)):
        raise ValueError(
            f"a {type(model).__name__} cannot generate text, because it is not a causal "
            "language model (GPT, Llama, Qwen, …)"
        )
    return model


@dataclass
class Uncached:
    """Decoder that computes all tokens again for every new token.

    Attributes:
        model: Causal model: token ids (b, s) -> logits (b, s, V), or an output with ``logits``.
        limit: Maximum number of tokens of the model; older tokens are dropped. None: no maximum.
        multiple: Divisor that s must have.
    """

    model: nn.Module
    limit: int | None
    multiple: int = 1

    def step(self, rows: Rows, device: torch.device) -> tuple[Call, Hashable]:
        """Return the call that computes the next token of each row, and the shape of its input.

        Rows must have one more token at each call of ``step``.
        """
        rows = [row[-self.limit :] if self.limit else row for row in rows]
        width = -(-max(map(len, rows)) // self.multiple) * self.multiple
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]).to(
            device, non_blocking=True
        )
        last = torch.tensor([len(row) - 1 for row in rows]).to(device, non_blocking=True)
        row_indices = torch.arange(len(rows), device=device)

        def call(stage: int) -> Tensor:
            output: Any = self.model(ids)
            logits: Tensor = getattr(output, "logits", output)
            return logits[row_indices, last]

        return call, tuple(ids.shape)


@dataclass
class Cached:
    """Decoder that computes only the new tokens.

    Attributes:
        model: A GPT, or a causal model of transformers.
        limit: Maximum number of tokens of the model. Beyond it, the last ``limit`` tokens are
            computed again for every new token.
    """

    model: nn.Module
    limit: int | None
    _done: int = field(default=0, init=False)
    _caches: Caches = field(default_factory=dict, init=False)

    def step(self, rows: Rows, device: torch.device) -> tuple[Call, Hashable]:
        """Return the call and the shape of its input, as ``Uncached.step`` does."""
        width = max(map(len, rows))
        if self.limit is not None and width > self.limit:
            rows = [row[-self.limit :] for row in rows]
            width = self.limit
            self._done = 0
        if not self._done:
            self._caches.clear()
        padding = torch.tensor([width - len(row) for row in rows])
        real = torch.arange(width) >= padding[:, None]
        places = (real.cumsum(1) - 1).clamp(min=0)[:, self._done :]
        ids = torch.tensor([[*[0] * (width - len(row)), *row][self._done :] for row in rows])
        self._done = width
        ids, real, places = (tensor.to(device, non_blocking=True) for tensor in (ids, real, places))
        # Without padding there is no mask: transformers would read its values.
        mask = real.long() if padding.any() else None

        def call(stage: int) -> Tensor:
            if isinstance(self.model, GPT):
                cache = self._caches.setdefault(stage, KeyValueCache())
                cache.begin(real, ids.size(1))
                logits: Tensor = self.model(ids, places, cache=cache)
            else:
                logits = self._logits_of_huggingface(stage, ids, places, mask)
            return logits[:, -1]

        return call, tuple(ids.shape)

    def _logits_of_huggingface(
        self, stage: int, ids: Tensor, places: Tensor, mask: Tensor | None
    ) -> Tensor:
        model: Any = self.model
        cache = self._caches.setdefault(stage, new_cache(model.config))
        accepted = inspect.signature(type(model).forward).parameters
        options: dict[str, Any] = {"position_ids": places, "logits_to_keep": 1}
        try:
            output = model(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **{name: value for name, value in options.items() if name in accepted},
            )
        finally:
            advance_cache(cache, self._done, ids.device)
        return output.logits
