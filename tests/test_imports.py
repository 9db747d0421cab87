"""Who may import whom, read off the source, and that importing does nothing else."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

ROOMS = {"model", "checkpoint", "config", "data", "device", "generation", "optim", "quantize"}
ROOMS |= {"evaluation", "report", "tracking", "measure", "options", "comparison", "resume"}
DOORS = {"train", "sample", "compare", "heads", "convert", "tracking.dashboard"}
# what each may import of ours; a new file needs a line here, and a reason that a reader would accept
OURS = {
    "model": set(),
    "config": set(),
    "data": set(),
    "device": set(),
    "tracking": set(),
    "checkpoint": {"model"},
    "optim": {"model"},
    "options": {"config", "model"},
    "resume": {"checkpoint", "config", "model", "options"},
    "report": {"data", "model", "options"},
    "measure": {"device", "generation", "model"},
    "comparison": {"config", "model", "options", "report"},
    "generation": {"model", "data", "device"},
    "quantize": {"model"},
    "evaluation": {"checkpoint", "data", "device", "quantize"},
    "train": ROOMS,
    "sample": ROOMS,
    "compare": ROOMS | {"train", "sample"},
    "heads": ROOMS,
    "convert": ROOMS,
    "tracking.dashboard": {"tracking", "config"},
}
# what the rooms may import of others': at the top, and only where it is used
OTHERS = {
    "model": ({"torch"}, set()),
    "device": ({"torch"}, set()),
    "checkpoint": ({"torch", "safetensors"}, set()),
    "optim": ({"torch"}, set()),
    "options": (set(), set()),
    "resume": ({"torch", "safetensors"}, set()),
    "report": (set(), set()),
    "measure": ({"torch"}, set()),
    "comparison": (set(), {"matplotlib"}),
    "generation": ({"torch", "numpy"}, set()),
    "quantize": ({"torch"}, set()),
    "evaluation": ({"torch"}, set()),
    "tracking": (set(), {"wandb", "tqdm", "filelock"}),
    "tracking.dashboard": (set(), {"wandb", "wandb_workspaces"}),
    "config": (set(), {"tyro"}),
    "data": ({"numpy"}, {"torch", "tiktoken", "datasets", "rustbpe", "tqdm", "huggingface_hub", "requests"}),
}
HEAVY = {"wandb", "wandb_workspaces", "datasets", "tiktoken", "transformers", "rustbpe", "tyro"}
HEAVY |= {"matplotlib", "plotly"}


def python_files() -> list[Path]:
    """The scripts and modules at the top, and those in the packages."""
    folders = ("", "config", "data", "tracking", "comparison")
    return sorted(path for folder in folders for path in (ROOT / folder).glob("*.py"))


def unit(path: Path) -> str:
    """The name that a file is imported by: train for train.py, data for all of data/; a door has its own."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return door if (door := ".".join(parts[:2])) in DOORS else parts[0]


def units(module: str, names: list[str]) -> set[str]:
    """What `from module import names` imports: its package, and a door in there by the door's own name."""
    return (DOORS & {module, *(f"{module}.{name}" for name in names)}) | {module.split(".")[0]}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """The packages that a file imports at its top, and those that it imports inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):  # `if TYPE_CHECKING:` never runs
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            inside |= {id(child) for child in ast.walk(node)}
    top, lazy = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = set().union(*(units(alias.name, []) for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[0] if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            found = units(module, [alias.name for alias in node.names])
        else:
            continue
        (lazy if id(node) in inside else top).update(found)
    return top, lazy


by_file = pytest.mark.parametrize("path", python_files(), ids=lambda path: path.relative_to(ROOT).as_posix())


@by_file
def test_arrows_run_one_way(path):
    name, found = unit(path), set().union(*imports(path))
    assert name in OURS, f"{path.name}: a new file needs a line in OURS, and a reason"
    ours = (found & set(OURS)) - {name}
    assert ours <= OURS[name], f"{path.name} may not import {ours - OURS[name]}"
    if name in ROOMS:
        assert not found & DOORS
    assert "tests" not in found and "benchmarks" not in found


@by_file
def test_rooms_import_what_they_are_allowed_and_heavy_things_late(path):
    top, lazy = (found - set(sys.stdlib_module_names) - set(OURS) for found in imports(path))
    assert not top & HEAVY
    if unit(path) in OTHERS:
        at_top, late = OTHERS[unit(path)]
        assert top <= at_top and lazy <= at_top | late


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/[!_]*.py")), ids=lambda path: path.name)
def test_presets_import_nothing_and_call_nothing(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert imports(path) == (set(), set())
    assert not [
        node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.FunctionDef | ast.ClassDef)
    ]


WATCHER = """
import os, sys
def watch(event, args):
    wrote = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if wrote and args[0] != os.devnull or event in {"os.mkdir", "os.rename", "os.remove", "socket.connect",
                                                    "subprocess.Popen", "os.system", "os.fork"}:
        sys.stderr.write(f"{event} {args}" + chr(10))
LIBRARIES
sys.addaudithook(watch)
import MODULES
print(sorted(HEAVY & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "modules",
    [
        "config",
        "tracking",
        "tracking.dashboard",
        "data",
        "data.tokenizer",
        "data.loader",
        "data.sources",
        "data.prepare",
        "model, device, checkpoint, optim, report",
        "train, sample",
    ],
)
def test_importing_has_no_effects_and_is_cheap_DAT_4(modules, tmp_path):
    # PyTorch looks for a folder that it may write to when it is imported; that is not ours to judge
    libraries = "import torch" if (ROOT / f"{modules.split(', ')[-1]}.py").exists() else ""
    code = WATCHER.replace("LIBRARIES", libraries).replace("MODULES", modules).replace("HEAVY", repr(HEAVY))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path",
    [path for path in python_files() if unit(path) in DOORS],
    ids=lambda path: path.name,
)
def test_doors_have_a_main_and_run_only_when_called(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    loose = [
        node
        for node in tree.body
        if isinstance(node, ast.For | ast.While | ast.With | ast.Try)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    ]
    assert not loose and ast.unparse(tree.body[-1]).startswith("if __name__ == '__main__':")
