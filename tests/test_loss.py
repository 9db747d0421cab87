"""The loss of a large vocabulary in pieces, and blocks computed again: the same numbers in less memory."""

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import model as gpt
from model import next_token_loss

V, C = 61, 16
PIECE = 8


@pytest.fixture
def small_pieces(monkeypatch):
    """A vocabulary counts as large from 61 words on, and 8 positions are a piece."""
    monkeypatch.setattr(gpt, "LARGE_VOCAB", V)
    monkeypatch.setattr(gpt, "LOSS_PIECE", PIECE)


def problem(n: int, vocab_size: int = V) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, C, generator=generator, requires_grad=True)
    weight = torch.randn(vocab_size, C, generator=generator, requires_grad=True)
    return x, weight, torch.randint(vocab_size, (n,), generator=generator)


def value_and_gradients(loss, x: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss, and its gradients when it is only a part (0.3) of what is minimised."""
    value = loss(x, weight, targets)
    return [value.detach(), *torch.autograd.grad(0.3 * value, (x, weight))]


def in_float64(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_p = (x.double() @ weight.double().T).log_softmax(dim=1)
    return -log_p.gather(1, targets[:, None]).mean()


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    pairs = zip(found, expected, strict=True)
    return all((a - b).norm() <= tolerance * b.norm() and b.norm() > 0 for a, b in pairs)


class LargestTensor(TorchDispatchMode):
    """The most numbers that any tensor made meanwhile has, forward and backward, and what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("n", [1, PIECE - 1, PIECE, PIECE + 1, 4 * PIECE, 5 * PIECE + 3])
@pytest.mark.parametrize("vocab_size", [V - 1, V, V + 20], ids=["small", "just large", "large"])
def test_the_loss_and_its_gradients_are_those_of_the_formula(small_pieces, n, vocab_size):
    inputs = problem(n, vocab_size)
    found, expected = (value_and_gradients(loss, *inputs) for loss in (next_token_loss, in_float64))
    assert [t.dtype for t in found] == [torch.float32] * 3 and found[0].shape == ()
    assert close(found, expected, 1e-6)


@pytest.mark.parametrize("n", [PIECE, 5 * PIECE + 3])
@pytest.mark.parametrize("vocab_size", [V - 1, V + 20], ids=["small", "large"])
def test_under_autocast_products_are_bfloat16_and_sums_are_not(small_pieces, n, vocab_size):
    x, weight, targets = problem(n, vocab_size)
    expected = value_and_gradients(in_float64, x, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = value_and_gradients(next_token_loss, x, weight, targets)
    assert found[0].dtype == torch.float32
    assert [t.dtype for t in found[1:]] == [torch.float32] * 2
    assert close(found, expected, 0.01) and not close(found, expected, 1e-5)
    # activations that come in 16 bits, as from a block without a norm behind it
    with torch.autocast("cpu", torch.bfloat16):
        half = next_token_loss(x.detach().bfloat16(), weight, targets)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(expected[0].item(), rel=0.01)


def test_pieces_of_bfloat16_weights_sum_in_float32(small_pieces):
    # 4,000 equal losses of 4.1: sums in bfloat16 would stop growing at 1,024
    x, weight = torch.zeros(4000, C, dtype=torch.bfloat16), torch.ones(V, C, dtype=torch.bfloat16)
    found = next_token_loss(x, weight, torch.zeros(4000, dtype=torch.int64))
    assert found.item() == pytest.approx(torch.tensor(float(V)).log().item(), rel=1e-5)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16], ids=str)
def test_without_gradients_the_value_is_the_same(small_pieces, off, products):
    x, weight, targets = problem(5 * PIECE + 3)
    with torch.autocast("cpu", torch.bfloat16, enabled=products == torch.bfloat16):
        expected = next_token_loss(x, weight, targets)
        with off():
            found = next_token_loss(x, weight, targets)
    assert not found.requires_grad and found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("learns", [True, False], ids=["training", "evaluation"])
def test_the_logits_are_never_all_there(small_pieces, monkeypatch, products, learns):
    n = 16 * PIECE  # 128 positions x 61 words; weights of 61 x 16 and activations of 128 x 16 are smaller
    x, weight, targets = problem(n)

    def largest() -> int:
        with LargestTensor() as seen, torch.autocast("cpu", products, enabled=products != torch.float32):
            with torch.set_grad_enabled(learns):
                loss = next_token_loss(x, weight, targets)
            if learns:
                loss.backward()
        return seen.numel

    assert largest() <= max(n * C, 2 * PIECE * V) < n * V / 3
    monkeypatch.setattr(gpt, "LARGE_VOCAB", V + 1)
    assert largest() == n * V  # the yardstick sees them where they are


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """`nbytes`, once it has ended: of what is kept for backward, those tensors left out."""

    def __init__(self, but: Iterable[Tensor] = ()) -> None:
        held, found = {t.untyped_storage().data_ptr() for t in but}, {}

        def pack(t: Tensor) -> Tensor:
            if (at := t.untyped_storage().data_ptr()) not in held:
                found[at] = t.untyped_storage().nbytes()
            return t

        super().__init__(pack, lambda t: t)
        self.found = found

    def __enter__(self) -> "Kept":
        super().__enter__()
        return self

    @property
    def nbytes(self) -> int:
        return sum(self.found.values())


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16], ids=str)
def test_the_logits_are_not_kept_for_backward(small_pieces, monkeypatch, products):
    n = 16 * PIECE
    x, weight, targets = problem(n)
    with torch.autocast("cpu", products, enabled=products != torch.float32):
        with Kept([x, weight]) as kept:
            loss = next_token_loss(x, weight, targets)
        monkeypatch.setattr(gpt, "LARGE_VOCAB", V + 1)
        with Kept([x, weight]) as plain:
            whole = next_token_loss(x, weight, targets)
    assert kept.nbytes <= 4 * (n + V) * C + 8 * n < 2 * n * V <= plain.nbytes  # gradients and targets at most
    assert loss.item() == pytest.approx(whole.item(), rel=1e-3)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16], ids=str)
def test_a_network_learns_the_same_in_pieces_ATT_14(small_pieces, monkeypatch, tied, products):
    idx, targets = tokens(3, 13), tokens(3, 13, seed=1)
    found = []
    for large in (V, V + 1):
        monkeypatch.setattr(gpt, "LARGE_VOCAB", large)
        network = tiny_model(tie_weights=tied).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=products == torch.bfloat16):
            loss = network(idx, targets, logits_for="none")[1]
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in network.parameters())])
    rounding = 2e-6 if products == torch.float32 else 0.02
    # a bias of the keys has no gradient but rounding
    pairs = [(a, b) for a, b in zip(*found, strict=True) if b.norm() > 1e-4]
    assert len(pairs) > 20 and close([a for a, _ in pairs], [b for _, b in pairs], rounding)


def test_a_tied_table_gets_the_gradient_of_both_its_uses_ATT_14(small_pieces):
    idx, targets = tokens(3, 13), tokens(3, 13, seed=1)
    tied, untied = tiny_model(tie_weights=True).train(), tiny_model(tie_weights=False).train()
    with torch.no_grad():
        untied.load_state_dict(tied.state_dict())
    for network in (tied, untied):
        network(idx, targets, logits_for="none")[1].backward()
    embedding, output = untied.transformer["wte"].weight.grad, untied.lm_head.weight.grad
    assert min(embedding.norm(), output.norm()) > 0.1
    torch.testing.assert_close(tied.lm_head.weight.grad, embedding + output, rtol=1e-5, atol=1e-7)


def test_a_vocabulary_of_real_size_takes_the_way_in_pieces(monkeypatch):
    calls, plain = [], F.linear_cross_entropy

    def recorded(x, weight, targets, options):
        calls.append(options.batch_chunk_size)
        return plain(x, weight, targets, options=options)

    monkeypatch.setattr(F, "linear_cross_entropy", recorded)
    assert gpt.LARGE_VOCAB <= 50_257  # GPT-2's
    x, weight, targets = problem(gpt.LOSS_PIECE + 5, gpt.LARGE_VOCAB)
    with LargestTensor() as seen:
        found = value_and_gradients(next_token_loss, x, weight, targets)
    assert calls == [gpt.LOSS_PIECE] and seen.numel < len(x) * len(weight)
    assert close(found, value_and_gradients(in_float64, x, weight, targets), 2e-6)
    next_token_loss(*problem(5, gpt.LARGE_VOCAB - 1))
    assert len(calls) == 1


# --- activations computed again


def step_of(recompute: bool, **changes) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss and gradients of one step, and the bytes of what is kept for backward (parameters left out)."""
    network = tiny_model(**{"n_layer": 4, **changes}).train()
    network.recompute = recompute
    torch.manual_seed(0)  # dropout
    with Kept(network.parameters()) as kept:
        loss = network(tokens(4, 32), tokens(4, 32, seed=1), logits_for="none")[1]
    torch.manual_seed(5)  # what is drawn in between must not matter
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in network.named_parameters()}, kept.nbytes


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "shape", [{}, {"norm": "pre", "position": "rope", "qk_norm": True, "attention": "mqa"}],
    ids=["post", "pre-rope-mqa"],
)
def test_recompute_gives_the_same_step_in_less_memory(shape, dropout):
    (loss, gradients, n_bytes), (again, others, fewer) = (
        step_of(recompute, dropout=dropout, **shape) for recompute in (False, True)
    )
    assert torch.equal(loss, again) and gradients.keys() == others.keys()
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert fewer < n_bytes / 3


def test_recompute_leaves_evaluation_and_caches_alone(monkeypatch):
    def never(*args, **options):
        raise AssertionError("computed again")

    network = tiny_model()
    expected = network(tokens(2, 8))[0]
    network.recompute = True
    monkeypatch.setattr(gpt, "checkpoint", never)
    assert torch.equal(network(tokens(2, 8))[0], expected)
    # a block run twice would write twice into the cache, the second time behind the end
    cache = gpt.KVCache(network.config, 2, 8)
    network.train()
    assert torch.allclose(network(tokens(2, 8), cache=cache)[0], expected, atol=1e-5) and cache.length == 8
    with pytest.raises(AssertionError, match="computed again"):
        network(tokens(2, 8))
