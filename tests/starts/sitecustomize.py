"""For the interpreters that tests start, of which each imports Lightning: without what torchmetrics
imports for metrics of pictures and of sound, in 3 of 5 seconds. Python runs a file of this name at
its start; ``conftest.py`` puts the folder on their path."""

import runpy
import sys
from pathlib import Path


class _BeforeLightning:
    """The package is not imported here: some tests are about what happens when it is not."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ("lightning", "pytorch_lightning"):
            sys.meta_path.remove(self)
            imports = runpy.run_path(
                str(Path(__file__).parents[2] / "lightning_ptdp" / "cli" / "imports.py")
            )
            with imports["uncollected"]():
                imports["import_torchmetrics_alone"]()


sys.meta_path.insert(0, _BeforeLightning())
