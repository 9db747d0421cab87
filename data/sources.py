"""Where documents come from: the Python standard library, a file, a folder, a table, or the Hugging Face hub.

Everything arrives as a column of a `datasets.Dataset`. Text files are decoded here, from their bytes, because
the library's own text reader turns "\\r\\n" into "\\n". Local data never needs the network.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import os
import platform
import re
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN = (
    "python (the standard library's source), a text file, folder, .jsonl/.json/.csv/.parquet, hub:owner/name"
)
TABLES = (".jsonl", ".json", ".csv", ".parquet")
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
    raw = dataset.encode("utf-8", "replace")
    if len(raw) > 4096 or any(len(part) > 255 for part in raw.split(b"/")):
        # the system's own error would repeat all of it
        raise ValueError(f"--dataset={' '.join(dataset[:40].split())}...: longer than a path can be")
    try:
        path = Path(dataset).expanduser()
    except RuntimeError:  # ~name/ of a user that this machine does not have
        path = Path(dataset)
    if path.is_dir():
        return path.resolve()
    if path.is_file():  # its own name even where it is a link: the ending says how it is read
        return path.parent.resolve() / path.name
    dataset = " ".join(dataset.split())  # for a message of one line
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
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: is empty: nothing to learn")
    kind = path.suffix.lower()
    if kind != ".parquet":
        texts = (_from_csv if kind == ".csv" else _from_json)(path, text_column)
        try:
            return _as_dataset(texts)
        except UnicodeEncodeError as error:
            code = f"U+{ord(error.object[error.start]):04X}"
            raise ValueError(f"{path}: a text has a lone surrogate {code}, which is no character") from None
    datasets = _datasets()
    # The Dataset.from_* readers ask nothing of the network, while load_dataset counts downloads there.
    with tempfile.TemporaryDirectory() as cache:
        try:
            table = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # pyarrow's or datasets': not such a table
            cause = _first_line(error.__cause__ or error)
            raise ValueError(f"{path}: cannot be read as parquet ({cause})") from None
    return _column(table, text_column, str(path))


def _from_csv(path: Path, text_column: str) -> list[str]:
    """The texts of a file whose first row has the names. ValueError for a row that has more cells, or fewer.

    By Python's reader: pandas' makes the first column an index where rows are longer than the header, which
    moves each name by one, and where 10,000 rows hold nothing but numbers it turns 007 into 7.
    """
    csv.field_size_limit(2**31 - 1)
    texts, line = list[str](), 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            if text_column not in names:
                raise _no_column(str(path), text_column, names)
            at = names.index(text_column)
            for row in reader:
                line = reader.line_num
                if row and len(row) != len(names):
                    raise ValueError(
                        f"{path}:{line}: {len(row)} cells, but the header has {len(names)}: text with "
                        "a comma needs quotes"
                    )
                texts += row[at : at + 1]
    except csv.Error as error:
        raise ValueError(f"{path}: cannot be read as csv ({_first_line(error)}, after line {line})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte 0x{error.object[error.start]:02X}): convert it") from None
    if texts and all(re.fullmatch(r"-?\d+(\.\d*)?", text) for text in texts):
        raise _no_text(str(path), text_column, "int64" if "." not in "".join(texts) else "float64")
    return texts


def _from_json(path: Path, text_column: str) -> list[str]:
    """The texts of a file with one object per line; a .json file may also be one list of objects.

    By Python's reader: deep nesting brings pyarrow's down, process and all, and it takes texts that look like
    dates for dates.
    """
    texts, names = list[str](), dict[str, None]()
    for line, row in _json_rows(path):
        if not isinstance(row, dict):
            raise ValueError(f'{path}:{line}: not an object, such as {{"{text_column}": "..."}}')
        names |= dict.fromkeys(row)
        text = row.get(text_column)
        if text is None:
            continue
        if not isinstance(text, str):
            kinds = {bool: "bool", int: "int64", float: "float64", list: "lists", dict: "objects"}
            raise _no_text(str(path), text_column, kinds[type(text)])
        texts.append(text)
    if names and text_column not in names:
        raise _no_column(str(path), text_column, list(names))
    return texts


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, value) for each row."""
    line = 1
    try:
        if path.suffix.lower() == ".json":
            try:
                whole = json.loads(read_text(path))
                yield from ((1, row) for row in (whole if isinstance(whole, list) else [whole]))
                return
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Extra data"):  # else one object per line, perhaps
                    line = error.lineno
                    raise
        with open(path, "rb") as file:
            for line, raw in enumerate(file, 1):
                if raw.strip():
                    yield line, json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{line}: not JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{line}: not UTF-8 (byte 0x{error.object[error.start]:02X})") from None
    except RecursionError:
        raise ValueError(f"{path}:{line}: not readable as JSON (nested too deep)") from None


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
        raise _no_column(where, text_column, table.column_names)
    kind = getattr(table.features[text_column], "dtype", "lists or objects")
    if kind not in ("string", "large_string"):
        raise _no_text(where, text_column, kind)
    try:  # a damaged file may hold bytes that are no text; they would show much later, without a name
        table.data.column(text_column).validate(full=True)
    except ValueError as error:  # pyarrow's
        raise ValueError(f"{where}: column {text_column!r} is damaged ({_first_line(error)})") from None
    if table.data.column(text_column).null_count:
        table = table.filter(
            lambda text: text is not None,
            input_columns=text_column,
            keep_in_memory=True,
            load_from_cache_file=False,
        )
    return table[text_column]


def _no_column(where: str, text_column: str, names: Sequence[str]) -> ValueError:
    found = " ".join(", ".join(names).split())[:300]
    return ValueError(f"{where}: no column {text_column!r}; it has: {found}: pass --text_column=NAME")


def _no_text(where: str, text_column: str, kind: str) -> ValueError:
    return ValueError(f"{where}: column {text_column!r} holds {kind}, not text: pass --text_column=NAME")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
