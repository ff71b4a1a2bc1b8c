// Codes of a bit an element, least significant first.

__device__ unsigned sign_bits(float4 value, int at, int valid) {
    return (at < valid && value.x >= 0.0f ? 1u : 0u) | (at + 1 < valid && value.y >= 0.0f ? 2u : 0u) |
           (at + 2 < valid && value.z >= 0.0f ? 4u : 0u) | (at + 3 < valid && value.w >= 0.0f ? 8u : 0u);
}

// `scale`, or where bit 31 is 0 its negative.
__device__ float signed_scale(unsigned bits, float scale) {
    return __uint_as_float(__float_as_uint(scale) ^ (~bits & 0x80000000u));
}

// Four bits of each thread, by all threads at once: eight neighbouring threads hold 32 consecutive elements, one word.
__device__ void store_bits(unsigned bits, int at, unsigned char* codes) {
    unsigned word = bits << at % 32;
    word |= __shfl_xor_sync(ALL_LANES, word, 1);
    word |= __shfl_xor_sync(ALL_LANES, word, 2);
    word |= __shfl_xor_sync(ALL_LANES, word, 4);
    if (at % 32 == 0 && at < BLOCK_SIZE) *reinterpret_cast<unsigned*>(codes + at / 8) = word;
}
