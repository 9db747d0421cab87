"""Training beside nanoGPT and Hugging Face transformers: python -m benchmarks.train --nanogpt DIR --text FILE

Two questions, each answered in one run with the sides taking turns:

steps  tokens per second and peak memory of a training step (forward, backward, clipping, AdamW), equal shapes
race   seconds of training until the loss on the whole validation split of character-level Shakespeare (FILE)
       is at or below a target, and the loss after the seconds of nanoGPT's laptop recipe, over several seeds

nanoGPT's code is read from DIR and not part of this project. Evaluation is in no clock, nor are the first 3
steps.
"""

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

import config as configuration
from data.loader import batch_starts, eval_batches, open_tokens
from data.prepare import prepare
from device import DTYPES, Stopwatch, autocast, check_torch, peak_memory_bytes, pick_device, pick_dtype
from measure import interleaved, machine, table
from model import GPT, GPTConfig
from optim import make_optimizers
from train import TrainConfig, train

SHAPES = {  # layers, heads, width, context, vocabulary, rows of a batch
    "laptop": (4, 4, 128, 64, 66, 12),
    "768 wide": (4, 12, 768, 256, 1024, 4),
    "gpt2": (12, 12, 768, 512, 50304, 8),
}
COLUMNS = {
    "shape": "", "dtype": "", "ours_tokens_per_sec": ",.0f", "nanogpt_tokens_per_sec": ",.0f",
    "hf_tokens_per_sec": ",.0f", "ours_peak_bytes": ",d", "nanogpt_peak_bytes": ",d",
}  # fmt: skip


@dataclass
class BenchConfig:
    """One run of the benchmark."""

    nanogpt: str | None = None  # folder of a nanoGPT checkout; none leaves that side out
    text: str | None = None  # the text of the race; none leaves the race out
    target: float = 1.92  # nats per character on the whole validation split
    seeds: int = 3  # runs of each side of the race
    repeats: int = 5  # rounds of the step measurement, of which the median counts
    shapes: str = "laptop,768 wide,gpt2"  # of the step measurement, by name
    hf: bool = True  # measure transformers too, where it is installed
    memory: bool = True  # measure peak memory, each side in a process of its own
    recompute: bool = False  # ours computes activations again in backward, as train.py's --recompute does
    plot: str | None = None  # write loss against seconds to this PNG file
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes cuda, then mps, then cpu
    only: str | None = (
        None  # used by the benchmark itself: take one step of SIDE:SHAPE:DTYPE and print its peak
    )

    def __post_init__(self) -> None:
        for name in ("seeds", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if unknown := [shape for shape in self.shapes.split(",") if shape and shape not in SHAPES]:
            raise ValueError(f"shapes={unknown[0]!r}: must be among {', '.join(SHAPES)}")
        if self.nanogpt is not None and not (Path(self.nanogpt) / "model.py").is_file():
            raise ValueError(
                f"--nanogpt={self.nanogpt}: no model.py there; give the folder of a nanoGPT checkout"
            )


def load_nanogpt(folder: str) -> Any:
    """nanoGPT's own model.py as a module."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder) / "model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def nanogpt_model(folder: str, seed: int, **shape: int) -> Any:
    """A nanoGPT model of the given shape, no dropout, no biases."""
    torch.manual_seed(seed)
    module = load_nanogpt(folder)
    return module.GPT(module.GPTConfig(dropout=0.0, bias=False, **shape))


def one_step(
    side: str, name: str, dtype: torch.dtype, device: torch.device, c: BenchConfig
) -> Callable[[], Any]:
    """One training step of a side on a shape, to be called again and again."""
    n_layer, n_head, n_embd, T, V, B = SHAPES[name]
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": T, "vocab_size": V}
    kwargs: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.99)}
    if side == "ours":
        model: Any = GPT(GPTConfig(**shape, norm="pre", bias=False), torch.Generator().manual_seed(0)).to(
            device
        )
        model.recompute = c.recompute
        optimizers = make_optimizers(
            model,
            "adamw",
            learning_rate=1e-4,
            muon_lr=0.02,
            muon_momentum=0.95,
            weight_decay=0.1,
            betas=(0.9, 0.99),
        )
    elif side == "nanogpt":
        model = nanogpt_model(c.nanogpt or "", 0, **shape).to(device)
        optimizers = [model.configure_optimizers(0.1, 1e-4, (0.9, 0.99), device.type)]
    else:
        import transformers

        hf = transformers.GPT2Config(
            vocab_size=V,
            n_positions=T,
            n_embd=n_embd,
            n_layer=n_layer,
            n_head=n_head,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = transformers.GPT2LMHeadModel(hf).to(device)
        optimizers = [torch.optim.AdamW(model.parameters(), **kwargs)]
    model.train()
    x = torch.randint(V, (B, T), device=device)

    def step() -> None:
        with autocast(device, dtype):
            if side == "ours":
                loss = model(x, x, logits_for="none")[1]
            elif side == "nanogpt":
                loss = model(x, x)[1]
            else:
                loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def measure_steps(c: BenchConfig, device: torch.device) -> list[dict[str, Any]]:
    """Rows of the throughput table: each shape in fp32, and ours in the dtype it would choose too."""
    rows = []
    for name in filter(None, c.shapes.split(",")):
        B, T, width = SHAPES[name][5], SHAPES[name][3], SHAPES[name][2]
        chosen = pick_dtype("auto", device, width)
        for dtype in dict.fromkeys((torch.float32, chosen)):
            sides = ["ours"]
            if c.nanogpt:
                sides.append("nanogpt")
            if c.hf and importlib.util.find_spec("transformers"):
                sides.append("hf")
            # the others as they are shipped for this device: nanoGPT and transformers stay in fp32 on a CPU
            theirs = torch.float32 if device.type == "cpu" else dtype
            steps = {
                side: one_step(side, name, dtype if side == "ours" else theirs, device, c)
                for side in sides
            }
            taken = interleaved(steps, c.repeats, device)
            del steps
            row: dict[str, Any] = {"shape": name, "dtype": str(dtype).removeprefix("torch.")}
            for side in ("ours", "nanogpt", "hf"):
                row[f"{side}_tokens_per_sec"] = B * T / taken[side] if side in taken else None
            for side in ("ours", "nanogpt"):
                given = dtype if side == "ours" else theirs
                row[f"{side}_peak_bytes"] = (
                    peak_of(c, side, name, given) if c.memory and side in taken else None
                )
            rows.append(row)
    return rows


def peak_of(c: BenchConfig, side: str, name: str, dtype: torch.dtype) -> int:
    """Peak memory in bytes of two steps, in a process of its own, PyTorch included."""
    command = [
        sys.executable, "-m", "benchmarks.train", f"--only={side}:{name}:{str(dtype).removeprefix('torch.')}",
        f"--device={c.device}", f"--recompute={c.recompute}",
        *([f"--nanogpt={c.nanogpt}"] if c.nanogpt else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def race_nanogpt(folder: str, prepared: Any, seed: int, device: torch.device) -> tuple[float, float]:
    """nanoGPT's model by its laptop recipe, 2,000 steps: seconds of training, final loss on all of val."""
    train_tokens, val_tokens = open_tokens(prepared.train), open_tokens(prepared.val)
    model = nanogpt_model(
        folder, seed, n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=train_tokens.vocab_size
    )
    model.to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    watch, n_steps, warmup = Stopwatch(device), 2000, 100
    ids = np.memmap(prepared.train, dtype="<u2", mode="r", offset=train_tokens.offset)  # as it reads its own
    for step in range(n_steps):
        if step == 3:
            watch.start()
        share = (step - warmup) / (n_steps - warmup)
        lr = (
            1e-3 * (step + 1) / (warmup + 1)
            if step < warmup
            else 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * share))
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        starts = batch_starts(train_tokens.n_tokens, 64, seed, step, 12)
        x = torch.stack([torch.from_numpy(ids[i : i + 64].astype(np.int64)) for i in starts]).to(device)
        y = torch.stack([torch.from_numpy(ids[i + 1 : i + 65].astype(np.int64)) for i in starts]).to(device)
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    spent = watch.pause()
    model.eval()
    total, n = 0.0, 0
    with torch.inference_mode():
        for x, y in eval_batches(val_tokens, 64, None, 64):
            total += model(x.to(device), y.to(device))[1].item() * y.numel()
            n += y.numel()
    return spent, total / n


def race_ours(
    preset: str, text: str, seed: int, max_iters: int | None, every: int
) -> list[tuple[float, float]]:
    """A preset's run: (seconds of training, loss on all of val) at each evaluation, the last at the end."""
    flags = [f"config/{preset}.py", f"--dataset={text}", f"--seed={seed}", f"--eval_interval={every}"]
    flags += ["--eval_windows=none"] + ([f"--max_iters={max_iters}"] if max_iters else [])
    c = configuration.parse(flags, TrainConfig, prog="benchmarks.train", description="").config
    with tempfile.TemporaryDirectory() as folder:
        train(c, Path(folder) / "run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    points, seconds = [], 0.0
    for row in map(json.loads, lines):
        seconds = row.get("perf/train_seconds", seconds)
        if "val/loss" in row:
            points.append((seconds, row["val/loss"]))
    return points


def race(c: BenchConfig, device: torch.device) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Time to the target, loss at equal time, and the curves, over the seeds; the sides take turns."""
    text = str(Path(c.text or "").resolve())
    prepared = prepare(text, "char", 256)
    theirs, ours, equal, curves = [], [], [], []
    for seed in tqdm(range(c.seeds), unit="seed"):
        budget = None
        if c.nanogpt:
            budget, loss = race_nanogpt(c.nanogpt, prepared, seed, device)
            theirs.append((budget, loss))
        points = race_ours("shakespeare_laptop", text, seed, None, 20)
        ours.append(next((seconds for seconds, loss in points if loss <= c.target), None))
        curves.append(("shakespeare_laptop", seed, points))
        if budget:
            # as many steps as fit into the same seconds, by a short trial
            seconds, _ = race_ours("shakespeare_laptop_long", text, seed, 40, 1000)[-1]
            steps = int(budget / (seconds / 37))
            points = race_ours("shakespeare_laptop_long", text, seed, steps, max(20, steps // 12))
            equal.append(points[-1])
            curves.append(("shakespeare_laptop_long", seed, points))
    reached = [seconds for seconds in ours if seconds is not None]
    time_to_loss: dict[str, Any] = {
        "target": c.target, "seeds": c.seeds, "ours_seconds": ours,
        "nanogpt_seconds": [s for s, _ in theirs] or None,
        "nanogpt_final_losses": [loss for _, loss in theirs] or None,
        "ratio": None,
    }  # fmt: skip
    if theirs and len(reached) == c.seeds:
        time_to_loss["ratio"] = float(np.mean(reached) / np.mean([s for s, _ in theirs]))
    loss_at_equal_time = {
        "seconds": [s for s, _ in equal] or None, "ours": [loss for _, loss in equal] or None,
        "nanogpt": [loss for _, loss in theirs] or None,
    }  # fmt: skip
    return time_to_loss, loss_at_equal_time, [curves, theirs]


def plot(curves: list[Any], theirs: list[tuple[float, float]], target: float, path: Path) -> None:
    """Loss on the whole validation split against seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 4.5))
    for preset, seed, points in curves:
        color = "C0" if preset == "shakespeare_laptop" else "C1"
        ax.plot(*zip(*points, strict=True), color, marker=".", label=preset if seed == 0 else None)
    if theirs:
        ax.plot(*zip(*theirs, strict=True), "C3x", label="nanoGPT's laptop recipe, end")
    ax.axhline(target, color="gray", linestyle="--", linewidth=1)
    ax.set(xlabel="seconds of training", ylabel="loss, nats per character", ylim=(None, 2.6))
    ax.legend()
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def main(argv: list[str]) -> dict[str, Any]:
    """Measure, print the tables, and one JSON object on the last line of standard output."""
    c = configuration.parse(
        argv, BenchConfig, prog="benchmarks.train", description="Training beside nanoGPT and transformers."
    ).config
    check_torch()
    device = pick_device(c.device)
    if c.only:
        side, name, dtype = c.only.split(":")
        step = one_step(side, name, DTYPES[dtype], device, c)
        step(), step()
        print(peak_memory_bytes(device))
        return {}
    result: dict[str, Any] = {"machine": machine(device), "time_to_loss": None, "loss_at_equal_time": None}
    if c.text:
        result["time_to_loss"], result["loss_at_equal_time"], (curves, theirs) = race(c, device)
        if c.plot:
            plot(curves, theirs, c.target, Path(c.plot))
    result["throughput"] = measure_steps(c, device)
    print(table(result["throughput"], COLUMNS))
    for question in ("time_to_loss", "loss_at_equal_time"):
        if result[question]:
            print(f"{question}: " + ", ".join(f"{key} {value}" for key, value in result[question].items()))
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    configuration.run_main(main, "benchmarks.train")
