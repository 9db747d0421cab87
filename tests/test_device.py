"""Device, number format and clock, chosen and read without the machines that they are about."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import device
from device import (
    BF16_WIDTH,
    Stopwatch,
    autocast,
    check_torch,
    compile_pays,
    cpu_has_bfloat16,
    is_out_of_memory,
    peak_flops,
    peak_memory_bytes,
    pick_device,
    pick_dtype,
    synchronize,
    to_device,
)

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture
def machine(monkeypatch):
    """A machine with the given devices: machine("cuda")."""

    def build(*names: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in names)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in names)

    return build


@pytest.mark.parametrize("found", ["1.13.1", "2.4.1+cu121", "2.9.0", "2.12.9", "2.12.0a0+git123"])
def test_an_old_torch_is_refused_with_both_versions_PLT_9_ATT_9(found):
    with pytest.raises(ValueError, match=r"too old: 2\.13 or newer is needed") as error:
        check_torch(found)
    assert found in str(error.value) and "pip install" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("found", ["2.13.0", "2.13.0+cpu", "2.13rc1", "2.14.0.dev20260101", "3.0", None])
def test_a_torch_that_is_new_enough_passes_PLT_9(found):
    check_torch(found)


def test_the_version_in_use_is_looked_at_PLT_9(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(ValueError, match=r"2\.5\.1"):
        check_torch()


@pytest.mark.parametrize(("has", "want", "expected"), [
    ((), "auto", "cpu"),
    (("mps",), "auto", "mps"),
    (("cuda",), "auto", "cuda"),
    (("cuda", "mps"), "auto", "cuda"),
    (("cuda",), "cpu", "cpu"),
    (("cuda", "mps"), "mps", "mps"),
    ((), "cuda", None),
    (("cuda",), "mps", None)])
def test_pick_device(has, want, expected, machine):
    machine(*has)
    if expected:
        assert pick_device(want) == torch.device(expected)
    else:
        with pytest.raises(ValueError, match=f"--device={want}: .*--device=auto or cpu"):
            pick_device(want)


def test_cpu_asks_nothing_of_cuda_CFG_12(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a CUDA call")

    for name, value in vars(torch.cuda).items():
        if callable(value) and not isinstance(value, type) and name != "is_available":
            monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pick_device("auto")
        assert found == CPU and pick_dtype("auto", found) == torch.float32
        synchronize(found)
        assert peak_memory_bytes(found) > 0
        with autocast(found, torch.float32):
            pass
        clock = Stopwatch(found)
        clock.start()
        assert clock.pause() > 0
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize(("want", "where", "has_bf16", "expected"), [
    ("auto", CPU, None, torch.float32),
    ("auto", MPS, None, torch.float32),
    ("auto", CUDA, True, torch.bfloat16),
    ("auto", CUDA, False, torch.float16),
    ("float32", CUDA, True, torch.float32),
    ("bfloat16", CPU, None, torch.bfloat16),
    ("float16", CUDA, True, torch.float16)])
def test_the_number_format_follows_the_device_TRN_5_PRF_9_CFG_8(want, where, has_bf16, expected, monkeypatch):
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        assert has_bf16 is not None, "asked CUDA for another device"
        return has_bf16 or including_emulation  # PyTorch says yes to what it only emulates

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert pick_dtype(want, where) == expected


@pytest.mark.parametrize(("capabilities", "has"), [
    ({"avx512_bf16": True}, True),
    ({"amx_bf16": True, "avx512_bf16": False}, True),
    ({"avx512_bf16": False, "amx_bf16": False, "avx2": True, "avx512": True, "amx_tile": True}, False),
    ({"architecture": "aarch64", "sve": True}, False),
    ({}, False)])
def test_bfloat16_on_a_cpu_needs_a_wide_model_and_a_fit_processor_PRF_9(capabilities, has, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert cpu_has_bfloat16() is has
    fast = torch.bfloat16 if has else torch.float32
    assert pick_dtype("auto", CPU) == pick_dtype("auto", CPU, BF16_WIDTH - 1) == torch.float32
    assert pick_dtype("auto", CPU, BF16_WIDTH) == pick_dtype("auto", CPU, 4096) == fast
    assert pick_dtype("auto", MPS, 4096) == torch.float32  # the processor is not what computes there
    assert pick_dtype("float32", CPU, 4096) == torch.float32
    assert pick_dtype("bfloat16", CPU, 8) == torch.bfloat16  # on request anywhere


def test_float16_on_a_cpu_is_refused_TRN_4():
    with pytest.raises(ValueError, match="--dtype=float16 needs a GPU: on --device=cpu use float32"):
        pick_dtype("float16", CPU)


def test_autocast_changes_products_and_nothing_for_float32():
    a = torch.ones(2, 2)
    with autocast(CPU, torch.float32):
        assert (a @ a).dtype == torch.float32
    with autocast(CPU, torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16 and a.sum().dtype == torch.float32
    assert (a @ a).dtype == torch.float32


def test_synchronize_waits_for_the_device_it_is_given_PRF_2(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda which: calls.append(which))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append(MPS))
    for where in (CPU, CUDA, MPS):
        synchronize(where)
    assert calls == [CUDA, MPS]


def test_the_stopwatch_synchronises_before_each_reading_and_skips_pauses_PRF_2_PRF_4(monkeypatch):
    events, now = [], [0.0]

    def perf_counter() -> float:
        events.append("clock")
        return now[0]

    monkeypatch.setattr(device, "synchronize", lambda where: events.append(f"sync {where}"))
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=perf_counter))
    clock = Stopwatch(CUDA)
    assert clock.pause() == 0.0 and not events  # not started: nothing to stop
    for work, pause in ((3.0, 100.0), (4.0, 50.0)):
        clock.start()
        now[0] += work / 2
        clock.start()  # runs already: counts on
        now[0] += work / 2
        clock.pause()
        now[0] += pause
    assert clock.pause() == clock.seconds == 7.0
    assert events == ["sync cuda", "clock"] * 4


def test_peak_memory_is_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda where: 123)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 456)
    assert peak_memory_bytes(CUDA) == 123 and peak_memory_bytes(MPS) == 456
    here = peak_memory_bytes(CPU)
    assert 50 * 2**20 < here < 2**40  # PyTorch alone is more than 50 MiB
    # without /proc (macOS) getrusage, which may count a larger parent's; without both (Windows) 0
    monkeypatch.setattr(device, "open", lambda *args, **kwargs: (_ for _ in ()).throw(OSError), raising=False)
    assert peak_memory_bytes(CPU) >= 0.9 * here
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_memory_bytes(CPU) == 0


def test_peak_memory_is_not_that_of_the_parent():
    """A program started by a larger one has a peak of its own (Linux)."""
    if not sys.platform.startswith("linux"):
        pytest.skip("getrusage is all there is")
    held = torch.ones(2**27)  # 512 MiB
    code = "import torch, device; print(device.peak_memory_bytes(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert held.nbytes > int(done.stdout) > 50 * 2**20


# --- peak, memory that runs out, copies


@pytest.fixture
def gpu(monkeypatch):
    """gpu("NVIDIA L4"): a GPU of that name, with its matrix products on the CPU."""

    def build(name: str) -> list[torch.device]:
        ones, resets = torch.ones, []
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: name)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
        monkeypatch.setattr(device, "synchronize", lambda where: None)
        monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: ones(2, 2, dtype=dtype))
        return resets

    return build


@pytest.mark.parametrize(("name", "tflops", "known"), [
    ("NVIDIA H200", 989, "H200"),
    ("NVIDIA H100 80GB HBM3", 989, "H100"),
    ("NVIDIA H100 PCIe", 756, "H100 PCIe"),
    ("NVIDIA A100-SXM4-40GB", 312, "A100"),
    ("NVIDIA L40S", 362, "L40S"),
    ("NVIDIA L4", 121, "L4"),
    ("NVIDIA GeForce RTX 4090", 165, "RTX 4090"),
    ("Tesla V100-SXM2-16GB", 125, "V100"),
    ("Tesla T4", 65, "T4")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_known_gpu_has_the_peak_of_its_data_sheet_PRF_5(gpu, name, tflops, known, dtype):
    gpu(name)
    assert peak_flops(CUDA, dtype) == (tflops * 1e12, f"data sheet of {known}")


@pytest.mark.parametrize("name", [
    "NVIDIA RTX A1000", "NVIDIA L40", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA B300"])
def test_an_unknown_gpu_is_measured_and_says_so_PRF_5(gpu, name):
    resets = gpu(name)  # the names of known ones are in some of these
    flops, source = peak_flops(CUDA, torch.bfloat16)
    assert source == "measured matrix product" and flops > 0
    assert resets == [CUDA]  # the matrices of the measurement are not the run's peak memory


def test_the_data_sheets_speak_of_16_bits_alone_PRF_5(gpu):
    gpu("NVIDIA H100")
    assert peak_flops(CUDA, torch.float32)[1] == "measured matrix product"


def test_a_measured_peak_is_the_best_of_several_products_PRF_5(monkeypatch):
    seconds = iter([9.0, 2.0, 4.0, 0.5, 1.0])
    now = [0.0, False]

    def perf_counter() -> float:
        now[0] += next(seconds) if now[1] else 100.0  # between two products nothing counts
        now[1] = not now[1]
        return now[0]

    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=perf_counter))
    assert peak_flops(CPU, torch.float32) == (2 * 1024**3 / 0.5, "measured matrix product")


def test_the_measured_peak_of_this_machine_is_plausible_PRF_5():
    flops, source = peak_flops(CPU, torch.float32)
    assert source == "measured matrix product" and 1e9 < flops < 1e14


@pytest.mark.parametrize(("error", "expected"), [
    (MemoryError(), True),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
    (RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"), True),
    (RuntimeError("CUDA error: out of memory"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), True),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    (ValueError("step 3: loss is not finite"), False)],
    ids=["python", "cuda", "mps", "driver", "linux", "windows", "access", "value"])
def test_out_of_memory_is_told_from_other_errors_TRN_14(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_allocators_own_error_is_out_of_memory_TRN_14():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def test_a_batch_waits_for_no_copy_where_the_device_can_copy_meanwhile():
    calls = []

    class Batch:
        def pin_memory(self):
            calls.append("pinned")
            return self

        def to(self, where, non_blocking=False):
            calls.append((where, non_blocking))
            return self

    for where in (CPU, MPS, CUDA):
        to_device(Batch(), where)
    assert calls == [(CPU, False), (MPS, False), "pinned", (CUDA, True)]
    x = torch.arange(6)
    assert to_device(x, CPU) is x  # no copy at all


def test_compile_is_tried_unasked_on_cuda_alone_PLT_1():
    assert [compile_pays(where) for where in (CPU, MPS, CUDA)] == [False, False, True]
