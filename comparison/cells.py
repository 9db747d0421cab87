"""The grid of a comparison: which runs there are, each as a command line of train.py."""

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import config as configuration
from model import GPTConfig, match_parameters
from options import TrainConfig

KINDS = ["mha", "gqa", "mqa"]
QUICK = 8  # the part of the steps that --quick takes
# what a finished run may differ in and still be the run that is wanted
INCIDENTAL = {"out_dir", "wandb", "wandb_project", "wandb_group", "wandb_run_name", "vocab_size", "resume"}


@dataclass
class Cell:
    """One run of the grid."""

    variant: str  # mha, gqa-2 (the KV heads), mqa; with another axis: "mqa norm=pre"
    seed: int
    axes: dict[str, Any]  # the values of the other axes
    presets: list[str]
    flags: dict[str, Any]  # of train.py, the folder among them
    config: TrainConfig  # what they resolve to

    @property
    def argv(self) -> list[str]:
        """The command line of train.py."""
        return self.presets + [f"--{key}={value}" for key, value in self.flags.items()]

    @property
    def out_dir(self) -> Path:
        """The run's folder."""
        return Path(self.flags["out_dir"])

    @property
    def name(self) -> str:
        """The variant and seed as one word, for a folder."""
        return f"{self.variant}-s{self.seed}".replace(" ", "-").replace("=", "_")


def kind_of(m: GPTConfig) -> str:
    """The kind that the number of KV heads makes it, however it was asked for: one for all heads is mqa."""
    if m.n_kv_head == m.n_head:
        return "mha"
    return "mqa" if m.n_kv_head == 1 else "gqa"


def make_cells(
    presets: list[str], flags: dict[str, Any], lists: dict[str, list[str]], seeds: list[int], root: Path
) -> list[Cell]:
    """Every combination of the values in `lists`, seed by seed: a grid that is stopped has whole rows.

    `flags`: options of every run. Where n_kv_head leads to the same heads twice, the run is there once.
    Errors: ValueError for a combination that is none, before anything has run.
    """
    lists = dict(lists)
    kinds, groups = lists.pop("attention", KINDS), lists.pop("n_kv_head", [])
    if groups and "gqa" not in kinds:
        raise ValueError(f"n_kv_head={','.join(groups)} belongs to gqa, but --attention={','.join(kinds)}")
    heads: list[dict[str, Any]] = []
    for kind in kinds:
        if kind == "gqa":
            heads += [{"attention": kind, "n_kv_head": n} for n in groups] or [{"attention": kind}]
        else:
            heads.append({"attention": kind, "n_kv_head": None})
    cells: dict[str, Cell] = {}
    for seed in seeds:
        for values in itertools.product(*lists.values()):
            for head in heads:
                axes = dict(zip(lists, values, strict=True))
                cell = _cell(presets, flags | {"seed": seed}, axes, head, root)
                cells.setdefault(cell.name, cell)
    return list(cells.values())


def _cell(
    presets: list[str], flags: dict[str, Any], axes: dict[str, str], head: dict[str, Any], root: Path
) -> Cell:
    m = _resolve(presets, flags | axes | head).config.model
    kind = kind_of(m)  # gqa with as many KV heads as query heads is mha, and goes by that name
    flags = flags | axes | {"attention": kind, "n_kv_head": m.n_kv_head if kind == "gqa" else None}
    parsed = _resolve(presets, flags)
    typed = {key: parsed.explicit[key] for key in axes}
    variant = f"gqa-{m.n_kv_head}" if kind == "gqa" else kind
    variant = " ".join([variant, *(f"{key}={value}" for key, value in typed.items())])
    cell = Cell(variant, parsed.config.seed, typed, presets, flags, parsed.config)
    return with_flags(cell, {"out_dir": str(root / "runs" / cell.name)})


def _resolve(presets: list[str], flags: dict[str, Any]) -> configuration.Parsed[TrainConfig]:
    argv = presets + [f"--{key}={value}" for key, value in flags.items()]
    return configuration.parse(argv, TrainConfig, prog="compare.py", description="")


def with_flags(cell: Cell, flags: dict[str, Any]) -> Cell:
    """The cell with these options over its own."""
    flags = cell.flags | flags
    return replace(cell, flags=flags, config=_resolve(cell.presets, flags).config)


def shortened(c: TrainConfig) -> dict[str, Any]:
    """The options that make a run an eighth as long, and its last evaluation short."""
    windows = min(100, c.final_eval_windows or 100)
    return {
        "max_iters": max(20, c.max_iters // QUICK), "eval_interval": c.eval_interval // QUICK,
        "final_eval_windows": windows,
    }  # fmt: skip


def matched_width(cell: Cell) -> dict[str, Any]:
    """The option that gives a cell the parameters of MHA, in a wider feed-forward."""
    wider, own = match_parameters(cell.config.model).n_inner, cell.config.model.n_inner
    return {} if wider == own else {"n_inner": wider}


def finished(cell: Cell) -> dict[str, Any] | None:
    """The summary of a cell's run, where it is there, came to its end, and was made with the same options."""
    summary = _read(cell.out_dir / "summary.json")
    return summary if summary.get("finished") and begun(cell) else None


def begun(cell: Cell) -> bool:
    """Whether what is in a cell's folder was made with the same options, so that it can be gone on with."""
    made_with, wanted = _read(cell.out_dir / "config.json"), configuration.flatten(cell.config)
    return all(made_with.get(key) == value for key, value in wanted.items() if key not in INCIDENTAL)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
