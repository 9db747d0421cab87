"""Runs that are stopped, killed, damaged or starved go on to the same bits, or end in one line."""

import contextlib
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_checkpoint import sign
from tiny_run import (
    TEXT,
    difference,
    ended,
    flags,
    program,
    quiet_bar,
    read_json,
    read_rows,
    wait_for,
    weights,
)
from wandb_stub import put_fake

import checkpoint
import config as configuration
import sample
import train
from checkpoint import best_checkpoint, list_checkpoints, load_checkpoint

RUN, STRAIGHT = Path("run"), Path("straight")
# evaluations and saves in the middle; 6 is the step that most of the tests stop after
OPTIONS = {
    "dropout": 0.2, "max_iters": 8, "eval_interval": 4, "eval_windows": 3, "final_eval_windows": 6,
    "save_interval": 2, "compile": False
}  # fmt: skip
NAMES = ("model.safetensors", "config.json", "tokenizer.json", "training.safetensors", "manifest.json")
needs_signals = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to a process")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


class Killed(BaseException):
    """Ends a run where it is, as a kill does: nothing is saved, nothing is told."""


@pytest.fixture(autouse=True)
def place(work, monkeypatch):
    """The working folder; no bar on stderr, and no wait before a last save is tried again."""
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    monkeypatch.setattr(train, "LAST_TRIES", (0,))
    return work


def at_step(monkeypatch, events: dict):
    """Before the update of each step of `events` (1 is the first): a signal to this process, or a call."""
    batch_starts, waiting = train.batch_starts, dict(events)

    def watched(n_tokens, block_size, seed, step, n):
        happens = waiting.pop(step + 1, None)
        if callable(happens):
            happens()
        elif happens is not None:
            os.kill(os.getpid(), happens)
        return batch_starts(n_tokens, block_size, seed, step, n)

    monkeypatch.setattr(train, "batch_starts", watched)


def kill() -> None:
    raise Killed


def run(**options):
    """One call of train.py: its exit code, or 0."""
    try:
        train.main(flags(**{**OPTIONS, **options}))
    except SystemExit as left:
        return left.code
    return 0


def stop(monkeypatch, at, number=signal.SIGTERM, **options) -> None:
    """A run that gets a signal during step `at`, finishes it, saves and leaves."""
    with monkeypatch.context() as patch:
        at_step(patch, {at: number})
        assert run(**options) == 128 + number


def killed(monkeypatch, at, happens=kill, **options) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, {at: happens})
        with pytest.raises(Killed):
            run(**options)


def fails(monkeypatch, capsys, *argv: str) -> tuple[list[str], str]:
    """The warnings and the one line of error that train.py ends with."""
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        configuration.run_main(train.main, "train.py")
    *warnings, error = capsys.readouterr().err.splitlines()
    assert left.value.code == 1 and error.startswith("train.py: error: ")
    return warnings, error


def tensors(place: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer averages of a checkpoint."""
    return {name: t for file in NAMES[::3] for name, t in load_file(place / file).items()}


def ending(out_dir: Path) -> dict:
    """All that two equal runs have in common, but for the tensors: those of the last and the best."""
    summary, rows = read_json(out_dir / "summary.json"), read_rows(str(out_dir), "step")
    own = ("seconds", "per_sec", "memory", "mfu", "checkpoint", "signal", "resume")
    best = best_checkpoint(out_dir)
    last = list_checkpoints(out_dir)[-1]
    progress = json.loads(safe_open(last / NAMES[3], "pt").metadata()["progress"])["progress"]
    return {
        "summary": {name: x for name, x in summary.items() if not any(word in name for word in own)},
        "rows": [{name: x for name, x in row.items() if not name.startswith("perf/")} for row in rows],
        "best": best and best.name, "last": last.name, "val": read_json(last / "config.json")["val"],
        "progress": {name: x for name, x in progress.items() if name not in ("timed_steps", "seconds")},
    }  # fmt: skip


def assert_same(out_dir: Path = RUN, straight: Path = STRAIGHT) -> None:
    """A run that was stopped and one that was not: equal to the bit."""
    assert ending(out_dir) == ending(straight)
    for which in ("last", "best"):
        one, other = (load_checkpoint(folder, which=which).path for folder in (out_dir, straight))
        assert difference(tensors(one), tensors(other)) == 0.0
    steps = [(row["step"], "val/loss" in row) for row in read_rows(str(out_dir), "step")]
    assert len(steps) == len(set(steps))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with an uninterrupted run, and the same run stopped after step 6."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("template")
    with contextlib.chdir(folder):
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        patch.setattr(train, "peak_flops", lambda *args: (1e12, "measured matrix product"))
        assert run(out_dir="straight") == 0
        stop(patch, 6)
    patch.undo()
    return folder


@pytest.fixture
def stopped(template, place):
    """A run that was stopped after step 6 of 8, with checkpoints of 4 and 6, beside the uninterrupted one."""
    shutil.copytree(template, place, dirs_exist_ok=True)
    assert [found.name for found in list_checkpoints(RUN)] == ["step-000004", "step-000006"]
    return place


# --- stopped, and gone on with


VARIANTS = {
    "adamw": {},
    "muon": {"optimizer": "muon", "schedule": "linear", "lr_floor": 0.0},
    "gqa": {"attention": "gqa", "n_kv_head": 2, "position": "rope", "qk_norm": True, "norm": "pre"},
    "micro": {"micro_batch_size": 2, "optimizer": "muon", "tie_weights": False},
}


@needs_signals
@pytest.mark.parametrize(("at", "number"), [(3, signal.SIGTERM), (4, signal.SIGINT)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_is_stopped_and_resumed_is_the_same_CKP_1_LOG_1(variant, at, number, monkeypatch):
    """Step 4 is one at which an evaluation is due: it is made up for."""
    options = {**VARIANTS[variant], "eval_interval": 2}
    assert run(**options, out_dir="straight") == 0
    stop(monkeypatch, at, number, **options)
    assert list_checkpoints(RUN)[-1].name == f"step-{at:06d}"
    train.main(["--resume=run"])  # all other options are the run's
    assert_same()
    assert read_rows()[-1]["step"] == 8 and len(read_rows(key="val/loss")) == 4


@needs_signals
def test_a_run_that_is_stopped_again_and_again_CKP_1_CKP_12(monkeypatch, stopped):
    shutil.rmtree("run")
    with monkeypatch.context() as patch:
        at_step(patch, {1: signal.SIGINT, 2: signal.SIGTERM, 4: signal.SIGTERM, 7: signal.SIGINT})
        codes = [run(resume="auto") for _ in range(5)]  # one command, again until it is done
    assert codes == [130, 143, 143, 130, 0]
    assert_same()


@needs_signals
def test_the_same_command_goes_on_where_the_log_has_fewer_rows_LOG_1(monkeypatch):
    options = {"log_interval": 3, "save_interval": 0}
    assert run(**options, out_dir="straight") == 0
    stop(monkeypatch, 5, **options)
    assert run(**options, resume="auto") == 0
    rows, expected = (ending(folder)["rows"] for folder in (RUN, STRAIGHT))
    assert [row for row in rows if row in expected] == expected
    assert [row["step"] for row in rows if row not in expected] == [5]  # where it was stopped


@pytest.fixture
def bumpy(monkeypatch):
    """Validation losses that go up and down, as the weights have it: so that the best is in the middle."""

    def bumpy(model, *rest):
        wte = model.transformer["wte"].weight.detach().numpy().tobytes()
        loss = 1.0 + hashlib.sha256(wte).digest()[0] / 256
        return {"loss": loss, "bits_per_byte": loss / math.log(2), "perplexity": math.exp(loss)}

    monkeypatch.setattr(train, "evaluate", bumpy)


@needs_signals
def test_patience_outlasts_interruptions_TRN_12_CKP_1(bumpy, monkeypatch):
    options = {"patience": 4, "eval_interval": 1, "max_iters": 60}
    assert run(**options, out_dir="straight") == 0
    steps, best = read_json("straight/summary.json")["steps"], best_checkpoint(STRAIGHT).name
    assert steps == int(best[5:]) + 4 < 60
    with monkeypatch.context() as patch:
        at_step(patch, dict.fromkeys((1, 2, steps - 3, steps - 1, steps), signal.SIGTERM))
        codes = [run(**options, resume="auto") for _ in range(6)]
    assert codes == [143] * 5 + [0]
    found, expected = ending(RUN), ending(STRAIGHT)
    # the best was saved where a signal left its evaluation out, and tells no loss; log and summary do
    assert found.pop("val") == {} and expected.pop("val")["loss"] == expected["summary"]["val_loss"]
    assert found.pop("progress")["step"] == expected.pop("progress")["step"] == 2
    assert found == expected and difference(weights("run"), weights("straight")) == 0.0


@needs_signals
@pytest.mark.parametrize("at", range(2, 9))
def test_the_best_is_marked_where_its_evaluation_was_made_up_for_CKP_8(bumpy, monkeypatch, at, capsys):
    """Stopped at any step, killed right after it went on, and done again: one row each, the same best."""
    options = {"eval_interval": 2, "save_interval": 0, "final_eval_windows": None}
    assert run(**options, out_dir="straight") == 0
    stop(monkeypatch, at, **options)
    if at < 8:
        killed(monkeypatch, at + 1, **options, resume="auto")
    assert run(**options, resume="auto") == run(**options, resume="auto") == 0
    whole, expected = ending(RUN), ending(STRAIGHT)
    if at == 8:  # saved before its evaluation, which the summary and the log have
        for found in (whole, expected):
            assert found.pop("progress")["step"] == 8
        assert whole.pop("val") == {} and expected.pop("val")["loss"] == expected["summary"]["val_loss"]
    assert whole == expected
    assert difference(weights("run"), weights("straight")) == 0.0


def test_a_kill_before_the_best_is_marked_CKP_8(bumpy, monkeypatch):
    options = {"eval_interval": 2, "save_interval": 0}
    assert run(**options, out_dir="straight") == 0
    best = best_checkpoint(STRAIGHT).name
    mark = checkpoint._mark_best

    def die(root, name):
        if name == best:
            raise Killed
        mark(root, name)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_mark_best", die)
        with pytest.raises(Killed):
            run(**options)
    assert list_checkpoints(RUN)[-1].name == best and best_checkpoint(RUN) in (None, list_checkpoints(RUN)[0])
    assert run(**options, resume="auto") == 0
    assert_same()


KILLS = """
import json, os, random, signal, sys, time
import datasets, filelock, torch, torch._dynamo  # what a run imports as it goes, or each child would anew
torch.set_num_threads(1)  # threads do not survive a fork
import train
from checkpoint import list_checkpoints, load_checkpoint
from pathlib import Path

train.peak_flops = lambda *args: (1e12, "measured matrix product")
argv, draw = sys.argv[1:], random.Random(0)
out, codes, kills, mid_save = Path("run"), [], 0, 0

def start(argv):
    child = os.fork()
    if child == 0:
        os.dup2(os.open("out.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        try:
            train.main(argv)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child

began = time.monotonic()
_, status = os.waitpid(start([*argv, "--out_dir=straight"]), 0)
assert status == 0, Path("out.txt").read_text()
whole = time.monotonic() - began
for n in range(400):
    child, left = start([*argv, "--resume=auto"]), 0
    end = time.monotonic() + draw.uniform(0.3, 1.0) * whole
    while left == 0 and time.monotonic() < end:
        time.sleep(0.001)
        left, status = os.waitpid(child, os.WNOHANG)
        if n % 2 and time.monotonic() > end - 0.3 * whole and any((out / "checkpoints").glob(".*")):
            break  # in the middle of a save
    if left == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        mid_save += any((out / "checkpoints").glob(".*"))
        for place in list_checkpoints(out):
            assert load_checkpoint(place, to_resume=True).info["step"] == int(place.name[5:])
        continue
    assert status == 0, Path("out.txt").read_text()
    if kills >= 5 and mid_save:
        break
    os.rename("run", f"run-{n}")  # it came to its end too soon: once more
print(json.dumps([kills, mid_save]))
"""


@needs_fork
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been_CKP_6(place):
    """SIGKILL while it prepares, trains, logs, saves: what is listed loads, and the end is the same."""
    argv = flags(**{**OPTIONS, "save_interval": 1, "eval_interval": 2, "max_iters": 10}, out_dir=None)
    code = KILLS.replace("sys.argv[1:]", 'sys.argv[1:] + ["--out_dir=run"]')
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code, *argv], env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    kills, mid_save = json.loads(done.stdout)
    assert kills >= 5 and mid_save >= 1
    assert_same()
    for other in place.glob("run-*"):
        assert_same(other)


# --- what there is to go on with


def test_the_same_command_starts_a_run_where_there_is_none(stopped):
    shutil.rmtree("run")
    assert run(resume="auto") == 0
    assert_same()


def test_a_kill_before_the_first_checkpoint_starts_anew(monkeypatch, stopped):
    shutil.rmtree("run")
    killed(monkeypatch, 2, resume="auto")
    assert len(read_rows()) == 1 and not list_checkpoints(RUN)
    assert run(resume="auto") == 0 and not Path("run~1").exists()
    assert_same()


def test_a_finished_run_is_not_trained_again(monkeypatch, stopped):
    before = {path: path.read_bytes() for path in STRAIGHT.rglob("*") if path.is_file()}
    monkeypatch.setattr(train, "get_batch", lambda *args: pytest.fail("it trained"))
    for command in (flags(**OPTIONS, out_dir="straight", resume="auto"), ["--resume=straight"]):
        summary = train.main(command)
        assert summary["finished"] and summary["steps"] == 8 and summary["signal"] == 0
        after = {path: path.read_bytes() for path in STRAIGHT.rglob("*") if path.is_file()}
        told = {STRAIGHT / "config.json", STRAIGHT / "summary.json"}  # the command, and the peak of memory
        assert before.keys() == after.keys()
        assert {path for path in before if before[path] != after[path]} <= told
        assert ending(STRAIGHT)["summary"] == {
            name: x for name, x in json.loads(before[STRAIGHT / "summary.json"]).items()
            if name in ending(STRAIGHT)["summary"]
        }  # fmt: skip


def test_a_finished_run_can_be_made_longer(stopped):
    assert run(out_dir="straight", max_iters=11, resume="auto") == 0
    assert [row["step"] for row in read_rows("straight")] == list(range(1, 12))
    summary = read_json("straight/summary.json")
    assert summary["steps"] == 11 and Path(summary["checkpoint"]).name == "step-000011"
    assert summary["tokens_seen"] == 11 * 128


def test_the_architecture_comes_from_the_run_CKP_4(monkeypatch):
    shape = {"attention": "gqa", "n_kv_head": 1, "n_layer": 3, "n_embd": 48, "position": "rope"}
    stop(monkeypatch, 3, **shape, seed=5)
    before = read_json("run/config.json")
    assert train.main(["--resume=run", "--log_interval=2"])["n_kv_head"] == 1
    after = read_json("run/config.json")
    assert {name for name in after if after[name] != before[name]} == {"resume", "log_interval"}
    assert load_checkpoint(RUN).model.config.n_layer == 3 and after["seed"] == 5


OTHERS = {
    "n_layer": (3, 2), "n_embd": (64, 32), "block_size": (32, 16), "attention": ("mqa", "mha"),
    "norm": ("pre", "post"), "position": ("rope", "learned"), "tie_weights": (False, True), "seed": (1, 0),
    "optimizer": ("muon", "adamw"), "batch_size": (4, 8),
}  # fmt: skip


@pytest.mark.parametrize("auto", [True, False], ids=["auto", "folder"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_flag_that_would_make_it_another_run_is_refused_CKP_4(name, auto, stopped, refused):
    other, own = OTHERS[name]
    before = ending(RUN), (RUN / "config.json").read_bytes()
    argv = flags(**{**OPTIONS, name: other}, resume="auto") if auto else ["--resume=run", f"--{name}={other}"]
    error = refused(*argv, leaves=("run",))
    assert f"--{name}={other}: the run in run/checkpoints/step-000006 has {name}={own};" in error
    assert (ending(RUN), (RUN / "config.json").read_bytes()) == before  # and nothing was touched


def test_a_new_learning_rate_is_the_one_that_is_used_CKP_5(monkeypatch):
    """The schedule is constant, so that the rate in the log is the one that was asked for."""
    options = {"schedule": "linear", "lr_decay": 0, "warmup": 0, "dropout": 0.0, "weight_decay": 0.0}
    stop(monkeypatch, 6, **options)
    made, make = [], train.make_optimizers

    def recorded(*args, **kwargs):
        made[:] = make(*args, **kwargs)
        return made

    monkeypatch.setattr(train, "make_optimizers", recorded)
    train.main(["--resume=run", "--learning_rate=5e-4"])
    assert [row["train/lr"] for row in read_rows()] == [1e-3] * 6 + [5e-4] * 2
    assert {group["lr"] for optimizer in made for group in optimizer.param_groups} == {5e-4}
    assert read_json("run/config.json")["learning_rate"] == 5e-4
    train.main(["--resume=run", "--max_iters=9"])  # and it is the run's from then on
    assert read_rows()[-1]["train/lr"] == 5e-4


def test_a_text_that_has_changed_is_refused(stopped, refused):
    Path("text.txt").write_text(TEXT.replace("cat", "cow"), encoding="utf-8")  # with one character more
    error = refused("--resume=run", leaves=("run",))
    assert "vocab_size=15: the tokenizer has 16 ids; has the text changed since the run began?" in error
    assert "another text than text.txt is now" in refused(*flags(**OPTIONS, resume="auto"), leaves=("run",))
    Path("text.txt").write_text(TEXT.replace("cat", "hat"), encoding="utf-8")
    for argv in (["--resume=run"], flags(**OPTIONS, resume="auto")):
        error = refused(*argv, leaves=("run",))
        assert "run/checkpoints/step-000006: learned from another text than text.txt is now" in error
    Path("text.txt").unlink()
    assert "text.txt" in refused("--resume=run", leaves=("run",))
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    assert run(resume="run") == 0
    assert_same()


def test_what_is_no_run_to_resume_is_refused(stopped, refused):
    error = refused("--resume=run/checkpoints/step-000004", leaves=("run",))
    assert "give the run's folder, run\n" in error
    assert "no checkpoint in nowhere: there is no such folder" in refused("--resume=nowhere", leaves=("run",))
    assert not Path("nowhere").exists()
    assert "data: nothing was saved there" in refused("--resume=data", leaves=("run",))
    error = refused("--resume=run", "--out_dir=elsewhere", leaves=("run",))
    assert "--out_dir=elsewhere: a resumed run stays in its folder, run" in error
    assert not Path("elsewhere").exists()


# --- damaged checkpoints


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def lost(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, lost, cut])
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_checkpoint_is_passed_over_and_saved_anew_CKP_6(name, damage, stopped, capsys):
    newest = RUN / "checkpoints/step-000006"
    damage(newest / name)
    assert run(resume="auto") == 0
    warning = capsys.readouterr().err
    assert f"warning: {newest}/" in warning and "taking step-000004 instead" in warning
    assert_same()
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == ["best", "damaged-000006", "step-000004", "step-000006", "step-000008"]  # 4 is the best
    assert load_checkpoint(newest, to_resume=True).info["step"] == 6  # the damaged one did not block it


def test_damage_again_and_again_CKP_6(monkeypatch, stopped):
    root = RUN / "checkpoints"
    for n in range(3):
        flip(root / "step-000006/training.safetensors")
        stop(monkeypatch, 6, resume="auto")
        assert (root / ("damaged-000006" + (f"~{n}" if n else ""))).is_dir()
    assert run(resume="auto") == 0
    assert_same()


def test_sampling_passes_a_damaged_checkpoint_over_CKP_6(stopped, capsys):
    argv = ["--out_dir=run", "--max_new_tokens=3", "--device=cpu", "--prompt=the "]
    cut(RUN / "checkpoints/step-000006/training.safetensors")
    sample.main(argv)
    assert "warning" not in capsys.readouterr().err  # what sampling doesn't need may be damaged
    cut(RUN / "checkpoints/step-000006/model.safetensors")
    sample.main(argv)
    assert "taking step-000004 instead" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [flip, lost])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_whose_every_checkpoint_is_damaged_is_refused_CKP_6(name, damage, stopped, monkeypatch, capsys):
    for found in list_checkpoints(RUN):
        damage(found / name)
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    for argv in (flags(**OPTIONS, resume="auto"), ["--resume=run"]):
        warnings, error = fails(monkeypatch, capsys, *argv)
        assert error.startswith("train.py: error: run/checkpoints/step-000004/") and name in error
        assert warnings and all(line.startswith("warning: run/checkpoints/step-000006/") for line in warnings)
    after = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    assert before.items() <= after.items()  # no run was started over it


def to_version(version: int) -> None:
    """Version 1 had no training state."""
    for found in list_checkpoints(RUN):
        manifest = read_json(found / "manifest.json")
        if version == 1:
            (found / "training.safetensors").unlink()
            del manifest["files"]["training.safetensors"]
        (found / "manifest.json").write_text(json.dumps({**manifest, "version": version}), encoding="utf-8")


def test_a_checkpoint_of_version_1_is_sampled_and_evaluated_but_not_resumed(stopped, refused, capsys):
    to_version(1)
    sample.main(["--out_dir=run", "--max_new_tokens=3", "--device=cpu", "--prompt=the "])
    found = train.main(flags(eval_only=True))
    assert math.isfinite(found["loss"])
    capsys.readouterr()
    for argv in (["--resume=run"], flags(**OPTIONS, resume="auto")):
        error = refused(*argv, leaves=("run",))
        assert "step-000006: has no training.safetensors, so it can be sampled from but not resumed" in error


def test_a_checkpoint_of_a_newer_version_is_refused(stopped, refused):
    to_version(3)
    for argv in (["--resume=run"], flags(**OPTIONS, resume="auto")):
        error = refused(*argv, leaves=("run",))
        assert "format version 3, this program reads up to 2; update it" in error


# --- hostile checkpoints


PLACE = Path("run/checkpoints/step-000006")


def change_averages(change) -> None:
    """Let `change` make another dict of the tensors in training.safetensors, and sign it."""
    with safe_open(PLACE / NAMES[3], "pt") as f:
        metadata = f.metadata()
    save_file(change(load_file(PLACE / NAMES[3])), PLACE / NAMES[3], metadata)


def change_header(change) -> None:
    """Let `change` work on the header of training.safetensors as a dict, and sign it."""
    data = (PLACE / NAMES[3]).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    (PLACE / NAMES[3]).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def without(tensors: dict, word: str) -> dict:
    return {name: t for name, t in tensors.items() if word not in name}


def with_progress(text) -> None:
    change_header(lambda header: header.update(__metadata__=text))


HOSTILE = {
    "another shape": lambda: change_averages(lambda t: {n: x.flatten() for n, x in t.items()}),
    "a shape too many": lambda: change_averages(lambda t: {n: x[None] for n, x in t.items()}),
    "turned": lambda: change_averages(lambda t: {n: x.T.contiguous() for n, x in t.items() if x.ndim == 2}),
    "another name": lambda: change_averages(lambda t: {n.replace("avg_sq", "q"): x for n, x in t.items()}),
    "a name without dots": lambda: change_averages(lambda t: {**t, "momentum": torch.zeros(1)}),
    "a parameter too many": lambda: change_averages(lambda t: {**t, "0.999.step": torch.tensor(1.0)}),
    "a negative number": lambda: change_averages(lambda t: {**t, "-1.-1.step": torch.tensor(1.0)}),
    "one kind missing": lambda: change_averages(lambda t: without(t, "exp_avg_sq")),
    "one missing": lambda: change_averages(lambda t: without(t, "0.3.exp_avg_sq")),
    "one parameter missing": lambda: change_averages(lambda t: without(t, "0.3.")),
    "whole numbers": lambda: change_averages(lambda t: {n: x.long() for n, x in t.items()}),
    "truth values": lambda: change_averages(lambda t: {n: x > 0 for n, x in t.items()}),
    "absurd size": lambda: change_header(lambda h: h["0.0.exp_avg"].update(shape=[2**40, 2**20])),
    "absurd place": lambda: change_header(lambda h: h["0.0.exp_avg"].update(data_offsets=[0, 2**62])),
    "pickle": lambda: (PLACE / NAMES[3]).write_bytes(pickle.dumps({"progress": 1})),
    "torch file": lambda: torch.save({"progress": torch.zeros(2)}, PLACE / NAMES[3]),
    "empty": lambda: (PLACE / NAMES[3]).write_bytes(b""),
    "no metadata": lambda: change_header(lambda h: h.pop("__metadata__")),
    "other metadata": lambda: with_progress({"x": "1"}),
    "not JSON": lambda: with_progress({"progress": "{"}),
    "deep JSON": lambda: with_progress({"progress": "[" * 100_000}),
    "list": lambda: with_progress({"progress": "[]"}),
    "nothing": lambda: with_progress({"progress": "{}"}),
}  # fmt: skip


def test_a_hostile_training_state_is_refused_in_one_line_CKP_9(stopped, refused):
    whole = (PLACE / NAMES[3]).read_bytes()
    for what, damage in HOSTILE.items():
        (PLACE / NAMES[3]).write_bytes(whole)
        damage()
        assert (PLACE / NAMES[3]).read_bytes() != whole, what
        sign(PLACE)
        error = refused("--resume=run", leaves=("run",))
        assert str(PLACE) in error and len(error) < 300, what
    (PLACE / NAMES[3]).write_bytes(whole)
    sign(PLACE)
    assert run(resume="auto") == 0  # and none of them left anything behind
    assert_same()


WRONG = [
    ("step", -1), ("step", "6"), ("step", 5), ("step", 6.0), ("step", None), ("step", ...), ("waited", -1),
    ("timed_steps", -1), ("timed_steps", 2**70), ("seconds", -1.0), ("seconds", 0.0), ("seconds", math.nan),
    ("seconds", math.inf), ("seconds", "1"), ("skipped", True), ("n_micro", 0), ("n_micro", 3),
    ("n_micro", -1), ("n_micro", 2**40), ("val", []),
    ("val", {"loss": "x"}), ("val", {"loss": None}), ("best", math.nan), ("best", "1"),
    ("owes_evaluation", 1), ("batches", 5), ("batches", "\ud800"), ("batches", "é"), ("__class__", "x"),
]  # fmt: skip


def test_progress_that_can_not_be_is_refused_in_one_line_CKP_9(stopped, refused):
    whole = (PLACE / NAMES[3]).read_bytes()
    stored = json.loads(safe_open(PLACE / NAMES[3], "pt").metadata()["progress"])
    assert stored["progress"]["timed_steps"] > 0
    cases = [{**stored, "progress": {**stored["progress"], name: value}} for name, value in WRONG]
    cases += [{**stored, "progress": None}, {**stored, "progress": [6]}, {"progress": stored["progress"]}]
    cases += [{**stored, "scaler": [1]}, {"scaler": {}}]
    for case in cases:
        if isinstance(case.get("progress"), dict):
            case["progress"] = {name: x for name, x in case["progress"].items() if x is not ...}
        (PLACE / NAMES[3]).write_bytes(whole)
        with_progress({"progress": json.dumps(case)})
        sign(PLACE)
        error = refused("--resume=run", leaves=("run",))
        assert f"{PLACE}: what it tells of the run's progress can't be" in error, case


@pytest.mark.parametrize("change", [{"run": 3}, {"run": ...}, {"corpus_sha256": ...}, {"step": ...}], ids=str)
def test_config_json_without_what_a_resumed_run_needs_is_refused_CKP_9(change, stopped, refused):
    stored = {**read_json(PLACE / "config.json"), **change}
    text = json.dumps({name: x for name, x in stored.items() if x is not ...})
    (PLACE / "config.json").write_text(text, encoding="utf-8")
    sign(PLACE)
    for argv in (["--resume=run"], flags(**OPTIONS, resume="auto")):
        assert str(PLACE) in refused(*argv, leaves=("run",))


# --- two at once, time, disk, data


@needs_fork
def test_a_folder_in_use_is_refused_and_free_after_a_kill(place, monkeypatch, capsys):
    options = {**OPTIONS, "max_iters": 10**6, "save_interval": 5}
    with ended(program(*flags(**options))) as first:
        wait_for(lambda: len(list_checkpoints(RUN)) > 1, first)
        for resume in (None, "auto", "run"):
            _, error = fails(monkeypatch, capsys, *flags(**options, resume=resume))
            assert f"run is in use by process {first.pid} on " in error
        n = (RUN / "metrics.jsonl").stat().st_size
        wait_for(lambda: (RUN / "metrics.jsonl").stat().st_size > n, first)  # unharmed
        assert not list(place.glob("run~*"))
        first.kill()
        assert first.wait(timeout=10) == -signal.SIGKILL
    step = int(list_checkpoints(RUN)[-1].name[5:])
    assert run(max_iters=step + 3, resume="auto", save_interval=5) == 0
    assert [row["step"] for row in read_rows()] == list(range(1, step + 4))
    assert not (RUN / ".owner").exists()


def test_a_run_that_has_its_minutes_leaves_in_time_and_goes_on(monkeypatch, stopped, capsys):
    """Each step takes 10 seconds here, of the 60 that it has."""
    clock = SimpleNamespace(now=0.0)
    shutil.rmtree("run")
    with monkeypatch.context() as patch:
        patch.setattr(train, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
        batch_starts = train.batch_starts

        def slow(*args):
            clock.now += 10
            return batch_starts(*args)

        patch.setattr(train, "batch_starts", slow)
        assert run(max_minutes=1) == 75  # at the 6th step, there is no time for another
        assert [row["step"] for row in read_rows()] == list(range(1, 7))
        assert "time is up: python train.py --resume=run goes on" in capsys.readouterr().err
        assert not read_json("run/summary.json")["finished"]
        assert list_checkpoints(RUN)[-1].name == "step-000006"
        assert run(resume="auto", max_minutes=1) == 0
    assert_same()


def test_a_limit_in_minutes_holds_by_the_clock(place):
    began = time.monotonic()
    assert run(max_iters=10**6, max_minutes=0.05, eval_interval=0, save_interval=0, log_interval=1000) == 75
    assert 1 < time.monotonic() - began < 3
    assert int(list_checkpoints(RUN)[-1].name[5:]) == read_rows()[-1]["step"] < 10**6


@contextlib.contextmanager
def no_file_above(n_bytes: int):
    """As on a full disk, the system refuses to write: files longer than this, in this process."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_for_a_while_costs_nothing_CKP_6_LOG_1(monkeypatch, stopped, capsys):
    """Neither rows (300 bytes are two) nor checkpoints can be written until step 7."""
    shutil.rmtree("run")
    with contextlib.ExitStack() as held, monkeypatch.context() as patch:

        def fill():
            held.free = held.enter_context(no_file_above(300))

        at_step(patch, {4: fill, 7: lambda: held.free()})
        assert run() == 0
    printed = capsys.readouterr()
    assert "step 4 can't be saved" in printed.out and "step 6 can't be saved" in printed.out
    assert "run/checkpoints/step-000002" in printed.out and "metrics.jsonl can't be written" in printed.err
    assert ending(RUN)["rows"] == ending(STRAIGHT)["rows"]
    assert difference(weights("run"), weights("straight")) == 0.0


def test_a_disk_that_stays_full_ends_in_one_line_and_the_run_goes_on_later_CKP_6(stopped, refused, capsys):
    before = {path: path.read_bytes() for path in (RUN / "checkpoints").rglob("*") if path.is_file()}
    capsys.readouterr()
    with no_file_above(20_000):
        assert "too large" in refused(*flags(**OPTIONS, resume="auto"), leaves=("run",)).lower()
    after = {path: path.read_bytes() for path in (RUN / "checkpoints").rglob("*") if path.is_file()}
    assert after == before
    assert run(resume="auto") == 0
    assert_same()


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_data_file_that_is_cut_during_the_run_ends_it_in_one_line(split, monkeypatch, stopped, refused):
    def shorten() -> None:
        for path in Path("data/prepared").rglob(f"{split}.bin"):
            os.truncate(path, 100)

    with monkeypatch.context() as patch:
        at_step(patch, {7: shorten})
        error = refused(*flags(**OPTIONS, resume="auto"), leaves=("run",))
    assert f"{split}.bin: ends before its last token: prepare it again" in error
    assert load_checkpoint(RUN, to_resume=True).info["step"] in (6, 8)
    assert run(resume="auto") == 0  # which prepares it again
    assert_same()


def test_a_data_folder_that_vanishes_during_the_run_is_made_again(monkeypatch, stopped):
    if os.name == "nt":
        pytest.skip("an open file can't be deleted there")
    killed(monkeypatch, 8, lambda: (shutil.rmtree("data"), kill()), resume="auto")
    assert run(resume="auto") == 0
    assert_same()


@needs_signals
def test_a_clock_that_is_set_back_changes_nothing(monkeypatch, stopped):
    now = [time.time()]

    def back() -> float:
        now[0] -= 3600
        return now[0]

    shutil.rmtree("run")
    monkeypatch.setattr(time, "time", back)
    stop(monkeypatch, 3)
    assert run(resume="auto") == 0
    assert_same()


@needs_signals
def test_both_parts_are_one_run_of_wandb_and_the_log_is_whole_LOG_1(monkeypatch, stopped):
    shutil.rmtree("run")
    first = put_fake(monkeypatch)
    stop(monkeypatch, 3, wandb="offline")
    second = put_fake(monkeypatch)
    assert run(wandb="offline", resume="auto") == 0
    (one, other) = (dict(fake.calls)["init"] for fake in (first, second))
    assert one["id"] == other["id"] == Path("run/run_id").read_text(encoding="utf-8")
    assert one["resume"] == other["resume"] == "allow"
    assert dict(first.calls)["finish"] == 143 and dict(second.calls)["finish"] == 0
    seen = [row["step"] for fake in (first, second) for name, row in fake.calls if name == "log"]
    assert seen == [row["step"] for row in read_rows(key="step")] == sorted(seen)
    assert_same()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such permissions")
@pytest.mark.parametrize("folder", [".", "run", "run/checkpoints"])
def test_a_folder_that_may_not_be_written_is_one_line(folder, template, place, monkeypatch, capsys):
    """As another user where this one may write everywhere, in a folder that the other can get to."""
    held = tempfile.TemporaryDirectory()
    monkeypatch.chdir(held.name)
    shutil.copytree(template, ".", dirs_exist_ok=True)
    run(max_iters=1, out_dir="warm")  # the data set is prepared
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    root = os.geteuid() == 0
    Path().chmod(0o755)
    Path(folder).chmod(0o555)
    if root:
        for path in (path for path in [RUN, *RUN.rglob("*")] if path != Path(folder) and folder != "."):
            os.chown(path, 65534, -1)
        os.seteuid(65534)
    try:
        out_dir = "new" if folder == "." else "run"
        _, error = fails(monkeypatch, capsys, *flags(**OPTIONS, out_dir=out_dir, resume="auto"))
    finally:
        if root:
            os.seteuid(0)
        Path(folder).chmod(0o755)
    assert "Permission denied" in error and out_dir in error
    after = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    changed = {path.name for path in before if before[path] != after[path]}
    assert changed <= {"metrics.jsonl", "config.json"}
    assert run(resume="auto") == 0
    assert_same()
    monkeypatch.chdir(place)
    held.cleanup()


def test_a_number_that_is_none_gets_into_no_checkpoint_TRN_6(monkeypatch, stopped, refused):
    forward = train.gpt.GPT.forward

    def spoiled(self, *args, **options):
        logits, loss = forward(self, *args, **options)
        return logits, loss * math.nan if self.training else loss

    before = {path: path.read_bytes() for path in (RUN / "checkpoints").rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(train.gpt.GPT, "forward", spoiled)
        error = refused(*flags(**OPTIONS, resume="auto"), leaves=("run",))
    assert "step 7: loss or gradient is not finite" in error
    assert "the last good checkpoint is run/checkpoints/step-000006" in error
    assert {path: path.read_bytes() for path in (RUN / "checkpoints").rglob("*") if path.is_file()} == before
    assert run(resume="auto") == 0
    assert_same()


def test_random_stops_and_kills_in_one_run_CKP_1_CKP_6(monkeypatch, stopped):
    """What happens is drawn: a signal, a kill in a step, a damaged newest checkpoint; a dozen in a run."""
    draw, happened = random.Random(3), set()
    shutil.rmtree("run")
    for _ in range(12):
        step = len(read_rows()) if (RUN / "metrics.jsonl").exists() else 0
        at = min(8, max(1, step + draw.randint(-1, 2)))
        kind = draw.choice(["signal", "kill", "damage"])
        happened.add(kind)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            at_step(patch, {at: signal.SIGTERM if kind == "signal" and os.name != "nt" else kill})
            run(resume="auto")
        if kind == "damage" and len(list_checkpoints(RUN)) > 1:
            draw.choice([flip, cut])(list_checkpoints(RUN)[-1] / draw.choice(NAMES))
    assert happened == {"signal", "kill", "damage"}
    assert run(resume="auto") == 0
    assert_same()
