"""What a run tells people, from the numbers it also writes as JSON."""

from pathlib import Path
from typing import Any

from data.loader import TokenFile
from data.prepare import Prepared
from model import GPTConfig, as_mha, estimate_n_params, kv_cache_bytes
from options import TrainConfig


def lines(rows: dict[str, str]) -> str:
    """A label and a text per line."""
    return "\n".join(f"{label:10} {text}" for label, text in rows.items())


def mebibytes(n: float) -> str:
    """A number of bytes, for people."""
    return f"{n / 2**20:,.2f} MiB" if n >= 2**20 else f"{n / 2**10:,.1f} KiB"


def describe_model(m: GPTConfig) -> dict[str, str]:
    """The model's size, its heads, and what its keys and values will take beside MHA's."""
    n = estimate_n_params(m)
    cache, mha = (kv_cache_bytes(shape, m.block_size) for shape in (m, as_mha(m)))
    return {
        "model": f"{n['total']:,} parameters: attention {n['attention']:,}, feed-forward "
        f"{n['feed_forward']:,}, embedding {n['embedding']:,}",
        "": f"{m.n_layer} {m.norm}-norm blocks, width {m.n_embd}, {m.position} positions, "
        f"context {m.block_size} tokens",
        "attention": f"{m.attention}: {m.n_head} query heads of {m.head_dim} on {m.n_kv_head} KV heads",
        "KV cache": f"{kv_cache_bytes(m, 1):,} bytes per token, {mebibytes(cache)} at full context in "
        f"float32; mha would need {mebibytes(mha)}, {mha / cache:.1f}x",
    }


def training_plan(
    c: TrainConfig, prepared: Prepared, train_tokens: TokenFile, val_tokens: TokenFile, machine: str,
    folder: Path
) -> str:
    """What a run is going to do, said before it does it."""
    seen = c.max_iters * c.tokens_per_step
    micro = c.micro_batch_size or c.batch_size
    return lines({
        "data": f"{prepared.meta['source']}: {train_tokens.n_tokens:,} tokens to learn from, "
        f"{val_tokens.n_tokens:,} held back, in {prepared.folder}",
        "tokenizer": f"{prepared.tokenizer.kind}, {prepared.tokenizer.vocab_size:,} ids, "
        f"{train_tokens.header['n_bytes'] / train_tokens.n_tokens:.2f} bytes per token",
        **describe_model(c.model),
        "step": f"{c.tokens_per_step:,} tokens = {micro} sequences x {c.batch_size // micro} "
        f"micro-batches x {c.model.block_size} tokens; {c.optimizer}",
        "run": f"{c.max_iters:,} steps, {seen:,} tokens, {seen / train_tokens.n_tokens:.1f} times through "
        "the data",
        "machine": machine,
        "folder": f"{folder}",
    })  # fmt: skip


def training_summary(s: dict[str, Any], untimed_steps: int) -> str:
    """What came out of training; `s` is summary.json."""
    speed = "too few steps to tell tokens/s"
    if s["tokens_per_sec"]:
        speed = f"{s['tokens_per_sec']:,.0f} tokens/s"
    loss = "not evaluated"
    if s["val_loss"] is not None:
        loss = f"{s['val_loss']:.4f} nats per token, {s['val_bits_per_byte']:.4f} bits per byte, perplexity "
        loss += f"{s['val_perplexity']:,.2f}"
    rows = {
        "trained": f"{s['steps']:,} steps, {s['tokens_seen']:,} tokens in {s['train_seconds']:.1f} s, "
        f"{speed} (without evaluation, saving and the first {untimed_steps} steps)",
        "MFU": "unknown" if s["mfu"] is None else f"{100 * s['mfu']:.0f} % ({s['mfu_peak']})",
        "validation": loss,
        "memory": f"{mebibytes(s['peak_memory_bytes'])} at the peak",
        "KV cache": f"{s['kv_cache_bytes_per_token']:,} bytes per token for {s['attention']}, "
        f"{mebibytes(s['kv_cache_bytes_full_context'])} at full context in float32; mha: "
        f"{mebibytes(s['kv_cache_bytes_full_context_mha'])}",
        "saved": s["checkpoint"],
    }
    return lines(rows)


def sampling_summary(r: dict[str, Any]) -> str:
    """Speed and cache of one call of sample.py; `r` is its report."""

    def rate(x: float | None) -> str:
        return f"{x:,.0f}" if x else "-"

    used = f"{r['kv_cache_bytes_allocated']:,} bytes allocated, {r['kv_cache_bytes_used']:,} used, "
    refilled = f", context refilled {r['refills']} times" if r["refills"] else ""
    first = f"first token after {1e3 * r['time_to_first_token_seconds']:.1f} ms"
    rows = {
        "prefill": f"{r['prompt_tokens']:,} tokens, {rate(r['prefill_tokens_per_sec'])} tokens/s, {first}",
        "decode": f"{r['new_tokens']:,} tokens, {rate(r['decode_tokens_per_sec'])} tokens/s, "
        f"{rate(r['decode_tokens_per_sec_per_sequence'])} per sequence, {r['num_samples']} at once{refilled}",
        "KV cache": f"{used if r['kv_cache'] else 'off; '}{r['kv_cache_bytes_formula']:,} by formula for "
        f"{r['attention']} on {r['n_kv_head']} KV heads; mha on {r['n_head']}: {r['kv_cache_bytes_mha']:,}",
        "machine": f"{r['device']}, {r['dtype']}, weights {r['weights']}, cache in {r['cache_dtype']}, "
        f"{r['threads']} threads",
    }
    return lines(rows)
