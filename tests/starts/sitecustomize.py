"""Faster start of interpreters that tests start.

They skip the packages that torchmetrics imports for image and audio metrics, and seldom collect
garbage: a collection of what torch and Lightning create at import takes a second. Python runs a
file of this name at its start; ``conftest.py`` adds the folder to the interpreters' path.
"""

import atexit
import gc
import runpy
import sys
from pathlib import Path


class _BeforeLightning:
    """Import hook that imports a reduced torchmetrics before Lightning.

    It does not import the package, because some tests need it unimported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ("lightning", "pytorch_lightning"):
            sys.meta_path.remove(self)
            imports = runpy.run_path(
                str(Path(__file__).parents[2] / "lightning_ptdp" / "cli" / "imports.py")
            )
            imports["import_torchmetrics_alone"]()


sys.meta_path.insert(0, _BeforeLightning())
gc.set_threshold(1_000_000, 20, 100)
atexit.register(gc.disable)  # saves one of the collections of all modules at exit
