// The kernels over a whole bucket of the int8 codec.

#include "block.cuh"
#include "levels.cuh"
#include "int8.cuh"
#include "runs.cuh"
#include "payload.cuh"
#include "buckets.cuh"

BUCKET_KERNELS_OF(int8, Int8)
