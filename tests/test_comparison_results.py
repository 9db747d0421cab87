"""The statistics and tables of a comparison, against values worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from comparison import results

HEADS = {"mha": ("mha", 4), "gqa-2": ("gqa", 2), "mqa": ("mqa", 1)}
# loss of seeds 0, 1, 2: what a seed does to all (the base) and what a variant adds to it
BASE = [2.590, 2.601, 2.583]
ADDED = {"mha": [0.0, 0.0, 0.0], "gqa-2": [0.004, -0.003, 0.002], "mqa": [0.021, 0.027, 0.024]}
DECODE = {"mha": 900.0, "gqa-2": 1100.0, "mqa": 1440.0}
SCHEMA = {
    "variant", "attention", "n_kv_head", "axes", "n_seeds", "n_params", "val_loss_mean", "val_loss_std",
    "val_bits_per_byte_mean", "baseline", "difference", "difference_from_mha", "ci95_low", "ci95_high",
    "verdict", "train_tokens_per_sec", "decode_tokens_per_sec", "prefill_tokens_per_sec", "train_seconds",
    "peak_memory_bytes", "kv_cache_bytes_full_context",
}  # fmt: skip


def make_cell(variant: str, seed: int, loss: float | None, **changes: Any) -> dict[str, Any]:
    """A cell as compare.py makes it, for one of HEADS, maybe with axes behind its name."""
    attention, n_kv_head = HEADS[variant.split()[0]]
    axes = dict(pair.split("=") for pair in variant.split()[1:])
    decode = DECODE[variant.split()[0]] * (1 + 0.01 * seed)
    cache = 262144 * n_kv_head
    points = [
        {
            "batch": batch, "context": context, "prefill_tokens_per_sec": 9000.0,
            "decode_tokens_per_sec": decode * batch**0.7 / (1 + n_kv_head * batch * context / 12000),
            "kv_cache_bytes": 1024 * n_kv_head * batch * context,
        }
        for batch in (1, 8)
        for context in (32, 128, 255)
    ]  # fmt: skip
    return {
        "variant": variant, "attention": attention, "n_kv_head": n_kv_head, "n_head": 4, "seed": seed,
        "axes": axes, "n_params": 860000 + 16384 * n_kv_head, "steps": 750, "tokens_seen": 1536000,
        "train_seconds": 100.0 + n_kv_head + seed, "val_loss": loss,
        "val_bits_per_byte": None if loss is None else loss / 1.845,
        "train_tokens_per_sec": 15000.0 - 100 * n_kv_head - seed, "peak_memory_bytes": 500 * 2**20,
        "decode_tokens_per_sec": decode, "prefill_tokens_per_sec": 9000.0 + seed,
        "kv_cache_bytes_full_context": cache, "kv_cache_bytes_formula": cache, "decode": points,
        "feed_forward_width": 512, "batches_sha256": f"{seed}" * 64,
        "out_dir": f"out/compare/small/runs/{variant.replace(' ', '-').replace('=', '_')}-s{seed}", **changes,
    }  # fmt: skip


def make_cells(seeds: int = 3, variants: tuple[str, ...] = ("mha", "gqa-2", "mqa")) -> list[dict[str, Any]]:
    """Seed by seed, as a grid is run."""
    return [
        make_cell(v, s, BASE[s] + ADDED[v.split()[0]][s] - 0.08 * ("norm=pre" in v))
        for s in range(seeds)
        for v in variants
    ]


def make_report(cells: list[dict[str, Any]], failed: Any = (), curves: bool = True) -> dict[str, Any]:
    """A report of these cells; `curves` writes a metrics.jsonl for each into its out_dir."""
    for cell in cells if curves else ():
        write_curve(cell)
    variants = list(dict.fromkeys(cell["variant"] for cell in cells))
    return {
        "name": "small", "command": "python compare.py config/small.py --seeds=3", "date": "2026-11-29",
        "machine": {
            "processor": "Example 3000", "threads": 2, "device": "cpu", "torch": "2.13.0",
            "python": "3.11.2", "system": "Linux",
        },
        "match": "steps", "axes": {"attention": ["mha", "gqa", "mqa"], "n_kv_head": [None]},
        "seeds": sorted({cell["seed"] for cell in cells}),
        "data": {"dataset": "python", "tokenizer": "bpe", "block_size": 256, "tokens_per_step": 2048},
        "identical_batches": True, "decode_at": {"batch": 8, "context": 255}, "cells": cells,
        "failed": list(failed), "summary": results.summarize(cells) if variants else [],
    }  # fmt: skip


def write_curve(cell: dict[str, Any]) -> None:
    """A run's metrics: a row per 10 steps, an evaluation (without a clock) per 50, the last at the end."""
    loss = 9.0 if cell["val_loss"] is None else cell["val_loss"]
    rows: list[dict[str, Any]] = []
    for step in range(10, 751, 10):
        now = loss + 4.2 * math.exp(-step / 45) + 1.3 * (1 - step / 750) ** 2
        seconds = cell["train_seconds"] * step / 750
        rows.append({"step": step, "tokens": step * 2048, "train/loss": now, "perf/train_seconds": seconds})
        if step % 50 == 0:
            rows.append({"step": step, "tokens": step * 2048, "val/loss": now})
    folder = Path(cell["out_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def by_variant(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in results.summarize(cells)}


def test_t_quantiles_are_those_of_the_published_table():
    published = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160]
    published += [2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056]
    published += [2.052, 2.048, 2.045, 2.042]
    further = {31: 2.040, 32: 2.037, 35: 2.030, 40: 2.021, 50: 2.009, 60: 2.000, 80: 1.990, 100: 1.984}
    for df, value in {**dict(enumerate(published, 1)), **further, 10**6: 1.960}.items():
        assert results.t_quantile(df) == pytest.approx(value, abs=0.00055), df
    falling = [results.t_quantile(df) for df in range(1, 200)]
    assert falling == sorted(falling, reverse=True)
    with pytest.raises(ValueError, match="at least 1 degree of freedom"):
        results.t_quantile(0)


def test_paired_difference_by_hand():
    # differences 0.021, 0.027, 0.024: mean 0.024, deviations -3, 3, 0 thousandths, so s = 0.003 and
    # t(2) s / sqrt(3) = 4.3027 x 0.003 / 1.73205 = 0.0074525
    mean, low, high = results.paired_difference([2.611, 2.628, 2.607], BASE)
    assert (mean, low, high) == pytest.approx((0.024, 0.0165475, 0.0314525), abs=1e-7)
    # two pairs, 0.01 and 0.03: s = 0.0141421, t(1) s / sqrt(2) = 12.7062 x 0.01
    assert results.paired_difference([1.01, 2.03], [1.0, 2.0]) == pytest.approx(
        (0.02, 0.02 - 0.127062, 0.02 + 0.127062), abs=1e-9
    )
    assert results.paired_difference([1.5], [1.25]) == (0.25, None, None)
    assert results.paired_difference([1.5, 2.5], [1.0, 2.0]) == (0.5, 0.5, 0.5)  # no spread: a point
    for a, b in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="pairs need as many of each"):
            results.paired_difference(a, b)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((None, None), "the baseline"),
        (("mha", None), "no shared seed"),
        (("mha", 0.034), "one seed: no interval"),
        (("mha", 0.034, 0.021, 0.047), "worse by 0.034 nats"),
        (("mha", -0.034, -0.047, -0.021), "better by 0.034 nats"),
        (("mha", 0.034, -0.001, 0.069), "no difference shown"),
        (("mha", 0.034, 0.0, 0.068), "no difference shown"),
        (("mha", 0.5, 0.5, 0.5), "worse by 0.500 nats"),
        (("mha", 0.0, 0.0, 0.0), "no difference shown"),
        (("mha", 5e-17, 5e-17, 5e-17), "no difference shown"),  # what adding floats leaves over
        (("mha", 0.00034, 0.00021, 0.00047), "worse by 0.0003 nats"),  # never "worse by 0.000"
    ],
)
def test_verdicts(numbers, said):
    assert results.verdict(*numbers) == said


def test_summary_has_the_fields_of_the_report_and_the_right_numbers():
    summary = results.summarize(make_cells())
    assert [row["variant"] for row in summary] == ["mha", "gqa-2", "mqa"]
    assert all(set(row) == SCHEMA for row in summary)
    mha, gqa, mqa = summary
    assert mha["val_loss_mean"] == pytest.approx((2.590 + 2.601 + 2.583) / 3)
    # deviations of 2590, 2601, 2583 from 2591.33: -1.33, 9.67, -8.33; squares 1.78 + 93.44 + 69.44 = 164.67
    assert mha["val_loss_std"] == pytest.approx((164.6667 / 2) ** 0.5 / 1000, rel=1e-5)
    assert mha["val_bits_per_byte_mean"] == pytest.approx(mha["val_loss_mean"] / 1.845)
    assert (mha["baseline"], mha["difference"], mha["difference_from_mha"]) == (None, None, None)
    assert (mha["ci95_low"], mha["ci95_high"], mha["verdict"]) == (None, None, "the baseline")
    assert (mqa["baseline"], mqa["n_seeds"], mqa["verdict"]) == ("mha", 3, "worse by 0.024 nats")
    assert mqa["difference"] == mqa["difference_from_mha"] == pytest.approx(0.024)
    assert (mqa["ci95_low"], mqa["ci95_high"]) == pytest.approx((0.0165475, 0.0314525), abs=1e-7)
    # 0.004, -0.003, 0.002: mean 0.001, s = 0.00360555, half width 4.3027 x 0.00360555 / 1.73205 = 0.0089568
    assert (gqa["ci95_low"], gqa["ci95_high"]) == pytest.approx((-0.0079568, 0.0099568), abs=1e-7)
    assert gqa["verdict"] == "no difference shown"
    medians = [mqa[key] for key in results.MEDIANS]
    assert medians == [14899, pytest.approx(1440 * 1.01), 9001, 102, 500 * 2**20]
    assert mqa["kv_cache_bytes_full_context"] == 262144 and mqa["n_params"] == 876384
    json.dumps(summary, allow_nan=False)


def test_pairing_is_by_seed_and_only_over_the_seeds_that_both_have():
    cells = [
        make_cell("mqa", 2, 3.5), make_cell("mqa", 1, 2.5), make_cell("mqa", 9, 100.0),
        make_cell("mha", 1, 2.0), make_cell("mha", 2, 2.8), make_cell("mha", 0, 50.0),
    ]  # fmt: skip
    mqa = by_variant(cells)["mqa"]
    assert mqa["difference"] == pytest.approx((0.5 + 0.7) / 2) and mqa["n_seeds"] == 3
    # s = 0.141421, half width 12.7062 x 0.1
    assert mqa["ci95_high"] - mqa["ci95_low"] == pytest.approx(2 * 1.27062)
    apart = by_variant([make_cell("mha", 0, 2.0), make_cell("mqa", 1, 2.5)])["mqa"]
    assert (apart["difference"], apart["verdict"]) == (None, "no shared seed")


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_loss_that_is_none_is_left_out_and_poisons_nothing(lost):
    cells = make_cells()
    cells[5] |= {"val_loss": lost, "val_bits_per_byte": lost, "decode_tokens_per_sec": 1.0}  # mqa, seed 1
    mqa = by_variant(cells)["mqa"]
    assert (mqa["n_seeds"], mqa["baseline"]) == (2, "mha")
    assert mqa["difference"] == pytest.approx((0.021 + 0.024) / 2)
    assert mqa["val_loss_mean"] == pytest.approx((2.611 + 2.607) / 2)
    assert mqa["decode_tokens_per_sec"] == pytest.approx(1440 * 1.01)  # of seeds 0 and 2
    for cell in cells:
        if cell["variant"] == "mqa":
            cell["val_loss"] = lost
    summary = results.summarize(cells)
    assert (summary[2]["n_seeds"], summary[2]["val_loss_mean"], summary[2]["verdict"]) == (0, None, "no loss")
    assert "nan" not in results.table(summary).lower() and "inf" not in results.markdown_table(summary)
    assert "mqa keeps 1/4 of mha's KV cache; it has no finite loss." in results.answer(summary)
    json.dumps(summary, allow_nan=False)


def test_baseline_is_mha_of_the_same_other_axes_else_the_first():
    full = by_variant(make_cells(2, ("mha norm=post", "mqa norm=post", "mha norm=pre", "mqa norm=pre")))
    assert [row["baseline"] for row in full.values()] == [None, "mha norm=post", None, "mha norm=pre"]
    assert full["mqa norm=pre"]["difference_from_mha"] == pytest.approx(0.024)
    no_mha = by_variant(make_cells(2, ("gqa-2", "mqa")))
    assert [row["baseline"] for row in no_mha.values()] == [None, "gqa-2"]
    assert no_mha["mqa"]["difference"] == pytest.approx((0.017 + 0.030) / 2)
    assert no_mha["mqa"]["difference_from_mha"] is None
    # mha alone, along another axis: compared with the first, which is not a difference from mha
    only = by_variant(make_cells(2, ("mha norm=post", "mha norm=pre")))
    assert [row["baseline"] for row in only.values()] == [None, "mha norm=post"]
    assert only["mha norm=pre"]["difference"] == pytest.approx(-0.08)
    assert only["mha norm=pre"]["difference_from_mha"] is None
    # mha without a finite loss is no baseline
    lost = make_cells(2)
    for cell in lost:
        cell["val_loss"] = None if cell["variant"] == "mha" else cell["val_loss"]
    assert by_variant(lost)["mqa"]["baseline"] == "gqa-2"


def test_one_seed_has_means_and_no_interval():
    summary = results.summarize(make_cells(1))
    assert [row["val_loss_std"] for row in summary] == [None] * 3
    assert (summary[2]["difference"], summary[2]["ci95_low"]) == (pytest.approx(0.021), None)
    assert summary[2]["verdict"] == "one seed: no interval"
    text = results.table(summary)
    assert "One seed gives no interval" in text and "±" not in text and "t interval" not in text
    assert "may be the seed's doing" in results.answer(summary)[1]


def test_seeds_with_the_same_difference_have_a_point_for_an_interval():
    cells = [make_cell(v, s, 2.0 + s + 0.5 * (v == "mqa")) for s in range(3) for v in ("mha", "mqa")]
    mqa = by_variant(cells)["mqa"]
    assert (mqa["ci95_low"], mqa["ci95_high"], mqa["verdict"]) == (0.5, 0.5, "worse by 0.500 nats")
    assert results.interval(mqa) == "+0.500 (+0.500 to +0.500)"


def test_table_is_aligned_narrow_and_says_what_it_shows():
    text = results.table(results.summarize(make_cells()))
    loss, speed, notes = text.split("\n\n")
    assert loss.splitlines() == [
        "                                       loss,        difference from mha",
        "variant  KV heads  parameters     nats/token            (95 % interval)  verdict",
        "-------  --------  ----------  -------------  -------------------------  -------------------",
        "mha             4     925,536  2.591 ± 0.009                          -  the baseline",
        "gqa-2           2     892,768  2.592 ± 0.007  +0.001 (-0.008 to +0.010)  no difference shown",
        "mqa             1     876,384  2.615 ± 0.011  +0.024 (+0.017 to +0.031)  worse by 0.024 nats",
    ]
    assert speed.splitlines()[-1] == "mqa         14,899     1,454     9,001     256.0 KiB      0.25"
    for said in ("3 per variant", "paired by seed", "95 % interval", "one comparison on its own"):
        assert said in notes
    axes = [f"norm={norm} position={p}" for norm in ("post", "pre") for p in ("learned", "rope")]
    names = [f"{head} {other}" for other in axes for head in HEADS]
    cells = make_cells(3, tuple(names))
    for cell in cells:
        cell["n_params"] += 124_000_000
    wide = results.table(results.summarize(cells))
    assert max(map(len, wide.splitlines())) < 110 and "mha of the same other options" in wide
    assert "nothing to compare" in results.table([])


def test_markdown_table_has_a_row_per_variant_and_shows_names_as_they_are():
    cells = [c | {"variant": c["variant"].replace("mqa", "m|q*a")} for c in make_cells()]
    lines = results.markdown_table(results.summarize(cells)).splitlines()
    assert lines[0].startswith("| variant | KV heads | parameters | loss, nats/token | difference from mha (")
    assert lines[4].startswith("| m\\|q\\*a | 1 | 876,384 | 2.615 ± 0.011 | +0.024 (+0.017 to +0.031) | ")
    assert len(lines) == 5 and {line.replace("\\|", "").count("|") for line in lines} == {12}


def test_answer_is_in_plain_words():
    assert results.answer(results.summarize(make_cells())) == [
        "gqa-2 keeps 1/2 of mha's KV cache and decodes 1.22 times as fast; no difference in loss "
        "is shown (mean difference +0.001 nats, 95 % interval -0.008 to +0.010).",
        "mqa keeps 1/4 of mha's KV cache and decodes 1.60 times as fast; its loss is 0.024 nats higher "
        "(95 % interval 0.017 to 0.031).",
    ]
    better = make_cells()
    for cell in better:
        if cell["variant"] == "mqa":
            cell |= {"val_loss": cell["val_loss"] - 0.1, "decode_tokens_per_sec": None}
    assert results.answer(results.summarize(better))[1] == (
        "mqa keeps 1/4 of mha's KV cache; its loss is 0.076 nats lower (95 % interval 0.069 to 0.083)."
    )
    assert "nothing to compare" in results.answer(results.summarize(make_cells(1, ("mha",))))[0]
