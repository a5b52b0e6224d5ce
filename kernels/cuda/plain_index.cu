// The indexer for any sizes: scores, exact selection, and selections that come from a hand-off.
//
// A selection is positions int32 [rows][topk], ascending, -1 after the last, with counts int32 [rows]; and the same as
// physical slots of this stage's cache. `positions[row]` is the row's own position, -1 for padding; `tables` is
// [sequences][table_stride] block ids, `sequence[row]` the row's line of it.
#include "plain.cuh"

// scores[row - first][s] = sum_h weights[row][h] * spread * relu(q[row][h] . k[s] * dim^-1/2) for s <= position, rows that select
// everything (position < topk) are skipped. One warp a key. grid = (ceil(longest / 32), rows), block = 256,
// dynamic shared memory = heads * (dim + 1) floats.
template <typename T>
__device__ void scores(const T* cache, const T* queries, const float* weights, const int* positions, const int* sequence,
                       const int* tables, int table_stride, int block_size, float* out, long long stride, int first, int heads,
                       int dim, int topk) {
    extern __shared__ float q[];
    const int row = first + blockIdx.y, position = positions[row], warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (position < topk || (int)blockIdx.x * 32 > position) return;
    float* factors = q + heads * dim;
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) q[i] = to_float(queries[(long long)row * heads * dim + i]);
    for (int h = threadIdx.x; h < heads; h += blockDim.x) factors[h] = weights[(long long)row * heads + h] / sqrtf((float)heads);
    __syncthreads();
    const int* table = tables + (long long)sequence[row] * table_stride;
    const float scale = 1.0f / sqrtf((float)dim);
    for (int s = blockIdx.x * 32 + warp; s < min(position + 1, (int)blockIdx.x * 32 + 32); s += blockDim.x / WARP) {
        const T* key = cache + ((long long)table[s / block_size] * block_size + s % block_size) * dim;
        float sum = 0.0f;
        for (int h = 0; h < heads; ++h) {
            float dot = 0.0f;
            for (int i = lane; i < dim; i += WARP) dot = fmaf(q[h * dim + i], to_float(key[i]), dot);
            sum = fmaf(factors[h], fmaxf(warp_sum(dot) * scale, 0.0f), sum);
        }
        if (lane == 0) out[(long long)blockIdx.y * stride + s] = sum;
    }
}
#define SCORES(SUFFIX, T)                                                                                                         \
    extern "C" __global__ void index_scores_##SUFFIX(const T* cache, const T* queries, const float* weights, const int* positions, \
                                                     const int* sequence, const int* tables, int table_stride, int block_size,    \
                                                     float* out, long long stride, int first, int heads, int dim, int topk) {     \
        scores(cache, queries, weights, positions, sequence, tables, table_stride, block_size, out, stride, first, heads, dim,    \
               topk);                                                                                                             \
    }
SCORES(f32, float)
SCORES(bf16, __nv_bfloat16)

// Order of scores as unsigned numbers: higher is better, NaN lowest, -0 = +0.
__device__ __forceinline__ uint32_t order(float score) {
    if (score != score) return 0;
    const uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

// The topk best of scores[row - first][0 ..= position] by (higher score, lower position). grid = rows, block = 256.
// Rows with position < topk select 0 ..= position; padding rows nothing. `nan` counts scores that are not numbers.
extern "C" __global__ void select_topk(const float* scores, long long stride, const int* positions, int first, int topk, int* out,
                                       int* counts, unsigned long long* nan) {
    __shared__ int histogram[256];
    __shared__ uint32_t prefix;
    __shared__ int wanted, above, ties;
    __shared__ int offsets[2 * 8];
    const int row = first + blockIdx.x, position = positions[row], length = position + 1;
    int* to = out + (long long)row * topk;
    if (length <= topk) {
        for (int i = threadIdx.x; i < topk; i += blockDim.x) to[i] = i < length ? i : -1;
        if (threadIdx.x == 0) counts[row] = length;
        return;
    }
    const float* from = scores + (long long)blockIdx.x * stride;
    if (threadIdx.x == 0) {
        prefix = 0;
        wanted = topk;
    }
    int bad = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        histogram[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t head = prefix;
        for (int s = threadIdx.x; s < length; s += blockDim.x) {
            const uint32_t key = order(from[s]);
            if (shift == 24 && from[s] != from[s]) ++bad;
            if (shift == 24 || key >> (shift + 8) == head >> (shift + 8)) atomicAdd(&histogram[key >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = 255, need = wanted;
            while (histogram[bin] < need) need -= histogram[bin--];
            prefix = head | (uint32_t)bin << shift;
            wanted = need;
        }
        __syncthreads();
    }
    // Everything above `prefix`, and the first `wanted` of those equal to it, in position order.
    if (bad > 0) atomicAdd(nan, (unsigned long long)bad);
    if (threadIdx.x == 0) above = ties = 0;
    const uint32_t threshold = prefix;
    const int allowed = wanted, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
    for (int base = 0; base < length; base += blockDim.x) {
        const int s = base + threadIdx.x;
        const uint32_t key = s < length ? order(from[s]) : 0;
        const bool better = s < length && key > threshold, equal = s < length && key == threshold;
        const uint32_t betters = __ballot_sync(0xffffffffu, better), equals = __ballot_sync(0xffffffffu, equal);
        if (lane == 0) {
            offsets[warp] = __popc(betters);
            offsets[8 + warp] = __popc(equals);
        }
        __syncthreads();
        int before = above, tied = ties;
        for (int w = 0; w < warp; ++w) {
            before += offsets[w];
            tied += offsets[8 + w];
        }
        const uint32_t lower = (1u << lane) - 1;
        before += __popc(betters & lower);
        tied += __popc(equals & lower);
        // Ties up to here that are taken stand before this entry too.
        if (better || (equal && tied < allowed)) to[before + min(tied, allowed)] = s;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 0; w < 8; ++w) {
                above += offsets[w];
                ties += offsets[8 + w];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) counts[row] = topk;
}

// Positions to slots of this stage. grid = rows, block = 256.
extern "C" __global__ void selection_slots(const int* chosen, const int* sequence, const int* tables, int table_stride,
                                           int block_size, int topk, int* slots) {
    const int row = blockIdx.x;
    const int* table = tables + (long long)max(sequence[row], 0) * table_stride;
    for (int i = threadIdx.x; i < topk; i += blockDim.x) {
        const int position = chosen[(long long)row * topk + i];
        slots[(long long)row * topk + i] = position < 0 ? -1 : table[position / block_size] * block_size + position % block_size;
    }
}

// A selection from the rows of a hand-off: `long_row[row]` is the row's line of `carried`, or -1 for a row that selects
// everything up to its position. grid = rows, block = 256.
extern "C" __global__ void import_selection(const int* carried, const int* long_row, const int* positions, int topk, int* chosen,
                                            int* counts) {
    const int row = blockIdx.x, from = long_row[row], length = from < 0 ? positions[row] + 1 : topk;
    for (int i = threadIdx.x; i < topk; i += blockDim.x) {
        chosen[(long long)row * topk + i] = i >= length ? -1 : from < 0 ? i : carried[(long long)from * topk + i];
    }
    if (threadIdx.x == 0) counts[row] = length;
}

// Lines rows[i] of chosen, for a hand-off. grid = rows, block = 256.
extern "C" __global__ void export_selection(const int* chosen, const int* rows, int topk, int* out) {
    const int* from = chosen + (long long)rows[blockIdx.x] * topk;
    for (int i = threadIdx.x; i < topk; i += blockDim.x) out[(long long)blockIdx.x * topk + i] = from[i];
}
