"""Which codecs have kernels of their own on which device."""

from __future__ import annotations

__all__ = ["SERVED_CODECS"]

SERVED_CODECS = {"cpu": ("sign1", "stat2", "int4", "fp8", "int8"), "cuda": ("sign1", "stat2", "int4", "fp8", "int8")}
"""By device, of the codecs in `packet_layout.CODE_BITS`; plain torch serves the others there, several times slower."""
