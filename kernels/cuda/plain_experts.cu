// Router and routed experts for any sizes.
//
// Routes are ids int32 [rows][chosen], ascending, and weights float32 [rows][chosen]. An assignment is one (row, choice).
#include "plain.cuh"

#define MAX_EXPERTS 1024

// Router: sigmoid of logits float32 [rows][experts]; `bias` moves the choice, never the weights; ties go to the lower id.
// Groups: the topk_groups best by the sum of their two best biased scores. grid = rows, block = 32.
extern "C" __global__ void route(const float* logits, const float* bias, int* ids, float* weights, int experts, int chosen,
                                 int groups, int topk_groups, int normalise, float scaling) {
    __shared__ float score[MAX_EXPERTS], biased[MAX_EXPERTS];
    __shared__ int picked[64];
    const int row = blockIdx.x, lane = threadIdx.x;
    for (int e = lane; e < experts; e += WARP) {
        const float s = 1.0f / (1.0f + expf(-logits[(long long)row * experts + e]));
        score[e] = s;
        biased[e] = s + bias[e];
    }
    __syncwarp();
    if (groups > 1 && topk_groups < groups) {
        const int size = experts / groups;
        // Lane g judges group g; groups <= 32.
        float worth = -INFINITY;
        if (lane < groups) {
            float best = -INFINITY, second = -INFINITY;
            for (int e = lane * size; e < lane * size + size; ++e) {
                if (biased[e] > best) {
                    second = best;
                    best = biased[e];
                } else if (biased[e] > second) {
                    second = biased[e];
                }
            }
            worth = size > 1 ? best + second : best;
        }
        int better = 0;
        for (int g = 0; g < groups; ++g) {
            const float other = __shfl_sync(0xffffffffu, worth, g);
            if (other > worth || (other == worth && g < lane)) ++better;
        }
        __syncwarp();
        if (lane < groups && better >= topk_groups) {
            for (int e = lane * size; e < lane * size + size; ++e) biased[e] = -INFINITY;
        }
        __syncwarp();
    }
    for (int j = 0; j < chosen; ++j) {
        float best = -INFINITY;
        int at = experts;
        for (int e = lane; e < experts; e += WARP) {
            if (biased[e] > best || (biased[e] == best && e < at)) {
                best = biased[e];
                at = e;
            }
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, best, step);
            const int where = __shfl_xor_sync(0xffffffffu, at, step);
            if (other > best || (other == best && where < at)) {
                best = other;
                at = where;
            }
        }
        if (at >= experts) at = 0;  // Only not-a-number scores: any expert is as wrong as another.
        if (lane == 0) {
            picked[j] = at;
            biased[at] = -INFINITY;
        }
        __syncwarp();
    }
    if (lane == 0) {
        float sum = 0.0f;
        for (int j = 0; j < chosen; ++j) sum += score[picked[j]];
        for (int j = 1; j < chosen; ++j) {
            const int id = picked[j];
            int k = j;
            for (; k > 0 && picked[k - 1] > id; --k) picked[k] = picked[k - 1];
            picked[k] = id;
        }
        for (int j = 0; j < chosen; ++j) {
            float w = score[picked[j]];
            if (normalise) w = w / (sum + 1e-20f);
            ids[(long long)row * chosen + j] = picked[j];
            weights[(long long)row * chosen + j] = w * scaling;
        }
    }
}

// All experts of a layer: matrix `e` of [experts][rows][cols] follows matrix `e - 1`.
__device__ __forceinline__ Matrix expert(const Matrix& all, int e) {
    Matrix one = all;
    const int size = all.type == 0 ? 4 : all.type == 3 ? 1 : 2;
    one.data = static_cast<const char*>(all.data) + (long long)e * all.rows * all.cols * size;
    if (all.type == 3) one.scales = all.scales + (long long)e * ((all.rows + all.block_rows - 1) / all.block_rows) * all.scale_cols;
    return one;
}

// mid[a][n] = silu(gate_e x) * (up_e x) for assignment a = (row, choice). grid = (ceil(width / 4), assignments), block = 128.
template <typename T>
__device__ void gated(const Matrix& gate, const Matrix& up, const int* ids, const T* x, float* mid, int chosen) {
    const int a = blockIdx.y, n = blockIdx.x * 4 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (n >= gate.rows) return;
    const Matrix g = expert(gate, ids[a]), u = expert(up, ids[a]);
    const T* row = x + (long long)(a / chosen) * gate.cols;
    float a_sum = 0.0f, b_sum = 0.0f;
    for (int k = lane; k < gate.cols; k += WARP) {
        const float v = to_float(row[k]);
        a_sum = fmaf(v, element(g, n, k), a_sum);
        b_sum = fmaf(v, element(u, n, k), b_sum);
    }
    a_sum = warp_sum(a_sum);
    b_sum = warp_sum(b_sum);
    if (lane == 0) mid[(long long)a * gate.rows + n] = silu(a_sum) * b_sum;
}

// out[row][n] = sum over choices in ascending expert id of weight * (down_e mid). grid = (ceil(hidden / 4), rows), block = 128.
template <typename T>
__device__ void down(const Matrix& down, const int* ids, const float* weights, const float* mid, T* out, int chosen) {
    const int row = blockIdx.y, n = blockIdx.x * 4 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (n >= down.rows) return;
    float total = 0.0f;
    for (int j = 0; j < chosen; ++j) {
        const long long a = (long long)row * chosen + j;
        const Matrix d = expert(down, ids[a]);
        float sum = 0.0f;
        for (int k = lane; k < down.cols; k += WARP) sum = fmaf(mid[a * down.cols + k], element(d, n, k), sum);
        total = fmaf(weights[a], warp_sum(sum), total);
    }
    if (lane == 0) out[(long long)row * down.rows + n] = from_float<T>(total);
}

extern "C" {
__global__ void experts_gated_f32(const Matrix gate, const Matrix up, const int* ids, const float* x, float* mid, int chosen) {
    gated(gate, up, ids, x, mid, chosen);
}
__global__ void experts_gated_bf16(const Matrix gate, const Matrix up, const int* ids, const __nv_bfloat16* x, float* mid,
                                   int chosen) {
    gated(gate, up, ids, x, mid, chosen);
}
__global__ void experts_down_f32(const Matrix all, const int* ids, const float* weights, const float* mid, float* out, int chosen) {
    down(all, ids, weights, mid, out, chosen);
}
__global__ void experts_down_bf16(const Matrix all, const int* ids, const float* weights, const float* mid, __nv_bfloat16* out,
                                  int chosen) {
    down(all, ids, weights, mid, out, chosen);
}
}
