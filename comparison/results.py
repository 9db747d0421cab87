"""Statistics of a comparison: means, paired differences with their intervals, and the table people read.

A cell is one trained and measured model: one variant with one seed. A variant is compared with its baseline
seed by seed, so that what the seed does to both (the start, the batches) cancels in the difference.
"""

import json
import math
import statistics
import textwrap
from collections.abc import Iterable
from typing import Any

import report

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom, as in any printed table
T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
Z_975 = 1.959964  # the same quantile of the normal distribution
ROUNDING = 1e-9  # nats: a difference below this is what floating point leaves over
WIDEST_NAME = 22  # characters of a variant's name on a line of the terminal table
SPEEDS = ("train_tokens_per_sec", "decode_tokens_per_sec", "prefill_tokens_per_sec")
MEDIANS = (*SPEEDS, "train_seconds", "peak_memory_bytes")
LOSS_COLUMNS = 6  # of the columns of `text_rows`, the first block in the terminal


def t_quantile(df: int) -> float:
    """The 97.5 % quantile of Student's t with `df` degrees of freedom, off by less than 0.0001.

    From the table up to 30; above, the first terms of the expansion around the normal quantile (Abramowitz
    and Stegun, Handbook of Mathematical Functions, 26.7.5).
    """
    if df < 1:
        raise ValueError(f"df={df}: an interval needs at least 1 degree of freedom, that is 2 pairs")
    if df <= len(T_975):
        return T_975[df - 1]
    z = Z_975
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / df + second / df**2 + third / df**3


def paired_difference(a: list[float], b: list[float]) -> tuple[float, float | None, float | None]:
    """The mean of a[i] - b[i] and its 95 % paired t interval (mean, low, high).

    The numbers must be finite, and a[i] and b[i] belong to the same seed. With one pair there is no interval:
    low and high are None. With no pair, or lists of unequal length: ValueError.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"{len(a)} and {len(b)} values: pairs need as many of each, at least one")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, n = statistics.fmean(differences), len(differences)
    if n == 1:
        return mean, None, None
    half = t_quantile(n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return mean, mean - half, mean + half


def verdict(
    baseline: str | None, difference: float | None, low: float | None = None, high: float | None = None
) -> str:
    """What the interval of a loss difference (nats per token) lets one say, in words.

    `baseline` is None for the baseline itself; `difference` is None if no seed is shared.
    """
    if baseline is None:
        return "the baseline"
    if difference is None:
        return "no shared seed"
    if low is None or high is None:
        return "one seed: no interval"
    if low <= 0 <= high or abs(difference) < ROUNDING:
        return "no difference shown"
    size = f"{abs(difference):.{decimals(difference, low, high)}f} nats"
    return f"worse by {size}" if difference > 0 else f"better by {size}"


def finite(x: Any) -> bool:
    """Whether x is a number that can be averaged; None, NaN and infinity are not."""
    return isinstance(x, int | float) and math.isfinite(x)


def usable(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells whose loss can be counted: a run that diverged has none."""
    return [cell for cell in cells if finite(cell.get("val_loss"))]


def summarize(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One dict per variant, in the order of the cells: mean losses, differences, intervals, median speeds.

    A variant is compared with mha of the same other axes; where there is none, or it is mha alone with its
    axes, with the first variant. A baseline itself has `baseline` None. Losses are in nats per token, paired
    by seed over the seeds that both have; cells without a finite loss are left out.
    """
    rows, losses = [], {}
    for name in dict.fromkeys(cell["variant"] for cell in cells):
        every = [cell for cell in cells if cell["variant"] == name]
        counted = usable(every)
        losses[name] = {cell["seed"]: cell["val_loss"] for cell in counted}
        first, loss = every[0], list(losses[name].values())
        rows.append({
            "variant": name, "attention": first["attention"], "n_kv_head": first["n_kv_head"],
            "axes": first.get("axes") or {}, "n_seeds": len(loss), "n_params": first.get("n_params"),
            "val_loss_mean": _mean(loss),
            "val_loss_std": statistics.stdev(loss) if len(loss) > 1 else None,
            "val_bits_per_byte_mean": _mean(cell.get("val_bits_per_byte") for cell in counted),
            "baseline": None, "difference": None, "difference_from_mha": None,
            "ci95_low": None, "ci95_high": None, "verdict": "no loss",
            **{key: _median(cell.get(key) for cell in counted) for key in MEDIANS},
            "kv_cache_bytes_full_context": first.get("kv_cache_bytes_full_context"),
        })  # fmt: skip
    for row in rows:
        row["baseline"] = _baseline(row, rows)
        if losses[row["variant"]]:
            row |= _compare(row, rows, losses)
    return rows


def _compare(
    row: dict[str, Any], rows: list[dict[str, Any]], losses: dict[str, dict[int, float]]
) -> dict[str, Any]:
    """The difference of a variant from its baseline, over the seeds that both have."""
    mine, theirs = losses[row["variant"]], losses.get(row["baseline"], {})
    shared = [seed for seed in mine if seed in theirs]
    found: dict[str, Any] = {}
    if shared:
        d, low, high = paired_difference([mine[s] for s in shared], [theirs[s] for s in shared])
        attention = next(other["attention"] for other in rows if other["variant"] == row["baseline"])
        found = {"difference": d, "ci95_low": low, "ci95_high": high}
        found["difference_from_mha"] = d if attention == "mha" and row["attention"] != "mha" else None
    said = verdict(row["baseline"], found.get("difference"), found.get("ci95_low"), found.get("ci95_high"))
    return {**found, "verdict": said}


def _baseline(row: dict[str, Any], rows: list[dict[str, Any]]) -> str | None:
    """The variant that a row is compared with; None for one that the others are compared with."""
    with_loss = [other for other in rows if other["n_seeds"]]
    if not with_loss:
        return None
    alike = [other for other in rows if _key(other) == _key(row)]
    mha = [other for other in alike if other["attention"] == "mha" and other["n_seeds"]]
    first = with_loss[0]["variant"]
    chosen = mha[0]["variant"] if mha else first
    if chosen != row["variant"]:
        return chosen
    return None if len(alike) > 1 or chosen == first else first


def _key(row: dict[str, Any]) -> str:
    """The other axes of a variant, comparable."""
    return json.dumps(row["axes"], sort_keys=True, default=str)


def _mean(values: Iterable[Any]) -> float | None:
    kept = [x for x in values if finite(x)]
    return statistics.fmean(kept) if kept else None


def _median(values: Iterable[Any]) -> float | None:
    kept = [x for x in values if finite(x)]
    return statistics.median(kept) if kept else None


# ---- numbers for people


def decimals(difference: float, low: float | None = None, high: float | None = None) -> int:
    """How many decimals a difference is shown with: 3, or up to 6 that show its interval's half width."""
    half = 0.0 if low is None or high is None else (high - low) / 2
    scale = half if half > ROUNDING else abs(difference)
    return 3 if scale <= ROUNDING else min(6, max(3, -math.floor(math.log10(scale))))


def number(x: Any, form: str = ",.0f") -> str:
    """A number in the given format; a dash for what is missing."""
    return format(x, form) if finite(x) else "-"


def mebibytes(n: Any) -> str:
    """A number of bytes, for people; a dash for what is missing."""
    return report.mebibytes(n) if finite(n) else "-"


def ratio(row: dict[str, Any], summary: list[dict[str, Any]], key: str) -> float | None:
    """A figure of a variant over its baseline's; 1 for a baseline, None if either is missing."""
    base = next((other for other in summary if other["variant"] == row["baseline"]), row)
    mine, theirs = row[key], base[key]
    return mine / theirs if finite(mine) and finite(theirs) and theirs else None


def interval(row: dict[str, Any]) -> str:
    """+0.034 (+0.021 to +0.047): a difference and its interval; a dash where there is none."""
    d, low, high = row["difference"], row["ci95_low"], row["ci95_high"]
    if d is None:
        return "-"
    form = f"+.{decimals(d, low, high)}f"
    return f"{d:{form}}" if low is None else f"{d:{form}} ({low:{form}} to {high:{form}})"


def baselines(summary: list[dict[str, Any]]) -> list[str]:
    """The variants that others are compared with, in order."""
    return list(dict.fromkeys(row["baseline"] for row in summary if row["baseline"] is not None))


def text_rows(summary: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The rows of the table as text, {heading with unit, on one or two lines: text}.

    The first LOSS_COLUMNS are about the loss.
    """
    against = baselines(summary)
    base = against[0] if len(against) == 1 and len(against[0]) <= 12 else "the baseline"
    rows = []
    for row in summary:
        loss = number(row["val_loss_mean"], ".3f")
        if row["val_loss_std"] is not None:
            loss += f" ± {row['val_loss_std']:.3f}"
        rows.append({
            "variant": row["variant"],
            "KV heads": number(row["n_kv_head"]),
            "parameters": number(row["n_params"]),
            "loss,\nnats/token": loss,
            f"difference from {base}\n(95 % interval)": interval(row),
            "verdict": row["verdict"],
            "training,\ntokens/s": number(row["train_tokens_per_sec"]),
            "decode,\ntokens/s": number(row["decode_tokens_per_sec"]),
            "prefill,\ntokens/s": number(row["prefill_tokens_per_sec"]),
            "KV cache,\nfull context": mebibytes(row["kv_cache_bytes_full_context"]),
            f"of {base}'s\ncache": number(ratio(row, summary, "kv_cache_bytes_full_context"), ".3g"),
        })  # fmt: skip
    return rows


def table(summary: list[dict[str, Any]]) -> str:
    """The summary for a terminal, under 110 columns: losses, then speed and memory, then how to read them."""
    if not summary:
        return "no run came to its end: there is nothing to compare"
    rows = text_rows(summary)
    keys = list(rows[0])
    blocks = [_block(rows, keys[:LOSS_COLUMNS]), _block(rows, [keys[0], *keys[LOSS_COLUMNS:]])]
    return "\n\n".join([*blocks, "\n".join(textwrap.fill(line, 106) for line in notes(summary))])


def _block(rows: list[dict[str, str]], keys: list[str]) -> str:
    """Aligned columns, text to the left and numbers to the right; a long name takes several lines."""
    columns = []
    for key in keys:
        cells = [textwrap.wrap(row[key], WIDEST_NAME, subsequent_indent="  ") for row in rows]
        if key != "variant":
            cells = [[row[key]] for row in rows]
        head = key.split("\n")
        width = max(len(line) for cell in [head, *cells] for line in cell)
        columns.append((head, cells, width, str.ljust if key in ("variant", "verdict") else str.rjust))

    def lines(cells: list[list[str]], bottom: bool = False) -> list[str]:
        height, texts = max(map(len, cells)), []
        for cell, (_, _, width, align) in zip(cells, columns, strict=True):
            empty = [""] * (height - len(cell))
            texts.append([align(line, width) for line in (empty + cell if bottom else cell + empty)])
        return ["  ".join(line).rstrip() for line in zip(*texts, strict=True)]

    found = lines([head for head, _, _, _ in columns], bottom=True)
    found.append("  ".join("-" * width for _, _, width, _ in columns))
    for i in range(len(rows)):
        found += lines([cells[i] for _, cells, _, _ in columns])
    return "\n".join(found)


def notes(summary: list[dict[str, Any]]) -> list[str]:
    """What the table's numbers are: seeds, pairing, intervals, units. Plain sentences."""
    seeds = sorted({row["n_seeds"] for row in summary})
    most = seeds[-1]
    counted = f"{most}" if len(seeds) == 1 else f"{seeds[0]} to {most}"
    said = [f"Seeds: {counted} per variant. Loss is the mean over them, ± the sample standard deviation."]
    if most == 1:
        said = ["Seeds: 1 per variant. One seed gives no interval: a difference may be the seed's alone."]
    against = baselines(summary)
    if against and most > 1:
        said.append(
            "Differences are paired by seed: the loss of a variant less its baseline's with the same seed, "
            "averaged over the seeds that both have. Above 0 is worse."
        )
    elif against:
        said.append("A difference is the loss of a variant less its baseline's. Above 0 is worse.")
    by_name = {row["variant"]: row for row in summary}
    pairs = [(row, by_name[row["baseline"]]) for row in summary if row["baseline"]]
    if len(against) > 1 and all(b["attention"] == "mha" and _key(a) == _key(b) for a, b in pairs):
        said.append("Each variant is compared with the mha of the same other options.")
    elif len(against) > 1:
        said += [
            f"Compared with {base}: {', '.join(a['variant'] for a, _ in pairs if a['baseline'] == base)}."
            for base in against
        ]
    if any(row["ci95_low"] is not None for row in summary):
        said.append(
            "The 95 % interval is a paired t interval: repeated with other seeds, 95 of 100 such intervals "
            "would hold the true difference. One that contains 0 shows no difference, which doesn't prove "
            "that there is none."
        )
        n = sum(row["ci95_low"] is not None for row in summary)
        of = f" of the {n} here" if n > 1 else ""
        said.append(
            f"Each interval{of} is for one comparison on its own: about 1 in 20 misses, and the more there "
            "are, the likelier is a miss."
        )
    return [*said, "Speeds are medians over seeds. The KV cache is one row's at full context, as measured."]


def markdown_table(summary: list[dict[str, Any]]) -> str:
    """The same table as GitHub markdown, without the notes."""
    rows = text_rows(summary)
    if not rows:
        return ""
    lines = [[" ".join(key.split()) for key in rows[0]]]
    lines.append([":--" if key in ("variant", "verdict") else "--:" for key in rows[0]])
    lines += [[_markdown(text) for text in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _markdown(text: str) -> str:
    """Text that markdown shows as it is."""
    for mark in "\\`*_|<[":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def answer(summary: list[dict[str, Any]]) -> list[str]:
    """A sentence per compared variant: its cache, decoding speed and loss beside its baseline's."""
    said = []
    for row in summary:
        if row["baseline"] is None:
            if not row["n_seeds"]:
                said.append(f"{row['variant']} has no finite loss.")
            continue
        base = next(other for other in summary if other["variant"] == row["baseline"])
        name = "mha" if base["attention"] == "mha" and _key(base) == _key(row) else row["baseline"]
        gains = [
            _cache_words(ratio(row, summary, "kv_cache_bytes_full_context"), name),
            _speed_words(ratio(row, summary, "decode_tokens_per_sec")),
        ]
        text = " and ".join(filter(None, gains))
        loss = _loss_words(row)
        said.append(f"{row['variant']} {text}; {loss}." if text else f"{row['variant']}: {loss}.")
    return said or ["There is nothing to compare: one variant has been trained."]


def _cache_words(r: float | None, base: str) -> str | None:
    if r is None:
        return None
    if abs(r - 1) < 0.005:
        return f"keeps as large a KV cache as {base}"
    if r < 1 and abs(1 / r - round(1 / r)) < 0.01:
        return f"keeps 1/{round(1 / r)} of {base}'s KV cache"
    return f"keeps {r:.2f} of {base}'s KV cache" if r < 1 else f"keeps {r:.2f} times {base}'s KV cache"


def _speed_words(r: float | None) -> str | None:
    if r is None:
        return None
    return "decodes about as fast" if abs(r - 1) < 0.03 else f"decodes {r:.2f} times as fast"


def _loss_words(row: dict[str, Any]) -> str:
    """What the difference of a variant's loss from its baseline's is, with its interval."""
    d, low, high = row["difference"], row["ci95_low"], row["ci95_high"]
    if d is None:
        return "its loss can't be compared" if row["n_seeds"] else "it has no finite loss"
    places = decimals(d, low, high)
    away = "the same" if abs(d) < ROUNDING else f"{abs(d):.{places}f} nats {'higher' if d > 0 else 'lower'}"
    if low is None or high is None:
        return f"with the one seed there is, its loss is {away}, which may be the seed's doing"
    if row["verdict"] == "no difference shown":
        return (
            f"no difference in loss is shown (mean difference {d:+.{places}f} nats, "
            f"95 % interval {low:+.{places}f} to {high:+.{places}f})"
        )
    near, far = sorted((abs(low), abs(high)))
    return f"its loss is {away} (95 % interval {near:.{places}f} to {far:.{places}f})"
