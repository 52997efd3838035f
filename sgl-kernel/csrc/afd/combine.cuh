// Attention rank: waits for all FFN ranks and adds their rows, in FP32, in rank order.
#pragma once

#include "dispatch.cuh"

namespace afd {

struct Combine {
    Rank rank;
    const void* ids;     // [tokens, K], as given to `dispatch`
    const void* shared;  // [tokens, H] BF16, added last; may be null
    void* out;           // [tokens, H] BF16
    int32_t wide_ids;
    int32_t tokens;
};

__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Combine p) {
    constexpr int kLanes = 16;
    constexpr int kUnroll = 4;
    const Rank& rank = p.rank;
    const Shape& s = rank.shape;
    const Layout at = make_layout(s);
    begin_after_predecessor();
    if (has_failed(rank)) return;
    if (!wait_for_all(rank, at, s.ffn_ranks, rank.state->epoch * kCredits, 1)) return;

    const uint4* back = reinterpret_cast<const uint4*>(rank.own + at.back);
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    const int lane = threadIdx.x % kLanes;
    const unsigned lanes = 0xffffu << (threadIdx.x % 32 / kLanes * kLanes);
    const int units_per_row = s.hidden / kGroup;
    const int vectors = s.hidden / 8;
    const int units = p.tokens * units_per_row;
    const int stride = gridDim.x * kThreads / kLanes;
    for (int base = thread / kLanes; base < units; base += stride * kUnroll) {
        Entries<kLanes> entries[kUnroll];
        uint64_t owners[kUnroll];
        float sum[kUnroll][8] = {};
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int unit = base + u * stride;
            if (unit < units) entries[u].load(s, p.ids, p.wide_ids, unit / units_per_row, lane);
        }
        uint64_t left = 0;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            owners[u] = base + u * stride < units ? entries[u].owners(s, lanes) : 0;
            left |= owners[u];
        }
        // Each turn takes the next rank of every unit, so that the loads of a turn overlap.
        while (left) {
            uint4 part[kUnroll];
            bool any[kUnroll];
            left = 0;
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                any[u] = owners[u] != 0;
                if (any[u]) {
                    const int unit = base + u * stride;
                    const int64_t row = (__ffsll(owners[u]) - 1) * int64_t(s.capacity);
                    part[u] = back[row * vectors + int64_t(unit) * kLanes + lane];
                    owners[u] &= owners[u] - 1;
                    left |= owners[u];
                }
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (any[u]) add(sum[u], part[u]);
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int unit = base + u * stride;
            if (unit < units) {
                const int64_t place = int64_t(unit) * kLanes + lane;
                if (p.shared != nullptr) add(sum[u], static_cast<const uint4*>(p.shared)[place]);
                static_cast<uint4*>(p.out)[place] = pack(sum[u]);
            }
        }
    }
}

}  // namespace afd
