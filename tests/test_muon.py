"""Muon in stacks of one shape: the same updates as PyTorch's own, matrix by matrix."""

import copy

import pytest
import torch
from conftest import KINDS, tiny_model, tokens
from torch.optim._muon import _zeropower_via_newtonschulz

from optim import StackedMuon, make_optimizers, orthogonalize

MIXED = [(8, 24), (8, 24), (8, 24), (8, 8), (16, 16), (24, 8), (16, 16), (40, 8)]  # wide, square, tall
OPTIONS = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.2}
BF16 = 2**-8  # a step of bfloat16; a stack may add up in another order than a single product


def matrices(shapes: list[tuple[int, int]], seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    """Gradients that depend on the step alone, of very different sizes."""
    generator = torch.Generator().manual_seed(100 + step)
    for n, p in enumerate(parameters):
        p.grad = 10.0 ** (n % 5 - 3) * torch.randn(p.shape, generator=generator)


def same(found: torch.Tensor, expected: torch.Tensor, start: torch.Tensor, n_steps: int) -> bool:
    """Whether two weights have moved alike from the same start, to the rounding of bfloat16 per step."""
    moved = (expected - start).norm()
    return moved > 0.1 and (found - expected).norm() < 4 * BF16 * n_steps**0.5 * moved


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0}, {"momentum": 0.0}, {"lr": 0.3}], ids=str)
def test_a_stack_moves_each_matrix_as_pytorch_does(changes):
    ours, theirs, start = matrices(MIXED), matrices(MIXED), matrices(MIXED)
    stacked = StackedMuon([{"params": ours, "parts": None}], **{**OPTIONS, **changes})
    plain = torch.optim.Muon(theirs, **{**OPTIONS, **changes})
    for step in range(6):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        stacked.step()
        plain.step()
    for p, q, r in zip(ours, theirs, start, strict=True):
        assert same(p, q, r, 6), p.shape
        momentum, expected = stacked.state[p]["momentum_buffer"], plain.state[q]["momentum_buffer"]
        assert torch.equal(momentum, expected)


def test_parts_are_orthogonalised_each_by_itself():
    # queries of 4 heads, keys and values of 2, and a parameter of the same width that is whole
    parts, width = (16, 8, 8), 16
    joined, whole = matrices([(32, width)] * 2), matrices([(16, width)], seed=1)
    start = [piece for p in matrices([(32, width)] * 2) for piece in p.detach().split(parts)]
    pieces = [torch.nn.Parameter(piece.clone()) for piece in start]
    alone = matrices([(16, width)], seed=1)
    groups = [{"params": joined, "parts": parts}, {"params": whole}]  # a group without parts has whole ones
    stacked, plain = StackedMuon(groups, **OPTIONS), torch.optim.Muon(pieces + alone, **OPTIONS)
    for step in range(4):
        give_gradients(joined + whole, step)
        gradients = [piece for p in joined for piece in p.grad.split(parts)] + [whole[0].grad]
        for p, gradient in zip(pieces + alone, gradients, strict=True):
            p.grad = gradient.clone()
        stacked.step()
        plain.step()
    found = [piece for p in joined for piece in p.detach().split(parts)]
    for piece, expected, begin in zip(found, pieces, start, strict=True):
        assert same(piece, expected.detach(), begin, 4)
    assert same(whole[0].detach(), alone[0].detach(), matrices([(16, width)], seed=1)[0].detach(), 4)
    # and not what the joined matrix as a whole would have got
    (one,), (other,) = matrices([(32, width)]), matrices([(32, width)])
    for p, more in ((one, {"parts": parts}), (other, {})):
        give_gradients([p], 0)
        StackedMuon([{"params": [p], **more}], **OPTIONS).step()
    assert not same(one.detach(), other.detach(), matrices([(32, width)])[0].detach(), 1)


@pytest.mark.parametrize("shape", [(1, 64, 16), (5, 16, 64), (3, 32, 32), (2, 1, 8), (2, 8, 1)], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_singular_values_end_near_one_whatever_the_size(shape, size):
    generator = torch.Generator().manual_seed(0)
    n, height, width = shape
    short = min(height, width)
    # known singular values between 0.2 and 1 of the largest, in random directions
    u = torch.linalg.qr(torch.randn(n, height, short, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(n, width, short, generator=generator))[0]
    x = size * (u * torch.linspace(0.2, 1.0, short)) @ v.mT
    y = orthogonalize(x).float()
    values = torch.linalg.svdvals(y)
    assert y.shape == x.shape and values.min() > 0.6 and values.max() < 1.3
    # the directions stay: u and v turn the result into a matrix that is nearly diagonal
    core = u.mT @ y @ v
    assert (core - torch.diag_embed(core.diagonal(dim1=1, dim2=2))).norm() < 0.1 * core.norm()


def test_one_matrix_of_a_stack_does_not_see_the_others():
    x = torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1e-3, 1.0, 1e3, 0.0]
    ).view(4, 1, 1)
    stack = orthogonalize(x)
    assert stack.dtype == torch.bfloat16
    for matrix, result in zip(x[:3], stack, strict=False):
        expected = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
        assert (result.float() - expected).norm() < 3 * BF16 * expected.norm()
    assert torch.equal(stack[3], torch.zeros(16, 24, dtype=torch.bfloat16))  # no gradient, no update, no NaN


def test_a_matrix_without_a_gradient_stays_as_it_is():
    ours = matrices(MIXED)
    before = [p.detach().clone() for p in ours]
    muon = StackedMuon([{"params": ours, "parts": None}], **OPTIONS)
    give_gradients(ours, 0)
    ours[1].grad = ours[3].grad = None
    muon.step()
    still = [torch.equal(p, q) for p, q in zip(ours, before, strict=True)]
    assert still == [n in (1, 3) for n in range(len(MIXED))]
    assert ours[1] not in muon.state and ours[0] in muon.state


def test_a_saved_state_goes_on_as_if_nothing_had_happened():
    ours, again = matrices(MIXED), matrices(MIXED, seed=7)
    muon = StackedMuon([{"params": ours[:4], "parts": (4, 4)}, {"params": ours[4:]}], **OPTIONS)
    for step in range(3):
        give_gradients(ours, step)
        muon.step()
    with torch.no_grad():
        for p, q in zip(again, ours, strict=True):
            p.copy_(q)
    twin = StackedMuon([{"params": again[:4]}, {"params": again[4:]}], lr=9.0, momentum=0.1)
    twin.load_state_dict(copy.deepcopy(muon.state_dict()))  # as a file would hold it
    for step in range(3, 6):
        for parameters, optimizer in ((ours, muon), (again, twin)):
            give_gradients(parameters, step)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, again, strict=True))


# --- in a network


def muon_of(network, **changes):
    options = {
        "learning_rate": 1e-3, "muon_lr": 0.02, "muon_momentum": 0.8, "weight_decay": 0.1,
        "betas": (0.9, 0.99)
    }
    return make_optimizers(network, "muon", **{**options, **changes})


@pytest.mark.parametrize("attention", KINDS)
def test_parts_are_the_queries_keys_and_values_of_a_network(attention):
    network = tiny_model(attention=attention, n_layer=3)
    _, muon = muon_of(network)
    joined, others = muon.param_groups
    n_kv = {"mha": 4, "gqa": 2, "mqa": 1}[attention]
    assert joined["parts"] == (32, 8 * n_kv, 8 * n_kv) and others["parts"] is None
    assert [id(p) for p in joined["params"]] == [
        id(block.attn.c_attn.weight) for block in network.transformer["h"]
    ]
    assert all(len(p) == sum(joined["parts"]) for p in joined["params"]) and len(others["params"]) == 9
    for group in (joined, others):
        assert (group["lr"], group["peak_lr"], group["momentum"]) == (0.02, 0.02, 0.8)


@pytest.mark.parametrize("attention", KINDS)
def test_a_network_learns_as_with_pytorchs_muon_on_the_pieces(attention):
    # the reference: queries, keys and values as parameters of their own, written into c_attn before each pass
    network, reference = tiny_model(attention=attention).train(), tiny_model(attention=attention).train()
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    adamw, muon = muon_of(network, weight_decay=0.0)
    parts = muon.param_groups[0]["parts"]
    joined = [block.attn.c_attn.weight for block in reference.transformer["h"]]
    pieces = [torch.nn.Parameter(piece.clone()) for p in joined for piece in p.detach().split(parts)]
    shape = joined[0].shape  # no other matrix has it
    whole = [p for p in reference.transformer["h"].parameters() if p.dim() == 2 and p.shape != shape]
    plain = torch.optim.Muon(pieces + whole, lr=0.02, momentum=0.8, weight_decay=0.0)
    held = {id(p) for p in joined + whole}
    rest = torch.optim.AdamW(
        [p for p in reference.parameters() if id(p) not in held], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0
    )
    for step in range(2):
        for model in (network, reference):
            model.zero_grad(set_to_none=True)
            model(tokens(4, 16, seed=step), tokens(4, 16, seed=step + 9))[1].backward()
        gradients = [piece for p in joined for piece in p.grad.split(parts)]
        for piece, gradient in zip(pieces, gradients, strict=True):
            piece.grad = gradient.clone()
        for optimizer in (adamw, muon, plain, rest):
            optimizer.step()
        with torch.no_grad():
            for p, n in zip(joined, range(0, len(pieces), 3), strict=True):
                p.copy_(torch.cat(pieces[n : n + 3]))
    found, expected = (
        torch.cat([(p - start[name]).flatten() for name, p in model.named_parameters() if p.dim() == 2])
        for model in (network, reference)
    )
    assert (found - expected).norm() < 0.05 * expected.norm()
