"""The figures and the page of a comparison: the numbers in them, and that the page needs nothing else."""

import base64
import builtins
import json
import math
import os
import re
import statistics
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_comparison_results import BASE, make_cell, make_cells, make_report

from comparison import figures, page, results

pytest.importorskip("matplotlib")
VOID = {"meta", "img", "source", "br", "link", "input", "hr"}
ALL = {"trade_off", "kv_cache", "loss_by_tokens", "difference_by_tokens", "loss_by_seconds", "decode"}
HOSTILE = '<script>alert("x")</script>&\'$^{$'


class Parsed(HTMLParser):
    """A page's tags with their attributes, and its text; it must close what it opens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data.replace("\xa0", " ")

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run folders are relative to the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """Figures are drawn but not rendered, where only the words matter."""
    monkeypatch.setattr(page, "_svg", lambda figure: "data:image/svg+xml;base64,AA==")


def write(report: dict) -> Parsed:
    """The page of a report, written and read back."""
    path = page.write_page(report, Path("out/compare/small/index.html"))
    return Parsed(path.read_text(encoding="utf-8"))


def check_offline_and_accessible(parsed: Parsed) -> None:
    """No script, nothing from elsewhere; pictures have a text, table headers a scope, the page a language."""
    assert not parsed.all("script") and not parsed.all("link") and not parsed.all("iframe")
    for _, attrs in parsed.tags:
        assert not [name for name in attrs if name.startswith("on")]
        for key in ("src", "srcset", "href"):
            value = attrs.get(key) or "./"
            assert re.match(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+$|\./", value), value[:80]
    assert parsed.all("html") == [{"lang": "en"}]
    assert all(image["alt"] for image in parsed.all("img"))
    assert all(head.get("scope") in ("col", "row") for head in parsed.all("th"))
    assert len(parsed.all("h1")) == len(parsed.all("main")) == 1


def test_page_of_three_kinds_is_whole_offline_and_accessible(quick):
    parsed = write(make_report(make_cells()))
    check_offline_and_accessible(parsed)
    assert {figure["id"] for figure in parsed.all("figure")} == ALL
    assert len(parsed.all("img")) == len(parsed.all("source")) == len(ALL)
    assert {source["media"] for source in parsed.all("source")} == {"(prefers-color-scheme: dark)"}
    assert "url(" not in page.STYLE and "@import" not in page.STYLE and "@font-face" not in page.STYLE
    assert "prefers-color-scheme: dark" in page.STYLE
    for said in (
        "Attention heads compared: small",
        "mqa keeps 1/4 of mha's KV cache and decodes 1.60 times as fast; its loss is 0.024 nats higher",
        "no difference shown", "worse by 0.024 nats", "+0.024 (+0.017 to +0.031)", "2.6110",
        "equal steps", "yes, for each seed", "seed 1 1111111111111111;", "Example 3000",
        "python compare.py config/small.py --seeds=3", "one comparison on its own", "in 9 of 9 runs",
        "8 rows at once, 255 tokens of context",
    ):  # fmt: skip
        assert said in parsed.text, said
    assert "Failed runs" not in parsed.text and "can't be told" not in parsed.text


def test_pictures_are_svg_for_both_themes_and_draw_nothing_from_elsewhere():
    parsed = write(make_report(make_cells()))
    for image, source in zip(parsed.all("img"), parsed.all("source"), strict=True):
        light, dark = (
            base64.b64decode(uri.split(",")[1]).decode("utf-8") for uri in (image["src"], source["srcset"])
        )
        for svg, paper in ((light, "light"), (dark, "dark")):
            assert figures.THEMES[paper]["paper"] in svg
            for element in ElementTree.fromstring(svg).iter():
                for key, value in element.attrib.items():
                    assert not key.endswith("href") or value.startswith("#")
        assert light != dark


def test_alternative_texts_have_the_numbers():
    report = make_report(make_cells())
    texts = {name: page.alternative(report, name) for name in ALL}
    assert "mqa 2.615" in texts["loss_by_tokens"] and "seconds" in texts["loss_by_seconds"]
    assert "mqa +0.024 (+0.017 to +0.031)" in texts["difference_by_tokens"]
    assert "mqa 256.0 KiB (0.25 of the baseline's)" in texts["kv_cache"]
    assert "mqa 2.615 nats at 1,454 tokens/s" in texts["trade_off"]
    assert "8 rows, context 32 to 255" in texts["decode"]


def test_links_lead_from_the_page_to_the_run_folders(quick):
    parsed = write(make_report(make_cells()))
    links = [a["href"] for a in parsed.all("a")]
    assert len(links) == 9 and links[0] == "./runs/mha-s0/"
    assert all((Path("out/compare/small") / link).is_dir() for link in links)
    odd = page._link("out/compare/javascript:alert(1) #?", Path("out/compare"))
    assert odd.startswith('<a href="./javascript%3Aalert%281%29%20%23%3F/">')


def test_names_and_errors_from_data_are_escaped():
    cells = [c | {"variant": c["variant"].replace("mqa", HOSTILE)} for c in make_cells()]
    report = make_report(
        cells, [{"variant": HOSTILE, "seed": HOSTILE, "error": HOSTILE, "out_dir": f"out/{HOSTILE}"}]
    )
    for key in ("name", "command", "date", "match"):
        report[key] = HOSTILE
    report["machine"] = {HOSTILE: HOSTILE}
    report["data"] = dict.fromkeys(("dataset", "tokenizer", "block_size"), HOSTILE)
    report["seeds"] = [HOSTILE]
    cells[0]["batches_sha256"] = HOSTILE
    parsed = write(report)
    check_offline_and_accessible(parsed)
    assert parsed.text.count(HOSTILE) > 15
    assert HOSTILE in parsed.all("img")[0]["alt"]
    assert {figure["id"] for figure in parsed.all("figure")} == ALL


def test_failed_runs_are_listed_with_their_errors(quick):
    failed = [{"variant": "gqa-4", "seed": 1, "error": "RuntimeError: out of memory", "out_dir": "out/x"}]
    parsed = write(make_report(make_cells(), failed, curves=False))
    for said in ("Failed runs", "RuntimeError: out of memory", "1 run failed."):
        assert said in parsed.text
    nothing = write(make_report([], failed))
    check_offline_and_accessible(nothing)
    assert "No run came to its end" in nothing.text and "out of memory" in nothing.text


def test_one_seed_one_variant_no_mha_and_a_lost_loss_make_whole_pages(quick):
    one = write(make_report(make_cells(1), curves=False))
    assert "one seed: no interval" in one.text and "±" not in one.text
    alone = write(make_report(make_cells(1, ("mqa",))))
    assert "nothing to compare: one variant" in alone.text
    assert {f["id"] for f in alone.all("figure")} == ALL - {"difference_by_tokens"}
    no_mha = write(make_report(make_cells(2, ("gqa-2", "mqa")), curves=False))
    assert "mqa keeps 1/2 of gqa-2's KV cache" in no_mha.text
    for lost in (None, math.nan):
        cells = make_cells()
        cells[5]["val_loss"] = lost
        parsed = write(make_report(cells, curves=False))
        assert "left out of all statistics: mqa seed 1." in parsed.text and "nan" not in parsed.text
        for each in (one, alone, no_mha, parsed):
            check_offline_and_accessible(each)


def test_batches_that_differ_or_cannot_be_told_are_said(quick):
    report = make_report(make_cells(1), curves=False)
    differ = write(report | {"identical_batches": False}).text
    assert "did not see the same batches" in differ and "no: the hashes of the batches differ" in differ
    unknown = write(report | {"identical_batches": None, "match": "seconds"}).text
    assert "can't be told" in unknown and "equal training time" in unknown


def test_a_report_that_has_been_through_json_makes_the_same_page():
    report = make_report(make_cells(2), curves=False)
    again = json.loads(json.dumps(report))
    assert page.render(report, Path("out")) == page.render(again, Path("out"))


def test_page_is_written_whole_or_not_at_all(quick, monkeypatch):
    path = page.write_page(make_report(make_cells(1), curves=False), "page.html")
    before = path.read_bytes()

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        page.write_page(make_report(make_cells(2), curves=False), "page.html")
    assert path.read_bytes() == before and list(Path().iterdir()) == [Path("page.html")]


def test_without_matplotlib_the_page_says_so(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **options):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    parsed = write(make_report(make_cells()))
    check_offline_and_accessible(parsed)
    assert not parsed.all("img") and "matplotlib is not installed" in parsed.text
    assert "worse by 0.024 nats" in parsed.text


# ---- figures


def lines(figure) -> dict:
    """{label: line} of a figure's first panel."""
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def evaluations(cell: dict) -> dict[int, tuple[float, float]]:
    """{tokens: (seconds so far, loss)}, straight from the file."""
    found, seconds = {}, None
    for row in map(json.loads, (Path(cell["out_dir"]) / "metrics.jsonl").read_text().splitlines()):
        seconds = row.get("perf/train_seconds", seconds)
        if "val/loss" in row:
            found[row["tokens"]] = (seconds, row["val/loss"])
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_loss_figure_draws_the_means_of_the_metrics_files(theme):
    cells = make_cells()
    figure = figures.draw(make_report(cells), theme)["loss_by_tokens"]
    drawn = lines(figure)
    assert list(drawn) == ["mha", "gqa-2", "mqa"]
    for name, line in drawn.items():
        files = [evaluations(cell) for cell in cells if cell["variant"] == name]
        xs = sorted(files[0])
        assert list(line.get_xdata()) == xs and len(xs) == 15
        means = [statistics.fmean(file[x][1] for file in files) for x in xs]
        assert list(line.get_ydata()) == pytest.approx(means, abs=1e-12)
    assert drawn["mha"].get_ydata()[-1] == pytest.approx(statistics.fmean(BASE), abs=1e-6)
    corners = figure.axes[0].collections[0].get_paths()[0].vertices
    ends = [y for x, y in corners if x == 1536000]
    assert (min(ends), max(ends)) == pytest.approx((min(BASE), max(BASE)), abs=1e-6)
    assert figure.get_facecolor()[0] == pytest.approx(1.0 if theme == "light" else 0x15 / 255)


def test_seconds_are_the_last_clock_reading_before_an_evaluation():
    cells = make_cells(1)
    line = lines(figures.draw(make_report(cells))["loss_by_seconds"])["mqa"]
    file = evaluations(next(cell for cell in cells if cell["variant"] == "mqa"))
    assert list(line.get_xdata()) == pytest.approx([seconds for seconds, _ in file.values()])
    assert line.get_xdata()[-1] == pytest.approx(101.0)
    assert list(line.get_ydata()) == pytest.approx([loss for _, loss in file.values()])


def test_seeds_of_different_speed_are_averaged_between_their_points_where_all_have_some():
    slow, fast = [(0.0, 4.0), (10.0, 2.0)], [(2.0, 3.0), (6.0, 1.0)]
    # both cover 2 to 6; the slow one is at 3.6 and 2.8 there
    xs, mean, low, high = figures.band([slow, fast])
    assert xs == [2.0, 6.0]
    assert (mean, low, high) == (pytest.approx([3.3, 1.9]), [3.0, 1.0], pytest.approx([3.6, 2.8]))


def test_difference_figure_is_paired_by_seed():
    drawn = lines(figures.draw(make_report(make_cells()))["difference_by_tokens"])
    assert list(drawn["mqa"].get_ydata()) == pytest.approx([0.024] * 15)
    assert list(drawn["gqa-2"].get_ydata()) == pytest.approx([0.001] * 15)
    assert "mha" not in drawn


def test_decode_cache_and_trade_off_draw_the_cells():
    cells = make_cells()
    drawn = figures.draw(make_report(cells))
    panels = drawn["decode"].axes
    assert [ax.get_title() for ax in panels] == ["1 row at once", "8 rows at once"]
    mqa = {line.get_label(): line for line in panels[1].get_lines()}["mqa"]
    seed_1 = [row for row in cells[5]["decode"] if row["batch"] == 8]  # the median of the three
    assert list(mqa.get_xdata()) == [32, 128, 255]
    assert list(mqa.get_ydata()) == pytest.approx([row["decode_tokens_per_sec"] for row in seed_1])
    bars = [bar.get_width() for bar in drawn["kv_cache"].axes[0].patches]
    assert bars == [1.0, 0.5, 0.25]  # MiB
    points = [c for c in drawn["trade_off"].axes[0].collections if c.get_label() in ("mha", "gqa-2", "mqa")]
    assert [point.get_sizes()[0] / points[2].get_sizes()[0] for point in points] == pytest.approx([4, 2, 1])
    x, y = points[2].get_offsets()[0]
    assert (x, y) == pytest.approx((1440 * 1.01, statistics.fmean(BASE) + 0.024))
    faint = [c for c in drawn["trade_off"].axes[0].collections if len(c.get_offsets()) == 3]
    assert [y for _, y in faint[0].get_offsets()] == pytest.approx(BASE)


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b"[1]\n", b"\xff", b'{"val/loss": 1.0}\n', b'{"tokens": "x", "val/loss": 1.0}\n']
)
def test_a_run_without_a_readable_curve_is_left_out(garbage):
    cells = make_cells()
    report = make_report(cells)
    Path(cells[0]["out_dir"], "metrics.jsonl").write_bytes(garbage)  # mha, seed 0
    Path(cells[1]["out_dir"], "metrics.jsonl").unlink()  # gqa-2, seed 0
    assert figures.read_curve(cells[0]["out_dir"]) in (None, [])
    drawn = figures.draw(report)
    mha = lines(drawn["loss_by_tokens"])["mha"]
    assert mha.get_ydata()[-1] == pytest.approx((2.601 + 2.583) / 2, abs=1e-6)
    assert lines(drawn["difference_by_tokens"])["mqa"].get_ydata()[-1] == pytest.approx(0.0255)
    for cell in cells:
        Path(cell["out_dir"], "metrics.jsonl").unlink(missing_ok=True)
    assert set(figures.draw(report)) == {"trade_off", "kv_cache", "decode"}


def test_nan_evaluations_and_missing_measurements_are_left_out_of_figures():
    cells = make_cells(1)
    report = make_report(cells)
    with Path(cells[0]["out_dir"], "metrics.jsonl").open("a", encoding="utf-8") as f:
        f.write('{"step": 760, "tokens": 1556480, "val/loss": NaN}\n')
    assert figures.read_curve(cells[0]["out_dir"])[-1][0] == 1536000
    for cell in cells:
        cell |= {"decode": None, "decode_tokens_per_sec": None, "kv_cache_bytes_full_context": None}
    report["summary"] = results.summarize(cells)
    assert set(figures.draw(report)) == {"loss_by_tokens", "difference_by_tokens", "loss_by_seconds"}


def test_many_variants_are_told_apart_and_named_within_the_figure():
    heads = ("mha", "gqa-2", "mqa")
    axes = [f"norm={norm} position={p}" for norm in ("post", "pre") for p in ("learned", "rope")]
    names = [f"{head} {other}" for other in axes for head in heads]
    report = make_report(make_cells(2, tuple(names)))
    styles = figures._styles(report, "light")
    assert len({(s["color"], str(s["linestyle"])) for s in styles.values()}) == len(names) == 12
    for figure in figures.draw(report).values():
        figure.canvas.draw()
        box, renderer = figure.bbox, figure.canvas.get_renderer()
        for legend in figure.legends:
            assert [text.get_text() for text in legend.get_texts()]
            extent = legend.get_window_extent(renderer)
            assert extent.x1 <= box.x1 and extent.y0 >= 0
            assert extent.y1 < figure.axes[0].xaxis.label.get_window_extent(renderer).y0


@pytest.mark.parametrize("variants", [("mha",), ("mha", "gqa-2", "mqa"), ("mha x=1", "mqa x=1", "mha x=$^$")])
def test_few_variants_are_named_beside_their_lines_without_overlap(variants):
    from matplotlib.text import Text

    for figure in figures.draw(make_report(make_cells(3, variants))).values():
        figure.canvas.draw()
        renderer, boxes = figure.canvas.get_renderer(), []
        for text in figure.axes[-1].texts:
            boxes.append(Text.get_window_extent(text, renderer))  # without the line that leads to it
            assert boxes[-1].x1 <= figure.bbox.x1 and boxes[-1].y0 >= 0 and boxes[-1].y1 <= figure.bbox.y1
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if _meet(a, b)]


def test_names_stand_at_the_ends_of_short_curves_too():
    cells = make_cells(1)
    report = make_report(cells)
    for cell in cells:
        rows = [{"tokens": n, "val/loss": cell["val_loss"] + 4 - n} for n in (1, 4)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path(cell["out_dir"], "metrics.jsonl").write_text(text, encoding="utf-8")
    ax = figures.draw(report)["loss_by_tokens"].axes[0]
    places = {text.get_text(): (text.xy, text.xyann[1]) for text in ax.texts}
    to_axes = ax.transData + ax.transAxes.inverted()
    for cell in cells:
        end, place = places[cell["variant"]]
        assert end == pytest.approx((4.0, cell["val_loss"]))
        assert abs(place - to_axes.transform(end)[1]) < 0.1


def _meet(a, b) -> bool:
    return a.x0 < b.x1 and b.x0 < a.x1 and a.y0 + 2 < b.y1 and b.y0 + 2 < a.y1


def test_pngs_are_saved_by_name_and_nothing_global_is_changed():
    import matplotlib

    before = dict(matplotlib.rcParams)
    paths = figures.save_pngs(make_report(make_cells(2)), Path("plots"))
    assert {path.stem for path in paths} == ALL
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    write(make_report(make_cells(1), curves=False))
    assert dict(matplotlib.rcParams) == before
    with pytest.raises(ValueError, match="theme=sepia: must be one of light, dark"):
        figures.draw(make_report([make_cell("mha", 0, 1.0)]), "sepia")
