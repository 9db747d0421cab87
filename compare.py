"""Compare attention kinds on equal terms: python compare.py config/small.py --seeds=3

Trains each kind with several seeds by train.py, on identical batches, measures how each generates, and says
what fewer KV heads cost and save. Any option of train.py with several values is an axis: --norm=post,pre.
Runs that are already there are not made again, so the same command goes on where it was stopped.
"""

import json
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

import config as configuration
from comparison.cells import Cell, begun, finished, make_cells, matched_width, shortened, with_flags
from comparison.figures import save_pngs
from comparison.page import write_page
from comparison.results import summarize, table
from device import check_torch
from measure import machine
from options import TrainConfig
from report import lines
from tracking import Interrupted, resolve_wandb_mode, write_json

TRAIN = Path(__file__).resolve().with_name("train.py")
OWN = ("seeds", "match", "quick", "out_dir", "seed")
PILOT_STEPS, PILOT_ROUNDS = 30, 3  # of --match=seconds, to learn how fast each variant is
POLL_SECONDS = 0.2


@dataclass
class CompareConfig:
    """What is compared, and on what terms; every option of train.py, several values separated by commas."""

    run: TrainConfig = field(default_factory=TrainConfig)
    seeds: int = 3  # runs of each variant, with seed, seed + 1, ...; --seed=1,5,7 names them
    match: Literal["steps", "params", "seconds"] = "steps"  # what is equal: params widens the feed-forward
    quick: bool = False  # an eighth of the steps, to see all of it in minutes; its losses say little

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds}: must be at least 1")


def plan(argv: list[str]) -> tuple[CompareConfig, list[Cell], dict[str, list[str]], Path]:
    """What the command line asks for: the options, the runs, the axes as typed, and the folder of it all."""
    rest, lists = configuration.split_lists(argv, CompareConfig, always=("attention", "n_kv_head", "seed"))
    for key in ("seeds", "match", "quick"):
        if key in lists:
            hint = "; --seed=0,1,2 names the seeds" if key == "seeds" else ""
            raise ValueError(f"--{key}={','.join(lists[key])}: takes one value{hint}")
    seeds = lists.pop("seed", None)
    first = [f"--{key}={values[0]}" for key, values in lists.items() if key not in ("attention", "n_kv_head")]
    about = "Compare attention kinds on equal terms. Several values make an axis: --norm=post,pre"
    parsed = configuration.parse(rest + first, CompareConfig, prog="compare.py", description=about)
    c, presets = parsed.config, [str(path) for path in parsed.presets]
    if seeds is None:
        seeds = [str(c.run.seed + n) for n in range(c.seeds)]
    named = [configuration.parse([f"--seed={seed}"], TrainConfig, prog="", description="") for seed in seeds]
    name = (Path(presets[-1]).stem if presets else "default") + "-quick" * c.quick
    name += "" if c.match == "steps" else f"-{c.match}"
    root = Path(c.run.out_dir or Path("out", "compare", name))
    flags = {key: value for key, value in parsed.explicit.items() if key not in OWN}
    flags |= {"measure_decode": True} | (shortened(c.run) if c.quick else {})
    cells = make_cells(presets, flags, lists, [each.config.seed for each in named], root)
    if c.match == "params":
        cells = [with_flags(cell, matched_width(cell)) for cell in cells]
    return c, cells, lists, root


def match_seconds(cells: list[Cell], root: Path, bar: tqdm, interrupted: Interrupted) -> list[Cell]:
    """The cells with as many steps each as take the time of the baseline's, by short runs taken in turns."""
    variants = {cell.variant: cell for cell in reversed(cells)}  # the first seed of each
    of = {name: with_flags(cell, {"out_dir": ""}).argv for name, cell in variants.items()}
    with suppress(OSError, ValueError):
        known = json.loads((root / "pilot.json").read_text(encoding="utf-8"))
        if known["of"] == of:  # asking the clock again would make other runs of those that are there
            return [with_flags(cell, {"max_iters": known["steps"][cell.variant]}) for cell in cells]
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for n in range(PILOT_ROUNDS):
        for name, cell in variants.items():
            short: dict[str, Any] = {"max_iters": PILOT_STEPS, "eval_interval": 0, "final_eval_windows": 1}
            short |= {"measure_decode": False, "wandb": "off", "out_dir": root / "pilot" / f"{cell.name}-{n}"}
            trial = with_flags(cell, short)
            bar.set_description(f"timing {name}", refresh=False)
            problem = None if finished(trial) else run_cell(trial, root, bar, interrupted)
            if interrupted.signal:
                return cells
            if problem:
                raise ValueError(f"{name}: {problem}")
            rates[name].append(finished(trial)["tokens_per_sec"])  # type: ignore[index]
    rate = {name: statistics.median(each) for name, each in rates.items()}
    steps = {}
    for name, cell in variants.items():
        same_terms = [other for other in variants.values() if other.axes == cell.axes]
        slow = next((other for other in same_terms if other.variant.split()[0] == "mha"), same_terms[0])
        steps[name] = max(1, round(cell.config.max_iters * rate[name] / rate[slow.variant]))
    write_json(root / "pilot.json", {"of": of, "tokens_per_sec": rate, "steps": steps})
    return [with_flags(cell, {"max_iters": steps[cell.variant]}) for cell in cells]


def run_cell(cell: Cell, root: Path, bar: tqdm, interrupted: Interrupted) -> str | None:
    """Train one cell in a process of its own; what went wrong, or none. What it prints goes to root/logs.

    A process of its own has its own peak of memory, and can die alone.
    """
    if begun(cell):
        cell = with_flags(cell, {"resume": "auto"})  # from its last checkpoint, where it was stopped
    log = root / "logs" / f"{cell.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    before, told = bar.n, False
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, str(TRAIN), *cell.argv], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,  # a Ctrl-C comes here, and is passed on once
        )  # fmt: skip
        started = time.time()
        while process.poll() is None:
            if interrupted.signal and not told:
                process.send_signal(interrupted.signal)
                told = True
            bar.update(max(0, before + steps_done(cell.out_dir, started) - bar.n))
            time.sleep(POLL_SECONDS)
    done = process.returncode == 0
    bar.update(before + (cell.config.max_iters if done else 0) - bar.n)
    if done or interrupted.signal:
        return None
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    died = f"killed by signal {-process.returncode}; " if process.returncode < 0 else ""
    return f"{died}{said[-1].strip()} (exit code {process.returncode}, see {log})"


def steps_done(out_dir: Path, since: float) -> int:
    """The last step in a run's log, if it was written after a time."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        path = out_dir / "metrics.jsonl"
        if path.stat().st_mtime >= since:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                return int(json.loads(file.read().splitlines()[-1])["step"])
    return 0


def result(cell: Cell, summary: dict[str, Any]) -> dict[str, Any]:
    """A cell's row of the report, from its summary.json."""
    m = cell.config.model
    return {
        "variant": cell.variant, "attention": cell.variant.split()[0].split("-")[0], "seed": cell.seed,
        "axes": cell.axes,
        **{key: summary.get(key) for key in (
            "n_head", "n_kv_head", "n_params", "tokens_seen", "steps", "train_seconds", "val_loss",
            "val_bits_per_byte", "peak_memory_bytes", "decode_tokens_per_sec", "prefill_tokens_per_sec",
            "decode_dtype", "decode", "batches_sha256",
        )},
        "train_tokens_per_sec": summary.get("tokens_per_sec"),
        "kv_cache_bytes_full_context": summary.get("kv_cache_bytes_measured"),
        "kv_cache_bytes_formula": summary.get("kv_cache_bytes_formula"),
        "feed_forward_width": m.n_inner, "device": summary.get("device"), "out_dir": str(cell.out_dir),
    }  # fmt: skip


def identical_batches(rows: list[dict[str, Any]]) -> bool | None:
    """Whether the kinds saw the same ids in the same order, by seed; none where they took different steps."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row["seed"], row["axes"]], default=str), []).append(row)
    if any(len({row["steps"] for row in group}) > 1 for group in groups.values()):
        return None
    return all(len({row["batches_sha256"] for row in group}) == 1 for group in groups.values())


def make_report(
    c: CompareConfig, argv: list[str], cells: list[Cell], axes: dict[str, list[str]], failed: list[Any],
    root: Path
) -> dict[str, Any]:
    """report.json: what was asked, what came out of each run, and what it adds up to."""
    rows = [result(cell, summary) for cell in cells if (summary := finished(cell))]
    run = cells[0].config
    largest: dict[str, Any] = next((row["decode"][-1] for row in rows if row["decode"]), {})
    return {
        "name": root.name, "command": f"python compare.py {shlex.join(argv)}", "date": f"{date.today()}",
        "machine": machine(torch.device(rows[0]["device"] if rows else "cpu")),
        "axes": {"attention": list(dict.fromkeys(cell.variant.split()[0] for cell in cells)), **axes},
        "match": c.match,
        "quick": c.quick, "seeds": sorted({cell.seed for cell in cells}),
        "data": {
            "dataset": run.dataset, "tokenizer": run.tokenizer, "block_size": run.model.block_size,
            "tokens_per_step": run.tokens_per_step,
        },
        "identical_batches": identical_batches(rows),
        "decode_at": {key: largest.get(key) for key in ("batch", "context")},
        "cells": rows, "failed": failed, "summary": summarize(rows),
    }  # fmt: skip


def describe(c: CompareConfig, cells: list[Cell], todo: list[Cell], root: Path) -> dict[str, str]:
    """What is about to be done, for people."""
    variants = {cell.variant: cell for cell in cells}
    terms = {
        "steps": "equal steps, equal tokens",
        "params": "equal steps and tokens, and as many parameters as mha",
        "seconds": "equal seconds of training, so more steps where a step is faster",
    }
    text = {
        "compare": f"{', '.join(variants)}; {len({cell.seed for cell in cells})} seeds each",
        "terms": terms[c.match] + (", an eighth of the steps (--quick)" if c.quick else ""),
    }
    for name, cell in variants.items():
        m = cell.config.model
        wider = f", feed-forward {m.n_inner} wide" if m.n_inner != 4 * m.n_embd else ""
        text[name] = f"{cell.config.max_iters:,} steps of {cell.config.tokens_per_step:,} tokens{wider}"
    there = len(cells) - len(todo)
    text["runs"] = f"{len(cells)}" + (f", of which {there} are there already" if there else "")
    return text | {"folder": str(root)}


def publish(report: dict[str, Any], root: Path) -> None:
    """Write report.json, report.html and the pictures, and print the table."""
    write_json(root / "report.json", report)
    print(table(report["summary"]))
    made = [root / "report.json"]
    try:
        made += [write_page(report, root / "report.html"), *save_pngs(report, root)]
    except ImportError as error:
        print(f"no pictures: {error}; pip install matplotlib", file=sys.stderr)
    print(lines({"report": ", ".join(str(path) for path in made[:2])}))


def main(argv: list[str]) -> dict[str, Any]:
    """Run the grid, write and print the report; exit code 1 where a run failed, 128 + signal if ended."""
    check_torch()
    c, cells, axes, root = plan(argv)
    todo = [cell for cell in cells if not finished(cell)]
    if c.run.wandb != "off" and todo:
        mode, why = resolve_wandb_mode(c.run.wandb)
        print(f"wandb: {mode}: {why}", file=sys.stderr)
        group = c.run.wandb_group or f"compare-{root.name}"
        cells = [with_flags(cell, {"wandb": mode, "wandb_group": group}) for cell in cells]
    failed: list[dict[str, Any]] = []
    refresh = 0.5 if sys.stderr.isatty() else 15
    with Interrupted() as interrupted, tqdm(unit="step", mininterval=refresh, miniters=1) as bar:
        if c.match == "seconds":
            cells = match_seconds(cells, root, bar, interrupted)
        todo = [cell for cell in cells if not finished(cell)]
        bar.write(lines(describe(c, cells, todo, root)), file=sys.stdout)
        bar.reset(sum(cell.config.max_iters for cell in todo))
        for n, cell in enumerate(todo, 1):
            if interrupted.signal:
                break
            bar.set_description(f"{n} of {len(todo)}, {cell.name}", refresh=False)
            if problem := run_cell(cell, root, bar, interrupted):
                bar.write(f"{cell.name} failed: {problem}", file=sys.stderr)
                failed.append({
                    "variant": cell.variant, "seed": cell.seed, "error": problem, "out_dir": str(cell.out_dir)
                })  # fmt: skip
    report = make_report(c, argv, cells, axes, failed, root)
    if report["cells"]:
        publish(report, root)
    if interrupted.signal:
        print("stopped; the same command goes on from here", file=sys.stderr)
        sys.exit(128 + interrupted.signal)
    if failed:
        what = f"{len(failed)} of {len(cells)} runs failed, see {root / 'logs'}"
        raise ValueError(f"{what}; the same command tries them again, and keeps the others")
    return report


if __name__ == "__main__":
    configuration.run_main(main, "compare.py")
