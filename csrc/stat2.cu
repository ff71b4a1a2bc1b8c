// The kernels of the stat2 codec.

#include "block.cuh"
#include "bits.cuh"
#include "stat2.cuh"
#include "kernels.cuh"

KERNELS_OF(stat2, Stat2)
