"""Verification of a module, its data and a layout against one process."""

from lightning_ptdp.verification.api import verify
from lightning_ptdp.verification.report import Cause, Report
from lightning_ptdp.verification.training import VerificationError

__all__ = ["Cause", "Report", "VerificationError", "verify"]
