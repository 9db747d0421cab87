"""The files of a run: JSON that the standard library reads, whole or not at all."""

import json
import math
import os

import pytest

from tracking import Tracker, write_json


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_each_row_is_on_disk_as_soon_as_it_is_logged_LOG_6(tmp_path):
    tracker = Tracker(tmp_path, {"seed": 3})
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == {"seed": 3}
    for step in (1, 2, 3):
        tracker.log(step, {"tokens": 10 * step, "train/loss": 4.5 - step})
        assert len(rows(tmp_path)) == step  # nothing waits in a buffer for the run to end
    assert rows(tmp_path)[2] == {"step": 3, "tokens": 30, "train/loss": 1.5}
    tracker.finish({"val_loss": 1.25})
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == {"val_loss": 1.25}


def test_training_and_evaluation_count_with_the_same_steps_LOG_2(tmp_path):
    tracker = Tracker(tmp_path, {})
    tracker.log(5, {"train/loss": 2.0})
    tracker.log(5, {"val/loss": 2.5})
    assert [row["step"] for row in rows(tmp_path)] == [5, 5]


def test_a_resumed_log_goes_on_where_its_checkpoint_was_LOG_1(tmp_path):
    tracker = Tracker(tmp_path, {})
    for step in (1, 2, 3, 4):
        tracker.log(step, {"train/loss": float(step)})
    tracker.finish({})
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 5, "train/lo')  # a kill in the middle of a line
    tracker = Tracker(tmp_path, {}, resumed_at=2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]  # 3 and 4 will be done again
    tracker.log(3, {"train/loss": 30.0})
    tracker.finish({})
    assert [row["train/loss"] for row in rows(tmp_path)] == [1.0, 2.0, 30.0]


def test_a_new_log_does_not_go_on_from_an_old_one(tmp_path):
    for loss in (1.0, 2.0):
        tracker = Tracker(tmp_path, {})
        tracker.log(1, {"train/loss": loss})
        tracker.finish({})
    assert [row["train/loss"] for row in rows(tmp_path)] == [2.0]


def test_rows_wait_for_room_on_the_disk(tmp_path, capsys):
    resource = pytest.importorskip("resource")
    tracker = Tracker(tmp_path, {})
    tracker.log(1, {"train/loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))  # the system itself refuses
    try:
        tracker.log(2, {"train/loss": 2.0})
        tracker.log(3, {"train/loss": 3.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "metrics.jsonl can't be written (File too large)" in capsys.readouterr().err
    tracker.log(4, {"train/loss": 4.0})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_numbers_come_back_exactly(tmp_path):
    numbers = {"a": 0.1 + 0.2, "b": 2**62, "c": 1e-300}
    Tracker(tmp_path, {}).log(1, numbers)
    assert rows(tmp_path) == [{"step": 1, **numbers}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_no_word_for_is_null(tmp_path, value):
    Tracker(tmp_path, {}).log(1, {"train/grad_norm": value, "train/loss": 1.5})
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == '{"step": 1, "train/grad_norm": null, "train/loss": 1.5}\n'


def test_text_in_a_config_stays_text_DAT_1(tmp_path):
    Tracker(tmp_path, {"dataset": "naïve 🙂.txt"})
    raw = (tmp_path / "config.json").read_bytes()
    assert json.loads(raw.decode("utf-8")) == {"dataset": "naïve 🙂.txt"} and raw.endswith(b"}\n")


@pytest.mark.parametrize("fails", ["json", "replace"])
def test_a_failed_write_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch, fails):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    if fails == "replace":
        monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError if fails == "replace" else TypeError):
        write_json(path, {"a": 2, "b": 3 if fails == "replace" else object()})
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["summary.json"]
