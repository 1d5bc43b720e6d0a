"""Checks of whether this machine can train; each examines one thing and says how to mend it.

A check is a function that returns a ``Check`` (or some) and never raises for what it looks for.
``inspect_all`` runs them in order; ``render`` is for people, ``as_json`` for programs. Add one by
writing the function beside its kin and naming it in ``inspection.py``."""

from lightning_ptdp.doctor.check import Check, Status
from lightning_ptdp.doctor.doctor_report import as_json, render
from lightning_ptdp.doctor.inspection import Inspection, Question, inspect_all

__all__ = ["Check", "Inspection", "Question", "Status", "as_json", "inspect_all", "render"]
