"""Checks of a parsed configuration, before anything is built from it."""

from __future__ import annotations

from jsonargparse import Namespace

from lightning_ptdp.cli.error_messages import UserError

__all__ = ["check_values"]

_OPTIONAL = ("sample",)
"""Groups of keys that may be null."""

_MOST_SEED = 2**32 - 1
"""Largest seed that NumPy accepts."""


def check_values(config: Namespace, defaults: Namespace) -> None:
    """Check the groups of keys and the seed, which jsonargparse and Lightning do not check.

    Raises:
        UserError: A value is wrong. The message names the key, the value and what would work.
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
