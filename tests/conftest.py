"""What the tests share: where to import from, a tiny model with weights that tell, a place to train in."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that a bare `pytest` finds the modules too
torch.set_num_threads(1)  # tiny products only: handing them to a second thread takes longer than doing them

from model import GPT, GPTConfig, KVCache  # noqa: E402

KINDS = ("mha", "gqa", "mqa")
NORMS = ("post", "pre")
POSITIONS = ("learned", "rope")
SHAPES = [
    {"attention": a, "norm": n, "position": p} for a, n, p in itertools.product(KINDS, NORMS, POSITIONS)
]
SHAPES_QK = SHAPES + [{"attention": "gqa", "norm": "post", "position": "rope", "qk_norm": True}]


def shape_id(changes: dict) -> str:
    """A short name for a parametrised test."""
    return "-".join(name if value is True else str(value) for name, value in changes.items())


def tiny_config(**changes) -> GPTConfig:
    """2 layers, 4 heads, width 32, context 32, 61 words."""
    return GPTConfig(
        **{"vocab_size": 61, "block_size": 32, "n_layer": 2, "n_head": 4, "n_embd": 32, **changes}
    )


def tiny_model(seed: int = 0, **changes) -> GPT:
    """A tiny model in eval mode whose weights are all drawn anew and large.

    At the usual start every head looks at all tokens alike and every bias is 0, which would hide many faults.
    """
    generator = torch.Generator().manual_seed(seed)
    model = GPT(tiny_config(**changes), generator).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            center = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
            p.copy_(center + 0.25 * torch.randn(p.shape, generator=generator))
    return model


def tokens(*shape: int, seed: int = 0, vocab_size: int = 61) -> Tensor:
    """Random ids of the given shape."""
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def in_chunks(model: GPT, idx: Tensor, chunks: list[int], cache: KVCache | None = None) -> Tensor:
    """The logits (B, T, V) of `idx` (B, T), fed through a cache in pieces of the given lengths."""
    assert sum(chunks) == idx.shape[1]
    if cache is None:
        cache = KVCache(model.config, idx.shape[0], idx.shape[1], model.lm_head.weight.dtype)
    return torch.cat([model(piece, cache=cache)[0] for piece in idx.split(chunks, dim=1)], dim=1)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty working folder with the text of tiny_run.py in it; one thread; no peak is measured."""
    from tiny_run import TEXT

    import train

    monkeypatch.setattr(train, "peak_flops", lambda *args: (1e12, "measured matrix product"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.fixture
def refused(work, monkeypatch, capsys):
    """Run train.py with a mistake in it; the one line on stderr. Nothing may be left behind."""
    import config
    import train

    def run(*argv: str, leaves: tuple[str, ...] = ()) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        with pytest.raises(SystemExit) as caught:
            config.run_main(train.main, "train.py")
        assert caught.value.code == 1
        error = capsys.readouterr().err
        assert error.startswith("train.py: error: ") and error.count("\n") == 1 and error.endswith("\n")
        left = [p.name for p in work.rglob("*") if p.name != ".lock"]
        found = {name for name in left if name in ("out", "run") or name.startswith(".")} - {".lock"}
        assert found == set(leaves)
        return error

    return run
