// The kernels of the sign1 codec.

#include "block.cuh"
#include "bits.cuh"
#include "sign1.cuh"
#include "kernels.cuh"

KERNELS_OF(sign1, Sign1)
