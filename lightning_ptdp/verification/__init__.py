"""Verification: this module, this data, this layout against one process."""

from lightning_ptdp.verification.api import verify
from lightning_ptdp.verification.errors import VerificationError
from lightning_ptdp.verification.report import Cause, Report

__all__ = ["Cause", "Report", "VerificationError", "verify"]
