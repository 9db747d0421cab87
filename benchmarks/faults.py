"""What a run loses to kills, damaged files and saving: python -m benchmarks.faults --kills=100 --files=10000

kills  train.py on a small text, in a process of its own, ended by SIGKILL at a random moment, and the same
       command again with --resume=auto, until the run ends; then the next run, until there were enough kills.
       After each kill every checkpoint is loaded; each run that ends is held against one that nobody killed.
       One kill in eight comes while the program starts; the others are spread over training and saving.
fuzz   that many damaged files of all formats, as in the tests
share  the time that saving takes in a run of a preset: the median seconds of a save, the flush to the disk
       included, over those plus the seconds of the steps between two saves. With the default options a run
       saves after `save_minutes`, and after each evaluation that is the best so far: the share is that of a
       run whose every evaluation is.
resume seconds from the end of `import torch` to the first step after a resume, with data prepared before
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm import tqdm

import config as configuration
from checkpoint import best_checkpoint, list_checkpoints, load_checkpoint, step_folders
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
TEXT = "the cat sat on the mat and the dog sat on the log. " * 40
STEPS = 200  # of a run that is killed
ARGV = [
    "--dataset=text.txt", "--tokenizer=char", "--n_layer=2", "--n_head=4", "--n_embd=32", "--block_size=16",
    "--batch_size=8", "--dropout=0.1", "--optimizer=muon", f"--max_iters={STEPS}", "--log_interval=1",
    "--eval_interval=5", "--eval_windows=4", "--save_interval=2", "--device=cpu", "--compile=False",
]  # fmt: skip
EARLY = 1 / 8  # share of the kills before the first step
MEASURED = """
import json, sys, time
import torch
began = time.monotonic()
import train

taken, first = {"save": [], "flush": []}, []

def timed(name, call):
    def work(*args, **options):
        start = time.monotonic()
        try:
            return call(*args, **options)
        finally:
            taken[name].append(time.monotonic() - start)
    return work

def starts(*args):
    first.append(time.monotonic() - began)
    return batch_starts(*args)

batch_starts, train.batch_starts = train.batch_starts, starts
train.save_checkpoint = timed("save", train.save_checkpoint)
train.Tracker.flush = timed("flush", train.Tracker.flush)
summary = train.main(sys.argv[1:])
step = summary["tokens_seen"] / summary["steps"] / summary["tokens_per_sec"]
print(json.dumps({**taken, "first": first[0], "step": step}))
"""


@dataclass
class FaultsConfig:
    """One run of the benchmark."""

    kills: int = 100  # of training processes; 0 leaves them out
    files: int = 10_000  # damaged ones; 0 leaves them out
    seed: int = 0  # of the moments and of the damage
    preset: str | None = "config/small.py"  # whose saves and start are measured; none leaves them out
    steps: int = 32  # of the run that they are measured in

    def __post_init__(self) -> None:
        for name, least in (("kills", 0), ("files", 0), ("seed", 0), ("steps", 8)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")


def differences(out_dir: Path, other: Path) -> list[str]:
    """What two runs that ended differ in, the time they took aside: nothing, if they are equal to the bit."""
    found, runs = [], (out_dir, other)
    rows: list[Any] = []
    for run in runs:
        lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        rows.append([{k: x for k, x in row.items() if not k.startswith("perf/")} for row in lines])
    if rows[0] != rows[1]:
        found.append("metrics.jsonl")
    for name, places in {
        "last": [list_checkpoints(run)[-1] for run in runs], "best": [best_checkpoint(run) for run in runs]
    }.items():  # fmt: skip
        if None in places or places[0].name != places[1].name:
            found.append(f"{name}: {places[0]} and {places[1]}")
            continue
        for file in ("model.safetensors", "training.safetensors"):
            one, two = (load_file(place / file) for place in places)
            if one.keys() != two.keys() or not all(torch.equal(one[key], two[key]) for key in one):
                found.append(f"{name}: {file}")
    return found


def unusable(out_dir: Path, newest: int) -> tuple[list[str], int]:
    """What is wrong with a run's checkpoints, and the newest step that loads; `newest` is what was before."""
    found, steps = [], [0]
    for place in step_folders(out_dir):
        try:
            load_checkpoint(place, to_resume=True)
            steps.append(int(place.name[5:]))
        except ValueError as error:
            found.append(str(error))
    if max(steps) < newest:
        found.append(f"{out_dir}: step {newest} was saved, and is gone")
    return found, max(steps)


def start(out_dir: Path, *argv: str) -> subprocess.Popen:
    """train.py on one thread in a process of its own, in the folder above `out_dir`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "train.py"), *ARGV, f"--out_dir={out_dir.name}", *argv]
    with open(out_dir.parent / "output.txt", "w", encoding="utf-8") as output:
        return subprocess.Popen(command, cwd=out_dir.parent, env=env, stdout=output, stderr=output)


def size(path: Path) -> int:
    """The bytes of a file, 0 while there is none."""
    return path.stat().st_size if path.exists() else 0


def wait_for_rows(process: subprocess.Popen, log: Path) -> None:
    """Until a run has taken a step, or has ended: it cuts its log back, then adds to it."""
    least = size(log)
    while process.poll() is None and size(log) <= least:
        least = min(least, size(log))
        time.sleep(0.002)


def finish(process: subprocess.Popen, out_dir: Path) -> None:
    """Wait for a run's orderly end (ValueError, with what it said, where it has none)."""
    if process.wait():
        said = (out_dir.parent / "output.txt").read_text(encoding="utf-8", errors="replace")
        raise ValueError(f"train.py ended with {process.returncode}: {said[-2000:]}")


def uninterrupted(folder: Path) -> tuple[float, float]:
    """A run that nobody kills, in `folder`/straight: seconds before its first row, and until its last."""
    began, log = time.monotonic(), folder / "straight" / "metrics.jsonl"
    process = start(folder / "straight")
    wait_for_rows(process, log)
    first = last = time.monotonic()
    so_far = size(log)
    while process.poll() is None:
        if size(log) > so_far:
            so_far, last = size(log), time.monotonic()
        time.sleep(0.005)
    finish(process, folder / "straight")
    return first - began, last - first


def kill_runs(n: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kill runs n times in all: {"kills", "resumed_bit_equal", "unusable_checkpoints"}."""
    draw, torn, unequal, run, done = random.Random(seed), list[str](), list[str](), 0, 0
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with tqdm(total=n, unit="kill") as bar:
        bar.set_postfix_str("a run without kills")
        starting, training = uninterrupted(folder)
        newest = 0
        while True:
            out_dir = folder / f"run-{run}"
            log = out_dir / "metrics.jsonl"
            process = start(out_dir, "--resume=auto")
            try:
                if done < n:
                    early = draw.random() < EARLY
                    wait = draw.uniform(0, starting if early else training / 3)
                    if not early:
                        wait_for_rows(process, log)
                    try:
                        process.wait(wait)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
                        done += 1
                        bar.update()
                        found, newest = unusable(out_dir, newest)
                        torn += found
                        bar.set_postfix_str(f"run {run}, step {newest} of {STEPS}, {len(torn)} unusable")
                        continue
                finish(process, out_dir)
            finally:
                process.kill()
            unequal += [f"run {run}: {text}" for text in differences(out_dir, folder / "straight")]
            shutil.rmtree(out_dir)
            run, newest = run + 1, 0
            if done == n:
                break
    for text in (*torn, *unequal):
        print(text, file=sys.stderr)
    print(f"{done} kills, {run} runs that ended, {len(unequal)} differences", file=sys.stderr)
    return {"kills": done, "resumed_bit_equal": not unequal, "unusable_checkpoints": len(torn)}


def fuzz_files(n: int, seed: int) -> dict[str, int]:
    """Damaged files, by the engine of the tests: {"fuzzed_files", "fuzz_failures"}."""
    sys.path.append(str(ROOT / "tests"))
    import fuzz

    found = fuzz.run(n, seed)
    for failure in found["failures"]:
        print(failure, file=sys.stderr)
    return {"fuzzed_files": found["files"], "fuzz_failures": len(found["failures"])}


def save_share(save_seconds: float, step_seconds: float, c: TrainConfig) -> float:
    """The share of the time that saving takes where every evaluation is the best so far."""
    steps = [60 * c.save_minutes / step_seconds] if c.save_minutes else []
    steps += [c.save_interval] if c.save_interval else []
    steps += [c.eval_interval] if c.eval_interval and c.keep_best else []
    between = min([*steps, c.max_iters]) * step_seconds
    return save_seconds / (save_seconds + between)


def measure_preset(preset: str, n_steps: int, folder: Path) -> dict[str, float]:
    """A short run of a preset, then the same one resumed: {"save_share_of_time", "resume_seconds"}."""
    c = configuration.parse([preset], TrainConfig, prog="benchmarks.faults", description="").config
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def measured(*argv: str) -> dict[str, Any]:
        command = [sys.executable, "-c", MEASURED, *argv]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, encoding="utf-8", check=False)
        if done.returncode:
            raise ValueError(f"a run of {preset} ended with {done.returncode}: {done.stdout[-500:]}")
        return json.loads(done.stdout.splitlines()[-1])

    out_dir = folder / "preset"
    short = [f"--max_iters={n_steps}", f"--save_interval={n_steps // 8}", "--eval_interval=0"]
    short += ["--final_eval_windows=1"]
    run = measured(preset, *short, f"--out_dir={out_dir}")
    save_seconds = statistics.median(run["save"]) + statistics.median(run["flush"])
    again = measured(f"--resume={out_dir}", f"--max_iters={n_steps + 2}")
    share = save_share(save_seconds, run["step"], c)
    print(
        f"{preset}: {1e3 * save_seconds:.0f} ms for a save, {1e3 * run['step']:.0f} ms for a step: "
        f"{share:.3%} of the time; {again['first']:.1f} s to the first step after a resume", file=sys.stderr
    )  # fmt: skip
    return {"save_share_of_time": share, "resume_seconds": again["first"]}


def main(argv: list[str]) -> dict[str, Any]:
    """Do all of it, and print one JSON object on the last line of standard output."""
    c = configuration.parse(
        argv, FaultsConfig, prog="benchmarks.faults", description="Kills, damaged files, and saving."
    ).config
    result: dict[str, Any] = dict.fromkeys(
        ("kills", "resumed_bit_equal", "unusable_checkpoints", "fuzzed_files", "fuzz_failures",
         "save_share_of_time", "resume_seconds")
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if c.kills:
            result |= kill_runs(c.kills, c.seed, Path(folder))
        if c.preset:
            result |= measure_preset(c.preset, c.steps, Path(folder))
    if c.files:
        result |= fuzz_files(c.files, c.seed)
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    configuration.run_main(main, "benchmarks.faults")
