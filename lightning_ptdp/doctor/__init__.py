"""Checks of a machine's ability to train, each with a remedy.

A check is a function that returns one or several ``Check`` objects. It never raises an error for
the fault that it looks for. ``inspect_all`` runs the checks in order. ``render`` formats the result
for people, ``as_json`` for programs. To add a check, write its function next to similar ones and
name it in ``inspection.py``.
"""

from lightning_ptdp.doctor.inspection import Inspection, Question, as_json, inspect_all, render
from lightning_ptdp.doctor.machine_checks import Check, Status

__all__ = ["Check", "Inspection", "Question", "Status", "as_json", "inspect_all", "render"]
