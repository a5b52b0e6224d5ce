// Latent attention for any sizes (latent <= 512): absorption, cache writes, attention over selected slots.
//
// The latent cache is [slots][latent + rope] in the activation type. Queries are [rows][heads][nope + rope] with the rope part
// rotated; absorbed queries are float32 [rows][heads][latent + rope].
#include "plain.cuh"

#define MAX_PER_LANE 16  // latent / 32

// Rotates pair `i` of v at `position`; pairs are (2i, 2i + 1) or (i, i + n).
template <typename T>
__device__ void rotate(T* v, int i, int pairs, int interleaved, int position, const float* inv_freq, float magnitude) {
    float s, c;
    sincosf((float)position * inv_freq[i], &s, &c);
    s *= magnitude;
    c *= magnitude;
    T* a = v + (interleaved ? 2 * i : i);
    T* b = v + (interleaved ? 2 * i + 1 : i + pairs);
    const float x = to_float(*a), y = to_float(*b);
    *a = from_float<T>(x * c - y * s);
    *b = from_float<T>(x * s + y * c);
}

// grid = rows, block = 128.
template <typename T>
__device__ void rope(T* x, const int* positions, const float* inv_freq, int pairs, float magnitude, int interleaved, int heads,
                     int head_dim, int offset, int width) {
    const int position = positions[blockIdx.x];
    if (position < 0) return;
    for (int at = threadIdx.x; at < heads * pairs; at += blockDim.x) {
        T* head = x + (long long)blockIdx.x * width + at / pairs * head_dim + offset;
        rotate(head, at % pairs, pairs, interleaved, position, inv_freq, magnitude);
    }
}

// kv [rows][latent + rope]: normalised latent and rotated key to slot slots[row]. grid = rows, block = 128.
template <typename T>
__device__ void write_latent(T* cache, const T* kv, const float* weight, const int* positions, const int* slots, int latent,
                             int pairs, float eps, const float* inv_freq, float magnitude) {
    const int slot = slots[blockIdx.x], width = latent + 2 * pairs;
    if (slot < 0) return;
    const T* from = kv + (long long)blockIdx.x * width;
    T* to = cache + (long long)slot * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < latent; c += blockDim.x) sum += to_float(from[c]) * to_float(from[c]);
    const float scale = 1.0f / sqrtf(block_sum(sum) / latent + eps);
    for (int c = threadIdx.x; c < latent; c += blockDim.x) to[c] = from_float<T>(to_float(from[c]) * scale * weight[c]);
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        to[latent + 2 * i] = from[latent + 2 * i];
        to[latent + 2 * i + 1] = from[latent + 2 * i + 1];
        rotate(to + latent, i, pairs, 1, positions[blockIdx.x], inv_freq, magnitude);
    }
}

// LayerNorm, rotation of the first 2 * pairs values, to slot slots[row]. grid = rows, block = 128,
// dynamic shared memory = dim floats.
template <typename T>
__device__ void write_index_key(T* cache, const T* keys, const float* weight, const float* bias, const int* positions,
                                const int* slots, int dim, int pairs, int interleaved, float eps, const float* inv_freq,
                                float magnitude) {
    extern __shared__ float normed[];
    const int slot = slots[blockIdx.x];
    if (slot < 0) return;
    const T* from = keys + (long long)blockIdx.x * dim;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < dim; c += blockDim.x) sum += to_float(from[c]);
    const float mean = block_sum(sum) / dim;
    float squares = 0.0f;
    for (int c = threadIdx.x; c < dim; c += blockDim.x) squares += (to_float(from[c]) - mean) * (to_float(from[c]) - mean);
    const float scale = 1.0f / sqrtf(block_sum(squares) / dim + eps);
    for (int c = threadIdx.x; c < dim; c += blockDim.x) normed[c] = (to_float(from[c]) - mean) * scale * weight[c] + bias[c];
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        rotate(normed, i, pairs, interleaved, positions[blockIdx.x], inv_freq, magnitude);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < dim; c += blockDim.x) cache[(long long)slot * dim + c] = from_float<T>(normed[c]);
}

// queries -> absorbed [rows][heads][latent + rope]: latent part = W_uk^T q_nope with W_uk [heads][nope][latent].
// grid = (rows, heads), block = 128, dynamic shared memory = nope floats.
template <typename T, typename W>
__device__ void absorb_queries(const T* queries, const W* uk, float* out, int heads, int nope, int rope, int latent) {
    extern __shared__ float q[];
    const int row = blockIdx.x, head = blockIdx.y;
    const T* from = queries + ((long long)row * heads + head) * (nope + rope);
    float* to = out + ((long long)row * heads + head) * (latent + rope);
    for (int i = threadIdx.x; i < nope; i += blockDim.x) q[i] = to_float(from[i]);
    __syncthreads();
    const W* w = uk + (long long)head * nope * latent;
    for (int l = threadIdx.x; l < latent; l += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < nope; ++i) sum = fmaf(q[i], to_float(w[(long long)i * latent + l]), sum);
        to[l] = sum;
    }
    for (int i = threadIdx.x; i < rope; i += blockDim.x) to[latent + i] = to_float(from[nope + i]);
}

// attended float32 [rows][heads][latent] -> [rows][heads * value] with W_uv [heads][value][latent].
// grid = (rows, heads), block = 128.
template <typename T, typename W>
__device__ void absorb_values(const float* attended, const W* uv, T* out, int heads, int value, int latent) {
    const int row = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const float* from = attended + ((long long)row * heads + head) * latent;
    for (int v = warp; v < value; v += blockDim.x / WARP) {
        const W* w = uv + ((long long)head * value + v) * latent;
        float sum = 0.0f;
        for (int l = lane; l < latent; l += WARP) sum = fmaf(from[l], to_float(w[l]), sum);
        sum = warp_sum(sum);
        if (lane == 0) out[((long long)row * heads + head) * value + v] = from_float<T>(sum);
    }
}

// Attention of one row and head over slots[row][0 .. count[row]]. grid = (rows, heads), block = 128 (4 warps; warp w takes entries
// w, w + 4, ...), dynamic shared memory = (latent + rope + 4 * (latent + 2)) floats.
template <typename T>
__device__ void attend(const T* cache, const float* absorbed, const int* slots, const int* counts, float* out, int heads,
                       int latent, int rope, int topk, float scale) {
    extern __shared__ float shared[];
    const int row = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int width = latent + rope, count = counts[row];
    float* q = shared;
    float* parts = shared + width + warp * (latent + 2);
    const float* from = absorbed + ((long long)row * heads + head) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) q[i] = from[i];
    __syncthreads();
    float sums[MAX_PER_LANE] = {};
    float top = -INFINITY, total = 0.0f;
    for (int e = warp; e < count; e += 4) {
        const int slot = slots[(long long)row * topk + e];
        if (slot < 0) continue;
        const T* key = cache + (long long)slot * width;
        float dot = 0.0f;
        for (int i = lane; i < width; i += WARP) dot = fmaf(q[i], to_float(key[i]), dot);
        const float score = warp_sum(dot) * scale;
        const float higher = fmaxf(top, score), fade = expf(top - higher), weight = expf(score - higher);
        total = total * fade + weight;
        for (int j = 0; j * WARP + lane < latent && j < MAX_PER_LANE; ++j) {
            sums[j] = sums[j] * fade + weight * to_float(key[j * WARP + lane]);
        }
        top = higher;
    }
    for (int j = 0; j * WARP + lane < latent && j < MAX_PER_LANE; ++j) parts[j * WARP + lane] = sums[j];
    if (lane == 0) {
        parts[latent] = top;
        parts[latent + 1] = total;
    }
    __syncthreads();
    const float* first = shared + width;
    const int stride = latent + 2;
    float highest = -INFINITY;
    for (int w = 0; w < 4; ++w) highest = fmaxf(highest, first[w * stride + latent]);
    float* to = out + ((long long)row * heads + head) * latent;
    for (int l = threadIdx.x; l < latent; l += blockDim.x) {
        float sum = 0.0f, weights = 0.0f;
        for (int w = 0; w < 4 && highest > -INFINITY; ++w) {
            const float fade = expf(first[w * stride + latent] - highest);
            sum += fade * first[w * stride + l];
            weights += fade * first[w * stride + latent + 1];
        }
        to[l] = weights > 0.0f ? sum / weights : 0.0f;
    }
}

#define FOR_TYPE(SUFFIX, T)                                                                                                        \
    extern "C" __global__ void rope_##SUFFIX(T* x, const int* positions, const float* inv_freq, int pairs, float magnitude,        \
                                             int interleaved, int heads, int head_dim, int offset, int width) {                    \
        rope(x, positions, inv_freq, pairs, magnitude, interleaved, heads, head_dim, offset, width);                               \
    }                                                                                                                              \
    extern "C" __global__ void write_latent_##SUFFIX(T* cache, const T* kv, const float* weight, const int* positions,             \
                                                     const int* slots, int latent, int pairs, float eps, const float* inv_freq,    \
                                                     float magnitude) {                                                            \
        write_latent(cache, kv, weight, positions, slots, latent, pairs, eps, inv_freq, magnitude);                                \
    }                                                                                                                              \
    extern "C" __global__ void write_index_key_##SUFFIX(T* cache, const T* keys, const float* weight, const float* bias,           \
                                                        const int* positions, const int* slots, int dim, int pairs,                \
                                                        int interleaved, float eps, const float* inv_freq, float magnitude) {      \
        write_index_key(cache, keys, weight, bias, positions, slots, dim, pairs, interleaved, eps, inv_freq, magnitude);           \
    }                                                                                                                              \
    extern "C" __global__ void absorb_queries_##SUFFIX(const T* queries, const T* uk, float* out, int heads, int nope, int rope,   \
                                                       int latent) {                                                               \
        absorb_queries(queries, uk, out, heads, nope, rope, latent);                                                               \
    }                                                                                                                              \
    extern "C" __global__ void absorb_values_##SUFFIX(const float* attended, const T* uv, T* out, int heads, int value,            \
                                                      int latent) {                                                                \
        absorb_values(attended, uv, out, heads, value, latent);                                                                    \
    }                                                                                                                              \
    extern "C" __global__ void attend_##SUFFIX(const T* cache, const float* absorbed, const int* slots, const int* counts,         \
                                               float* out, int heads, int latent, int rope, int topk, float scale) {               \
        attend(cache, absorbed, slots, counts, out, heads, latent, rope, topk, scale);                                             \
    }

FOR_TYPE(f32, float)
FOR_TYPE(bf16, __nv_bfloat16)

// kv_b_proj [heads * (nope + value)][latent] of any stored type -> uk [heads][nope][latent], uv [heads][value][latent].
// grid = heads * (nope + value), block = 128.
template <typename T> __device__ void split(const Matrix& kv_b, T* uk, T* uv, int nope, int value) {
    const int head = blockIdx.x / (nope + value), at = blockIdx.x % (nope + value);
    T* to = at < nope ? uk + ((long long)head * nope + at) * kv_b.cols : uv + ((long long)head * value + at - nope) * kv_b.cols;
    for (int l = threadIdx.x; l < kv_b.cols; l += blockDim.x) to[l] = from_float<T>(element(kv_b, blockIdx.x, l));
}
extern "C" __global__ void split_kv_b_f32(const Matrix kv_b, float* uk, float* uv, int nope, int value) {
    split(kv_b, uk, uv, nope, value);
}
extern "C" __global__ void split_kv_b_bf16(const Matrix kv_b, __nv_bfloat16* uk, __nv_bfloat16* uv, int nope, int value) {
    split(kv_b, uk, uv, nope, value);
}
