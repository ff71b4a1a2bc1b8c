"""Below every floor: vectors, and how numba makes loops over them into machine code, for the kernels on CPUs."""
