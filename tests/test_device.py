"""Device, number format and clock, chosen and read without the machines that they are about."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import device
from device import Stopwatch, autocast, check_torch, peak_memory_bytes, pick_device, pick_dtype, synchronize

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


@pytest.fixture
def machine(monkeypatch):
    """A machine with the given devices: machine("cuda")."""

    def build(*names: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in names)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in names)

    return build


@pytest.mark.parametrize("found", ["1.13.1", "2.4.1+cu121", "2.9.0", "2.12.9", "2.12.0a0+git123"])
def test_an_old_torch_is_refused_with_both_versions_PLT_9(found):
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
    monkeypatch.setitem(sys.modules, "resource", None)  # Windows
    assert peak_memory_bytes(CPU) == 0
