"""The benchmarks: their clocks, tables and limits, what they compare, and the one JSON object at the end."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import KINDS, ROOT, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from tiny_run import flags

import config as configuration
import measure
import train
from benchmarks import decode, faults
from measure import interleaved, machine, measure_read_bandwidth, seconds, table
from model import GPTConfig, kv_cache_bytes, matmul_params

CPU = torch.device("cpu")
ROW_KEYS = [
    "attention", "n_kv_head", "batch", "context", "dtype", "weights", "prefill_tokens_per_sec",
    "decode_tokens_per_sec", "step_ms", "limit_step_ms", "fraction_of_limit", "hf_decode_tokens_per_sec",
    "kv_cache_bytes",
]  # fmt: skip


# --- clocks


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that stands still unless told; `events` is what was asked of it and of the device, in order."""
    found = SimpleNamespace(now=0.0, events=[])

    def perf_counter() -> float:
        found.events.append("clock")
        return found.now

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(measure, "synchronize", lambda device: found.events.append(str(device)))
    return found


def test_seconds_are_read_when_the_device_is_done_PRF_2(clock):
    def work() -> None:
        clock.events.append("work")
        clock.now += 2.5

    assert seconds(work, CPU) == 2.5
    assert clock.events == ["cpu", "clock", "work", "cpu", "clock"]


def test_sides_take_turns_and_the_median_of_all_but_the_first_round_counts_PRF_1(clock):
    order = []
    times = {"a": [100.0, 3.0, 1.0, 9.0, 2.0, 2.5], "b": [200.0, 5.0, 5.0, 70.0, 6.0, 4.0]}

    def side(name: str):
        def work() -> None:
            clock.now += times[name][order.count(name)]
            order.append(name)

        return work

    taken = interleaved({name: side(name) for name in times}, 5, CPU)
    assert order == ["a", "b"] * 6
    assert taken == {"a": pytest.approx(2.5), "b": pytest.approx(5.0)}


def test_bandwidth_is_the_best_of_several_sums_of_a_large_block(clock, monkeypatch):
    waits = iter([9.0, 0.5, 0.25, 2.0])  # the first one is not counted
    sizes = []

    class Block:
        def sum(self) -> None:
            clock.now += next(waits)

    monkeypatch.setattr(torch, "ones", lambda n, **options: sizes.append((n, options["dtype"])) or Block())
    assert measure_read_bandwidth(CPU, 2**20, repeats=3) == 2**20 / 0.25
    assert sizes == [(2**18, torch.float32)]


def test_a_real_bandwidth_is_positive():
    assert 1e7 < measure_read_bandwidth(CPU, 2**22, repeats=2) < 1e14


def test_machine_needs_no_known_name_PRF_5(monkeypatch):
    m = machine(CPU)
    assert list(m) == ["processor", "threads", "device", "torch", "python", "system"]
    assert m["processor"] and m["threads"] == torch.get_num_threads() and m["torch"] == torch.__version__

    def refuse(*args, **options):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", refuse)
    assert machine(CPU)["device"] == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU of 2040")
    assert machine(torch.device("cuda"))["processor"] == "Some GPU of 2040"


def test_table():
    rows = [{"kind": "mha", "n_rows": 8, "step_ms": 1234.567}, {"kind": "mqa", "n_rows": None}]
    assert table(rows, {"kind": "", "n_rows": "d", "step_ms": ",.1f"}).splitlines() == [
        "kind  n rows  step ms",
        " mha       8  1,234.6",
        " mqa       -        -",
    ]
    assert table([], {"a": ""}) == "a"


# --- steps


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_step_always_reads_the_same_context(attention, dtype):
    model = tiny_model(attention=attention).to(dtype)
    cache = measure.filled_cache(model.config, 3, 10, dtype, CPU)
    assert (cache.length, cache.max_len, cache.k.dtype) == (10, 11, dtype)
    assert cache.nbytes == kv_cache_bytes(model.config, 11, dtype, 3)
    assert torch.all(cache.k.float().std(dim=(1, 2, 3, 4)) > 0.5) and torch.isfinite(cache.v).all()
    seen = []

    def look(module, args, options, out) -> None:
        seen.append((args[0].shape, options["cache"].length))

    model.register_forward_hook(look, with_kwargs=True)
    step = decode.decode_step(model, 3, 10, dtype)
    for _ in range(4):
        step()
    assert seen == [((3, 1), 11)] * 4


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@torch.inference_mode()
def test_transformers_has_the_same_shape_and_context():
    for attention in KINDS:
        config = tiny_config(attention=attention, n_embd=48, norm="pre")
        model = decode.hf_model(config, torch.float32, CPU)
        assert not model.training
        inside = sum(
            p.numel()
            for name, p in model.named_parameters()
            if p.dim() == 2 and not any(table in name for table in ("embed", ".wte.", ".wpe."))
        )
        assert inside == matmul_params(config) - 48 * 61  # all but the output layer, which is the embedding
        seen = []

        def look(module, args, options, out, seen=seen) -> None:
            seen.append(options["past_key_values"])

        model.register_forward_hook(look, with_kwargs=True)
        step = decode.hf_step(model, config, 3, 10, torch.float32)
        for _ in range(3):
            step()
            assert seen[-1].get_seq_length() == 11
            assert seen[-1].layers[0].keys.shape == (3, config.n_kv_head, 11, config.head_dim)


@torch.inference_mode()
def test_cached_over_uncached_is_the_area_under_both_lines(monkeypatch):
    # n + 1 seconds a token with a cache of n, n squared without: the sum over 1 .. 8 by trapezoids
    lengths = iter(range(1, 9))

    def fake(sides: dict, repeats: int, device: torch.device) -> dict[str, float]:
        n = next(lengths)
        for work in sides.values():
            work()
        return {"cached": n + 1.0, "uncached": float(n * n)}

    monkeypatch.setattr(decode, "interleaved", fake)
    ratio = decode.cached_over_uncached(tiny_config(), 8, torch.float32, CPU)
    by_hand = [sum((f(n) + f(n + 1)) / 2 for n in range(1, 8)) for f in (lambda n: n * n, lambda n: n + 1)]
    assert ratio == pytest.approx(by_hand[0] / by_hand[1]) and next(lengths, None) is None


# --- one run


def run(*options: str, cwd: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.decode", *options],
        cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A small run on a CPU, and its plot where matplotlib is installed."""
    picture = tmp_path_factory.mktemp("plots") / "decode.png"
    plot = [f"--plot={picture}"] if find_spec("matplotlib") else []
    return run("--small", "--repeats=1", "--no_hf", "--device=cpu", *plot, cwd=picture.parent), picture


def test_the_last_line_is_one_json_object_with_the_agreed_keys(done):
    process, _ = done
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr and "read bandwidth" in process.stderr
    *report, last = process.stdout.splitlines()
    result = json.loads(last)
    assert list(result) == ["machine", "read_bandwidth_gb_per_s", "rows", "cached_over_uncached"]
    assert result["machine"]["device"] == "cpu" and result["machine"]["threads"] == 1
    assert 0.01 < result["read_bandwidth_gb_per_s"] < 1e5 and result["cached_over_uncached"] > 0
    assert all(list(row) == ROW_KEYS for row in result["rows"])
    points = [(1, 32), (2, 32), (2, 128)]
    names = ("attention", "n_kv_head", "batch", "context", "weights")
    assert [tuple(row[name] for name in names) for row in result["rows"]] == [
        (attention, heads, batch, context, weights)
        for attention, heads in (("mha", 4), ("gqa", 2), ("mqa", 1))
        for batch, context, weights in [*((b, n, "bfloat16") for b, n in points), (1, 32, "int8")]
    ]
    # a table for people before it: a line per row, and one for each column's name
    assert len(report) == 1 + len(result["rows"]) + 1
    assert report[0].split()[:5] == ["attention", "n", "kv", "head", "batch"]
    assert report[-1].startswith("64 new tokens without a cache take")


def test_figures_of_a_row_agree_with_each_other_and_with_the_formulas_PRF_5(done):
    result = json.loads(done[0].stdout.splitlines()[-1])
    bandwidth = 1e9 * result["read_bandwidth_gb_per_s"]  # as measured: no table of devices has a say
    for row in result["rows"]:
        c = GPTConfig(
            vocab_size=1024, block_size=256, n_layer=2, n_head=4, n_embd=64, attention=row["attention"]
        )
        cache = 2 * 2 * row["batch"] * row["n_kv_head"] * row["context"] * 16 * 2
        formula = kv_cache_bytes(c, row["context"], torch.bfloat16, row["batch"])
        assert row["kv_cache_bytes"] == cache == formula
        weights = matmul_params(c) * (1 if row["weights"] == "int8" else 2)
        assert row["limit_step_ms"] == pytest.approx(1e3 * (weights + cache) / bandwidth)
        assert row["step_ms"] > 0 and row["dtype"] == "bfloat16" and row["hf_decode_tokens_per_sec"] is None
        assert row["fraction_of_limit"] == pytest.approx(row["limit_step_ms"] / row["step_ms"])
        assert row["decode_tokens_per_sec"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert (row["prefill_tokens_per_sec"] is None) == (row["weights"] == "int8")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_plot_is_written(done):
    process, picture = done
    assert process.returncode == 0, process.stderr
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 5000
    assert list(picture.parent.iterdir()) == [picture]


def test_parts_can_be_left_out_and_transformers_missing_is_no_error(capsys, monkeypatch):
    monkeypatch.setattr(decode, "hf_model", lambda *args: (_ for _ in ()).throw(ImportError("none here")))
    result = decode.main(
        ["--small", "--repeats=1", "--no_int8", "--no_uncached", "--dtype=float32", "--device=cpu"]
    )
    assert result["cached_over_uncached"] is None and len(result["rows"]) == 9
    assert {row[name] for row in result["rows"] for name in ("weights", "dtype")} == {"float32"}
    assert result["rows"][0]["kv_cache_bytes"] == 2 * 2 * 4 * 32 * 16 * 4
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repeats=0"], "repeats=0: must be at least 1"),
        (["--dtype=float16", "--device=cpu"], "--dtype=float16 needs a GPU"),
        (["--dtype=int4"], "float32, bfloat16, float16"),
        (["--plot=nowhere/x.png"], "--plot=nowhere/x.png: there is no folder nowhere"),
        (["--contxt=4"], "contxt"),
    ],
)
def test_bad_options_are_one_line_before_any_measuring(options, message, monkeypatch, capsys):
    monkeypatch.setattr(decode, "measure_read_bandwidth", lambda *args: pytest.fail("it went to work"))
    monkeypatch.setattr(decode, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "argv", ["benchmarks.decode", *options])
    with pytest.raises(SystemExit) as ended:
        configuration.run_main(decode.main, "benchmarks.decode")
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and out == "" and len(err.splitlines()) == 1 and message in err


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch):
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--plot=x\.png needs matplotlib: pip install matplotlib"):
        decode.main(["--plot=x.png", "--device=cpu"])


# --- kills, damaged files, and saving


@pytest.fixture
def two_runs(work):
    """Two equal runs of train.py."""
    for out_dir in ("one", "two"):
        train.main(flags(out_dir=out_dir, save_interval=2, eval_interval=2, eval_windows=3))
    return work


def test_equal_runs_do_not_differ_and_each_difference_is_seen(two_runs):
    assert faults.differences(Path("one"), Path("two")) == []
    log = Path("two/metrics.jsonl")
    rows = log.read_text(encoding="utf-8")
    log.write_text(rows.replace('"perf/train_seconds": ', '"perf/train_seconds": 1'), encoding="utf-8")
    assert faults.differences(Path("one"), Path("two")) == []  # time is no part of it
    log.write_text(rows + rows.splitlines(keepends=True)[-1], encoding="utf-8")
    assert faults.differences(Path("one"), Path("two")) == ["metrics.jsonl"]
    log.write_text(rows, encoding="utf-8")
    for name, which in (("step-000004", "last"), ("step-000002", "best")):
        for file in ("model.safetensors", "training.safetensors"):
            path = Path("two/checkpoints", name, file)
            whole, stored = path.read_bytes(), load_file(path)
            key = max(stored, key=lambda key: stored[key].numel())
            stored[key].view(-1)[0] += 1e-6
            save_file(stored, path)
            assert faults.differences(Path("one"), Path("two")) == [f"{which}: {file}"]
            path.write_bytes(whole)
    Path("two/checkpoints/best").unlink()
    (found,) = faults.differences(Path("one"), Path("two"))
    assert found.startswith("best: ") and found.endswith(" and None")


def test_checkpoints_that_can_not_be_used_are_counted_CKP_6(two_runs):
    run = Path("one")
    assert faults.unusable(run, 0) == ([], 4)
    (lost,), newest = faults.unusable(run, 6)
    assert newest == 4 and lost == "one: step 6 was saved, and is gone"
    for file in ("model.safetensors", "config.json", "tokenizer.json", "training.safetensors"):
        path = run / "checkpoints" / "step-000002" / file
        whole = path.read_bytes()
        path.unlink()
        (torn,), newest = faults.unusable(run, 4)
        assert newest == 4 and file in torn
        path.write_bytes(whole[:-1])
        assert len(faults.unusable(run, 4)[0]) == 1
        path.write_bytes(whole)
    (run / "checkpoints/step-000002/manifest.json").unlink()
    assert len(faults.unusable(run, 4)[0]) == 1
    assert faults.unusable(Path("nowhere"), 0) == ([], 0)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 250 * 0.1),  # after each evaluation
        ({"keep_best": False}, 600),  # each 10 minutes
        ({"keep_best": False, "max_iters": 750}, 75),  # the last one alone
        ({"keep_best": False, "save_minutes": 1.0}, 60),
        ({"save_interval": 50}, 5),
        ({"eval_interval": 0, "save_minutes": 0.0, "max_iters": 10**5}, 10**4),
    ],
    ids=str,
)
def test_share_of_saving_is_by_what_comes_first(options, seconds):
    c = train.TrainConfig(**{"max_iters": 10**5, **options})
    assert faults.save_share(0.5, 0.1, c) == pytest.approx(0.5 / (0.5 + seconds))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_run_is_killed_gone_on_with_and_compared(work, monkeypatch, capsys):
    monkeypatch.setattr(faults, "EARLY", 0.0)
    monkeypatch.setattr(faults, "ARGV", [*faults.ARGV, "--max_iters=80"])
    result = faults.main(["--kills=1", "--files=0", "--preset=none"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert list(result) == [
        "kills", "resumed_bit_equal", "unusable_checkpoints", "fuzzed_files", "fuzz_failures",
        "save_share_of_time", "resume_seconds",
    ]  # fmt: skip
    assert (result["kills"], result["resumed_bit_equal"], result["unusable_checkpoints"]) == (1, True, 0)
    assert {p.name for p in work.iterdir()} == {"text.txt"}


@pytest.mark.parametrize("option", ["--kills=-1", "--files=-1", "--steps=7", "--kill=3"])
def test_bad_options_of_the_fault_benchmark(option):
    with pytest.raises(ValueError, match=option[2:5]):
        faults.main([option])
