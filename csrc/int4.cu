// The kernels of the int4 codec.

#include "block.cuh"
#include "levels.cuh"
#include "int4.cuh"
#include "kernels.cuh"

KERNELS_OF(int4, Int4)
