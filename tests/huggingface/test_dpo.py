"""Preference tuning equals TRL's on one process, and one process in every layout."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import Dataset

from lightning_ptdp.data import PreferenceDataModule
from lightning_ptdp.models import AdamWConfig, LoraOptions, make_tiny
from lightning_ptdp.models.lit_dpo import LitDPO
from tests.data.folders import write_rows
from tests.huggingface.runs import LAYOUTS, VOCABULARY, make_model
from tests.optional import needs
from tests.parity import Training, assert_near, assert_weights_near

pytestmark = [pytest.mark.thorough, needs("peft")]

LENGTH, PROMPT = 12, 4


class Pairs(Dataset[dict[str, Tensor]]):
    """Random pairs with a common prompt; answers have 3 to 8 tokens."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        prompt = torch.randint(1, VOCABULARY, (PROMPT,), generator=draw)
        pair = {}
        for name in ("chosen", "rejected"):
            size = int(torch.randint(3, 9, (), generator=draw))
            answer = torch.randint(1, VOCABULARY, (size,), generator=draw)
            tokens = torch.cat([prompt, answer])
            ids, labels = torch.zeros(LENGTH, dtype=torch.long), torch.full((LENGTH,), -100)
            ids[: len(tokens)] = tokens
            labels[PROMPT - 1 : len(tokens) - 1] = answer
            pair |= {f"{name}_ids": ids, f"{name}_labels": labels}
        return pair


@dataclass(frozen=True, kw_only=True)
class Preferences(Training):
    root: str
    reference: str = "auto"
    adapter: LoraOptions | None = None
    layout: dict[str, Any] = field(default_factory=lambda: {"num_microbatches": 2})
    steps: int = 2
    clip: float | None = 0.5
    validate_every: int | None = 0
    precision: Any = "64-true"

    smallest: ClassVar[float] = 1e-3
    synced: ClassVar[tuple[str, ...]] = ("val_loss", "val_rewards/margins")
    always_clips: ClassVar[bool] = False
    kind: ClassVar[type[LitDPO]] = LitDPO

    def make_module(self):
        return self.kind(
            self.root,
            reference=self.reference,
            beta=0.5,
            adapter=self.adapter,
            optimizer=AdamWConfig(learning_rate=5e-3, eps=1e-3, decay_steps=4),
        )

    def make_data(self):
        return Pairs()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("base") / "llama"
    make_model("llama").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("reference", "layout"),
    [
        *(("copy", name) for name in ("t2p2", "p2v2", "c2", "d2 sharded parameters")),
        *(("adapters_off", name) for name in ("t2p2", "d2 sharded")),
    ],
)
def test_layout_matches_single_process(reference, layout, parity, root):
    run = Preferences(
        root=root,
        reference=reference,
        adapter=LoraOptions(r=3, modules_to_save=("norm",), init="gaussian")
        if reference == "adapters_off"
        else None,
    )
    parity.check(run, LAYOUTS[layout])


class LitPlain(LitDPO):
    """Preference tuning without Adam, whose steps hide the sizes of the gradients."""

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05)


@dataclass(frozen=True, kw_only=True)
class PlainPreferences(Preferences):
    clip: float | None = None
    validate_every: int | None = None
    kind: ClassVar[type[LitDPO]] = LitPlain


def trl_results(run, initial, folder):
    """Return losses, rewards and final weights of TRL's trainer on the same batches."""
    import peft
    from datasets import Dataset as Table
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    make_tiny(folder / "tokenizer", vocabulary_size=300)
    model = AutoModelForCausalLM.from_pretrained(run.root, dtype=torch.float64)
    if run.adapter is not None:
        model = peft.get_peft_model(model, run.adapter.config(task_type="CAUSAL_LM")).double()
    names = {f"model.{name.removeprefix('base_model.model.')}": name for name in model.state_dict()}
    model.load_state_dict({name: initial[mine] for mine, name in names.items()})
    trainer = DPOTrainer(
        model,
        ref_model=AutoModelForCausalLM.from_pretrained(run.root, dtype=torch.float64)
        if run.adapter is None
        else None,
        args=DPOConfig(
            str(folder), beta=0.5, use_cpu=True, bf16=False, report_to=[], max_length=None
        ),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train_dataset=Table.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
    )
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses, collate = [], DataCollatorForPreference(pad_token_id=0)
    for step in range(run.steps):
        rows = [Pairs()[step * run.global_batch + row] for row in range(run.global_batch)]
        loss = trainer.compute_loss(model, collate([trl_row(row) for row in rows]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    final = {mine: model.state_dict()[name] for mine, name in names.items()}
    return {"losses": losses, "metrics": trainer._metrics["train"], "final": final}


def trl_row(pair):
    answers = {
        f"{name}_ids": pair[f"{name}_labels"][pair[f"{name}_labels"] != -100].tolist()
        for name in ("chosen", "rejected")
    }
    return {"prompt_ids": pair["chosen_ids"][:PROMPT].tolist(), **answers}


@pytest.mark.parametrize("adapters", [False, True])
def test_losses_and_weights_equal_trl(adapters, parity, root, tmp_path):
    pytest.importorskip("trl")
    adapter = LoraOptions(r=3, init="gaussian") if adapters else None
    run = PlainPreferences(root=root, adapter=adapter)
    found = parity.result(run)
    expected = trl_results(run, found["initial"], tmp_path)
    assert_near(found["losses"], expected["losses"], 1e-6, "losses")
    # A reward is beta times the difference of two log-probabilities. Rounded to float32, these
    # differ by up to 2e-6 each below 64.
    for name in ("chosen", "rejected", "margins", "accuracies"):
        values = [logged[f"rewards/{name}"] for logged in found["logged"][:-1]]
        wanted = expected["metrics"][f"rewards/{name}"]
        assert_near(values, wanted, 1e-4, name, absolute=2e-6)
    assert_weights_near(found["final"], expected["final"])


@dataclass(frozen=True, kw_only=True)
class PreparedPreferences(Preferences):
    """Training on the pairs that the package prepares. ``saved_in`` is for checkpoints."""

    store: str
    saved_in: str | None = None

    synced: ClassVar[tuple[str, ...]] = ("val_loss",)

    def make_loaders(self, trainer):
        return [prepared(self.root, Path(self.store))]

    def make_callbacks(self):
        if self.saved_in is None:
            return []
        return [ModelCheckpoint(self.saved_in, "{step}", every_n_train_steps=1, save_top_k=-1)]


def prepared(model, store):
    return PreferenceDataModule(
        path=str(store / "pairs.jsonl"),
        data_dir=str(store / "tokens"),
        tokenizer_dir=model,
        sequence_length=96,
        too_long="drop",
        num_microbatches=2,
        global_batch_size=8,
        validation_samples=10,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    model = str(folder / "tiny")
    make_tiny(model, vocabulary_size=400, hidden_size=32, intermediate_size=48)
    answers = ("yes", "no", "perhaps", "never")
    write_rows(
        folder / "pairs.jsonl",
        (
            {"prompt": f"Is {n} odd?", "chosen": answers[n % 4], "rejected": answers[n % 3]}
            for n in range(60)
            if n % 4 != n % 3
        ),
    )
    prepared(model, folder).prepare_data()
    return PreparedPreferences(root=model, store=str(folder))


@pytest.mark.parametrize("layout", ["t2p2", "d2"])
def test_precomputed_reference_equals_copy(layout, parity, store):
    run = replace(store, reference="precomputed")
    parity.check(run, LAYOUTS[layout], expected=parity.result(store))


@pytest.mark.parametrize(("reference", "layout"), [("copy", "d2"), ("precomputed", "t2p2")])
def test_resumed_training_has_same_reference(reference, layout, parity, store, tmp_path):
    expected = parity.result(store)
    parity.result(replace(store, saved_in=str(tmp_path)))
    run = replace(store, reference=reference, resume=str(tmp_path / "step=1.ckpt"))
    found = parity.ranks(run.on(LAYOUTS[layout]))[0]
    assert_near(found["losses"], expected["losses"][1:], 1e-5, "losses")
    assert_weights_near(found["final"], expected["final"], smallest=1e-3)
