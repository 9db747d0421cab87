"""Damaged files of each of our formats: each is refused in one line, or what is read is still right.

    found = run(10_000, seed=0)  # {"files", "seconds", "formats": {name: {"refused", "read"}}, "failures"}

A case is drawn from (seed, format, number) alone: `replay` does one again. It fails on an exception that is
not a ValueError or OSError of one line, on wrong data, where a file ran as a program, and where reading takes
more than SECONDS or MEMORY. The files are tiny, and everything happens in this process.

Where a format has checksums it is tried twice: as an accident would damage it, and "signed", with the sums
made right again, as someone does who means harm. A signed file may say something else, but do nothing else.
"""

import contextlib
import csv
import gc
import hashlib
import io
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from checkpoint import load_checkpoint, save_checkpoint
from config import flatten, parse
from data.loader import MAGIC, batch_starts, check_fits, eval_batches, get_batch, open_tokens, pack_header
from data.prepare import prepare
from data.sources import load_corpus
from data.tokenizer import Tokenizer, bpe_tokenizer, char_tokenizer
from evaluation import evaluate_run
from model import GPT, GPTConfig
from optim import make_optimizers
from options import TrainConfig
from resume import Progress, read_progress, resume_training, stored_options

SECONDS = 10.0  # of the processor's time: longest that reading one tiny file may take, on a busy machine too
MEMORY = 128 * 2**20  # most bytes it may use on top of what the process has
LIMIT = 4 * 2**30  # address space on top: what asks for more gets a MemoryError, and the machine survives
TRAP = "trap"  # a file that exists once something in a file has run
TEXT = "the cat sat on the mat.\nA dog, too: é—💡\r\n" * 12
BLOCK = 8  # context length of the tiny model

Damage = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Format:
    """One kind of files, and what reading them means. All paths are relative to the working directory."""

    make: Callable[[], None]  # writes valid files into the working directory
    files: tuple[str, ...]  # those that are damaged
    read: Callable[[], Any]  # loads them as the program does
    damages: tuple[Damage, ...]  # this format's own, beside those of any file
    sign: Callable[[], None] | None = None  # makes the checksums right again
    right: Callable[[Any, Any], bool] = lambda got, saved: got == saved  # (what was read, what was saved)


class Slow(BaseException):
    """Reading took too long. No Exception, so that nothing on the way takes it for an error of its own."""


# --- damage to any file


class Payload:
    """Unpickling this leaves a file behind."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(TRAP),)


def _torch_file() -> bytes:
    file = io.BytesIO()
    torch.save({"model": torch.zeros(2), "evil": Payload()}, file)
    return file.getvalue()


FOREIGN = (
    pickle.dumps(Payload()),
    pickle.dumps(Payload(), protocol=0),
    _torch_file(),
    b"",
    b"\0" * 100,
    b"\xff" * 100,
    b"\x89PNG\r\n\x1a\n" + bytes(50),
    b"PK\x03\x04" + bytes(60),
    b"GGUF\x03\0\0\0" + bytes(60),
    b"\x93NUMPY\x01\0v\0{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n" + bytes(40),
    b"<!DOCTYPE html>\n<html>404</html>\n",
    b'{"name": "web app", "version": "1.0.0"}',
    b"import os\nos.system('touch trap')\n",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    "{}".encode("utf-16"),
    bytes(range(256)) * 4,
)


def flip_bits(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8) if data else 0):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.choice((0, 1, len(data) - 1, draw.randint(0, len(data))))]


def append(draw: random.Random, data: bytes) -> bytes:
    return data + draw.choice((b"\0", b"\n", b"}", b"x", data, draw.randbytes(draw.randint(1, 300))))


def swap_blocks(draw: random.Random, data: bytes) -> bytes:
    a, b, c, d = sorted(draw.randint(0, len(data)) for _ in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def overwrite(draw: random.Random, data: bytes) -> bytes:
    """A range of zeros, ones, noise, or of what stands elsewhere in the file."""
    start, length = draw.randint(0, len(data)), draw.randint(1, 64)
    length = min(length, len(data) - start)
    other = draw.randint(0, len(data) - length)
    new = (bytes(length), b"\xff" * length, draw.randbytes(length), data[other : other + length])
    return data[:start] + draw.choice(new) + data[start + length :]


def drop_range(draw: random.Random, data: bytes) -> bytes:
    start = draw.randint(0, len(data))
    return data[:start] + data[start + draw.randint(1, 64) :]


def repeat_range(draw: random.Random, data: bytes) -> bytes:
    start = draw.randint(0, len(data))
    piece = data[start : start + draw.randint(1, 64)]
    return data[:start] + piece * draw.randint(2, 50) + data[start + len(piece) :]


def foreign(draw: random.Random, data: bytes) -> bytes:
    del data
    return draw.choice(FOREIGN)


ANY = (flip_bits, flip_bits, truncate, append, swap_blocks, overwrite, drop_range, repeat_range, foreign)


def damage_folder(draw: random.Random, name: str, files: tuple[str, ...]) -> str:
    """What happens to names rather than bytes: lost, a folder, a link, or another file's content."""
    path, kind = Path(name), draw.choice(("missing", "folder", "link outside", "link to itself", "swapped"))
    if kind == "swapped" and len(files) > 1:
        other = Path(draw.choice([n for n in files if n != name]))
        a, b = path.read_bytes(), other.read_bytes()
        path.write_bytes(b)
        other.write_bytes(a)
        return f"swapped with {other}"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind.startswith("link"):
        path.symlink_to("/etc/passwd" if kind == "link outside" else path.name)
    return kind


# --- damage that knows JSON


def _nested(n: int) -> tuple[str, str]:
    return "[" * n + "]" * n, '{"a":' * n + "1" + "}" * n


HOSTILE = (
    "null", "true", "false", "0", "1", "-1", "2", "2.5", "-0.0", "1e3", "1e-320", "1e999", "-1e999", "NaN",
    "Infinity", "-Infinity", str(2**20), str(2**20 + 1), str(2**31), str(2**63), str(-(2**63)), str(2**64),
    "9" * 30, "9" * 400, "9" * 4400, '""', '"x"', '"a\\nb"', '"\\ud800"', '"\\u0000"', '"\\u2028"', "[]",
    "{}", '"' + "A" * 20_000 + '"', "[" + "0," * 5000 + "0]", '"../../../../../../etc/passwd"',
    '"/etc/passwd"', '"~nosuchuser/x"', '"."', '"trap/../.."', '"char"', '"bpe"', '"gpt2"', '"mha"',
    '"gqa"', '"mqa"', '"rope"', '"pre"', "\"__import__('os').system('touch trap')\"", '"F4"', '"I64"',
    '"C64"', '"uint32"', "[0, 4]", "[0, 0]", "[-1, -1]", "[4611686018427387904, 4]", "[1, 2, 3, 4, 5]",
    '"(?:(?=a)a*)*c"', '"(a*)*\\\\1"', '"x"', *_nested(50), *_nested(400), *_nested(900), *_nested(990),
    *_nested(100_000),
)  # fmt: skip
HERE = "<<here>>"  # stands in a JSON value where text that is no JSON value goes


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each container member."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*at, key)
        yield from _places(value[key], (*at, key))


def change_json(draw: random.Random, value: Any) -> str:
    """JSON text of a value with one thing changed."""
    value = json.loads(json.dumps(value))
    places = list(_places(value))
    nested = _nested(draw.randint(300, 1000))
    raw = draw.choice((*HOSTILE, *nested)) if draw.random() < 0.97 else json.dumps(str(draw.random()))
    if not places or draw.random() < 0.02:
        return raw
    depth = draw.randint(1, max(map(len, places)))  # else most would fall on the longest list
    *above, key = draw.choice([place for place in places if len(place) <= depth])
    parent = value
    for step in above:
        parent = parent[step]
    action = draw.choice(("replace", "replace", "replace", "delete", "twice", "rename", "add", "exchange"))
    if action == "delete":
        del parent[key]
    elif action == "exchange":
        other = draw.choice(list(parent)) if isinstance(parent, dict) else draw.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif action == "rename" and isinstance(parent, dict):
        name = draw.choice(("", "a\nb", key + "x", key.upper(), "__class__", "../" + key, "\ud800", "é"))
        parent[name] = parent.pop(key)
    elif action == "add" and isinstance(parent, dict):
        parent[draw.choice(("x", "a\nb", "__init__", "module." + key))] = HERE
    elif action == "twice" and isinstance(parent, dict):
        twin = f"{{{json.dumps(key)}: {raw}, " + json.dumps(parent)[1:]
        if draw.random() < 0.5:
            twin = json.dumps(parent)[:-1] + f", {json.dumps(key)}: {raw}}}"
        if not above:
            return twin
        raw, parent = twin, value
        for step in above[:-1]:
            parent = parent[step]
        parent[above[-1]] = HERE
    else:
        parent[key] = HERE
    return json.dumps(value, ensure_ascii=draw.random() < 0.5).replace(json.dumps(HERE), raw)


def damage_json(draw: random.Random, data: bytes) -> bytes:
    """Another value somewhere in a JSON file, or the same value written in another way."""
    text = change_json(draw, json.loads(data)) if draw.random() < 0.9 else data.decode("utf-8")
    raw = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.9:
        return raw
    ways = (
        b"\xef\xbb\xbf" + raw, text.encode("utf-16", "surrogatepass"), b"[" + raw + b"]", raw + b"," + raw,
        raw.replace(b"}", b",}"), raw.replace(b'"', b"'"), b"// x\n" + raw, raw.replace(b" ", b"\n\t "),
    )  # fmt: skip
    return draw.choice(ways)


def damage_safetensors(draw: random.Random, data: bytes) -> bytes:
    """The length of the header, something in it, or all tensors in another number format."""
    size = int.from_bytes(data[:8], "little")
    header, tail = json.loads(data[8 : 8 + size]), data[8 + size :]
    action = draw.choice(("length", "header", "header", "header", "format", "metadata"))
    if action == "length":
        wrong = (0, 1, size - 1, size + 1, size + 8, len(data), 2**31, 2**40, 2**63, 2**64 - 1, 100_000_000)
        return draw.choice(wrong).to_bytes(8, "little") + data[8:]
    if action == "format":
        kinds = {
            "F64": 64, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "U16": 16, "I8": 8, "BOOL": 8,
            "F8_E4M3": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F4": 4, "C64": 64, "F32": 32, "f32": 32, "": 32,
            "X\nY": 32,
        }  # fmt: skip
        kind, start = draw.choice(list(kinds)), 0
        for name, entry in header.items():
            if name != "__metadata__":
                end = start + math.prod(entry["shape"]) * kinds[kind] // 8
                entry.update(dtype=kind, data_offsets=[start, end])
                start = end
        text, tail = json.dumps(header), bytes(start)
    elif action == "metadata" and "__metadata__" in header:  # JSON in a text in JSON
        about = header["__metadata__"]
        for key in about:
            about[key] = change_json(draw, json.loads(about[key]))
        text = json.dumps(header)
    else:
        text = change_json(draw, header)
    raw = text.encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + tail


def damage_token_file(draw: random.Random, data: bytes) -> bytes:
    """The length of the header, something in it, or the ids behind it."""
    start = len(MAGIC) + 4
    size = int.from_bytes(data[len(MAGIC) : start], "little")
    if draw.random() < 0.2:
        wrong = draw.choice((0, 1, size - 1, size + 1, size + 64, size - 64, len(data), 2**31, 2**32 - 1))
        return MAGIC + wrong.to_bytes(4, "little") + data[start:]
    tail = data[start + size :]
    if draw.random() < 0.3:
        return data[: start + size] + draw.choice(ANY[:-1])(draw, tail)
    raw = change_json(draw, json.loads(data[start : start + size])).encode("utf-8", "surrogatepass")
    raw += b" " * (-(start + len(raw)) % 64)
    return MAGIC + len(raw).to_bytes(4, "little") + raw + tail


# --- damage that knows presets


LINES = (
    "n_layer = 9**9**9", "n_layer = 10**400", "n_layer = 2**64", "n_layer = 2**62 * 2", "n_layer = -1",
    "n_layer = 1e999", "n_layer = 1e999 - 1e999", "n_layer = 7 / 0", "n_layer = 0 ** -1",
    "n_layer = (-8) ** 0.5", "n_layer = 1.5", "n_layer = '4'", "n_layer = True", "n_layer = None",
    "n_layer = ...", "n_layer = 1j", "n_layer = b'4'", "n_layer = 'a' * 10**9", "n_layer = 'a' % 3",
    "n_layer = [4]", "n_layer = 4,", "n_layer = 4 if 1 else 5", "n_layer = n_head",
    "n_layer = (n_layer := 4)", "n_layer = open('trap', 'w')",
    "n_layer = __import__('os').system('touch trap')", "__import__('os').system('touch trap')", "import os",
    "from os import *", "exec('open(\"trap\", \"w\")')", "n_layer = f'{open(\"trap\", \"w\")}'",
    "n_layer = lambda: 0", "n_layer: int = 4", "a = b = 3", "a, b = 1, 2", "n_layer += 1", "del n_layer",
    "pass", "n_layer = 2; n_head = 1", "n_layer \\\n = 3", "if 1:\n    n_layer = 2",
    "@open('trap', 'w')\ndef f(): 0", "class n_layer: x = open('trap', 'w')", "'text'", "n_layer.x = 3",
    "n_layer[0] = 3", "*a, = 1, 2", "base = '../../../../../../etc/passwd'", "base = '/etc/passwd'",
    "base = 'p.py'", "base = '.'", "base = 'base.py\\0'", "base = 'x' * 9", "base = ''", "base = 3",
    "base = '" + "a" * 5000 + "'", "_a = 0x" + "f" * 20_000, "_a = 9**20\nn_layer = _a % 7",
    "_a = 2.0 ** 1023\nlearning_rate = _a * 4", "n_layer = " + "9" * 5000,
    "n_layer = " + "(" * 150 + "1" + ")" * 150, "n_layer = " + "(" * 5000, "n_layer = " + "-" * 3000 + "1",
    "n_layer = 1" + " + 1" * 3000, "n_layer = 1" + " + 1" * 100_000, "n_layer = " + "2 ** " * 500 + "1",
    "x\0y = 1", "\ufeffn_layer = 1", "\uff4e_layer = 4", "n_layer = 1_0", "n_layer = 0x10",
    "n_layer = 1if 1else 2", "n_layer = '\\d'", "dataset = '\\ud800'", "\x0cn_layer = 4",
    "n_layer = 4 # \u2028 n_head = 3", "dataset = '''a\nb'''", "dataset = 'a' 'b'", "dataset = r'\\n'",
    "  n = 1", "# coding: latin-1", "from __future__ import annotations", "learning_rate = 1",
    "learning_rte = 1", "é = 1", "help = 1", "compile = 1", "compile = False", "bias = 0.0",
    "attention = 'MHA'", "attention = 'mqa'", "wandb = 'off'", "dropout = 1 / 10", "dropout = nan",
    "__name__ = 'x'", "_n = 4\nn_layer = _n // 3 + 1",
)  # fmt: skip


def damage_preset(draw: random.Random, data: bytes) -> bytes:
    """Lines put in, taken out or in another order, and a value exchanged."""
    lines = data.decode("utf-8").splitlines()
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines))
        action = draw.choice(("insert", "insert", "insert", "replace", "drop", "move", "value"))
        if action == "insert":
            lines.insert(at, draw.choice(LINES))
        elif action == "replace":
            lines[at] = draw.choice(LINES)
        elif action == "value":
            lines[at] = lines[at].partition("=")[0] + "=" + draw.choice(LINES).partition("=")[2]
        elif len(lines) > 1:
            line = lines.pop(at)
            if action == "move":
                lines.insert(draw.randrange(len(lines) + 1), line)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


# --- damage that knows tables


CELLS = (
    "NA", "null", "1", "1.5", "true", "", '"', '""', '"a""b"', "a\nb", "a\r\nb", "\r", "\t", "a,b", "é💡",
    "\0", "\ufeff", "2024-01-01", "[1]", '{"a": 1}', "\\", "\\n", "nan", "-", "'", "#", "\u2028",
    "x" * 3000,
)  # fmt: skip


def damage_table(draw: random.Random, data: bytes) -> bytes:
    """Lines of text put in, taken out, twice or cut."""
    lines = data.split(b"\n")
    for _ in range(draw.randint(1, 3)):
        at, cell = draw.randrange(len(lines)), draw.choice(CELLS)
        record = json.dumps({draw.choice(("text", "n", "x", "text\n")): draw.choice((cell, 1, None, [cell]))})
        pair = (f"{cell},{cell}", f'"{cell}",3')
        new = draw.choice((cell, *pair, record, record[:-3], "[]", "null", '"x"', "{}"))
        action = draw.choice(("insert", "replace", "drop", "twice", "cut"))
        if action in ("insert", "replace"):
            lines[at : at + (action == "replace")] = [new.encode("utf-8")]
        elif action == "cut":
            lines[at] = truncate(draw, lines[at])
        else:
            lines[at : at + 1] = [lines[at]] * (2 * (action == "twice"))
        lines = lines or [b""]
    return b"\n".join(lines)


# --- the formats


CHECKPOINT = ("model.safetensors", "config.json", "tokenizer.json", "manifest.json")
RUN = {"dataset": "text.txt", "tokenizer": "char", "bpe_size": 256, "text_column": "text"}
RUN |= {"val_fraction": 0.2}
PLACE = Path("run/checkpoints/step-000003")
BPE = bpe_tokenizer([TEXT], 262)


def quiet(text: str) -> None:
    del text


def save_tiny(tokenizer: Tokenizer, **changes: Any) -> None:
    shape: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": BLOCK, **changes}
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, **shape), torch.Generator().manual_seed(0))
    save_checkpoint(Path("run"), 3, model, tokenizer.to_dict(), {"val": {"loss": 1.5}, "run": RUN})


def read_checkpoint() -> Any:
    """As sample.py does: the weights' bytes, the tokenizer and what else it tells; the model has run once."""
    loaded = load_checkpoint(Path("run"))
    tokenizer = Tokenizer.from_dict(loaded.tokenizer)
    config = loaded.model.config
    with torch.inference_mode():
        scores = loaded.model(torch.zeros(1, min(2, config.block_size), dtype=torch.long))[0]
    assert scores.shape[-1] == config.vocab_size
    weights = {name: (t.shape, t.numpy().tobytes()) for name, t in loaded.model.state_dict().items()}
    return config, weights, tokenizer, loaded.info


def sign_checkpoint() -> None:
    with contextlib.suppress(Exception):  # beyond repair
        manifest = json.loads((PLACE / "manifest.json").read_bytes())
        for name in manifest["files"]:
            data = (PLACE / name).read_bytes()
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (PLACE / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


TRAINING = str(PLACE / "training.safetensors")


def make_resumable() -> None:
    """A checkpoint with the averages of two optimizers, and how far the run had come."""
    model = GPT(GPTConfig(vocab_size=5, n_layer=1, n_head=2, n_embd=8, block_size=BLOCK), torch.Generator())
    optimizers = optimizers_of(model)
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))[1].backward()
    for optimizer in optimizers:
        optimizer.step()
    progress = Progress(step=3, best=1.5, val={"loss": 1.5})
    about = {"run": flatten(TrainConfig(dataset="text.txt", out_dir="run"))}
    training = (optimizers, {"progress": asdict(progress), "scaler": {}})
    save_checkpoint(Path("run"), 3, model, char_tokenizer(["abcd"]).to_dict(), about, training)


def optimizers_of(model: GPT) -> list[torch.optim.Optimizer]:
    rates = {"learning_rate": 1e-3, "muon_lr": 0.02, "muon_momentum": 0.9, "weight_decay": 0.1}
    return make_optimizers(model, "muon", betas=(0.9, 0.99), **rates)


def read_resumable() -> Any:
    """As train.py does to go on: progress, and the averages' bytes."""
    loaded = load_checkpoint(Path("run"))
    optimizers = optimizers_of(loaded.model)
    saved = resume_training(loaded.path, optimizers)
    progress = read_progress(saved, loaded.info.get("step"), 32, loaded.path)
    averages = [
        [(index, kind, t.numpy().tobytes()) for index, kinds in o.state_dict()["state"].items()
         for kind, t in kinds.items()]
        for o in optimizers
    ]  # fmt: skip
    return progress, averages


def read_options() -> Any:
    """The options of --resume=run, with one that the run has to agree with."""
    argv = ["--resume=run", "--max_iters=2000", "--seed=0"]
    found = parse(argv, TrainConfig, prog="train.py", description="", stored=stored_options)
    return flatten(found.config)


PROBES = ("", "the cat", "é—💡\r\n", "  \n\t12345 it's\n\n", "a" * 200, "\0", "<|endoftext|>", "x y" * 50)


def read_tokenizer() -> Any:
    """A checkpoint's tokenizer, and what comes back of some texts: the text, or why it can't be encoded."""
    tokenizer = Tokenizer.from_dict(load_checkpoint(Path("run")).tokenizer)
    back: list[str] = []
    for text in PROBES:
        try:
            back.append(tokenizer.decode(tokenizer.encode(text)))
        except ValueError as error:
            assert tokenizer.kind == "char" and "not among the" in str(error), error
            back.append(text)
    tokenizer.token_bytes()
    return tokenizer, back


def make_prepared() -> None:
    Path("text.txt").write_text(TEXT, encoding="utf-8", newline="")
    folder = prepare("text.txt", "char", val_fraction=0.2, data_dir="prepared", log=quiet).folder
    assert folder == prepared_folder()


def prepared_folder() -> Path:
    return next(Path("prepared").glob("[!.]*"))


def read_prepared() -> Any:
    """As train.py does: prepare, open, draw, and read all of both splits; the tokenizer and the ids."""
    done = prepare("text.txt", "char", val_fraction=0.2, data_dir="prepared", log=quiet)
    ids = []
    for path in (done.train, done.val):
        with open_tokens(path, done.tokenizer.vocab_size) as tokens:
            check_fits(tokens, BLOCK, "train")
            get_batch(tokens, batch_starts(tokens.n_tokens, BLOCK, 0, 0, 4), BLOCK)
            ids.append([y.tolist() for _, y in eval_batches(tokens, BLOCK, None, 4)])
            assert tokens.header["n_bytes"] / tokens.n_tokens >= 0
    assert isinstance(done.meta["source"], str)
    return done.tokenizer, ids


def sign_prepared() -> None:
    """The tokenizer's hash into the headers, those into meta.json, and the files' sums as well."""
    folder = prepared_folder()
    with contextlib.suppress(Exception):  # beyond repair
        meta = json.loads((folder / "meta.json").read_bytes())
        tokenizer = Tokenizer.from_dict(json.loads((folder / "tokenizer.json").read_bytes()))
        for split in ("train", "val"):
            path = folder / f"{split}.bin"
            data = path.read_bytes()
            size = 12 + int.from_bytes(data[8:12], "little")
            header = json.loads(data[12:size])
            if header.get("tokenizer_hash") != tokenizer.hash:
                header["tokenizer_hash"] = tokenizer.hash
                path.write_bytes(pack_header(header) + data[size:])
            meta[split] = header
        for name in meta["sha256"]:
            meta["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def make_preset() -> None:
    Path("base.py").write_text("n_embd = 32\nn_head = 2\nlearning_rate = 1e-3\n", encoding="utf-8")
    text = '"""A preset."""\nbase = "base.py"\n_width = 16\nn_embd = _width * 4\nn_layer = 3\n'
    text += "attention = 'mqa'\ndropout = 0.1\ncompile = None\ndataset = 'text.txt'\n"
    Path("p.py").write_text(text, encoding="utf-8")


def read_preset() -> dict[str, Any]:
    found = parse(["p.py"], TrainConfig, prog="train.py", description="")
    assert [str(path) for path in found.presets] == ["p.py"] and found.explicit == {}
    return flatten(found.config)


def right_preset(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    """What Python itself makes of the file, and the defaults for the rest."""

    def names(path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        exec(path.read_bytes().decode("utf-8-sig"), {"__builtins__": {}}, found)  # it holds constants only
        base = names(path.parent / found.pop("base")) if "base" in found else {}
        return base | found

    del expected
    values = {key: value for key, value in names(Path("p.py")).items() if not key.startswith("_")}
    defaults = flatten(TrainConfig())
    told = {"n_kv_head", "n_inner"} - values.keys()  # these follow from others
    return got.keys() == defaults.keys() and all(
        got[key] == values.get(key, default) for key, default in defaults.items() if key not in told
    )


ROWS = ['a\r\nb, "q"', "é💡 the cat", "NA", "12", "one more\nrow"]


def make_table(name: str) -> Callable[[], None]:
    def make() -> None:
        records = [{"text": text, "n": i} for i, text in enumerate(ROWS)]
        if name == "t.parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.table({"text": ROWS, "n": range(len(ROWS))}), name)
            return
        with open(name, "w", encoding="utf-8", newline="") as file:
            if name == "t.csv":
                csv.writer(file).writerows([["text", "n"], *([r["text"], r["n"]] for r in records)])
            elif name == "t.jsonl":
                file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            else:
                json.dump(records, file)

    return make


def read_table(name: str) -> Callable[[], list[str]]:
    def read() -> list[str]:
        documents = list(load_corpus(name).documents)
        for text in documents:
            assert type(text) is str
            text.encode("utf-8")
        return documents

    return read


def right_text(got: list[str], expected: list[str]) -> bool:
    del expected
    return got == [Path("t.txt").read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8")]


def right_folder(got: list[str], expected: list[str]) -> bool:
    del expected
    texts = []
    for path in sorted(p for p in Path("docs").iterdir() if p.is_file()):
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(path.read_bytes().removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    return got == [text for text in texts if "\0" not in text]


def right_jsonl(got: list[str], expected: list[str]) -> bool:
    """Python's own reader has the last word, where it takes the file."""
    del expected
    texts = []
    for line in Path("t.jsonl").read_bytes().split(b"\n"):
        if line.strip():
            record = json.loads(line)
            if record.get("text") is not None:
                texts.append(record["text"])
    return got == texts


def right_csv(got: list[str], expected: list[str]) -> bool:
    del expected
    with open("t.csv", encoding="utf-8-sig", newline="") as file:
        head, *rows = [row for row in csv.reader(file) if row]
    at = head.index("text")
    return got == [row[at] if len(row) > at else "" for row in rows]


def make_text() -> None:
    Path("t.txt").write_text(TEXT, encoding="utf-8", newline="")


def make_folder() -> None:
    Path("docs").mkdir()
    for i in range(3):
        Path(f"docs/{i}.txt").write_text(TEXT[i : 40 + i], encoding="utf-8", newline="")


def make_eval_only() -> None:
    make_prepared()
    save_tiny(char_tokenizer([TEXT]))
    read_eval_only()  # so that its data is prepared


def read_eval_only() -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        loss = evaluate_run(Path("run"), "cpu", "float32")["loss"]
    return loss


IN_PLACE = tuple(str(PLACE / name) for name in CHECKPOINT)


def damage_checkpoint(draw: random.Random, data: bytes) -> bytes:
    return (damage_json if data[:1] == b"{" else damage_safetensors)(draw, data)


def damage_prepared(draw: random.Random, data: bytes) -> bytes:
    return (damage_token_file if data.startswith(MAGIC) else damage_json)(draw, data)


def damage_run(draw: random.Random, data: bytes) -> bytes:
    """The run's options in a checkpoint's config.json."""
    stored = json.loads(data)
    text = json.dumps({**stored, "run": HERE})
    return text.replace(json.dumps(HERE), change_json(draw, stored["run"])).encode("utf-8", "surrogatepass")


def formats() -> dict[str, tuple[int, Format]]:
    """Each format and its share of the cases."""
    char = char_tokenizer([TEXT])
    data_files = ("train.bin", "val.bin", "tokenizer.json", "meta.json")  # in the folder that prepare makes
    own, table = (damage_checkpoint,) * 9, (damage_table,) * 3

    def anything(got: Any, saved: Any) -> bool:
        return True

    def right_tokenizer(got: Any, saved: Any) -> bool:
        return got[1] == list(PROBES)

    def corpus(name: str, damages: tuple[Damage, ...], right: Callable[[Any, Any], bool]) -> Format:
        return Format(make_table(name), (name,), read_table(name), damages, right=right)

    def save(position: str) -> Callable[[], None]:
        others = {"attention": "mqa", "norm": "pre", "tie_weights": position == "rope"}
        return lambda: save_tiny(char, position=position, **others)

    def tokenizer(make: Callable[[], None]) -> Format:
        file = (str(PLACE / "tokenizer.json"),)
        return Format(make, file, read_tokenizer, (damage_json,) * 9, sign_checkpoint, right_tokenizer)

    preset = Format(make_preset, ("p.py", "base.py"), read_preset, (damage_preset,) * 12, right=right_preset)
    text = Format(make_text, ("t.txt",), read_table("t.txt"), (), right=right_text)
    folder = Format(make_folder, ("docs/0.txt", "docs/1.txt"), read_table("docs"), (), right=right_folder)
    resume = Format(make_resumable, (TRAINING,), read_resumable, (damage_safetensors,) * 9)
    prepared = Format(make_prepared, data_files, read_prepared, (damage_prepared,) * 6)
    eval_only = Format(make_eval_only, IN_PLACE[1:2], read_eval_only, (damage_run,) * 30)
    learned, rope = (Format(save(p), IN_PLACE[:3], read_checkpoint, own) for p in ("learned", "rope"))
    options = Format(make_resumable, IN_PLACE[1:2], read_options, (damage_run,) * 30)
    hostile = {"sign": sign_checkpoint, "right": anything}
    return {
        "checkpoint": (14, Format(lambda: save_tiny(BPE), IN_PLACE, read_checkpoint, own)),
        "signed checkpoint learned": (8, replace(learned, **hostile)),
        "signed checkpoint rope": (8, replace(rope, **hostile)),
        "resume": (4, resume),
        "signed resume": (5, replace(resume, **hostile)),
        "signed eval_only": (6, replace(eval_only, **hostile)),
        "signed options": (6, replace(options, **hostile)),
        "signed tokenizer char": (4, tokenizer(save("learned"))),
        "signed tokenizer bpe": (4, tokenizer(lambda: save_tiny(BPE))),
        "prepared": (8, prepared),
        "signed prepared": (6, replace(prepared, sign=sign_prepared, right=anything)),
        "preset": (18, preset),
        "text": (4, text),
        "folder": (4, folder),
        "jsonl": (4, corpus("t.jsonl", table, right_jsonl)),
        "json": (3, corpus("t.json", (damage_json,) * 3, anything)),
        "csv": (4, corpus("t.csv", table, right_csv)),
        "parquet": (5, corpus("t.parquet", (), anything)),
    }  # fmt: skip


# --- one case, and many


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Less memory and a clock while a file is read. (Where the system has neither, none.)"""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    def ring(*args: object) -> None:
        raise Slow(f"took more than {SECONDS:.0f} seconds")

    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the most since the last call with "reset"; 0 if unknown."""
    try:
        if key == "reset":
            Path("/proc/self/clear_refs").write_text("5")
            key = "VmRSS"
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(status.partition(key + ":")[2].split()[0]) * 1024


def _raised_in(error: BaseException) -> str:
    tracebacks = list(traceback.walk_tb(error.__traceback__))
    return Path(tracebacks[-1][0].f_code.co_filename).name if tracebacks else ""


def judge(form: Format, expected: Any) -> tuple[str, str]:
    """Read the files in the working directory: ("refused" | "read" | "failed", why)."""
    before = _resident("reset")
    begin = time.process_time()
    try:
        with guarded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's about odd presets, and torch's about number formats
            got = form.read()
        kind, why = "read", ""
    except (Exception, Slow) as error:
        kind, why = "refused", f"{type(error).__name__}: {error}"
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError) and _raised_in(cause) != "ast.py":  # there: nested too deep
                kind, why = "failed", f"asked for too much memory: {why}"
            cause = cause.__cause__ or cause.__context__
        raw = isinstance(error, UnicodeError | json.JSONDecodeError) and "/" not in str(error)
        if not isinstance(error, ValueError | OSError) or raw:
            kind, why = "failed", f"leaked {why}"
        elif not str(error) or len(str(error).splitlines()) > 1 or len(str(error)) > 2000:
            kind, why = "failed", f"not one line: {why}"
    except BaseException as error:  # a panic inside a tokenizer is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        kind, why = "failed", f"leaked {type(error).__name__}: {error}"
    seconds, used = time.process_time() - begin, _resident("VmHWM") - before
    if Path(TRAP).exists():
        return "failed", "it ran code"
    if seconds > SECONDS:
        return "failed", f"took {seconds:.1f} s"
    if used > MEMORY:
        return "failed", f"used {used / 2**20:.0f} MiB"
    if kind == "read":
        try:
            right, why = form.right(got, expected), ""
        except Exception as error:  # what should know better can't read the file
            right, why = False, f" ({type(error).__name__}: {error})"
        if not right:
            return "failed", f"read without a word, but wrong{why}: {str(got)[:300]!r}"
    return kind, why[:500]


def damage(form: Format, draw: random.Random) -> str:
    """Damage one of the files in the working directory; what was done."""
    name = draw.choice(form.files)
    folder = prepared_folder() if name in ("train.bin", "val.bin", "tokenizer.json", "meta.json") else Path()
    names = tuple(str(folder / n) for n in form.files)
    name = str(folder / name)
    if draw.random() < 0.03:
        did = damage_folder(draw, name, names)
    else:
        way = draw.choice(ANY + form.damages)
        path = Path(name)
        path.write_bytes(way(draw, path.read_bytes()))
        did = way.__name__
    if form.sign:
        form.sign()
    return f"{name}: {did}"


def restore(place: Path, fresh: Path) -> None:
    """Make a folder like another. Only what differs is written: to delete and copy it all takes longer."""
    for path in sorted(place.rglob("*"), reverse=True):
        twin = fresh / path.relative_to(place)
        if path.is_symlink() or not twin.exists() or path.is_dir() != twin.is_dir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for twin in sorted(fresh.rglob("*")):
        path = place / twin.relative_to(fresh)
        if twin.is_dir():
            path.mkdir(exist_ok=True)
        elif not path.exists() or path.read_bytes() != twin.read_bytes():
            shutil.copy2(twin, path)


@contextlib.contextmanager
def ready(form: Format) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A working directory with valid files: what reading them gives, and how to have them new."""
    with tempfile.TemporaryDirectory() as root, contextlib.chdir(root):
        place, fresh = Path(root, "place"), Path(root, "fresh")
        place.mkdir()
        os.chdir(place)
        form.make()
        expected = form.read()
        shutil.copytree(place, fresh)  # with the times of the files: prepared data goes by them

        yield expected, lambda: restore(place, fresh)


def run_format(name: str, form: Format, n: int, seed: int, first: int = 0) -> dict[str, Any]:
    """Cases first .. first + n - 1 of one format: {"refused": .., "read": .., "failures": [..]}."""
    found: dict[str, Any] = {"refused": 0, "read": 0, "failures": []}
    with ready(form) as (expected, renew):
        assert judge(form, expected)[0] == "read", f"{name}: the whole files can't be read"
        for number in range(first, first + n):
            renew()
            did = damage(form, random.Random(f"{seed}/{name}/{number}"))
            kind, why = judge(form, expected)
            if kind == "failed":
                found["failures"].append(
                    {"format": name, "seed": seed, "case": number, "damage": did, "why": why}
                )
            else:
                found[kind] += 1
    gc.collect()
    return found


def run(n: int, seed: int = 0) -> dict[str, Any]:
    """n damaged files over all formats, by their shares; the top of this file says what comes back."""
    begin, known = time.perf_counter(), formats()
    total = sum(share for share, _ in known.values())
    found: dict[str, Any] = {"files": 0, "seed": seed, "formats": {}, "failures": []}
    for name, (share, form) in known.items():
        cases = -(-n * share // total)
        counts = run_format(name, form, cases, seed)
        found["files"] += cases
        found["failures"] += counts.pop("failures")
        found["formats"][name] = counts
    return {**found, "seconds": time.perf_counter() - begin}


def replay(name: str, seed: int, case: int) -> tuple[str, str, str]:
    """One case again: (what was damaged, the outcome, why)."""
    form = formats()[name][1]
    with ready(form) as (expected, renew):
        renew()
        did = damage(form, random.Random(f"{seed}/{name}/{case}"))
        return (did, *judge(form, expected))
