// The layout of a packet row: a header, a float scale a block, then the codes. And what is given with -D:
//   BLOCK_SIZE           elements a scale covers, a multiple of 64
//   THREADS              threads a thread block, a multiple of 32
//   ELEMENTS_PER_THREAD  of kernels whose thread blocks are not the blocks of a packet

[[maybe_unused]] constexpr int HEADER_BYTES = 16;
[[maybe_unused]] constexpr int SCALE_BYTES = 4;

static_assert(BLOCK_SIZE % 64 == 0, "a block is a multiple of 64 elements");

// What kernels are given in structures is packed by launch.py, member by member: hence the sizes.

// A header by value, as two little-endian words; none where the first is 0.
struct Header {
    long long first;
    long long second;
};

static_assert(sizeof(Header) == 16, "no gaps between members");

__device__ void store_header(unsigned* row, Header header) {
    row[0] = static_cast<unsigned>(header.first);
    row[1] = static_cast<unsigned>(header.first >> 32);
    row[2] = static_cast<unsigned>(header.second);
    row[3] = static_cast<unsigned>(header.second >> 32);
}

// How packets carry elements `first` to `first` + row_blocks · BLOCK_SIZE of every shard of a bucket of numel elements.
struct Part {
    long long numel;
    long long row_blocks;
    long long row_bytes;
    long long shard;
    long long first;
};

static_assert(sizeof(Part) == 40, "no gaps between members");
