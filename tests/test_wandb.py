"""Runs in wandb: off by default, offline without an account, and never in the way of training.

wandb itself runs in child processes with a server on this machine that answers as much as it has to.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from tiny_run import flags, patch_forward, read_json, read_rows, weights
from wandb_stub import CONFIG, Server, ended, environment, needs_wandb, put_fake, records, start

import tracking
import train
from tracking import Tracker, resolve_wandb_mode

needs_signals = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to a process")
N_ROWS = 8
# a run of N_ROWS steps without a model; MEDDLE stands for what a test does to it
CHILD = """
import json, sys, time
from pathlib import Path
import tracking
config, pause = json.loads(sys.argv[1]), float(sys.argv[2])
MEDDLE
out_dir = Path("out", "gqa")
out_dir.mkdir(parents=True, exist_ok=True)
tracker = tracking.Tracker(out_dir, config)
with tracker:
    for step in range(1, 9):
        tracker.log(step, {"tokens": 100 * step, "train/loss": 1 / step})
        if step % 4 == 0:
            tracker.log(step, {"tokens": 100 * step, "val/loss": 2 / step})
        time.sleep(pause)
tracker.finish({"attention": "gqa", "val_loss": 0.25, "mfu": None, "signal": 0})
print("done", flush=True)
"""
FAST = "tracking.PROBE_SECONDS, tracking.INIT_SECONDS, tracking.FINISH_SECONDS, tracking.GRACE_SECONDS = "


def child(folder: Path, mode: str, *, meddle: str = "", pause: float = 0, env: dict[str, str], **options):
    """Start the run of CHILD."""
    config = json.dumps({**CONFIG, "wandb": mode})
    return start(folder, CHILD.replace("MEDDLE", meddle), config, str(pause), env=env, **options)


def rows_of_wandb(folder: Path) -> list[dict]:
    """Its history, without the times that it adds itself."""
    rows = [found["item"] for found in records(folder, "history")]
    return [{key: x for key, x in row.items() if key not in ("_runtime", "_timestamp")} for row in rows]


def rows_by_step(out_dir: Path) -> list[dict]:
    """metrics.jsonl with the rows of a step made one, which is how wandb has them."""
    merged: dict[int, dict] = {}
    for line in (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        merged.setdefault(row["step"], {"_step": row.pop("step")}).update(row)
    return list(merged.values())


def all_rows_on_disk(folder: Path) -> bool:
    return [row["_step"] for row in rows_by_step(folder / "out" / "gqa")] == list(range(1, N_ROWS + 1))


# --- off


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, *args):
        if name.split(".")[0] == "wandb":
            raise ImportError("blocked")
sys.meta_path.insert(0, Blocker())
sys.addaudithook(lambda event, args: event in ("socket.connect", "socket.getaddrinfo") and sys.exit(9))
import train
train.main(sys.argv[1:])
assert "wandb" not in sys.modules
"""


def test_by_default_wandb_is_not_needed_and_nothing_is_sent_LOG_4(work):
    with Server() as server:
        env = environment(work, f"http://127.0.0.1:{server.server_port}", key=True, WANDB_MODE="online")
        assert not [line for line in ended(start(work, BLOCKED, *flags(), env=env)) if "wandb" in line]
        assert server.n_connections == 0
    assert len(read_rows()) == 4 and read_json("run/config.json")["wandb"] == "off"
    assert not (work / "wandb").exists() and not (work / "run" / "run_id").exists()


def test_a_tracker_without_wandb_has_no_sink_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(tracking, "WandbSink", None)
    threads = threading.active_count()
    for config in ({}, {"wandb": "off"}):
        with Tracker(tmp_path, config) as tracker:
            tracker.log(1, {"train/loss": 2.0})
        tracker.finish({})
    assert threading.active_count() == threads


@pytest.mark.parametrize("mode", ["auto", "online", "offline"])
def test_where_wandb_is_missing_a_run_does_without_LOG_4(mode, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # so that it can't be imported
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with Tracker(tmp_path, {**CONFIG, "wandb": mode}) as tracker:
        tracker.log(1, {"train/loss": 2.0})
    tracker.finish({"val_loss": 2.0})
    assert capsys.readouterr().err == "wandb: off: not installed: pip install wandb\n"
    assert len(read_rows(tmp_path)) == 1 and read_json(tmp_path / "summary.json") == {"val_loss": 2.0}


@needs_wandb
@pytest.mark.parametrize(
    "said, mode", [("disabled", "off"), ("offline", "offline"), ("dryrun", "offline"), ("online", "online")]
)
def test_auto_does_what_the_environment_says(said, mode, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", said)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: types.SimpleNamespace(returncode=0))
    assert resolve_wandb_mode("auto")[0] == mode
    for flag in ("off", "offline", "online"):  # which say it louder
        assert resolve_wandb_mode(flag)[0] == flag


@needs_wandb
@pytest.mark.parametrize("code, mode", [(0, "online"), (3, "offline"), (1, "offline"), (-9, "offline")])
def test_online_needs_a_probe_that_ends_well(code, mode, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: types.SimpleNamespace(returncode=code))
    assert {resolve_wandb_mode(flag)[0] for flag in ("auto", "online")} == {mode}


# --- offline


@needs_wandb
def test_an_offline_run_has_all_that_metrics_jsonl_has_and_sends_nothing_LOG_5_LOG_2(work):
    code = "import sys, train; train.main(sys.argv[1:])"
    options = flags(attention="gqa", n_kv_head=2, seed=3, eval_interval=2)
    with Server() as server:
        env = environment(work, f"http://127.0.0.1:{server.server_port}", key=True)
        process = start(work, code, *options, "--wandb=offline", "--wandb_group=study", env=env)
        lines = [x for x in ended(process) if "wandb" in x]
        assert lines == ["wandb: offline: as asked; see it with: wandb leet wandb"]
        assert server.n_connections == 0
    (run,) = records(work, "run")
    assert (run["project"], run["run_group"], run["job_type"]) == ("headcount", "study", "train")
    assert run["tags"] == ["gqa"] and run["display_name"] == "gqa-s3"
    assert run["run_id"] == Path("run", "run_id").read_text(encoding="utf-8")
    config = run["config"]["update"]
    assert {key: x for key, x in config.items() if key != "_wandb"} == read_json("run/config.json")
    axes = {found["glob_name"]: found["step_metric"] for found in records(work, "metric")}
    assert axes == {"train/*": "tokens", "val/*": "tokens", "perf/*": "tokens"}
    rows = rows_by_step(work / "run")
    assert rows_of_wandb(work) == rows
    assert [row["_step"] for row in rows] == [1, 2, 3, 4] and "val/loss" in rows[1] and "val/loss" in rows[3]
    summary: dict = {}
    for found in records(work, "summary"):
        summary |= found["update"]
    wanted = {key: x for key, x in read_json("run/summary.json").items() if x is not None}
    assert {key: summary[key] for key in wanted} == wanted
    assert wanted.keys() >= {"attention", "n_kv_head", "val_loss", "tokens_per_sec"}
    assert wanted["kv_cache_bytes_full_context"] > 0
    assert [found.get("exit_code", 0) for found in records(work, "exit")] == [0]
    # and training is the same as without
    logged = weights()
    train.main([*options, "--out_dir=other"])
    assert all((weights("other")[name] == x).all() for name, x in logged.items())


@needs_wandb
@needs_signals
def test_a_terminal_without_an_account_is_asked_nothing(tmp_path):
    import pty

    master, terminal = pty.openpty()
    try:
        same = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        processes = []
        for mode in ("auto", "online"):
            (tmp_path / mode).mkdir()
            env = environment(tmp_path)
            processes.append(child(tmp_path / mode, mode, env=env, start_new_session=True, **same))
        for process in processes:
            try:
                assert process.wait(60) == 0
            finally:
                process.kill()
        shown = os.read(master, 100_000).decode()
    finally:
        os.close(master)
        os.close(terminal)
    said = sorted(line for line in shown.splitlines() if line != "done")
    assert said == ["wandb: offline: no API key: wandb login; see it with: wandb leet out/wandb"] * 2
    for mode in ("auto", "online"):
        assert all_rows_on_disk(tmp_path / mode)
        assert rows_of_wandb(tmp_path / mode / "out") == rows_by_step(tmp_path / mode / "out" / "gqa")


@needs_wandb
@needs_signals
def test_a_signal_loses_no_row(work):
    code = "import sys, train; train.main(sys.argv[1:])"
    options = flags(wandb="offline", max_iters=1_000_000, dataset=work / "text.txt", log_interval=5)
    numbers, runs = (signal.SIGINT, signal.SIGTERM), []
    for number in numbers:
        (work / number.name).mkdir()
        env = environment(work)
        runs.append(start(work / number.name, code, *options, env=env, start_new_session=True))
    try:
        for number, process in zip(numbers, runs, strict=True):
            out_dir = work / number.name / "run"
            while not ((out_dir / "metrics.jsonl").exists() and len(read_rows(out_dir)) >= 3):
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            os.killpg(process.pid, number)  # the whole group, as a terminal and Slurm do
    finally:
        for number, process in zip(numbers, runs, strict=True):
            ended(process, 128 + number)
    for number in numbers:
        assert rows_of_wandb(work / number.name) == rows_by_step(work / number.name / "run")
        assert [found["exit_code"] for found in records(work / number.name, "exit")] == [128 + number]


# --- a server


@needs_wandb
def test_a_server_that_answers_gets_each_row_once_LOG_8(tmp_path):
    with Server() as server:
        env = environment(tmp_path, f"http://127.0.0.1:{server.server_port}", key=True)
        (line,) = ended(child(tmp_path, "auto", env=env))
    run_id = (tmp_path / "out" / "gqa" / "run_id").read_text(encoding="utf-8")
    assert line.startswith("wandb: online: logged in; http") and run_id in line
    assert {run["name"] for run in server.runs} == {run_id} and server.runs[0]["groupName"] == "study"
    times = ("_runtime", "_timestamp")
    rows = [{key: x for key, x in row.items() if key not in times} for row in server.history]
    assert rows == rows_by_step(tmp_path / "out" / "gqa") and all_rows_on_disk(tmp_path)


SERVERS = {  # where it stalls, seconds for probe, init, finish and grace, seconds between rows
    "none": ("", "2, 2, 2, 2", 0),
    "stalls": ("Viewer", "3, 2, 2, 2", 0),
    "stalls at init": ("UpsertBucket", "30, 2, 2, 2", 0),
    "stalls at the rows": ("file_stream", "30, 20, 2, 2", 0.2),
}


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """Runs with each of SERVERS, all at once as they mostly wait: their folders and what they said."""
    folders, servers, processes = {}, [], {}
    for name, (stalls_at, seconds, pause) in SERVERS.items():
        folder = folders[name] = tmp_path_factory.mktemp("cut_off")
        server = Server(stalls_at).__enter__()
        servers.append(server)
        url = f"http://127.0.0.1:{server.server_port if stalls_at else 9}"
        env = environment(folder, url, key=True)
        processes[name] = child(folder, "auto", env=env, meddle=FAST + seconds, pause=pause)
    try:
        yield {name: (folders[name], ended(processes[name])) for name in SERVERS}
    finally:
        for server in servers:
            server.__exit__()


@needs_wandb
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_is_gone_holds_nothing_up_and_loses_nothing(name, cut_off):
    folder, said = cut_off[name]
    assert all_rows_on_disk(folder) and read_json(folder / "out" / "gqa" / "summary.json")["val_loss"] == 0.25
    if name == "stalls at the rows":
        assert len(said) == 2 and said[0].startswith("wandb: online: ")
        assert said[1].startswith("wandb: finish: failed, but metrics.jsonl has every row; TimeoutError: ")
        return
    (line,) = said
    assert line.startswith("wandb: offline: ") and line.endswith("; see it with: wandb leet out/wandb")
    assert {"none": "no server" in line or "no answer" in line, "stalls": "no answer" in line}.get(name, True)
    assert name == "stalls at init" or rows_of_wandb(folder / "out") == rows_by_step(folder / "out" / "gqa")


@needs_wandb
@pytest.mark.parametrize("where", ["finish", "at exit"])
def test_an_end_that_never_comes_is_cut_short(where, tmp_path):
    meddle = FAST + "20, 20, 1, 1\n" + {
        "finish": "import wandb; wandb.Run.finish = lambda *args, **options: time.sleep(600)",
        "at exit": "import atexit; tracking.resolve_wandb_mode = lambda want: ('online', 'x')\n"
        "import wandb; real = wandb.init\n"
        "def init(**options):\n"
        "    atexit.register(time.sleep, 600)\n"
        "    return real(**{**options, 'mode': 'offline'})\n"
        "wandb.init = init",
    }[where]
    said = ended(child(tmp_path, "offline", env=environment(tmp_path), meddle=meddle))
    assert all_rows_on_disk(tmp_path)
    if where == "finish":
        assert said[1:] == ["wandb: finish: takes too long, but metrics.jsonl has every row"]


# --- wandb that fails


KILL = """
log = tracking.Tracker.log
def killing(self, step, row):
    log(self, step, row)
    if step == 3:
        import os, signal
        for children in Path("/proc/self/task").glob("*/children"):
            for child in children.read_text(encoding="utf-8").split():
                os.kill(int(child), signal.SIGKILL)
tracking.Tracker.log = killing
"""


@needs_wandb
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for the process in /proc")
def test_wandbs_own_process_may_die(tmp_path):
    said = ended(child(tmp_path, "offline", env=environment(tmp_path), meddle=KILL, pause=0.1))
    assert all_rows_on_disk(tmp_path) and read_json(tmp_path / "out/gqa/summary.json")["val_loss"] == 0.25
    ours = [line for line in said if line.startswith("wandb: ")]
    assert len(ours) == 2 and "failed, but metrics.jsonl has every row" in ours[1]


@pytest.fixture
def fake(monkeypatch):
    """Put a FakeRun in wandb's place."""
    return functools.partial(put_fake, monkeypatch)


def said_of_wandb(err: str) -> list[str]:
    return [line for line in re.split("[\r\n]+", err) if line.startswith("wandb: ")]


def test_a_run_is_opened_once_and_closed_once_LOG_8(work, fake, capsys):
    run = fake()
    train.main(flags(wandb="offline", wandb_run_name="mine", eval_interval=2))
    assert (run.count("init"), run.count("finish"), run.count("summary")) == (1, 1, 1)
    assert run.calls[0][1]["name"] == "mine" and run.calls[-1] == ("finish", 0)
    lines = Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [what for name, what in run.calls if name == "log"] == [json.loads(line) for line in lines]
    (line,) = said_of_wandb(capsys.readouterr().err)
    assert line == "wandb: offline: as asked; see it with: wandb leet wandb"


@pytest.mark.parametrize("fails", ["init", "define_metric", "log", "summary", "finish"])
def test_wandb_that_fails_is_one_line_and_training_goes_on(fails, work, fake, capsys):
    run = fake(fails)
    summary = train.main(flags(wandb="offline"))
    assert len(read_rows()) == 4 and read_json("run/summary.json") == summary and summary["steps"] == 4
    said = said_of_wandb(capsys.readouterr().err)
    if fails in ("init", "define_metric"):
        assert said == ["wandb: off: RuntimeError: out of order"] and run.count("log") == 0
    else:
        where = "step 3" if fails == "log" else fails
        assert len(said) == 2 and said[1].startswith(f"wandb: {where}: failed")
        assert said[1].endswith("metrics.jsonl has every row; RuntimeError: out of order")
        assert run.count("finish") == 1 and run.count("log") == (3 if fails == "log" else 5)
    assert run.count("init") == 1


def test_a_run_that_fails_is_closed_as_failed(work, fake, monkeypatch):
    run = fake()

    def change(n, logits, loss):
        if n == 3:
            raise RuntimeError("no luck")
        return logits, loss

    patch_forward(monkeypatch, change)
    with pytest.raises(RuntimeError, match="no luck"):
        train.main(flags(wandb="offline"))
    assert run.calls[-1] == ("finish", 1) and run.count("finish") == 1 and run.count("log") == 2


def test_numbers_that_are_not_finite_are_null_in_both(tmp_path, fake):
    run = fake()
    Tracker(tmp_path, CONFIG).log(1, {"train/grad_norm": float("inf"), "train/loss": 1.5})
    assert run.calls[-1] == ("log", {"step": 1, "train/grad_norm": None, "train/loss": 1.5})
    assert read_rows(tmp_path) == [{"step": 1, "train/grad_norm": None, "train/loss": 1.5}]


def test_a_run_keeps_its_id_where_it_goes_on_and_no_other_has_it_LOG_1(tmp_path, fake):
    ids = []
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        run = fake()
        Tracker(tmp_path / folder, CONFIG).finish({})
        ids.append(run.calls[0][1]["id"])
        assert run.calls[0][1]["dir"] == tmp_path and run.calls[0][1]["resume"] == "allow"
    assert ids[0] == ids[1] != ids[2] and re.fullmatch(r"gqa-s3-[0-9a-f]{8}", ids[0])
