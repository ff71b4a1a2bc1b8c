// What is encoded of a bucket whose gradients lie apart. Most blocks lie in one run, and are read four elements at a
// time; the others, where runs meet, element by element.

__device__ float load_gradient(const PayloadRun& run, long long at) {
    if (run.kind == FLOAT32) return at_address<const float>(run.gradient)[at];
    if (run.kind == BFLOAT16) return widen(at_address<const BFloat16>(run.gradient)[at]);
    return run.kind == FLOAT16 ? widen(at_address<const Float16>(run.gradient)[at]) : 0.0f;
}

// The last three values and another: registers need no index.
__device__ float4 push(float4 values, float last) { return make_float4(values.y, values.z, values.w, last); }

// A gradient by its run's divisor: by a product where that is exact, as it is with powers of two.
__device__ float unscaled(const PayloadRun& run, float gradient) {
    return run.inverse != 0.0f ? gradient * run.inverse : gradient / run.divisor;
}

__device__ float4 unscaled(const PayloadRun& run, float4 gradient) {
    if (run.inverse != 0.0f)
        return make_float4(gradient.x * run.inverse, gradient.y * run.inverse, gradient.z * run.inverse,
                           gradient.w * run.inverse);
#pragma unroll 1
    for (int turn = 0; turn < 4; ++turn) gradient = push(gradient, gradient.x / run.divisor);
    return gradient;
}

// What a Maker makes of this thread block's block, group by group; 0 on the padding and beyond the block. A Maker has
//   prepare(number)           all threads: the block lies in this run
//   four<Gradient>(run, k)    the thread's k-th group, of a block that lies in one run; Missing stands for no gradient
//   one(run, number, at)      element `at` of the block
template <typename Maker>
class OfRuns {
  public:
    __device__ OfRuns(const PayloadRun* runs, long long count, Part part, Maker maker)
        : runs(runs), begin(block_start(part)), valid(valid_elements(part)), maker(maker) {
        if (valid == 0) return;
        first = number = find_run(runs, count, begin);
        is_one = begin + BLOCK_SIZE <= runs[first].end;
        if (is_one) this->maker.prepare(first);
    }

    __device__ float4 group(int k) {
        if (!is_one) return mixed_group(k);
        const PayloadRun run = runs[first];
        if (run.kind == FLOAT32) return group_of<float>(run, k);
        if (run.kind == BFLOAT16) return group_of<BFloat16>(run, k);
        return run.kind == FLOAT16 ? group_of<Float16>(run, k) : group_of<Missing>(run, k);
    }

    __device__ void all(float4 (&values)[GROUPS]) {
        if (!is_one) {
#pragma unroll 1
            for (int k = 0; k < GROUPS; ++k) {  // a ring, so that what is long stands once and registers need no index
                const float4 last = mixed_group(k);
#pragma unroll
                for (int i = 0; i + 1 < GROUPS; ++i) values[i] = values[i + 1];
                values[GROUPS - 1] = last;
            }
        } else if (runs[first].kind == FLOAT32) {
            all_of<float>(values);
        } else if (runs[first].kind == BFLOAT16) {
            all_of<BFloat16>(values);
        } else if (runs[first].kind == FLOAT16) {
            all_of<Float16>(values);
        } else {
            all_of<Missing>(values);
        }
    }

  private:
    template <typename Gradient>
    __device__ void all_of(float4 (&values)[GROUPS]) {
        const PayloadRun run = runs[first];
#pragma unroll
        for (int k = 0; k < GROUPS; ++k) values[k] = group_of<Gradient>(run, k);
    }

    template <typename Gradient>
    __device__ float4 group_of(const PayloadRun& run, int k) {
        if (!EVEN && group_at(k) >= BLOCK_SIZE) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return maker.template four<Gradient>(run, k);
    }

    __device__ float4 mixed_group(int k) {
        float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const int at = group_at(k) + i;
            if (at >= valid) {
                values = push(values, 0.0f);
                continue;
            }
            if (begin + at < runs[number].first) number = first;  // what is made twice begins again
            while (begin + at >= runs[number].end) ++number;
            values = push(values, maker.one(runs[number], number, at));
        }
        return values;
    }

    const PayloadRun* runs;
    int first = 0;   // the run in which the block begins
    int number = 0;  // the run of the last element that was made
    bool is_one = false;
    long long begin;
    int valid;
    Maker maker;
};

// Encode what `source` makes of this block; the first thread of a row writes its header, if there is one.
template <typename Codec, typename Source, typename Lost>
__device__ void encode_part(Source& source, Lost* lost, unsigned char* packets, Part part, Header header) {
    encode<Codec>(source, lost, packets, part);
    if (header.first != 0 && blockIdx.x == 0 && threadIdx.x == 0)
        store_header(reinterpret_cast<unsigned*>(packets + blockIdx.y * part.row_bytes), header);
}
