"""Search for schedules that would hang under NCCL's rules (tests/schedule/nccl.py), without a GPU.

    python ci/nccl_orders.py [--ranks 2-16] [--chunks 1-4] [--microbatches 1-64] [--schedules
    1f1b,zb_v] [--own-queues]

Every schedule is run at every size, in training and in evaluation: the first step, in which shapes
are exchanged, and a later step. All streams of a rank share one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS=1``). A schedule that runs there also runs if streams have separate
queues, because separate queues only remove waiting. ``--own-queues`` runs that case, too. The exit
code is 1 if anything hangs. All sizes take about an hour.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_ptdp.schedule import SCHEDULES
from tests.schedule.nccl import Habits, every, operations
from tests.schedule.streams import stuck_operations


def main() -> int:
    """Run the schedules and return the exit code."""
    options = _options()
    began, hanging = time.monotonic(), 0
    for name in options.schedules:
        count = 0
        sizes = itertools.product(options.ranks, options.microbatches)
        for schedule in every(name, sizes, options.chunks):
            for first_step in (True, False):
                given = operations(schedule, Habits(first_step=first_step))
                for one_queue in (True, False) if options.own_queues else (True,):
                    count += 1
                    if any(stuck_operations(given, one_queue=one_queue)):
                        hanging += 1
                        print(
                            f"HANGS  {schedule.describe()} first_step={first_step} "
                            f"one_queue={one_queue}",
                            flush=True,
                        )
        print(f"{name:<20} {count:>6} steps, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{hanging} hang")
    return bool(hanging)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=_range, default="2-16")
    parser.add_argument("--chunks", type=_range, default="1-4")
    parser.add_argument("--microbatches", type=_range, default="1-64")
    parser.add_argument(
        "--schedules",
        type=lambda text: text.split(","),
        default=[name for name in SCHEDULES if name != "auto"],
    )
    parser.add_argument("--own-queues", action="store_true")
    return parser.parse_args()


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    sys.exit(main())
