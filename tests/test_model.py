"""The model: what its config refuses, what forward gives back, who sees whom, and what it costs."""

import re

import pytest
import torch
from conftest import KINDS, NORMS, SHAPES, SHAPES_QK, shape_id, tiny_config, tiny_model, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as gpt
from model import GPT, Attention, GPTConfig, KVCache, attend, rope_tables, rotate

every_shape = pytest.mark.parametrize("shape", SHAPES_QK, ids=shape_id)


# --- config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention": "mqa", "n_kv_head": 2}, ["mqa", "n_kv_head=1", "n_kv_head=2"]),
        ({"attention": "mha", "n_kv_head": 2}, ["mha", "n_kv_head=4", "n_kv_head=2"]),
        (
            {"attention": "gqa", "n_head": 6, "n_kv_head": 4, "n_embd": 48},
            ["n_head=6", "n_kv_head=4", "1, 2, 3, 6"],
        ),
        ({"attention": "gqa", "n_kv_head": 8}, ["n_head=4", "n_kv_head=8"]),
        ({"attention": "gqa", "n_kv_head": 0}, ["n_head=4", "n_kv_head=0"]),
        ({"attention": "gqa", "n_kv_head": -2}, ["n_head=4", "n_kv_head=-2"]),
        ({"n_embd": 30}, ["n_embd=30", "n_head=4"]),
        ({"attention": "xyz"}, ["attention='xyz'", "mha, gqa, mqa"]),
        ({"norm": "rms"}, ["norm='rms'", "post, pre"]),
        ({"position": "alibi"}, ["position='alibi'", "learned, rope"]),
        ({"position": "rope", "n_embd": 36}, ["n_embd=36", "n_head=4", "9 is odd"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"dropout": -0.1}, ["dropout=-0.1"]),
        ({"dropout": float("nan")}, ["dropout=nan"]),
        ({"vocab_size": 0}, ["vocab_size=0"]),
        *(
            ({name: wrong}, [f"{name}={wrong}"])
            for name in ("n_layer", "n_head", "n_embd", "block_size")
            for wrong in (0, -1)
        ),
    ],
)
def test_contradictions_are_refused_and_named_ATT_8(changes, named):
    with pytest.raises(ValueError) as error:
        tiny_config(**changes)
    message = str(error.value)
    assert "\n" not in message and all(words in message for words in named), message


def test_mqa_has_one_kv_head_and_mha_all_ATT_8():
    assert tiny_config(attention="mqa").n_kv_head == tiny_config(attention="mqa", n_kv_head=1).n_kv_head == 1
    assert tiny_config(attention="mha").n_kv_head == tiny_config(attention="mha", n_kv_head=4).n_kv_head == 4


@pytest.mark.parametrize(
    ("n_head", "groups"),
    [(1, 1), (2, 2), (3, 3), (4, 2), (6, 3), (7, 7), (8, 4), (9, 3), (12, 4), (16, 4), (32, 8), (64, 8)],
)
def test_default_groups_are_the_smallest_divisor_from_the_square_root_on(n_head, groups):
    assert GPTConfig(n_head=n_head, n_embd=2 * n_head, attention="gqa").n_kv_head == groups


def test_a_model_needs_a_vocabulary():
    with pytest.raises(ValueError, match="vocab_size is not set"):
        GPT(GPTConfig())


# --- what forward gives back


@every_shape
def test_forward_rule(shape):
    model, idx, targets = tiny_model(**shape), tokens(3, 10), tokens(3, 10, seed=1)
    with torch.no_grad():
        every, loss = model(idx)
        assert every.shape == (3, 10, 61) and loss is None
        last, loss = model(idx, logits_for="last")
        assert last.shape == (3, 1, 61) and loss is None
        torch.testing.assert_close(last, every[:, -1:], atol=1e-5, rtol=0)
        assert model(idx, logits_for="none") == (None, None)

        by_hand = F.nll_loss(every.log_softmax(-1).flatten(0, 1), targets.flatten())
        for logits_for, n in (("all", 10), ("last", 1), ("none", 0)):
            logits, loss = model(idx, targets, logits_for=logits_for)
            assert (logits is None) if n == 0 else logits.shape == (3, n, 61)
            assert loss.shape == () and loss.dtype == torch.float32
            torch.testing.assert_close(loss, by_hand, atol=1e-5, rtol=0)


def test_only_the_last_position_goes_through_the_output_layer_PRF_10():
    model, seen = tiny_model(), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    model(tokens(1, 20), logits_for="last")
    assert seen == [1]


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_past_the_context_is_refused(position):
    model = tiny_model(position=position)
    assert model(tokens(1, 32))[0].shape == (1, 32, 61)
    with pytest.raises(ValueError, match=r"0 cached \+ 33 new .*block_size=32"):
        model(tokens(1, 33))
    cache = KVCache(model.config, 1, 40)
    model(tokens(1, 30), cache=cache)
    with pytest.raises(ValueError, match=r"30 cached \+ 3 new .*block_size=32"):
        model(tokens(1, 3), cache=cache)
    assert cache.length == 30 and model(tokens(1, 2), cache=cache)[0].shape == (1, 2, 61)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_the_start_loss_is_that_of_a_guess(shape):
    model = GPT(tiny_config(**shape), torch.Generator().manual_seed(0))
    loss = model(tokens(8, 32), tokens(8, 32, seed=1))[1]
    assert loss.item() == pytest.approx(4.11, abs=0.1)  # ln 61


# --- who sees whom


@every_shape
def test_a_later_token_never_changes_earlier_logits(shape):
    model, idx = tiny_model(**shape), tokens(1, 16)
    with torch.no_grad():
        before = model(idx)[0][0]
        for t in (1, 7, 15):
            changed = idx.clone()
            changed[0, t] = (idx[0, t] + 1) % 61
            after = model(changed)[0][0]
            assert torch.equal(after[:t], before[:t])
            assert ((after[t:] - before[t:]).abs().amax(dim=-1) > 1e-4).all()  # and it does change all others


@every_shape
def test_gradients_reach_back_and_never_ahead(shape):
    model, T = tiny_model(**shape), 8
    wte, idx = model.transformer["wte"], tokens(1, 8)
    x = wte(idx).detach().requires_grad_()
    hook = wte.register_forward_hook(lambda module, args, out: x)
    logits = model(idx)[0]
    hook.remove()
    reach = torch.stack(
        [
            torch.autograd.grad(logits[0, t].square().sum(), x, retain_graph=True)[0][0].abs().sum(-1)
            for t in range(T)
        ]
    )  # (from, to)
    assert torch.all(reach.triu(1) == 0) and torch.all(reach[torch.ones(T, T).tril().bool()] > 0)


@every_shape
def test_rows_of_a_batch_do_not_meet(shape):
    model, idx = tiny_model(**shape), tokens(3, 12)
    with torch.no_grad():
        together = model(idx)[0]
        for row in range(3):
            torch.testing.assert_close(
                together[row : row + 1], model(idx[row : row + 1])[0], atol=1e-5, rtol=0
            )


# --- positions


def test_rotary_scores_depend_on_the_distance_alone():
    c = tiny_config(position="rope", n_embd=64)
    cos, sin = (table.unsqueeze(-2) for table in rope_tables(c))
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(at_q: int, at_k: int) -> float:
        return (
            (
                rotate(q, cos[at_q : at_q + 1], sin[at_q : at_q + 1])
                * rotate(k, cos[at_k : at_k + 1], sin[at_k : at_k + 1])
            )
            .sum()
            .item()
        )

    assert score(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-5)  # no turn, or the same one
    for distance in (0, 1, 5, 20):
        assert score(distance, 0) == pytest.approx(score(distance + 11, 11), abs=1e-4)
    assert abs(score(5, 0) - score(0, 5)) > 1e-2 and abs(score(5, 0) - score(6, 0)) > 1e-2


def test_rotary_angles_by_hand():
    cos, sin = rope_tables(tiny_config(position="rope"))
    assert cos.shape == sin.shape == (32, 4)
    for pair in range(4):  # head of 8: wavelengths 10000^(0, 1/4, 1/2, 3/4)
        angle = torch.tensor(7.0 / 10_000 ** (pair / 4))
        torch.testing.assert_close(
            torch.stack((cos[7, pair], sin[7, pair])), torch.stack((angle.cos(), angle.sin()))
        )


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_order_matters(position):
    model = tiny_model(position=position, n_layer=1)
    with torch.no_grad():
        ab, ba = (model(torch.tensor([[*pair, 5]]), logits_for="last")[0] for pair in ((1, 2), (2, 1)))
    assert (ab - ba).abs().max() > 1e-2


def test_rope_stands_in_for_the_position_table():
    model = tiny_model(position="rope")
    assert "wpe" not in model.transformer and not any("rope" in name for name in model.state_dict())


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_qk_norm_gives_queries_and_keys_unit_rms(position, monkeypatch):
    seen = {}

    def spy(q, k, v, mask=None, dropout=0.0):
        seen.update(q=q, k=k, v=v)
        return attend(q, k, v, mask, dropout)

    monkeypatch.setattr(gpt, "attend", spy)
    model = tiny_model(position=position, attention="gqa", qk_norm=True)
    model(tokens(2, 9))
    for name in "qk":
        torch.testing.assert_close(
            seen[name].square().mean(-1), torch.ones(seen[name].shape[:-1]), atol=1e-3, rtol=0
        )
    assert (seen["v"].square().mean(-1) - 1).abs().max() > 0.1


# --- norms


@pytest.mark.parametrize(("norm", "n_norms"), [("post", 4), ("pre", 5)])
def test_the_final_norm_belongs_to_pre_norm(norm, n_norms):
    model = tiny_model(norm=norm)
    assert ("ln_f" in model.transformer) == (norm == "pre")
    assert sum(isinstance(m, torch.nn.LayerNorm) for m in model.modules()) == n_norms


@pytest.mark.parametrize("norm", NORMS)
def test_block_by_its_formula(norm):
    block = tiny_model(norm=norm).transformer["h"][0]
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))

    def attention(x):
        return block.attn(x, None, None, None)

    if norm == "post":
        y = block.ln_1(x + attention(x))
        y = block.ln_2(y + block.mlp(y))
    else:
        y = x + attention(block.ln_1(x))
        y = y + block.mlp(block.ln_2(y))
    torch.testing.assert_close(block(x, None, None, None), y)
    torch.testing.assert_close(block.mlp(x), block.mlp.c_proj(F.gelu(block.mlp.c_fc(x))))


# --- dropout


@pytest.mark.parametrize("attention", KINDS)
def test_dropout_is_off_in_eval_mode_on_every_path_ATT_4(attention):
    model, idx = tiny_model(dropout=0.5, attention=attention), tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(idx)[0], model(idx)[0])
        runs = []
        for _ in range(2):
            cache = KVCache(model.config, 2, 9)
            runs.append(
                torch.cat([model(piece, cache=cache)[0] for piece in idx.split([5, 1, 3], dim=1)], dim=1)
            )
        assert torch.equal(*runs)
        torch.testing.assert_close(runs[0], tiny_model(attention=attention)(idx)[0], atol=1e-4, rtol=0)


def test_dropout_comes_back_after_eval_ATT_5():
    model, idx = tiny_model(dropout=0.5), tokens(4, 32)
    zeros = []
    model.transformer["drop"].register_forward_hook(
        lambda m, args, out: zeros.append((out == 0).float().mean().item())
    )
    torch.manual_seed(0)
    with torch.no_grad():
        first = model.train()(idx)[0]
        still = model.eval()(idx)[0]
        third = model.train()(idx)[0]
        fourth = model(idx)[0]
    assert zeros[1] == 0 and all(share == pytest.approx(0.5, abs=0.05) for share in (zeros[0], *zeros[2:]))
    assert not torch.equal(third, fourth) and not torch.equal(third, first) and not torch.equal(third, still)


def test_dropout_of_attention_weights_is_on_in_training_alone():
    layer = Attention(tiny_config(dropout=0.5), 0)
    layer.resid_dropout.p = 0.0
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    assert not torch.equal(layer(x, None, None, None), layer(x, None, None, None))
    layer.eval()
    assert torch.equal(layer(x, None, None, None), layer(x, None, None, None))


# --- weights


def one_table(model: GPT) -> bool:
    return model.lm_head.weight is model.transformer["wte"].weight


@pytest.mark.parametrize("tie_weights", [True, False])
def test_tied_tables_are_one_ATT_14(tie_weights):
    model = tiny_model(tie_weights=tie_weights)
    assert one_table(model) == tie_weights
    assert one_table(model.to("cpu")) == tie_weights and one_table(model.to(torch.bfloat16)) == tie_weights
    model = model.float()
    assert one_table(torch.compile(model, backend="eager")._orig_mod) == tie_weights
    twin = GPT(tiny_config(tie_weights=tie_weights))
    twin.load_state_dict(model.state_dict())
    assert one_table(twin) == tie_weights and torch.equal(twin.lm_head.weight, model.lm_head.weight)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names)) and ("lm_head.weight" in names) != tie_weights


def test_tied_table_learns_from_both_ends_ATT_14():
    model = tiny_model()
    model(tokens(1, 4) * 0, torch.full((1, 4), 3))[1].backward()
    grad = model.transformer["wte"].weight.grad
    assert grad[0].abs().sum() > 0 and grad[3].abs().sum() > 0 and model.lm_head.weight.grad is grad


@every_shape
def test_initial_weights_depend_on_the_generator_alone(shape):
    def made(seed: int, global_seed: int) -> dict:
        torch.manual_seed(global_seed)
        return GPT(tiny_config(**shape), torch.Generator().manual_seed(seed)).state_dict()

    first, again, other = made(1, 1), made(1, 2), made(2, 1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].dim() == 2)


def test_initial_weights_are_gpt2s():
    model = GPT(
        tiny_config(n_embd=128, n_layer=8, vocab_size=500, norm="pre"), torch.Generator().manual_seed(0)
    )
    for name, p in model.named_parameters():
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(
                0.005 if name.endswith("c_proj.weight") else 0.02, rel=0.05
            ), name
        else:
            assert torch.all(p == (1 if ".ln_" in name and name.endswith("weight") else 0)), name


def test_names_are_gpt2s():
    names = {re.sub(r"\.h\.\d+\.", ".h.#.", name) for name in tiny_model(norm="pre").state_dict()}
    layers = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert names == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
        *(f"transformer.h.#.{layer}.{p}" for layer in layers for p in ("weight", "bias")),
    }


def test_no_biases_where_none_are_wanted():
    assert not [
        name for name, _ in tiny_model(bias=False, norm="pre").named_parameters() if name.endswith("bias")
    ]


# --- number formats


@every_shape
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_forward_loss_and_backward_on_a_cpu_ATT_16(shape, how):
    model, idx, targets = tiny_model(**shape), tokens(2, 12), tokens(2, 12, seed=1)
    with torch.no_grad():
        expected = model(idx, targets)[1]
    model.to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        logits, loss = model(idx, targets)
    loss.backward()
    assert (
        logits.dtype == (torch.float32 if how == "float32" else torch.bfloat16)
        and loss.dtype == torch.float32
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6 if how == "float32" else 0.05)
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.dtype == p.dtype and torch.isfinite(p.grad).all(), name


def test_rotation_keeps_the_number_format_ATT_16():
    cos, sin = (table.unsqueeze(-2) for table in rope_tables(tiny_config(position="rope")))
    x = torch.randn(1, 32, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert rotate(x, cos, sin).dtype == torch.bfloat16


def test_every_kind_learns():
    # a few steps on one batch: an attention that blocks the gradient or mixes up heads can't learn to copy
    idx = tokens(4, 16).repeat(1, 2)
    for attention in KINDS:
        model = GPT(tiny_config(attention=attention, position="rope"), torch.Generator().manual_seed(0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(idx[:, :-1], idx[:, 1:])[1]
            loss.backward()
            optimizer.step()
        assert loss.item() < 1.5, attention


# --- what it costs


@st.composite
def configs(draw) -> GPTConfig:
    """Any small config that is allowed."""
    n_head = draw(st.integers(1, 6))
    attention = draw(st.sampled_from(KINDS))
    divisors = [n for n in range(1, n_head + 1) if n_head % n == 0]
    flags = {name: draw(st.booleans()) for name in ("bias", "tie_weights", "qk_norm")}
    return GPTConfig(
        vocab_size=draw(st.integers(1, 90)),
        block_size=draw(st.integers(1, 40)),
        n_layer=draw(st.integers(1, 3)),
        n_head=n_head,
        n_embd=n_head * 2 * draw(st.integers(1, 4)),
        attention=attention,
        n_kv_head=draw(st.sampled_from([None, *divisors])) if attention == "gqa" else None,
        norm=draw(st.sampled_from(NORMS)),
        position=draw(st.sampled_from(("learned", "rope"))),
        **flags,
    )


def numel(module, ends: str = "") -> int:
    return sum(p.numel() for name, p in module.named_parameters() if name.endswith(ends))


@given(configs())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_parameter_formulas_are_those_of_the_tensors(c):
    with torch.device("meta"):
        model = GPT(c)
    counted = gpt.estimate_n_params(c)
    blocks = model.transformer["h"]
    assert counted["total"] == numel(model)
    assert counted["attention"] == sum(numel(block.attn) for block in blocks)
    assert counted["feed_forward"] == sum(numel(block.mlp) for block in blocks)
    assert counted["norm"] == sum(numel(m) for m in model.modules() if isinstance(m, torch.nn.LayerNorm))
    assert counted["total"] == sum(n for part, n in counted.items() if part != "total")
    matrices = sum(p.numel() for p in blocks.parameters() if p.dim() == 2) + model.lm_head.weight.numel()
    assert gpt.matmul_params(c) == matrices


@given(configs(), st.integers(1, 50), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_byte_formulas_are_those_of_the_tensors(c, n_tokens, batch_size, dtype):
    cache = KVCache(c, batch_size, n_tokens, dtype, "meta")
    assert gpt.kv_cache_bytes(c, n_tokens, dtype, batch_size) == cache.nbytes
    assert (
        gpt.kv_cache_bytes(gpt.as_mha(c), n_tokens, dtype, batch_size) * c.n_kv_head
        == cache.nbytes * c.n_head
    )
    with torch.device("meta"):
        model = GPT(c).to(dtype)
    read = (
        sum(p.nbytes for p in model.transformer["h"].parameters() if p.dim() == 2)
        + model.lm_head.weight.nbytes
    )
    assert gpt.estimate_decode_bytes_per_token(c, n_tokens, batch_size, dtype) == read + cache.nbytes
    half = gpt.estimate_decode_bytes_per_token(c, n_tokens, batch_size, dtype, cache_dtype=torch.bfloat16)
    assert half == read + cache.nbytes * 2 // dtype.itemsize


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_flop_formulas_are_what_pytorch_counts(shape):
    c = tiny_config(**shape)
    model = GPT(c)
    # the plain kernel multiplies the whole T x T square, as the formula does
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens(2, 32), tokens(2, 32), logits_for="none")[1].backward()
    assert counter.get_total_flops() == 2 * 32 * gpt.estimate_train_flops_per_token(c)
    cache = KVCache(c, 3, 20)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(tokens(3, 10), cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(tokens(3, 1), cache=cache, logits_for="last")
    assert counter.get_total_flops() == 3 * gpt.estimate_decode_flops_per_token(c, 11)


def test_as_mha_changes_the_kind_alone():
    c = tiny_config(attention="gqa", n_kv_head=2, norm="pre", dropout=0.1)
    mha = gpt.as_mha(c)
    assert (mha.attention, mha.n_kv_head) == ("mha", 4) and (c.attention, c.n_kv_head) == ("gqa", 2)
    assert {**vars(mha), "attention": "gqa", "n_kv_head": 2} == vars(c)
