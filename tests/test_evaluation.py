"""The same loss each time it is asked for, and a run that stops when that loss no longer falls."""

import math
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from tiny_run import TEXT, difference, flags, read_json, read_rows, weights

import train
from checkpoint import best_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from data.loader import open_tokens
from data.prepare import load_prepared

pytestmark = pytest.mark.usefixtures("work")


def everything(root: Path) -> dict[str, bytes]:
    """Each file under a folder and what is in it."""
    return {str(p): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture
def trained(work, capsys) -> None:
    """A short run in the folder; the screen is clean again."""
    train.main(flags(max_iters=1))
    capsys.readouterr()


def evaluate_only(**changes: object) -> dict[str, float]:
    return train.main(flags(eval_only=True, **changes))


# --- --eval_only


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_eval_only_gives_the_loss_of_the_run_each_time_TRN_13(work, capsys, tokenizer):
    summary = train.main(flags(tokenizer=tokenizer, bpe_size=258, max_iters=5, dropout=0.2, qk_norm=True))
    before = everything(work)
    capsys.readouterr()
    first, second = evaluate_only(), evaluate_only()
    assert first == second and everything(work) == before  # and nothing is written
    assert first == {name: summary[f"val_{name}"] for name in ("loss", "bits_per_byte", "perplexity")}
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    (folder,) = Path("data/prepared").iterdir()
    prepared = load_prepared(folder)
    with open_tokens(prepared.val) as tokens:
        targets = tokens.read(1, tokens.n_tokens - 1)  # all but the first, which nothing comes before
    n_bytes = prepared.tokenizer.token_bytes()[targets].sum()
    bits = first["loss"] * len(targets) / math.log(2)
    assert first["bits_per_byte"] == pytest.approx(bits / n_bytes, rel=1e-6)
    assert n_bytes > 1.1 * len(targets) if tokenizer == "bpe" else n_bytes == len(targets) - 1
    printed = capsys.readouterr().out
    assert printed.count(f"run/checkpoints/step-000005: {first['loss']:.6f} nats per token") == 2
    assert f"{first['bits_per_byte']:.6f} bits per byte, perplexity {first['perplexity']:,.4f}" in printed


def test_eval_only_takes_model_and_data_from_the_run_TRN_13(work):
    # not from the command line, whose defaults are another model and another text
    summary = train.main(flags(n_layer=3, attention="mqa", position="rope"))
    found = train.main(["--eval_only=True", "--out_dir=run", "--device=cpu"])
    assert found["loss"] == summary["val_loss"]


def test_eval_only_takes_the_newest_checkpoint_and_all_of_the_split_TRN_13(work, capsys):
    summary = train.main(flags(max_iters=4, save_interval=2, final_eval_windows=1))
    capsys.readouterr()
    found = evaluate_only(eval_windows=1)
    printed = capsys.readouterr().out
    assert "step-000004: " in printed and "on 204 tokens" in printed  # 205 are held back
    assert found["loss"] != summary["val_loss"]  # that was one window of 16


def test_eval_only_tells_what_int8_weights_cost(work):
    train.main(flags(max_iters=20, optimizer="muon"))
    plain, int8 = evaluate_only(), evaluate_only(eval_weights="int8")
    assert 0 < abs(int8["loss"] - plain["loss"]) < 0.01
    assert evaluate_only(eval_weights="int8") == int8


def test_eval_only_in_bfloat16_is_near_and_repeatable_TRN_13(work):
    summary = train.main(flags())
    first, second = evaluate_only(dtype="bfloat16"), evaluate_only(dtype="bfloat16")
    assert first == second and first["loss"] != summary["val_loss"]
    assert first["loss"] == pytest.approx(summary["val_loss"], abs=0.01)


@pytest.mark.parametrize(
    "text", [TEXT + "!", "the dog sat on the mat and the cat sat on the log. " * 40, TEXT * 2],
    ids=["a new character", "the same characters", "more of the same"],
)
def test_eval_only_is_refused_when_the_data_has_changed_TRN_13(trained, refused, text):
    Path("text.txt").write_text(text, encoding="utf-8")
    error = refused(*flags(eval_only=True), leaves=("run",))
    assert "step-000001" in error and "text.txt has changed" in error
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    assert evaluate_only()["loss"] > 0  # the old text again, and it goes


def test_eval_only_without_a_run_is_one_line_TRN_13(refused):
    assert "no checkpoint in run" in refused(*flags(eval_only=True))


def test_eval_only_without_the_data_is_one_line_TRN_13(trained, refused):
    Path("text.txt").unlink()
    assert "text.txt" in refused(*flags(eval_only=True), leaves=("run",))


def test_eval_only_of_a_model_from_elsewhere_says_what_is_missing_TRN_13(trained, refused):
    loaded = load_checkpoint(Path("run"))
    save_checkpoint(Path("run"), 2, loaded.model, loaded.tokenizer, {})  # as a converted model would be
    error = refused(*flags(eval_only=True), leaves=("run",))
    assert "does not say which data it learned from" in error


# --- --patience


def script(monkeypatch, losses: list[float]) -> list[tuple[int | None, dict[str, torch.Tensor]]]:
    """Validation losses in a given order; the windows asked for and the weights at each evaluation."""
    seen, coming = [], iter(losses)

    def scripted(model, tokens, token_bytes, block_size, n_windows, *rest):
        seen.append((n_windows, {name: t.clone() for name, t in model.state_dict().items()}))
        loss = next(coming)
        return {"loss": loss, "bits_per_byte": loss / math.log(2), "perplexity": math.exp(loss)}

    monkeypatch.setattr(train, "evaluate", scripted)
    return seen


def saved_as(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As in a file: a tied table once."""
    return {name: t for name, t in state.items() if name != "lm_head.weight"}


OPTIONS = {"max_iters": 20, "eval_interval": 2, "eval_windows": 3}


@pytest.mark.parametrize(
    ("losses", "patience", "stop", "best"),
    [
        ([3.0, 2.5, 2.7, 2.6, 2.55], 3, 10, 4),
        ([3.0, 2.5, 2.7, 2.4, 2.4, 2.4], 2, 12, 8),  # as good is not better
        ([2.0, 2.5], 1, 4, 2),
    ],
)
def test_a_run_stops_and_keeps_the_best_TRN_12(monkeypatch, losses, patience, stop, best):
    seen = script(monkeypatch, losses)
    summary = train.main(flags(**OPTIONS, patience=patience))
    assert summary["steps"] == stop and len(seen) == len(losses)  # no evaluation after the last one
    assert [row["val/loss"] for row in read_rows(key="val/loss")] == losses
    newest = list_checkpoints(Path("run"))[-1]
    assert newest.name == f"step-{best:06d}" and Path(summary["checkpoint"]) == newest
    assert difference(weights(), saved_as(seen[best // 2 - 1][1])) == 0.0
    # what the summary and the file tell is about those weights
    assert summary["val_loss"] == min(losses) == load_checkpoint(Path("run")).info["val"]["loss"]
    assert summary["val_perplexity"] == pytest.approx(math.exp(min(losses)))


@pytest.mark.parametrize(("last", "kept"), [(2.3, "step-000006"), (2.5, "step-000004")])
def test_a_run_that_ends_while_it_waits_keeps_the_best_too_TRN_12(monkeypatch, last, kept):
    seen = script(monkeypatch, [3.0, 2.4, last])  # the third is after the last step
    summary = train.main(flags(**{**OPTIONS, "max_iters": 6}, patience=2, final_eval_windows=1))
    assert summary["steps"] == 6 and Path(summary["checkpoint"]).name == kept
    assert list_checkpoints(Path("run"))[-1].name == kept
    assert summary["val_loss"] == min(2.4, last)
    assert [windows for windows, _ in seen] == [3, 3, 3]  # losses on other windows would not compare


def test_other_saves_do_not_push_the_best_out_TRN_12(monkeypatch):
    script(monkeypatch, [3.0, 2.0, 2.1, 2.2, 2.3])
    train.main(flags(**OPTIONS, patience=3, save_interval=1))
    assert [place.name for place in list_checkpoints(Path("run"))] == ["step-000004"]


def test_without_patience_a_run_goes_on_TRN_12(monkeypatch):
    script(monkeypatch, [1.0 + n for n in range(10)])
    summary = train.main(flags(**OPTIONS))
    assert summary["steps"] == 20 and summary["val_loss"] == 10.0
    assert [place.name for place in list_checkpoints(Path("run"))] == ["step-000002", "step-000020"]


def test_best_and_last_are_kept_apart_CKP_8(monkeypatch):
    script(monkeypatch, [3.0, 2.0, 1.5, *(2.5 + n for n in range(7))])
    train.main(flags(**OPTIONS, save_interval=3))
    run = Path("run")
    assert [place.name for place in list_checkpoints(run)] == ["step-000006", "step-000018", "step-000020"]
    assert best_checkpoint(run).name == load_checkpoint(run, which="best").path.name == "step-000006"
    assert load_checkpoint(run).path.name == "step-000020"


def test_a_run_can_keep_no_best_CKP_8(monkeypatch):
    script(monkeypatch, [1.0 + n for n in range(10)])
    train.main(flags(**OPTIONS, keep_best=False))
    assert [place.name for place in list_checkpoints(Path("run"))] == ["step-000020"]
    with pytest.raises(ValueError, match="no checkpoint is marked as the best"):
        load_checkpoint(Path("run"), which="best")


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_n_are_kept_and_nothing_else_is_deleted_CKP_8(keep):
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/notes.txt").write_text("mine", encoding="utf-8")
    train.main(flags(max_iters=9, save_interval=2, keep_checkpoints=keep, resume="auto"))
    expected = [f"step-00000{n}" for n in (2, 4, 6, 8, 9)][-keep:]
    assert [place.name for place in list_checkpoints(Path("run"))] == expected
    assert Path("run/checkpoints/notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to a process")
def test_a_signal_keeps_the_best_of_a_patient_run_TRN_12(monkeypatch):
    script(monkeypatch, [3.0, 2.0, 2.5])
    get_batch, calls = train.get_batch, []

    def interrupted(*args):
        calls.append(0)
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return get_batch(*args)

    monkeypatch.setattr(train, "get_batch", interrupted)
    with pytest.raises(SystemExit):
        train.main(flags(**OPTIONS, patience=3))
    summary = read_json("run/summary.json")
    # the newest is where a resumed run goes on; the best is kept beside it
    assert summary["steps"] == 7 and Path(summary["checkpoint"]).name == "step-000007"
    assert best_checkpoint(Path("run")).name == "step-000004" and summary["val_loss"] == 2.0


def test_a_text_without_order_is_overfitted_and_the_run_stops_TRN_12_TRN_13(work):
    letters = random.Random(0).choices("abcdefgh", k=400)
    Path("text.txt").write_text("".join(letters), encoding="utf-8")
    options = {"max_iters": 400, "eval_interval": 10, "eval_windows": None, "patience": 3}
    summary = train.main(flags(**options, learning_rate=1e-2, warmup=0, log_interval=400, norm="pre"))
    rows = read_rows(key="val/loss")
    best = min(rows, key=lambda row: row["val/loss"])
    assert summary["steps"] == rows[-1]["step"] == best["step"] + 30 < 400
    assert rows[-1]["val/loss"] > best["val/loss"] + 0.01
    assert read_json(list_checkpoints(Path("run"))[-1] / "config.json")["step"] == best["step"]
    assert evaluate_only()["loss"] == best["val/loss"] == summary["val_loss"]
    assert summary == read_json("run/summary.json")
