// The kernels over a whole bucket of the sign1 codec.

#include "block.cuh"
#include "bits.cuh"
#include "sign1.cuh"
#include "runs.cuh"
#include "payload.cuh"
#include "buckets.cuh"

BUCKET_KERNELS_OF(sign1, Sign1)
