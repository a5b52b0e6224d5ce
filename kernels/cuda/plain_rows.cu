// Row-wise operations for any width: embedding, norms, residual addition, gathering, conversion.
//
// Activations are [rows, width], float32 (`_f32`) or bfloat16 (`_bf16`), row-major. Unless said otherwise: grid = rows,
// block = 128 or 256, no dynamic shared memory.
#include "plain.cuh"

// out[r] = table[ids[r]], zero where ids[r] < 0.
template <typename T> __device__ void embed(const Matrix table, const int* ids, T* out) {
    const int id = ids[blockIdx.x];
    for (int c = threadIdx.x; c < table.cols; c += blockDim.x) {
        out[(long long)blockIdx.x * table.cols + c] = from_float<T>(id < 0 ? 0.0f : element(table, id, c));
    }
}

// out = x / sqrt(mean(x^2) + eps) * weight, in float32 with one rounding.
template <typename T> __device__ void rms_norm(const T* x, const float* weight, T* out, int width, float eps) {
    x += (long long)blockIdx.x * width;
    out += (long long)blockIdx.x * width;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        const float v = to_float(x[c]);
        sum += v * v;
    }
    const float scale = 1.0f / sqrtf(block_sum(sum) / width + eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x) out[c] = from_float<T>(to_float(x[c]) * scale * weight[c]);
}

extern "C" {
__global__ void embed_f32(const Matrix table, const int* ids, float* out) { embed(table, ids, out); }
__global__ void embed_bf16(const Matrix table, const int* ids, __nv_bfloat16* out) { embed(table, ids, out); }
__global__ void rms_norm_f32(const float* x, const float* w, float* out, int width, float eps) { rms_norm(x, w, out, width, eps); }
__global__ void rms_norm_bf16(const __nv_bfloat16* x, const float* w, __nv_bfloat16* out, int width, float eps) {
    rms_norm(x, w, out, width, eps);
}

// a += b over n values; grid covers n.
__global__ void add_f32(float* a, const float* b, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] += b[i];
}
__global__ void add_bf16(__nv_bfloat16* a, const __nv_bfloat16* b, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] = __float2bfloat16_rn(to_float(a[i]) + to_float(b[i]));
}
// out = silu(gate) * up over n values.
__global__ void gated_f32(const float* gate, const float* up, float* out, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = silu(gate[i]) * up[i];
}
__global__ void gated_bf16(const __nv_bfloat16* gate, const __nv_bfloat16* up, __nv_bfloat16* out, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __float2bfloat16_rn(silu(to_float(gate[i])) * to_float(up[i]));
}

// Rows rows[blockIdx.x] of x; `bytes` of a row is a multiple of 2.
__global__ void gather_rows(const uint16_t* x, const int* rows, uint16_t* out, int halves) {
    const uint16_t* from = x + (long long)rows[blockIdx.x] * halves;
    uint16_t* to = out + (long long)blockIdx.x * halves;
    for (int c = threadIdx.x; c < halves; c += blockDim.x) to[c] = from[c];
}

// Conversions over n values; grid covers n.
__global__ void f32_to_bf16(const float* x, __nv_bfloat16* out, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __float2bfloat16_rn(x[i]);
}
__global__ void bf16_to_f32(const __nv_bfloat16* x, float* out, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = to_float(x[i]);
}
__global__ void f16_to_f32(const __half* x, float* out, long long n) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = to_float(x[i]);
}
}

// Random fp8 codes without NaN, for benchmarks: code of element i depends on (seed, i) alone.
__device__ __forceinline__ uint32_t mix(uint64_t v) {
    v = (v ^ (v >> 33)) * 0xff51afd7ed558ccdull;
    v = (v ^ (v >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return (uint32_t)(v ^ (v >> 33));
}
extern "C" __global__ void random_codes(uint8_t* out, long long n, unsigned long long seed) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
        // Signs and exponents of values between 2^-3 and 2^2: a spread like that of trained blocks.
        const uint32_t r = mix(seed * 0x9e3779b97f4a7c15ull + i);
        out[i] = (uint8_t)((r & 0x80) | ((4 + ((r >> 8) % 5)) << 3) | (r & 7));
    }
}
// Uniform in [-amplitude, amplitude].
extern "C" __global__ void random_bf16(__nv_bfloat16* out, long long n, unsigned long long seed, float amplitude) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
        const float u = mix(seed * 0x9e3779b97f4a7c15ull + i) * (2.0f / 4294967296.0f) - 1.0f;
        out[i] = __float2bfloat16_rn(u * amplitude);
    }
}
extern "C" __global__ void random_f32(float* out, long long n, unsigned long long seed, float amplitude) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
        out[i] = (mix(seed * 0x9e3779b97f4a7c15ull + i) * (2.0f / 4294967296.0f) - 1.0f) * amplitude;
    }
}
extern "C" __global__ void fill_f32(float* out, long long n, float value) {
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) out[i] = value;
}
