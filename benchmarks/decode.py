"""Generation speed against the limit that memory sets, by attention kind: python -m benchmarks.decode

One run measures all sides in turns, so that their ratios hold on a busy machine. The limit of a step is the
bytes it must read (every weight once, and each row's keys and values) over the measured read bandwidth.
Weights are random: speed doesn't depend on them. Beside ours: Hugging Face transformers on the same shape
and number format, GPT-2 for MHA and Llama for GQA and MQA, if it is installed. Prefill is never in a decode
figure.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

import config as configuration
from device import DTYPES, check_torch, pick_device, pick_dtype
from generation import prefill
from measure import (
    decode_step,
    interleaved,
    machine,
    measure_prefill,
    measure_read_bandwidth,
    table,
)
from model import GPT, GPTConfig, estimate_decode_bytes_per_token, kv_cache_bytes, matmul_params
from quantize import quantize_weights

COLUMNS = {
    "attention": "", "n_kv_head": "d", "batch": "d", "context": "d", "weights": "",
    "prefill_tokens_per_sec": ",.0f", "decode_tokens_per_sec": ",.1f", "step_ms": ".2f",
    "limit_step_ms": ".2f", "fraction_of_limit": ".2f",
    "hf_decode_tokens_per_sec": ",.1f", "kv_cache_bytes": ",d",
}  # fmt: skip


@dataclass
class DecodeConfig:
    """One run of the benchmark."""

    small: bool = False  # a small shape and few points, for a check in seconds
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of weights and cache
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes cuda, then mps, then cpu
    repeats: int = 5  # rounds, of which the median counts
    hf: bool = True  # measure transformers too, where it is installed
    int8: bool = True  # measure int8 weights too, at batch 1
    uncached: bool = True  # measure 512 new tokens without a cache too
    plot: str | None = None  # write tokens/s against context to this PNG file

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}: must be at least 1")


def hf_model(config: GPTConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of transformers with the same width, depth and KV heads, random weights."""
    import transformers

    shape = {"vocab_size": config.vocab_size, "use_cache": True, "attn_implementation": "sdpa"}
    shape |= {"bos_token_id": None, "eos_token_id": None}
    if config.attention == "mha":
        hf = transformers.GPT2Config(
            n_positions=config.block_size,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            **shape,
        )
    else:  # a gated feed-forward has three matrices: two thirds of the width make the same number of weights
        hf = transformers.LlamaConfig(
            hidden_size=config.n_embd,
            intermediate_size=8 * config.n_embd // 3,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            max_position_embeddings=config.block_size,
            tie_word_embeddings=True,
            **shape,
        )
    return transformers.AutoModelForCausalLM.from_config(hf, dtype=dtype).to(device).eval()


def hf_step(
    model: Any, config: GPTConfig, batch: int, context: int, dtype: torch.dtype
) -> Callable[[], object]:
    """One decode step of transformers at a fixed context; its own growing cache is cut back before each."""
    import transformers

    device = next(model.parameters()).device
    cache = transformers.DynamicCache(config=model.config)
    for layer in range(config.n_layer):
        k, v = torch.randn(2, batch, config.n_kv_head, context, config.head_dim, device=device).to(dtype)
        cache.update(k, v, layer)
    last = torch.zeros(batch, 1, dtype=torch.long, device=device)

    def step() -> None:
        if cache.get_seq_length() > context:
            cache.crop(context - cache.get_seq_length())
        model(input_ids=last, past_key_values=cache, use_cache=True)

    return step


def measure_kind(
    c: DecodeConfig,
    config: GPTConfig,
    points: list[tuple[int, int]],
    bandwidth: float,
    device: torch.device,
    bar: tqdm,
) -> list[dict[str, Any]]:
    """Rows of the table for one attention kind; `points` are pairs of batch and context."""
    dtype = DTYPES[c.dtype]
    model = GPT(config, torch.Generator().manual_seed(0)).to(device, dtype).eval()
    hf = None
    if c.hf:
        with suppress(ImportError):
            hf = hf_model(config, dtype, device)
    rows = []
    for batch, context in points:
        sides = {"ours": decode_step(model, batch, context, dtype)}
        if hf is not None:
            sides["hf"] = hf_step(hf, config, batch, context, dtype)
        taken = interleaved(sides, c.repeats * (3 if batch == 1 else 1), device)
        prefill_rate = measure_prefill(model, batch, context, dtype)
        limit = estimate_decode_bytes_per_token(config, context, batch, dtype) / bandwidth
        rows.append({
            "attention": config.attention, "n_kv_head": config.n_kv_head, "batch": batch, "context": context,
            "dtype": c.dtype, "weights": c.dtype, "prefill_tokens_per_sec": prefill_rate,
            "decode_tokens_per_sec": batch / taken["ours"], "step_ms": 1e3 * taken["ours"],
            "limit_step_ms": 1e3 * limit, "fraction_of_limit": limit / taken["ours"],
            "hf_decode_tokens_per_sec": batch / taken["hf"] if "hf" in taken else None,
            "kv_cache_bytes": kv_cache_bytes(config, context, dtype, batch),
        })  # fmt: skip
        bar.update()
    if c.int8 and c.dtype == "bfloat16":
        context = points[0][1]
        quantize_weights(model)
        taken = interleaved({"int8": decode_step(model, 1, context, dtype)}, 3 * c.repeats, device)
        limit = (matmul_params(config) + kv_cache_bytes(config, context, dtype)) / bandwidth
        rows.append({
            **rows[0], "weights": "int8", "prefill_tokens_per_sec": None,
            "decode_tokens_per_sec": 1 / taken["int8"], "step_ms": 1e3 * taken["int8"],
            "limit_step_ms": 1e3 * limit, "fraction_of_limit": limit / taken["int8"],
        })  # fmt: skip
    return rows


def cached_over_uncached(config: GPTConfig, n_new: int, dtype: torch.dtype, device: torch.device) -> float:
    """How many times longer `n_new` tokens take without a cache, one row, from a prompt of one token.

    Both sides are the sum over the lengths 1 .. n_new, from 9 lengths measured and straight lines between
    them.
    """
    model = GPT(config, torch.Generator().manual_seed(0)).to(device, dtype).eval()
    lengths = sorted({1, *(n_new * i // 8 for i in range(1, 9))})
    total = {"cached": 0.0, "uncached": 0.0}
    before: dict[str, float] = {}
    for at, length in enumerate(lengths):
        idx = torch.zeros(1, length, dtype=torch.long, device=device)
        sides = {
            "cached": decode_step(model, 1, length, dtype),
            "uncached": lambda idx=idx: prefill(model, idx, None),
        }
        taken = interleaved(sides, 3, device)
        for side in total if at else ():
            total[side] += (taken[side] + before[side]) / 2 * (length - lengths[at - 1])
        before = taken
    return total["uncached"] / total["cached"]


def check_plot(path: Path) -> None:
    """Refuse a plot that can't be written before minutes of measuring, not after (ValueError)."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot={path} needs matplotlib: pip install matplotlib")
    if not path.parent.is_dir():
        raise ValueError(f"--plot={path}: there is no folder {path.parent}")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second against context for the largest batch with several contexts, the limit dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batch = max(row["batch"] for row in rows)
    fig, ax = plt.subplots(figsize=(7, 4.5))
    for kind, color in (("mha", "C0"), ("gqa", "C1"), ("mqa", "C2")):
        mine = [r for r in rows if r["attention"] == kind and r["batch"] == batch and r["weights"] != "int8"]
        context = [r["context"] for r in mine]
        label = f"{kind}, {mine[0]['n_kv_head']} KV heads"
        ax.plot(context, [r["decode_tokens_per_sec"] for r in mine], color + "o-", label=label)
        ax.plot(context, [1e3 * batch / r["limit_step_ms"] for r in mine], color + "--", alpha=0.5)
        theirs = [
            (r["context"], r["hf_decode_tokens_per_sec"]) for r in mine if r["hf_decode_tokens_per_sec"]
        ]
        if theirs:
            ax.plot(*zip(*theirs, strict=True), color + "x:", alpha=0.7, label=f"{kind}, transformers")
    ax.set(
        xlabel="tokens in the cache",
        ylabel="tokens/s",
        title=f"Decoding {batch} rows (dashed: memory's limit)",
    )
    ax.set_ylim(bottom=0)
    ax.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)


@torch.inference_mode()
def main(argv: list[str]) -> dict[str, Any]:
    """Measure, print the table, and one JSON object on the last line of standard output."""
    c = configuration.parse(
        argv, DecodeConfig, prog="benchmarks.decode", description="Generation speed by attention kind."
    ).config
    check_torch()
    device = pick_device(c.device)
    pick_dtype(c.dtype, device)  # refuses one that the device has no kernels for
    if c.plot:
        check_plot(Path(c.plot))
    shape: dict[str, Any] = {
        "vocab_size": 50304,
        "block_size": 1280,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "norm": "pre",
    }
    points = [(1, 128), (1, 1024), (8, 128), (8, 1024), (32, 128), (32, 512), (32, 1024)]
    if c.small:
        shape |= {"vocab_size": 1024, "block_size": 256, "n_layer": 2, "n_head": 4, "n_embd": 64}
        points = [(1, 32), (2, 32), (2, 128)]
    bandwidth = measure_read_bandwidth(device, 2**26 if c.small else 2**29)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {c.dtype}", file=sys.stderr)
    rows = []
    with tqdm(total=3 * len(points), unit="point") as bar:
        for attention in ("mha", "gqa", "mqa"):
            rows += measure_kind(c, GPTConfig(**shape, attention=attention), points, bandwidth, device, bar)
    result = {
        "machine": machine(device), "read_bandwidth_gb_per_s": bandwidth / 1e9, "rows": rows,
        "cached_over_uncached": None,
    }  # fmt: skip
    if c.uncached:
        n_new = 64 if c.small else 512
        result["cached_over_uncached"] = cached_over_uncached(
            GPTConfig(**shape), n_new, DTYPES[c.dtype], device
        )
    print(table(rows, COLUMNS))
    if result["cached_over_uncached"]:
        print(f"{n_new} new tokens without a cache take {result['cached_over_uncached']:.1f} times as long")
    print(json.dumps(result), flush=True)
    if c.plot:
        plot(rows, Path(c.plot))
    return result


if __name__ == "__main__":
    configuration.run_main(main, "benchmarks.decode")
