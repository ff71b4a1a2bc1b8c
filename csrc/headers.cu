// The 16 bytes that every packet begins with: written with the flags that the device knows, so that the host need not
// wait. Packets must be 4-byte aligned.

#include "packet.cuh"
#include "reduce.cuh"

// What is done to rows of row_bytes bytes: the flag that is set where a row's first scales are not all finite or the
// condition holds.
struct HeaderRows {
    long long row_bytes;
    long long scales;
    long long flag;
};

static_assert(sizeof(HeaderRows) == 24, "no gaps between members");

constexpr int FLAG_SHIFT = 32;
constexpr unsigned EXPONENT = 0x7f800000u;

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
