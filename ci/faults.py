"""A training that is killed again and again, and checkpoints that are damaged: what survives.

    python ci/faults.py [--kills 50] [--seed 0] [--layouts d2,p2] [--kinds "save: renames,load"] [--timeout-s 20] [--folder DIR]

In every layout a tiny GPT is trained by real processes over gloo, with a checkpoint every few steps. One rank, drawn at random, dies by
SIGKILL at an instant of a drawn kind (fault_campaign/kinds.py); the training goes on from the newest complete checkpoint or from
`latest`, and so forth. Checked after every kill:

- the other ranks end by themselves within the strategy's limit with an error that names the lost rank;
- `latest` is a whole checkpoint (every byte is compared with its checksum), and neither it nor the newest whole one is older than before;
- what stands under a checkpoint's own name is whole, or older than the newest and being removed.

At the end the weights must be those of a training that nobody disturbed, bit for bit. Then every file of a checkpoint is damaged, and all
of that must be noticed. The exit code is 1 if anything was not as it should be; what the ranks of a wrong attempt printed is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_campaign.damage import damage_every_file
from fault_campaign.folder import Standing, look
from fault_campaign.kinds import KINDS, Trap
from fault_campaign.processes import Ended, Processes, agent_store, own_store
from fault_campaign.training import LAYOUTS, SAVE_EVERY, Attempt, world_size_of

_LONGEST_S = 4.0  # after which a rank that is to die at any time has died
_LOADED_S = 5.0  # what a loaded machine may take longer than the strategy's limit
_GUARD = 40  # steps after which an attempt ends if nobody died
_REST = 4  # steps that the last attempt makes
_PLACES = 40
_PRINTED = "\nIt printed:\n"
# Where rank 0 keeps the store it has named the lost rank and ended, and those who asked after that hear of nobody any more.
_STORE_GONE = "rank 0, which keeps the store"


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One line of the report.

    Attributes:
        kind: A key of ``KINDS``.
        after_s: Until the other ranks had ended.
        steps_lost: That the next attempt has to make again.
    """

    kind: str
    after_s: float
    steps_lost: int


@dataclass(kw_only=True)
class Campaign:
    """Kills in one layout."""

    layout: str
    folder: Path
    draw: random.Random
    timeout_s: float
    kills: list[Kill] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    standing: Standing = field(default_factory=Standing)

    def __post_init__(self) -> None:
        self._processes = Processes(self.folder)
        (self.folder / "checkpoints").mkdir()

    def kill(self, kind: str) -> None:
        """One attempt that loses a rank."""
        victim = self.draw.randrange(world_size_of(self.layout)) if KINDS[kind].anyone else 0
        if kind == "load" and self.standing.newest is None:
            self._attempt(SAVE_EVERY)
            self.standing = look(self.folder / "checkpoints", self.standing)
        first = max(self.standing.newest_step, 0)
        trap, kill = None, None
        if KINDS[kind].calls:
            call, behind = self.draw.randint(1, KINDS[kind].most), self.draw.random() < 0.5
            trap = Trap(kind=kind, victim=victim, step=first + self.draw.randrange(SAVE_EVERY + 1), call=call, behind=behind)
        else:
            kill = (victim, self.draw.uniform(0.0, _LONGEST_S))
        ended = self._attempt(first + _GUARD, trap=trap, kill=kill, async_save=KINDS[kind].saves == "beside")
        what = f"{self.layout}, {kind}: {trap or f'rank {victim} after {kill[1]:.2f} s' if kill else trap}"
        if ended.killed is None:
            self.wrong.append(f"{what}: nobody died; {ended.errors}{_PRINTED}{ended.printed}")
            return
        self._judge(what, victim, ended)
        self.standing = look(self.folder / "checkpoints", self.standing)
        self.wrong += [f"{what}: {text}" for text in self.standing.wrong]
        lost = max(ended.steps[victim], 0) - max(self.standing.newest_step, 0)
        self.kills.append(Kill(kind=kind, after_s=ended.after_s, steps_lost=max(lost, 0)))

    def finish(self) -> None:
        """Train undisturbed to the end, and from the beginning, and compare."""
        steps = max(self.standing.newest_step, 0) + _REST
        killed = self._attempt(steps)
        self.standing = look(self.folder / "checkpoints", self.standing)
        self.wrong += [f"{self.layout}, at the end: {text}" for text in self.standing.wrong]
        whole = self._attempt(steps, folder=self.folder / "undisturbed")
        for name, ended in (("the last attempt", killed), ("the undisturbed training", whole)):
            if len(ended.weights) != world_size_of(self.layout):
                self.wrong.append(f"{self.layout}: {name} did not finish: {ended.errors}{_PRINTED}{ended.printed}")
        if {*killed.weights.values()} != {*whole.weights.values()} or len({*whole.weights.values()}) != 1:
            self.wrong.append(f"{self.layout}: after {steps} steps the weights are not those of an undisturbed training")

    def _attempt(self, steps: int, *, folder: Path | None = None, **how: Any) -> Ended:
        where = folder or self.folder / "checkpoints"
        resume = None
        if folder is None and self.standing.newest is not None:
            resume = (
                self.draw.choice([self.standing.newest, where / "latest"])
                if self.standing.latest_step >= 0
                else self.standing.newest
            )
        kill = how.pop("kill", None)
        store = self.draw.choice([agent_store, own_store])
        with store(world_size_of(self.layout)) as environment:
            attempt = Attempt(
                layout=self.layout,
                folder=where,
                resume=resume,
                steps=steps,
                timeout_s=self.timeout_s,
                environment=environment,
                **({"trap": None, "async_save": False} | how),
            )
            return self._processes.run(attempt, kill=kill, patience_s=2 * self.timeout_s + _LOADED_S)

    def _judge(self, what: str, victim: int, ended: Ended) -> None:
        if ended.after_s > self.timeout_s + _LOADED_S and not ended.hanging:
            self.wrong.append(f"{what}: the others ended after {ended.after_s:.1f} s, the limit is {self.timeout_s:g} s")
        named = {rank for rank, said in ended.errors.items() if re.search(rf"\brank {victim}\b", said)}
        for rank in {*ended.steps} - {victim}:
            said, printed = ended.errors.get(rank, "nothing"), ended.printed.get(rank, "nothing")
            if rank in ended.hanging:
                self.wrong.append(f"{what}: rank {rank} hangs{_PRINTED}{printed}")
            elif rank not in named and not (named and _STORE_GONE in said):
                self.wrong.append(
                    f"{what}: rank {rank} does not name the lost rank {victim}. It said: {said}\nIt printed:\n{printed}"
                )


def main() -> int:
    """Run the campaign; the exit code."""
    options = _options()
    began, kinds = time.monotonic(), options.kinds.split(",") if options.kinds else list(KINDS)
    layouts = options.layouts.split(",") if options.layouts else list(LAYOUTS)
    draw = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        root = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        campaigns = []
        for layout in layouts:
            folder = root / layout.replace(" ", "-")
            folder.mkdir()
            campaigns.append(
                Campaign(layout=layout, folder=folder, draw=random.Random(draw.random()), timeout_s=options.timeout_s)
            )
        deck = _deck(kinds, draw)
        for number in range(options.kills):
            campaign = campaigns[number % len(campaigns)]
            known = len(campaign.wrong)
            campaign.kill(next(deck))
            for text in campaign.wrong[known:]:
                print(f"\nWRONG  {text}", flush=True)
            if options.verbose:
                print(
                    f"{time.monotonic() - began:6.1f} s  {campaign.layout:<12}{campaign.kills[-1:]}, {len(campaign.wrong)} wrong",
                    flush=True,
                )
        for campaign in campaigns:
            campaign.finish()
        wrong = [text for campaign in campaigns for text in campaign.wrong]
        _report(campaigns, time.monotonic() - began)
        newest = next(campaign.standing.newest for campaign in reversed(campaigns) if campaign.standing.newest is not None)
        wrong += _damage(newest, root, draw)
    print(f"\n{'all survived' if not wrong else f'{len(wrong)} things went wrong:'}")
    for text in wrong:
        print(f"- {text.partition(_PRINTED)[0]}")
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="in all layouts together (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    parser.add_argument("--layouts", help=f"some of: {', '.join(LAYOUTS)} (default: all)")
    parser.add_argument("--kinds", help=f"some of: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="the strategy's limit of every wait (default 20)")
    parser.add_argument("--folder", help="an empty folder to keep everything in (default: a temporary one)")
    parser.add_argument("--verbose", action="store_true", help="a line a kill")
    return parser.parse_args()


def _deck(kinds: Sequence[str], draw: random.Random) -> Iterator[str]:
    """All kinds about equally often, in random order."""
    while True:
        yield from draw.sample(list(kinds), len(kinds))


def _report(campaigns: Sequence[Campaign], seconds: float) -> None:
    kills = [kill for campaign in campaigns for kill in campaign.kills]
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{len(kills)} kills in {seconds:.0f} s   ({os.cpu_count()} cores, load {load})")
    print(f"{'killed in':<20}{'kills':>6}{'others ended after, s':>24}{'steps lost':>14}")
    for kind in KINDS:
        if found := [kill for kill in kills if kill.kind == kind]:
            times, steps = [kill.after_s for kill in found], [kill.steps_lost for kill in found]
            spread = f"{statistics.median(times):.1f}, at most {max(times):.1f}"
            print(f"{kind:<20}{len(found):>6}{spread:>24}{f'{statistics.mean(steps):.1f}, {max(steps)}':>14}")


def _damage(checkpoint: Path, folder: Path, draw: random.Random) -> list[str]:
    print(f"\n{'damaged':<16}{'bytes':>9}{'bits flipped':>14}{'cut short':>11}{'not noticed':>13}")
    wrong = []
    for damage in damage_every_file(checkpoint, folder, draw, places=_PLACES):
        print(f"{damage.file:<16}{damage.size:>9}{damage.flips:>14}{damage.cuts:>11}{len(damage.unseen):>13}")
        wrong += [f"{damage.file}: {text} was not noticed" for text in damage.unseen]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
