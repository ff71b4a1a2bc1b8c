// What the codecs share whose scale is a block's largest magnitude over their top level.

// Magnitudes order as integers do, with NaN above infinity: the largest is NaN if any is.
__device__ unsigned magnitude_bits(float value) { return __float_as_uint(fabsf(value)); }

template <int TOP>
class LargestMagnitude {
  public:
    static constexpr bool LOOKS_FIRST = false;

    __device__ void see(float4 value, int, int) {
        largest = Largest::combine(largest, magnitude_bits(value.x));
        largest = Largest::combine(largest, magnitude_bits(value.y));
        largest = Largest::combine(largest, magnitude_bits(value.z));
        largest = Largest::combine(largest, magnitude_bits(value.w));
    }

    // After all groups were seen.
    __device__ void settle(float* scale_of_block, int) {
        scale = __uint_as_float(reduce_block<Largest>(largest)) / TOP_LEVEL;
        if (threadIdx.x == 0) *scale_of_block = scale;
    }

  protected:
    // In scales, at most TOP; 0 where the scale is 0 or not finite.
    __device__ float4 in_scales(float4 value) const {
        if (!(scale > 0.0f && scale <= LARGEST_FLOAT)) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return make_float4(in_scale(value.x), in_scale(value.y), in_scale(value.z), in_scale(value.w));
    }

    // What is left of a value of which these many scales are sent.
    __device__ float4 without(float4 value, float4 sent) const {
        return make_float4(value.x - sent.x * scale, value.y - sent.y * scale, value.z - sent.z * scale,
                           value.w - sent.w * scale);
    }

  private:
    static constexpr float TOP_LEVEL = TOP;

    __device__ float in_scale(float value) const { return fminf(fmaxf(value / scale, -TOP_LEVEL), TOP_LEVEL); }

    unsigned largest = 0u;
    float scale = 0.0f;
};

__device__ float4 round_four(float4 value) {
    return make_float4(rintf(value.x), rintf(value.y), rintf(value.z), rintf(value.w));
}

__device__ float4 times(float4 value, float scale) {
    return make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale);
}

// The lowest bits of whole numbers.
__device__ unsigned low_bits(float level, unsigned mask) { return static_cast<unsigned>(static_cast<int>(level)) & mask; }
