"""Training, through train.main as a person would call it: tiny runs on a tiny text in an empty folder."""

import errno
import math
import os
import re
import shutil
import signal
import time
import warnings
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_model
from tiny_run import (
    N_IDS,
    TINY,
    difference,
    ended,
    flags,
    patch_forward,
    program,
    quiet_bar,
    read_json,
    read_rows,
    wait_for,
    weights,
)

import config as configuration
import device
import model as gpt
import train
from checkpoint import list_checkpoints
from data.loader import open_tokens, write_tokens

pytestmark = pytest.mark.usefixtures("work")

def everything(root: Path) -> dict[str, bytes]:
    """Each file under a folder and what is in it."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def record_batches(monkeypatch) -> list[torch.Tensor]:
    """The inputs that training gets, as it gets them."""
    get_batch, seen = train.get_batch, []

    def recorded(*args):
        x, y = get_batch(*args)
        seen.append(x.clone())
        return x, y

    monkeypatch.setattr(train, "get_batch", recorded)
    return seen


# --- what a run leaves


def test_summary_of_a_run_has_what_others_measure_by(capsys):
    returned = train.main(flags(attention="gqa", n_kv_head=2, max_iters=6, norm="pre"))
    summary = read_json("run/summary.json")
    assert summary == returned
    c = gpt.GPTConfig(
        vocab_size=N_IDS, block_size=16, n_layer=2, n_head=4, n_embd=32, attention="gqa",
        n_kv_head=2, norm="pre"
    )
    assert {key: summary[key] for key in ("attention", "n_head", "n_kv_head", "norm", "steps", "seed")} == {
        "attention": "gqa", "n_head": 4, "n_kv_head": 2, "norm": "pre", "steps": 6, "seed": 0
    }
    assert summary["n_params"] == sum(t.numel() for t in weights().values())
    assert summary["tokens_seen"] == 6 * 8 * 16
    per_token = 2 * 2 * 2 * 8 * 4  # k and v, layers, KV heads, width of a head, bytes of a float32
    assert summary["kv_cache_bytes_per_token"] == per_token == gpt.kv_cache_bytes(c, 1)
    assert summary["kv_cache_bytes_full_context"] == 16 * per_token
    assert summary["kv_cache_bytes_full_context_mha"] == 2 * 16 * per_token
    assert summary["tokens_per_sec"] == pytest.approx(3 * 8 * 16 / summary["train_seconds"])
    assert summary["peak_memory_bytes"] > 2**20
    assert summary["val_perplexity"] == pytest.approx(math.exp(summary["val_loss"]))
    assert (summary["device"], summary["dtype"], summary["signal"]) == ("cpu", "float32", 0)
    assert Path(summary["checkpoint"]).is_dir()
    printed = capsys.readouterr().out
    assert f"{summary['val_loss']:.4f} nats per token" in printed
    assert "768 tokens in" in printed and "python sample.py --out_dir=run" in printed


@pytest.mark.parametrize(("attention", "n_kv_head"), [("mha", 4), ("gqa", 2), ("mqa", 1)])
def test_kv_cache_of_each_kind_is_in_its_summary(attention, n_kv_head):
    summary = train.main(flags(attention=attention, max_iters=1))
    assert summary["n_kv_head"] == n_kv_head
    mha = summary["kv_cache_bytes_full_context_mha"]
    assert mha == 2 * 2 * 4 * 8 * 16 * 4
    assert summary["kv_cache_bytes_full_context"] * 4 == mha * n_kv_head


def test_log_of_a_run_is_read_with_the_standard_library_LOG_6(capsys):
    train.main(flags(max_iters=20, eval_interval=5, eval_windows=2))
    rows = read_rows()
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["tokens"] for row in rows] == [128 * n for n in range(1, 21)]
    keys = {"step", "tokens", "train/loss", "train/lr", "train/grad_norm", "perf/peak_memory_bytes"}
    assert all(row.keys() >= keys for row in rows)
    timed = {"perf/step_ms", "perf/tokens_per_sec"}
    assert all((timed <= row.keys()) == (row["step"] > 3) for row in rows)
    assert all(
        row["perf/tokens_per_sec"] == pytest.approx(128e3 / row["perf/step_ms"]) for row in rows[3:]
    )
    seen = read_rows(key="val/loss")
    assert [row["step"] for row in seen] == [5, 10, 15, 20]
    assert all(row.keys() >= {"step", "tokens", "val/loss", "val/bits_per_byte"} for row in seen)
    assert seen[-1]["val/loss"] == read_json("run/summary.json")["val_loss"]
    printed = capsys.readouterr()
    assert f"step 5: validation loss {seen[0]['val/loss']:.3f} nats" in printed.out


def test_console_line_has_the_values_of_the_log_LOG_9(capsys):
    train.main(flags(max_iters=6, log_interval=6))
    (row,) = read_rows()
    line = capsys.readouterr().err.splitlines()[-1]
    assert "6/6" in line and re.search(r"\[\d\d:\d\d<\d\d:\d\d,", line)  # progress, and time gone and left
    assert f"loss {row['train/loss']:.3f}" in line and f"grad norm {row['train/grad_norm']:.2f}" in line
    assert f"{row['perf/tokens_per_sec']:,.0f} tokens/s" in line


def test_resolved_options_are_stored_CFG_8(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a machine with a GPU
    train.main(flags(max_iters=2, attention="gqa", micro_batch_size=4))
    stored = read_json("run/config.json")
    assert (stored["device"], stored["n_kv_head"]) == ("cpu", 2) and stored["vocab_size"] == N_IDS
    assert stored.keys() == configuration.flatten(train.TrainConfig()).keys()
    (kept,) = Path("run/checkpoints").glob("step-*/config.json")
    info = read_json(kept)
    assert info["run"] == stored and (info["device"], info["dtype"]) == ("cpu", "float32")
    assert re.search(r"machine +cpu, products in float32, 1 threads, compile off", capsys.readouterr().out)


def test_plan_is_printed_before_the_first_step_CFG_10(capsys):
    for micro, product in ((None, "8 sequences x 1 micro-batches"), (2, "2 sequences x 4 micro-batches")):
        summary = train.main(flags(micro_batch_size=micro, attention="mqa"))
        assert f"128 tokens = {product} x 16 tokens" in (printed := capsys.readouterr().out)
        assert summary["tokens_seen"] == 4 * 128
    assert "4 steps, 512 tokens" in printed and "mqa: 4 query heads of 8 on 1 KV heads" in printed
    assert "128 bytes per token, 2.0 KiB at full context in float32; mha would need 8.0 KiB, 4.0x" in printed
    assert printed.index("KV cache") < printed.index("trained")


# --- steps


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_first_step_learns_and_the_rate_follows_the_schedule_TRN_1(kind):
    train.main(flags(max_iters=12, warmup=0.5, learning_rate=1e-3, schedule=kind))
    found = [row["train/lr"] for row in read_rows()]
    assert found[:6] == pytest.approx([1e-3 * n / 6 for n in range(1, 7)])
    assert max(found) == found[5] == 1e-3 and found[-1] < 1e-3
    train.main(flags(max_iters=1, warmup=0.5, learning_rate=1e-3, schedule=kind))
    c = gpt.GPTConfig(vocab_size=N_IDS, block_size=16, n_layer=2, n_head=4, n_embd=32)
    start = gpt.GPT(c, torch.Generator().manual_seed(0)).state_dict()
    after = weights()
    assert all(not torch.equal(after[name], start[name]) for name in after)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_each_optimizer_has_its_own_share_of_the_rate(monkeypatch, kind):
    make, made = train.make_optimizers, []

    def recorded(*args, **options):
        made.extend(make(*args, **options))
        return made

    monkeypatch.setattr(train, "make_optimizers", recorded)
    train.main(flags(max_iters=8, warmup=0.25, optimizer=kind, learning_rate=1e-3, muon_lr=0.02))
    share = read_rows()[-1]["train/lr"] / 1e-3  # the rate of the last step is still in the groups
    assert 0.1 < share < 0.2
    for optimizer, peak in zip(made, (1e-3, 0.02), strict=False):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
            [peak * share] * len(optimizer.param_groups)
        )


@pytest.mark.parametrize("clip", [0, 0.05], ids=["no clip", "clip"])
def test_micro_batches_are_averaged_TRN_9(clip):
    found, norms = [], []
    for micro in (8, 2):
        # a bias of the keys has no gradient but rounding, which AdamW would scale up to a whole step
        train.main(flags(micro_batch_size=micro, max_iters=1, grad_clip=clip, bias=False, warmup=0))
        found.append(weights())
        norms.append(read_rows()[0]["train/grad_norm"])
    assert difference(*found) < 1e-6
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0.05  # so the clip was at work


@pytest.mark.parametrize("micro", [8, 2, 1])
def test_logged_loss_is_the_mean_over_micro_batches_TRN_8(monkeypatch, micro):
    losses = []
    patch_forward(monkeypatch, lambda n, logits, loss: (losses.append(loss.item()), (logits, loss))[1])
    train.main(flags(micro_batch_size=micro, max_iters=2))
    n_micro = 8 // micro
    assert len(losses) == 2 * n_micro
    logged = [row["train/loss"] for row in read_rows()]
    assert logged == pytest.approx([np.mean(losses[:n_micro]), np.mean(losses[n_micro:])], abs=1e-6)
    assert logged[0] == pytest.approx(math.log(N_IDS), abs=0.1)  # a new model knows nothing


def test_every_kind_of_attention_sees_the_same_batches(monkeypatch):
    seen, runs = record_batches(monkeypatch), []
    variants = [
        {"attention": "mha"}, {"attention": "gqa"}, {"attention": "mqa"}, {"norm": "pre", "position": "rope"},
        {"dropout": 0.3}, {"optimizer": "muon"}, {"micro_batch_size": 2}, {"eval_interval": 1},
    ]
    for variant in variants:
        train.main(flags(max_iters=3, **variant))
        runs.append(torch.cat(seen))
        seen.clear()
    assert runs[0].shape == (3 * 8, 16) and len(runs[0].unique(dim=0)) > 12
    assert all(torch.equal(run, runs[0]) for run in runs[1:])
    train.main(flags(max_iters=3, seed=1))
    assert not torch.equal(torch.cat(seen), runs[0])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_one_seed_gives_the_same_weights_to_the_bit(dropout):
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(found))  # what was drawn before must not matter
        train.main(flags(seed=seed, dropout=dropout))
        found.append(weights())
    assert difference(found[0], found[1]) == 0.0
    assert difference(found[0], found[2]) > 0.01


def test_dropout_depends_on_the_seed_and_the_step_alone():
    # evaluation and logging in between draw nothing
    runs = []
    for every in (0, 1):
        train.main(flags(dropout=0.2, eval_interval=every, save_interval=every))
        runs.append(weights())
    assert difference(*runs) == 0.0


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("attention", ["mha", "mqa"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_learns(norm, attention, optimizer):
    summary = train.main(
        flags(
            norm=norm, attention=attention, optimizer=optimizer, max_iters=80, learning_rate=1e-2,
            log_interval=80
        )
    )
    # 3.0 nats at the start; one character of the text tells 1.5 nats about the next
    assert summary["val_loss"] < 0.9


@pytest.mark.parametrize("n_layer", [12, 24])
@pytest.mark.parametrize(
    "rates", [{"learning_rate": 1e-3}, {"optimizer": "muon", "muon_lr": 0.02}], ids=["adamw", "muon"]
)
def test_many_post_norm_layers_do_not_diverge(n_layer, rates):
    n_steps = 50 if n_layer == 12 else 36
    summary = train.main(flags(n_layer=n_layer, max_iters=n_steps, norm="post", log_interval=4, **rates))
    found = [row["train/loss"] for row in read_rows()]
    assert found[-1] < found[0] - 0.1 and max(found) < found[0] + 0.1
    assert summary["val_loss"] < found[0] - 0.1 and found[0] == pytest.approx(math.log(N_IDS), abs=0.2)


# --- evaluation


def token_file(path: Path, ids: np.ndarray, vocab_size: int):
    about = {
        "split": "val", "tokenizer_hash": "-", "source": "-", "corpus_sha256": "-", "n_documents": 1,
        "n_bytes": 1
    }
    write_tokens(path, iter([ids]), vocab_size, about)
    return open_tokens(path, vocab_size)


def test_whole_split_counts_each_target_once_TRN_13(work):
    # 40 tokens, context 16: two full windows, and one of 7 targets that must weigh less
    ids = np.random.default_rng(0).integers(0, 61, 40)
    network = tiny_model(block_size=16)
    token_bytes = torch.randint(1, 5, (61,), generator=torch.Generator().manual_seed(1))
    nats, n_bytes = 0.0, 0
    with torch.no_grad():
        for start in (0, 16, 32):
            x = torch.from_numpy(ids[start : min(start + 16, 39)])
            log_p = network(x[None])[0][0].double().log_softmax(-1)
            for t in range(len(x)):
                target = int(ids[start + t + 1])
                nats -= float(log_p[t, target])
                n_bytes += int(token_bytes[target])
    with token_file(work / "val.bin", ids, 61) as tokens:
        found = train.evaluate(network, tokens, token_bytes, 16, None, torch.device("cpu"), torch.float32)
    assert found["loss"] == pytest.approx(nats / 39, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / 39), rel=1e-4)


@pytest.mark.parametrize("n_windows", [3, None])
def test_evaluating_twice_gives_the_same_and_changes_nothing_TRN_13(work, n_windows):
    network = tiny_model(block_size=16, dropout=0.5).train()
    token_bytes = torch.ones(61, dtype=torch.int64)
    with token_file(work / "val.bin", np.random.default_rng(0).integers(0, 61, 200), 61) as tokens:
        state = torch.get_rng_state()
        first, second = (
            train.evaluate(network, tokens, token_bytes, 16, n_windows, torch.device("cpu"), torch.float32)
            for _ in range(2)
        )
    assert first == second and network.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in network.parameters())


def test_a_new_model_is_as_good_as_guessing():
    summary = train.main(flags(max_iters=1, learning_rate=1e-9))
    assert summary["val_loss"] == pytest.approx(math.log(N_IDS), abs=0.1)
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / math.log(2), rel=0.01)


def test_evaluation_interval_and_windows(monkeypatch):
    calls, evaluate = [], train.evaluate

    def recorded(model, tokens, token_bytes, block_size, n_windows, *rest):
        calls.append(n_windows)
        return evaluate(model, tokens, token_bytes, block_size, n_windows, *rest)

    monkeypatch.setattr(train, "evaluate", recorded)
    train.main(flags(max_iters=4, eval_interval=2, eval_windows=3))
    train.main(flags(max_iters=4, eval_interval=0, final_eval_windows=2))
    assert calls == [3, None, 2]  # the last step has only the final one


# --- the clock


class FakeClock:
    """Time that passes only where it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: self.now))
        for name, seconds in (("get_batch", 1.0), ("evaluate", 50.0), ("save_checkpoint", 700.0)):
            self._slow(monkeypatch, name, seconds)

    def _slow(self, monkeypatch, name: str, seconds: float) -> None:
        function = getattr(train, name)

        def slow(*args, **options):
            self.now += seconds
            return function(*args, **options)

        monkeypatch.setattr(train, name, slow)


def test_evaluation_and_saving_are_not_in_the_speed_PRF_4(monkeypatch):
    FakeClock(monkeypatch)
    summary = train.main(flags(max_iters=12, eval_interval=2, save_interval=3, eval_windows=1))
    rows = read_rows()
    assert [row["perf/step_ms"] for row in rows if row["step"] > 3] == pytest.approx([1000.0] * 9)
    assert [row["perf/tokens_per_sec"] for row in rows if row["step"] > 3] == pytest.approx([128.0] * 9)
    assert summary["train_seconds"] == pytest.approx(9.0)  # 12 steps less the first three, and nothing else
    assert summary["tokens_per_sec"] == pytest.approx(128.0)
    assert summary["tokens_seen"] == 12 * 128


@pytest.mark.parametrize("interval", [1, 4, 5, 100])
def test_speed_does_not_depend_on_when_it_is_logged_PRF_4(monkeypatch, interval):
    FakeClock(monkeypatch)
    summary = train.main(flags(max_iters=10, log_interval=interval, eval_interval=3, eval_windows=1))
    speeds = [row["perf/tokens_per_sec"] for row in read_rows(key="perf/tokens_per_sec")]
    assert speeds and speeds == pytest.approx([128.0] * len(speeds))
    assert (summary["train_seconds"], summary["tokens_per_sec"]) == pytest.approx((7.0, 128.0))


def test_time_to_compile_is_not_in_the_speed_PRF_1(monkeypatch):
    clock = FakeClock(monkeypatch)

    def compile(network):
        calls = []

        def call(*args, **options):
            calls.append(0)
            clock.now += 1000.0 if len(calls) == 1 else 0.0
            return network(*args, **options)

        call.training, call.eval, call.train = True, network.eval, network.train
        return call

    monkeypatch.setattr(torch, "compile", compile)
    summary = train.main(flags(compile=True, max_iters=8))
    assert (summary["train_seconds"], summary["tokens_per_sec"]) == pytest.approx((5.0, 128.0))
    assert all(row["perf/step_ms"] == pytest.approx(1000.0) for row in read_rows(key="perf/step_ms"))


@pytest.mark.parametrize("source", ["data sheet of L4", "measured matrix product"])
def test_utilisation_is_the_flops_done_over_those_possible_PRF_5(monkeypatch, capsys, source):
    FakeClock(monkeypatch)
    monkeypatch.setattr(train, "peak_flops", lambda device, dtype: (2e8, source))
    summary = train.main(flags(max_iters=8, vocab_size=40))
    # per token: a multiply and an add per weight, and per number of 16 keys and values; three times that
    # with backward: attention 2 x 4 x 32 x 32, feed-forward 2 x 8 x 32 x 32, output 32 x 40
    flops = 3 * (2 * (2 * 4 * 32**2 + 2 * 8 * 32**2 + 32 * 40) + 4 * 2 * 32 * 16)
    expected = flops * 128.0 / 2e8  # tokens per second of the clock
    assert summary["mfu"] == pytest.approx(expected) and summary["mfu_peak"] == source
    assert 0.05 < expected < 0.2
    rows = read_rows(key="perf/mfu")
    assert [row["step"] for row in rows] == [4, 5, 6, 7, 8]
    assert [row["perf/mfu"] for row in rows] == pytest.approx([expected] * 5)
    assert f"0.00 TFLOPS ({source})" in capsys.readouterr().out


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_run_too_short_for_the_clock_tells_no_speed(monkeypatch, capsys, n_steps):
    FakeClock(monkeypatch)
    summary = train.main(flags(max_iters=n_steps))
    assert summary["train_seconds"] == 0.0
    assert summary["tokens_per_sec"] is None and summary["mfu"] is None
    assert "too few steps to tell tokens/s" in capsys.readouterr().out


# --- folders


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "default"),
        (["small"], "small"),
        (["config/small.py"], "small"),
        (["small", "--attention=mqa"], "small-mqa"),
        (["small", "--attention=gqa", "--n_kv_head=2"], "small-gqa-n_kv_head_2"),
        (["small", "--norm=pre", "--position=rope"], "small-pre-rope"),
        (["small", "--dataset=notes/my_notes.txt"], "small-my_notes"),
        (["small", "--dataset=hub:owner/name"], "small-name"),
        (["small", "--dataset=."], "small-data"),
        (["small", "--tokenizer=char"], "small-char"),
        (["small", "--bpe_size=256"], "small-bpe_size_256"),
        (["small", "--text_column=a/b"], "small-text_column_a-b"),
        (["small", "--seed=3"], "small-seed_3"),
        (["small", "--max_iters=10", "--device=cpu", "--batch_size=4"], "small"),
        (["--qk_norm", "--no_bias"], "default-qk_norm_True-bias_False"),
    ],
)
def test_default_folder_tells_what_the_flags_changed(argv, name):
    parsed = configuration.parse(argv, train.TrainConfig, prog="train.py", description="-")
    assert train.default_out_dir(parsed) == Path("out", name)


def test_no_flag_of_the_model_or_the_data_writes_into_the_folder_of_the_preset():
    values = {int: "8", float: "0.25", str: "a"}
    data = {"dataset", "text_column", "tokenizer", "bpe_size", "val_fraction"}
    special = {
        "attention": "gqa", "norm": "pre", "position": "rope", "tokenizer": "char", "bpe_size": "300",
        "n_kv_head": "4", "tie_weights": "False", "bias": "False", "qk_norm": "True"
    }
    defaults = configuration.flatten(train.TrainConfig())
    for key in data | {field.name for field in fields(gpt.GPTConfig)}:
        value = special.get(key) or values.get(type(defaults[key]), "8")
        argv = ["small", f"--{key}={value}"]
        parsed = configuration.parse(argv, train.TrainConfig, prog="train.py", description="-")
        assert train.default_out_dir(parsed) != Path("out/small"), key


def test_runs_of_one_preset_lie_side_by_side(work):
    Path("mini.py").write_text("\n".join(f"{k} = {v!r}" for k, v in TINY.items() if k != "out_dir"), "utf-8")
    for more in ([], ["--attention=mqa"]):
        train.main(["mini.py", "--max_iters=1", *more])
    assert {p.name for p in Path("out").iterdir()} == {"mini", "mini-mqa"}
    assert read_json("out/mini-mqa/summary.json")["n_kv_head"] == 1


def test_an_earlier_run_is_moved_and_nothing_is_lost(work, capsys):
    kept = {}
    for n, seed in enumerate((0, 1, 2)):
        train.main(flags(max_iters=1, seed=seed))
        if n < 2:
            Path("run/notes.txt").write_text(f"mine {n}", encoding="utf-8")
            kept[f"run~{n + 1}"] = everything(work / "run")
    assert {p.name for p in work.glob("run*")} == {"run", "run~1", "run~2"}
    assert all(everything(work / name) == files for name, files in kept.items())
    assert [read_json(f"{name}/config.json")["seed"] for name in ("run~1", "run~2", "run")] == [0, 1, 2]
    assert "an earlier run was in run: it is now in run~2" in capsys.readouterr().out
    assert len(read_rows()) == 1  # one log per run


def test_a_folder_without_a_run_is_used_as_it_is(work):
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine", encoding="utf-8")
    train.main(flags(max_iters=1))
    assert Path("run/notes.txt").read_text(encoding="utf-8") == "mine" and not Path("run~1").exists()


# --- numbers that are not numbers


def test_a_gradient_that_is_not_a_number_stops_and_saves_nothing_TRN_6(work, refused, monkeypatch):
    def poison(n, logits, loss):
        return logits, loss * math.nan if n == 6 else loss

    patch_forward(monkeypatch, poison)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    error = refused(*flags(max_iters=20, save_interval=2, log_interval=7), leaves=("run",))
    assert "step 6: loss or gradient is not finite" in error and "run" in error
    assert sorted(p.name for p in Path("run/checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert all(t.isfinite().all() for t in weights().values())
    assert not Path("run/summary.json").exists()
    assert all(math.isfinite(row["train/loss"]) for row in read_rows())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_bad_gradient_stops_the_run_TRN_6_ATT_12(work, refused, monkeypatch, value):
    def poison(n, logits, loss):
        if n == 3:  # the loss stays as it is, and one gradient is spoilt on its way back
            loss.register_hook(lambda gradient: gradient * value)
        return logits, loss

    patch_forward(monkeypatch, poison)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    # found where the log is due, told for the step where it was
    error = refused(*flags(max_iters=9, log_interval=5), leaves=("run",))
    assert "step 3: loss or gradient is not finite" in error
    assert not Path("run/checkpoints").exists() and not Path("run/summary.json").exists()


def test_weights_that_blow_up_in_the_last_step_are_not_saved_TRN_6(work, refused, monkeypatch):
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    error = refused(*flags(max_iters=1, learning_rate=1e38, warmup=0), leaves=("run",))
    assert "step 1: validation loss is not finite" in error
    assert not Path("run/checkpoints").exists()


# --- devices, formats, kernels


def test_half_precision_on_a_cpu_is_refused_TRN_4(refused):
    error = refused(*flags(dtype="float16"))
    assert "--dtype=float16" in error and "float32" in error


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(refused, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert f"--device={name}" in refused(*flags(device=name))


def test_bfloat16_on_request_trains_with_float32_weights(capsys):
    summary = train.main(flags(dtype="bfloat16", max_iters=2))
    assert summary["dtype"] == "bfloat16" and math.isfinite(summary["val_loss"])
    assert {t.dtype for t in weights().values()} == {torch.float32}
    assert "products in bfloat16" in capsys.readouterr().out


def test_no_cuda_call_without_cuda_CFG_12(monkeypatch):
    def never(*args: object, **options: object) -> None:
        raise AssertionError("a CUDA call")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("synchronize", "max_memory_allocated", "is_bf16_supported", "current_device", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, never)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=ResourceWarning)  # those of earlier tests come any time
        summary = train.main(flags(device="auto", max_iters=2))
    assert summary["device"] in ("cpu", "mps")


def test_plain_attention_kernel_gives_the_same_losses_ATT_12():
    losses = {}
    for kernel in ("auto", "math"):
        train.main(flags(sdpa=kernel, attention="gqa", max_iters=5))
        rows = read_rows()
        losses[kernel] = [row["train/loss"] for row in rows]
        assert all(row["train/grad_norm"] > 0 for row in rows)
    assert losses["auto"] == pytest.approx(losses["math"], abs=1e-4)


def test_the_plain_kernel_is_the_only_one_left_ATT_12(monkeypatch):
    found = []
    forward = gpt.GPT.forward

    def recorded(self, *args, **options):
        enabled = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
        found.append((self.training, *enabled))
        return forward(self, *args, **options)

    monkeypatch.setattr(gpt.GPT, "forward", recorded)
    train.main(flags(sdpa="math", max_iters=1))
    assert set(found) == {(True, False, True), (False, False, True)}  # in training and in evaluation
    assert torch.backends.cuda.flash_sdp_enabled()  # put back


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_device_without_fused_adamw_trains_TRN_10(monkeypatch, kind):
    def missing(*args: object, **options: object) -> None:
        raise RuntimeError("no fused kernel for this device")

    expected = train.main(flags(optimizer=kind))["val_loss"]
    monkeypatch.setattr(torch, "_fused_adamw_", missing)
    assert train.main(flags(optimizer=kind))["val_loss"] == pytest.approx(expected, abs=1e-3)


# --- memory and disk


def test_out_of_memory_names_the_knobs_TRN_14(work, refused, monkeypatch):
    def too_much(n, logits, loss):
        torch.empty(2**50)  # asks for 4 PiB: the allocator's own error
        return logits, loss

    patch_forward(monkeypatch, too_much)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    error = refused(*flags(micro_batch_size=4), leaves=("run",))
    for knob in ("batch_size=8", "micro_batch_size=4", "block_size=16", "dtype=auto"):
        assert knob in error
    assert "lower micro_batch_size first" in error
    assert not Path("run/checkpoints").exists()


def test_a_model_too_large_for_the_memory_is_refused_TRN_14(refused):
    assert "out of memory" in refused(*flags(n_embd=2**22))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
     RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)")],
    ids=["python", "cuda", "mps"],
)
def test_out_of_memory_of_each_kind_TRN_14(work, refused, monkeypatch, error):
    def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr(train, "get_batch", fails)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    assert "out of memory with batch_size=8" in refused(*flags(), leaves=("run",))


def test_other_errors_are_not_called_out_of_memory(monkeypatch):
    def fails(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(train, "get_batch", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train.main(flags())


def test_full_disk_at_a_save_leaves_the_earlier_checkpoint_and_the_run_goes_on(work, monkeypatch, capsys):
    save, calls, before = train.save_checkpoint, [], {}

    def full(*args, **options):
        calls.append(args[1])
        if len(calls) == 2:
            before.update(everything(work / "run/checkpoints"))
            raise OSError(errno.ENOSPC, "No space left on device", "run/checkpoints/x")
        return save(*args, **options)

    monkeypatch.setattr(train, "save_checkpoint", full)
    summary = train.main(flags(max_iters=9, save_interval=2, keep_checkpoints=9))
    said = "step 4 can't be saved: [Errno 28] No space left on device: 'run/checkpoints/x'; the last saved "
    assert said + "is run/checkpoints/step-000002" in capsys.readouterr().out
    assert calls == [2, 4, 6, 8, 9] and len(before) == 5
    after = everything(work / "run/checkpoints")
    assert before.items() <= after.items()  # untouched
    assert [place.name for place in list_checkpoints(Path("run"))] == [f"step-00000{n}" for n in (2, 6, 8, 9)]
    assert summary["finished"] and [row["step"] for row in read_rows()] == list(range(1, 10))


def test_a_last_save_is_tried_again_before_the_run_gives_up(refused, monkeypatch):
    calls, waits = [], []

    def full(*args, **options):
        calls.append(args[1])
        raise OSError(errno.ENOSPC, "No space left on device", "run/checkpoints/x")

    monkeypatch.setattr(train, "save_checkpoint", full)
    monkeypatch.setattr(train.time, "sleep", waits.append)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    assert "No space left on device" in refused(*flags(max_iters=3, save_interval=2), leaves=("run",))
    assert calls == [2, 3, 3, 3] and waits == [0, *train.LAST_TRIES]
    assert not Path("run/summary.json").exists()


def test_a_file_that_may_grow_no_further_ends_in_one_line(work, refused, monkeypatch, capsys):
    # the system itself refuses the write, in the middle of the weights
    resource = pytest.importorskip("resource")
    train.main(flags(max_iters=1, out_dir="warm"))  # the data set is prepared
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        error = refused(*flags(max_iters=2), leaves=("run",))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "too large" in error.lower()
    assert not list(Path("run/checkpoints").iterdir()) and not Path("run/summary.json").exists()


# --- bad input


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--learning_rte=1"], ["learning_rte", "learning_rate"]),
        (["--n-layers=2"], ["n-layers", "n_layer"]),
        (["--lr=1"], ["--lr", "learning_rate"]),
        (["--n_layer=two"], ["--n_layer", "int", "'two'"]),
        (["--n_kv_head=abc"], ["--n_kv_head", "int", "None"]),
        (["--max_iters=1.5"], ["--max_iters", "int"]),
        (["--dropout=nan"], ["--dropout", "finite"]),
        (["--attention=mga"], ["--attention", "mha, gqa, mqa"]),
        (["--attention=mqa", "--n_kv_head=2"], ["mqa", "n_kv_head=2", "n_head=4"]),
        (["--attention=gqa", "--n_head=6", "--n_embd=48", "--n_kv_head=4"], ["n_kv_head=4", "n_head=6"]),
        (["--n_embd=30"], ["n_embd=30", "n_head=4"]),
        (["--n_head=0"], ["n_head=0", "at least 1"]),
        (["--batch_size=8", "--micro_batch_size=3"], ["batch_size=8", "micro_batch_size=3", "size=2"]),
        (["--max_iters=0"], ["max_iters=0"]),
        (["--warmup=1"], ["warmup=1.0"]),
        (["--learning_rate=0"], ["learning_rate=0.0", "above 0"]),
        (["--val_fraction=1"], ["val_fraction=1.0", "between 0 and 1"]),
        (["--bpe_size=255"], ["bpe_size=255", "256"]),
        (["--seed=-1"], ["seed=-1"]),
        (["no_such_preset.py"], ["no_such_preset.py", "presets", "small"]),
        (["smal"], ["smal", "config/small.py"]),
    ],
)
def test_a_wrong_option_is_refused_before_any_work_CFG_2_CFG_4(work, refused, argv, words):
    error = refused(*flags(), *argv)
    assert all(word in error for word in words), error
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("learning_rte = 1e-4", ["learning_rte", "learning_rate"]),
        ("n_layer = 'two'", ["n_layer", "int"]),
        ("n_kv_head = 'abc'", ["n_kv_head", "int", "None"]),
        ("import os", ["plain assignments"]),
    ],
)
def test_a_wrong_line_in_a_preset_is_refused_the_same_way_CFG_4(work, refused, line, words):
    Path("mine.py").write_text(f"batch_size = 8\n{line}\n", encoding="utf-8")
    error = refused("mine.py", *flags())
    assert "mine.py:2" in error and all(word in error for word in words), error
    assert not Path("data").exists()


def test_an_option_without_a_default_value_can_be_set_and_unset_CFG_2():
    Path("gqa.py").write_text('attention = "gqa"\nn_kv_head = 4\n', encoding="utf-8")
    for argv, expected in ((["--n_kv_head=1"], 1), ([], 4), (["--n_kv_head=None"], 2)):
        summary = train.main(["gqa.py", *flags(max_iters=1), *argv])
        assert summary["n_kv_head"] == expected


def test_harmless_differences_of_type_CFG_5():
    summary = train.main(flags(max_iters="1e0", learning_rate=1, dropout=0, out_dir="007", warmup=0))
    stored = read_json("007/config.json")
    assert (stored["max_iters"], stored["learning_rate"], stored["dropout"]) == (1, 1.0, 0.0)
    assert stored["out_dir"] == "007" and summary["steps"] == 1


def test_help_lists_every_option_and_does_nothing_else_CFG_6(work, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"--{key}" in printed for key in configuration.flatten(train.TrainConfig()))
    assert "small" in printed and {p.name for p in work.iterdir()} == {"text.txt"}


@pytest.mark.parametrize("name", ["typo", "shakespeare_char", "typo.txt", "no/such/folder"])
def test_a_data_set_that_is_not_there_CFG_9(refused, name):
    error = refused(*flags(dataset=name))
    assert name in error and "python" in error  # the data that is always there


@pytest.mark.parametrize(
    "content",
    [b"", b"  \n", b"a", b"\x00\x01\x02\xff\xfe" * 200, "naïve café ".encode("latin-1") * 100,
     bytes(range(256)) * 20],
    ids=["empty", "blank", "one byte", "binary", "latin-1", "all bytes"],
)
@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_a_file_that_is_no_text_is_refused(work, refused, content, tokenizer):
    Path("bad.txt").write_bytes(content)
    error = refused(*flags(dataset="bad.txt", tokenizer=tokenizer, bpe_size=256))
    assert "bad.txt" in error or "character" in error or "tokens" in error


def test_a_text_too_short_for_the_context_DAT_18_LDR_1(work, refused, capsys):
    Path("short.txt").write_text("abcdefghij" * 100, encoding="utf-8")
    error = refused(*flags(dataset="short.txt", block_size=256))
    n_val = int(re.search(r"the val split has (\d+) tokens", error)[1])
    assert 100 <= n_val <= 101 and "--block_size=256" in error
    largest = int(re.search(r"the largest block_size that fits is (\d+)", error)[1])
    assert largest == n_val - 1
    assert train.main(flags(dataset="short.txt", block_size=largest, max_iters=1))["val_loss"] > 0
    capsys.readouterr()
    shutil.rmtree("run")
    assert "val split" in refused(*flags(dataset="short.txt", block_size=largest + 1))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_DAT_12(refused):
    n = N_IDS
    error = refused(*flags(vocab_size=n - 1))
    assert f"vocab_size={n - 1}" in error and f"{n} ids" in error
    summary = train.main(flags(vocab_size=n + 7, max_iters=1))  # more is padding
    assert summary["n_params"] == sum(t.numel() for t in weights().values())
    assert weights()["transformer.wte.weight"].shape == (n + 7, 32)


def test_a_folder_that_is_a_file_is_refused(work, refused):
    Path("taken").write_text("mine", encoding="utf-8")
    assert "taken" in refused(*flags(out_dir="taken"))
    assert Path("taken").read_text(encoding="utf-8") == "mine"


# --- as a program


def test_mistakes_end_the_program_with_one_line(work):
    for argv, word in ((["--learning_rte=1"], "learning_rate"), (["--dataset=typo"], "typo")):
        process = program(*flags(dataset=None), *argv)
        out, error = process.communicate(timeout=60)
        assert process.returncode == 1 and error.count("\n") == 1
        assert error.startswith("train.py: error: ") and word in error and "Traceback" not in out
    assert {p.name for p in work.iterdir()} == {"text.txt"}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to another process")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint_CKP_12(work, number):
    with ended(program(*flags(max_iters=10**6, log_interval=1))) as process:
        log = Path("run/metrics.jsonl")
        wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") >= 3, process)
        process.send_signal(number)
        sent = time.monotonic()
        out, error = process.communicate(timeout=60)
        assert process.returncode == 128 + number and time.monotonic() - sent < 10
    assert "Traceback" not in error
    summary = read_json("run/summary.json")
    last = read_rows()[-1]["step"]
    assert summary["signal"] == number and summary["steps"] == last >= 3
    assert summary["tokens_seen"] == 128 * last
    place = Path(summary["checkpoint"])
    assert read_json(place / "config.json")["step"] == last and f"step-{last:06d}" == place.name
    assert all(t.isfinite().all() for t in weights().values())
    assert str(place) in out


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to another process")
def test_a_second_signal_ends_the_run_at_once(work):
    # the third step never ends, so the first signal's wish to finish it can't be fulfilled
    code = (
        "import sys, time, pathlib, config, train\n"
        "get_batch, n = train.get_batch, []\n"
        "def slow(*args):\n"
        "    n.append(0)\n"
        "    if len(n) == 3:\n"
        "        pathlib.Path('asleep').touch()\n"
        "        time.sleep(100)\n"
        "    return get_batch(*args)\n"
        "train.get_batch = slow\n"
        "config.run_main(train.main, 'train.py')\n"
    )
    with ended(program(*flags(), code=code)) as process:
        wait_for(Path("asleep").exists, process)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None  # held back until the step is done
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
    assert not Path("run/summary.json").exists() and not Path("run/checkpoints").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to a process")
def test_a_signal_during_the_last_evaluation_loses_nothing(work, monkeypatch):
    evaluate = train.evaluate

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*args)

    monkeypatch.setattr(train, "evaluate", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        train.main(flags())
    assert caught.value.code == 130 and signal.getsignal(signal.SIGINT) is before
    summary = read_json("run/summary.json")
    assert summary["steps"] == 4 and summary["val_loss"] > 0 and Path(summary["checkpoint"]).is_dir()
