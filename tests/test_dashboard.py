"""The wandb page as data: its panels name what train.py logs; it is published by one call or not at all."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from tiny_run import flags, read_json, read_rows
from wandb_stub import CONFIG, NOWHERE, Server, ended, environment, needs_wandb, put_fake, records, start

import config
import train
from tracking import Tracker, dashboard

needs_workspaces = pytest.mark.skipif(
    importlib.util.find_spec("wandb_workspaces") is None, reason="wandb-workspaces is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1")  # wandb-workspaces speaks to both versions
needs_signals = pytest.mark.skipif(os.name == "nt", reason="Windows has no terminals of this kind")
DECODE = [
    {"batch": 1, "context": 8, "decode_tokens_per_sec": 2.5, "kv_cache_bytes": 512},
    {"batch": 4, "context": 8, "decode_tokens_per_sec": 9.0, "kv_cache_bytes": 2048},
]
RUN = """
import sys
import config, tracking
from tracking import dashboard
MEDDLE
config.run_main(dashboard.main, "tracking.dashboard")
print("done")
"""


def page(**options) -> dict:
    """The spec of a dashboard."""
    return dashboard.spec(dashboard.build(dashboard.DashboardConfig(**options)))["section"]


def sections(**options) -> dict[str, list[dict]]:
    """The panels of each section."""
    found = page(**options)["panelBankConfig"]["sections"]
    return {section["name"]: section["panels"] for section in found}


def panels_of(kind: str) -> list[dict]:
    """What each panel of a kind is told."""
    found = [panel for panels in sections().values() for panel in panels if panel["viewType"] == kind]
    return [panel["config"] for panel in found]


def run_dashboard(folder: Path, *argv: str, env: dict[str, str], meddle: str = "", **options):
    """Start tracking.dashboard in a process of its own, as a person would."""
    return start(folder, RUN.replace("MEDDLE", meddle), *argv, env=env, **options)


def refusal(monkeypatch, capsys, *argv: str) -> str:
    """The one line on stderr of a dashboard that fails with exit code 1."""
    monkeypatch.setattr(sys, "argv", ["dashboard", *argv])
    with pytest.raises(SystemExit) as caught:
        config.run_main(dashboard.main, "tracking.dashboard")
    out, error = capsys.readouterr()
    assert caught.value.code == 1 and out == ""
    assert error.startswith("tracking.dashboard: error: ") and error.count("\n") == 1
    return error


# --- the page


@needs_workspaces
def test_the_sections_have_their_panels():
    curve, bar = "Run History Line Plot", "Bar Chart"
    kinds = {name: [panel["viewType"] for panel in panels] for name, panels in sections().items()}
    assert kinds == {
        "Quality": [curve] * 4,
        "Cost": [bar] * 5,
        "Trade-off": ["Scatter Plot", "Parallel Coordinates Plot", "Run Comparer", "Weave"],
    }


@needs_workspaces
def test_curves_are_means_by_attention_over_tokens():
    curves = panels_of("Run History Line Plot")
    assert [(found["metrics"], found["xAxis"]) for found in curves] == [
        (["val/loss"], "tokens"),
        (["train/loss"], "tokens"),
        (["val/bits_per_byte"], "tokens"),
        (["val/loss"], "perf/train_seconds"),
    ]
    for found in [*curves, *panels_of("Bar Chart")]:
        grouping = [found[key] for key in ("groupBy", "groupAgg", "groupArea")]
        assert grouping == ["attention.value", "mean", "stddev"]
        assert found["limit"] >= 12  # three kinds, four seeds
    assert page()["settings"]["xAxis"] == "tokens"


@needs_workspaces
def test_no_panel_lies_on_another():
    for name, panels in sections().items():
        cells = [
            (x, y)
            for place in (panel["layout"] for panel in panels)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, name


@needs_workspaces
@pytest.mark.parametrize("group", ["study", "it's \"a\" = \\ <b> ü🙂", "x' or Metric('State') != 'y"])
def test_a_group_shows_its_runs_alone_whatever_it_is_called(group):
    (found,) = page(group=group)["runSets"][0]["filters"]["filters"]
    assert (found["key"], found["op"], found["value"]) == ({"section": "run", "name": "group"}, "=", group)
    assert page()["runSets"][0]["filters"]["filters"] == []


def keys_of(panel: dict) -> set[str]:
    """The keys that a panel names, after history/, summary/, config/ or table/; KeyError for a new kind."""

    def accessor(text: str) -> str:
        section, key = text.split(":")
        return f"{section}/{key.removesuffix('.value')}"

    def curve(told: dict) -> set[str]:
        grouped = f"config/{told['groupBy'].removesuffix('.value')}"
        return {f"history/{key}" for key in (told["xAxis"], *told["metrics"])} | {grouped}

    def bar(told: dict) -> set[str]:
        grouped = f"config/{told['groupBy'].removesuffix('.value')}"
        return {f"summary/{key}" for key in told["metrics"]} | {grouped}

    def weave(told: dict) -> set[str]:
        pick = told["panel2Config"]["exp"]["fromOp"]
        assert pick["inputs"]["obj"]["fromOp"]["name"] == "run-summary"
        return {f"table/{pick['inputs']['key']['val']}"}

    return {
        "Run History Line Plot": curve,
        "Bar Chart": bar,
        "Scatter Plot": lambda told: {accessor(told["xAxis"]), accessor(told["yAxis"])},
        "Parallel Coordinates Plot": lambda told: {accessor(axis["accessor"]) for axis in told["columns"]},
        "Run Comparer": lambda told: set(),
        "Weave": weave,
    }[panel["viewType"]](panel["config"])


@needs_workspaces
def test_every_key_on_the_page_is_one_that_training_gives(work):
    train.main(flags(attention="gqa", n_kv_head=2, measure_decode=True))
    history = {key for row in read_rows(key="step") for key in row}
    summary = read_json("run/summary.json")
    given = {f"history/{key}" for key in history} | {f"config/{key}" for key in read_json("run/config.json")}
    given |= {f"summary/{key}" for key, value in summary.items() if isinstance(value, str | int | float)}
    given |= {f"table/{key}/table" for key, value in summary.items() if isinstance(value, list)}
    shown = set().union(*(keys_of(panel) for panels in sections().values() for panel in panels))
    runs = page()["runSets"][0]
    shown |= {f"{found['key']['section']}/{found['key']['name']}" for found in runs["sort"]["keys"]}
    pinned = set(runs["runFeed"]["columnPinned"]) - {"run:displayName"}
    shown |= {key.replace(":", "/") for key in pinned}
    assert shown <= given, f"nothing logs {shown - given}"
    assert {"history/val/loss", "summary/decode_tokens_per_sec", "table/decode/table"} <= shown
    assert "summary/prefill_tokens_per_sec" in shown and "config/n_kv_head" in shown
    # a curve needs both of its axes in one row: wandb makes the rows of a step one
    rows: dict[int, set[str]] = {}
    for row in read_rows(key="step"):
        rows.setdefault(row["step"], set()).update(row)
    for told in panels_of("Run History Line Plot"):
        assert any({told["xAxis"], *told["metrics"]} <= keys for keys in rows.values()), told


# --- without a server


NO_NETWORK = """
WATCHED = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen", "os.posix_spawn")
sys.addaudithook(lambda event, args: event in WATCHED and __import__("os")._exit(9))
"""


@needs_workspaces
def test_a_page_is_written_without_a_network_and_without_a_process(tmp_path):
    with Server() as server:
        env = environment(tmp_path, f"http://127.0.0.1:{server.server_port}", key=True, WANDB_MODE="online")
        process = run_dashboard(tmp_path, "--project=p", "--group=study", env=env, meddle=NO_NETWORK)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "") and server.n_connections == 0
    how = "to have it on the server: wandb login, then the same with --publish"
    assert out == f"wrote dashboard.json; {how}\ndone\n"
    written = read_json(tmp_path / "dashboard.json")["section"]
    assert [section["name"] for section in written["panelBankConfig"]["sections"]] == [*sections()]
    assert [path.name for path in tmp_path.iterdir()] == ["dashboard.json"]


@needs_workspaces
def test_as_a_module_from_the_checkout(tmp_path):
    code = "import runpy, sys; sys.argv[0] = 'x'; runpy.run_module('tracking.dashboard', run_name='__main__')"
    env = environment(tmp_path)
    process = start(ROOT, code, f"--out={tmp_path / 'page.json'}", env=env)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and out.startswith("wrote ")
    assert read_json(tmp_path / "page.json")["section"]


@needs_workspaces
def test_a_failed_write_leaves_the_earlier_page(tmp_path, monkeypatch, capsys):
    (tmp_path / "dashboard.json").write_text("earlier", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left on device" in refusal(monkeypatch, capsys)
    assert (tmp_path / "dashboard.json").read_text(encoding="utf-8") == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["dashboard.json"]


@pytest.mark.parametrize("option", ["", "--publish"])
def test_without_wandb_workspaces_it_says_what_to_install(option, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.chdir(tmp_path)
    error = refusal(monkeypatch, capsys, *filter(None, [option]))
    assert error.endswith("the dashboard needs wandb-workspaces: pip install wandb-workspaces\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["project", "entity", "group", "out"])
def test_an_empty_name_is_refused(key, monkeypatch, capsys):
    assert f"{key}='': must not be empty" in refusal(monkeypatch, capsys, f"--{key}=")


# --- with one


@needs_workspaces
@pytest.mark.parametrize("entity", [None, "team"])
def test_publishing_is_one_mutation(entity, tmp_path):
    argv = ["--publish", "--project=p", "--group=study", *([f"--entity={entity}"] if entity else [])]
    with Server() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        env = environment(tmp_path, url, key=True, WANDB_MODE="offline")
        process = run_dashboard(tmp_path, *argv, env=env)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    (view,) = server.views
    assert (view["displayName"], view["projectName"]) == ("Attention variants", "p")
    assert view["entityName"] == (entity or "me") and view["type"] == "project-view"
    sent = json.loads(view["spec"])["section"]
    assert [section["name"] for section in sent["panelBankConfig"]["sections"]] == [*sections()]
    assert sent["runSets"][0]["filters"]["filters"][0]["value"] == "study"
    assert out.startswith(f"published: {url}/{entity or 'me'}/p?nw=") and out.endswith("\ndone\n")
    assert not (tmp_path / "dashboard.json").exists() and not server.runs


FAST = "tracking.PROBE_SECONDS, dashboard.PUBLISH_SECONDS = "


@needs_workspaces
@pytest.mark.parametrize("server", ["none", "stalls", "stalls at the page", "has no such project"])
def test_a_server_that_fails_is_one_line(server, tmp_path):
    class Refusing(Server):
        def answer(self, path, body):
            found = super().answer(path, body)
            refuses = server == "has no such project" and "UpsertView2" in body.get("query", "")
            return {"errors": [{"message": "project not found"}]} if refuses else found

    stalls_at, seconds, wanted = {
        "none": ("", "2, 2", ("no answer from the server within 2 s", "no server, or API key refused")),
        "stalls": ("Viewer", "2, 2", ("no answer from the server within 2 s",)),
        "stalls at the page": ("UpsertView2", "20, 4", ("no answer from the server in 4 s",)),
        "has no such project": ("", "20, 30", ("project not found",)),
    }[server]
    with Refusing(stalls_at) as stub:
        url = NOWHERE if server == "none" else f"http://127.0.0.1:{stub.server_port}"
        env = environment(tmp_path, url, key=True)
        process = run_dashboard(tmp_path, "--publish", env=env, meddle=FAST + seconds)
        (line,) = ended(process, 1)
        assert not stub.views or server == "has no such project"
    assert line.startswith("tracking.dashboard: error: can't publish: ")
    assert any(text in line for text in wanted), line
    assert not list(tmp_path.glob("*.json"))


@needs_workspaces
@needs_signals
def test_without_an_account_a_terminal_is_asked_nothing(tmp_path):
    import pty

    master, terminal = pty.openpty()
    try:
        same = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        env = environment(tmp_path)
        process = run_dashboard(tmp_path, "--publish", env=env, start_new_session=True, **same)
        try:
            assert process.wait(60) == 1
        finally:
            process.kill()
        shown = os.read(master, 100_000).decode()
    finally:
        os.close(master)
        os.close(terminal)
    assert shown.splitlines() == ["tracking.dashboard: error: can't publish: no API key: wandb login"]


# --- the table of decode speeds


@needs_wandb
def test_an_offline_run_has_the_decode_table_and_a_flat_summary(work):
    code = "import sys, train; train.main(sys.argv[1:])"
    options = flags(attention="gqa", n_kv_head=2, measure_decode=True, wandb="offline")
    said = [line for line in ended(start(work, code, *options, env=environment(work))) if "wandb" in line]
    assert said == ["wandb: offline: as asked; see it with: wandb leet wandb"]
    ours = read_json("run/summary.json")
    tables = [
        {key: value for key, value in row["item"].items() if key.startswith("decode/table")}
        for row in records(work, "history")
    ]
    assert not any(tables[:-1])  # once, beside the last evaluation
    assert tables[-1]["decode/table.nrows"] == len(ours["decode"]) > 0
    summary: dict = {}
    for found in records(work, "summary"):
        summary |= found["update"]
    flat = {key: value for key, value in ours.items() if value is not None and key != "decode"}
    assert {key: summary[key] for key in flat} == flat and "decode" not in summary
    assert summary["decode_tokens_per_sec"] > 0 and summary["prefill_tokens_per_sec"] > 0
    (path,) = work.glob("wandb/offline-run-*/files/media/table/decode/*.json")
    table = read_json(path)
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == ours["decode"]


def finish(folder: Path, summary: dict) -> None:
    with Tracker(folder, CONFIG) as tracker:
        tracker.log(1, {"tokens": 8, "train/loss": 2.0})
    tracker.finish(summary)


def test_the_table_comes_after_the_summary_and_before_the_end(tmp_path, monkeypatch):
    run = put_fake(monkeypatch)
    finish(tmp_path, {"val_loss": 2.0, "decode": DECODE})
    table = {"columns": list(DECODE[0]), "data": [list(row.values()) for row in DECODE]}
    assert run.calls[-3:] == [
        ("summary", {"val_loss": 2.0}), ("table", {"decode/table": table}), ("finish", 0)
    ]  # fmt: skip
    assert read_json(tmp_path / "summary.json") == {"val_loss": 2.0, "decode": DECODE}


@pytest.mark.parametrize("summary", [{"val_loss": 2.0}, {"val_loss": 2.0, "decode": []}])
def test_without_rows_there_is_no_table(summary, tmp_path, monkeypatch, capsys):
    run = put_fake(monkeypatch)
    finish(tmp_path, summary)
    assert len(capsys.readouterr().err.splitlines()) == 1  # where the run is, and no complaint
    assert run.calls[-2:] == [("summary", {"val_loss": 2.0}), ("finish", 0)] and not run.count("table")


def test_a_table_that_fails_is_one_line_and_the_run_is_closed(tmp_path, monkeypatch, capsys):
    run = put_fake(monkeypatch, "table")
    finish(tmp_path, {"val_loss": 2.0, "decode": DECODE})
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == ["wandb: decode/table: failed, but summary.json has it; RuntimeError: out of order"]
    assert run.calls[-1] == ("finish", 0) and read_json(tmp_path / "summary.json")["decode"] == DECODE


STALLED = """
import json, sys, time
from pathlib import Path
import tracking
tracking.FINISH_SECONDS = tracking.GRACE_SECONDS = 2
out_dir = Path("out", "gqa")
out_dir.mkdir(parents=True)
with tracking.Tracker(out_dir, json.loads(sys.argv[1])) as tracker:
    for step in (1, 2, 3):
        tracker.log(step, {"tokens": step, "train/loss": 1 / step})
        time.sleep(0.5)
before = time.monotonic()
tracker.finish({"val_loss": 0.25, "decode": json.loads(sys.argv[2])})
print("done", time.monotonic() - before < 8)
"""


@needs_wandb
def test_a_server_that_stalls_before_the_table_ends_in_time_and_loses_nothing(tmp_path):
    with Server("file_stream") as server:
        env = environment(tmp_path, f"http://127.0.0.1:{server.server_port}", key=True)
        run = json.dumps({**CONFIG, "wandb": "online"})
        process = start(tmp_path, STALLED, run, json.dumps(DECODE), env=env)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done True\n")
    said = err.splitlines()
    assert len(said) == 2 and said[0].startswith("wandb: online: ")
    assert said[1] == "wandb: finish: takes too long, but metrics.jsonl has every row"
    assert read_json(tmp_path / "out/gqa/summary.json") == {"val_loss": 0.25, "decode": DECODE}
    assert len(read_rows(tmp_path / "out" / "gqa")) == 3
