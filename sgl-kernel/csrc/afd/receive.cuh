// FFN rank: waits for all attention ranks; for a masked grouped GEMM, also gives every
// (row, expert) pair a row among those of its expert.
#pragma once

#include "dispatch.cuh"

namespace afd {

struct Receive {
    Rank rank;
    int32_t num_rows;  // R of this transfer, of all attention ranks
    // The rest only where rows are wanted by expert. L rows of room per expert, H values per row.
    int32_t room;            // L
    void* by_expert;         // [E, L, H] E4M3 or BF16
    float* scales;           // [E, H / kGroup, L]
    int32_t* rows_per_expert;  // [E], zero before
    int32_t* places;         // [R, K] index into E * L, or -1
};

constexpr int kReceiveThreads = 256;

// One vector of a row into the places of all its experts.
__device__ inline void scatter(
    const Receive& p, const int (&place)[kMaxTopk], int vectors, int i, const uint4& value
) {
#pragma unroll
    for (int k = 0; k < kMaxTopk; ++k) {
        if (place[k] >= 0) static_cast<uint4*>(p.by_expert)[int64_t(place[k]) * vectors + i] = value;
    }
}

// The rows stay where the attention ranks put them.
__global__ void __launch_bounds__(kThreads) receive_kernel(const __grid_constant__ Receive p) {
    const Rank& rank = p.rank;
    const Layout at = make_layout(rank.shape);
    begin_after_predecessor();
    if (has_failed(rank)) return;
    wait_for_all(rank, at, rank.shape.attn_ranks, (rank.state->epoch + 1) * kCredits, 0);
}

// A block takes a row at a time. The order of an expert's rows depends on who comes first, and
// nothing depends on it: a row of a GEMM does not see its neighbours.
template <bool kFp8>
__global__ void __launch_bounds__(kReceiveThreads)
    receive_by_expert_kernel(const __grid_constant__ Receive p) {
    __shared__ int32_t shared_places[2][kMaxTopk];
    constexpr int kEarly = 2;  // vectors that a thread loads while the places are found
    const Rank& rank = p.rank;
    const Shape& s = rank.shape;
    const Layout at = make_layout(s);
    begin_after_predecessor();
    if (has_failed(rank)) return;
    const uint32_t expected = (rank.state->epoch + 1) * kCredits;
    if (!wait_for_all(rank, at, s.attn_ranks, expected, 0)) return;

    const int vectors = s.hidden * (kFp8 ? 1 : 2) / int(sizeof(uint4));
    const int groups = s.hidden / kGroup;
    const int32_t* ids = reinterpret_cast<const int32_t*>(rank.own + at.ids);
    const uint4* rows = reinterpret_cast<const uint4*>(rank.own + at.rows);
    const float* scales = reinterpret_cast<const float*>(rank.own + at.scales);
    int turn = 0;
    for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x, turn ^= 1) {
        if (threadIdx.x < s.topk) {
            const int64_t entry = row * s.topk + threadIdx.x;
            const int expert = ids[entry];
            int place = -1;
            if (expert >= 0) place = expert * p.room + atomicAdd(&p.rows_per_expert[expert], 1);
            p.places[entry] = place;
            shared_places[turn][threadIdx.x] = place;
        }
        uint4 early[kEarly];
#pragma unroll
        for (int e = 0; e < kEarly; ++e) {
            const int i = e * kReceiveThreads + threadIdx.x;
            if (i < vectors) early[e] = rows[row * vectors + i];
        }
        float scale = 0.0f;
        if (kFp8 && threadIdx.x < groups) scale = scales[row * groups + threadIdx.x];
        // One barrier a row: the next row's places go into the other half.
        __syncthreads();
        int place[kMaxTopk];
        bool any = false;
#pragma unroll
        for (int k = 0; k < kMaxTopk; ++k) {
            place[k] = k < s.topk ? shared_places[turn][k] : -1;
            any |= place[k] >= 0;
        }
        if (!any) continue;
#pragma unroll
        for (int e = 0; e < kEarly; ++e) {
            const int i = e * kReceiveThreads + threadIdx.x;
            if (i < vectors) scatter(p, place, vectors, i, early[e]);
        }
        for (int i = kEarly * kReceiveThreads + threadIdx.x; i < vectors; i += kReceiveThreads) {
            scatter(p, place, vectors, i, rows[row * vectors + i]);
        }
        if constexpr (kFp8) {
            for (int g = threadIdx.x; g < groups; g += kReceiveThreads) {
                if (g != threadIdx.x) scale = scales[row * groups + g];
#pragma unroll
                for (int k = 0; k < kMaxTopk; ++k) {
                    if (place[k] >= 0) {
                        const int64_t expert = place[k] / p.room;
                        p.scales[(expert * groups + g) * p.room + place[k] % p.room] = scale;
                    }
                }
            }
        }
    }
}

}  // namespace afd
