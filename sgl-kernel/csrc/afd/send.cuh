// FFN rank: one BF16 row per token back to its attention rank, whatever number of its experts live
// here.
#pragma once

#include "receive.cuh"

namespace afd {

struct Send {
    Rank rank;
    const void* out;        // [E, L, H] BF16 by expert, or [R, H], weighted and summed already
    const int32_t* places;  // [R, K], as `receive` left them; null if `out` is [R, H]
    int32_t* rows_per_expert;  // set to zero for the next transfer
    int32_t num_experts;       // of this rank
    int32_t num_rows;
    int32_t first_rows[kMaxAttnRanks + 1];  // of each attention rank; then num_rows
    uint8_t* peers[kMaxAttnRanks];
};

// Where the row's attention rank wants it.
__device__ inline uint4* home_of(const Send& p, const Layout& at, int row, int vectors) {
    int attn_rank = 0;
    while (row >= p.first_rows[attn_rank + 1]) ++attn_rank;
    const int64_t token = row - p.first_rows[attn_rank];
    uint4* back = reinterpret_cast<uint4*>(p.peers[attn_rank] + at.back);
    return back + (int64_t(p.rank.index) * p.rank.shape.capacity + token) * vectors;
}

// Sixteen lanes take a unit: 128 values of one row. Their sum is taken in FP32, in the order of the
// token's top-k entries, so that it does not depend on who came first.
__global__ void __launch_bounds__(kThreads)
    send_by_expert_kernel(const __grid_constant__ Send p) {
    constexpr int kLanes = 16;
    constexpr int kBatch = 8;  // rows loaded before the first is added
    const Rank& rank = p.rank;
    const Shape& s = rank.shape;
    const Layout at = make_layout(s);
    begin_after_predecessor();
    const bool failed = has_failed(rank);
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    const int threads = gridDim.x * kThreads;
    if (thread == 0) rank.state->epoch += 1;
    for (int e = thread; e < p.num_experts; e += threads) p.rows_per_expert[e] = 0;

    const float* weights = reinterpret_cast<const float*>(rank.own + at.weights);
    const uint4* out = static_cast<const uint4*>(p.out);
    const int lane = threadIdx.x % kLanes;
    const unsigned lanes = 0xffffu << (threadIdx.x % 32 / kLanes * kLanes);
    const int units_per_row = s.hidden / kGroup;
    const int vectors = s.hidden / 8;
    const int units = p.num_rows * units_per_row;
    for (int unit = thread / kLanes; unit < units; unit += threads / kLanes) {
        const int row = unit / units_per_row;
        const int column = unit % units_per_row * kLanes + lane;
        int place = -1;
        float weight = 0.0f;
        if (lane < s.topk) {
            place = p.places[row * s.topk + lane];
            weight = weights[row * s.topk + lane];
        }
        if (!(__ballot_sync(lanes, place >= 0) & lanes)) continue;
        float sum[8] = {};
#pragma unroll
        for (int first = 0; first < kMaxTopk; first += kBatch) {
            if (first >= s.topk) break;
            uint4 loaded[kBatch];
            int places[kBatch];
#pragma unroll
            for (int k = 0; k < kBatch; ++k) {
                places[k] = __shfl_sync(lanes, place, first + k, kLanes);
                if (places[k] >= 0) loaded[k] = out[int64_t(places[k]) * vectors + column];
            }
#pragma unroll
            for (int k = 0; k < kBatch; ++k) {
                const float factor = __shfl_sync(lanes, weight, first + k, kLanes);
                if (places[k] >= 0) {
                    float values[8];
                    unpack(loaded[k], values);
#pragma unroll
                    for (int i = 0; i < 8; ++i) sum[i] = fmaf(values[i], factor, sum[i]);
                }
            }
        }
        if (failed) return;
        home_of(p, at, row, vectors)[column] = pack(sum);
    }
    if (failed) return;
    credit_all(rank, at, p.peers, s.attn_ranks);
}

// Rows that are complete already.
__global__ void __launch_bounds__(kThreads) send_kernel(const __grid_constant__ Send p) {
    constexpr int kLanes = 16;
    constexpr int kUnroll = 4;
    const Rank& rank = p.rank;
    const Shape& s = rank.shape;
    const Layout at = make_layout(s);
    begin_after_predecessor();
    const bool failed = has_failed(rank);
    const int thread = blockIdx.x * kThreads + threadIdx.x;
    if (thread == 0) rank.state->epoch += 1;

    const int32_t* ids = reinterpret_cast<const int32_t*>(rank.own + at.ids);
    const uint4* out = static_cast<const uint4*>(p.out);
    const int lane = threadIdx.x % kLanes;
    const unsigned lanes = 0xffffu << (threadIdx.x % 32 / kLanes * kLanes);
    const int units_per_row = s.hidden / kGroup;
    const int vectors = s.hidden / 8;
    const int units = p.num_rows * units_per_row;
    const int stride = gridDim.x * kThreads / kLanes;
    for (int base = thread / kLanes; base < units; base += stride * kUnroll) {
        uint4 values[kUnroll];
        int id[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int unit = base + u * stride;
            id[u] = -1;
            if (unit < units) {
                values[u] = out[int64_t(unit) * kLanes + lane];
                if (lane < s.topk) id[u] = ids[unit / units_per_row * s.topk + lane];
            }
        }
        if (failed) return;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int unit = base + u * stride;
            if (__ballot_sync(lanes, id[u] >= 0) & lanes) {
                const int column = unit % units_per_row * kLanes + lane;
                home_of(p, at, unit / units_per_row, vectors)[column] = values[u];
            }
        }
    }
    if (failed) return;
    credit_all(rank, at, p.peers, s.attn_ranks);
}

}  // namespace afd
