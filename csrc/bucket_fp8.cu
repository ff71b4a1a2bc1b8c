// The kernels over a whole bucket of the fp8 codec.

#include "block.cuh"
#include "levels.cuh"
#include "fp8.cuh"
#include "runs.cuh"
#include "payload.cuh"
#include "buckets.cuh"

BUCKET_KERNELS_OF(fp8, Fp8)
