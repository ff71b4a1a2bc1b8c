"""The version of thinwire, which every rank of a job must share."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
