"""A user's script, run by the launcher tests: ``script.py {json of settings} {folder for
results}``.

It does not import lightning_ptdp unless a setting asks for it.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

SETTINGS, FOLDER = json.loads(sys.argv[1]), Path(sys.argv[2])
if SETTINGS.get("terminate_at_start") and os.environ.get("LOCAL_RANK") == "1":
    os.kill(os.getppid(), signal.SIGTERM)
if "network" in SETTINGS:
    with open(f"/run/netns/{SETTINGS['network']}") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter {network.name}")
if SETTINGS.get("import_package"):
    importlib.import_module("lightning_ptdp")
L = importlib.import_module(SETTINGS.get("namespace", "lightning.pytorch"))


class Even(torch.nn.Linear):
    """A linear layer with deterministic initial values."""

    def reset_parameters(self):
        for parameter in self.parameters():
            parameter.data.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))


def flat_net(layer=torch.nn.Linear):
    width = 8
    return torch.nn.Sequential(
        layer(width, width), torch.nn.Tanh(), layer(width, width), layer(width, 1)
    )


def deep_net():
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
        for _ in range(4)
    ]
    return torch.nn.Sequential(*blocks)


class LitScript(L.LightningModule):
    """Trains a sequence of layers, and fails where the settings ask for it."""

    def __init__(self):
        super().__init__()
        self.net = None
        if not SETTINGS.get("configure_model"):
            self.net = deep_net() if SETTINGS.get("deep") else flat_net()

    def configure_model(self):
        if self.net is None:
            self.net = flat_net(Even)

    def configure_parallel(self):
        from lightning_ptdp.tensor_parallel import ParallelPlan

        return ParallelPlan(
            tensor={"net.*.0": "column", "net.*.2": "row"} if SETTINGS.get("deep") else {}
        )

    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and torch.distributed.get_rank() in SETTINGS.get(
            "fail_on_ranks", []
        ):
            raise ZeroDivisionError("the user's own mistake")
        if self.global_step == 2 and torch.distributed.get_rank() in SETTINGS.get(
            "terminate_ranks", []
        ):
            os.kill(os.getpid(), signal.SIGTERM)
        if SETTINGS.get("collective"):
            eval(SETTINGS["collective"], {"self": self})
        loss = self.net(batch[0]).sub(batch[0].sum(-1, keepdim=True)).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log(
            "val_loss",
            self.net(batch[0]).sub(batch[0].sum(-1, keepdim=True)).square().mean(),
            sync_dist=True,
        )

    test_step = validation_step

    def on_train_batch_end(self, *_):
        if "terminate_ranks" in SETTINGS:
            (FOLDER / f"step-{self.global_rank}").write_text(str(self.global_step))
        if self.global_step == 3:
            (FOLDER / f"running-{self.global_rank}").write_text(str(os.getpid()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def strategy():
    if "layout" not in SETTINGS:
        return SETTINGS.get("strategy", "ptdp")
    from lightning_ptdp.strategy import strategy_class

    return strategy_class(SETTINGS.get("namespace", "lightning.pytorch"))(**SETTINGS["layout"])


def main() -> None:
    L.seed_everything(1, verbose=False)
    module = LitScript()
    data = DataLoader(
        TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1))), batch_size=4
    )
    trainer = L.Trainer(
        strategy=strategy(),
        accelerator="cpu",
        devices=2,
        num_nodes=SETTINGS.get("num_nodes", 1),
        max_steps=SETTINGS.get("max_steps", 6),
        callbacks=[
            getattr(L.callbacks, name)(**options)
            for name, options in SETTINGS.get("callbacks", {}).items()
        ],
        logger=False,
        enable_checkpointing="callbacks" in SETTINGS,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    result = {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "steps": trainer.global_step,
        "loss": float(trainer.callback_metrics["train_loss"]),
        "strategy": type(trainer.strategy).__name__,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "libraries": sorted({name.partition(".")[0] for name in sys.modules}),
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
    }
    if SETTINGS.get("evaluate"):
        result["evaluated"] = getattr(trainer, SETTINGS["evaluate"])(module, data, verbose=False)[
            0
        ]["val_loss"]
    if SETTINGS.get("deep"):
        result["whole"] = {
            name: value.tolist() for name, value in trainer.strategy.gather_state_dict().items()
        }
    (FOLDER / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
