"""The wandb page that compares the attention kinds: python -m tracking.dashboard --publish

The page is built here, without a server and without an account: sections of panels that name the metrics of
`Tracker` and the summary of train.py. Without --publish it is written to a file, to look at. Needs
wandb-workspaces.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import config as configuration
from tracking import resolve_wandb_mode, write_json

NAME = "Attention variants"
MOST_RUNS = 100  # that a panel shows; wandb's own limit is 10, three kinds of four seeds are 12
PUBLISH_SECONDS = 60  # the longest wait for wandb
PUBLISH = "import sys; from tracking import dashboard; sys.exit(dashboard.publish_here(sys.argv[1]))"


@dataclass
class DashboardConfig:
    """One dashboard."""

    project: str = "headcount"  # of wandb, as in train.py's --wandb_project
    entity: str | None = None  # user or team that has the project; none takes your own default
    group: str | None = None  # only runs of this --wandb_group
    out: str = "dashboard.json"  # where it is written, unless it is published
    publish: bool = False  # put it on the server; each time makes a new view

    def __post_init__(self) -> None:
        for name in ("project", "entity", "group", "out"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}='': must not be empty")


def _by_attention(wr: Any) -> dict[str, Any]:
    """Mean over the seeds of each kind, and the standard deviation around it."""
    kind = {"groupby": wr.Config("attention"), "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    return {**kind, "max_runs_to_show": MOST_RUNS}


def _layout(wr: Any, n: int, columns: int = 3) -> Any:
    """The place of the n-th panel of a section; a row is 24 wide."""
    width = 24 // columns
    return wr.Layout(x=n % columns * width, y=n // columns * 8, w=width, h=8)


def quality(wr: Any) -> list[Any]:
    """Loss against tokens, which is fair to every kind, and against seconds, which tells what they cost."""
    curves = [
        ("val/loss", "tokens", "nats per token", "tokens"),
        ("train/loss", "tokens", "nats per token", "tokens"),
        ("val/bits_per_byte", "tokens", "bits per byte", "tokens"),
        ("val/loss", "perf/train_seconds", "nats per token", "seconds of training"),
    ]
    return [
        wr.LinePlot(
            title=f"{y} against {unit_x}", x=x, y=[y], title_x=unit_x, title_y=unit_y,
            layout=_layout(wr, n, 2), **_by_attention(wr)
        )
        for n, (y, x, unit_y, unit_x) in enumerate(curves)
    ]


def cost(wr: Any) -> list[Any]:
    """What a kind takes: bytes and tokens per second, from the summary of each run."""
    bars = {
        "kv_cache_bytes_full_context": "KV cache at full context (bytes)",
        "peak_memory_bytes": "peak memory of training (bytes)",
        "tokens_per_sec": "training (tokens/s)",
        "decode_tokens_per_sec": "decode (tokens/s)",
        "prefill_tokens_per_sec": "prefill (tokens/s)",
    }
    return [
        wr.BarPlot(
            title=title, metrics=[key], orientation="v", layout=_layout(wr, n), **_by_attention(wr)
        )
        for n, (key, title) in enumerate(bars.items())
    ]


def trade_off(wr: Any) -> list[Any]:
    """What quality costs in speed and memory: one point or line per run, and the runs side by side."""
    loss, speed = wr.SummaryMetric("val_loss"), wr.SummaryMetric("decode_tokens_per_sec")
    axes = [
        (wr.Config("n_kv_head"), "KV heads"),
        (speed, "decode (tokens/s)"),
        (wr.SummaryMetric("kv_cache_bytes_full_context"), "KV cache (bytes)"),
        (loss, "val_loss (nats per token)"),
    ]
    columns = [wr.ParallelCoordinatesPlotColumn(metric=metric, display_name=name) for metric, name in axes]
    title = "KV heads, speed, memory, loss"
    return [
        wr.ScatterPlot(title="val_loss against decode tokens/s", x=speed, y=loss, layout=_layout(wr, 0, 2)),
        wr.ParallelCoordinatesPlot(title=title, columns=columns, layout=_layout(wr, 1, 2)),
        wr.RunComparer(diff_only="split", layout=_layout(wr, 2, 2)),
        wr.WeavePanelSummaryTable(table_name="decode/table", layout=_layout(wr, 3, 2)),
    ]


def build(c: DashboardConfig) -> Any:
    """The wandb_workspaces.Workspace, built without a server. Errors: ValueError without wandb-workspaces."""
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError("the dashboard needs wandb-workspaces: pip install wandb-workspaces")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else importing it may wait for a network
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    sections = {"Quality": quality(wr), "Cost": cost(wr), "Trade-off": trade_off(wr)}
    shown = ("attention", "n_kv_head", "val_loss", "decode_tokens_per_sec")
    # each character as its number: wandb's filter language reads = < > as operators in quoted text too
    text = "".join(f"\\U{ord(character):08x}" for character in c.group or "")
    return ws.Workspace(
        entity=c.entity or "",
        project=c.project,
        name=NAME,
        sections=[ws.Section(name=name, panels=panels, is_open=True) for name, panels in sections.items()],
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(
            filters=f"Metric('Group') == '{text}'" if c.group else "",
            order=[expr.Ordering(expr.Summary("val_loss"), ascending=True)],
            pinned_columns=[f"summary:{key}" for key in shown],
        ),
    )


def spec(workspace: Any) -> dict[str, Any]:
    """What is sent to the server of a workspace; the one place that reaches into wandb-workspaces."""
    return json.loads(workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def publish_here(options: str) -> int:
    """Save the dashboard of `options` (JSON) and print its address or why not. May wait for ever.

    Returns the exit code. `publish` calls it in a process of its own.
    """
    try:
        import wandb

        c = DashboardConfig(**json.loads(options))
        c.entity = c.entity or wandb.Api().default_entity
        if not c.entity:
            raise ValueError("the account has no default entity; say which with --entity")
        print(build(c).save().url)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).strip()}")
        return 1
    return 0


def publish(c: DashboardConfig) -> str:
    """Save the dashboard on the server by one call and return its address; each call makes a new view.

    Never asks, and ends within PUBLISH_SECONDS after the probe for an account. Errors: ValueError, one line.
    """
    mode, why = resolve_wandb_mode("online")
    if mode != "online":
        raise ValueError(f"can't publish: {why}")
    # in a process that can be ended, as its probe is; what it says goes to a file, as a pipe may stay open
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    env |= {"PYTHONPATH": paths, "PYTHONUTF8": "1"}
    null = subprocess.DEVNULL
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        command = [sys.executable, "-c", PUBLISH, json.dumps(asdict(c))]
        try:
            done = subprocess.run(
                command, env=env, stdin=null, stdout=said, stderr=null, timeout=PUBLISH_SECONDS,
                start_new_session=True
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"can't publish: no answer from the server in {PUBLISH_SECONDS} s") from None
        said.seek(0)
        lines = said.read().split("\n")
    if done.returncode:
        raise ValueError(f"can't publish: {lines[0] or f'wandb ended with code {done.returncode}'}")
    return lines[0]


def main(argv: list[str]) -> None:
    """Read the options, build the dashboard, write or publish it, and say where it is."""
    about = "The wandb page that compares the attention kinds."
    c = configuration.parse(argv, DashboardConfig, prog="tracking.dashboard", description=about).config
    workspace = build(c)
    if c.publish:
        print(f"published: {publish(c)}")
        return
    write_json(Path(c.out), spec(workspace))
    print(f"wrote {c.out}; to have it on the server: wandb login, then the same with --publish")


if __name__ == "__main__":
    configuration.run_main(main, "tracking.dashboard")
