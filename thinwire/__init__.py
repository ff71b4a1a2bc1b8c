"""thinwire trains big models over thin wires: error-compensated 1-bit optimizers over MPI, NCCL and Gloo.
Start with `thinwire.OneBitAdam`."""

from __future__ import annotations

from thinwire import comm, compress
from thinwire.compress import OneBitAdam

__all__ = ["OneBitAdam", "__version__", "comm", "compress"]

__version__ = "0.1.0"
