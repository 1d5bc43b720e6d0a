"""Entry point of ``python -m lightning_ptdp``, which runs ``ptdp``."""

import sys

from lightning_ptdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
