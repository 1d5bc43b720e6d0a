"""The engines that ``gpu.py`` sets beside each other, each on the same model, batch, precision and
optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import lightning.pytorch as L
import torch
import torch._dynamo  # takes a while, so before processes are forked
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from gpu_cases import Case, Job
from harness import QUIET
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from turns import ENOUGH, BareLoop, Contestant, Same, TrainerLoop

from lightning_ptdp import ParallelPlan, PTDPStrategy
from lightning_ptdp.exchange.native_models import model_of_hyper_parameters
from lightning_ptdp.models import AdamWConfig, BertConfig, LitBert, LitGPT
from lightning_ptdp.models.gpt import Block, gpt_plan

try:
    import transformers
except ImportError:
    transformers = None  # type: ignore[assignment]

__all__ = ["contestant", "preload"]

RATE, DECAY = 1e-4, 0.1
Batch = dict[str, Tensor]


def contestant(
    job: Job, device: torch.device, *, quick: bool
) -> tuple[Contestant, Callable[[], nn.Module]]:
    """The engine of a job, and how to get at its model; ``quick`` compiles to nothing."""
    barrier = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    case = job.case
    torch.manual_seed(1)
    if job.engine in ("hf", "hf-compiled"):
        model = huggingface(case, device)
        return BareLoop(
            plain_step(case, model, device, compiled=job.engine == "hf-compiled", quick=quick),
            barrier=barrier,
        ), (lambda: model)
    if job.engine == "slice":
        module, batch = LitSlice(case), hidden_states(case, device)
    elif job.engine == "ptdp-hf":
        module, batch = (
            LitHuggingFace(huggingface(case, device)),
            tokens(case, device, shifted=False),
        )
    elif isinstance(case.config, BertConfig):
        module, batch = LitBert(case.config, adamw()), tokens(case, device, shifted=False)
    else:
        module, batch = LitGPT(case.config, adamw()), tokens(case, device, shifted=True)
    accumulated = case.microbatches if job.engine == "lightning" else 1
    if accumulated > 1:
        batch = {name: value[: case.samples] for name, value in batch.items()}
    microbatches = {} if case.microbatches == 1 else {"num_microbatches": case.microbatches}
    options = {**microbatches, **case.options, **job.options}
    if quick and options.get("compile") == "blocks":
        options["compile_options"] = {"backend": "aot_eager"}
    world: dict[str, Any] = {}
    if case.tensor > 1:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=case.tensor)
        world = {"num_nodes": case.tensor, "plugins": [OneOfMany(case.tensor)]}
        options["tensor_parallel_size"] = case.tensor

    def fit(turns: L.Callback) -> None:
        trainer = L.Trainer(
            strategy="auto" if job.engine == "lightning" else PTDPStrategy(**options),
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision=case.precision,  # type: ignore[arg-type]
            accumulate_grad_batches=accumulated,
            gradient_clip_val=1.0,
            max_steps=ENOUGH,
            callbacks=[turns],
            **QUIET,
            **world,
        )
        trainer.fit(module, torch.utils.data.DataLoader(Same(batch), batch_size=None))

    return TrainerLoop(fit, barrier=barrier, batches=accumulated), lambda: module


def preload(cases: Iterable[Case]) -> None:
    """Import what takes a while, before processes are forked."""
    for name in {architecture(case) for case in cases} if transformers is not None else ():
        getattr(transformers, name)


def architecture(case: Case) -> str:
    """Hugging Face's class."""
    (name,) = model_of_hyper_parameters({"config": asdict(case.config)}).write()["architectures"]  # type: ignore[misc]
    return name


def adamw() -> AdamWConfig:
    """The optimizer of our modules; the schedule of the rate is beside the point."""
    return AdamWConfig(learning_rate=RATE, weight_decay=DECAY, decay_steps=ENOUGH)


def tokens(case: Case, device: torch.device, *, shifted: bool) -> Batch:
    """A step's random tokens (m b, s); labels are the next tokens, or for models that shift them
    (and for BERT) the same ones."""
    shape = (case.microbatches * case.samples, case.config.sequence_length + 1)
    drawn = torch.randint(case.config.vocabulary_size, shape, device=device)
    ids = drawn[:, :-1].contiguous()
    batch = {"input_ids": ids, "labels": drawn[:, 1:].contiguous() if shifted else ids}
    if isinstance(case.config, BertConfig):
        batch["next_sentence_label"] = torch.randint(2, shape[:1], device=device)
    return batch


# ---- Hugging Face --------------------------------------------------------------------------------


def huggingface(case: Case, device: torch.device) -> nn.Module:
    """The model with random weights."""
    if transformers is None:
        raise ImportError("No module named 'transformers'")
    written: Mapping[str, Any] = model_of_hyper_parameters({"config": asdict(case.config)}).write()
    config = transformers.AutoConfig.for_model(**written, use_cache=False)
    with torch.device(device):
        model: nn.Module = getattr(transformers, architecture(case))(config)
    if case.precision == "bf16-true":
        model = model.to(torch.bfloat16)
    if case.lora:
        import peft

        adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        # as Lightning's bf16-true has them
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model.train()


def optimizer_of(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """As Hugging Face's Trainer has it by default."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY, fused=device.type == "cuda")


def plain_step(
    case: Case, model: nn.Module, device: torch.device, *, compiled: bool, quick: bool
) -> Callable[[], None]:
    """m forwards and backwards and the optimizer, as one writes it."""
    microbatches = [
        dict(zip(batch, parts, strict=True))
        for batch in (tokens(case, device, shifted=False),)
        for parts in zip(*(value.chunk(case.microbatches) for value in batch.values()), strict=True)
    ]
    optimizer = optimizer_of(model, device)
    call: Callable[..., Any] = (
        torch.compile(model, backend="eager" if quick else "inductor") if compiled else model
    )

    def step() -> None:
        optimizer.zero_grad()
        for batch in microbatches:
            with torch.autocast(
                device.type, torch.bfloat16, enabled=case.precision == "bf16-mixed"
            ):
                loss = call(**batch).loss / case.microbatches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


class LitHuggingFace(L.LightningModule):
    """An ordinary module around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model, self.device)


# ---- a rank of a large model ---------------------------------------------------------------------


class LitSlice(L.LightningModule):
    """The blocks of a stage between hidden states and gradients that other stages would send."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.config: Any = case.config
        self.blocks: nn.ModuleList | None = None

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.num_layers))

    def configure_parallel(self) -> ParallelPlan:
        whole = gpt_plan(self.config, prefix="")
        inside = {name: kind for name, kind in whole.tensor.items() if name.startswith("blocks.")}
        return ParallelPlan(
            blocks="blocks",
            tensor=inside,
            numbers=whole.numbers,
            selective=whole.selective,
            sequence="blocks",
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch["hidden"].requires_grad_()
        assert self.blocks is not None
        for block in self.blocks:
            x = block(x)
        return (x * batch["gradient"]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE, weight_decay=DECAY)


def hidden_states(case: Case, device: torch.device) -> Batch:
    """Return tensors in place of those from the stage before, and from the one after."""
    shape = (case.microbatches * case.samples, case.config.sequence_length, case.config.hidden_size)
    return {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device)
        for name in ("hidden", "gradient")
    }


class OneOfMany(LightningEnvironment):
    """Rank 0 of a world in which nobody else is."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """It is known."""

    def global_rank(self) -> int:
        return 0

    def set_global_rank(self, rank: int) -> None:
        """It is known."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0
