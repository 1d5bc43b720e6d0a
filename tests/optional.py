"""Optional libraries of tests.

They are imported when a test uses them: every worker of pytest collects all files.
"""

from importlib.util import find_spec

import pytest

__all__ = ["needs"]


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip tests without these libraries."""
    missing = [name for name in libraries if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
