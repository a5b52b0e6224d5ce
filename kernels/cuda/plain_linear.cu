// y = x W^T for any sizes and stored types: y[r][n] = sum_k x[r][k] W[n][k], float32 sums.
//
// One warp computes one output feature of ROWS rows; lane l adds k = l, l + 32, ... in order, then the lanes are summed by
// a fixed tree: an element does not depend on how many rows there are.
// grid = (ceil(N / 4), ceil(rows / 8)), block = 128.
#include "plain.cuh"

#define ROWS 8

template <typename X, typename Y, int TYPE>
__device__ void linear(const Matrix& w, const X* x, Y* y, int rows) {
    const int n = blockIdx.x * 4 + threadIdx.x / WARP, lane = threadIdx.x % WARP, first = blockIdx.y * ROWS;
    if (n >= w.rows) return;
    const int count = min(ROWS, rows - first);
    float sums[ROWS] = {};
    for (int k = lane; k < w.cols; k += WARP) {
        const float value = element<TYPE>(w, n, k);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r < count) sums[r] = fmaf(to_float(x[(long long)(first + r) * w.cols + k]), value, sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0 && r < count) y[(long long)(first + r) * w.rows + n] = from_float<Y>(sum);
    }
}

template <typename X, typename Y> __device__ void any_linear(const Matrix& w, const X* x, Y* y, int rows) {
    switch (w.type) {
        case 0: return linear<X, Y, 0>(w, x, y, rows);
        case 1: return linear<X, Y, 1>(w, x, y, rows);
        case 2: return linear<X, Y, 2>(w, x, y, rows);
        default: return linear<X, Y, 3>(w, x, y, rows);
    }
}

extern "C" {
__global__ void linear_f32(const Matrix w, const float* x, float* y, int rows) { any_linear(w, x, y, rows); }
__global__ void linear_bf16(const Matrix w, const __nv_bfloat16* x, __nv_bfloat16* y, int rows) { any_linear(w, x, y, rows); }
// bf16 activations, float32 result: logits, router, index head weights.
__global__ void linear_bf16_f32(const Matrix w, const __nv_bfloat16* x, float* y, int rows) { any_linear(w, x, y, rows); }
}
