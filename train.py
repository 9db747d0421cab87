"""Train a GPT: python train.py config/small.py --attention=gqa

The whole loop is in `train`, in sight. What a run needs is made first (data, model, optimizer), then told,
then used. Everything lands in `out_dir`: checkpoints, metrics.jsonl, config.json, summary.json.
"""

import math
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import config as configuration
import model as gpt
import report
from checkpoint import save_checkpoint
from data.loader import batch_starts, check_fits, get_batch, open_tokens
from data.prepare import prepare
from device import (
    Stopwatch,
    autocast,
    check_torch,
    compile_pays,
    is_out_of_memory,
    peak_flops,
    peak_memory_bytes,
    pick_device,
    pick_dtype,
    to_device,
)
from evaluation import evaluate, evaluate_run
from optim import make_optimizers, schedule
from tracking import Interrupted, Tracker, make_room

UNTIMED_STEPS = 3  # left out by the clock: the first steps fill caches and start threads


@dataclass
class TrainConfig:
    """One training run."""

    model: gpt.GPTConfig = field(default_factory=gpt.GPTConfig)

    # data
    dataset: str = "python"  # python (its standard library), a text file or folder, or hub:owner/name
    text_column: str = "text"  # the column that holds the text, where the data has columns
    tokenizer: Literal["char", "bpe", "gpt2"] = "bpe"  # one id per character, trained byte pairs, or GPT-2's
    bpe_size: int = 1024  # ids of the bpe tokenizer; 256 means bytes
    val_fraction: float = 0.1  # share of the text that is only evaluated on

    # steps
    batch_size: int = 32  # sequences per step, over all micro-batches
    micro_batch_size: int | None = None  # sequences per forward pass; none takes batch_size
    max_iters: int = 1000  # steps
    seed: int = 0  # of the initial weights, the order of the data and dropout; each has its own generator

    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # for the matrices of the blocks; the rest has adamw
    learning_rate: float = 1e-3  # adamw's peak
    muon_lr: float = 0.02  # muon's peak
    muon_momentum: float = 0.95  # muon's memory of the gradient; shorter runs want less
    schedule: Literal["cosine", "linear"] = "cosine"  # how it falls from the peak; linear stays there first
    warmup: float = 0.05  # share of the steps in which it rises
    lr_floor: float = 0.1  # where it ends, as a share of the peak
    lr_decay: float = 0.5  # share of the steps after warm-up in which linear falls
    weight_decay: float = 0.1  # for matrices; norms and biases have none
    beta1: float = 0.9  # adamw's memory of the gradient
    beta2: float = 0.99  # adamw's memory of its square
    grad_clip: float = 1.0  # largest norm of the gradient; 0 is off
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient of NaN or inf: stop, or leave it out
    recompute: bool = False  # less memory: compute a block's activations again in backward

    # looking and keeping
    eval_interval: int = 250  # steps between evaluations; 0 evaluates at the end only
    eval_windows: int | None = 100  # windows of the validation split per evaluation; none is all of it
    final_eval_windows: int | None = None  # the same after the last step, unless there is a patience
    eval_only: bool = False  # evaluate the newest checkpoint in out_dir on all of the split, and leave
    eval_weights: Literal["plain", "int8"] = "plain"  # of eval_only: what 8-bit weights cost in loss
    patience: int | None = None  # stop after so many evaluations without a better one, and keep the best
    log_interval: int = 10  # steps between rows in metrics.jsonl
    save_interval: int = 0  # steps between checkpoints; 0 saves at the end only
    out_dir: str | None = None  # none takes out/<preset>, and what the flags change of the model

    # wandb, beside metrics.jsonl
    wandb: Literal["auto", "online", "offline", "off"] = "off"  # auto and online go offline if they have to
    wandb_project: str = "headcount"  # where wandb puts the run
    wandb_group: str | None = None  # runs that belong together, such as one study
    wandb_run_name: str | None = None  # none is made of attention and seed: gqa-s0

    # machine
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes cuda, then mps, then cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of products; the weights are float32
    compile: bool | None = None  # torch.compile; none does on cuda, and goes on without if it fails
    sdpa: Literal["auto", "math"] = "auto"  # math: the plain attention kernel, to rule out a fast one

    def __post_init__(self) -> None:
        def check(names: str, fits: Any, must: str) -> None:
            for name in names.split():
                if (value := getattr(self, name)) is not None and not fits(value):
                    raise ValueError(f"{name}={value}: must be {must}")

        check("batch_size max_iters log_interval", lambda x: x >= 1, "at least 1")
        check("bpe_size", lambda x: x >= 256, "at least 256, the number of bytes")
        optional = "micro_batch_size eval_windows final_eval_windows patience"
        check(optional, lambda x: x >= 1, "at least 1, or none")
        check("seed eval_interval save_interval weight_decay grad_clip", lambda x: x >= 0, "0 or more")
        check("learning_rate muon_lr", lambda x: x > 0, "above 0")
        check("beta1 beta2 muon_momentum warmup", lambda x: 0 <= x < 1, "at least 0 and below 1")
        check("lr_floor lr_decay", lambda x: 0 <= x <= 1, "between 0 and 1")
        check("val_fraction", lambda x: 0 < x < 1, "between 0 and 1")
        if self.batch_size % (micro := self.micro_batch_size or 1):
            divisors = (n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0)
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={micro}: "
                f"use micro_batch_size={min(divisors, key=lambda n: abs(n - micro))}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step learns from."""
        return self.batch_size * self.model.block_size


def default_out_dir(parsed: configuration.Parsed[TrainConfig]) -> Path:
    """out/<preset>, plus each flag that makes it another model or other data: out/small-mqa."""
    name = parsed.presets[-1].stem if parsed.presets else "default"
    words = ("attention", "norm", "position", "tokenizer")
    others = ("text_column", "bpe_size", "val_fraction", "optimizer", "seed")
    for key, value in parsed.explicit.items():
        if key == "dataset":
            name += f"-{Path(str(value).rpartition(':')[2]).stem or 'data'}"
        elif key in words or key in asdict(parsed.config.model) or key in others:
            name += f"-{value}" if key in words else f"-{key}_{value}"
    return Path("out", name.replace("/", "-"))


def train(c: TrainConfig, out_dir: Path) -> dict[str, Any]:
    """Train one model and return its summary, which is also in `out_dir`/summary.json.

    Errors: ValueError for data, sizes or numbers that can't work; OSError where `out_dir` can't be written.
    """
    check_torch()
    device = pick_device(c.device)
    dtype = pick_dtype(c.dtype, device, c.model.n_embd)
    machine = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    torch.set_float32_matmul_precision("high")  # TF32 where there is any

    prepared = prepare(
        c.dataset, c.tokenizer, c.bpe_size, text_column=c.text_column, val_fraction=c.val_fraction
    )
    tokenizer = prepared.tokenizer
    token_bytes = torch.from_numpy(tokenizer.token_bytes())
    c.model.vocab_size = c.model.vocab_size or tokenizer.vocab_size
    if c.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"vocab_size={c.model.vocab_size}: the tokenizer has {tokenizer.vocab_size} ids; leave it out"
        )
    train_tokens = open_tokens(prepared.train, c.model.vocab_size)
    val_tokens = open_tokens(prepared.val, c.model.vocab_size)
    check_fits(train_tokens, c.model.block_size, "train")
    check_fits(val_tokens, c.model.block_size, "val")

    network = gpt.GPT(c.model, torch.Generator().manual_seed(c.seed)).to(device)
    network.recompute = c.recompute
    model: Any = network
    compiled = compile_pays(device) if c.compile is None else c.compile
    optimizers = make_optimizers(
        network, c.optimizer, learning_rate=c.learning_rate, muon_lr=c.muon_lr,
        muon_momentum=c.muon_momentum, weight_decay=c.weight_decay, betas=(c.beta1, c.beta2)
    )
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    n_micro, seen = c.batch_size // (c.micro_batch_size or c.batch_size), c.max_iters * c.tokens_per_step
    peak, peak_source = peak_flops(device, dtype)
    flops_per_token = gpt.estimate_train_flops_per_token(c.model)
    plan = {
        "data": f"{prepared.meta['source']}: {train_tokens.n_tokens:,} tokens to learn from, "
        f"{val_tokens.n_tokens:,} held back, in {prepared.folder}",
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids, "
        f"{train_tokens.header['n_bytes'] / train_tokens.n_tokens:.2f} bytes per token",
        **report.describe_model(c.model),
        "step": f"{c.tokens_per_step:,} tokens = {c.batch_size // n_micro} sequences x {n_micro} "
        f"micro-batches x {c.model.block_size} tokens; {c.optimizer}",
        "run": f"{c.max_iters:,} steps, {seen:,} tokens, {seen / train_tokens.n_tokens:.1f} times through "
        "the data",
        "machine": f"{device}, products in {machine['dtype']}, {torch.get_num_threads()} "
        f"threads, compile {'on' if compiled else 'off'}, {peak / 1e12:.2f} TFLOPS ({peak_source})",
        "folder": f"{out_dir}",
    }
    print(report.lines(plan), flush=True)
    make_room(out_dir)
    tracker = Tracker(out_dir, configuration.flatten(c))

    clock, window = Stopwatch(device), (0, 0.0)  # timed steps and seconds at the last row of the log
    bad_step = torch.full((), -1, device=device)  # first step that was not finite; read when the log is due
    step, val, last, skipped, saved = 0, dict[str, float](), False, 0, None
    best, waited = math.inf, 0  # validation loss, and evaluations since

    def starts_of(step: int) -> np.ndarray:
        return batch_starts(train_tokens.n_tokens, c.model.block_size, c.seed, step, c.batch_size)

    def not_finite(step: int, what: str) -> ValueError:
        windows = ", ".join(map(str, starts_of(step - 1)[:4]))
        return ValueError(
            f"step {step}: {what} is not finite, so training stopped and did not save; the last good "
            f"checkpoint is {saved or 'none'}. Lower the learning rate, use --on_nonfinite=skip, or look at "
            f"the data from tokens {windows}, ... of {prepared.train}"
        )

    def forward_backward(starts: np.ndarray) -> torch.Tensor:
        """Add up the gradients of a step, one micro-batch after the other; the mean loss."""
        torch.manual_seed((c.seed * 1_000_003 + step) % 2**32)  # dropout; 32 bits: the CPU reads no more
        loss = torch.zeros((), device=device)
        for rows in starts.reshape(n_micro, -1):
            x, y = get_batch(train_tokens, rows, c.model.block_size)
            with autocast(device, dtype):
                _, micro_loss = model(to_device(x, device), to_device(y, device), logits_for="none")
            scaler.scale(micro_loss / n_micro).backward()
            loss += micro_loss.detach() / n_micro
        return loss

    def look(n_windows: int | None) -> dict[str, float]:
        found = evaluate(model, val_tokens, token_bytes, c.model.block_size, n_windows, device, dtype)
        if not math.isfinite(found["loss"]):
            raise not_finite(step, "validation loss")
        row = {f"val/{name}": x for name, x in found.items()}
        tracker.log(step, {"tokens": step * c.tokens_per_step, **row})
        return found

    def save() -> Path:
        corpus = val_tokens.header["corpus_sha256"]
        about = {"val": val, "run": configuration.flatten(c), "corpus_sha256": corpus, **machine}
        return save_checkpoint(out_dir, step, network, tokenizer.to_dict(), about)

    with (
        tracker,
        Interrupted() as interrupted,
        sdpa_kernel(SDPBackend.MATH) if c.sdpa == "math" else nullcontext(),
        tqdm(total=c.max_iters, unit="step", mininterval=0.5 if sys.stderr.isatty() else 15) as bar,
    ):
        while not last:
            lr_share = schedule(
                step, n_steps=c.max_iters, warmup=round(c.warmup * c.max_iters), kind=c.schedule,
                floor=c.lr_floor, decay_share=c.lr_decay
            )
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group["peak_lr"] * lr_share
            try:
                if compiled and step == 0:
                    model = torch.compile(network)  # shows only in use whether it works here
                # batch and dropout depend on (seed, step) alone: every variant sees the same batches
                loss = forward_backward(starts_of(step))
            except Exception as error:
                network.zero_grad(set_to_none=True)
                full = is_out_of_memory(error)
                if full and c.micro_batch_size is None and n_micro < c.batch_size:
                    n_micro = next(n for n in range(n_micro + 1, c.batch_size + 1) if c.batch_size % n == 0)
                    bar.write(f"out of memory: on with {n_micro} micro-batches, the same step in less room")
                elif compiled and step == 0 and not (full or isinstance(error, ValueError)):
                    cause = (str(error).strip() or type(error).__name__).splitlines()[0]
                    if c.compile:
                        raise ValueError(f"--compile=True failed: {cause}; leave it out") from error
                    bar.write(f"torch.compile failed, going on without it: {cause}")
                    model, compiled = network, False
                else:
                    raise
                continue
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(network.parameters(), c.grad_clip or math.inf)
            finite = torch.isfinite(loss) & (torch.isfinite(grad_norm) | scaler.is_enabled())
            if c.on_nonfinite == "skip" and not finite:  # this alone waits for the device in each step
                skipped += 1
                bar.write(f"step {step + 1}: loss or gradient is not finite, left out ({skipped} so far)")
            else:
                bad_step = torch.where(finite | (bad_step >= 0), bad_step, step + 1)
                for optimizer in optimizers:
                    scaler.step(optimizer)
            network.zero_grad(set_to_none=True)
            scaler.update()
            step += 1
            bar.update()

            last = step == c.max_iters or bool(interrupted.signal)
            log_due, eval_due, save_due = (
                bool(interval) and step % interval == 0
                for interval in (c.log_interval, c.eval_interval, c.save_interval)
            )
            if log_due or eval_due or save_due or last:
                seconds, timed = clock.pause(), max(0, step - UNTIMED_STEPS)
                if bad_step >= 0:
                    raise not_finite(int(bad_step), "loss or gradient")
                row = {
                    "tokens": step * c.tokens_per_step,
                    "train/loss": loss.item(),
                    "train/grad_norm": grad_norm.item(),
                    "train/lr": c.learning_rate * lr_share,
                    "perf/train_seconds": seconds,
                    "perf/peak_memory_bytes": peak_memory_bytes(device),
                }
                if timed > window[0]:  # the clock ran since the last row
                    row["perf/step_ms"] = 1e3 * (seconds - window[1]) / (timed - window[0])
                    row["perf/tokens_per_sec"] = 1e3 * c.tokens_per_step / row["perf/step_ms"]
                    row["perf/mfu"] = flops_per_token * row["perf/tokens_per_sec"] / peak
                window = (timed, seconds)
                tracker.log(step, row)
                bar.set_postfix_str(
                    f"loss {row['train/loss']:.3f}, grad norm {row['train/grad_norm']:.2f}"
                    + (f", {row['perf/tokens_per_sec']:,.0f} tokens/s" if "perf/step_ms" in row else ""),
                    refresh=False
                )
                if eval_due and not last:
                    found = look(c.eval_windows)
                    bar.write(
                        f"step {step:,}: loss {loss.item():.3f}, validation loss {found['loss']:.3f} nats "
                        f"per token, {found['bits_per_byte']:.3f} bits per byte"
                    )
                    waited = 0 if found["loss"] < best else waited + 1
                    best = min(best, found["loss"])
                    if not (c.patience and waited):
                        val = found  # what the newest checkpoint tells of itself
                    if c.patience and not waited:
                        saved = save()
                    last = waited == c.patience
                if save_due and not last and not c.patience:
                    saved = save()
            if step >= UNTIMED_STEPS:
                clock.start()
        # still where a signal is held back: what was learned is not lost to an impatient Ctrl-C
        seconds, timed = clock.pause(), max(0, step - UNTIMED_STEPS)
        keep = not (c.patience and saved)
        if not interrupted.signal and waited != c.patience:
            found = look(c.eval_windows if c.patience else c.final_eval_windows)  # as those it is up against
            keep = keep or found["loss"] < best
            val = found if keep else val
        if keep:
            saved = save()
    summary = {
        **{name: getattr(c.model, name) for name in ("attention", "n_head", "n_kv_head", "norm")},
        "n_params": gpt.estimate_n_params(c.model)["total"],
        "steps": step,
        "tokens_seen": step * c.tokens_per_step,
        "train_seconds": seconds,
        "tokens_per_sec": timed * c.tokens_per_step / seconds if timed else None,
        **{f"val_{name}": val.get(name) for name in ("loss", "bits_per_byte", "perplexity")},
        "peak_memory_bytes": peak_memory_bytes(device),
        "kv_cache_bytes_per_token": gpt.kv_cache_bytes(c.model, 1),
        "kv_cache_bytes_full_context": gpt.kv_cache_bytes(c.model, c.model.block_size),
        "kv_cache_bytes_full_context_mha": gpt.kv_cache_bytes(gpt.as_mha(c.model), c.model.block_size),
        **machine,
        "seed": c.seed,
        "mfu": flops_per_token * timed * c.tokens_per_step / seconds / peak if timed else None,
        "mfu_peak": peak_source,
        "skipped_steps": skipped,
        "checkpoint": str(saved),
        "signal": interrupted.signal,
    }
    tracker.finish(summary)
    return summary


def main(argv: list[str]) -> dict[str, Any]:
    """Read the options, train, report; exit code 128 + signal where one ended the run."""
    about = "Train a GPT. Presets are files: python train.py config/small.py"
    parsed = configuration.parse(argv, TrainConfig, prog="train.py", description=about)
    c = parsed.config
    out_dir = Path(c.out_dir) if c.out_dir else default_out_dir(parsed)
    if c.eval_only:
        return evaluate_run(out_dir, c.device, c.dtype, c.eval_weights)
    try:
        summary = train(c, out_dir)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = "micro_batch_size first, which leaves the result as it is; then "
        raise ValueError(
            f"out of memory with batch_size={c.batch_size}, micro_batch_size={c.micro_batch_size}, "
            f"block_size={c.model.block_size}, dtype={c.dtype}: use --recompute=True, or lower "
            f"{first if (c.micro_batch_size or 1) > 1 else ''}block_size, or the model's size"
        ) from error
    print(report.training_summary(summary, UNTIMED_STEPS))
    print(f"next       python sample.py --out_dir={out_dir} --prompt=...")
    if summary["signal"]:
        sys.exit(128 + summary["signal"])
    return summary


if __name__ == "__main__":
    configuration.run_main(main, "train.py")
