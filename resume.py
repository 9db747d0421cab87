"""Going on with a run: what it has to know beside its weights, and how that is put back.

Nothing random has a state to be saved: initial weights, batches and dropout are functions of the seed and the
step alone.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.optim import Muon

import config as configuration
from checkpoint import TRAINING, load_checkpoint, set_aside, verify_training
from model import GPT
from options import TrainConfig, check_same_run

AVERAGES = {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}  # of AdamW, and of Muon


@dataclass
class Progress:
    """What a run knows of itself beside its weights and optimizers; saved with them, it goes on unchanged."""

    step: int = 0  # updates done
    timed_steps: int = 0  # those that the clock has seen,
    seconds: float = 0.0  # and their time
    skipped: int = 0
    n_micro: int = 1  # micro-batches of a step
    val: dict[str, float] = field(default_factory=dict)  # the newest validation losses
    best: float = math.inf  # the best validation loss,
    best_step: int = 0  # its step,
    waited: int = 0  # and evaluations since
    owes_evaluation: bool = False  # it was due at this step, and left out to leave in time
    batches: str = ""  # hash of every id learned from, in order: equal for equal data


def stored_options(flags: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The options of the run that --resume=FOLDER names: what flags don't say, stays as it was."""
    folder = flags.get("resume")
    if folder in (None, "auto"):
        return "", {}
    loaded = load_checkpoint(Path(folder))
    if flags.get("out_dir") and Path(flags["out_dir"]) != Path(folder):
        raise ValueError(f"--out_dir={flags['out_dir']}: a resumed run stays in its folder, {folder}")
    if loaded.path == Path(folder):
        raise ValueError(f"--resume={folder}: give the run's folder, {loaded.path.parents[1]}")
    check_same_run(flags, loaded.info.get("run"), loaded.path)
    return str(loaded.path), {**loaded.info["run"], "resume": folder, "out_dir": folder}


def resume(
    out_dir: Path, c: TrainConfig, network: GPT, optimizers: list[torch.optim.Optimizer], scaler: Any,
    corpus_sha256: str, tokenizer: dict[str, Any]
) -> Progress:
    """Put weights, optimizers and progress of a run's newest whole checkpoint back.

    What comes after it is damaged, and is set aside. Errors: ValueError for another run or another text.
    """
    loaded = load_checkpoint(out_dir, next(network.parameters()).device, to_resume=True)
    other_text = f"{loaded.path}: learned from another text than {c.dataset} is now; start anew"
    if loaded.info.get("corpus_sha256") != corpus_sha256:
        raise ValueError(other_text)
    check_same_run(configuration.flatten(c), loaded.info.get("run"), loaded.path)
    if loaded.tokenizer != tokenizer:
        raise ValueError(other_text)
    saved = resume_training(loaded.path, optimizers)
    progress = read_progress(saved, loaded.info.get("step"), c.batch_size, loaded.path)
    network.load_state_dict(loaded.model.state_dict())
    if scaler.is_enabled() and saved["scaler"]:
        scaler.load_state_dict(saved["scaler"])
    set_aside(out_dir, loaded.path)
    print(f"resumed    {loaded.path}", flush=True)
    return progress


def resume_training(place: Path, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Put the optimizers' averages back as they were, and return the progress that was saved with them.

    Learning rates and the like stay as the optimizers have them now. Errors: ValueError in one line where the
    file is missing, damaged, or belongs to other parameters.
    """
    file = place / TRAINING
    verify_training(place)
    shapes = {
        f"{n}.{index}": p.shape
        for n, optimizer in enumerate(optimizers)
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimizers]
    try:
        with safe_open(file, framework="pt") as f:
            progress = json.loads(f.metadata()["progress"])
            for name in f.keys():  # noqa: SIM118 - not a dict
                owner, kind = name.rsplit(".", 1)
                piece, shape = f.get_slice(name), () if kind == "step" else shapes[owner]
                if tuple(piece.get_shape()) != shape or piece.get_dtype() != "F32" or owner not in shapes:
                    raise ValueError(name)
                n, index = map(int, owner.split("."))
                states[n].setdefault(index, {})[kind] = f.get_tensor(name)
        for optimizer, state in zip(optimizers, states, strict=True):
            if any(averages.keys() != AVERAGES[isinstance(optimizer, Muon)] for averages in state.values()):
                raise ValueError
            groups = optimizer.state_dict()["param_groups"]
            if state and len(state) != sum(len(group["params"]) for group in groups):
                raise ValueError  # none at all is what a run has whose every step was left out
            optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise ValueError(f"{file}: belongs to another model or optimizer") from None
    return progress


def read_progress(saved: Any, step: Any, batch_size: int, place: Path) -> Progress:
    """The progress that `resume_training` found. Errors: ValueError where no run can have come to it."""
    found: Any = saved.get("progress") if isinstance(saved, dict) else None
    usual = asdict(Progress())
    try:
        fits = found.keys() == usual.keys() and found["step"] == step and isinstance(saved["scaler"], dict)
        fits &= all(type(found[name]) is type(value) for name, value in usual.items())
        fits &= all(0 <= x < 2**63 for x in found.values() if type(x) is int) and found["best"] > -math.inf
        fits &= found["n_micro"] >= 1 and batch_size % found["n_micro"] == 0
        fits &= 0 < found["seconds"] < math.inf or found["seconds"] == found["timed_steps"] == 0
        fits &= all(type(x) is float for x in found["val"].values()) and found["batches"].isascii()
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        fits = False
    if not fits:
        raise ValueError(f"{place}: what it tells of the run's progress can't be; take another checkpoint")
    return Progress(**found)
