"""Training runs with repeatedly killed or frozen ranks, and with damaged checkpoints.

    python ci/faults.py [--kills 50] [--seed 0] [--layouts d2,p2] [--kinds "save: renames,load"]
    [--faults kill,stop] [--snapshots]
                        [--timeout-s 20] [--allow-s 0] [--folder DIR] [--verbose]

In every layout, real processes train a tiny GPT over gloo and save a checkpoint every few steps.
They are started like those of torchrun, Lightning or SLURM. In each attempt, one random rank is
lost by SIGKILL or SIGSTOP, at an instant of a random kind (fault_campaign/kinds.py). Layouts with
"nodes" have two nodes, each with a memory folder of its own instead of /dev/shm; there all ranks of
a node may be lost at once, together with its memory. The next attempt continues from the newest
complete checkpoint, from `latest`, or from the folder. Every process has its own clock, which
differs by up to a day, like the clocks of different machines. Checks after every attempt:

- The other ranks end by themselves, with an error that names the lost rank. The limit is 2 s if the
  rank was killed. It is 1.3 times the strategy's timeout if the rank was frozen, or was killed
  before it had reached rank 0 (for rank 0: before it had answered). In the latter case only the
  launcher could detect the loss (torchrun, Lightning, `srun --kill-on-bad-exit`), and here no
  launcher does. Ranks that had finished before the loss are not checked.
- `latest` is a complete checkpoint: every byte is compared with its checksum. Neither `latest` nor
  the newest complete checkpoint is older than before.
- Everything under a checkpoint's own name is complete.
- With ``--snapshots``, at most one step is lost, and no snapshot is left at the end.

At the end, the weights must equal those of an undisturbed training, bit for bit, and no temporary
files may be left. Then every file of a checkpoint is damaged, and all damage must be detected.

The exit code is 1 if any check fails. The output of the ranks of a failed attempt is shown. On a
busy machine, `--allow-s` is added to the two limits. 300 attempts in sequence take about an hour
and a half with `--timeout-s 20`, mostly waiting for limits. Several runs with one layout each can
run at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fault_campaign.damage import damage_every_file
from fault_campaign.folder import Standing, leftovers, look, newest_here
from fault_campaign.kinds import FAULTS, KINDS, Trap
from fault_campaign.processes import LAUNCHERS, Ended, Processes, Shot
from fault_campaign.training import (
    LAYOUTS,
    SAVE_EVERY,
    Attempt,
    enter_node,
    nodes_of,
    world_size_of,
)

from lightning_ptdp.checkpoint import newest_checkpoint, read_metadata
from lightning_ptdp.checkpoint.memory_folders import LINK, in_memory

_LONGEST_S = 4.0  # time within which a rank is lost, for kinds without traps
_KILLED_S, _STOPPED = 2.0, 1.3  # limits to name a rank: killed (s), frozen (timeouts)
_HANGING_S = 30.0  # added to these limits before a rank counts as hanging
_DAY_S = 86400.0
_GUARD = 40  # steps after which an attempt ends if no rank was lost
_REST = 4  # steps of the last attempt
_PLACES = 40
_PRINTED = "\nIt printed:\n"
# Ranks blamed by the last words of a rank. A table that lists all ranks blames none.
_TABLE = "Last action of each rank:"
_BLAMED = re.compile(
    r"rank (\d+): (?:last reported|has not reported)|rank (\d+) \(or torchrun\), which hosts"
    r"|(?:[Nn]o answer from|did not hear from|without) ranks? ([\d, ]+)"
    r"|ranks? ([\d, ]+?) (?:did not join|joined and then disappeared|does not answer|do not answer|is "
    r"gone|are gone|was lost|has ended|was killed)"
)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One line of the report.

    Attributes:
        kind: A key of ``KINDS``.
        fault: A key of ``FAULTS``.
        named_after_s: Time until each surviving rank named the lost rank.
        steps_lost: Number of steps that the next attempt must repeat.
    """

    kind: str
    fault: str
    named_after_s: tuple[float, ...]
    steps_lost: int


@dataclass(kw_only=True)
class Campaign:
    """Fault campaign in one layout."""

    layout: str
    folder: Path
    draw: random.Random
    timeout_s: float
    allow_s: float
    snapshots: bool = False
    kills: list[Kill] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    standing: Standing = field(default_factory=Standing)

    def __post_init__(self) -> None:
        self._processes = Processes(self.folder)
        self._nodes = self.folder / "nodes"
        (self.folder / "checkpoints").mkdir()

    def kill(self, kind: str, fault: str) -> None:
        """Run one attempt that loses a rank."""
        world_size, nodes = world_size_of(self.layout), nodes_of(self.layout)
        victim = self.draw.randrange(world_size) if KINDS[kind].anyone else 0
        victims = (victim,)
        if KINDS[kind].node:
            per_node = world_size // nodes
            first_of_node = self._expendable(victim // per_node) * per_node
            victims = tuple(range(first_of_node, first_of_node + per_node))
            victim = first_of_node
        if kind == "load" and self.standing.newest is None:
            self._attempt(SAVE_EVERY)
            self.standing = look(self.folder / "checkpoints", self.standing)
        first = max(self.standing.newest_step, 0)
        trap, shot = None, None
        if KINDS[kind].calls:
            note = self.folder / "lost.txt"
            note.unlink(missing_ok=True)
            call = self.draw.randint(1, KINDS[kind].most)
            behind = self.draw.random() < 0.5 and not KINDS[kind].alone
            step = first + self.draw.randrange(SAVE_EVERY + 1)
            trap = Trap(
                kind=kind,
                fault=fault,
                note=note,
                victim=victim,
                step=step,
                call=call,
                behind=behind,
            )
        else:
            after_s = self.draw.uniform(0.0, _LONGEST_S) + KINDS[kind].node
            shot = Shot(fault=fault, victims=victims, after_s=after_s)
        launcher = self.draw.choice(list(LAUNCHERS))
        slowly = self.allow_s + _STOPPED * self.timeout_s
        ended = self._attempt(
            first + _GUARD,
            trap=trap,
            shot=shot,
            launcher=launcher,
            async_save=KINDS[kind].saves == "beside",
            patience_s=slowly + _HANGING_S,
        )
        soon = self.allow_s + _KILLED_S if fault == "kill" else slowly
        what = f"{self.layout} by {launcher}, {kind}, {fault}: {trap or shot}"
        if ended.lost is None:
            self.wrong.append(f"{what}: nobody was lost; {ended.errors}{_PRINTED}{ended.printed}")
            return
        if KINDS[kind].node:
            enter_node(self._nodes, 0)  # the lost folder must not be that of this process
            node = victim * nodes // world_size
            shutil.rmtree(self._nodes / f"node{node}" / "shm", ignore_errors=True)
        self._enter_newest()
        if KINDS[kind].node and max(ended.steps.values()) < 0:
            soon = slowly  # no process of the lost node is left to see the loss
        named = self._judge(
            what,
            victims,
            ended,
            soon=soon,
            late=slowly,
        )
        self.standing = look(self.folder / "checkpoints", self.standing)
        self.wrong += [f"{what}: {text}" for text in self.standing.wrong]
        began = max(ended.steps[rank] for rank in victims)
        lost = max(began, 0) - max(self.standing.newest_step, 0)
        if self.snapshots and lost > 1:
            self.wrong.append(f"{what}: {lost} steps are lost{_PRINTED}{ended.printed}")
        self.kills.append(
            Kill(kind=kind, fault=fault, named_after_s=named, steps_lost=max(lost, 0))
        )

    def _expendable(self, node: int) -> int:
        """Return a node that can be lost: ``node``, unless it alone has the newest snapshot.

        A second loss before the copy to a replaced node is complete loses both copies."""
        nodes = range(nodes_of(self.layout))
        name = self.standing.newest.name if self.standing.newest is not None else ""
        holders = [n for n in nodes if [*(self._nodes / f"node{n}").rglob(name or "none")]]
        return (node + 1) % len(nodes) if holders == [node] else node

    def _enter_newest(self) -> None:
        """Enter the node that has the newest snapshot; a restart finds it from any node."""
        nodes = nodes_of(self.layout)
        found = {}
        for node in range(nodes):
            enter_node(self._nodes, node, nodes=nodes)
            newest = newest_here(self.folder / "checkpoints")
            found[node] = -1 if newest is None else int(read_metadata(newest).run["global_step"])
        enter_node(self._nodes, max(found, key=lambda node: found[node]), nodes=nodes)

    def finish(self) -> None:
        """Train undisturbed to the end and from the beginning, and compare the two."""
        self._enter_newest()
        steps = max(self.standing.newest_step, 0) + _REST
        killed = self._attempt(steps)
        checkpoints = self.folder / "checkpoints"
        if self.snapshots:
            self.standing = Standing()  # the snapshots are removed
            if (
                (checkpoints / LINK).is_symlink()
                or in_memory(newest_checkpoint(checkpoints) or ".")
                or [*self._nodes.rglob("step-*")]
            ):
                self.wrong.append(f"{self.layout}, at the end: snapshots are left")
        self.standing = look(checkpoints, self.standing)
        self.wrong += [f"{self.layout}, at the end: {text}" for text in self.standing.wrong]
        self.wrong += [
            f"{self.layout}, at the end: {name} is left"
            for name in leftovers(self.folder / "checkpoints")
        ]
        whole = self._attempt(steps, folder=self.folder / "undisturbed")
        for name, ended in (("the last attempt", killed), ("the undisturbed training", whole)):
            if len(ended.weights) != world_size_of(self.layout):
                self.wrong.append(
                    f"{self.layout}: {name} did not finish: {ended.errors}{_PRINTED}{ended.printed}"
                )
        if {*killed.weights.values()} != {*whole.weights.values()} or len(
            {*whole.weights.values()}
        ) != 1:
            self.wrong.append(
                f"{self.layout}: after {steps} steps the weights are not those of an undisturbed "
                "training"
            )

    def _attempt(
        self,
        steps: int,
        *,
        folder: Path | None = None,
        trap: Trap | None = None,
        shot: Shot | None = None,
        launcher: str = "popen",
        async_save: bool = False,
        patience_s: float = _HANGING_S,
    ) -> Ended:
        where = folder or self.folder / "checkpoints"
        resume = None
        if folder is None and self.standing.newest is not None:
            ways = [self.standing.newest, where] + [where / "latest"] * (
                self.standing.latest_step >= 0
            )
            resume = self.draw.choice(ways[:1] if self.snapshots else ways)
        ranks = range(world_size_of(self.layout))
        with LAUNCHERS[launcher](len(ranks), nodes_of(self.layout)) as environment:
            attempt = Attempt(
                layout=self.layout,
                folder=where,
                nodes=self._nodes,
                resume=resume,
                steps=steps,
                timeout_s=self.timeout_s,
                async_save=async_save,
                snapshots=self.snapshots,
                trap=trap,
                clocks=[self.draw.uniform(-_DAY_S, _DAY_S) for _ in ranks],
                environment=environment,
            )
            return self._processes.run(attempt, shot=shot, patience_s=patience_s)

    def _judge(
        self, what: str, victims: tuple[int, ...], ended: Ended, *, soon: float, late: float
    ) -> tuple[float, ...]:
        """Check the time that each of the other ranks took to name the lost rank.

        The limit is ``soon`` if the rank could know of the lost rank, else ``late``."""
        times = []
        for rank in {*ended.steps} - {*victims, *ended.finished}:
            said, printed = ended.said(rank), ended.printed.get(rank, "nothing")
            after_s = ended.said_at(rank) - max(ended.lost_at, ended.began.get(rank, 0.0))
            if rank in ended.hanging:
                self.wrong.append(f"{what}: rank {rank} hangs{_PRINTED}{printed}")
                continue
            times.append(after_s)
            bound = soon if all(_had_met(rank, victim, ended) for victim in victims) else late
            if not {*victims} & blamed(said, by=rank):
                self.wrong.append(
                    f"{what}: rank {rank} does not name the lost ranks {victims}. It said: "
                    f"{said}{_PRINTED}{printed}"
                )
            elif after_s > bound:
                self.wrong.append(
                    f"{what}: rank {rank} named the lost rank after {after_s:.1f} s, the bound is "
                    f"{bound:g} s: {said}"
                )
        return tuple(times)


def _had_met(rank: int, victim: int, ended: Ended) -> bool:
    """Return True if ``rank`` could know that ``victim`` had joined.

    Rank 0 answers all ranks and knows which ranks joined. The other ranks learn it from rank 0."""
    known = [ended.met.get(victim, math.inf)] + [ended.met.get(rank, math.inf)] * (victim == 0)
    return max(known) < ended.lost_at


def blamed(said: str, *, by: int) -> set[int]:
    """Return the ranks that the last words of rank ``by`` blame."""
    head, table, _ = said.partition(_TABLE)
    ranks = {int(rank) for rank in re.findall(r"\brank (\d+)\b", head if table else "")}
    for groups in _BLAMED.findall(said):
        ranks |= {int(rank) for rank in re.findall(r"\d+", " ".join(groups))}
    return ranks - {by}


def main() -> int:
    """Run the campaign and return the exit code."""
    options = _options()
    began, kinds = time.monotonic(), options.kinds.split(",") if options.kinds else list(KINDS)
    layouts = options.layouts.split(",") if options.layouts else list(LAYOUTS)
    draw = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        root = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        campaigns = []
        for layout in layouts:
            folder = root / layout.replace(" ", "-")
            folder.mkdir(parents=True)
            campaigns.append(
                Campaign(
                    layout=layout,
                    folder=folder,
                    draw=random.Random(draw.random()),
                    timeout_s=options.timeout_s,
                    allow_s=options.allow_s,
                    snapshots=options.snapshots,
                )
            )
        deck = _deck([(kind, fault) for kind in kinds for fault in options.faults.split(",")], draw)
        for number in range(options.kills):
            campaign = campaigns[number % len(campaigns)]
            known = len(campaign.wrong)
            kind, fault = next(
                card for card in deck if not KINDS[card[0]].node or nodes_of(campaign.layout) > 1
            )
            campaign.kill(kind, fault)
            for text in campaign.wrong[known:]:
                print(f"\nWRONG  {text}", flush=True)
            if options.verbose:
                print(
                    f"{time.monotonic() - began:6.1f} s  "
                    f"{campaign.layout:<12}{campaign.kills[-1:]}, {len(campaign.wrong)} wrong",
                    flush=True,
                )
        for campaign in campaigns:
            campaign.finish()
        wrong = [text for campaign in campaigns for text in campaign.wrong]
        _report(campaigns, time.monotonic() - began)
        newest = next(
            campaign.standing.newest
            for campaign in reversed(campaigns)
            if campaign.standing.newest is not None
        )
        wrong += _damage(newest, root, draw)
    print(f"\n{'all survived' if not wrong else f'{len(wrong)} things went wrong:'}")
    for text in wrong:
        print(f"- {text.partition(_PRINTED)[0]}")
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=50, help="in all layouts together (default 50)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of everything that is drawn (default 0)"
    )
    parser.add_argument("--layouts", help=f"some of: {', '.join(LAYOUTS)} (default: all)")
    parser.add_argument("--kinds", help=f"some of: {', '.join(KINDS)} (default: all)")
    parser.add_argument(
        "--faults", default=",".join(FAULTS), help=f"some of: {', '.join(FAULTS)} (default: all)"
    )
    parser.add_argument(
        "--allow-s",
        type=float,
        default=0.0,
        help="added to the bounds on a machine with other work (default 0)",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=20.0,
        help="the strategy's limit of every wait (default 20)",
    )
    parser.add_argument(
        "--folder", help="an empty folder to keep everything in (default: a temporary one)"
    )
    parser.add_argument("--snapshots", action="store_true", help="a snapshot after every step")
    parser.add_argument("--verbose", action="store_true", help="a line a kill")
    return parser.parse_args()


def _deck(cards: Sequence[tuple[str, str]], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield all cards about equally often, in random order."""
    while True:
        yield from draw.sample(list(cards), len(cards))


def _report(campaigns: Sequence[Campaign], seconds: float) -> None:
    kills = [kill for campaign in campaigns for kill in campaign.kills]
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{len(kills)} ranks lost in {seconds:.0f} s   ({os.cpu_count()} cores, load {load})")
    print(f"{'lost in':<18}{'by':<6}{'times':>6}{'others named it after, s':>28}{'steps lost':>14}")
    for kind, fault in [(kind, fault) for kind in KINDS for fault in FAULTS]:
        if found := [kill for kill in kills if (kill.kind, kill.fault) == (kind, fault)]:
            times, steps = (
                [time for kill in found for time in kill.named_after_s],
                [kill.steps_lost for kill in found],
            )
            spread = (
                f"{statistics.median(times):.1f}, at most {max(times):.1f}"
                if times
                else "all had finished"
            )
            print(
                f"{kind:<18}{fault:<6}{len(found):>6}{spread:>28}{f'{statistics.mean(steps):.1f}, {max(steps)}':>14}"
            )


def _damage(checkpoint: Path, folder: Path, draw: random.Random) -> list[str]:
    print(f"\n{'damaged':<16}{'bytes':>9}{'bits flipped':>14}{'cut short':>11}{'not noticed':>13}")
    wrong = []
    for damage in damage_every_file(checkpoint, folder, draw, places=_PLACES):
        print(
            f"{damage.file:<16}{damage.size:>9}{damage.flips:>14}{damage.cuts:>11}{len(damage.unseen):>13}"
        )
        wrong += [f"{damage.file}: {text} was not noticed" for text in damage.unseen]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
