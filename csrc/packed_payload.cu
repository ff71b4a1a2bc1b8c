// What a rank contributes where a bucket's momentum is kept as sign1 packets and its preconditioner as codes of 8 bits;
// specified by bucket_reference.py. Residuals must be aligned to fours, codes and packets 4-byte; gradients may lie
// anywhere.

#include "block.cuh"
#include "bits.cuh"
#include "sign1.cuh"
#include "runs.cuh"
#include "payload.cuh"

constexpr int ENTRIES = 256;

// The momentum's packets, which carry whole shards, the codes, and the codes' tables, one after another.
struct State {
    const unsigned char* packets;
    const unsigned char* codes;
    const float* tables;
    long long row_bytes;
};

// β₁ u + ((1 - β₁) x) · table[code], plus the residual, for x of the gradient.
template <typename Residual>
class Preconditioned {
  public:
    __device__ Preconditioned(State state, const Residual* residual, Part part)
        : codes(state.codes + block_start(part)), tables(state.tables), residual(residual + block_start(part)),
          begin(block_start(part)) {
        const unsigned char* row = state.packets + blockIdx.y * state.row_bytes + HEADER_BYTES;
        const long long column = part.first / BLOCK_SIZE + blockIdx.x;
        scale = reinterpret_cast<const float*>(row)[column];
        signs = row + SCALE_BYTES * (part.shard / BLOCK_SIZE) + column * (BLOCK_SIZE / 8);
    }

    // Brings the run's table near. Entry 0 is a factor 0: a product where nothing moves, too, hands on what is not finite.
    __device__ void prepare(int number) {
        for (int i = static_cast<int>(threadIdx.x); i < ENTRIES; i += THREADS) near()[i] = entry(number, i);
        __syncthreads();
    }

    template <typename Gradient>
    __device__ float4 four(const PayloadRun& run, int k) const {
        const int at = group_at(k);
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if constexpr (!IS_MISSING<Gradient>)
            x = unscaled(run, load_anywhere(at_address<const Gradient>(run.gradient) + (begin - run.first + at)));
        const float4 kept = Sign1(signs).decode(k, {scale * run.beta1});
        const unsigned word = *reinterpret_cast<const unsigned*>(codes + at);
        const float4 lost = load_four(residual + at);
        return make_float4(made(run, kept.x, x.x, word & 0xffu, near()[word & 0xffu]) + lost.x,
                           made(run, kept.y, x.y, word >> 8 & 0xffu, near()[word >> 8 & 0xffu]) + lost.y,
                           made(run, kept.z, x.z, word >> 16 & 0xffu, near()[word >> 16 & 0xffu]) + lost.z,
                           made(run, kept.w, x.w, word >> 24, near()[word >> 24]) + lost.w);
    }

    __device__ float one(const PayloadRun& run, int number, int at) const {
        float x = 0.0f;
        if (run.kind != NOTHING) x = unscaled(run, load_gradient(run, begin - run.first + at));
        const float kept = signed_scale(signs[at / 8] << (31 - at % 8), scale * run.beta1);
        return made(run, kept, x, codes[at], entry(number, codes[at])) + widen(residual[at]);
    }

  private:
    // The table of the run that the block lies in.
    __device__ static float* near() {
        __shared__ float table[ENTRIES];
        return table;
    }

    __device__ float entry(long long number, int code) const {
        return code == 0 ? 0.0f : tables[ENTRIES * number + code];
    }

    __device__ static float made(const PayloadRun& run, float kept, float x, unsigned code, float factor) {
        return (code != 0u ? kept : 0.0f) + run.gain * x * factor;
    }

    const unsigned char* codes;
    const float* tables;
    const Residual* residual;
    const unsigned char* signs;
    float scale;
    long long begin;
};

#define ENCODE_PACKED_PAYLOAD_OF(NAME, TYPE)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) encode_packed_payload_##NAME(                   \
        const PayloadRun* __restrict__ runs, long long count, const unsigned char* __restrict__ state,              \
        long long row_bytes, const unsigned char* __restrict__ codes, const float* __restrict__ tables,             \
        const TYPE* residual, TYPE* lost, unsigned char* __restrict__ packets, Part part, Header header) {          \
        const Preconditioned<TYPE> maker({state, codes, tables, row_bytes}, residual, part);                        \
        OfRuns<Preconditioned<TYPE>> source(runs, count, part, maker);                                              \
        encode_part<Sign1>(source, lost, packets, part, header);                                                    \
    }

ENCODE_PACKED_PAYLOAD_OF(float32, float)
ENCODE_PACKED_PAYLOAD_OF(bfloat16, BFloat16)
