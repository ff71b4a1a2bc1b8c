"""mpi4py's ``MPI``, which loads the MPI library and starts it: for modules that are imported once MPI was asked for.

mpi4py can be installed where no MPI is. Its import then raises RuntimeError, which nobody expects of an import.
"""

from __future__ import annotations

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"MPI was asked for, and cannot be used: {error}. Install mpi4py and an MPI library that it finds "
        "(pip install 'thinwire[mpi]' brings both), or leave the backend to thinwire.comm.init()"
    ) from error

__all__ = ["MPI"]
