"""The learning rate at its corners, and which optimizer holds which parameter."""

import itertools
import math

import pytest
import torch
from conftest import tiny_model, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from optim import has_fused_adamw, make_optimizers, schedule

KINDS = ("cosine", "linear")
every_kind = pytest.mark.parametrize("kind", KINDS)


def rates(n_steps: int, warmup: int, kind: str, floor: float = 0.1, **more: float) -> list[float]:
    """The share of the peak at each step of a run, and just after it."""
    return [
        schedule(step, n_steps=n_steps, warmup=warmup, kind=kind, floor=floor, **more)
        for step in range(n_steps + 1)
    ]


def optimizers_of(network, kind="adamw", **changes):
    options = {
        "learning_rate": 1e-3, "muon_lr": 0.02, "muon_momentum": 0.95, "weight_decay": 0.1,
        "betas": (0.9, 0.99)
    }
    return make_optimizers(network, kind, **{**options, **changes})


def groups_of(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


# --- schedule


@every_kind
def test_the_first_step_learns_and_the_last_of_warmup_is_the_peak_TRN_1(kind):
    found = rates(100, 10, kind)
    assert found[:10] == [n / 10 for n in range(1, 11)]
    assert found[9] == found[10] == 1.0 and max(found) == 1.0
    assert found[-1] == 0.1


def test_a_step_with_the_first_rate_changes_every_weight_TRN_1():
    network = tiny_model().train()
    before = [p.detach().clone() for p in network.parameters()]
    (optimizer,) = optimizers_of(network)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * rates(1000, 10, "cosine")[0]
    network(tokens(2, 16), tokens(2, 16, seed=1))[1].backward()
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("n_steps", "warmup", "expected"),
    [
        (5, 5, [0.2, 0.4, 0.6, 0.8, 1.0, 0.1]),  # nothing left to fall in
        (1, 0, [1.0, 0.1]),
        (1, 1, [1.0, 0.1]),
        (3, 6, [1 / 6, 2 / 6, 3 / 6, 4 / 6]),  # a run that ends while it still warms up
    ],
)
@every_kind
def test_corners_of_the_schedule_TRN_2(kind, n_steps, warmup, expected):
    assert rates(n_steps, warmup, kind) == pytest.approx(expected)


def test_shapes_between_the_corners():
    cosine = rates(100, 0, "cosine", floor=0.2)
    assert cosine[50] == pytest.approx(0.6)  # half way between 1 and the floor
    assert cosine[25] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5)))
    linear = rates(110, 10, "linear", floor=0.2, decay_share=0.5)
    assert linear[10:61] == [1.0] * 51 and linear[61] < 1.0
    assert linear[85] == pytest.approx(0.6) and linear[110] == 0.2
    assert rates(10, 0, "linear", decay_share=0.0) == [1.0] * 10 + [0.1]  # never falls while it learns


@given(
    n_steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    kind=st.sampled_from(KINDS),
    floor=st.floats(0, 1),
    decay_share=st.floats(0, 1),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_schedule_is_finite_in_bounds_and_falls_after_its_peak_TRN_2(
    n_steps, warmup, kind, floor, decay_share
):
    found = rates(n_steps, warmup, kind, floor, decay_share=decay_share)
    assert all(math.isfinite(x) and 0 <= x <= 1 for x in found)
    assert found[0] > 0 or floor == 0  # at once at the floor only where that is asked for
    if 0 < warmup <= n_steps:
        assert found[warmup - 1] == 1.0
        assert all(a < b for a, b in itertools.pairwise(found[:warmup]))
    if warmup < n_steps:
        assert found[warmup] == 1.0
    tail = found[max(0, warmup - 1) :]
    assert all(a >= b - 1e-15 for a, b in itertools.pairwise(tail))
    if warmup <= n_steps:
        assert found[-1] == floor


# --- groups


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_each_parameter_is_in_one_group_ATT_14(kind, tied, norm):
    network = tiny_model(tie_weights=tied, norm=norm)
    groups = groups_of(optimizers_of(network, kind))
    held = [id(p) for group in groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for p in network.parameters()}
    tables = {id(network.lm_head.weight), id(network.transformer["wte"].weight)}
    assert len(tables) == (1 if tied else 2) and all(held.count(table) == 1 for table in tables)
    n_params = sum(p.numel() for group in groups for p in group["params"])
    assert n_params == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("bias", [True, False])
def test_only_matrices_decay(kind, bias):
    groups = groups_of(optimizers_of(tiny_model(bias=bias), kind))
    assert all(group["params"] for group in groups)
    for group in groups:
        assert {p.dim() for p in group["params"]} in ({1}, {2})
        assert group["weight_decay"] == (0.1 if group["params"][0].dim() == 2 else 0.0)


@pytest.mark.parametrize("attention", ["mha", "mqa"])
def test_muon_has_the_matrices_of_the_blocks_and_nothing_else_ATT_14(attention):
    network = tiny_model(attention=attention, tie_weights=False)
    adamw, muon = optimizers_of(network, "muon")
    name = {id(p): name for name, p in network.named_parameters()}
    found = {name[id(p)] for group in muon.param_groups for p in group["params"]}
    assert isinstance(adamw, torch.optim.AdamW) and isinstance(muon, torch.optim.Muon)
    assert found == {
        f"transformer.h.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def test_each_group_knows_its_own_peak():
    adamw, muon = optimizers_of(tiny_model(), "muon", learning_rate=3e-4, muon_lr=0.05)
    assert {group["peak_lr"] for group in adamw.param_groups} == {3e-4}
    assert {group["peak_lr"] for group in muon.param_groups} == {0.05}
    assert all(group["lr"] == group["peak_lr"] for group in groups_of([adamw, muon]))
    assert all(group["betas"] == (0.9, 0.99) for group in adamw.param_groups)


# --- fused or not


def no_fused_kernel(*args: object, **options: object) -> None:
    raise RuntimeError("`fused=True` requires all the params to be Tensors of supported devices")


def test_fused_where_there_is_a_kernel_and_plain_elsewhere_TRN_10():
    assert has_fused_adamw(torch.device("cpu")) is True
    assert all(group["fused"] is True for group in groups_of(optimizers_of(tiny_model())))
    with torch.device("meta"):  # a device without such a kernel
        network = type(tiny_model())(tiny_model().config)
    assert has_fused_adamw(torch.device("meta")) is False
    assert not any(group["fused"] for group in groups_of(optimizers_of(network)))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_device_without_the_fused_kernel_learns_the_same_TRN_10(monkeypatch, kind):
    # PyTorch tells only in the first step, so the optimizer must still step and not merely be made
    fused, plain = tiny_model(), tiny_model()
    for network in (fused, plain):
        if network is plain:
            monkeypatch.setattr(torch, "_fused_adamw_", no_fused_kernel)
        optimizers = optimizers_of(network, kind)
        assert optimizers[0].param_groups[0]["fused"] is (True if network is fused else None)
        network(tokens(2, 16), tokens(2, 16, seed=1))[1].backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, p), q in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0, msg=name)
