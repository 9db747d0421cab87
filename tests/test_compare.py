"""compare.py: which runs a grid has, on what terms, and that what is there is neither made again nor lost."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tiny_run import TEXT, TINY, read_json

import compare
from comparison import cells as grid
from comparison.cells import finished
from model import GPTConfig, KVCache, estimate_n_params, match_parameters

SIZE = {key: value for key, value in TINY.items() if key not in ("out_dir", "log_interval", "max_iters")}


def flags(**changes) -> list[str]:
    """The command line of a tiny comparison."""
    options = {**SIZE, "max_iters": 6, "eval_interval": 3, "eval_windows": 2, "log_interval": 2, **changes}
    return [f"--{key}={value}" for key, value in options.items()]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working folder with the text; the runs' own processes use one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def planned(*argv: str) -> list[grid.Cell]:
    return compare.plan(list(argv))[1]


# --- which runs there are


def test_three_kinds_by_three_seeds_are_the_default():
    cells = planned("small")
    assert [cell.name for cell in cells] == [
        f"{variant}-s{seed}" for seed in (0, 1, 2) for variant in ("mha", "gqa-2", "mqa")
    ]
    assert [cell.config.model.n_kv_head for cell in cells[:3]] == [4, 2, 1]
    assert all(cell.config.measure_decode for cell in cells)
    assert {cell.out_dir.parent for cell in cells} == {Path("out/compare/small/runs")}


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--seeds=1", "--attention=mqa,mha"], ["mqa-s0", "mha-s0"]),
        (["--seed=4,9", "--attention", "mqa"], ["mqa-s4", "mqa-s9"]),
        (["--seeds=2", "--seed=5", "--attention=mqa"], ["mqa-s5"]),  # a named seed is the only one
        # one KV head for all is mqa, and one for each is mha, whatever they were called
        (["--seeds=1", "--n_kv_head=1,2,4"], ["mha-s0", "mqa-s0", "gqa-2-s0"]),
        (["--seeds=1", "--attention=gqa", "--n_kv_head=4"], ["mha-s0"]),
        (["--seeds=1", "--attention=gqa,mqa", "--n_kv_head=1"], ["mqa-s0"]),
        (
            ["--seeds=1", "--attention=mha,mqa", "--norm=post,pre"],
            ["mha-norm_post-s0", "mqa-norm_post-s0", "mha-norm_pre-s0", "mqa-norm_pre-s0"],
        ),
        (
            ["--seeds=1", "--attention=mqa", "--muon_lr=0.01,2e-2"],
            ["mqa-muon_lr_0.01-s0", "mqa-muon_lr_0.02-s0"],
        ),
        (["--seeds=1", "--attention=mqa,mqa"], ["mqa-s0"]),
    ],
)  # fmt: skip
def test_axes(argv, names):
    assert [cell.name for cell in planned("small", *argv)] == names


def test_a_text_option_may_have_a_comma():
    cells = planned("small", "--seeds=1", "--dataset=a,b.txt", "--wandb_group=x,y")
    assert len(cells) == 3 and {cell.config.dataset for cell in cells} == {"a,b.txt"}


def test_a_preset_of_one_kind_can_be_compared_with_the_others():
    assert [cell.config.model.n_kv_head for cell in planned("small_gqa", "--seeds=1")] == [4, 2, 1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--attention=mha", "--n_kv_head=1,2"], "n_kv_head=1,2 belongs to gqa, but --attention=mha"),
        (["--attention=mha,abc"], "--attention takes mha, gqa, mqa, not 'abc'"),
        (["--attention="], "--attention takes mha, gqa, mqa, not ''"),
        (["--seeds=1,2"], "--seeds=1,2: takes one value; --seed=0,1,2 names the seeds"),
        (["--match=steps,params"], "--match=steps,params: takes one value"),
        (["--seeds=0"], "seeds=0: must be at least 1"),
        (["--seed=0,x"], "--seed takes int (64 bits), not 'x'"),
        (["--nrom=post,pre"], "--nrom is not an option; did you mean norm?"),
        (["--norm=post,"], "--norm takes post, pre, not ''"),
        (["--n_kv_head=3"], "n_kv_head=3 can't group n_head=4"),
        (["--n_head=4,7"], "n_embd=128 can't be shared by n_head=7"),
        (["--match=tokens"], "--match takes steps, params, seconds, not 'tokens'"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_anything_runs(argv, words, place):
    with pytest.raises(ValueError) as caught:
        compare.main(["small", *argv])
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in place.iterdir()) == ["text.txt"]


def test_quick_is_an_eighth_of_the_steps_in_a_folder_of_its_own():
    cells = planned("small", "--quick", "--seeds=1")
    full = planned("small", "--seeds=1")[0].config
    c = cells[0].config
    assert (c.max_iters, c.eval_interval, c.final_eval_windows) == (full.max_iters // 8, 31, 100)
    assert cells[0].out_dir.parts[2] == "small-quick"


@pytest.mark.parametrize("shape", [{}, {"n_head": 12, "n_embd": 768}, {"bias": False, "n_head": 8}])
@pytest.mark.parametrize("kind", [{"attention": "gqa"}, {"attention": "mqa"}, {"attention": "mha"}])
def test_match_params_widens_the_feed_forward_until_the_weights_are_as_many(kind, shape):
    fewer = GPTConfig(vocab_size=100, **shape, **kind)
    mha, wide = GPTConfig(vocab_size=100, **shape), match_parameters(fewer)
    lost = fewer.head_dim * (fewer.n_head - fewer.n_kv_head)
    assert wide.n_inner == 4 * fewer.n_embd + lost and wide.n_kv_head == fewer.n_kv_head
    # each of the lost keys and values had a bias, each new unit has one
    off = estimate_n_params(mha)["total"] - estimate_n_params(wide)["total"]
    assert off == (fewer.n_layer * lost if fewer.bias else 0)


def test_match_params_reaches_the_command_line():
    cells = planned("small", "--match=params", "--seeds=1")
    assert [cell.config.model.n_inner for cell in cells] == [512, 576, 608]
    assert [cell.flags.get("n_inner") for cell in cells] == [None, 576, 608]
    models = [GPTConfig(**{**vars(cell.config.model), "vocab_size": 1025}) for cell in cells]
    n_params = [estimate_n_params(m)["total"] for m in models]
    assert max(n_params) - min(n_params) < 0.001 * n_params[0]


# --- real runs


def batches(report: dict) -> dict[tuple[str, int], str]:
    return {(cell["variant"], cell["seed"]): cell["batches_sha256"] for cell in report["cells"]}


def test_a_grid_its_report_and_its_second_call(place, capsys):
    one = compare.main(flags(seeds=1))
    assert [cell["variant"] for cell in one["cells"]] == ["mha", "gqa-2", "mqa"] and not one["failed"]
    runs = Path("out/compare/default/runs")
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}
    assert "one seed: no interval" in capsys.readouterr().out

    two = compare.main(flags(seeds=2))
    told = capsys.readouterr().out
    assert "6, of which 3 are there already" in told
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())  # not made again
    assert two["cells"][:3] == one["cells"]
    assert two == read_json("out/compare/default/report.json")

    # identical batches across kinds, others for another seed
    seen = batches(two)
    assert two["identical_batches"] is True
    for seed in (0, 1):
        assert len({seen[variant, seed] for variant in ("mha", "gqa-2", "mqa")}) == 1
    assert seen["mha", 0] != seen["mha", 1] and len(seen["mha", 0]) == 64

    for cell in two["cells"]:  # each number is that of a run folder
        summary = read_json(f"{cell['out_dir']}/summary.json")
        last = json.loads(Path(cell["out_dir"], "metrics.jsonl").read_text().splitlines()[-1])
        assert cell["val_loss"] == summary["val_loss"] == last["val/loss"]
        assert cell["train_tokens_per_sec"] == summary["tokens_per_sec"]
        rows = cell["decode"]
        points = [(row["batch"], row["context"]) for row in rows]
        assert points == [(batch, context) for batch in (1, 8, 32) for context in (3, 7, 15)]
        assert cell["decode_tokens_per_sec"] == rows[-1]["decode_tokens_per_sec"] > 0
        config = GPTConfig(**{**{k: SIZE[k] for k in ("n_layer", "n_head", "n_embd", "block_size")},
                              "vocab_size": 15, "attention": cell["attention"]})  # fmt: skip
        assert cell["kv_cache_bytes_full_context"] == KVCache(config, 1, 16).nbytes
        assert cell["kv_cache_bytes_full_context"] == cell["kv_cache_bytes_formula"]
        assert [row["kv_cache_bytes"] for row in rows] == [
            KVCache(config, row["batch"], row["context"]).nbytes for row in rows
        ]
    assert [row["n_seeds"] for row in two["summary"]] == [2, 2, 2]
    differences = [row["difference_from_mha"] for row in two["summary"]]
    losses = {(cell["variant"], cell["seed"]): cell["val_loss"] for cell in two["cells"]}
    paired = [losses["mqa", seed] - losses["mha", seed] for seed in (0, 1)]
    assert differences[0] is None and differences[2] == pytest.approx(sum(paired) / 2)

    # other options make other runs: the old ones are moved, not mixed in
    three = compare.main(flags(seeds=1, max_iters=4, attention="mqa"))
    assert [cell["steps"] for cell in three["cells"]] == [4]
    assert read_json(runs / "mqa-s0~1" / "summary.json")["steps"] == 6
    page = Path("out/compare/default/report.html").read_text(encoding="utf-8")
    assert "<html" in page and Path("out/compare/default/trade_off.png").read_bytes()[:4] == b"\x89PNG"


def test_a_cell_that_fails_does_not_lose_the_others(place, monkeypatch, capsys):
    argv = flags(attention="mqa", block_size="250,16", seeds=1)
    with pytest.raises(ValueError, match=r"1 of 2 runs failed, see .*logs; the same command"):
        compare.main(argv)
    report = read_json("out/compare/default/report.json")
    assert [cell["variant"] for cell in report["cells"]] == ["mqa block_size=16"]
    (failed,) = report["failed"]
    assert (failed["variant"], failed["seed"]) == ("mqa block_size=250", 0)
    assert "too few for --block_size=250" in failed["error"] and "exit code 1" in failed["error"]
    assert "Traceback" not in failed["error"]
    capsys.readouterr()
    Path("text.txt").write_text(TEXT * 2, encoding="utf-8")  # what was wrong is put right
    assert len(compare.main(argv)["cells"]) == 2


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to another process")
def test_a_signal_ends_the_grid_in_order_and_the_same_command_goes_on(place, monkeypatch):
    often = {"save_interval": 1, "log_interval": 1, "eval_interval": 0}
    argv = flags(attention="mha,mqa", seeds=1, max_iters=4000, **often)
    run, calls = compare.steps_done, []

    def interrupting(out_dir, since):
        done = run(out_dir, since)
        if done >= 3 and not calls:
            calls.append(done)
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    monkeypatch.setattr(compare, "steps_done", interrupting)
    with pytest.raises(SystemExit) as caught:
        compare.main(argv)
    assert caught.value.code == 128 + signal.SIGTERM and calls
    summary = read_json("out/compare/default/runs/mha-s0/summary.json")
    assert summary["signal"] == signal.SIGTERM and 3 <= summary["steps"] < 4000
    assert not Path("out/compare/default/runs/mqa-s0").exists()
    monkeypatch.setattr(compare, "steps_done", run)
    first = compare.plan(argv)[1][0]
    assert not finished(first) and grid.begun(first)
    log = Path("out/compare/default/logs/mha-s0.log")
    monkeypatch.setattr(compare, "POLL_SECONDS", 0.05)

    def stop_once_resumed(out_dir, since):
        if "resumed    " in log.read_text(encoding="utf-8"):
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.setattr(compare, "steps_done", run)
        return run(out_dir, since)

    monkeypatch.setattr(compare, "steps_done", stop_once_resumed)
    with pytest.raises(SystemExit):
        compare.main(argv)
    assert read_json("out/compare/default/runs/mha-s0/summary.json")["steps"] >= summary["steps"]
    assert not Path("out/compare/default/runs/mha-s0~1").exists()


def test_match_seconds_gives_a_faster_variant_more_steps(place, monkeypatch):
    monkeypatch.setattr(compare, "PILOT_ROUNDS", 1)
    argv = flags(attention="mha,mqa", seeds=1, match="seconds", max_iters=40, eval_interval=0)
    report = compare.main(argv)
    pilot = read_json("out/compare/default-seconds/pilot.json")
    rate, steps = pilot["tokens_per_sec"], pilot["steps"]
    assert steps["mha"] == 40 and steps["mqa"] == round(40 * rate["mqa"] / rate["mha"])
    assert {cell["variant"]: cell["steps"] for cell in report["cells"]} == steps
    assert report["identical_batches"] in (None, True)  # as many steps by chance
    monkeypatch.setattr(compare, "run_cell", None)  # nothing is timed or trained again
    assert compare.main(argv)["cells"] == report["cells"]


def test_batches_that_differ_are_told():
    rows = [
        {"seed": 0, "axes": {}, "steps": 5, "batches_sha256": "a"},
        {"seed": 0, "axes": {}, "steps": 5, "batches_sha256": "a"},
        {"seed": 1, "axes": {}, "steps": 5, "batches_sha256": "b"},
    ]
    assert compare.identical_batches(rows) is True
    assert compare.identical_batches([*rows, {**rows[2], "batches_sha256": "c"}]) is False
    assert compare.identical_batches([*rows, {**rows[2], "steps": 6}]) is None
    other = {**rows[2], "axes": {"norm": "pre"}, "batches_sha256": "c"}
    assert compare.identical_batches([*rows, other]) is True


def test_progress_is_read_off_a_log_that_may_be_anything(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert compare.steps_done(tmp_path, 0) == 0
    for text, steps in ((b"", 0), (b"{", 0), (b"[]\n", 0), (b'{"step": 3}\n', 3), (b'{"step": 3}\n{"st', 0)):
        log.write_bytes(text)
        assert compare.steps_done(tmp_path, 0) == steps
    log.write_bytes(b'{"step": 3}\n')
    assert compare.steps_done(tmp_path, time.time() + 60) == 0  # of an earlier run


def test_help_lists_the_options_of_both(capsys):
    with pytest.raises(SystemExit) as caught:
        compare.main(["--help"])
    told = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(word in told for word in ("--seeds", "--match", "--quick", "--n_layer"))


def test_a_run_that_is_killed_is_told_by_its_signal(place, monkeypatch):
    killer = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    Path("killed.py").write_text(killer, encoding="utf-8")
    monkeypatch.setattr(compare, "TRAIN", Path("killed.py"))
    with pytest.raises(ValueError, match="1 of 1 runs failed"):
        compare.main(flags(attention="mqa", seeds=1))
    assert not Path("out/compare/default/report.json").exists()  # there is nothing to report
