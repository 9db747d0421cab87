"""Checkpoints: plain data in one folder per save, written whole or not at all, read without running anything.

    <out_dir>/checkpoints/step-000500/model.safetensors   the weights, clean names, a tied table once
                                      config.json         the model's fields, step, losses, the run's config
                                      tokenizer.json      the tokenizer
                                      training.safetensors  for a resumed run: optimizers, progress
                                      manifest.json       format version, size and SHA-256 of each file above
    <out_dir>/checkpoints/best                            the name of the folder with the best validation loss

A save goes into a hidden folder beside its place, is flushed to disk, and is then renamed: a kill at any
moment leaves the previous checkpoint as it was. A checkpoint that is damaged is passed over for the one
before it.
"""

import hashlib
import json
import math
import os
import reprlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import GPT, GPTConfig, estimate_n_params, rope_tables

FORMAT_VERSION = 2  # 1 had no training state: it can be sampled from and evaluated, not resumed
FILES = ("model.safetensors", "config.json", "tokenizer.json")
TRAINING, MANIFEST, BEST = "training.safetensors", "manifest.json", "best"
MAX_SIZE = 2**20  # the largest layer count, width, context, ... that a file may ask for
MAX_ROPE = 2**26  # positions x head_dim of a rope table, which is made and not read: 256 MiB
FLOATS = {"F64", "F32", "F16", "BF16"}  # number formats that weights may have in a file


class Damaged(ValueError):
    """A checkpoint that isn't what was saved: a file missing, cut short or changed."""


@dataclass
class Checkpoint:
    """A loaded checkpoint: model in eval mode, tokenizer as plain data, and what config.json tells."""

    path: Path
    model: GPT
    tokenizer: dict[str, Any]
    info: dict[str, Any]  # "step", "val" (losses), "run" (the run's resolved config), ...


def clean_state_dict(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of the plain model, whatever torch.compile or DDP put in front."""

    def clean(name: str) -> str:
        return name.replace("_orig_mod.", "").removeprefix("module.")

    return {clean(name): tensor for name, tensor in state.items()}


def save_checkpoint(
    out_dir: Path,
    step: int,
    model: torch.nn.Module,
    tokenizer: dict[str, Any],
    info: dict[str, Any],
    training: tuple[list[torch.optim.Optimizer], dict[str, Any]] | None = None,
    keep: int = 2,
    best: bool = False,
) -> Path:
    """Write the checkpoint of `step` and return its folder; keep the newest `keep` of this run, and the best.

    `training`: the optimizers, and plain data about the progress, for resume.py. `best`: mark this
    one as the best so far. Errors: OSError where the disk is full or may not be written; the checkpoints that
    were there stay.
    """
    root = out_dir / "checkpoints"
    place, draft = root / f"step-{step:06d}", root / f".step-{step:06d}.{os.getpid()}"
    if (place / MANIFEST).exists():
        if best:
            _mark_best(root, place.name)
        return place
    root.mkdir(parents=True, exist_ok=True)
    for litter in root.glob(".step-*"):  # of a save that was killed
        shutil.rmtree(litter, ignore_errors=True)
    try:
        draft.mkdir()
        plain: Any = getattr(model, "module", getattr(model, "_orig_mod", model))
        config: GPTConfig = plain.config
        state = clean_state_dict(model.state_dict())
        if config.tie_weights:
            state.pop("lm_head.weight")
        _write_tensors(draft / FILES[0], state)
        if training is not None:
            optimizers, progress = training
            averages = {
                f"{n}.{index}.{kind}": tensor
                for n, optimizer in enumerate(optimizers)
                for index, kinds in optimizer.state_dict()["state"].items()
                for kind, tensor in kinds.items()
            }
            _write_tensors(draft / TRAINING, averages, {"progress": json.dumps(progress)})
        _write_json(draft / FILES[1], {"model": asdict(config), "step": step, **info})
        _write_json(draft / FILES[2], tokenizer)
        files = {path.name: _fingerprint(path) for path in draft.iterdir()}
        _write_json(draft / MANIFEST, {"format": "headcount", "version": FORMAT_VERSION, "files": files})
        for path in draft.iterdir():
            _flush(path)
        os.replace(draft, place)
        _flush(root)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if best:
        _mark_best(root, place.name)
    kept = best_checkpoint(out_dir)
    for old in list_checkpoints(out_dir)[:-keep]:
        if old != kept:
            _delete(old)
    return place


def _write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    try:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, metadata)
    except SafetensorError as error:  # it wraps the system's errors, a full disk among them
        raise OSError(f"{path}: cannot be written ({error})") from None


def _mark_best(root: Path, name: str) -> None:
    draft = root / f".{BEST}.{os.getpid()}"
    draft.write_text(name, encoding="utf-8")
    _flush(draft)
    os.replace(draft, root / BEST)


def best_checkpoint(out_dir: Path) -> Path | None:
    """The checkpoint with the best validation loss of a run's evaluations, if one is marked and there."""
    try:
        name = (out_dir / "checkpoints" / BEST).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return next((place for place in list_checkpoints(out_dir) if place.name == name), None)


def list_checkpoints(out_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return [place for place in step_folders(out_dir) if (place / MANIFEST).is_file()]


def step_folders(out_dir: Path) -> list[Path]:
    """Each step's folder with something in it, a checkpoint that lost its manifest too, oldest first."""
    found = [place for place in (out_dir / "checkpoints").glob("step-*/") if any(place.iterdir())]
    ours = [place for place in found if place.name[5:].isdecimal()]  # not a copy that someone put aside
    return sorted(ours, key=lambda place: int(place.name[5:]))


def set_aside(out_dir: Path, place: Path) -> None:
    """Rename what comes after `place`, a checkpoint to resume from: damaged, and in the way of new ones."""
    for later in _after(out_dir, place):
        name, n = f"damaged-{later.name[5:]}", 1
        while later.with_name(name).exists():
            name, n = f"damaged-{later.name[5:]}~{n}", n + 1
        later.rename(later.with_name(name))
        print(f"warning: {later} comes after it and is now {name}", file=sys.stderr)


def drop_after(out_dir: Path, place: Path) -> None:
    """Delete the checkpoints that come after `place`."""
    for later in _after(out_dir, place):
        _delete(later)


def _after(out_dir: Path, place: Path) -> list[Path]:
    return [later for later in step_folders(out_dir) if int(later.name[5:]) > int(place.name[5:])]


def _delete(place: Path) -> None:
    """Out of sight at once, so that a kill meanwhile leaves litter and not half a checkpoint."""
    shutil.rmtree(place.rename(place.with_name(f".{place.name}")))


def newest_run(root: Path = Path("out")) -> Path:
    """The run folder under `root` whose checkpoint was written last. ValueError where there is none."""
    newest = max(
        root.glob(f"**/checkpoints/step-*/{MANIFEST}"), key=lambda path: path.stat().st_mtime_ns, default=None
    )
    if newest is None:
        raise ValueError(
            f"no run to sample from in {root}/: train one first, with: python train.py config/small.py"
        )
    return newest.parents[2]


def load_checkpoint(
    path: Path, device: torch.device | str = "cpu",
    dtype: torch.dtype | Callable[[GPTConfig], torch.dtype] = torch.float32,
    which: Literal["last", "best"] = "last", to_resume: bool = False,
) -> Checkpoint:
    """Load a run folder's newest or best checkpoint, or a checkpoint folder, on `device` in `dtype`.

    One of a run that is damaged is passed over, with a warning, for the newest that is whole; `to_resume`:
    with its training state. `dtype` may be a function that chooses it by the model's config. Errors:
    ValueError in one line for a file that is missing, truncated, damaged or not ours. No code from a file
    runs.
    """
    if (path / MANIFEST).is_file():
        if to_resume:
            verify_training(path)
        return _load(path, device, dtype)
    places = step_folders(path)[::-1]
    if not places:
        hint = "nothing was saved there" if path.is_dir() else "there is no such folder"
        if (path / "ckpt.pt").exists():
            hint = "it has a nanoGPT file, ckpt.pt, not ours"
        raise ValueError(f"no checkpoint in {path}: {hint}")
    best = best_checkpoint(path)
    if which == "best":
        if best is None:
            raise ValueError(f"{path}: no checkpoint is marked as the best; use the last one")
        places = [best, *(place for place in places if place != best)]
    for place, older in zip(places, [*places[1:], None], strict=True):
        try:
            if to_resume:
                verify_training(place)
            return _load(place, device, dtype)
        except Damaged as error:
            if older is None:
                raise
            print(f"warning: {error}; taking {older.name} instead", file=sys.stderr)
    raise AssertionError("the last one returns or raises")


def _load(
    place: Path, device: torch.device | str, dtype: torch.dtype | Callable[[GPTConfig], torch.dtype]
) -> Checkpoint:
    _verify(place, FILES)
    info, tokenizer = _read_json(place / FILES[1]), _read_json(place / FILES[2])
    config = _model_config(place, info.pop("model", None))
    # the file's own table of contents must agree with the config before anything is allocated
    n_params = estimate_n_params(config)["total"]
    try:
        with safe_open(place / FILES[0], framework="pt", device=str(device)) as f:
            names = list(f.keys())
            found = sum(math.prod(f.get_slice(name).get_shape()) for name in names)
            if found != n_params:
                raise ValueError(
                    f"{place}: config.json describes {n_params:,} parameters, model.safetensors has {found:,}"
                )
            kinds = {f.get_slice(name).get_dtype() for name in names}
            if not kinds <= FLOATS or len(names) < 6 * config.n_layer:  # a layer has six at least
                raise ValueError(
                    f"{place / FILES[0]}: {len(names)} tensors of {', '.join(sorted(kinds))}, not the "
                    f"weights of {config.n_layer} layers in {', '.join(sorted(FLOATS))}"
                )
            dtype = dtype if isinstance(dtype, torch.dtype) else dtype(config)
            with torch.device("meta"):  # shapes only, since every value comes from the file
                model = GPT(config)
            state = clean_state_dict({name: f.get_tensor(name).to(dtype) for name in names})
    except SafetensorError as error:
        detail = " ".join(str(error).split())[:300]
        raise ValueError(f"{place / FILES[0]}: not a readable safetensors file ({detail})") from None
    if config.tie_weights:
        state["lm_head.weight"] = state.get("transformer.wte.weight", torch.empty(0))
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:300]
        raise ValueError(f"{place}: weights and config.json do not match: {detail}") from None
    if config.tie_weights:
        model.lm_head.weight = model.transformer["wte"].weight
    if config.position == "rope":
        model.rope_cos, model.rope_sin = (table.to(device) for table in rope_tables(config))
    return Checkpoint(place, model.eval(), tokenizer, info)


def _model_config(place: Path, stored: Any) -> GPTConfig:
    """The architecture as the file tells it; files from before a field existed mean GPT-2's way."""
    known = {f.name for f in fields(GPTConfig)}
    if not isinstance(stored, dict) or not stored.keys() <= known:
        extra = str(sorted(stored.keys() - known))[:300] if isinstance(stored, dict) else "no model"
        raise ValueError(f"{place / FILES[1]}: not a model that this version knows ({extra})")
    try:
        for name, kind in get_type_hints(GPTConfig).items():
            if name in stored:
                _check_type(name, stored[name], kind)
        if stored.get("vocab_size") is None:
            raise ValueError("vocab_size is missing")
        config = GPTConfig(**{"attention": "mha", "norm": "pre", **stored})
        if config.position == "rope" and config.block_size * config.head_dim > MAX_ROPE:
            raise ValueError(f"block_size={config.block_size}: too long for a table of rope positions")
        return config
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place / FILES[1]}: {str(error)[:300]}") from None


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Refuse what a dataclass would take unseen: 2.5 layers, "4" heads, or a width that no memory holds."""
    kinds = (str,) if get_origin(kind) is Literal else get_args(kind) or (kind,)
    if type(value) not in kinds and not (float in kinds and type(value) is int):
        expected = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
        found = type(value).__name__ if isinstance(value, dict | list) else json.dumps(value)[:40]
        raise ValueError(f"{name}={found}: must be {expected}")
    if int in kinds and value is not None and value > MAX_SIZE:
        raise ValueError(f"{name}={value}: more than {MAX_SIZE:,}, which no model of this program has")


def verify_training(place: Path) -> None:
    """`_verify` for the training state; ValueError where the checkpoint was made without one."""
    files = _read_json(place / MANIFEST).get("files")
    if isinstance(files, dict) and TRAINING not in files:
        raise ValueError(f"{place}: has no {TRAINING}, so it can be sampled from but not resumed")
    _verify(place, (TRAINING,))


def _verify(place: Path, names: tuple[str, ...]) -> None:
    """Size and SHA-256 of the named files against the manifest."""
    manifest = _read_json(place / MANIFEST)
    if manifest.get("format") != "headcount":
        raise Damaged(f"{place}: not a checkpoint of this project")
    version = manifest.get("version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"{place}: format version {reprlib.repr(version)}, "
            f"this program reads up to {FORMAT_VERSION}; update it"
        )
    files = manifest.get("files")
    for name in names:
        file, entry = place / name, files.get(name) if isinstance(files, dict) else None
        if not file.is_file():
            raise Damaged(f"{file}: missing, the checkpoint is incomplete")
        if entry != _fingerprint(file):
            raise Damaged(f"{file}: truncated or damaged, it does not match {MANIFEST}")


def _fingerprint(path: Path) -> dict[str, int | str]:
    with open(path, "rb") as f:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path}: not a JSON object")
    return value


def _flush(path: Path) -> None:
    """Push a file, or a folder's entries, to the disk itself (folders can't be opened on Windows)."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
