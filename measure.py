"""Clocks: how long work takes, and how fast a model generates. Its losses are in evaluation.py."""

import copy
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from device import pick_generation_dtype, synchronize
from generation import decode, prefill
from model import GPT, GPTConfig, KVCache, estimate_n_params, kv_cache_bytes

MOST_PREFILL_TOKENS = 8192  # per measurement; more take minutes on a CPU and tell nothing new


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


def filled_cache(
    config: GPTConfig, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """A cache with `context` random tokens in it and room for one more."""
    cache = KVCache(config, batch, context + 1, dtype, device)
    for store in (cache.k, cache.v):
        for layer in store:  # layer by layer: random numbers of the whole would be twice the memory
            layer.normal_()
    cache.length = context
    return cache


def decode_step(model: GPT, batch: int, context: int, dtype: torch.dtype) -> Callable[[], object]:
    """One decode step of a model at a fixed context, to be called again and again."""
    device = next(model.parameters()).device
    cache = filled_cache(model.config, batch, context, dtype, device)
    last = torch.zeros(batch, dtype=torch.long, device=device)

    def step() -> None:
        cache.length = context
        decode(model, last, cache)

    return step


def measure_prefill(model: GPT, batch: int, context: int, dtype: torch.dtype) -> float | None:
    """Prompt tokens per second, `batch` prompts of `context` tokens in one pass; none for too many."""
    if batch * context > MOST_PREFILL_TOKENS:
        return None
    device = next(model.parameters()).device
    idx = torch.zeros(batch, context, dtype=torch.long, device=device)
    cache = KVCache(model.config, batch, context, dtype, device)

    def work() -> None:
        cache.length = 0
        prefill(model, idx, cache)

    return batch * context / interleaved({"prefill": work}, 3, device)["prefill"]


@torch.inference_mode()
def measure_generation(
    model: GPT, batches: tuple[int, ...] = (1, 8, 32), budget: float = 1.0
) -> list[dict[str, Any]]:
    """How fast a model in eval mode generates, in its own dtype: a row per batch and context.

    Contexts: a quarter, a half and all of block_size, less the token that is added. A row has "batch",
    "context", "prefill_tokens_per_sec", "decode_tokens_per_sec" (all rows of the batch together; medians over
    `budget` seconds for each batch or 5 rounds, the device synchronised, after rounds that aren't counted)
    and "kv_cache_bytes", read off the tensors of a cache that holds exactly `context` tokens.
    """
    config, device, dtype = model.config, next(model.parameters()).device, model.dtype
    full = config.block_size - 1
    contexts = sorted({full // 4, full // 2, full} - {0})
    rows = []
    for batch in batches:
        steps = {str(context): decode_step(model, batch, context, dtype) for context in contexts}
        trial = sum(interleaved(steps, 2, device).values()) or budget
        taken = interleaved(steps, min(500, max(5, round(budget / trial))), device) if steps else {}
        for context in contexts:
            rows.append({
                "batch": batch, "context": context,
                "prefill_tokens_per_sec": measure_prefill(model, batch, context, dtype),
                "decode_tokens_per_sec": batch / taken[str(context)],
                "kv_cache_bytes": KVCache(config, batch, context, dtype, device).nbytes,
            })  # fmt: skip
    return rows


def measure_decode(network: GPT, device: torch.device) -> dict[str, Any]:
    """How fast the trained model generates, as sample.py would run it: "decode" has a row per batch and
    context; the single figures are of the largest."""
    dtype = pick_generation_dtype("auto", device, estimate_n_params(network.config)["total"])
    rows = measure_generation(copy.deepcopy(network).to(dtype).eval())
    context = network.config.block_size
    return {
        **{key: rows[-1][key] for key in ("decode_tokens_per_sec", "prefill_tokens_per_sec") if rows},
        "decode_dtype": str(dtype).removeprefix("torch."),
        "kv_cache_bytes_measured": KVCache(network.config, 1, context, dtype).nbytes,
        "kv_cache_bytes_formula": kv_cache_bytes(network.config, context, dtype),
        "decode": rows,
    }


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
