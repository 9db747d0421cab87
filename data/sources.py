"""Where documents come from: the Python standard library, a file, a folder, a table, or the Hugging Face hub.

Everything arrives as a column of a `datasets.Dataset`. Text files are decoded here, from their bytes, because
the library's own text reader turns "\\r\\n" into "\\n". Local data never needs the network.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import platform
import re
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN = (
    "python (the standard library's source), a text file, folder, .jsonl/.json/.csv/.parquet, hub:owner/name"
)
TABLES = {".jsonl": "from_json", ".json": "from_json", ".csv": "from_csv", ".parquet": "from_parquet"}
STDLIB_SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
HUB = re.compile(r"hub:([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


@dataclass
class Corpus:
    """Documents in a fixed order, and where they came from."""

    name: str  # short, for the name of a folder
    source: str  # for a person: path, or name and version
    documents: Sequence[str]
    fingerprint: str  # of paths, sizes and times, not of the text
    notes: tuple[str, ...] = ()  # what was left out


class NotTextError(ValueError):
    """A file that is not UTF-8 text: refused when it was asked for, skipped when a folder holds it."""


def corpus_fingerprint(dataset: str) -> tuple[str, str, str]:
    """(name, source, fingerprint) without reading the text: the fingerprint changes when the files do.

    A data set of the hub has its name as fingerprint: once prepared, no network is needed to use it again.
    """
    if match := HUB.fullmatch(dataset):
        return match[1].split("/")[1], dataset, dataset
    if dataset == "python":
        root = _stdlib()
        source = f"standard library of Python {platform.python_version()}"
        return "python", source, _fingerprint(source, root, _stdlib_files(root))
    path = _find(dataset)
    files = _folder_files(path) if path.is_dir() else [path]
    return path.stem or path.name, path.as_posix(), _fingerprint(path.as_posix(), path, files)


def load_corpus(dataset: str, text_column: str = "text") -> Corpus:
    """Read the documents. ValueError, one line, for whatever is not text or not there.

    dataset: "python" | path of a text file (one document), a folder (a document per text file) or a table
    (a document per row's text_column) | "hub:owner/name" or "hub:owner/name:config" (its train split).
    A local file called "python" is reached as "./python".
    """
    name, source, fingerprint = corpus_fingerprint(dataset)
    notes: tuple[str, ...] = ()
    if HUB.fullmatch(dataset):
        documents, revision = _from_hub(dataset, text_column)
        source += f" at {revision}"
    elif dataset == "python":
        root = _stdlib()
        documents, notes = _from_files(root, _stdlib_files(root))
    else:
        path = _find(dataset)
        if path.is_dir():
            documents, notes = _from_files(path, _folder_files(path))
        elif path.suffix.lower() in TABLES:
            documents = _from_table(path, text_column)
        else:
            documents = _as_dataset([read_text(path)])
    if not any(documents):
        left_out = "".join(f" ({note})" for note in notes)
        raise ValueError(f"{source}: no text in it{left_out}: nothing to learn")
    return Corpus(name, source, documents, fingerprint, notes)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, each character as it stands (line ends too), without a byte order mark."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise NotTextError(
            f"{path}: is UTF-16, not UTF-8: convert it: iconv -f UTF-16 -t UTF-8 {path} > utf8.txt"
        )
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    if (at := raw.find(b"\0")) >= 0:
        raise NotTextError(f"{path}: is binary, not text (a zero byte at offset {at}): pass a text file")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotTextError(
            f"{path}: not UTF-8 (byte 0x{raw[error.start]:02X} at offset {error.start}): convert it, "
            f"if it is Latin-1: iconv -f LATIN1 -t UTF-8 {path} > utf8.txt"
        ) from None


def _find(dataset: str) -> Path:
    path = Path(dataset).expanduser()
    if path.is_file() or path.is_dir():
        return path.resolve()
    if "://" in dataset:
        raise ValueError(f"--dataset={dataset}: nothing is downloaded by address: fetch it and pass its path")
    if dataset.startswith("hub:"):
        raise ValueError(f"--dataset={dataset}: expected hub:owner/name or hub:owner/name:config")
    folder = path.parent
    beside = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    near = [str(folder / n) for n in difflib.get_close_matches(path.name, beside, 1)]
    near = difflib.get_close_matches(dataset, ["python"], 1) or near
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"--dataset={dataset}: no such file or folder or known data set{hint}; known: {KNOWN}")


def _stdlib() -> Path:
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "os.py").is_file():
        raise ValueError(
            f"no standard library source in {root}: pass your own text, --dataset=FILE_OR_FOLDER"
        )
    return root


def _stdlib_files(root: Path) -> list[Path]:
    return [p for p in _walk(root, STDLIB_SKIP) if p.suffix == ".py"]


def _folder_files(root: Path) -> list[Path]:
    return [p for p in _walk(root, set()) if not p.name.startswith(".")]


def _walk(root: Path, skip: set[str]) -> list[Path]:
    """Files under root, sorted by their path below it, whatever order the file system lists them in."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in skip and f != "__pycache__" and not f.startswith(".")]
        found += [Path(folder, f) for f in files]
    return sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).as_posix())


def _fingerprint(source: str, root: Path, files: list[Path]) -> str:
    digest = hashlib.sha256(source.encode("utf-8", "surrogateescape"))
    for path in files:
        stat = path.stat()
        line = f"{path.relative_to(root).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # its errors reach us as exceptions
    return datasets


def _as_dataset(texts: list[str]) -> Sequence[str]:
    datasets = _datasets()
    features = datasets.Features({"text": datasets.Value("large_string")})  # "string" ends at 2 GiB
    return datasets.Dataset.from_dict({"text": texts}, features=features)["text"]


def _from_files(root: Path, files: list[Path]) -> tuple[Sequence[str], tuple[str, ...]]:
    texts, skipped = [], []
    for path in files:
        try:
            texts.append(read_text(path))
        except NotTextError:
            skipped.append(path.relative_to(root).as_posix())
    names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
    notes = (f"skipped {len(skipped)} file(s) that are not UTF-8 text: {names}",) if skipped else ()
    return _as_dataset(texts), notes


def _from_table(path: Path, text_column: str) -> Sequence[str]:
    datasets = _datasets()
    read = getattr(datasets.Dataset, TABLES[path.suffix.lower()])
    # In a csv the words NA and null are text like any other.
    options = {"keep_default_na": False} if path.suffix.lower() == ".csv" else {}
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: is empty: nothing to learn")
    # The Dataset.from_* readers ask nothing of the network, while load_dataset counts downloads there.
    with tempfile.TemporaryDirectory() as cache:
        try:
            table = read(str(path), cache_dir=cache, keep_in_memory=True, **options)
        except Exception as error:  # pyarrow's, pandas' or datasets': not such a table
            cause = _first_line(error.__cause__ or error)
            raise ValueError(f"{path}: cannot be read as {path.suffix[1:].lower()} ({cause})") from None
    return _column(table, text_column, str(path))


def _from_hub(dataset: str, text_column: str) -> tuple[Sequence[str], str]:
    match = HUB.fullmatch(dataset)
    assert match
    offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
    try:
        datasets = _datasets()
        from huggingface_hub import HfApi

        # One quick question first: load_dataset itself retries for half a minute without a network. The
        # answer also tells the exact revision, which belongs in the records.
        revision = None if offline else HfApi().dataset_info(match[1], timeout=10).sha
        table = datasets.load_dataset(match[1], match[2], split="train", revision=revision)
    except Exception as error:  # network, name, config, split: one line for each
        raise ValueError(
            f"--dataset={dataset}: cannot be loaded from the Hugging Face hub ({_first_line(error)}): check "
            "the name and the network (HF_HUB_OFFLINE=1 uses earlier downloads), or pass a local file"
        ) from None
    return _column(table, text_column, dataset), revision or "the cached revision"


def _column(table: Any, text_column: str, where: str) -> Sequence[str]:
    if text_column not in table.column_names:
        names = ", ".join(table.column_names)
        raise ValueError(f"{where}: no column {text_column!r}; it has: {names}: pass --text_column=NAME")
    kind = getattr(table.features[text_column], "dtype", "no text")
    if kind not in ("string", "large_string"):
        raise ValueError(f"{where}: column {text_column!r} holds {kind}, not text: pass --text_column=NAME")
    if table.data.column(text_column).null_count:
        table = table.filter(
            lambda text: text is not None,
            input_columns=text_column,
            keep_in_memory=True,
            load_from_cache_file=False,
        )
    return table[text_column]


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
