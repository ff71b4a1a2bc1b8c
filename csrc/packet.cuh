// The layout of a packet row: a header, a float scale a block, then the codes. And what is given with -D:
//   BLOCK_SIZE           elements a scale covers, a multiple of 64
//   THREADS              threads a thread block, a multiple of 32
//   ELEMENTS_PER_THREAD  of kernels whose thread blocks are not the blocks of a packet

[[maybe_unused]] constexpr int HEADER_BYTES = 16;
[[maybe_unused]] constexpr int SCALE_BYTES = 4;

static_assert(BLOCK_SIZE % 64 == 0, "a block is a multiple of 64 elements");

// What kernels are given in structures is packed by launch.py, member by member: hence the sizes.

// How packets, of row_blocks blocks and row_bytes bytes each, carry numel elements.
struct Layout {
    long long numel;
    long long row_blocks;
    long long row_bytes;
};

static_assert(sizeof(Layout) == 24, "no gaps between members");
