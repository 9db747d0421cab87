"""From documents to token files: train.bin, val.bin, tokenizer.json and meta.json in one folder.

Documents are shuffled with a fixed seed and split whole; a corpus of one document is cut at 90 % of its
characters. The end-of-text id follows each document, so a window may run from one document into the next with
that id between them: as in GPT-2, the model learns that what came before it no longer matters.
The same text gives the same bytes on disk, and a killed run leaves no folder that looks finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.loader import VERSION, open_tokens, write_tokens
from data.sources import Corpus, corpus_fingerprint, load_corpus
from data.tokenizer import Tokenizer, bpe_tokenizer, char_tokenizer, gpt2_tokenizer

FILES = ("train.bin", "val.bin", "tokenizer.json")  # meta.json has the hash of each
SPLIT_SEED = 1337
CHUNK = 1 << 20  # characters: longer documents are encoded in pieces of about this size
BATCH = 4 << 20  # characters handed to tiktoken's threads at a time; bounds the memory needed
STALE_SECONDS = 3600  # a temporary folder untouched for this long was left by a killed run


@dataclass
class Prepared:
    """A prepared data set on disk: the two token files, and the tokenizer that made them."""

    folder: Path
    tokenizer: Tokenizer
    train: Path
    val: Path
    meta: dict[str, Any]  # source, settings, and the header of each split


def prepare(
    dataset: str,
    tokenizer: str = "bpe",
    vocab_size: int = 1024,
    *,
    text_column: str = "text",
    val_fraction: float = 0.1,
    data_dir: Path | str = "data/prepared",
    log: Callable[[str], object] = print,
) -> Prepared:
    """Make the token files of a data set, or find the ones made before from the same files and settings.

    dataset as in `sources.load_corpus`; tokenizer "char" | "bpe" | "gpt2"; vocab_size is for bpe alone.
    ValueError, one line, for data or settings that cannot be used and for a disk that cannot take the files.
    """
    if tokenizer not in ("char", "bpe", "gpt2"):
        raise ValueError(f"--tokenizer={' '.join(tokenizer.split())[:40]}: expected char, bpe or gpt2")
    if not 0.0 < val_fraction < 1.0:
        raise ValueError(f"--val_fraction={val_fraction}: expected a number between 0 and 1, such as 0.1")
    name, _, fingerprint = corpus_fingerprint(dataset)
    settings = {
        "fingerprint": fingerprint,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size if tokenizer == "bpe" else None,
        "text_column": text_column,
        "val_fraction": val_fraction,
        "version": VERSION,
    }
    folder = Path(data_dir) / _folder_name(name, settings)
    if found := load_prepared(folder, settings):
        log(f"data: {folder}, prepared before: {_counts(found.meta)}")
        return found

    corpus = load_corpus(dataset, text_column)
    for note in corpus.notes:
        log(f"data: {note}")
    temporary = folder.with_name(f".{folder.name}.{os.urandom(4).hex()}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        temporary.mkdir()
        _write(corpus, settings, temporary)
        _move_into_place(temporary, folder, settings)
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot be written ({error.strerror or error}): "
            "free some space, or choose another --data_dir"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after a failure or Ctrl-C nothing half-written stays
    prepared = load_prepared(folder, settings)
    assert prepared, "what was just written can be read"
    log(f"data: {folder}, from {corpus.source}: {_counts(prepared.meta)}")
    return prepared


def load_prepared(folder: Path, settings: dict[str, Any] | None = None) -> Prepared | None:
    """The prepared data set in a folder, or None when it is not there, not whole, damaged, of another format,
    or made with other settings than those given.

    Reads each file to the end, at more than 1 GB/s where the disk can: a wrong token would go unnoticed.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if any(meta[key] != value for key, value in (settings or {}).items()):
            return None
        if any(_sha256(folder / name) != meta["sha256"][name] for name in FILES):
            return None
        made_by = Tokenizer.from_dict(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        for split in ("train", "val"):
            with open_tokens(folder / f"{split}.bin", made_by.vocab_size) as tokens:
                if tokens.header != meta[split] or tokens.header["tokenizer_hash"] != made_by.hash:
                    return None
                if not tokens.n_tokens or not isinstance(meta["source"], str):
                    return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return Prepared(folder, made_by, folder / "train.bin", folder / "val.bin", meta)


def split_documents(lengths: Sequence[int], val_fraction: float) -> tuple[list[int], list[int]]:
    """Document numbers of (train, val), both in a fixed shuffled order.

    val takes documents in that order as long as they fit into val_fraction of all characters; when none
    fits it takes the shortest. Empty documents are in neither. Needs two documents that are not empty.
    """
    # Sorting by raw random numbers keeps the order the same with every version of NumPy.
    order = np.argsort(np.random.Philox(key=SPLIT_SEED).random_raw(len(lengths)), kind="stable").tolist()
    order = [i for i in order if lengths[i]]
    room = val_fraction * sum(lengths)
    val = []
    for i in order:
        if lengths[i] <= room:
            val.append(i)
            room -= lengths[i]
    val = val or [min(order, key=lambda i: lengths[i])]
    chosen = set(val)
    return [i for i in order if i not in chosen], val


def split_chunks(text: str, size: int = CHUNK) -> list[str]:
    """Cut a long text into pieces that have, one after the other, the tokens of the whole.

    A cut is made only where a blank follows a letter or digit: each tokenizer starts a new piece there.
    """
    if len(text) <= size:
        return [text]
    cuts, boundary = [0], re.compile(r"(?<=[^\W_])(?=\s)")
    while match := boundary.search(text, cuts[-1] + size):
        cuts.append(match.start())
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _write(corpus: Corpus, settings: dict[str, Any], folder: Path) -> None:
    documents: Sequence[str] = corpus.documents
    lengths, digest = [], hashlib.sha256()
    for text in documents:
        raw = text.encode("utf-8")
        lengths.append(len(text))
        digest.update(len(raw).to_bytes(8, "little") + raw)
    if sum(map(bool, lengths)) > 1:
        train, val = split_documents(lengths, settings["val_fraction"])
        unfinished: set[int] = set()
    else:
        documents = _cut_in_two(next(text for text in documents if text), settings["val_fraction"])
        train, val = [0], [1]
        unfinished = {0}  # no end of text in the middle of a document

    tokenizer = _make_tokenizer(settings, documents, train, val)
    about: dict[str, Any] = {
        "source": corpus.source,
        "corpus_sha256": digest.hexdigest(),
        "tokenizer_hash": tokenizer.hash,
    }
    headers = {}
    for split, order in (("train", train), ("val", val)):
        n_bytes = sum(len(documents[i].encode("utf-8")) for i in order)
        n_characters = sum(len(documents[i]) for i in order)
        about.update(split=split, n_documents=len(order), n_bytes=n_bytes)
        parts = _encode(_pieces(documents, order, unfinished), tokenizer, split, n_characters)
        headers[split] = write_tokens(folder / f"{split}.bin", parts, tokenizer.vocab_size, about)
    _write_json(folder / "tokenizer.json", tokenizer.to_dict())
    meta = dict(settings, source=corpus.source, notes=list(corpus.notes), characters=sum(lengths), **headers)
    meta["sha256"] = {name: _sha256(folder / name) for name in FILES}
    _write_json(folder / "meta.json", meta)


def _cut_in_two(text: str, val_fraction: float) -> list[str]:
    """One document alone: its first 90 % (by default) are for training, the rest for validation."""
    if len(text) < 2:
        raise ValueError(f"the corpus has {len(text)} character: too few for a train and a validation split")
    cut = min(max(int(len(text) * (1 - val_fraction)), 1), len(text) - 1)
    return [text[:cut], text[cut:]]


def _make_tokenizer(
    settings: dict[str, Any], documents: Sequence[str], train: list[int], val: list[int]
) -> Tokenizer:
    if settings["tokenizer"] == "gpt2":
        return gpt2_tokenizer()
    if settings["tokenizer"] == "char":
        # Of all the text: a character that only validation has would have no id.
        return char_tokenizer(documents[i] for i in train + val)
    return bpe_tokenizer(
        (chunk for i in train for chunk in split_chunks(documents[i])), settings["vocab_size"]
    )


def _pieces(documents: Sequence[str], order: list[int], unfinished: set[int]) -> Iterator[tuple[str, bool]]:
    """(text, whether a document ends with it) for the documents in the given order."""
    for i in order:
        *body, last = split_chunks(documents[i])
        for chunk in body:
            yield chunk, False
        yield last, i not in unfinished


def _encode(
    pieces: Iterator[tuple[str, bool]], tokenizer: Tokenizer, split: str, total: int
) -> Iterator[np.ndarray]:
    """Ids of the pieces, the end-of-text id after each document. Shows its progress when it takes long."""
    from tqdm import tqdm

    def encode(batch: list[tuple[str, bool]]) -> Iterator[np.ndarray]:
        texts = [text for text, _ in batch]
        for ids, (text, ends) in zip(tokenizer.encode_batch(texts), batch, strict=True):
            yield np.array([*ids, tokenizer.eot_id] if ends else ids, dtype=np.int64)
            bar.update(len(text))

    with tqdm(
        total=total, desc=f"{split} tokens", unit="char", unit_scale=True, delay=2.0, leave=False
    ) as bar:
        batch: list[tuple[str, bool]] = []
        waiting = 0
        for text, ends in pieces:
            batch.append((text, ends))
            waiting += len(text)
            if waiting >= BATCH:
                yield from encode(batch)
                batch, waiting = [], 0
        yield from encode(batch)


def _folder_name(name: str, settings: dict[str, Any]) -> str:
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "data"
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8")).hexdigest()[:8]
    return f"{slug}-{settings['tokenizer']}{settings['vocab_size'] or ''}-{key}"


def _counts(meta: dict[str, Any]) -> str:
    train, val = meta["train"], meta["val"]
    return (
        f"train {train['n_tokens']:,} tokens in {train['n_documents']:,} document(s), "
        f"val {val['n_tokens']:,} in {val['n_documents']:,}; "
        f"{train['n_bytes'] / train['n_tokens']:.2f} bytes per token"
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _remove_stale(folder: Path) -> None:
    for old in folder.parent.glob(f".{folder.name}.*.tmp"):
        newest = max(p.stat().st_mtime for p in [old, *old.iterdir()])
        if time.time() - newest > STALE_SECONDS:
            shutil.rmtree(old, ignore_errors=True)


def _move_into_place(temporary: Path, folder: Path, settings: dict[str, Any]) -> None:
    try:
        temporary.replace(folder)
    except OSError:
        if load_prepared(folder, settings):
            return  # another process was first: its files are the same
        if not folder.exists():
            raise
        # What is there cannot be used (damaged, or of an older format): it makes room.
        shutil.rmtree(folder)
        temporary.replace(folder)
