// The kernels of the int8 codec.

#include "block.cuh"
#include "levels.cuh"
#include "int8.cuh"
#include "kernels.cuh"

KERNELS_OF(int8, Int8)
