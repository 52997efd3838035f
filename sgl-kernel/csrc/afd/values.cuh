// Sixteen bytes at a time: BF16 to float and back, BF16 to E4M3 with a scale per group.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "layout.cuh"

namespace afd {

constexpr float kFp8Max = 448.0f;
constexpr float kLeastAmax = 1e-10f;

__device__ inline void unpack(const uint4& packed, float (&values)[8]) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __bfloat1622float2(pairs[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

__device__ inline uint4 pack(const float (&values)[8]) {
    uint4 packed;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    }
    return packed;
}

__device__ inline void add(float (&sum)[8], const uint4& packed) {
    float values[8];
    unpack(packed, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += values[i];
}

// Sixteen values of this lane as E4M3. The eight lanes of `lanes` hold one group; all of them get
// its scale. The arithmetic is that of SGLang's `sglang_per_token_group_quant_fp8`, down to the
// approximate division, so that colocated and AFD feed the same bits to the same GEMM. Not finite
// values become 448 and -448, as there.
__device__ inline uint4 quantize(const uint4 (&packed)[2], unsigned lanes, float& scale) {
    float values[2][8];
    float amax = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unpack(packed[half], values[half]);
#pragma unroll
        for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(values[half][i]));
    }
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, distance));
    }
    amax = fmaxf(amax, kLeastAmax);
    scale = amax * (1.0f / kFp8Max);
    float factor;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(factor) : "f"(kFp8Max), "f"(amax));
    uint4 out;
    __nv_fp8x2_storage_t* pairs = reinterpret_cast<__nv_fp8x2_storage_t*>(&out);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float* pair = &values[i / 4][2 * (i % 4)];
        const float2 scaled = {fminf(pair[0] * factor, kFp8Max), fminf(pair[1] * factor, kFp8Max)};
        pairs[i] = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
    }
    return out;
}

}  // namespace afd
