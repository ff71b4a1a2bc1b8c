// The kernels that every codec has, made from it by a macro as NAME_codec. Pointers to floats must be 16-byte aligned, to
// BFloat16 8-byte, packets 4-byte. A residual may be null; what is lost goes over the payload, or to `new_residual`,
// which may be the residual.

template <typename Codec, typename Residual, typename Lost>
__device__ void encode_corrected(const float* payload, const Residual* residual, Lost* lost, unsigned char* packets,
                                 Part part) {
    const long long begin = block_start(part);
    Corrected<Residual> source(payload + begin, residual == nullptr ? nullptr : residual + begin,
                               valid_elements(part));
    encode<Codec>(source, lost, packets, part);
}

#define KERNELS_OF(NAME, CODEC)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) encode_##NAME(                                            \
        float* payload, const float* __restrict__ residual, unsigned char* __restrict__ packets, Part part) {       \
        encode_corrected<CODEC>(payload, residual, payload, packets, part);                                         \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) encode_rounded_##NAME(                                    \
        const float* __restrict__ payload, const BFloat16* residual, BFloat16* new_residual,                        \
        unsigned char* __restrict__ packets, Part part) {                                                           \
        encode_corrected<CODEC>(payload, residual, new_residual, packets, part);                                    \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_##NAME(                                            \
        const unsigned char* __restrict__ packets, float* __restrict__ output, Part part) {                         \
        decode_row<CODEC>(packets, output, part);                                                                   \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_mean_##NAME(                                       \
        const unsigned char* __restrict__ packets, float* __restrict__ output, Part part, Rows rows) {              \
        decode_mean<CODEC>(packets, output, part, rows);                                                            \
    }
