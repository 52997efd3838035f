// Attention rank: every token once to each FFN rank that owns one of its experts.
#pragma once

#include "signal.cuh"
#include "values.cuh"

namespace afd {

constexpr int kThreads = 512;

struct Dispatch {
    Rank rank;
    const void* hidden;    // [tokens, H] BF16
    const void* ids;       // [tokens, K] int32 or int64, global expert ids, -1 masks
    const float* weights;  // [tokens, K]
    int32_t wide_ids;      // ids are int64
    int32_t tokens;
    int32_t max_rows;   // rows of this rank in this transfer; what exceeds `tokens` is masked
    int32_t first_row;  // of this rank, at every FFN rank
    uint8_t* peers[kMaxFfnRanks];
};

__device__ inline int id_at(const void* ids, int wide, int64_t index) {
    return wide ? int(static_cast<const int64_t*>(ids)[index])
                : static_cast<const int32_t*>(ids)[index];
}

// The ids of `token` that this lane looks after: neighbouring lanes share the entries of a token.
template <int kLanes>
struct Entries {
    static constexpr int kEach = kMaxTopk / kLanes;
    int ids[kEach];

    __device__ void load(const Shape& s, const void* from, int wide, int64_t token, int lane) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int k = i * kLanes + lane;
            ids[i] = k < s.topk ? id_at(from, wide, token * s.topk + k) : -1;
        }
    }

    // FFN ranks that own an expert of the token, as bits. All of the token's lanes call it.
    __device__ uint64_t owners(const Shape& s, unsigned lanes) const {
        uint32_t low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (ids[i] < 0) continue;
            const int owner = s.ffn_ranks == 1 ? 0 : owner_of(s, ids[i]);
            if (owner < 32) low |= 1u << owner;
            else high |= 1u << (owner - 32);
        }
#pragma unroll
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            low |= __shfl_xor_sync(lanes, low, distance);
            if (s.ffn_ranks > 32) high |= __shfl_xor_sync(lanes, high, distance);
        }
        return uint64_t(high) << 32 | low;
    }
};

// Eight lanes move one unit of a row: a group of 128 values as FP8, or 64 values as BF16.
template <bool kFp8>
__global__ void __launch_bounds__(kThreads) dispatch_kernel(const __grid_constant__ Dispatch p) {
    constexpr int kLanes = 8;
    constexpr int kUnroll = 4;  // loads in flight per lane, which is what fills the link
    constexpr int kVectors = kFp8 ? 2 : 1;
    const Rank& rank = p.rank;
    const Shape& s = rank.shape;
    const Layout at = make_layout(s);
    begin_after_predecessor();
    const bool failed = has_failed(rank);  // looked at where the answer is needed, not waited for
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    const int threads = gridDim.x * kThreads;
    if (thread == 0) rank.state->epoch += 1;

    const int lane = threadIdx.x % kLanes;
    const unsigned lanes = 0xffu << (threadIdx.x % 32 / kLanes * kLanes);
    const int units_per_row = s.hidden / (kFp8 ? kGroup : kGroup / 2);
    const int units = p.tokens * units_per_row;
    const int teams = threads / kLanes;
    // With work for everybody, a team takes neighbouring units of one row, whose scales then go out
    // together: many small writes cost the link more than their bytes. Else units are spread.
    const bool packed = units >= teams * kUnroll && units_per_row % kUnroll == 0;
    const int gap = packed ? 1 : teams;
    const int first = thread / kLanes * (packed ? kUnroll : 1);
    for (int base = first; base < units; base += teams * kUnroll) {
        uint4 in[kUnroll][kVectors];
        Entries<kLanes> entries[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int unit = base + u * gap;
            if (unit < units) {
                const uint4* from = static_cast<const uint4*>(p.hidden) +
                                    (int64_t(unit) * kLanes + lane) * kVectors;
#pragma unroll
                for (int v = 0; v < kVectors; ++v) in[u][v] = from[v];
                if (u == 0 || !packed) {
                    entries[u].load(s, p.ids, p.wide_ids, unit / units_per_row, lane);
                }
            }
        }
        if (failed) return;
        uint64_t owners = 0;
        float scales[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int unit = base + u * gap;
            if (unit < units) {
                if (u == 0 || !packed) owners = entries[u].owners(s, lanes);
                uint4 out;
                if constexpr (kFp8) out = quantize(in[u], lanes, scales[u]);
                else out = in[u][0];
                const int64_t place = int64_t(p.first_row) * units_per_row + unit;
                for (uint64_t left = owners; left; left &= left - 1) {
                    uint8_t* peer = p.peers[__ffsll(left) - 1];
                    reinterpret_cast<uint4*>(peer + at.rows)[place * kLanes + lane] = out;
                    if (kFp8 && lane == 0 && !packed) {
                        reinterpret_cast<float*>(peer + at.scales)[place] = scales[u];
                    }
                }
            }
        }
        if (kFp8 && lane == 0 && packed) {
            const int64_t place = int64_t(p.first_row) * units_per_row + base;
            const float4 together = {scales[0], scales[1], scales[2], scales[3]};
            for (uint64_t left = owners; left; left &= left - 1) {
                uint8_t* peer = p.peers[__ffsll(left) - 1];
                *reinterpret_cast<float4*>(peer + at.scales + place * sizeof(float)) = together;
            }
        }
    }
    if (failed) return;

    // Ids and weights of every row go to every FFN rank: -1 tells it that a row is not for it.
    const int entries = p.max_rows * s.topk;
    for (int entry = thread; entry < entries; entry += threads) {
        const bool is_token = entry < p.tokens * s.topk;
        const int id = is_token ? id_at(p.ids, p.wide_ids, entry) : -1;
        const float weight = is_token ? p.weights[entry] : 0.0f;
        const int owner = id < 0 ? -1 : owner_of(s, id);
        const int64_t place = int64_t(p.first_row) * s.topk + entry;
        for (int ffn_rank = 0; ffn_rank < s.ffn_ranks; ++ffn_rank) {
            const bool is_there = ffn_rank == owner;
            uint8_t* peer = p.peers[ffn_rank];
            reinterpret_cast<int32_t*>(peer + at.ids)[place] =
                is_there ? id - first_expert(s, ffn_rank) : -1;
            reinterpret_cast<float*>(peer + at.weights)[place] = is_there ? weight : 0.0f;
        }
    }
    credit_all(rank, at, p.peers, s.ffn_ranks);
}

}  // namespace afd
