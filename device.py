"""What the machine can do: device, number format, clock, memory. Decided after all options are read."""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

MIN_TORCH = (2, 13)  # torch.nn.functional.linear_cross_entropy arrived here; Muon in 2.9
BF16_WIDTH = 256  # n_embd from which bfloat16 products save time in training on a CPU
LARGE_MODEL_BYTES = 64 * 2**20  # of weights in float32; from here on generation on a CPU takes bfloat16
PEAK_TFLOPS = {  # dense products in 16 bits
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "L40S": 362, "L4": 121,
    "RTX 4090": 165, "V100": 125, "T4": 65,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_torch(version: str | None = None) -> None:
    """Refuse a PyTorch that is too old (ValueError), with the version found and the one needed."""
    found = version or torch.__version__
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < MIN_TORCH:  # 2.13.0+cpu, 2.13rc1
        needed = ".".join(map(str, MIN_TORCH))
        raise ValueError(
            f"PyTorch {found} is too old: {needed} or newer is needed; pip install -r requirements.txt"
        )


def pick_device(want: str) -> torch.device:
    """The device for "auto" (the first of cuda, mps, cpu), "cpu", "cuda" or "mps". ValueError if absent."""
    has: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    if want == "auto":
        return torch.device(next(name for name, available in has.items() if available()))
    if not has[want]():
        raise ValueError(f"--device={want}: PyTorch finds no such device here; use --device=auto or cpu")
    return torch.device(want)


def pick_dtype(want: str, device: torch.device, width: int = 0) -> torch.dtype:
    """The number format for matrix products: "auto", "float32", "bfloat16" or "float16".

    auto: on cuda bfloat16, or float16 where the GPU lacks it; on a CPU that multiplies bfloat16 itself,
    bfloat16 for a `width` of BF16_WIDTH and more (below, what it saves goes into conversions); else float32,
    since most processors emulate it, several times slower. Errors: ValueError for float16 on a CPU, which
    has no fast kernels for it.
    """
    if want == "float16" and device.type == "cpu":
        raise ValueError(
            "--dtype=float16 needs a GPU: on --device=cpu use float32, or bfloat16 if the processor has it"
        )
    if want != "auto":
        return DTYPES[want]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if device.type == "cpu" and width >= BF16_WIDTH and cpu_has_bfloat16():
        return torch.bfloat16
    return torch.float32


def pick_generation_dtype(want: str, device: torch.device, n_params: int) -> torch.dtype:
    """Number format of weights and cache for generation: `pick_dtype`, but on a CPU "auto" takes bfloat16 for
    large models only. A model that fits into the processor's cache doesn't wait for memory."""
    large = 4 * n_params > LARGE_MODEL_BYTES
    if want == "auto" and device.type == "cpu" and large and cpu_has_bfloat16():
        return torch.bfloat16
    return pick_dtype(want, device)


def compile_pays(device: torch.device) -> bool:
    """Whether torch.compile is tried unasked: it takes a minute, and a compiler, to save time later."""
    return device.type == "cuda"


def cpu_has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself (AVX512-BF16 or AMX), as PyTorch sees it."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; PyTorch's on a CPU is a plain RuntimeError."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or re.search("out of memory|tried to allocate|not enough memory", str(error)) is not None


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A batch on the device, without waiting for the copy where the device can copy while it computes."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Matrix products in `dtype`, weights and reductions in float32; nothing to do for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


@contextmanager
def matrix_vector_products(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """For products with a single row: the fastest way that this device has to read a matrix once.

    In bfloat16 on a CPU, oneDNN's matrix product takes twice as long for one row as PyTorch's own
    matrix-vector product (11 against 25 GB/s for 2,304 x 768), and is the quicker one from two rows on.
    """
    switch = device.type == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.enabled
    if switch:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        if switch:
            torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOPs per second that the device can do in matrix products, and where the number is from.

    From the data sheet for GPUs in PEAK_TFLOPS, else the best of a few square products, measured.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for known, tflops in PEAK_TFLOPS.items():
            if re.search(rf"\b{known}\b(?! Laptop)", name):  # an RTX A1000 is no A100, an L40 no L4
                return tflops * 1e12, f"data sheet of {known}"
    n = 1024 if device.type == "cpu" else 8192
    a = torch.ones(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(5):
        watch = Stopwatch(device)
        watch.start()
        a @ a
        best = min(best, watch.pause())
    del a
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # these matrices are not the run's
    return 2 * n**3 / max(best, 1e-9), "measured matrix product"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock read next tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes held so far: by tensors on a GPU, by the whole process on a CPU (0 where unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:  # Linux: getrusage would count what the parent held before this program was started
        with open("/proc/self/status", encoding="utf-8") as f:
            return next(1024 * int(line.split()[1]) for line in f if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    try:
        import resource  # absent on Windows
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Stopwatch:
    """Seconds of work on a device; paused, so that evaluation and saving don't count as training."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self.device, self.seconds = device, seconds
        self._since: float | None = None

    @property
    def running(self) -> bool:
        """Whether it counts now."""
        return self._since is not None

    def start(self) -> None:
        """Begin or go on, unless it runs already; what the device was given before does not count."""
        if self._since is not None:
            return
        synchronize(self.device)
        self._since = time.perf_counter()

    def pause(self) -> float:
        """Stop once the device is done; the seconds counted so far."""
        if self._since is not None:
            synchronize(self.device)
            self.seconds += time.perf_counter() - self._since
            self._since = None
        return self.seconds
