"""Train a GPT: python train.py config/small.py --attention=gqa

The whole loop is in `train`, in sight. What a run needs is made first (data, model, optimizer), then told,
then used. Everything lands in `out_dir`: checkpoints, metrics.jsonl, config.json, summary.json. The options
are in options.py.
"""

import hashlib
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import config as configuration
import model as gpt
import report
from checkpoint import best_checkpoint, drop_after, save_checkpoint, step_folders
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
from measure import measure_decode
from optim import make_optimizers, schedule
from options import TrainConfig, default_out_dir
from resume import Progress, resume, stored_options
from tracking import Interrupted, Tracker, claim

UNTIMED_STEPS = 3  # left out by the clock: the first steps fill caches and start threads
LAST_TRIES = 0, 2, 10  # seconds to wait before each try to save the last checkpoint
TIME_IS_UP = 75  # the exit code of --max_minutes: to be resumed


def train(c: TrainConfig, out_dir: Path) -> dict[str, Any]:
    """Train one model and return its summary, which is also in `out_dir`/summary.json.

    With `c.resume`, the newest checkpoint in `out_dir`, if there is one, goes on: on a CPU to the same bits
    as if it had never stopped. Errors: ValueError for data, sizes or numbers that can't work, or a folder in
    use; OSError where `out_dir` can't be written.
    """
    check_torch()
    began = time.monotonic()
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
        fix = "has the text changed since the run began?" if c.resume else "leave it out"
        had = c.model.vocab_size
        raise ValueError(f"vocab_size={had}: the tokenizer has {tokenizer.vocab_size} ids; {fix}")
    train_tokens = open_tokens(prepared.train, c.model.vocab_size)
    val_tokens = open_tokens(prepared.val, c.model.vocab_size)
    check_fits(train_tokens, c.model.block_size, "train")
    check_fits(val_tokens, c.model.block_size, "val")
    corpus = val_tokens.header["corpus_sha256"]

    network = gpt.GPT(c.model, torch.Generator().manual_seed(c.seed)).to(device)
    network.recompute = c.recompute
    model: Any = network
    compiled = compile_pays(device) if c.compile is None else c.compile
    optimizers = make_optimizers(
        network, c.optimizer, learning_rate=c.learning_rate, muon_lr=c.muon_lr,
        muon_momentum=c.muon_momentum, weight_decay=c.weight_decay, betas=(c.beta1, c.beta2)
    )
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    peak, peak_source = peak_flops(device, dtype)
    flops_per_token = gpt.estimate_train_flops_per_token(c.model)
    computer = f"{device}, products in {machine['dtype']}, {torch.get_num_threads()} threads, compile "
    computer += f"{'on' if compiled else 'off'}, {peak / 1e12:.2f} TFLOPS ({peak_source})"
    print(report.training_plan(c, prepared, train_tokens, val_tokens, computer, out_dir), flush=True)

    def out_of_patience() -> bool:
        return c.patience is not None and run.waited >= c.patience

    def starts_of(step: int) -> np.ndarray:
        return batch_starts(train_tokens.n_tokens, c.model.block_size, c.seed, step, c.batch_size)

    def not_finite(step: int, what: str) -> ValueError:
        windows = ", ".join(map(str, starts_of(step - 1)[:4]))
        return ValueError(
            f"step {step}: {what} is not finite, so training stopped and did not save; the last good "
            f"checkpoint is {saved or 'none'}. Lower the learning rate, use --on_nonfinite=skip, or look at "
            f"the data from tokens {windows}, ... of {prepared.train}"
        )

    def forward_backward(starts: np.ndarray) -> tuple[torch.Tensor, str]:
        """Add up the gradients of a step, one micro-batch after the other: the mean loss, next `batches`."""
        torch.manual_seed((c.seed * 1_000_003 + run.step) % 2**32)  # dropout; 32 bits: the CPU reads no more
        loss = torch.zeros((), device=device)
        seen_ids = hashlib.sha256(run.batches.encode())
        for rows in starts.reshape(run.n_micro, -1):
            x, y = get_batch(train_tokens, rows, c.model.block_size)
            seen_ids.update(torch.cat([x, y[:, -1:]], dim=1).numpy().tobytes())
            with autocast(device, dtype):
                _, micro_loss = model(to_device(x, device), to_device(y, device), logits_for="none")
            scaler.scale(micro_loss / run.n_micro).backward()
            loss += micro_loss.detach() / run.n_micro
        return loss, seen_ids.hexdigest()

    def look(n_windows: int | None) -> dict[str, float]:
        found = evaluate(model, val_tokens, token_bytes, c.model.block_size, n_windows, device, dtype)
        if not math.isfinite(found["loss"]):
            raise not_finite(run.step, "validation loss")
        row = {f"val/{name}": x for name, x in found.items()}
        tracker.log(run.step, {"tokens": run.step * c.tokens_per_step, **row})
        return found

    def compare_with_best() -> bool:
        """Evaluate in the middle of the run; whether it is the best so far."""
        found = look(c.eval_windows)
        bar.write(
            f"step {run.step:,}: validation loss {found['loss']:.3f} nats per token, "
            f"{found['bits_per_byte']:.3f} bits per byte"
        )
        better = found["loss"] < run.best
        run.waited = 0 if better else run.waited + 1
        run.best_step = run.step if better else run.best_step
        run.best, run.owes_evaluation = min(run.best, found["loss"]), False
        if better or not c.patience:
            run.val = found  # what the newest checkpoint tells of itself
        return better

    def save(best: bool = False) -> Path | None:
        """The new checkpoint; on a full disk the one before it, and another try when the next one is due."""
        val = {} if run.owes_evaluation else run.val
        about = {"val": val, "run": configuration.flatten(c), "corpus_sha256": corpus, **machine}
        training = optimizers, {"progress": asdict(run), "scaler": scaler.state_dict()}
        for wait in LAST_TRIES if last else (0,):
            time.sleep(wait)
            try:
                tracker.flush()
                return save_checkpoint(
                    out_dir, run.step, network, tokenizer.to_dict(), about, training, c.keep_checkpoints, best
                )
            except OSError as error:
                problem = error
                bar.write(f"step {run.step:,} can't be saved: {error}; the last saved is {saved or 'none'}")
        if last:
            raise problem
        return saved

    with ExitStack() as held:
        held.enter_context(claim(out_dir, keep=c.resume is not None))
        run = Progress()
        if c.resume and step_folders(out_dir):
            run = resume(out_dir, c, network, optimizers, scaler, corpus, tokenizer.to_dict())
        run.n_micro = c.batch_size // c.micro_batch_size if c.micro_batch_size else run.n_micro
        saved: Path | None = step_folders(out_dir)[-1] if run.step else None
        logged = run.step or None, run.owes_evaluation
        tracker = held.enter_context(Tracker(out_dir, configuration.flatten(c), *logged))
        interrupted = held.enter_context(Interrupted())
        if c.sdpa == "math":
            held.enter_context(sdpa_kernel(SDPBackend.MATH))
        refresh = 0.5 if sys.stderr.isatty() else 15
        bar = held.enter_context(tqdm(total=c.max_iters, initial=run.step, unit="step", mininterval=refresh))
        clock = Stopwatch(device, run.seconds)
        window = run.timed_steps, run.seconds  # at the last row of the log
        bad_step = torch.full((), -1, device=device)  # first that was not finite; read when the log is due
        first, last, saved_at, slowest_pause = run.step, run.step >= c.max_iters, time.monotonic(), 0.0
        better = run.step == run.best_step > 0  # a kill may have come before it was marked
        if run.owes_evaluation and not last:
            better = compare_with_best()
            last = out_of_patience()
        if better and (c.keep_best or c.patience):
            saved = save(best=True)
        while not last:
            lr_share = schedule(
                run.step, n_steps=c.max_iters, warmup=round(c.warmup * c.max_iters), kind=c.schedule,
                floor=c.lr_floor, decay_share=c.lr_decay
            )
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group["peak_lr"] * lr_share
            try:
                if compiled and run.step == first:
                    model = torch.compile(network)  # shows only in use whether it works here
                # batch and dropout depend on (seed, step) alone: every variant sees the same batches
                loss, batches = forward_backward(starts_of(run.step))
            except Exception as error:
                network.zero_grad(set_to_none=True)
                full, n = is_out_of_memory(error), run.n_micro
                if full and c.micro_batch_size is None and n < c.batch_size:
                    run.n_micro = next(m for m in range(n + 1, c.batch_size + 1) if c.batch_size % m == 0)
                    bar.write(f"out of memory: on with {run.n_micro} micro-batches, the same step")
                elif compiled and run.step == first and not (full or isinstance(error, ValueError)):
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
                run.skipped += 1
                so_far = f"{run.skipped} so far"
                bar.write(f"step {run.step + 1}: loss or gradient is not finite, left out ({so_far})")
            else:
                bad_step = torch.where(finite | (bad_step >= 0), bad_step, run.step + 1)
                for optimizer in optimizers:
                    scaler.step(optimizer)
            network.zero_grad(set_to_none=True)
            scaler.update()
            run.step, run.batches = run.step + 1, batches
            run.timed_steps += clock.running
            bar.update()

            left = math.inf if c.max_minutes is None else 60 * c.max_minutes - (time.monotonic() - began)
            time_is_up = left < 1 + 2 * slowest_pause  # what is left is for the last save
            last = run.step == c.max_iters or bool(interrupted.signal) or time_is_up
            log_due, eval_due, save_due = (
                bool(interval) and run.step % interval == 0
                for interval in (c.log_interval, c.eval_interval, c.save_interval)
            )
            if log_due or eval_due or save_due or last:
                paused_at, run.seconds = time.monotonic(), clock.pause()
                if bad_step >= 0:
                    raise not_finite(int(bad_step), "loss or gradient")
                row = {
                    "tokens": run.step * c.tokens_per_step,
                    "train/loss": loss.item(),
                    "train/grad_norm": grad_norm.item(),
                    "train/lr": c.learning_rate * lr_share,
                    "perf/train_seconds": run.seconds,
                    "perf/peak_memory_bytes": peak_memory_bytes(device),
                }
                if run.timed_steps > window[0]:  # the clock ran since the last row
                    row["perf/step_ms"] = 1e3 * (run.seconds - window[1]) / (run.timed_steps - window[0])
                    row["perf/tokens_per_sec"] = 1e3 * c.tokens_per_step / row["perf/step_ms"]
                    row["perf/mfu"] = flops_per_token * row["perf/tokens_per_sec"] / peak
                window = run.timed_steps, run.seconds
                tracker.log(run.step, row)
                bar.set_postfix_str(
                    f"loss {row['train/loss']:.3f}, grad norm {row['train/grad_norm']:.2f}"
                    + (f", {row['perf/tokens_per_sec']:,.0f} tokens/s" if "perf/step_ms" in row else ""),
                    refresh=False
                )
                better = False
                run.owes_evaluation = eval_due and last and run.step < c.max_iters
                if eval_due and not last:
                    better = compare_with_best()
                    last = out_of_patience()
                save_due |= bool(c.save_minutes) and time.monotonic() - saved_at >= 60 * c.save_minutes
                save_best = better and (c.keep_best or bool(c.patience))
                if save_best or (save_due and not last):
                    saved, saved_at = save(save_best), time.monotonic()
                slowest_pause = max(slowest_pause, time.monotonic() - paused_at)
            if run.step - first >= UNTIMED_STEPS:
                clock.start()
        # still where a signal is held back: what was learned is not lost to an impatient Ctrl-C
        run.seconds, keep = clock.pause(), not out_of_patience()
        finished = run.step == c.max_iters or out_of_patience()
        last_look = run.step == c.max_iters and not out_of_patience()
        last_look &= run.step > first or run.owes_evaluation
        run.owes_evaluation |= last_look and bool(interrupted.signal)
        if last_look and not interrupted.signal:
            found = look(c.eval_windows if c.patience else c.final_eval_windows)  # as those it is up against
            keep = not c.patience or found["loss"] < run.best
            run.val = found if keep else run.val
        if keep and run.step > first:
            saved = save()
        elif not keep and (best := best_checkpoint(out_dir)):
            drop_after(out_dir, best)  # what a run waited for in vain is not its result
            saved = best
        rate = run.timed_steps * c.tokens_per_step / run.seconds if run.timed_steps else 0.0
        summary = {
            **{name: getattr(c.model, name) for name in ("attention", "n_head", "n_kv_head", "norm")},
            "n_params": gpt.estimate_n_params(c.model)["total"],
            "steps": run.step,
            "tokens_seen": run.step * c.tokens_per_step,
            "train_seconds": run.seconds,
            "tokens_per_sec": rate or None,
            **{f"val_{name}": run.val.get(name) for name in ("loss", "bits_per_byte", "perplexity")},
            "peak_memory_bytes": peak_memory_bytes(device),
            "kv_cache_bytes_per_token": gpt.kv_cache_bytes(c.model, 1),
            "kv_cache_bytes_full_context": gpt.kv_cache_bytes(c.model, c.model.block_size),
            "kv_cache_bytes_full_context_mha": gpt.kv_cache_bytes(gpt.as_mha(c.model), c.model.block_size),
            **machine,
            "seed": c.seed,
            "mfu": flops_per_token * rate / peak if rate else None,
            "mfu_peak": peak_source,
            "skipped_steps": run.skipped,
            "checkpoint": str(saved),
            "finished": finished,
            "signal": interrupted.signal,
            "micro_batch_size": c.batch_size // run.n_micro,
            "batches_sha256": run.batches,
        }
        if c.measure_decode and finished:
            summary |= measure_decode(network, device)
        tracker.finish(summary)
        return summary


def main(argv: list[str]) -> dict[str, Any]:
    """Read the options, train, report; exit code 128 + signal where one ended the run."""
    about = "Train a GPT. Presets are files: python train.py config/small.py"
    parsed = configuration.parse(argv, TrainConfig, prog="train.py", description=about, stored=stored_options)
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
    if not summary["finished"]:
        print(f"time is up: python train.py --resume={out_dir} goes on", file=sys.stderr)
        sys.exit(TIME_IS_UP)
    return summary


if __name__ == "__main__":
    configuration.run_main(main, "train.py")
