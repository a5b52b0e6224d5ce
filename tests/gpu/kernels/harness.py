"""Loads a cubin, launches its kernels on torch tensors, and times them.

A kernel's own check and benchmark is `tests/gpu/kernels/<name>.py`; it builds its inputs with torch, compares with a
torch reference, prints one table, and exits 1 when a bound is exceeded.
"""

import ctypes
import faulthandler
import fcntl
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

CUDA = Path(__file__).resolve().parents[3] / "kernels" / "cuda"
_driver = ctypes.CDLL("libcuda.so.1")


def check(code, what):
    if code:
        text = ctypes.c_char_p()
        _driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {text.value.decode() if text.value else code}")


_turn = None


def take_turn():
    """Waits until no other check uses the GPU: checks may be started together, so that their imports overlap. The turn ends with
    the process, at the latest after $BATON_GPU_TURN seconds. Does nothing unless $BATON_GPU_LOCK names a file."""
    global _turn
    path = os.environ.get("BATON_GPU_LOCK")
    if path and _turn is None:
        _turn = open(path, "w")
        fcntl.flock(_turn, fcntl.LOCK_EX)
        if limit := os.environ.get("BATON_GPU_TURN"):
            faulthandler.dump_traceback_later(float(limit), exit=True)


class Module:
    """One .cu file, compiled if no cubin of it lies in $BATON_CUBINS."""

    def __init__(self, name):
        take_turn()
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        built = Path(os.environ.get("BATON_CUBINS", "/nonexistent")) / f"{name}.cubin"
        if not built.exists():
            built = Path("/tmp") / f"{name}.cubin"
            nvcc = os.environ.get("NVCC", "nvcc")
            command = [nvcc, "-gencode", "arch=compute_90a,code=sm_90a", "-cubin", "-O3", "-std=c++17", "-lineinfo"]
            subprocess.run([*command, "-o", built, CUDA / f"{name}.cu"], check=True)
        self.handle = ctypes.c_void_p()
        check(_driver.cuModuleLoadData(ctypes.byref(self.handle), built.read_bytes()), f"load {built}")

    def kernel(self, symbol, shared=0):
        function = ctypes.c_void_p()
        check(_driver.cuModuleGetFunction(ctypes.byref(function), self.handle, symbol.encode()), symbol)
        if shared > 48 * 1024:
            check(_driver.cuFuncSetAttribute(function, 8, shared), f"{symbol}: {shared} bytes of shared memory")

        def launch(grid, block, *args):
            """args: torch tensors (pointers), int (int32), float (float32), ctypes values, bytes (by value, 64-aligned)."""
            values = []
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    values.append(ctypes.c_void_p(arg.data_ptr()))
                elif isinstance(arg, bool):
                    values.append(ctypes.c_int(arg))
                elif isinstance(arg, int):
                    values.append(ctypes.c_int(arg))
                elif isinstance(arg, float):
                    values.append(ctypes.c_float(arg))
                elif arg is None:
                    values.append(ctypes.c_void_p(0))
                else:
                    values.append(arg)
            pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
            grid, block = [(*x, 1, 1)[:3] if isinstance(x, tuple) else (x, 1, 1) for x in (grid, block)]
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            check(_driver.cuLaunchKernel(function, *grid, *block, shared, stream, pointers, None), symbol)

        return launch


def tensor_map(tensor, dims, strides, box, swizzle=128):
    """A CUtensorMap over `tensor`; dims and box innermost first, strides in bytes of the dims after the first."""
    kinds = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.bfloat16: 9, torch.float16: 6, torch.float32: 7, torch.int32: 4}
    raw = ctypes.create_string_buffer(128 + 64)
    start = (ctypes.addressof(raw) + 63) // 64 * 64
    n = len(dims)
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    check(
        _driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(start), kinds[tensor.dtype], n, ctypes.c_void_p(tensor.data_ptr()), (u64 * n)(*dims),
            (u64 * max(n - 1, 1))(*strides), (u32 * n)(*box), (u32 * n)(*[1] * n), 0,
            {0: 0, 32: 1, 64: 2, 128: 3}[swizzle], 2, 0,
        ),
        "cuTensorMapEncodeTiled",
    )
    value = (ctypes.c_char * 128).from_address(start)
    value._keep = raw
    return value


_flush = None


def time_us(call, repeats=20, flush=True):
    """Median of `repeats` runs by CUDA events, the L2 cache overwritten before each."""
    global _flush
    if _flush is None:
        _flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        if flush:
            _flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def relative(found, expected):
    """Largest relative error in the Frobenius sense: |found - expected| / |expected|."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()


class Table:
    """Rows of a check: prints them and remembers whether one failed."""

    def __init__(self):
        self.failed = False

    def row(self, name, error=None, bound=None, us=None, floor_us=None, peer_us=None):
        ok = error is None or error <= bound
        self.failed |= not ok
        text = f"{name:<56}"
        if error is not None:
            text += f" error {error:.2e} (bound {bound:.0e}) {'ok' if ok else 'FAILED'}"
        if us is not None:
            text += f" {us:9.1f} us"
        if floor_us is not None and us is not None:
            text += f" floor {floor_us:8.1f} ({us / floor_us:.2f}x)"
        if peer_us is not None and us is not None:
            text += f" peer {peer_us:8.1f} ({us / peer_us:.2f}x)"
        print(text, flush=True)

    def done(self):
        sys.exit(1 if self.failed else 0)
