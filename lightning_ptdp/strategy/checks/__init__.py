"""Checks before any process is started.

Each error names the field, the value and what would work."""
