// The kernels over a whole bucket of the stat2 codec.

#include "block.cuh"
#include "bits.cuh"
#include "stat2.cuh"
#include "runs.cuh"
#include "payload.cuh"
#include "buckets.cuh"

BUCKET_KERNELS_OF(stat2, Stat2)
