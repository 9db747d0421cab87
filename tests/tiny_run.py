"""A tiny run of train.py, as a person would start it, and what it leaves in its folder."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from conftest import ROOT
from safetensors.torch import load_file
from tqdm import tqdm

import model as gpt

TEXT = "the cat sat on the mat and the dog sat on the log. " * 40
N_IDS = len(set(TEXT)) + 1  # the characters, and the end of text
TINY = {
    "dataset": "text.txt",
    "tokenizer": "char",
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "block_size": 16,
    "batch_size": 8,
    "max_iters": 4,
    "log_interval": 1,
    "device": "cpu",
    "out_dir": "run",
}


def flags(**changes: object) -> list[str]:
    """The command line of a tiny run; None leaves an option out."""
    return [f"--{key}={value}" for key, value in {**TINY, **changes}.items() if value is not None]


def read_json(path: Path | str) -> dict:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_rows(out_dir: str = "run", key: str = "train/loss") -> list[dict]:
    """The rows of metrics.jsonl that have a key."""
    text = Path(out_dir, "metrics.jsonl").read_text(encoding="utf-8")
    return [row for row in map(json.loads, text.splitlines()) if key in row]


def losses(out_dir: str = "run") -> list[float]:
    """The training loss of each logged step."""
    return [row["train/loss"] for row in read_rows(out_dir)]


def weights(out_dir: str = "run") -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    return load_file(sorted(Path(out_dir, "checkpoints").iterdir())[-1] / "model.safetensors")


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def patch_forward(monkeypatch, change):
    """Let `change(n, logits, loss)` replace what the n-th training pass of a network returns."""
    forward, calls = gpt.GPT.forward, [0]

    def patched(self, *args, **options):
        logits, loss = forward(self, *args, **options)
        if not self.training:
            return logits, loss
        calls[0] += 1
        return change(calls[0], logits, loss)

    monkeypatch.setattr(gpt.GPT, "forward", patched)


def quiet_bar(*args, **options):
    """A progress bar that leaves stderr to the error message."""
    return tqdm(*args, **{**options, "disable": True})


def program(*argv: str, code: str | None = None, **options) -> subprocess.Popen:
    """train.py in a process of its own; `code` runs before it."""
    start = [str(ROOT / "train.py")] if code is None else ["-c", code]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *start, *argv], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        encoding="utf-8", **options
    )


def wait_for(done, process: subprocess.Popen, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


@contextlib.contextmanager
def ended(process: subprocess.Popen):
    """The process does not outlive the test."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
