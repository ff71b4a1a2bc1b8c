// The kernels of the fp8 codec.

#include "block.cuh"
#include "levels.cuh"
#include "fp8.cuh"
#include "kernels.cuh"

KERNELS_OF(fp8, Fp8)
