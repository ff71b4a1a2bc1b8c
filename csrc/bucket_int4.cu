// The kernels over a whole bucket of the int4 codec.

#include "block.cuh"
#include "levels.cuh"
#include "int4.cuh"
#include "runs.cuh"
#include "payload.cuh"
#include "buckets.cuh"

BUCKET_KERNELS_OF(int4, Int4)
