"""sweep.yaml: the command lines that wandb makes of it, and what a run does under its agent."""

import itertools
import re
from dataclasses import replace

import pytest
from conftest import KINDS, ROOT
from wandb_stub import CONFIG, put_fake

import config
from tracking import Tracker
from train import TrainConfig

yaml = pytest.importorskip("yaml", reason="PyYAML comes with wandb")
SWEEP = yaml.safe_load((ROOT / "sweep.yaml").read_text(encoding="utf-8"))
EVERY = ["config/small.py", "--measure_decode=True", "--wandb=auto", "--wandb_group=attention-grid"]


def commands() -> list[list[str]]:
    """The command lines of the grid, made by wandb's own agent code."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    names = list(SWEEP["parameters"])
    found = []
    for values in itertools.product(*(SWEEP["parameters"][name]["values"] for name in names)):
        chosen = {"args": {name: {"value": value} for name, value in zip(names, values, strict=True)}}
        macros = {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [SWEEP["program"]]}
        macros |= utils.create_sweep_command_args(chosen)
        command = utils.create_sweep_command(list(SWEEP["command"]))
        macro = [re.fullmatch(r"\$\{(\w+)\}", part) for part in command]
        parts = (macros[name[1]] if name else [part] for name, part in zip(macro, command, strict=True))
        found.append([word for part in parts for word in part])
    return found


def test_the_grid_is_nine_command_lines():
    assert SWEEP["method"] == "grid" and SWEEP["project"] == TrainConfig().wandb_project
    assert sorted(commands()) == sorted(
        ["/usr/bin/env", "python", "train.py", *EVERY, f"--attention={kind}", f"--seed={seed}"]
        for kind in KINDS for seed in (0, 1, 2)
    )  # fmt: skip


def test_each_command_line_is_a_run_that_differs_in_kind_and_seed_alone():
    parsed = [config.parse(words[3:], TrainConfig, prog="", description="") for words in commands()]
    kinds = [(found.config.model.attention, found.config.seed) for found in parsed]
    assert sorted(kinds) == sorted(itertools.product(KINDS, (0, 1, 2)))
    assert {found.config.wandb for found in parsed} == {"auto"}
    assert len({str(replace(found.config, model=None, seed=0)) for found in parsed}) == 1
    assert all((ROOT / words[2]).is_file() for words in commands())


def test_the_metric_is_one_that_training_logs():
    assert SWEEP["metric"] == {"name": "val/loss", "goal": "minimize"}
    assert "`val/loss`" in Tracker.__doc__


@pytest.mark.parametrize("sweep", ["", "abc123"])
def test_under_an_agent_the_run_takes_the_sweeps_project_and_id(sweep, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", sweep)
    run = put_fake(monkeypatch)
    with Tracker(tmp_path, CONFIG) as tracker:
        pass
    tracker.finish({})
    given = run.calls[0][1].keys()
    assert {"group", "config", "name", "tags"} <= given
    assert given & {"id", "project", "resume"} == (set() if sweep else {"id", "project", "resume"})
    assert (tmp_path / "run_id").exists() == (not sweep)
