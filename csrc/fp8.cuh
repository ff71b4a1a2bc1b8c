// The fp8 codec: a byte an element, u / scale to the nearest e4m3 number, ties to even, and max |u| / 448 as the scale.

constexpr unsigned BYTE_REBIAS = 120u << 23;           // between the exponents of float and of e4m3
constexpr unsigned BYTE_NORMAL_BITS = 121u << 23;      // of 2^-6, the smallest normal e4m3
constexpr float BYTE_UNIT = 0.001953125f;              // 2^-9, the spacing of subnormal e4m3
constexpr float BYTE_SPACED = 16384.0f;                // next to which floats have that spacing
constexpr unsigned BYTE_NAN = 0x7fu;

// Of a value whose magnitude is at most 448.
__device__ unsigned byte_of(float value) {
    const unsigned bits = __float_as_uint(value);
    const unsigned magnitude = bits & 0x7fffffffu;
    unsigned byte = (magnitude - BYTE_REBIAS + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    if (magnitude < BYTE_NORMAL_BITS) byte = __float_as_uint(fabsf(value) + BYTE_SPACED) - __float_as_uint(BYTE_SPACED);
    return byte | (bits >> 24 & 0x80u);
}

__device__ float value_of(unsigned byte) {
    const unsigned magnitude = byte & 0x7fu;
    unsigned wide = (magnitude << 20) + BYTE_REBIAS;
    if (magnitude < 8u) wide = __float_as_uint(static_cast<float>(magnitude) * BYTE_UNIT);
    if (magnitude == BYTE_NAN) wide = 0x7fc00000u;
    return __uint_as_float(wide | (byte & 0x80u) << 24);
}

__device__ float4 values_of(unsigned word) {
    return make_float4(value_of(word & 0xffu), value_of(word >> 8 & 0xffu), value_of(word >> 16 & 0xffu),
                       value_of(word >> 24));
}

// A thread's groups of four in a packet.
class Fp8 {
  public:
    static constexpr int BITS = 8;
    static constexpr int SCALES = 1;

    __device__ explicit Fp8(const unsigned char* codes) : words(codes + threadIdx.x * 4) {}

    __device__ void advance(long long bytes) { words += bytes; }

    __device__ float4 decode(int k, Scales<1> scales) const {
        const unsigned word = *reinterpret_cast<const unsigned*>(words + k * (THREADS * 4));
        return times(values_of(word), scales.value[0]);
    }

    // What a thread knows of the block that it encodes together with the others.
    class Encoder : public LargestMagnitude<448> {
      public:
        // Writes the codes of a group, by all threads at once, and gives what they lose.
        __device__ float4 put(float4 value, int at, int, unsigned char* codes) const {
            const float4 sent = in_scales(value);
            const unsigned word = byte_of(sent.x) | byte_of(sent.y) << 8 | byte_of(sent.z) << 16 | byte_of(sent.w) << 24;
            if (at < BLOCK_SIZE) *reinterpret_cast<unsigned*>(codes + at) = word;
            return without(value, values_of(word));
        }
    };

  private:
    const unsigned char* words;
};
