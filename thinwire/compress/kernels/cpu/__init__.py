"""The kernels on CPUs, compiled by numba."""
