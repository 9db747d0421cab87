"""Checkpoints: what is saved comes back to the bit, a kill loses nothing, and no file can do harm."""

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SHAPES_QK, shape_id, tiny_config, tiny_model, tokens
from safetensors.torch import load_file, save_file

import checkpoint as module
from checkpoint import clean_state_dict, list_checkpoints, load_checkpoint, newest_run, save_checkpoint
from model import GPT

TOKENIZER = {"kind": "char", "chars": ["a", "é", "\n", "🙂"]}
FILES = ("model.safetensors", "config.json", "tokenizer.json", "manifest.json")


def save(out_dir: Path, step: int = 1, model: torch.nn.Module | None = None, **options) -> Path:
    model = tiny_model(n_layer=1) if model is None else model
    return save_checkpoint(out_dir, step, model, TOKENIZER, {"val_loss": 1.5}, **options)


def names(folder: Path) -> list[str]:
    """What is in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


def sign(place: Path) -> None:
    """Make the manifest agree with the files again, as someone would who changes one on purpose."""
    manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
    for name in manifest["files"]:
        data = (place / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (place / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def change_config(place: Path, **changes) -> None:
    """Set fields of the stored model config (... removes one), with a manifest that agrees."""
    path = place / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored["model"].update(changes)
    stored["model"] = {name: value for name, value in stored["model"].items() if value is not ...}
    path.write_text(json.dumps(stored), encoding="utf-8")
    sign(place)


def refused(path: Path, *words: str) -> str:
    """The one line with which loading `path` is refused."""
    with pytest.raises(ValueError) as error:
        load_checkpoint(path)
    message = str(error.value)
    assert message and "\n" not in message and all(word in message for word in words), message
    return message


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- there and back


@pytest.mark.parametrize("tie_weights", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SHAPES_QK, ids=shape_id)
def test_round_trip_to_the_bit(shape, tie_weights, tmp_path):
    model = tiny_model(**shape, tie_weights=tie_weights, dropout=0.1)
    place = save(tmp_path, 7, model)
    assert place == tmp_path / "checkpoints" / "step-000007" and names(place) == sorted(FILES)
    stored = load_file(place / "model.safetensors")
    assert ("lm_head.weight" in stored) != tie_weights  # ATT-14: one copy in the checkpoint
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())
    for path in (tmp_path, place):  # a run's folder, or one checkpoint
        loaded = load_checkpoint(path)
        assert loaded.path == place and loaded.tokenizer == TOKENIZER
        assert loaded.info == {"step": 7, "val_loss": 1.5}
        assert loaded.model.config == model.config and not loaded.model.training
        assert same_weights(loaded.model, model)
        assert (loaded.model.lm_head.weight is loaded.model.transformer["wte"].weight) == tie_weights
        assert torch.equal(loaded.model(tokens(2, 20))[0], model(tokens(2, 20))[0])


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_weights_in_another_format_PLT_5(position, tmp_path):
    model = tiny_model(position=position, attention="gqa")
    save(tmp_path, 1, model)
    half = load_checkpoint(tmp_path, dtype=torch.bfloat16).model
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())
    got, expected = half(tokens(2, 20))[0], model(tokens(2, 20))[0]
    assert got.dtype == torch.bfloat16 and (got.float() - expected).norm() / expected.norm() < 0.1
    save(tmp_path / "half", 1, half)
    assert same_weights(load_checkpoint(tmp_path / "half", dtype=torch.bfloat16).model, half)


def test_a_loaded_model_trains_on(tmp_path):
    model = tiny_model()
    save(tmp_path, 1, model)
    loaded = load_checkpoint(tmp_path).model.train()
    loaded(tokens(2, 9), tokens(2, 9, seed=1))[1].backward()
    assert all(p.requires_grad and p.grad is not None for p in loaded.parameters())
    with torch.no_grad():
        for p in loaded.parameters():
            p.zero_()
    assert same_weights(load_checkpoint(tmp_path).model, model)  # and the file stays as it is


def test_saving_leaves_the_model_and_the_random_numbers_alone(tmp_path):
    model = tiny_model().train()
    before, state = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    save(tmp_path, 1, model)
    assert model.training and all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


class Wrapped(torch.nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ddp": Wrapped,
    "ddp of compiled": lambda model: Wrapped(torch.compile(model, backend="eager")),
    "compiled ddp": lambda model: torch.compile(Wrapped(model), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_are_saved_under_clean_names_CKP_2(wrapper, tmp_path):
    model = tiny_model()
    wrapped = WRAPPERS[wrapper](model)
    assert wrapped.state_dict().keys() != model.state_dict().keys()
    place = save(tmp_path, 1, wrapped)
    assert load_file(place / "model.safetensors").keys() == model.state_dict().keys() - {"lm_head.weight"}
    loaded = load_checkpoint(tmp_path).model
    assert same_weights(loaded, model)
    WRAPPERS[wrapper](tiny_model(1)).load_state_dict(wrapped.state_dict())  # and the reverse


def test_a_submodule_compiled_by_itself_is_saved_clean_CKP_2(tmp_path):
    model = tiny_model()
    expected = clean_state_dict(model.state_dict())
    model.transformer["h"][0] = torch.compile(model.transformer["h"][0], backend="eager")
    save(tmp_path, 1, model)
    loaded = load_checkpoint(tmp_path).model.state_dict()
    assert all(torch.equal(loaded[name], t) for name, t in expected.items())


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_files_with_prefixed_names_still_load_CKP_2(prefix, tmp_path):
    model = tiny_model(norm="pre")
    place = save(tmp_path, 1, model)
    weights = load_file(place / "model.safetensors")
    save_file({prefix + name: t for name, t in weights.items()}, place / "model.safetensors")
    sign(place)
    assert same_weights(load_checkpoint(place).model, model)


def test_old_files_mean_mha_and_pre_norm_CKP_4(tmp_path):
    model = tiny_model(norm="pre")
    place = save(tmp_path, 1, model)
    change_config(place, attention=..., n_kv_head=..., norm=..., position=..., qk_norm=...)
    loaded = load_checkpoint(place).model
    assert (loaded.config.attention, loaded.config.n_kv_head, loaded.config.norm) == ("mha", 4, "pre")
    assert loaded.config == model.config and torch.equal(loaded(tokens(1, 9))[0], model(tokens(1, 9))[0])


def test_the_architecture_comes_from_the_file_CKP_4(tmp_path):
    shape = {
        "n_layer": 3,
        "n_head": 8,
        "n_embd": 48,
        "block_size": 20,
        "attention": "gqa",
        "n_kv_head": 2,
        "norm": "pre",
        "qk_norm": True,
        "bias": False,
        "vocab_size": 77,
    }
    save(tmp_path, 1, tiny_model(**shape))
    assert load_checkpoint(tmp_path).model.config == tiny_config(**shape)


# --- a save that fails


STEPS_OF_A_SAVE = [
    ("save_file", 0),
    *(("_write_json", n) for n in range(3)),
    *(("_fingerprint", n) for n in (0, 2)),
    *(("_flush", n) for n in range(5)),
    ("os.replace", 0),
]


@pytest.mark.parametrize(("name", "nth"), STEPS_OF_A_SAVE)
@pytest.mark.parametrize(
    "stop",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
    ids=["full disk", "ctrl-c"],
)
def test_a_save_that_fails_leaves_the_last_one_CKP_6(name, nth, stop, tmp_path, monkeypatch):
    first = tiny_model(1)
    save(tmp_path, 1, first)
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) > nth:
            for path in args:  # half a file is there
                if isinstance(path, Path) and path.is_file():
                    os.truncate(path, path.stat().st_size // 2)
            raise stop
        return original(*args, **kwargs)

    owner, attribute = (os, "replace") if name == "os.replace" else (module, name)
    original = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, fail)
    with pytest.raises(type(stop)):
        save(tmp_path, 2, tiny_model(2))
    monkeypatch.undo()
    assert len(calls) == nth + 1
    whole = (name, nth) == ("_flush", 4)  # the folder itself, when the checkpoint is in its place already
    left = ["step-000001", "step-000002"] if whole else ["step-000001"]
    assert names(tmp_path / "checkpoints") == left  # no litter
    assert same_weights(load_checkpoint(tmp_path).model, tiny_model(2) if whole else first)
    assert load_checkpoint(save(tmp_path, 2, tiny_model(2))).info["step"] == 2  # and the next save works


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from model import GPT, GPTConfig

torch.set_num_threads(1)  # threads do not survive a fork
out_dir, draw = Path(sys.argv[1]), random.Random(0)
model = GPT(GPTConfig(vocab_size=61, block_size=32, n_layer=2, n_head=4, n_embd=32)).requires_grad_(False)

def save_for_ever(step):
    while True:
        for p in model.parameters():
            p.fill_(step)
        save_checkpoint(out_dir, step, model, {"step": step}, {})
        step += 1

step = litter = kills = 0
while kills < 12 or kills < 200 and (step < 6 or litter == 0):
    kills += 1
    child = os.fork()
    if child == 0:
        save_for_ever(step + 1)
    time.sleep(draw.uniform(0.01, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    litter += sum(name.startswith(".") for name in os.listdir(out_dir / "checkpoints"))
    if list_checkpoints(out_dir):
        loaded = load_checkpoint(out_dir)
        assert loaded.info["step"] >= step, "a checkpoint was lost"
        step = loaded.info["step"]
        assert loaded.tokenizer == {"step": step}
        assert all(bool((p == step).all()) for p in loaded.model.parameters())
save_checkpoint(out_dir, step + 1, model, {}, {})
names = sorted(os.listdir(out_dir / "checkpoints"))
assert len(names) == 2 and not [name for name in names if name.startswith(".")], names
print(step, litter)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_while_saving_again_and_again_CKP_6(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=env, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    steps, litter = map(int, done.stdout.split())
    assert steps > 5 and litter > 0  # some were killed in the middle of a save


def test_litter_of_a_killed_save_is_cleared_and_never_loaded_CKP_6(tmp_path):
    place = save(tmp_path, 1)
    shutil.copytree(place, place.parent / ".step-000002.99999")
    assert list_checkpoints(tmp_path) == [place] and load_checkpoint(tmp_path).path == place
    assert newest_run(tmp_path.parent) == tmp_path
    save(tmp_path, 3)
    assert names(place.parent) == ["step-000001", "step-000003"]


def test_rotation_deletes_only_its_own_CKP_8(tmp_path):
    model, root = tiny_model(n_layer=1), tmp_path / "checkpoints"
    save(tmp_path, 1, model)
    theirs = ["step-000001-best", "step-final", "step-", "notes", "step-000002x"]  # put aside by a person
    for name in theirs:
        shutil.copytree(root / "step-000001", root / name)
    (root / "step-000000.txt").write_text("mine", encoding="utf-8")
    (root / "step-000000").mkdir()  # not a checkpoint
    for step in (2, 3, 4, 1_000_000, 999_999):
        save(tmp_path, step, model)
    left = {"step-000000", "step-000000.txt", *theirs}
    assert set(names(root)) == left | {"step-999999", "step-1000000"}
    assert load_checkpoint(tmp_path).info["step"] == 1_000_000
    for step in (1_000_001, 1_000_002, 1_000_003):
        save(tmp_path, step, model, keep=3)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-100000{n}" for n in (1, 2, 3)]
    assert left < set(names(root))


def test_a_kill_while_an_old_one_is_deleted_leaves_no_wreck_CKP_6(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)

    def die_half_way(path, ignore_errors=False):
        for file in list(path.glob("m*")) if path.exists() else ():
            file.unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 3)
    monkeypatch.undo()
    visible = [path.name for path in (tmp_path / "checkpoints").glob("[!.]*")]
    assert sorted(visible) == ["step-000002", "step-000003"]
    save(tmp_path, 4)
    assert names(tmp_path / "checkpoints") == ["step-000003", "step-000004"]


def test_newest_run(tmp_path):
    with pytest.raises(ValueError, match=r"no run to sample from in .*train\.py config/small\.py"):
        newest_run(tmp_path / "nowhere")
    model = tiny_model(n_layer=1)
    for n, name in enumerate(("a", "sweep/b", "c")):
        place = save(tmp_path / name, 1, model)
        os.utime(place / "manifest.json", (1000, 1000 + (n == 1)))
    (tmp_path / "d" / "checkpoints").mkdir(parents=True)  # a run that has saved nothing yet
    assert newest_run(tmp_path) == tmp_path / "sweep" / "b"


# --- files that are not what they should be


class Payload:
    """Unpickling this would create a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_no_pickle_is_read_CKP_9(name, signed, tmp_path):
    place, trap = save(tmp_path), tmp_path / "trap"
    torch.save({"model": {"weight": torch.zeros(2), "evil": Payload(trap)}}, place / name)
    if signed and name != "manifest.json":
        sign(place)
    refused(place, name)
    assert not trap.exists()
    torch.load(shutil.copy(place / name, tmp_path / "copy.pt"), weights_only=False)
    assert trap.exists()  # it would have gone off


def test_nothing_in_a_checkpoint_is_a_program_CKP_9(tmp_path):
    place = save(tmp_path)
    for name in FILES[1:]:
        assert isinstance(json.loads((place / name).read_text(encoding="utf-8")), dict)
    assert all(isinstance(t, torch.Tensor) for t in load_file(place / "model.safetensors").values())
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert not [
        words
        for words in ("pickle", "torch.load", "torch.save", "eval(", "exec(")
        if words in source.replace(".eval()", "")
    ]


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_truncated_and_missing_files_are_refused(name, signed, tmp_path):
    place = save(tmp_path)
    whole = (place / name).read_bytes()
    for n in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1):
        (place / name).write_bytes(whole[:n])
        if signed and name != "manifest.json":
            sign(place)
        refused(place, name)
    (place / name).unlink()
    refused(place, *([name] if name != "manifest.json" else []))


def test_any_flipped_bit_is_noticed(tmp_path):
    place, draw = save(tmp_path, 1, tiny_model(n_layer=1, n_embd=8, n_head=2)), random.Random(0)
    for name in FILES:
        whole = (place / name).read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            (place / name).write_bytes(damaged)
            refused(place, str(place))
        (place / name).write_bytes(whole)
    load_checkpoint(place)


def test_flipped_bits_behind_a_valid_manifest_are_refused_or_harmless(tmp_path):
    # someone who signs the files anew can change weights and numbers, but not crash the program
    place, draw = save(tmp_path, 1, tiny_model(n_layer=1, n_embd=8, n_head=2)), random.Random(1)
    for name in FILES[:3]:
        whole, refusals = (place / name).read_bytes(), 0
        for _ in range(40):
            damaged = bytearray(whole)
            damaged[draw.randrange(min(len(whole), 1500))] ^= 1 << draw.randrange(8)
            (place / name).write_bytes(damaged)
            sign(place)
            try:
                assert isinstance(load_checkpoint(place).model, GPT)
            except ValueError as error:
                assert "\n" not in str(error)
                refusals += 1
        assert refusals > 4
        (place / name).write_bytes(whole)


def test_foreign_folders_are_refused(tmp_path):
    empty, file, nanogpt = tmp_path / "empty", tmp_path / "file", tmp_path / "nanogpt"
    empty.mkdir()
    file.write_text("not a folder", encoding="utf-8")
    nanogpt.mkdir()
    torch.save({"model": {}}, nanogpt / "ckpt.pt")
    refused(tmp_path / "missing", "missing", "no such folder")
    refused(empty, "empty", "nothing was saved there")
    refused(file, "file", "no such folder")
    refused(nanogpt, "ckpt.pt", "nanoGPT")
    (empty / "manifest.json").write_text('{"name": "web app"}', encoding="utf-8")
    refused(empty, "not a checkpoint of this project")


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "{",
        "[]",
        "null",
        "1e999",
        '"headcount"',
        "[" * 100_000,
        "{}",
        '{"format": ["headcount"]}',
        '{"format": "headcount", "version": 1}',
        '{"format": "headcount", "version": 1, "files": []}',
        '{"format": "headcount", "version": 1, "files": {"model.safetensors": 3}}',
        '{"format": "headcount", "version": 1, "files": {"model.safetensors": {"bytes": {}, "sha256": []}}}',
        '{"format": "headcount", "version": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: text[:50],
)
def test_manifests_of_any_form_are_refused(manifest, tmp_path):
    place = save(tmp_path)
    (place / "manifest.json").write_text(manifest, encoding="utf-8")
    refused(place, str(place))


@pytest.mark.parametrize("version", [3, 99, 0, None, "1", 1.5, [1], True])
def test_another_format_version_is_refused_politely(version, tmp_path):
    place = save(tmp_path)
    manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
    (place / "manifest.json").write_text(json.dumps({**manifest, "version": version}), encoding="utf-8")
    refused(place, "version", repr(version), "reads up to 2")


INTEGERS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head")
WRONG = [
    *(
        (name, value)
        for name in INTEGERS
        for value in (2.5, 2.0, "4", True, [4], {"a": {"b": 4}}, -1, 0, 10**30)
    ),
    *((name, None) for name in INTEGERS if name != "n_kv_head"),
    *((name, value) for name in ("bias", "tie_weights", "qk_norm") for value in (1, "true", None, [True])),
    *(("dropout", value) for value in (True, "0.1", None, float("nan"), float("inf"), -1, 1, [0.1])),
    *((name, value) for name in ("attention", "norm", "position") for value in (1, None, "x", ["mha"], True)),
    ("windows", 4),
    ("__class__", "os.system"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_wrong_values_in_config_json_are_refused(name, value, tmp_path_factory):
    place = save(tmp_path_factory.getbasetemp() / "wrong", 1)
    original = (place / "config.json").read_bytes()
    change_config(place, **{name: value})
    try:
        refused(place, "config.json", name)
    finally:
        (place / "config.json").write_bytes(original)
        sign(place)


@pytest.mark.parametrize("model", [None, 4, "gpt2", [], {}, ...], ids=str)
def test_config_without_a_model_is_refused(model, tmp_path):
    place = save(tmp_path)
    stored = {"step": 1, **({} if model is ... else {"model": model})}
    (place / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    sign(place)
    refused(place, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_embd": 10**9},
        {"n_embd": 2**20},
        {"n_layer": 10**9},
        {"n_layer": 2**20},
        {"vocab_size": 10**12},
        {"vocab_size": 2**20},
        {"block_size": 10**12},
        {"block_size": 2**20},
        {"n_head": 10**12, "n_embd": 10**12},
        {"n_head": 10**12, "n_embd": 10**12, "attention": "gqa", "n_kv_head": 7},
        {"position": "rope", "block_size": 10**12},
        {"n_head": 2**19, "n_embd": 2**20, "attention": "gqa", "n_kv_head": 3},
    ],
    ids=str,
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(changes, tmp_path, monkeypatch):
    place = save(tmp_path)
    change_config(place, **changes)
    monkeypatch.setattr(module, "GPT", None)  # not even the shapes are made
    refused(place, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": 2},
        {"norm": "pre"},
        {"tie_weights": False},
        {"attention": "mqa", "n_kv_head": 1},
        {"bias": False},
        {"vocab_size": 62},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_the_weights_is_refused(changes, tmp_path):
    place = save(tmp_path)
    change_config(place, **changes)
    refused(place, "parameters")


def test_weights_of_the_right_number_in_the_wrong_shapes_are_refused(tmp_path):
    place = save(tmp_path)
    weights = load_file(place / "model.safetensors")
    path = place / "model.safetensors"
    for changed in (
        {**weights, "transformer.wte.weight": weights["transformer.wte.weight"].T.contiguous()},
        {("other" if name == "transformer.wte.weight" else name): t for name, t in weights.items()},
    ):
        save_file(changed, path)
        sign(place)
        refused(place, "transformer.wte.weight")
