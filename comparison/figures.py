"""The figures of a comparison, drawn with matplotlib's objects: nothing global, no window.

Colours tell head settings (mha, gqa-2, mqa) apart, line styles and markers the other axes. Both palettes stay
apart for readers who confuse red and green, and have a contrast of at least 3.9 to their background.
"""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.results import finite, mebibytes, number, ratio, usable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "paper": "#ffffff", "ink": "#1f2328", "faint": "#d8dce1", "quiet": "#59636e",
        "lines": ["#0072b2", "#d55e00", "#009073", "#8a2be2", "#6b0000", "#3a4358"],
    },
    "dark": {
        "paper": "#15181c", "ink": "#e6e9ed", "faint": "#363c44", "quiet": "#9aa4af",
        "lines": ["#56b4e9", "#ff8a3d", "#2ecc9f", "#a05cff", "#fff0a8", "#a3705a"],
    },
}  # fmt: skip
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 1.8, 1.2, 1.8))]
MARKERS = ["o", "s", "^", "D", "v", "P"]
WIDTH, HEIGHT = 6.2, 3.9  # inches of a figure with one panel, its labels included
LARGEST = 700  # area of the largest point of the trade-off, in square points

Curve = list[tuple[int, float | None, float]]  # tokens, seconds of training, loss
Band = tuple[list[float], list[float], list[float], list[float]]  # x, and the mean, least and largest y


def draw(report: dict[str, Any], theme: str = "light") -> "dict[str, Figure]":
    """The figures of a report, by name, for the theme "light" or "dark".

    trade_off, kv_cache, loss_by_tokens, difference_by_tokens, loss_by_seconds, decode; one without numbers is
    left out.
    Errors: ValueError for another theme, ImportError without matplotlib.
    """
    if theme not in THEMES:
        raise ValueError(f"theme={theme}: must be one of {', '.join(THEMES)}")
    curves = read_curves(report)
    figures = {
        "trade_off": _trade_off_figure(report, theme),
        "kv_cache": _cache_figure(report, theme),
        "loss_by_tokens": _loss_figure(report, curves, "tokens", theme),
        "difference_by_tokens": _difference_figure(report, curves, theme),
        "loss_by_seconds": _loss_figure(report, curves, "seconds", theme),
        "decode": _decode_figure(report, theme),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def save_pngs(report: dict[str, Any], folder: Path | str) -> list[Path]:
    """Draw the light figures into `folder` as PNG files, 160 dots per inch; the paths written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in draw(report, "light").items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=160)
    return paths


# ---- numbers


def read_curve(out_dir: Path | str) -> Curve | None:
    """The evaluations of a run, by tokens, from its metrics.jsonl; None if the file is missing or garbled.

    The seconds are those of training up to the evaluation: the last clock reading at or before it.
    """
    points: dict[int, tuple[int, float | None, float]] = {}
    seconds = None
    try:
        for line in (Path(out_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            seconds = row.get("perf/train_seconds", seconds)
            if finite(row.get("val/loss")):
                points[int(row["tokens"])] = (int(row["tokens"]), seconds, row["val/loss"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    started = 0.0 if seconds is not None else None  # before the first reading no time has been counted
    return [(n, started if s is None else s, loss) for n, s, loss in sorted(points.values())]


def read_curves(report: dict[str, Any]) -> dict[str, dict[int, Curve]]:
    """{variant: {seed: curve}}, of the cells that have a finite loss and a readable file."""
    curves: dict[str, dict[int, Curve]] = {}
    for cell in usable(report["cells"]):
        curve = read_curve(cell["out_dir"])
        if curve:
            curves.setdefault(cell["variant"], {})[cell["seed"]] = curve
    return curves


def loss_bands(curves: dict[str, dict[int, Curve]], by: str) -> dict[str, Band]:
    """The losses of each variant's seeds against "tokens" or "seconds" of training."""
    column = 0 if by == "tokens" else 1
    points = {
        name: [[(x, p[2]) for p in curve if (x := p[column]) is not None] for curve in seeds.values()]
        for name, seeds in curves.items()
    }
    found = {name: band([curve for curve in each if curve]) for name, each in points.items() if any(each)}
    return {name: each for name, each in found.items() if each[0]}


def difference_bands(report: dict[str, Any], curves: dict[str, dict[int, Curve]]) -> dict[str, Band]:
    """Each variant's loss less its baseline's with the same seed, at the evaluations that both have."""
    bands = {}
    for row in report["summary"]:
        mine, theirs = curves.get(row["variant"], {}), curves.get(row["baseline"], {})
        each = []
        for seed in mine.keys() & theirs.keys():
            base = {n: loss for n, _, loss in theirs[seed]}
            each.append([(float(n), loss - base[n]) for n, _, loss in mine[seed] if n in base])
        if any(each) and (found := band([curve for curve in each if curve]))[0]:
            bands[row["variant"]] = found
    return bands


def band(curves: "Sequence[Sequence[tuple[float, float]]]") -> Band:
    """The mean, least and largest y of several curves, over the stretch of x that all of them cover.

    Between its points a curve is a straight line; points at the same x are averaged as they are.
    """
    low, high = max(c[0][0] for c in curves), min(c[-1][0] for c in curves)
    xs = sorted({x for c in curves for x, _ in c if low <= x <= high})
    columns = [[_at(c, x) for c in curves] for x in xs]
    return xs, [statistics.fmean(y) for y in columns], [min(y) for y in columns], [max(y) for y in columns]


def _at(curve: "Sequence[tuple[float, float]]", x: float) -> float:
    """A curve's y at x, which lies between its ends."""
    before = max(point for point in curve if point[0] <= x)
    after = min(point for point in curve if point[0] >= x)
    if before[0] == after[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (x - before[0]) / (after[0] - before[0])


# ---- looks


def _styles(report: dict[str, Any], theme: str) -> dict[str, dict[str, Any]]:
    """{variant: colour, dashes, marker}, the same in all figures."""
    heads: list[Any] = []
    others: list[Any] = []
    styles = {}
    for row in report["summary"]:
        head, other = (row["attention"], row["n_kv_head"]), json.dumps(row["axes"], default=str)
        heads += [head] if head not in heads else []
        others += [other] if other not in others else []
        i, j = heads.index(head), others.index(other)
        colors = THEMES[theme]["lines"]
        j += i // len(colors)  # more settings than colours: the next round is dashed
        style = {"color": colors[i % len(colors)], "linestyle": DASHES[j % len(DASHES)]}
        styles[row["variant"]] = style | {"marker": MARKERS[j % len(MARKERS)]}
    return styles


def _direct(names: list[str]) -> bool:
    """Whether names fit beside their lines; many or long ones go into a legend below."""
    return len(names) <= 8 and max(map(len, names)) <= 16


def _figure(
    theme: str, names: list[str], panels: int = 1, height: float = HEIGHT, labels: str = "right"
) -> "tuple[Figure, list[Axes]]":
    """An empty figure with its panels beside each other, in the colours of the theme.

    Room is left for the names: to the right of the panels or ("inside") within, or below in a legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = WIDTH if panels <= 2 else 1 + 2.6 * panels
    right, below = 0.15, 0.55
    if _direct(names):
        right = 0.15 if labels == "inside" else 0.42 + 0.075 * max(map(len, names))
    else:
        below += 0.1 + 0.19 * -(-len(names) // _legend_columns(names, width))
        height += below - 0.55
    look = THEMES[theme]
    figure = Figure(figsize=(width, height), facecolor=look["paper"])
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    figure.subplots_adjust(0.72 / width, below / height, 1 - right / width, 1 - 0.35 / height, wspace=0.25)
    for ax in axes:
        ax.set_facecolor(look["paper"])
        ax.grid(True, color=look["faint"], linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(colors=look["quiet"], labelsize=9, length=0)
        for side, spine in ax.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(look["quiet"])
        for label in (ax.xaxis.label, ax.yaxis.label, ax.title):
            label.set(color=look["ink"], fontsize=10)
    return figure, axes


def _legend_columns(names: list[str], width: float) -> int:
    return max(1, int(width / (0.65 + 0.068 * max(map(len, names)))))


def _legend(figure: "Figure", theme: str, names: list[str], styles: dict[str, Any]) -> None:
    """The names below the panels, for those that don't fit beside the lines."""
    from matplotlib.lines import Line2D

    legend = figure.legend(
        [Line2D([], [], linewidth=1.6, markersize=4.5, **styles[name]) for name in names], names,
        loc="lower left", ncols=_legend_columns(names, figure.get_figwidth()), frameon=False, fontsize=8,
        labelcolor=THEMES[theme]["ink"], handlelength=2.6, borderaxespad=0.2, columnspacing=1.2,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, between low and high, `gap` apart or less if there are too many."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    places = [wanted[i] for i in order]
    for _ in range(200):  # neighbours push each other apart by halves, until all have room
        for i in range(len(places) - 1):
            short = gap - (places[i + 1] - places[i])
            if short > 0:
                places[i] -= short / 2
                places[i + 1] += short / 2
        places = [min(max(place, low), high) for place in places]
    found = [0.0] * len(wanted)
    for i, place in zip(order, places, strict=True):
        found[i] = place
    return found


def _label_ends(ax: "Axes", ends: dict[str, tuple[float, float]], styles: dict[str, Any]) -> None:
    """Write each line's name to the right of the panel, near its end, and draw a thin line to it."""
    ax.get_ylim()  # settles the limits, which the places below depend on
    height = ax.get_window_extent().height * 72 / ax.figure.dpi
    to_axes = ax.transData + ax.transAxes.inverted()
    wanted = [to_axes.transform(end)[1] for end in ends.values()]
    for (name, end), place in zip(ends.items(), _spread(wanted, 1.35 * 9 / height, 0.0, 1.0), strict=True):
        color = styles[name]["color"]
        ax.annotate(
            name, xy=end, xytext=(1.045, place), textcoords="axes fraction", annotation_clip=False,
            parse_math=False, va="center", fontsize=9, color=color,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.7,
                        "shrinkA": 1, "shrinkB": 2},
        )  # fmt: skip


def _label_points(ax: "Axes", points: dict[str, tuple[float, float, float]], styles: dict[str, Any]) -> None:
    """Write each point's name beside it, or further up or down where another name is in the way.

    A point is x, y and its area in square points.
    """
    ax.get_ylim()  # settles the limits
    size = 9
    taken: list[tuple[float, float, float]] = []  # left edge, right edge and y of the names so far, points
    for name, (x, y, area) in sorted(points.items(), key=lambda item: item[1][1]):
        away = 4 + area**0.5 / 2
        left, middle = ax.transData.transform((x, y)) * 72 / ax.figure.dpi + (away, 0)
        right = left + 0.62 * size * len(name)
        near = [at for low, high, at in taken if low < right and left < high]
        tries = (sign * k * size / 4 for k in range(100) for sign in (1, -1))
        shift = next(s for s in tries if all(abs(middle + s - at) >= 1.25 * size for at in near))
        taken.append((left, right, middle + shift))
        color = styles[name]["color"]
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        ax.annotate(
            name, xy=(x, y), xytext=(away, shift), textcoords="offset points", va="center", fontsize=size,
            color=color, annotation_clip=False, parse_math=False,
            arrowprops=line if abs(shift) > size else None,
        )  # fmt: skip


# ---- figures


def _loss_figure(
    report: dict[str, Any], curves: dict[str, dict[int, Curve]], by: str, theme: str
) -> "Figure | None":
    """Loss against tokens or seconds: the mean over seeds, and a band from the least to the largest."""
    bands = loss_bands(curves, by)
    label = "tokens trained on" if by == "tokens" else "seconds of training"
    return _bands_figure(report, bands, label, "validation loss (nats per token)", theme) if bands else None


def _difference_figure(
    report: dict[str, Any], curves: dict[str, dict[int, Curve]], theme: str
) -> "Figure | None":
    """Paired difference from the baseline against tokens: the mean over seeds, and a band as above."""
    bands = difference_bands(report, curves)
    if not bands:
        return None
    label = "loss less the baseline's (nats per token)"
    return _bands_figure(report, bands, "tokens trained on", label, theme, zero=True)


def _bands_figure(
    report: dict[str, Any], bands: dict[str, Band], xlabel: str, ylabel: str, theme: str, zero: bool = False
) -> "Figure":
    """A line with a band per variant, its name at its end; `zero` draws the baseline too."""
    names = list(bands)
    figure, [ax] = _figure(theme, names)
    styles = _styles(report, theme)
    for name, (xs, mean, low, high) in bands.items():
        style = styles[name] | ({} if len(xs) <= 15 else {"marker": None})
        ax.plot(xs, mean, linewidth=1.6, markersize=3.5, label=name, **style)
        ax.fill_between(xs, low, high, color=style["color"], alpha=0.18, linewidth=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.xaxis.set_major_formatter(_short)
    ax.margins(x=0.02)
    _crop(ax, list(bands.values()))
    if zero:
        ax.axhline(0, color=THEMES[theme]["quiet"], linewidth=1.2, zorder=1.5)
        bottom, top = ax.get_ylim()
        pad = 0.05 * (max(top, 0) - min(bottom, 0))
        ax.set_ylim(min(bottom, -pad), max(top, pad))
    if _direct(names):
        _label_ends(ax, {name: (xs[-1], mean[-1]) for name, (xs, mean, _, _) in bands.items()}, styles)
    else:
        _legend(figure, theme, names, styles)
    return figure


def _crop(ax: "Axes", bands: list[Band]) -> None:
    """Show what there is after the first eighth of training: the start is steep and much the same for all."""
    end = max(xs[-1] for xs, _, _, _ in bands)
    shown = [
        y
        for xs, _, lows, highs in bands
        for x, *both in zip(xs, lows, highs, strict=True)
        if x >= end / 8
        for y in both
    ]
    if any(len(xs) > 4 for xs, _, _, _ in bands) and max(shown) > min(shown):
        pad = 0.05 * (max(shown) - min(shown))
        ax.set_ylim(min(shown) - pad, max(shown) + pad)


def _short(value: float, _: float) -> str:
    """1.5M, 500k: a tick mark of large numbers."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def decode_points(report: dict[str, Any]) -> dict[int, dict[str, list[tuple[int, float]]]]:
    """{batch: {variant: [(context, tokens/s)]}}, the median over seeds."""
    rates: dict[int, dict[str, dict[int, list[float]]]] = {}
    for cell in usable(report["cells"]):
        for row in cell.get("decode") or []:
            if finite(row.get("decode_tokens_per_sec")):
                by_context = rates.setdefault(row["batch"], {}).setdefault(cell["variant"], {})
                by_context.setdefault(row["context"], []).append(row["decode_tokens_per_sec"])
    return {
        batch: {
            name: [(n, statistics.median(each)) for n, each in sorted(by_context.items())]
            for name, by_context in by_name.items()
        }
        for batch, by_name in sorted(rates.items())
    }


def _decode_figure(report: dict[str, Any], theme: str) -> "Figure | None":
    """Decode tokens/s against context: a panel per batch size, the median over seeds."""
    points = decode_points(report)
    if not points:
        return None
    names = list(dict.fromkeys(name for by_name in points.values() for name in by_name))
    figure, axes = _figure(theme, names, len(points))
    styles = _styles(report, theme)
    for ax, (batch, by_name) in zip(axes, points.items(), strict=True):
        contexts = sorted({n for line in by_name.values() for n, _ in line})
        for name, line in by_name.items():
            ax.plot(*zip(*line, strict=True), linewidth=1.6, markersize=4.5, label=name, **styles[name])
        if len(contexts) > 2 and contexts[0] > 0 and contexts[-1] / contexts[0] >= 8:
            ax.set_xscale("log", base=2)
        ax.set_xticks(contexts, [f"{n:,}" for n in contexts])
        ax.minorticks_off()
        ax.set_ylim(0, 1.06 * max(rate for line in by_name.values() for _, rate in line))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        ax.set(xlabel="tokens in the cache", title=f"{batch} row{'s' if batch > 1 else ''} at once")
    axes[0].set_ylabel("decode tokens/s, all rows together")
    if _direct(names):  # at the largest batch, where the lines are furthest apart
        last = list(points.values())[-1]
        _label_ends(axes[-1], {name: line[-1] for name, line in last.items()}, styles)
    else:
        _legend(figure, theme, names, styles)
    return figure


def _cache_figure(report: dict[str, Any], theme: str) -> "Figure | None":
    """A bar per variant: bytes of the KV cache of one row at full context."""
    summary = report["summary"]
    rows = [row for row in summary if finite(row["kv_cache_bytes_full_context"])]
    if not rows:
        return None
    height = 1.0 + 0.32 * max(2, len(rows))
    figure, [ax] = _figure(theme, ["mha"], height=height)
    look, styles = THEMES[theme], _styles(report, theme)
    sizes = [row["kv_cache_bytes_full_context"] for row in rows]
    unit, name = (2**20, "MiB") if max(sizes) >= 2**20 else (2**10, "KiB")
    places = list(range(len(rows)))
    colors = [styles[row["variant"]]["color"] for row in rows]
    ax.barh(places, [size / unit for size in sizes], height=0.62, color=colors)
    for place, row, size in zip(places, rows, sizes, strict=True):
        share = ratio(row, summary, "kv_cache_bytes_full_context")
        base = row["baseline"] if len(row["baseline"] or "") <= 8 else "the baseline"
        text = mebibytes(size) + (f", {number(share, '.3g')} of {base}'s" if base else "")
        ax.annotate(
            text, (size / unit, place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=9, color=look["ink"],
        )  # fmt: skip
    ax.set_yticks(places, [row["variant"] for row in rows], parse_math=False)
    ax.tick_params(axis="y", colors=look["ink"])
    ax.grid(False, axis="y")
    ax.invert_yaxis()
    ax.set(xlabel=f"KV cache of one row at full context ({name})", xlim=(0, 1.02 * max(sizes) / unit))
    left = min(0.45, (0.3 + 0.075 * max(len(row["variant"]) for row in rows)) / WIDTH)
    figure.subplots_adjust(left=left, right=1 - 1.75 / WIDTH, top=1 - 0.15 / height)
    return figure


def _trade_off_figure(report: dict[str, Any], theme: str) -> "Figure | None":
    """Loss against decode tokens/s: faint points for seeds, a solid one for the summary's figures.

    Its area is proportional to the bytes of the cache.
    """
    seeds: dict[str, list[tuple[float, float]]] = {}
    for cell in usable(report["cells"]):
        if finite(cell.get("decode_tokens_per_sec")):
            seeds.setdefault(cell["variant"], []).append((cell["decode_tokens_per_sec"], cell["val_loss"]))
    rows = [row for row in report["summary"] if row["variant"] in seeds]
    sizes = [row["kv_cache_bytes_full_context"] for row in rows if finite(row["kv_cache_bytes_full_context"])]
    if not sizes:
        return None
    names = [row["variant"] for row in rows]
    figure, [ax] = _figure(theme, names, labels="inside")
    look, styles = THEMES[theme], _styles(report, theme)
    means: dict[str, tuple[float, float, float]] = {}
    for row in rows:
        name, points = row["variant"], seeds[row["variant"]]
        area = LARGEST * (row["kv_cache_bytes_full_context"] or 0) / max(sizes)
        style = {"color": styles[name]["color"], "marker": styles[name]["marker"]}
        x, y = row["decode_tokens_per_sec"], row["val_loss_mean"]  # as in the table
        means[name] = (x, y, area)
        if len(points) > 1:
            xs, ys = zip(*points, strict=True)
            ax.scatter(xs, ys, s=24, alpha=0.6, linewidth=0, zorder=3, **style)
        ax.scatter(x, y, s=area, edgecolor=look["paper"], linewidth=1, zorder=2, label=name, **style)
    ax.set(xlabel="decode tokens/s, more is better", ylabel="loss (nats per token), less is better")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.margins(0.12, 0.16)
    if _direct(names):
        _label_points(ax, means, styles)
    else:
        _legend(figure, theme, names, styles)
    return figure
