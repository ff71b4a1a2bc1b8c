// The 16 bytes that every packet begins with: written with the flags that the device knows, and checked where they
// arrive, so that the host need not wait. Packets and headers must be 4-byte aligned.

#include "packet.cuh"
#include "reduce.cuh"

// What is done to rows of row_bytes bytes: the flag that is set where a row's first scales are not all finite or the
// condition holds; or, of a check, the flags that are known.
struct HeaderRows {
    long long rows;
    long long row_bytes;
    long long scales;
    long long flag;
};

static_assert(sizeof(HeaderRows) == 32, "no gaps between members");

constexpr int FLAG_SHIFT = 32;
constexpr unsigned long long FLAG_MASK = 0xffffull << FLAG_SHIFT;
constexpr unsigned EXPONENT = 0x7f800000u;

__device__ unsigned long long join(unsigned low, unsigned high) {
    return static_cast<unsigned long long>(high) << 32 | low;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    write_headers(unsigned char* packets, const unsigned char* __restrict__ condition, Header header, HeaderRows rows) {
    unsigned* row = reinterpret_cast<unsigned*>(packets + blockIdx.x * rows.row_bytes);
    const unsigned* scales = row + HEADER_BYTES / 4;
    unsigned raised = 0u;
    for (long long i = threadIdx.x; i < rows.scales; i += THREADS) raised |= (scales[i] & EXPONENT) == EXPONENT;
    raised = reduce_block<Union>(raised);
    if (threadIdx.x != 0) return;
    if (condition != nullptr) raised |= *condition != 0;
    if (raised != 0u) header.first |= rows.flag << FLAG_SHIFT;
    store_header(row, header);
}

// Of one thread block. report: all flags so far, one more than the first odd row, and its two words.
extern "C" __global__ void __launch_bounds__(THREADS)
    check_headers(const unsigned char* __restrict__ headers, long long* report, Header expected, HeaderRows rows) {
    unsigned flags = 0u;
    unsigned odd = 0u;  // the largest of what counts down from the first row: 0 where there is none
    for (long long i = threadIdx.x; i < rows.rows; i += THREADS) {
        const unsigned* row = reinterpret_cast<const unsigned*>(headers + i * rows.row_bytes);
        const unsigned long long first = join(row[0], row[1]);
        const unsigned long long second = join(row[2], row[3]);
        const unsigned of_row = static_cast<unsigned>((first & FLAG_MASK) >> FLAG_SHIFT);
        flags |= of_row;
        const bool other = ((first ^ static_cast<unsigned long long>(expected.first)) & ~FLAG_MASK) != 0u ||
                           second != static_cast<unsigned long long>(expected.second);
        const unsigned rank = static_cast<unsigned>(rows.rows - i);
        if ((other || (of_row & ~static_cast<unsigned>(rows.flag)) != 0u) && rank > odd) odd = rank;
    }
    flags = reduce_block<Union>(flags);
    __syncthreads();
    odd = reduce_block<Largest>(odd);
    if (threadIdx.x != 0) return;
    report[0] |= flags;
    if (odd == 0u || report[1] != 0) return;
    const long long i = rows.rows - odd;
    const unsigned* row = reinterpret_cast<const unsigned*>(headers + i * rows.row_bytes);
    report[1] = i + 1;
    report[2] = static_cast<long long>(join(row[0], row[1]));
    report[3] = static_cast<long long>(join(row[2], row[3]));
}
