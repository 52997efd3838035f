// The C interface: one launcher per kernel, without torch, so that one build serves every torch.
#include <cuda_runtime.h>

#include "combine.cuh"
#include "dispatch.cuh"
#include "receive.cuh"
#include "send.cuh"

namespace {

// Blocks for `items` pieces of work of which a block takes `per_block` at a time.
int blocks_for(int64_t items, int per_block, int most) {
    const int64_t wanted = (items + per_block - 1) / per_block;
    const int64_t limit = most < 1 ? 1 : most > int(afd::kCredits) ? afd::kCredits : most;
    return int(wanted < 1 ? 1 : wanted > limit ? limit : wanted);
}

// Launches `kernel` so that it may start before its predecessor on the stream has ended; all of ours
// wait for that themselves. Saves the time between two kernels, also in a captured graph.
template <typename Params>
int launch(void (*kernel)(Params), int blocks, int threads, cudaStream_t stream, const Params& p) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

extern "C" {

// Sizes of the structs below in this build, for a caller that declares them in another language.
int afd_sizes(int64_t* sizes, int count) {
    const int64_t known[] = {
        sizeof(afd::Shape),   sizeof(afd::Layout),  sizeof(afd::Rank), sizeof(afd::State),
        sizeof(afd::Failure), sizeof(afd::Dispatch), sizeof(afd::Receive), sizeof(afd::Send),
        sizeof(afd::Combine),
    };
    const int total = sizeof(known) / sizeof(known[0]);
    for (int i = 0; i < total && i < count; ++i) sizes[i] = known[i];
    return total;
}

void afd_layout(const afd::Shape* shape, afd::Layout* layout) { *layout = afd::make_layout(*shape); }

const char* afd_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

int afd_dispatch(const afd::Dispatch* p, int most_blocks, cudaStream_t stream) {
    const afd::Shape& s = p->rank.shape;
    const int64_t lanes = int64_t(p->tokens) * s.hidden / (s.fp8 ? 16 : 8);
    const int blocks = blocks_for(lanes, afd::kThreads, most_blocks);
    auto kernel = s.fp8 ? afd::dispatch_kernel<true> : afd::dispatch_kernel<false>;
    return launch(kernel, blocks, afd::kThreads, stream, *p);
}

int afd_receive(const afd::Receive* p, int most_blocks, cudaStream_t stream) {
    if (p->by_expert == nullptr) {
        return launch(afd::receive_kernel, 1, afd::kMaxAttnRanks, stream, *p);
    }
    const int blocks = blocks_for(p->num_rows, 1, most_blocks);
    auto kernel = p->rank.shape.fp8 ? afd::receive_by_expert_kernel<true>
                                    : afd::receive_by_expert_kernel<false>;
    return launch(kernel, blocks, afd::kReceiveThreads, stream, *p);
}

int afd_send(const afd::Send* p, int most_blocks, cudaStream_t stream) {
    const int64_t lanes = int64_t(p->num_rows) * p->rank.shape.hidden / 8;
    const int blocks = blocks_for(lanes, afd::kThreads, most_blocks);
    auto kernel = p->places != nullptr ? afd::send_by_expert_kernel : afd::send_kernel;
    return launch(kernel, blocks, afd::kThreads, stream, *p);
}

int afd_combine(const afd::Combine* p, int most_blocks, cudaStream_t stream) {
    const int64_t lanes = int64_t(p->tokens) * p->rank.shape.hidden / 8;
    const int blocks = blocks_for(lanes, afd::kThreads, most_blocks);
    return launch(afd::combine_kernel, blocks, afd::kThreads, stream, *p);
}

}  // extern "C"
