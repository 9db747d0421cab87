"""Loss on text that a model has not learned from, the same number each time."""

import math
from pathlib import Path

import torch

from checkpoint import load_checkpoint
from data.loader import TokenFile, eval_batches, open_tokens
from data.prepare import prepare
from device import autocast, pick_device, pick_dtype
from quantize import quantize_weights


@torch.inference_mode()
def evaluate(
    model: torch.nn.Module, tokens: TokenFile, token_bytes: torch.Tensor, block_size: int,
    n_windows: int | None, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Loss on fixed windows of a split: {"loss": nats per token, "bits_per_byte", "perplexity"}.

    Deterministic: the same windows each time, no dropout, no random draw. `token_bytes`: (V,) bytes per
    token.
    """
    was_training = model.training
    model.eval()
    nats, n_tokens, n_bytes = 0.0, 0, 0
    for x, y in eval_batches(tokens, block_size, n_windows, batch_size=max(1, 4096 // block_size)):
        with autocast(device, dtype):
            _, mean = model(x.to(device), y.to(device), logits_for="none")
        nats += mean.item() * y.numel()
        n_tokens += y.numel()
        n_bytes += int(token_bytes[y].sum())
    model.train(was_training)
    loss, bits_per_byte = nats / n_tokens, nats / math.log(2) / max(1, n_bytes)
    return {"loss": loss, "bits_per_byte": bits_per_byte, "perplexity": math.exp(min(loss, 700))}


def evaluate_run(out_dir: Path, device: str, dtype: str, weights: str = "plain") -> dict[str, float]:
    """`evaluate` a run's newest checkpoint on all of its validation split, and print what comes out.

    Errors: ValueError where the data is no longer what the run learned from.
    """
    on = pick_device(device)
    loaded = load_checkpoint(out_dir, on)
    run, m = loaded.info.get("run"), loaded.model.config
    told = {"dataset": str, "tokenizer": str, "bpe_size": int, "text_column": str, "val_fraction": float}
    if not isinstance(run, dict) or any(type(run.get(name)) is not kind for name, kind in told.items()):
        raise ValueError(f"{loaded.path}: its config.json does not say which data it learned from")
    prepared = prepare(
        run["dataset"], run["tokenizer"], run["bpe_size"], text_column=run["text_column"],
        val_fraction=run["val_fraction"]
    )
    corpus = loaded.info.get("corpus_sha256", prepared.meta["val"]["corpus_sha256"])
    same_text = corpus == prepared.meta["val"]["corpus_sha256"]
    if not same_text or prepared.tokenizer.to_dict() != loaded.tokenizer:
        raise ValueError(
            f"{loaded.path}: the text of {run['dataset']} has changed since it was trained; "
            "a loss on it would not compare"
        )
    tokens = open_tokens(prepared.val, m.vocab_size)
    if weights == "int8":
        quantize_weights(loaded.model)
    token_bytes = torch.from_numpy(prepared.tokenizer.token_bytes())
    products = pick_dtype(dtype, on, m.n_embd)
    found = evaluate(loaded.model, tokens, token_bytes, m.block_size, None, on, products)
    print(
        f"{loaded.path}: {found['loss']:.6f} nats per token, {found['bits_per_byte']:.6f} bits per byte, "
        f"perplexity {found['perplexity']:,.4f} on {tokens.n_tokens - 1:,} tokens"
    )
    return found
