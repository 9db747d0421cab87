"""A run and its folder: metrics.jsonl as it goes, config.json and summary.json; wandb; an orderly end."""

import functools
import importlib.util
import json
import math
import os
import platform
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK, OWNER = ".lock", ".owner"
PROBE = "import sys, wandb; sys.exit(0 if wandb.login(prompt=False, verify=True) else 3)"
PROBE_SECONDS, INIT_SECONDS, FINISH_SECONDS, GRACE_SECONDS = 15, 20, 60, 15  # the longest waits for wandb


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def resolve_wandb_mode(want: str) -> tuple[str, str]:
    """The mode that will work (online, offline, off) for auto or one of these, and why, for people.

    auto takes WANDB_MODE where it is set. Never asks; answers within PROBE_SECONDS.
    """
    why = "as asked"
    if want == "auto" and (said := os.environ.get("WANDB_MODE")):
        want, why = {"disabled": "off", "dryrun": "offline"}.get(said, said), f"WANDB_MODE={said}"
    if want != "off" and importlib.util.find_spec("wandb") is None:
        return "off", "not installed: pip install wandb"
    if want in ("off", "offline"):
        return want, why
    # in a process that can be ended: in this one, wandb may wait for ever for a server that stalls
    env = {**os.environ, "WANDB_MODE": "online", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    probe = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(probe, env=env, timeout=PROBE_SECONDS, start_new_session=True, **quiet)
    except subprocess.TimeoutExpired:
        return "offline", f"no answer from the server within {PROBE_SECONDS} s"
    if done.returncode == 0:
        return "online", "logged in"
    return "offline", "no API key: wandb login" if done.returncode == 3 else "no server, or API key refused"


class WandbSink:
    """The rows of a run in wandb too; `config` is the run's, with the options wandb, wandb_project, ...

    Nothing here raises or waits without end: what fails is one line on stderr, and the run goes on without.
    Runs beside each other share the folder `out_dir`/../wandb. The run's id is kept in `out_dir`/run_id for
    whoever resumes it; wandb leaves out rows of steps it has already seen, metrics.jsonl does not. A run of a
    sweep has the project and the id that the sweep gives it.
    """

    def __init__(self, out_dir: Path, config: dict[str, Any]) -> None:
        self._run: Any = None
        self._broken = False
        mode, why = resolve_wandb_mode(config["wandb"])
        self._met_server = mode == "online"
        while mode != "off" and self._run is None:
            try:
                self._run = self._init(mode, out_dir, config)
            except Exception as error:
                mode, why = "offline" if mode == "online" else "off", _line(error)
        where = f"; see it with: wandb leet {out_dir.parent / 'wandb'}" if mode == "offline" else ""
        self._say(mode, f"{why}; {self._run.url}" if mode == "online" else why + where)

    def _init(self, mode: Any, out_dir: Path, config: dict[str, Any]) -> Any:
        # else it reports on its own use, offline too, and its exit waits for a network that is gone
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")  # one line of ours instead
        import wandb

        name, id_file = f"{config['attention']}-s{config['seed']}", out_dir / "run_id"
        place: dict[str, Any] = {}
        if not os.environ.get("WANDB_SWEEP_ID"):  # else the sweep says which project, and which id
            if not id_file.exists():
                id_file.write_text(f"{name}-{secrets.token_hex(4)}", encoding="utf-8")
            # after a failed attempt the id is taken until this process ends
            another = "-offline" * (mode == "offline" and self._met_server)
            run_id = id_file.read_text(encoding="utf-8") + another
            place = {"project": config["wandb_project"], "id": run_id, "resume": "allow"}
        settings: dict[str, Any] = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        settings |= {"finish_timeout_raises": True, "silent": True}
        # what is printed holds paths and prompts; a kill may lose the seconds since the last flush
        settings |= {"console": "off", "x_transaction_log_flush_interval": 2.0}
        known = {key: value for key, value in settings.items() if key in wandb.Settings.model_fields}
        run = wandb.init(
            **place, group=config["wandb_group"], job_type="train", name=config["wandb_run_name"] or name,
            tags=[config["attention"]], config=config, dir=out_dir.parent, mode=mode,
            settings=wandb.Settings(**known)
        )
        for keys in ("train/*", "val/*", "perf/*"):
            run.define_metric(keys, step_metric="tokens")
        return run

    def _say(self, what: str, text: str) -> None:
        tell(f"wandb: {what}: {text}")

    def _try(self, what: str, call: Callable[[], object], kept: str = "metrics.jsonl has every row") -> None:
        try:
            call()
        except Exception as error:
            if not self._broken:
                self._say(what, f"failed, but {kept}; {_line(error)}")
            self._broken = True

    def log(self, step: int, row: dict[str, Any]) -> None:
        """Add to the row of a step."""
        if self._run and not self._broken:
            self._try(f"step {step}", lambda: self._run.log(row, step=step))

    def _log_table(self, key: str, rows: list[dict[str, Any]]) -> None:
        import wandb

        data = [[row[name] for name in rows[0]] for row in rows]
        self._run.log({key: wandb.Table(columns=[*rows[0]], data=data)})  # joins the row of the last step

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Add the summary, each number under its own name, `decode` as a table, and close the run."""
        flat = {name: x for name, x in summary.items() if name != "decode"}
        rows = summary.get("decode")

        def end() -> None:
            self._try("summary", lambda: self._run.summary.update(flat))
            if rows:  # after the rest: a server that stalls may hold a table up
                log = functools.partial(self._log_table, "decode/table", rows)
                self._try("decode/table", log, "summary.json has it")
            self._try("finish", lambda: self._run.finish(exit_code=exit_code))

        def leave() -> None:
            threading.main_thread().join()
            time.sleep(GRACE_SECONDS)
            try:
                sys.stdout.flush()
            finally:
                os._exit(exit_code)

        if self._met_server:  # what wandb does when the process ends may wait for ever too
            threading.Thread(target=leave, daemon=True).start()
        if self._run:
            worker = threading.Thread(target=end, daemon=True)
            worker.start()
            worker.join(FINISH_SECONDS + GRACE_SECONDS)
            if worker.is_alive():
                self._broken = True
                self._say("finish", "takes too long, but metrics.jsonl has every row")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class Tracker:
    """The log of one run: each row is one JSON line, on disk as soon as it is logged.

    Keys: `step` (updates done), `tokens` (seen so far), `train/loss` (nats per token), `train/lr`,
    `train/grad_norm`, `perf/tokens_per_sec`, `perf/step_ms`, `perf/mfu` (share of the peak, 0 to 1),
    `perf/train_seconds` (so far), `perf/peak_memory_bytes`, `val/loss`, `val/bits_per_byte`,
    `val/perplexity`. A number that is not finite is null. Where `config["wandb"]` is not off, wandb has the
    same rows. An exception inside `with tracker` closes both; `finish` is the orderly end.
    """

    def __init__(
        self, out_dir: Path, config: dict[str, Any], resumed_at: int | None = None, evaluate: bool = False
    ) -> None:
        """`resumed_at`: keep the rows up to this step; `evaluate`: but not this step's evaluation."""
        self.out_dir = out_dir
        write_json(out_dir / "config.json", config)
        path = out_dir / "metrics.jsonl"
        self._written = 0 if resumed_at is None else _bytes_until(path, resumed_at, evaluate)
        self._pending = b""
        self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115 - stays open
        self._write()
        self._wandb = WandbSink(out_dir, config) if config.get("wandb", "off") != "off" else None

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind:
            self._close({}, 1)

    def log(self, step: int, row: dict[str, float | int]) -> None:
        """Append one row; `step` is the one counter that training and evaluation share."""
        # an fp16 step that the loss scaler skips has an infinite gradient norm, which JSON has no word for
        clean = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._pending += (json.dumps({"step": step, **clean}) + "\n").encode()
        self._write()
        if self._wandb:
            self._wandb.log(step, clean)

    def _write(self) -> None:
        """Put what is pending behind what is known to be written; on a full disk, keep it for next time."""
        try:
            self._file.seek(self._written)
            self._file.truncate()
            while self._pending:  # a write may take a part only
                n = self._file.write(self._pending)
                self._pending, self._written = self._pending[n:], self._written + n
        except OSError as error:
            tell(f"metrics.jsonl can't be written ({error.strerror}); its rows wait in memory")

    def flush(self) -> None:
        """Push the rows to the disk itself: before a checkpoint that they belong to."""
        self._write()
        os.fsync(self._file.fileno())

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json and close the log; `summary["signal"]` tells wandb what ended the run."""
        write_json(self.out_dir / "summary.json", summary)
        self._close(summary, 128 + summary["signal"] if summary.get("signal") else 0)

    def _close(self, summary: dict[str, Any], exit_code: int) -> None:
        if self._wandb:
            self._wandb.finish({name: x for name, x in summary.items() if x is not None}, exit_code)
        self._file.close()


def _bytes_until(path: Path, step: int, evaluate: bool) -> int:
    """Where a log's whole lines up to a step end; what comes behind them, a resumed run does again."""
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            row = json.loads(line)
            if not line.endswith(b"\n") or row["step"] > step:
                break
            if evaluate and row["step"] == step and "val/loss" in row:
                break
        except (ValueError, KeyError, TypeError):
            break
        end += len(line)
    return end


def tell(text: str) -> None:
    """A line on standard error, above a progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


@contextmanager
def claim(out_dir: Path, keep: bool = False) -> Iterator[None]:
    """Make `out_dir` and hold it for this process, so that no other run writes into it.

    An earlier run in it is moved to `<out_dir>~1`, `~2`, ... unless `keep`. The lock is the system's, and is
    gone when the process is, however it ends. Errors: ValueError that names the process that holds it.
    """
    lock = _lock(out_dir)
    try:
        if not keep and any((out_dir / name).exists() for name in ("metrics.jsonl", "checkpoints")):
            n = 1
            while (kept := out_dir.with_name(f"{out_dir.name}~{n}")).exists():
                n += 1
            (out_dir / OWNER).unlink(missing_ok=True)
            if os.name == "nt":  # which can't rename a folder with an open file
                lock.release()
            out_dir.rename(kept)
            lock.release()
            lock = _lock(out_dir)
            print(f"an earlier run was in {out_dir}: it is now in {kept}")
        yield
    finally:
        (out_dir / OWNER).unlink(missing_ok=True)
        lock.release()


def _lock(out_dir: Path) -> Any:
    from filelock import FileLock, Timeout

    out_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out_dir / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        try:
            owner = (out_dir / OWNER).read_text(encoding="utf-8")
        except OSError:
            owner = "another process"
        raise ValueError(f"{out_dir} is in use by {owner}: wait for it, or give another --out_dir") from None
    owner = f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    try:
        (out_dir / OWNER).write_text(owner, encoding="utf-8")
    except OSError:
        lock.release()
        raise
    return lock


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
