"""Runs of ``script.py`` under a launcher, and their results."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.processes import Session, session
from tests.scripts import forked_session

SCRIPT = Path(__file__).with_name("script.py")


def started(
    folder: Path, settings: dict[str, Any], **env: str
) -> contextlib.AbstractContextManager[Session]:
    """Start the script in its own session, in a process that has imported Lightning."""
    return forked_session([str(SCRIPT), json.dumps(settings), str(folder)], folder=folder, **env)


def started_afresh(
    folder: Path,
    settings: dict[str, Any],
    prefix: Sequence[str] = (),
    **env: str,
) -> contextlib.AbstractContextManager[Session]:
    """Start the script in a new interpreter."""
    command = [sys.executable, *prefix, str(SCRIPT), json.dumps(settings), str(folder)]
    return session(command, folder=folder, **env)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def trained_alone(make: Callable[[], torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Train the script's model in a plain PyTorch loop and return its weights."""
    torch.manual_seed(1)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    batches = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).split(4)
    for x in (*batches, *batches[:2]):
        optimizer.zero_grad()
        net(x).sub(x.sum(-1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return {f"net.{name}": value for name, value in net.state_dict().items()}
