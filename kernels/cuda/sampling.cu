// Greedy choice with its log-probability: the most likely token (ties: the lower id) of each row of float32 logits.
//
// best int32 [rows], logprob float32 [rows]. grid = rows, block = 1024. The sum of exponentials is kept in float64: a
// vocabulary of 150,000 small terms is not lost beside a large one. A row without a number among its logits chooses 0.
#include "plain.cuh"

extern "C" __global__ void greedy(const float* logits, int vocab, int* best, float* logprob) {
    __shared__ float values[WARP];
    __shared__ int places[WARP];
    __shared__ double parts[WARP];
    const float* row = logits + (long long)blockIdx.x * vocab;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    float top = -INFINITY;
    int at = vocab;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        if (row[i] > top) {
            top = row[i];
            at = i;
        }
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, top, step);
        const int where = __shfl_xor_sync(0xffffffffu, at, step);
        if (other > top || (other == top && where < at)) {
            top = other;
            at = where;
        }
    }
    if (lane == 0) {
        values[warp] = top;
        places[warp] = at;
    }
    __syncthreads();
    for (int w = 0; w < warps; ++w) {
        if (values[w] > top || (values[w] == top && places[w] < at)) {
            top = values[w];
            at = places[w];
        }
    }
    double sum = 0.0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) sum += exp((double)row[i] - (double)top);
    for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) parts[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (int w = 0; w < warps; ++w) total += parts[w];
        best[blockIdx.x] = at < vocab ? at : 0;
        logprob[blockIdx.x] = (float)-log(total);
    }
}
