// Flags between GPUs: release and acquire at system scope, and waits that end.
#pragma once

#include <cstdint>

#include "layout.cuh"

namespace afd {

// What one rank knows of one microbatch, in its own device memory. A replayed graph finds its epoch
// here, so nothing in it waits for a constant.
struct State {
    uint32_t epoch;   // transfers begun (attention rank) or ended (FFN rank)
    uint32_t failed;  // a wait of this rank ran out; everything that follows returns at once
};

// The first wait that ran out, in host memory that the device can write. `full` is written last.
struct Failure {
    uint32_t claimed;
    uint32_t full;
    int32_t operation;  // 0: receive, 1: combine
    int32_t rank;       // world ranks
    int32_t peer;
    int32_t layer;
    int32_t microbatch;
    uint32_t epoch;
    uint32_t expected;
    uint32_t seen;
};

// What every kernel needs to know of its rank.
struct Rank {
    Shape shape;
    int32_t index;  // within its role
    int32_t layer;  // for the report of a failure only
    int32_t microbatch;
    int32_t reserved;
    uint64_t timeout_ns;
    uint8_t* own;      // this rank's buffer of the microbatch
    State* state;
    Failure* failure;
};

__device__ inline uint32_t load_acquire(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline void add_release(uint32_t* address, uint32_t value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// First thing in every kernel. It may have been launched while its predecessor still ran: waits for
// that, and lets the successor be launched in turn.
__device__ inline void begin_after_predecessor() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ inline uint64_t now_ns() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__device__ inline bool has_failed(const Rank& rank) {
    return *reinterpret_cast<volatile uint32_t*>(&rank.state->failed) != 0;
}

__device__ inline uint32_t* flag_of(uint8_t* buffer, const Layout& at, int peer) {
    return reinterpret_cast<uint32_t*>(buffer + at.flags + kFlagStride * peer);
}

// Waits until the flag of `peer` (index within the other role) has reached `expected`. False, and
// the rank has failed, if that takes longer than the timeout.
__device__ inline bool wait_for(
    const Rank& rank, const Layout& at, int peer, uint32_t expected, int operation
) {
    constexpr int kPollsPerClock = 64;  // reading the clock costs more than reading the flag
    const uint32_t* flag = flag_of(rank.own, at, peer);
    uint32_t seen = load_acquire(flag);
    if (reached(seen, expected)) return true;
    const uint64_t deadline = now_ns() + rank.timeout_ns;
    while (true) {
        for (int i = 0; i < kPollsPerClock; ++i) {
            seen = load_acquire(flag);
            if (reached(seen, expected)) return true;
        }
        if (has_failed(rank)) return false;
        if (now_ns() > deadline) break;
    }
    *reinterpret_cast<volatile uint32_t*>(&rank.state->failed) = 1;
    Failure* report = rank.failure;
    if (atomicCAS_system(&report->claimed, 0u, 1u) == 0u) {
        const bool is_ffn = operation == 0;
        report->operation = operation;
        report->rank = is_ffn ? rank.shape.attn_ranks + rank.index : rank.index;
        report->peer = is_ffn ? peer : rank.shape.attn_ranks + peer;
        report->layer = rank.layer;
        report->microbatch = rank.microbatch;
        report->epoch = *reinterpret_cast<volatile uint32_t*>(&rank.state->epoch);
        report->expected = expected;
        report->seen = seen;
        __threadfence_system();
        *reinterpret_cast<volatile uint32_t*>(&report->full) = 1;
    }
    return false;
}

// All threads of the block call it: thread i waits for peer i. The barrier makes what the peers
// wrote visible to the whole block.
__device__ inline bool wait_for_all(
    const Rank& rank, const Layout& at, int peers, uint32_t expected, int operation
) {
    bool arrived = true;
    if (threadIdx.x < peers) arrived = wait_for(rank, at, threadIdx.x, expected, operation);
    return __syncthreads_and(arrived);
}

// All threads of the block call it once it has written all that it writes: adds the block's share to
// the flag of this rank at every peer. The barrier puts the whole block's writes before the release,
// and the release before what follows at the peer.
__device__ inline void credit_all(
    const Rank& rank, const Layout& at, uint8_t* const* peer_buffers, int peers
) {
    __syncthreads();
    if (threadIdx.x < peers) {
        add_release(
            flag_of(peer_buffers[threadIdx.x], at, rank.index), share(blockIdx.x, gridDim.x)
        );
    }
}

}  // namespace afd
