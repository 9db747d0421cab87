"""A comparison as one HTML file that needs nothing else: no script, no network, no font of its own."""

import base64
import html
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from comparison import figures
from comparison.results import answer, finite, interval, mebibytes, notes, number, ratio, text_rows, usable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --quiet: #59636e; --line: #d8dce1;
  --link: #0b5cad; --shade: #f6f7f9; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e9ed; --quiet: #9aa4af;
  --line: #363c44; --link: #7ab8ff; --shade: #1d2126; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .75rem; }
p, ul, dl { max-width: 46rem; }
.question, .note, figcaption, caption { color: var(--quiet); }
.question { margin: 0 0 1.25rem; }
.answer { border-left: 3px solid var(--link); padding: .1rem 0 .1rem 1rem; font-size: 1.06rem; }
.answer p, .answer ul { margin: .5rem 0; }
.note { font-size: .88rem; padding-left: 1.1rem; }
.warning { color: var(--bad); font-weight: 600; }
a { color: var(--link); }
code { font: .88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
caption { text-align: left; padding-bottom: .5rem; max-width: calc(100vw - 2.5rem); }
th, td { padding: .35rem .5rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: .2rem; }
thead th { vertical-align: bottom; font-weight: 600; white-space: pre; line-height: 1.3;
  border-top: 1.5px solid var(--ink); border-bottom: 1px solid var(--ink); }
tbody tr:last-child > * { border-bottom: 1.5px solid var(--ink); }
tbody tr:nth-child(even) { background: var(--shade); }
tbody th { font-weight: 600; }
.text { text-align: left; }
.wrap { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 2rem 2rem; }
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; width: 100%; height: auto; }
figure.wide img { width: auto; max-width: 100%; }
figcaption { font-size: .88rem; margin-top: .4rem; max-width: 46rem; }
dl { display: grid; grid-template-columns: minmax(8rem, auto) 1fr; gap: .4rem 1.25rem; margin: 0;
  max-width: 60rem; }
dt { font-weight: 600; }
dd { margin: 0; }
@media (max-width: 760px) {
  main { padding: 1.25rem 1rem 3rem; }
  .figures { grid-template-columns: minmax(0, 1fr); }
  figure.wide img { max-width: none; width: 44rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .6rem; }
}
@media print { main { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } }
"""

MATCHES = {
    "steps": "equal steps: every variant is trained for the same number of steps on as many tokens; what a "
    "variant saves in parameters it goes without",
    "params": "equal parameters: the feed-forward of a variant with fewer KV heads is made wider until the "
    "parameters are as many as mha's; all are trained for the same number of steps",
    "seconds": "equal time: every variant is trained for the same seconds of the training clock, in as many "
    "steps as fit",
}
CAPTIONS = {
    "trade_off": "The trade-off: lower is a better model, further right is faster decoding. Solid: the "
    "table's figures, with an area proportional to the KV cache; faint: single seeds.",
    "kv_cache": "What a row of full context keeps in memory.",
    "loss_by_tokens": "Validation loss against tokens trained on. Line: mean over seeds; band: from the "
    "least to the largest of them. The steep start may be above the picture. Evaluations on the way may use "
    "a part of the validation split; the last is the loss of the table.",
    "difference_by_tokens": "The same, less the baseline's loss with the same seed: above 0 is worse. Line: "
    "mean over seeds; band: from the least to the largest of them, which is not the 95 % interval.",
    "loss_by_seconds": "Validation loss against seconds of training (without evaluation and saving), over "
    "the time that all seeds of a variant cover. Line and band as before.",
    "decode": "Decoding speed against the tokens already in the cache, the median over seeds. The more rows "
    "and tokens, the more of a step is reading the cache.",
}
CLOCKS = {
    "training": "tokens per second of training steps alone: no evaluation, no saving, no first steps; the "
    "device has done its work before the clock is read",
    "prefill": "tokens of the prompt per second, read in one pass; a warm-up is not counted",
    "decode": "new tokens per second of all rows together, a token per row and step, at the given number of "
    "tokens in the cache; prefill is not in it",
    "KV cache": "bytes read off the cache's tensors",
}


def write_page(report: dict[str, Any], path: Path | str) -> Path:
    """Write a report as one HTML file, whole or not at all; its path.

    Links to the run folders are relative to the file. Without matplotlib there are no figures, and a line
    says so.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = render(report, path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def render(report: dict[str, Any], folder: Path) -> str:
    """The page's HTML; links are relative to `folder`."""
    title = f"Attention heads compared: {report['name']}"
    sections = [
        _head(report, title),
        _section("Summary", _summary(report)),
        _section("Figures", _figures(report)),
        _section("All runs", _cells(report, folder)),
        _section("Failed runs", _failed(report, folder)) if report.get("failed") else "",
        _section("How it was measured", _method(report)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_e(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n</body>\n</html>\n"
    )


def _e(text: Any) -> str:
    """Text that HTML shows as it is."""
    return html.escape(str(text), quote=True).replace(" %", "&nbsp;%")


def _section(title: str, body: str) -> str:
    name = title.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{_e(title)}</h2>\n{body}\n</section>'


def _list(items: Iterable[str], css: str = "") -> str:
    """A list of texts, escaped."""
    return f"<ul{css}>" + "".join(f"<li>{_e(item)}</li>" for item in items) + "</ul>"


def _table(
    caption: str, heads: list[str], rows: list[list[str]], text: Iterable[int] = (), escaped: bool = False
) -> str:
    """A table that scrolls on a narrow screen. The first column heads its row; those in `text` are words.

    `escaped`: the cells are HTML already.
    """
    left = {0, *text}

    def css(i: int) -> str:
        return ' class="text"' if i in left else ""

    safe = (lambda cell: cell) if escaped else _e
    columns = "".join(f'<th scope="col"{css(i)}>{_e(head)}</th>' for i, head in enumerate(heads))
    lines = [f"<tr>{columns}</tr>"]
    for row in rows:
        first = f'<th scope="row" class="text">{safe(row[0])}</th>'
        rest = "".join(f"<td{css(i)}>{safe(cell)}</td>" for i, cell in enumerate(row[1:], 1))
        lines.append(f"<tr>{first}{rest}</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{_e(caption)}">\n<table>\n'
        f"<caption>{_e(caption)}</caption>\n<thead>\n{lines[0]}\n</thead>\n<tbody>\n"
        + "\n".join(lines[1:])
        + "\n</tbody>\n</table>\n</div>"
    )


# ---- parts


def _head(report: dict[str, Any], title: str) -> str:
    """Title, question, and the answer in plain words."""
    said = answer(report["summary"]) if report["summary"] else ["No run came to its end."]
    failed = len(report.get("failed") or [])
    if failed:
        said.append(f"{failed} run{'s' if failed > 1 else ''} failed.")
    body = f"<p>{_e(' '.join(said))}</p>" if len(said) <= 3 else _list(said)
    warning = ""
    if report.get("identical_batches") is False:
        warning = (
            '\n<p class="warning">The runs of a seed did not see the same batches: the differences are not '
            "paired by them, and the intervals may be wider than they need be.</p>"
        )
    return (
        f'<header>\n<h1>{_e(title)}</h1>\n<p class="question">{_e(question(report))}</p>\n'
        f'<div class="answer">{body}</div>{warning}\n</header>'
    )


def question(report: dict[str, Any]) -> str:
    """What the comparison asks, from its variants, data and rule."""
    names = [row["variant"] for row in report["summary"]]
    listed = ", ".join(names)
    if len(names) > 6:
        varied = [key for key, values in (report.get("axes") or {}).items() if len(values) > 1]
        listed = f"{len(names)} variants of {', '.join(varied) or 'the model'}"
    data, match = report.get("data") or {}, report.get("match")
    under = {"steps": "equal steps", "params": "equal parameters", "seconds": "equal training time"}
    seeds = len(report.get("seeds") or [])
    return (
        "What do fewer heads for keys and values cost in loss, and what do they save in memory and time? "
        f"{listed or 'No variant'} at {under.get(str(match), match)}, {seeds} "
        f"seed{'s' if seeds != 1 else ''}, on {data.get('dataset', 'unknown data')}."
    )


def _summary(report: dict[str, Any]) -> str:
    rows = text_rows(report["summary"])
    if not rows:
        return "<p>No run came to its end: there is nothing to compare.</p>"
    at = report.get("decode_at") or {}
    where = f" Decode and prefill: {_rows(at)}." if at else ""
    heads = list(rows[0])
    left = [i for i, head in enumerate(heads) if head == "verdict"]
    return (
        _table(f"Loss, speed and memory of each variant.{where}", heads, [[*r.values()] for r in rows], left)
        + "\n"
        + _list(notes(report["summary"]), ' class="note"')
    )


def _rows(at: dict[str, Any]) -> str:
    batch = at.get("batch")
    return f"{batch} row{'s' if batch != 1 else ''} at once, {number(at.get('context'))} tokens of context"


def _figures(report: dict[str, Any]) -> str:
    """The figures, each drawn for both themes, with a caption and the numbers as its alternative text."""
    try:
        drawn = {theme: figures.draw(report, theme) for theme in figures.THEMES}
        pictures = {theme: {name: _svg(f) for name, f in drawn[theme].items()} for theme in drawn}
    except ImportError:
        return "<p>There are no figures: matplotlib is not installed (pip install matplotlib).</p>"
    if not pictures["light"]:
        return "<p>There are no figures: no run left numbers to draw.</p>"
    parts = []
    for name, light in pictures["light"].items():
        size = drawn["light"][name].get_size_inches() * 96
        caption = CAPTIONS[name]
        wide = ' class="wide"' if size[0] > 96 * figures.WIDTH + 1 else ""
        image = (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{pictures["dark"][name]}">'
            f'<img src="{light}" width="{round(size[0])}" height="{round(size[1])}" '
            f'alt="{_e(alternative(report, name))}"></picture>'
        )
        image = f'<div class="scroll">{image}</div>' if wide else image
        parts.append(f'<figure id="{name}"{wide}>{image}<figcaption>{_e(caption)}</figcaption></figure>')
    return '<div class="figures">\n' + "\n".join(parts) + "\n</div>"


def alternative(report: dict[str, Any], name: str) -> str:
    """What a figure shows, with its numbers, for readers who don't see it."""
    summary = report["summary"]
    if name.startswith("loss"):
        ends = (f"{r['variant']} {number(r['val_loss_mean'], '.3f')}" for r in summary if r["n_seeds"])
        by = "tokens" if name == "loss_by_tokens" else "seconds of training"
        return f"Lines of validation loss against {by}. Loss at the end in nats per token: {'; '.join(ends)}."
    if name == "difference_by_tokens":
        ends = (f"{r['variant']} {interval(r)}" for r in summary if r["difference"] is not None)
        what = "Lines of the paired difference from the baseline's loss. At the end, with 95 % interval"
        return f"{what}: {'; '.join(ends)}."
    if name == "decode":
        said = []
        for batch, lines in figures.decode_points(report).items():
            each = (f"{v} {line[0][1]:,.0f} to {line[-1][1]:,.0f}" for v, line in lines.items())
            contexts = [n for line in lines.values() for n, _ in line]
            said.append(f"{batch} rows, context {min(contexts):,} to {max(contexts):,}: {'; '.join(each)}")
        return f"Lines of decode tokens per second against context. {'. '.join(said)}."
    if name == "kv_cache":
        key = "kv_cache_bytes_full_context"
        each = (
            f"{r['variant']} {mebibytes(r[key])} ({number(ratio(r, summary, key), '.3g')} of the baseline's)"
            for r in summary
        )
        return f"Bars of KV cache bytes at full context: {'; '.join(each)}."
    each = (
        f"{r['variant']} {number(r['val_loss_mean'], '.3f')} nats at "
        f"{number(r['decode_tokens_per_sec'])} tokens/s"
        for r in summary
    )
    return f"Points of validation loss against decode tokens per second: {'; '.join(each)}."


def _svg(figure: "Figure") -> str:
    """A figure as a data URI; the same figure gives the same bytes."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "headcount"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def _link(out_dir: str, folder: Path) -> str:
    """A relative link from the page to a run folder."""
    try:
        relative = Path(os.path.relpath(out_dir, folder)).as_posix()
    except ValueError:  # another drive of Windows
        return f"<code>{_e(out_dir)}</code>"
    return f'<a href="./{quote(relative)}/">{_e(Path(out_dir).name)}</a>'


def _cells(report: dict[str, Any], folder: Path) -> str:
    """The table of all runs that came to their end."""
    cells = report["cells"]
    if not cells:
        return "<p>No run came to its end.</p>"
    widths = {cell.get("feed_forward_width") for cell in cells}
    columns = {
        "seed": lambda c: str(c["seed"]),
        "loss,\nnats/token": lambda c: number(c["val_loss"], ".4f"),
        "bits\nper byte": lambda c: number(c.get("val_bits_per_byte"), ".4f"),
        "parameters": lambda c: number(c.get("n_params")),
        "feed-forward\nwidth": lambda c: number(c.get("feed_forward_width")),
        "steps": lambda c: number(c.get("steps")),
        "tokens": lambda c: number(c.get("tokens_seen")),
        "training,\ns": lambda c: number(c.get("train_seconds"), ",.1f"),
        "training,\ntokens/s": lambda c: number(c.get("train_tokens_per_sec")),
        "decode,\ntokens/s": lambda c: number(c.get("decode_tokens_per_sec")),
        "prefill,\ntokens/s": lambda c: number(c.get("prefill_tokens_per_sec")),
        "memory at\nthe peak": lambda c: mebibytes(c.get("peak_memory_bytes")),
        "KV cache": lambda c: mebibytes(c.get("kv_cache_bytes_full_context")),
    }
    if len(widths) == 1:
        del columns["feed-forward\nwidth"]
    rows = [
        [_e(c["variant"]), *(_e(show(c)) for show in columns.values()), _link(c["out_dir"], folder)]
        for c in cells
    ]
    heads = ["variant", *columns, "run folder"]
    page = _table("Each run that came to its end.", heads, rows, [len(heads) - 1], escaped=True)
    lost = [f"{c['variant']} seed {c['seed']}" for c in cells if c not in usable(cells)]
    if lost:
        page += '\n<p class="note">Without a finite loss, and left out of all statistics: '
        page += f"{_e(', '.join(lost))}.</p>"
    return page


def _failed(report: dict[str, Any], folder: Path) -> str:
    rows = [
        [
            _e(f["variant"]), _e(f["seed"]), f'<code class="wrap">{_e(f["error"])}</code>',
            _link(f["out_dir"], folder) if f.get("out_dir") else "-",
        ]
        for f in report["failed"]
    ]  # fmt: skip
    heads = ["variant", "seed", "error", "run folder"]
    return _table("Runs that did not come to their end.", heads, rows, [2, 3], escaped=True)


def _method(report: dict[str, Any]) -> str:
    """Rule, batches, data, machine, command and clocks."""
    data, machine, at = (report.get(key) or {} for key in ("data", "machine", "decode_at"))
    batch = data.get("tokens_per_step")
    rows = {
        "match": _e(MATCHES.get(str(report.get("match")), report.get("match"))),
        "identical batches": _batches(report),
        "data": _e(
            f"{data.get('dataset', '-')}, tokenizer {data.get('tokenizer', '-')}, context "
            f"{number(data.get('block_size'))} tokens, {number(batch)} tokens per step"
        ),
        "seeds": _e(", ".join(map(str, report.get("seeds") or []))),
        "machine": _e(", ".join(f"{key} {value}" for key, value in machine.items()) or "-"),
        "command": f"<code>{_e(report.get('command', '-'))}</code>",
        "date": _e(report.get("date", "-")),
        **{key: _e(text) for key, text in CLOCKS.items()},
    }
    if at:
        rows["decode"] += _e(f"; the table's figures: {_rows(at)}")
    rows["KV cache"] += _e(_formula(report["cells"]))
    return "<dl>\n" + "\n".join(f"<dt>{_e(k)}</dt><dd>{v}</dd>" for k, v in rows.items()) + "\n</dl>"


def _batches(report: dict[str, Any]) -> str:
    """Whether all variants of a seed saw the same batches, and the hash that says so."""
    same = report.get("identical_batches")
    if same is None:
        return "can't be told: the runs took different numbers of steps"
    if not same:
        return '<span class="warning">no: the hashes of the batches differ</span>'
    hashes = {c["seed"]: c.get("batches_sha256") for c in report["cells"] if c.get("batches_sha256")}
    each = "; ".join(f"seed {_e(seed)} <code>{_e(str(h)[:16])}</code>" for seed, h in sorted(hashes.items()))
    return f"yes, for each seed. SHA-256 of all batches, its first 16 digits: {each}"


def _formula(cells: list[dict[str, Any]]) -> str:
    """Whether the measured bytes of the caches are those of the formula."""
    pairs = [(c.get("kv_cache_bytes_full_context"), c.get("kv_cache_bytes_formula")) for c in cells]
    pairs = [(measured, formula) for measured, formula in pairs if finite(measured) and finite(formula)]
    equal = sum(measured == formula for measured, formula in pairs)
    formula = "2 x layers x KV heads x head width x tokens x bytes per number"
    return f"; equal to the formula ({formula}) in {equal} of {len(pairs)} runs" if pairs else ""
