"""Token files and the windows drawn from them.

A token file is: 8 magic bytes, the length of the header (uint32), a JSON header padded with blanks to a
multiple of 64 bytes, then the tokens; all little-endian. `prepare.py` writes it, this module reads it.

A file of N tokens has N - block_size training windows: x = tokens[s : s + block_size] and y, the same one
token later. Which windows a step sees depends on (seed, step) alone, never on how the step is cut into
micro-batches or spread over processes.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import torch

MAGIC = b"HEADCNT\n"
VERSION = 1
ALIGN = 64
MAX_HEADER_BYTES = 64 * 1024
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_COUNTS = ("n_tokens", "n_bytes", "n_documents", "max_id", "vocab_size")
_TEXTS = ("split", "dtype", "tokenizer_hash", "source", "corpus_sha256")


class TokenFile:
    """An open token file. Fields: path, header (dict), dtype, n_tokens, max_id, vocab_size.

    Reads with seek and read on one unbuffered file. A memory map would be shorter, but each page it touches
    counts as resident memory of the process, and opening one anew per batch costs more than the batch.
    Safe to share between threads; pickles (to another process) as the path and opens again there.
    """

    def __init__(self, path: Path, header: dict[str, Any], offset: int) -> None:
        self.path = path
        self.header = header
        self.offset = offset  # bytes before the first token
        self.dtype = DTYPES[header["dtype"]]
        self.n_tokens: int = header["n_tokens"]
        self.max_id: int = header["max_id"]
        self.vocab_size: int = header["vocab_size"]
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - stays open
        self._lock = threading.Lock()  # seek and read are two steps

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length - 1 in the machine's own byte order, (length,)."""
        return self.read_windows(np.array([start]), length)[0]

    def read_windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """One row of `length` tokens per start, (len(starts), length), uint16 or uint32."""
        if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= self.n_tokens - length:
            raise IndexError(f"{self.path}: window of {length} tokens outside the file's {self.n_tokens}")
        rows = np.empty((len(starts), length), dtype=self.dtype)
        with self._lock:
            for row, start in zip(rows, starts.tolist(), strict=True):
                self._file.seek(self.offset + start * self.dtype.itemsize)
                view = memoryview(row.view(np.uint8))
                while view:  # one read may return less than asked
                    n = self._file.readinto(view)
                    if not n:
                        raise ValueError(f"{self.path}: ends before its last token: prepare it again")
                    view = view[n:]
        return rows.astype(self.dtype.newbyteorder("="), copy=False)

    def close(self) -> None:
        """Close the file; reading is over."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path, self.header, self.offset)


def open_tokens(path: Path | str, vocab_size: int | None = None) -> TokenFile:
    """Open a token file after checking all that can be checked without reading the tokens.

    vocab_size is the model's: a file with a larger id is refused here, not deep inside the embedding.
    ValueError, one line, for a missing, foreign, damaged or unfitting file.
    """
    path = Path(path)
    again = "prepare it again: delete its folder and run train.py with the same --dataset"
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(len(MAGIC) + 4)
            if start[: len(MAGIC)] != MAGIC:
                raise ValueError(
                    f"{path}: not a token file of this project (no HEADCNT header): pass the text itself, "
                    "as in python train.py --dataset=my_text.txt, and it is prepared"
                )
            length = int.from_bytes(start[len(MAGIC) :], "little")
            offset = len(start) + length
            # The length is checked before it is used: a damaged one must not ask for gigabytes.
            if not 0 < length <= MAX_HEADER_BYTES or offset % ALIGN or offset > size:
                raise ValueError(f"{path}: damaged (header of {length} bytes in a file of {size}); {again}")
            header = _parse_header(path, file.read(length))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    expected = offset + header["n_tokens"] * DTYPES[header["dtype"]].itemsize
    if size != expected:
        raise ValueError(f"{path}: {size} bytes, but its header promises {expected}; {again}")
    if vocab_size is not None and header["max_id"] >= vocab_size:
        raise ValueError(
            f"{path}: largest token id {header['max_id']} does not fit a model with vocab_size={vocab_size}: "
            "use the data and the tokenizer the model was made for"
        )
    return TokenFile(path, header, offset)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: damaged (its header is not JSON); prepare the data set again") from None
    problem = None
    if not isinstance(header, dict) or header.get("version") != VERSION:
        problem = f"version is not {VERSION}"
    elif bad := [key for key in _COUNTS if type(header.get(key)) is not int or not 0 <= header[key] < 2**63]:
        problem = f"{bad[0]} is not a count"
    elif bad := [key for key in _TEXTS if not isinstance(header.get(key), str)]:
        problem = f"{bad[0]} is not a text"
    elif header["dtype"] not in DTYPES:
        problem = f"dtype is {header['dtype'][:20]!r}, not uint16 or uint32"
    elif header["max_id"] >= header["vocab_size"] or header["max_id"] > np.iinfo(DTYPES[header["dtype"]]).max:
        problem = f"max_id {header['max_id']} does not fit its vocab_size and dtype"
    if problem:
        raise ValueError(f"{path}: unusable header ({problem}); prepare the data set again")
    return header


def batch_starts(n_tokens: int, block_size: int, seed: int, step: int, n: int) -> np.ndarray:
    """Starts of the n windows of a step, int64 (n,), uniform over the n_tokens - block_size possible ones.

    A function of (seed, step) and nothing else. Philox is a counter-based generator (Salmon et al. 2011):
    any step is reached directly, so a resumed run draws what the uninterrupted one would have.
    """
    n_starts = n_tokens - block_size
    assert n_starts > 0, "check_fits comes first"
    # The raw numbers are fixed for good, while NumPy may change how it derives ranges from them. The bias
    # of the remainder is n_starts / 2^64.
    raw = np.random.Philox(key=np.array([seed, step], dtype=np.uint64)).random_raw(n)
    return (raw % np.uint64(n_starts)).astype(np.int64)


def get_batch(tokens: TokenFile, starts: np.ndarray, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs x and targets y = x one token later, both int64 (len(starts), block_size), on the CPU."""
    import torch

    rows = tokens.read_windows(starts, block_size + 1)
    if rows.size and int(rows.max()) > tokens.max_id:
        raise ValueError(
            f"{tokens.path}: damaged (token id {rows.max()}, above its header's largest, {tokens.max_id}); "
            "delete its folder and run train.py with the same --dataset"
        )
    both = torch.from_numpy(rows.astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def eval_windows(n_tokens: int, block_size: int, n_windows: int | None = None) -> np.ndarray:
    """Fixed starts that do not overlap, int64, for evaluation: the same ones each time.

    With n_windows: that many full windows, evenly spread. With None (or more than there are): the whole
    split, each of its n_tokens - 1 targets in exactly one window; the last window may be shorter than
    block_size (`eval_batches` takes care of it).
    """
    n_full = (n_tokens - 1) // block_size
    if n_windows is not None and n_windows <= n_full:
        return np.arange(n_windows, dtype=np.int64) * n_full // n_windows * block_size
    return np.arange(0, n_tokens - 1, block_size, dtype=np.int64)


def eval_batches(
    tokens: TokenFile, block_size: int, n_windows: int | None, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(x, y) for the windows of `eval_windows`, batch_size at a time; a short last window comes alone.

    Weigh each batch's mean loss by y.numel() to have the loss per token.
    """
    starts = eval_windows(tokens.n_tokens, block_size, n_windows)
    full = starts[starts + block_size < tokens.n_tokens]
    for i in range(0, len(full), batch_size):
        yield get_batch(tokens, full[i : i + batch_size], block_size)
    for start in starts[len(full) :]:
        yield get_batch(tokens, np.array([start]), tokens.n_tokens - 1 - int(start))


def check_fits(tokens: TokenFile, block_size: int, split: str) -> None:
    """ValueError when the split has no full window of block_size tokens and the target after each."""
    if tokens.n_tokens > block_size:
        return
    largest = tokens.n_tokens - 1
    fix = f"the largest block_size that fits is {largest}" if largest > 0 else "no block_size fits"
    raise ValueError(
        f"the {split} split has {tokens.n_tokens} tokens, too few for --block_size={block_size} (which needs "
        f"{block_size + 1}): {fix}; or give it more text"
    )


def pack_header(header: dict[str, Any], size: int | None = None) -> bytes:
    """Magic bytes, length and JSON, padded with blanks to a multiple of 64 bytes or to `size`."""
    text = json.dumps(header, sort_keys=True).encode("utf-8")
    start = len(MAGIC) + 4
    size = size or -(-(start + len(text)) // ALIGN) * ALIGN
    assert start + len(text) <= size
    if size - start > MAX_HEADER_BYTES:
        raise ValueError(f"header of {size} bytes is over the {MAX_HEADER_BYTES} a token file may have")
    return MAGIC + (size - start).to_bytes(4, "little") + text.ljust(size - start)


def write_tokens(
    path: Path, parts: Iterator[np.ndarray], vocab_size: int, about: dict[str, Any]
) -> dict[str, Any]:
    """Write a token file from arrays of ids and return its header.

    The dtype follows from the whole range of ids, the special one included: uint16 up to 65,536, else
    uint32.
    `about` holds the fields that are known beforehand. ValueError for an id outside the vocabulary.
    """
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    header = dict(about, version=VERSION, dtype=dtype, vocab_size=vocab_size, n_tokens=2**63, max_id=2**63)
    room = len(pack_header(header))  # the widest numbers first: the real ones fit too
    n_tokens, max_id = 0, 0
    with open(path, "wb") as file:
        file.write(bytes(room))
        for part in parts:
            if not len(part):
                continue
            if int(part.min()) < 0 or int(part.max()) >= vocab_size:
                raise ValueError(f"{path}: token id outside 0 .. {vocab_size - 1}")
            file.write(part.astype(DTYPES[dtype]).tobytes())
            n_tokens, max_id = n_tokens + len(part), max(max_id, int(part.max()))
        header.update(n_tokens=n_tokens, max_id=max_id)
        file.seek(0)
        file.write(pack_header(header, room))
        file.flush()
        os.fsync(file.fileno())  # before the rename that makes the file official
    return header
