"""A run and its folder: metrics.jsonl as it goes, config.json and summary.json, and an orderly end."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


class Tracker:
    """The log of one run: each row is one JSON line, on disk as soon as it is logged.

    Keys: `step` (updates done), `tokens` (seen so far), `train/loss` (nats per token), `train/lr`,
    `train/grad_norm`, `perf/tokens_per_sec`, `perf/step_ms`, `perf/peak_memory_bytes`, `val/loss`,
    `val/bits_per_byte`, `val/perplexity`. A number that is not finite is null.
    """

    def __init__(self, out_dir: Path, config: dict[str, Any]) -> None:
        self.out_dir = out_dir
        write_json(out_dir / "config.json", config)
        self._file = open(out_dir / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - stays open

    def log(self, step: int, row: dict[str, float | int]) -> None:
        """Append one row; `step` is the one counter that training and evaluation share."""
        # an fp16 step that the loss scaler skips has an infinite gradient norm, which JSON has no word for
        clean = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps({"step": step, **clean}) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json and close the log."""
        write_json(self.out_dir / "summary.json", summary)
        self._file.close()


def make_room(out_dir: Path) -> None:
    """Move an earlier run in `out_dir` to `<out_dir>~1`, `~2`, ...: no run writes into another."""
    if any((out_dir / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        n = 1
        while (kept := out_dir.with_name(f"{out_dir.name}~{n}")).exists():
            n += 1
        out_dir.rename(kept)
        print(f"an earlier run was in {out_dir}: it is now in {kept}")
    out_dir.mkdir(parents=True, exist_ok=True)


class Interrupted:
    """SIGINT and SIGTERM ask for an end after the current step; a second one ends at once."""

    def __enter__(self) -> "Interrupted":
        self.signal = 0

        def handle(number: int, frame: Any) -> None:
            if self.signal:
                os._exit(128 + number)
            self.signal = number

        self._before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
