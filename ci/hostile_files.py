"""Damaged and hostile files, with a check of the code that reads them.

    python ci/hostile_files.py [--only TEXT] [--show] [--folder DIR]

The cases cover every kind of file that the package reads (tests/hostile/): damaged, truncated and
extended files, and consistent forgeries that match their own checksums. Each file is read in its
own process, beside a canary. The read must end with one sentence that names the file, within one
second of processor time and 200 MB. It must not start anything. It must not read, write or remove
anything outside the folder of the case. Files that are unusual but valid may be accepted; these
cases are declared so. The exit code is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tests.hostile
from tests.hostile import Case
from tests.hostile.confined import MOST_MB, MOST_S, Confinement, Outcome

_COLUMNS = (
    "kind",
    "cases",
    "refused",
    "harmless",
    "wrong",
    "slow",
    "memory",
    "outside",
    "started",
    "longest",
    "most",
)


def all_cases(folder: Path) -> list[Case]:
    """Return the cases of every module of ``tests.hostile``.

    ``folder`` receives the files from which the cases are made."""
    names = [
        module.name
        for module in pkgutil.iter_modules(tests.hostile.__path__)
        if not module.name.startswith("test_")
    ]
    modules = [importlib.import_module(f"tests.hostile.{name}") for name in names]
    return [case for module in modules if hasattr(module, "cases") for case in module.cases(folder)]


def main() -> int:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    parser.add_argument("--show", action="store_true", help="print what every case was told")
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where the cases are written; a temporary folder by default",
    )
    options = parser.parse_args()
    # Import what readers import on first use, so that only the file's time and memory count.
    for module in ("sentencepiece", "litdata.streaming.downloader"):
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cases = [
            case for case in all_cases(Path(folder).resolve() / "made") if options.only in case.name
        ]
        assert len({case.name for case in cases}) == len(cases), "two cases of one name"
        gc.freeze()
        confinement = Confinement(Path(folder).resolve() / "cases")
        outcomes = []
        for case in cases:
            outcomes.append(confinement.run(case))
            if options.show or outcomes[-1].wrong:
                print(
                    f"{case.name}: {outcomes[-1].wrong or outcomes[-1].said or 'accepted'}",
                    flush=True,
                )
    print(_table(outcomes))
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"\n{len(outcomes)} files, {wrong} not as promised")
    return 1 if wrong else 0


def _table(outcomes: Sequence[Outcome]) -> str:
    kinds = sorted({outcome.kind for outcome in outcomes})
    groups = {kind: [outcome for outcome in outcomes if outcome.kind == kind] for kind in kinds} | {
        "all": list(outcomes)
    }
    rows = [_COLUMNS, *(_row(kind, group) for kind, group in groups.items() if group)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)


def _row(kind: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    counts = (
        len(outcomes),
        sum(bool(one.said) and not one.wrong for one in outcomes),
        sum(not one.said and not one.wrong for one in outcomes),
        sum(bool(one.wrong) for one in outcomes),
        sum(one.seconds > MOST_S for one in outcomes),
        sum(one.megabytes > MOST_MB for one in outcomes),
        sum(bool(one.outside) for one in outcomes),
        sum(bool(one.executed) for one in outcomes),
    )
    longest, most = max(one.seconds for one in outcomes), max(one.megabytes for one in outcomes)
    return (kind, *map(str, counts), f"{longest:.2f} s", f"{most:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
