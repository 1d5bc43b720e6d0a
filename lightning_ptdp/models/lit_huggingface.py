"""Language models of Hugging Face as LightningModules, unmodified.

Nothing here depends on the parallel layout.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ptdp.base.nested import IMAGE_FIELDS
from lightning_ptdp.base.option_types import check_arguments
from lightning_ptdp.base.requirements import import_optional
from lightning_ptdp.models.adapters import ALL_LINEAR, LoraOptions, as_lora
from lightning_ptdp.models.lit_tokens import DEFAULT_OPTIMIZER, Batch, LitTokens, cross_entropy
from lightning_ptdp.models.optimizer_setup import AdamWConfig
from lightning_ptdp.models.pretrained_config import (
    check_causal,
    config_of_sizes,
    read_model_config,
    with_values,
    without_values,
)
from lightning_ptdp.models.pretrained_folder import (
    ADAPTER_NAMES,
    BASE_WEIGHTS,
    TOO_MANY_IDS,
    InitialWeights,
    check_tokenizer,
    fingerprint,
    local_folder,
)
from lightning_ptdp.models.size import Operations, count_operations
from lightning_ptdp.shims.transformers import has_sdpa, image_parts

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class LitHuggingFace(LitTokens):
    """Common base of the classes below; ``LitCausalLM`` documents the arguments."""

    _auto_class: ClassVar[str]
    _classes: ClassVar[str]
    _inputs: ClassVar[tuple[str, ...]]
    _ignores: ClassVar[tuple[str, ...]] = ()
    _task: ClassVar[str | None] = None

    def __init__(
        self,
        path: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        pretrained: bool = True,
        dtype: Dtype = "float32",
        attention: str | None = None,
        adapter: LoraOptions | None = None,
        optimizer: AdamWConfig = DEFAULT_OPTIMIZER,
    ) -> None:
        super().__init__(optimizer)
        check_arguments(LitHuggingFace.__init__, {"dtype": dtype})
        if (path is None) == (config is None):
            raise ValueError(
                "set either path (the folder or name of a model) or config (its sizes), but "
                "not both"
            )
        self.path = os.fspath(path) if path is not None else None
        self.dtype_name = dtype
        self.attention = attention
        self._sizes = None if config is None else self._described(config)
        self._weights = self.path if pretrained else None
        self.adapter = as_lora(adapter)
        # with an adapter, a checkpoint has only what is trained
        self.strict_loading = self.adapter is None
        self.save_hyperparameters(
            {
                "path": self.path,
                "config": self._sizes,
                "pretrained": pretrained,
                "dtype": dtype,
                "attention": attention,
                "adapter": asdict(self.adapter) if self.adapter is not None else None,
                "optimizer": asdict(self.optimizer_config),
            }
        )
        self._operations: Operations | None = None
        if self.adapter is not None:
            kind = self._transformers_class()
            self.adapter.check(without_values(kind, self._model_config(), option=self._option))

    def configure_model(self) -> None:
        """Build the model.

        It has no values if the strategy fills in its parts. Otherwise it has those of the folder.
        """
        if self.model is not None:
            return
        config = self._model_config()
        config.use_cache = False
        kind = self._transformers_class()
        options = {
            "dtype": _dtype(self.dtype_name, config),
            "attn_implementation": self.attention or self._attention(config),
        }
        self.model = without_values(kind, config, option=self._option, **options)
        if torch.get_default_device().type != "meta":
            self.model = with_values(kind, config, self._weights, option=self._option, **options)
        if self.path is not None:
            check_tokenizer(self.path, self.model.get_input_embeddings().num_embeddings)
        if self.adapter is not None:
            self._inject(self.model, self.adapter)

    def check_data(self, datamodule: object) -> None:
        """Check before launch that the model can represent all ids and positions of the data.

        Only attributes that the data module has are checked.

        Raises:
            ValueError: The model has too few embedding rows or positions.
        """
        sizes = self._model_config().get_text_config()
        for name, field, unit in (
            ("vocabulary_size", "vocab_size", "embedding rows"),
            ("sequence_length", "max_position_embeddings", "positions"),
        ):
            required = getattr(datamodule, name, None)
            limit = getattr(sizes, field, None)
            if isinstance(required, int) and isinstance(limit, int) and required > limit:
                tokenizer = name == "vocabulary_size" and getattr(datamodule, "hparams", {}).get(
                    "tokenizer_dir"
                )
                remedy = (
                    TOO_MANY_IDS.format(required) if tokenizer else f"Set --data.{name} {limit}"
                )
                raise ValueError(
                    f"data.{name}={required} is more than the {limit} {unit} of the model in "
                    f"{self._option}. {remedy}"
                )

    def _transformers_class(self) -> Any:
        return getattr(import_optional("transformers"), self._auto_class)

    def _kind(self, config: Any) -> Any:
        """Return the class of the model; None if transformers has none for this task."""
        return getattr(import_optional("transformers"), self._classes).get(type(config), None)

    def _attention(self, config: Any) -> str:
        kind = self._kind(config)
        return (
            "sdpa"
            if (kind is None or has_sdpa(kind))
            and not getattr(config, "attn_logit_softcapping", None)
            else "eager"
        )

    def _described(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Add the name of the model's class, as in the ``config.json`` of an export."""
        kind = self._kind(config_of_sizes(sizes))
        return {**sizes, "architectures": [kind.__name__]} if kind is not None else dict(sizes)

    def _model_config(self) -> Any:
        config = (
            config_of_sizes(self._sizes)
            if self._sizes is not None
            else read_model_config(str(self.path))
        )
        if self._task == "CAUSAL_LM":
            check_causal(config, option=self._option)
        return config

    @property
    def _option(self) -> str:
        return f"path={self.path!r}" if self.path is not None else "config"

    def flops_per_sample(self, sequence_length: int) -> int:
        """Return the model operations, forward and backward, of a sample of this length.

        Attention counts over all pairs of tokens. The result is 0 if the model does not run without
        data.
        """
        if self._operations is None:
            config = self._model_config()
            positions = (
                getattr(config.get_text_config(), "max_position_embeddings", None)
                or sequence_length
            )
            try:
                self._operations = count_operations(
                    self._build_eager, self._logits_of_zeros, longest=positions
                )
            except Exception as error:  # any type; training does not need the rate
                rank_zero_warn(
                    f"the operations of {config.model_type} could not be counted, so their "
                    f"rate is not logged: {error}"
                )
                self._operations = Operations(per_token=0, per_pair=0)
        return self._operations.of(sequence_length)

    def _build_eager(self) -> Any:
        config = self._model_config()
        config.use_cache = False
        model = self._transformers_class().from_config(
            config, attn_implementation="eager", trust_remote_code=False
        )
        if self.adapter is not None:
            self._inject(model, self.adapter)
        return model

    def _inject(self, model: Any, adapter: LoraOptions, **options: Any) -> None:
        adapter.inject(model, task_type=self._task, **options)

    @staticmethod
    def _logits_of_zeros(model: Any, length: int) -> Tensor:
        return model(input_ids=torch.zeros(1, length, dtype=torch.long)).logits

    def initial_weights(self) -> InitialWeights | None:
        """Return the source of the model's weights; None if initial values are drawn."""
        if self._weights is None:
            return None
        return InitialWeights(
            self._weights,
            may_lack=ADAPTER_NAMES if self.adapter is not None else (),
            ignores=self._ignores,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save only trained parameters with an adapter, and a description of the base weights."""
        if self.adapter is None or self._weights is None:
            return
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        checkpoint["state_dict"] = {
            name: value for name, value in checkpoint["state_dict"].items() if name in trained
        }
        mark = fingerprint(local_folder(self._weights))
        checkpoint[BASE_WEIGHTS] = {
            "path": self._weights,
            "fingerprint": mark,
            "task": self._task,
            "auto_class": self._auto_class,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that adapters and base weights of the checkpoint match this module.

        Raises:
            ValueError: They do not match.
        """
        hparams = checkpoint.get("hyper_parameters", {})
        saved = hparams.get("adapter")
        current = self.hparams["adapter"]
        if saved and not current:
            raise ValueError(
                "the checkpoint has only adapters. Set model.adapter as in that training, or "
                "convert the checkpoint to a folder (ptdp convert --merge)"
            )
        if current and not saved and "adapter" in hparams:
            raise ValueError(
                "the checkpoint has all weights, but no adapters. Convert it to a folder "
                "(ptdp convert), and train adapters on that folder (model.path)"
            )
        for name in current if saved and current else ():
            value = saved.get(name, current[name])
            if name not in ("dropout", "init") and _listed(value) != _listed(current[name]):
                raise ValueError(
                    f"the checkpoint has adapter.{name}={value}, but this training has "
                    f"{current[name]}. Set it as in the checkpoint"
                )
        base = checkpoint.get(BASE_WEIGHTS)
        if base is not None and (
            self.path is None or base["fingerprint"] != fingerprint(local_folder(self.path))
        ):
            raise ValueError(
                f"path={self.path!r} does not have the weights with which the checkpoint's "
                f"adapters were trained ({base['path']}). Use the original folder"
            )

    def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        """Return the logits (b, s, V) of token ids (b, s).

        ``others`` are further arguments of the model.
        """
        return self._run(input_ids=input_ids, **others).logits

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss and its number of tokens.

        The loss includes the balancing loss of a mixture of experts whose configuration has
        ``output_router_logits``. It is logged as ``train_balance_loss``.
        """
        losses_bs, balance = self._losses(batch)
        step = self.mean_loss(losses_bs, batch, "train_loss")
        if balance is None:
            return step
        self.log("train_balance_loss", balance)
        factor = self.built.config.get_text_config().router_aux_loss_coef
        return {**step, "loss": step["loss"] + factor * balance}

    def _run(self, **inputs: Tensor) -> Any:
        return self.built(**inputs)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each label, and the balancing loss if the model computes one."""
        output = self._run(**{name: batch[name] for name in self._inputs if name in batch})
        return cross_entropy(output.logits, batch["labels"]), getattr(output, "aux_loss", None)


class LitCausalLM(LitHuggingFace):
    """Language modelling with any ``AutoModelForCausalLM``, which is called unmodified.

    A batch is a mapping with ``input_ids`` (b, s) int64 and ``labels`` (b, s) int64, optionally
    ``position_ids`` (b, s) int64. A label is the token that follows the input token (already
    shifted), or -100 where no token is predicted. The loss is the mean over the counted tokens.
    Padding on the right needs no mask: earlier tokens do not see it, and it has no labels.

    For a mixture of experts whose configuration has ``output_router_logits``, the model's own
    balancing loss is added.

    Logs ``train_loss`` in each step, and ``train_balance_loss`` if there is one. In each epoch, it
    logs ``val_loss`` and ``val_perplexity``, or ``test_loss``.

    Args:
        path: A folder with ``config.json`` (and the weights, as safetensors), or the name of a
            model on the hub.
        config: Content of a ``config.json`` in place of ``path``. ``model_type`` is required:
            ``{"model_type": "mixtral", "num_hidden_layers": 8}``. There are then no weights and no
            tokenizer.
        pretrained: Start with the weights of ``path``; otherwise with the model's own initial
            values.
        dtype: Type of the parameters; "auto": as in the configuration. The Trainer's precision may
            change it.
        attention: The model's attn_implementation. None: "sdpa", or "eager" if the model does not
            support "sdpa" (gpt-oss) or caps its attention scores, which only "eager" computes.
        adapter: Low-rank adapters, which are trained in place of the weights and saved without
            them. None: all parameters are trained.
        optimizer: AdamW and its schedule.

    Raises:
        ValueError: ``config`` describes no model that transformers knows, or (when built) the model
            is not a causal language model.
    """

    _auto_class = "AutoModelForCausalLM"
    _classes = "MODEL_FOR_CAUSAL_LM_MAPPING"
    _task = "CAUSAL_LM"
    _inputs = ("input_ids", "position_ids")


class LitImageTextToText(LitHuggingFace):
    """Language modelling with images, with any ``AutoModelForImageTextToText``.

    A batch has ``input_ids`` and ``labels`` as for ``LitCausalLM``, and the other tensors of the
    model's processor, of which the model gets those that its forward names. A batch without images
    has no ``pixel_values``. Everything else, including the arguments, is as in ``LitCausalLM``,
    except that ``target_modules="all-linear"`` of an adapter means the linear layers of the
    language model.
    """

    _auto_class = "AutoModelForImageTextToText"
    _classes = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"
    _task = "CAUSAL_LM"
    _inputs = ("input_ids", "token_type_ids", "mm_token_type_ids", *IMAGE_FIELDS)

    def check_data(self, datamodule: object) -> None:
        """Check also that the data have the model's image tokens."""
        super().check_data(datamodule)
        ids = getattr(datamodule, "image_ids", None)
        token = self._model_config().image_token_id
        if ids is not None and token not in ids:
            raise ValueError(
                f"the processor of the data stands for images with the ids {ids}, but the model in "
                f"{self._option} has image_token_id={token}. Use the model's own processor "
                "(data.tokenizer_dir)"
            )

    def _run(self, **inputs: Any) -> Any:
        # Other models than those that need token types misread or refuse them.
        accepted = inspect.signature(type(self.model).forward).parameters
        return super()._run(**{name: inputs[name] for name in inputs if name in accepted})

    def _inject(self, model: Any, adapter: LoraOptions, **options: Any) -> None:
        if adapter.target_modules == ALL_LINEAR:
            towers = "|".join(map(re.escape, image_parts(model)))
            options["exclude_modules"] = f"({towers}).*"
        super()._inject(model, adapter, **options)


class LitMaskedLM(LitHuggingFace):
    """Prediction of masked tokens with any ``AutoModelForMaskedLM``.

    A batch is a mapping with ``input_ids`` and ``labels`` (b, s) int64, optionally
    ``attention_mask``, ``token_type_ids`` and ``position_ids``, (b, s) int64. A label is the
    original token at a position to predict, and -100 elsewhere. Everything else, including the
    arguments, is as in ``LitCausalLM``.
    """

    _auto_class = "AutoModelForMaskedLM"
    _classes = "MODEL_FOR_MASKED_LM_MAPPING"
    _inputs = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    # heads for the order of sentences in pretraining
    _ignores = (r"(^|\.)pooler\.", r"(^|\.)cls\.seq_relationship\.")


def _dtype(name: Dtype, config: Any) -> torch.dtype:
    dtype: Any = (
        getattr(torch, name) if name != "auto" else getattr(config, "dtype", None) or torch.float32
    )
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
