// Where everything lies in the symmetric buffer of one rank and one microbatch.
//
// The only description of it: kernels, launchers and Python (through `afd_layout`) all ask here.
// Plain C++ too, so that a machine without nvcc can test it.
//
// Every rank allocates the same number of bytes, whatever its role, because symmetric memory wants
// that. Offsets are in bytes from the start of a microbatch.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define AFD_HOST_DEVICE __host__ __device__
#else
#define AFD_HOST_DEVICE
#endif

namespace afd {

constexpr int kMaxAttnRanks = 64;
constexpr int kMaxFfnRanks = 64;  // a token's FFN ranks are bits of one word
constexpr int kMaxTopk = 16;      // entries of a token are lanes of half a warp
constexpr int kMaxExperts = 1024;
constexpr int kGroup = 128;  // values that share a scale

// What all blocks of a sender together add to a flag, whatever their number: see `share`.
constexpr uint32_t kCredits = 1024;
constexpr uint64_t kFlagStride = 32;  // a sector each, so that no two peers write to one

constexpr uint64_t kAlign = 256;

struct Shape {
    int32_t attn_ranks;    // M
    int32_t ffn_ranks;     // N
    int32_t num_experts;   // E, of all FFN ranks together
    int32_t hidden;        // H, a multiple of kGroup
    int32_t topk;          // K
    int32_t capacity;      // most tokens of one attention rank in one dispatch
    int32_t microbatches;  // 1 or 2
    int32_t fp8;           // rows go out as E4M3 with scales, else as BF16
};

struct Layout {
    uint64_t flags;  // uint32, kFlagStride apart, one per peer of the other role

    // On an FFN rank, R = M * capacity rows. Attention rank a starts at the row that both sides
    // compute from the plan, so that the rows of a transfer lie without gaps.
    uint64_t rows;     // [R, H] E4M3 or BF16
    uint64_t scales;   // [R, H / kGroup] float; empty unless fp8
    uint64_t ids;      // [R, K] int32, expert index within this FFN rank, or -1
    uint64_t weights;  // [R, K] float, 0 where the id is -1

    // On an attention rank, over the same bytes.
    uint64_t back;  // [N, capacity, H] BF16

    uint64_t bytes;  // of one microbatch
};

AFD_HOST_DEVICE inline uint64_t aligned(uint64_t bytes) {
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

AFD_HOST_DEVICE inline Layout make_layout(const Shape& s) {
    const uint64_t num_rows = uint64_t(s.attn_ranks) * s.capacity;
    const uint64_t hidden = s.hidden;
    const uint64_t entries = num_rows * s.topk;
    Layout at{};
    at.flags = 0;
    const uint64_t peers = kMaxAttnRanks > kMaxFfnRanks ? kMaxAttnRanks : kMaxFfnRanks;
    const uint64_t data = aligned(peers * kFlagStride);
    at.rows = data;
    at.scales = at.rows + aligned(num_rows * hidden * (s.fp8 ? 1 : 2));
    at.ids = at.scales + (s.fp8 ? aligned(num_rows * (hidden / kGroup) * 4) : 0);
    at.weights = at.ids + aligned(entries * 4);
    const uint64_t ffn_end = at.weights + aligned(entries * 4);
    at.back = data;
    const uint64_t attn_end = at.back + aligned(uint64_t(s.ffn_ranks) * s.capacity * hidden * 2);
    at.bytes = ffn_end > attn_end ? ffn_end : attn_end;
    return at;
}

// Part of kCredits that block `block` of `blocks` adds. The parts sum to kCredits for any number of
// blocks up to kCredits, so a receiver needs not know how many blocks sent.
AFD_HOST_DEVICE inline uint32_t share(uint32_t block, uint32_t blocks) {
    return kCredits * (block + 1) / blocks - kCredits * block / blocks;
}

// Whether a flag has reached `expected`. Both count for ever and wrap around.
AFD_HOST_DEVICE inline bool reached(uint32_t seen, uint32_t expected) {
    return int32_t(seen - expected) >= 0;
}

// FFN rank j holds experts [j E / N, (j + 1) E / N), as `Topology.expert_range` does.
AFD_HOST_DEVICE inline int owner_of(const Shape& s, int expert) {
    return ((expert + 1) * s.ffn_ranks - 1) / s.num_experts;
}

AFD_HOST_DEVICE inline int first_expert(const Shape& s, int ffn_rank) {
    return ffn_rank * s.num_experts / s.ffn_ranks;
}

}  // namespace afd
