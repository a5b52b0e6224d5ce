// What the kernels for any size share: stored matrices of every type, conversions, reductions.
//
// "Plain" kernels serve models whose sizes the tuned kernels do not cover, in float32 or bfloat16 activations. Every output
// element has one fixed order of additions that does not depend on the number of rows: a row's result is the same alone
// and among others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#define WARP 32

// A stored matrix [rows, cols], row-major. Mirrors `cuda::weight::Matrix` of the launcher.
struct Matrix {
    const void* data;
    const float* scales;  // fp8: [ceil(rows / block_rows)][scale_cols]
    int rows;
    int cols;
    int type;  // 0 f32, 1 bf16, 2 f16, 3 fp8 e4m3 in blocks
    int block_rows;
    int block_cols;
    int scale_cols;
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float e4m3_to_float(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

template <int TYPE> __device__ __forceinline__ float element(const Matrix& m, long long row, int col) {
    const long long at = row * m.cols + col;
    if constexpr (TYPE == 0) return static_cast<const float*>(m.data)[at];
    if constexpr (TYPE == 1) return to_float(static_cast<const __nv_bfloat16*>(m.data)[at]);
    if constexpr (TYPE == 2) return to_float(static_cast<const __half*>(m.data)[at]);
    const float scale = m.scales[row / m.block_rows * m.scale_cols + col / m.block_cols];
    return e4m3_to_float(static_cast<const uint8_t*>(m.data)[at]) * scale;
}

__device__ __forceinline__ float element(const Matrix& m, long long row, int col) {
    switch (m.type) {
        case 0: return element<0>(m, row, col);
        case 1: return element<1>(m, row, col);
        case 2: return element<2>(m, row, col);
        default: return element<3>(m, row, col);
    }
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int step = WARP / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
    for (int step = WARP / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

// Sum over a block of any number of whole warps; every thread gets it.
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float parts[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) parts[warp] = v;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < warps; ++i) total += parts[i];
    return total;
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

