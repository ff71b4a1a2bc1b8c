"""Block-sparse attention on CPUs, compiled by numba."""
