"""Clocks and tables that the benchmarks share."""

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from device import synchronize


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were taken on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as f:
                name = next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
        except (OSError, StopIteration):
            pass
    return {
        "processor": name,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the device idle before and done after."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def interleaved(
    sides: dict[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Median seconds of each side. The sides take turns, so that what else the machine does hits all alike; a
    first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, work in sides.items():
            spent = seconds(work, device)
            if turn > 0:
                taken[name].append(spent)
    return {name: statistics.median(each) for name, each in taken.items()}


def measure_read_bandwidth(device: torch.device, n_bytes: int = 2**29, repeats: int = 7) -> float:
    """Bytes per second that a sum over memory far larger than any cache reads, the best of `repeats`."""
    block = torch.ones(n_bytes // 4, dtype=torch.float32, device=device)
    block.sum()
    return n_bytes / min(seconds(block.sum, device) for _ in range(repeats))


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """Rows as text: `columns` maps a key to its format, such as ",.1f"; a missing value is a dash."""

    def cell(row: dict[str, Any], key: str, form: str) -> str:
        value = row.get(key)
        return "-" if value is None else format(value, form)

    cells = [[key.replace("_", " ") for key in columns]]
    cells += [[cell(row, key, form) for key, form in columns.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ([text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in cells)
    return "\n".join("  ".join(line) for line in lines)
