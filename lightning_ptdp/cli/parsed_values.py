"""Checks of a parsed configuration, before anything is built from it."""

from __future__ import annotations

from jsonargparse import Namespace

from lightning_ptdp.cli.error_messages import UserError

__all__ = ["check_values"]

_OPTIONAL = ("sample",)
"""Groups of keys that null switches off."""

_MOST_SEED = 2**32 - 1
"""NumPy's largest seed."""


def check_values(config: Namespace, defaults: Namespace) -> None:
    """Check what jsonargparse and Lightning leave unchecked: groups of keys, and the seed.

    Raises:
        UserError: Names the key, the value and what would work.
    """
    for name, value in vars(defaults).items():
        found = config.get(name)
        if (
            isinstance(value, Namespace)
            and not isinstance(found, Namespace)
            and (found is not None or name not in _OPTIONAL)
        ):
            raise UserError(f"{name}={found!r} must be a mapping of keys to values")
    seed = config.get("seed_everything")
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed <= _MOST_SEED:
        raise UserError(f"seed_everything={seed} must be between 0 and {_MOST_SEED}")
