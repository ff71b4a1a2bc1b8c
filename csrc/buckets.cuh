// The kernels over a whole bucket that every codec has, specified by bucket_reference.py. Flat vectors of floats must be
// 16-byte aligned, packets 4-byte; gradients, weights and replicas may lie anywhere.

enum Form { PLAIN, DIVIDED, MASKED };

// The flat vectors of a bucket that are read; null where one is missing.
struct Vectors {
    const float* momentum;
    const float* denominators;
    const float* residual;
};

// β₁ m + (1 - β₁) x, for x of the gradient and, as FORM says, a denominator; plus the residual.
template <int FORM>
class Momentum {
  public:
    __device__ Momentum(Vectors vectors, Part part) : vectors(vectors), begin(block_start(part)) {}

    __device__ void prepare(int) const {}

    template <typename Gradient>
    __device__ float4 four(const PayloadRun& run, int k) const {
        const long long at = begin + group_at(k);
        const float4 m = load_four(vectors.momentum + at);
        float4 u = make_float4(m.x * run.beta1, m.y * run.beta1, m.z * run.beta1, m.w * run.beta1);
        if constexpr (!IS_MISSING<Gradient>) {
            const float4 x = unscaled(run, load_anywhere(at_address<const Gradient>(run.gradient) + (at - run.first)));
            const float4 d = FORM == PLAIN ? m : load_four(vectors.denominators + at);
            u = make_float4(followed(run, x.x, m.x, d.x), followed(run, x.y, m.y, d.y), followed(run, x.z, m.z, d.z),
                            followed(run, x.w, m.w, d.w));
        }
        return vectors.residual == nullptr ? u : add(u, load_four(vectors.residual + at));
    }

    __device__ float one(const PayloadRun& run, int, int at_in_block) const {
        const long long at = begin + at_in_block;
        const float m = vectors.momentum[at];
        float u = m * run.beta1;
        if (run.kind != NOTHING) {
            const float x = unscaled(run, load_gradient(run, at - run.first));
            u = followed(run, x, m, FORM == PLAIN ? m : vectors.denominators[at]);
        }
        return vectors.residual == nullptr ? u : u + vectors.residual[at];
    }

  private:
    __device__ static float followed(const PayloadRun& run, float x, float m, float denominator) {
        if (FORM == DIVIDED) x = x / denominator;
        const float u = __fmaf_rn(run.weight, x - m, run.gain < 0.5f ? m : x);
        // A product: what is not finite becomes NaN, and not 0, where it is held.
        return FORM == MASKED ? u * (fabsf(denominator) <= LARGEST_FLOAT ? 1.0f : 0.0f) : u;
    }

    Vectors vectors;
    long long begin;
};

// A product, so that what is not finite stays so.
__device__ float masked(float value, unsigned mask) { return value * (mask != 0u ? 1.0f : 0.0f); }

// The mean of this block of all packets received, times 0 where the mask is 0, plus the residual; both may be null.
template <typename Codec>
class Averaged {
  public:
    __device__ Averaged(const unsigned char* received, const unsigned char* mask, const float* residual, Part part,
                        Rows rows)
        : received(received), mask(mask), residual(residual), part(part), rows(rows) {}

    __device__ float4 group(int k) const {
        float4 mean[1];
        average<Codec>(received, part, rows, k, mean);
        return corrected(k, mean[0]);
    }

    __device__ void all(float4 (&values)[GROUPS]) const {
#pragma unroll
        for (int first = 0; first < GROUPS; first += MEAN_GROUPS) {
            float4 mean[MEAN_GROUPS];
            average<Codec>(received, part, rows, first, mean);
#pragma unroll
            for (int k = 0; k < MEAN_GROUPS; ++k)
                if (first + k < GROUPS) values[first + k] = corrected(first + k, mean[k]);
        }
    }

  private:
    __device__ float4 corrected(int k, float4 mean) const {
        const int at = group_at(k);
        const int valid = valid_elements(part);
        if (mask != nullptr && at < valid) {
            const unsigned word = *reinterpret_cast<const unsigned*>(mask + block_start(part) + at);
            mean = make_float4(masked(mean.x, word & 0xffu), masked(mean.y, word & 0xff00u),
                               masked(mean.z, word & 0xff0000u), masked(mean.w, word & 0xff000000u));
        }
        if (residual != nullptr && at < valid) mean = add(mean, load_four(residual + block_start(part) + at));
        return keep_valid(mean, at, valid);
    }

    const unsigned char* received;
    const unsigned char* mask;
    const float* residual;
    Part part;
    Rows rows;
};

// What moves weights, of a whole bucket.
struct Moving {
    float* output;
    const float* denominators;
    long long begin;  // of this thread block's block
    bool holds;       // where a denominator is infinite
};

__device__ float held(float u, float denominator) {
    return __float_as_uint(fabsf(denominator)) == INFINITY_BITS ? 0.0f : u;
}

__device__ float4 held(float4 u, float4 d) {
    return make_float4(held(u.x, d.x), held(u.y, d.y), held(u.z, d.z), held(u.w, d.w));
}

template <int FORM>
__device__ float moved(const MovedRun& run, float weight, float u, float denominator) {
    const float decayed = run.decay * weight;
    if (FORM == DIVIDED) return decayed + -run.rate * u / denominator;
    return __fmaf_rn(u, -run.rate, decayed);
}

constexpr int MOVED_GROUPS = GROUPS < 2 ? GROUPS : 2;  // whose weights are in registers at once
constexpr bool EVEN_TURNS = EVEN && GROUPS % MOVED_GROUPS == 0;

// A block that lies in one run. All weights of a turn are read before any is written, so that many loads are under way.
template <typename Codec, int FORM, typename Replica>
__device__ void move_block(const Codec& codec, Scales<Codec::SCALES> scale, const MovedRun& run, Moving moving) {
#pragma unroll 1
    for (int first = 0; first < GROUPS; first += MOVED_GROUPS) {
        float4 weights[MOVED_GROUPS];
        float4 d[MOVED_GROUPS] = {};
#pragma unroll
        for (int k = 0; k < MOVED_GROUPS; ++k) {
            if (!EVEN_TURNS && group_at(first + k) >= BLOCK_SIZE) break;
            const long long at = moving.begin + group_at(first + k);
            weights[k] = load_anywhere(at_address<const float>(run.weights) + (at - run.first));
            if (FORM == DIVIDED || moving.holds) d[k] = load_four(moving.denominators + at);
        }
#pragma unroll
        for (int k = 0; k < MOVED_GROUPS; ++k) {
            if (!EVEN_TURNS && group_at(first + k) >= BLOCK_SIZE) break;
            const long long at = moving.begin + group_at(first + k);
            float4 u = codec.decode(first + k, scale);
            if (moving.holds) u = held(u, d[k]);
            store_four(moving.output + at, u);
            const float4 four = make_float4(
                moved<FORM>(run, weights[k].x, u.x, d[k].x), moved<FORM>(run, weights[k].y, u.y, d[k].y),
                moved<FORM>(run, weights[k].z, u.z, d[k].z), moved<FORM>(run, weights[k].w, u.w, d[k].w));
            store_anywhere(at_address<float>(run.weights) + (at - run.first), four);
            if constexpr (!IS_MISSING<Replica>)
                store_anywhere(at_address<Replica>(run.replica) + (at - run.first), four);
        }
    }
}

template <int FORM>
__device__ void move_one(const MovedRun& run, long long at, float u, float denominator) {
    float* weight = at_address<float>(run.weights) + at;
    const float value = *weight = moved<FORM>(run, *weight, u, denominator);
    if (run.kind == BFLOAT16) round_to_nearest(value, at_address<BFloat16>(run.replica)[at]);
    if (run.kind == FLOAT16) round_to_nearest(value, at_address<Float16>(run.replica)[at]);
}

template <typename Codec, int FORM>
__device__ void decode_and_move(const MovedRun* runs, long long count, const unsigned char* packets, Moving moving,
                                Part part) {
    moving.begin = block_start(part);
    const int valid = valid_elements(part);
    const unsigned char* row = packets + blockIdx.y * part.row_bytes;
    const Scales<Codec::SCALES> scale = load_scales<Codec>(row + scale_offset<Codec>());
    const Codec codec(row + codes_offset<Codec>(part));
    if (valid != 0) {
        runs += find_run(runs, count, moving.begin);
        const MovedRun run = *runs;
        if (run.weights != 0 && moving.begin + BLOCK_SIZE <= run.end) {
            if (run.kind == BFLOAT16)
                move_block<Codec, FORM, BFloat16>(codec, scale, run, moving);
            else if (run.kind == FLOAT16)
                move_block<Codec, FORM, Float16>(codec, scale, run, moving);
            else
                move_block<Codec, FORM, Missing>(codec, scale, run, moving);
            return;
        }
    }
#pragma unroll 1
    for (int k = 0; k < GROUPS && group_at(k) < BLOCK_SIZE; ++k) {
        const int at = group_at(k);
        float4 u = codec.decode(k, scale);
        float4 d = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (FORM == DIVIDED || moving.holds) d = load_four(moving.denominators + moving.begin + at);
        if (moving.holds) u = held(u, d);
        store_valid(moving.output + moving.begin, at, valid, u);
#pragma unroll 1
        for (int i = 0; i < 4 && at + i < valid; ++i) {
            const long long element = moving.begin + at + i;
            while (element >= runs->end) ++runs;
            if (runs->weights != 0) move_one<FORM>(*runs, element - runs->first, u.x, d.x);
            u = push(u, 0.0f);
            d = push(d, 0.0f);
        }
    }
}

#define ENCODE_PAYLOAD_OF(NAME, CODEC, FORM_NAME, FORM)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) encode_payload_##FORM_NAME##_##NAME(            \
        const PayloadRun* __restrict__ runs, long long count, const float* momentum, const float* denominators,     \
        const float* residual, float* lost, unsigned char* packets, Part part, Header header) {                     \
        const Momentum<FORM> maker({momentum, denominators, residual}, part);                                       \
        OfRuns<Momentum<FORM>> source(runs, count, part, maker);                                                    \
        encode_part<CODEC>(source, lost, packets, part, header);                                                    \
    }

#define DECODE_AND_MOVE_OF(NAME, CODEC, FORM_NAME, FORM)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) decode_and_move_##FORM_NAME##_##NAME(           \
        const MovedRun* __restrict__ runs, long long count, const unsigned char* __restrict__ packets,              \
        float* output, const float* denominators, long long holds, Part part) {                                     \
        decode_and_move<CODEC, FORM>(runs, count, packets, {output, denominators, 0, holds != 0}, part);            \
    }

#define BUCKET_KERNELS_OF(NAME, CODEC)                                                                              \
    ENCODE_PAYLOAD_OF(NAME, CODEC, plain, PLAIN)                                                                    \
    ENCODE_PAYLOAD_OF(NAME, CODEC, divided, DIVIDED)                                                                \
    ENCODE_PAYLOAD_OF(NAME, CODEC, masked, MASKED)                                                                  \
    DECODE_AND_MOVE_OF(NAME, CODEC, plain, PLAIN)                                                                   \
    DECODE_AND_MOVE_OF(NAME, CODEC, divided, DIVIDED)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) average_and_encode_##NAME(                      \
        const unsigned char* __restrict__ received, const unsigned char* __restrict__ mask,                         \
        const float* __restrict__ residual, float* __restrict__ lost, unsigned char* __restrict__ packets,          \
        Part part, Rows rows) {                                                                                     \
        Averaged<CODEC> source(received, mask, residual, part, rows);                                               \
        encode<CODEC>(source, lost, packets, part);                                                                 \
    }
