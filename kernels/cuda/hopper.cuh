// Instructions of Hopper (sm_90a) that the tuned kernels share: barriers in shared memory, the tensor copy engine (TMA),
// and matrix products of a warpgroup (wgmma).
//
// Shared-memory addresses are the 32-bit ones of `shared_address`. Operand tiles have rows of 128 bytes in the 128-byte
// swizzle: 16-byte piece c of row r lies at piece c ^ (r % 8) of its row (`swizzled`), and a tile starts at a multiple of 1024.
#pragma once

#include <cuda.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Offset of byte `column` (0..127) of row `row` in a swizzled tile.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t column) {
    return row * 128 + (column ^ ((row & 7) << 4));
}

// One lane of a converged warp.
__device__ __forceinline__ bool elect_lane() {
    uint32_t chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}

// ---- barriers ---------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the cluster; a __syncthreads must follow for other threads.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase wait for `bytes` of the copy engine as well.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of parity `parity` is over.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}
// Hardware barrier `id` (1..15; 0 is __syncthreads) of `threads` threads.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Orders this thread's ordinary writes to shared memory before reads by wgmma and the copy engine.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tensor copy engine -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of a tensor to shared memory; `barrier` receives its bytes. Coordinates innermost first.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// `bytes` (a multiple of 16, 16-aligned on both sides) of global memory to shared memory.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
// Asks for `bytes` (a multiple of 16, 16-aligned) to be brought into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// ---- warpgroups -------------------------------------------------------------------------------------------------------------

// All warps of a warpgroup take or give registers; N is a multiple of 8.
template <int N> __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Before the first wgmma that touches registers which other instructions wrote or read.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING committed groups of this warpgroup run.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of accumulators across a wait.
template <int N> __device__ __forceinline__ void wgmma_settle(float (&accumulators)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

// Operand in shared memory, contraction along the 128-byte rows of a swizzled tile at `address`, which may be advanced along
// a row by multiples of 32 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// Accumulators d of D[64][N]: lane l of warp w holds rows 16w + l / 4 (+ 8) and columns 8j + 2 (l % 4) (+ 1):
// d[4j] (row, column), d[4j + 1] (row, column + 1), d[4j + 2] (row + 8, column), d[4j + 3] (row + 8, column + 1).
#define WGMMA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D16(d, i) WGMMA_D4(d, i), WGMMA_D4(d, i + 4), WGMMA_D4(d, i + 8), WGMMA_D4(d, i + 12)
#define WGMMA_D32(d, i) WGMMA_D16(d, i), WGMMA_D16(d, i + 16)
#define WGMMA_D64(d, i) WGMMA_D32(d, i), WGMMA_D32(d, i + 32)
#define WGMMA_D96(d, i) WGMMA_D64(d, i), WGMMA_D32(d, i + 64)
#define WGMMA_D128(d, i) WGMMA_D64(d, i), WGMMA_D64(d, i + 64)
#define WGMMA_R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_R1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_R2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_R3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_R4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_R5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_R6 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_R7 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d = a b^T (+ d where `add`); a has 64 rows, b has N = sizeof(d) / 2 rows.
#define WGMMA(NAME, COUNT, INSTRUCTION, REGISTERS, OUTPUTS, A, B, ADD, TAIL)                                                     \
    __device__ __forceinline__ void NAME(float (&d)[COUNT], uint64_t a, uint64_t b, bool add) {                                 \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\nwgmma.mma_async.sync.aligned." INSTRUCTION " {" REGISTERS     \
                     "}, " A ", " B ", p, 1, 1" TAIL ";\n}"                                                                       \
                     : OUTPUTS                                                                                                   \
                     : "l"(a), "l"(b), "r"(int(add)));                                                                           \
    }
#define WGMMA_SIZES(NAME, K, KINDS, TAIL)                                                                                        \
    WGMMA(NAME, 16, "m64n32" K KINDS, WGMMA_R0, WGMMA_D16(d, 0), "%16", "%17", "%18", TAIL)                                       \
    WGMMA(NAME, 32, "m64n64" K KINDS, WGMMA_R0 WGMMA_R1, WGMMA_D32(d, 0), "%32", "%33", "%34", TAIL)                              \
    WGMMA(NAME, 64, "m64n128" K KINDS, WGMMA_R0 WGMMA_R1 WGMMA_R2 WGMMA_R3, WGMMA_D64(d, 0), "%64", "%65", "%66", TAIL)           \
    WGMMA(NAME, 96, "m64n192" K KINDS, WGMMA_R0 WGMMA_R1 WGMMA_R2 WGMMA_R3 WGMMA_R4 WGMMA_R5, WGMMA_D96(d, 0), "%96", "%97", "%98", TAIL) \
    WGMMA(NAME, 128, "m64n256" K KINDS, WGMMA_R0 WGMMA_R1 WGMMA_R2 WGMMA_R3 WGMMA_R4 WGMMA_R5 WGMMA_R6 WGMMA_R7, WGMMA_D128(d, 0), "%128", "%129", "%130", TAIL)
WGMMA_SIZES(wgmma_e4m3, "k32", ".f32.e4m3.e4m3", "")         // contraction over 32 bytes of a row
WGMMA_SIZES(wgmma_bf16, "k16", ".f32.bf16.bf16", ", 0, 0")  // contraction over 32 bytes of a row
