"""What training does when a number is not finite, memory runs out, or torch.compile does not work here."""

import copy
import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_config
from tiny_run import (
    N_IDS,
    difference,
    flags,
    losses,
    patch_forward,
    quiet_bar,
    read_json,
    read_rows,
    weights,
)

import model as gpt
import train
from checkpoint import list_checkpoints, load_checkpoint
from data.loader import batch_starts, open_tokens

pytestmark = pytest.mark.usefixtures("work")


def record(monkeypatch) -> list:
    """The optimizers that the next run makes."""
    make, made = train.make_optimizers, []

    def recorded(*args, **options):
        made[:] = make(*args, **options)
        return made

    monkeypatch.setattr(train, "make_optimizers", recorded)
    return made


def state_of(optimizers: list) -> list[torch.Tensor]:
    """Copies of the weights, of their gradients' memory, and of the step counts."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                values = [p.detach(), *(v for v in optimizer.state[p].values() if torch.is_tensor(v))]
                found.extend(copy.deepcopy(values))
    return found


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def spoil_loss(n: int, value: float):
    """For patch_forward: the n-th pass has a loss that is not finite."""
    return lambda call, logits, loss: (logits, loss * value if call == n else loss)


def spoil_gradient(n: int, value: float):
    """For patch_forward: the n-th pass has a sound loss, and a gradient that is not finite."""

    def change(call, logits, loss):
        if call == n:
            loss.register_hook(lambda gradient: gradient * value)
        return logits, loss

    return change


# --- numbers that are not finite


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("spoil", "value"), [(spoil_loss, math.nan), (spoil_gradient, math.nan), (spoil_gradient, math.inf)],
    ids=["loss", "gradient", "infinite gradient"],
)
@pytest.mark.parametrize("micro", [8, 4])
def test_a_bad_step_is_left_out_on_request_TRN_6(monkeypatch, capsys, kind, spoil, value, micro):
    n_micro = 8 // micro
    optimizers, seen = record(monkeypatch), {}
    bad = 3 * n_micro  # a pass of step 3, the last one: the micro-batches before it were sound
    change = spoil(bad, value)

    def watched(n, logits, loss):
        if n % n_micro == 1 % n_micro:  # the first pass of a step
            seen[(n - 1) // n_micro + 1] = state_of(optimizers)
        return change(n, logits, loss)

    patch_forward(monkeypatch, watched)
    summary = train.main(
        flags(on_nonfinite="skip", max_iters=6, optimizer=kind, micro_batch_size=micro, warmup=0)
    )
    assert equal(seen[4], seen[3])  # weights and optimizer are as they were before the bad step
    assert not equal(seen[3], seen[2]) and not equal(seen[5], seen[4])
    assert (summary["skipped_steps"], summary["steps"], summary["tokens_seen"]) == (1, 6, 6 * 128)
    assert summary == read_json("run/summary.json") and math.isfinite(summary["val_loss"])
    assert all(t.isfinite().all() for t in weights().values())
    rows = read_rows()
    assert [row["train/grad_norm"] is None for row in rows] == [step == 3 for step in range(1, 7)]
    printed = capsys.readouterr().out
    assert printed.count("left out") == 1
    assert "step 3: loss or gradient is not finite, left out (1 so far)" in printed


def test_a_run_of_bad_steps_alone_ends_with_the_weights_it_began_with_TRN_6(monkeypatch, capsys):
    patch_forward(monkeypatch, lambda n, logits, loss: (logits, loss * math.nan))
    summary = train.main(flags(on_nonfinite="skip", max_iters=3))
    start = gpt.GPT(tiny_config(vocab_size=N_IDS, block_size=16), torch.Generator().manual_seed(0))
    assert summary["skipped_steps"] == 3 and "(3 so far)" in capsys.readouterr().out
    expected = {name: t for name, t in start.state_dict().items() if name != "lm_head.weight"}
    assert difference(weights(), expected) == 0.0


def test_a_run_without_trouble_is_the_same_with_either_rule_TRN_6():
    found = []
    for rule in ("stop", "skip"):
        assert train.main(flags(on_nonfinite=rule))["skipped_steps"] == 0
        found.append(weights())
    assert difference(*found) == 0.0


@pytest.mark.parametrize("save_interval", [2, 0])
def test_the_error_names_step_data_and_the_last_good_checkpoint_TRN_6(refused, monkeypatch, save_interval):
    patch_forward(monkeypatch, spoil_gradient(6, math.nan))
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    options = {"max_iters": 20, "save_interval": save_interval, "log_interval": 7, "seed": 3}
    error = refused(*flags(**options), leaves=("run",))
    assert "step 6: loss or gradient is not finite" in error and "--on_nonfinite=skip" in error
    (path,) = map(Path, re.findall(r"tokens [\d, .]+ of (\S+train\.bin)", error))
    with open_tokens(path) as tokens:
        starts = batch_starts(tokens.n_tokens, 16, 3, 5, 8)  # the sixth step
    assert f"tokens {', '.join(map(str, starts[:4]))}, ... of" in error
    if not save_interval:
        assert "checkpoint is none" in error and not Path("run/checkpoints").exists()
        return
    (place,) = re.findall(r"checkpoint is (\S+)\. ", error)
    assert Path(place) == list_checkpoints(Path("run"))[-1] == Path("run/checkpoints/step-000004")
    assert all(p.isfinite().all() for p in load_checkpoint(Path(place)).model.parameters())


# --- memory that runs out


def no_room_for(monkeypatch, rows: int, error=torch.OutOfMemoryError) -> list[int]:
    """A device with room for `rows` and no more in training; the rows of each pass that was tried."""
    forward, tried = gpt.GPT.forward, []

    def patched(self, idx, *args, **options):
        if self.training:
            tried.append(len(idx))
            if len(idx) > rows:
                raise error("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, idx, *args, **options)

    monkeypatch.setattr(gpt.GPT, "forward", patched)
    return tried


@pytest.mark.parametrize(
    ("batch", "rows", "expected"), [(8, 4, [8, 4]), (8, 1, [8, 4, 2, 1]), (6, 2, [6, 3, 2]), (7, 6, [7, 1])]
)
def test_a_step_that_does_not_fit_is_cut_until_it_does_TRN_14(monkeypatch, capsys, batch, rows, expected):
    fits = expected[-1]
    options = {"batch_size": batch, "max_iters": 4, "dropout": 0.2, "optimizer": "muon"}
    train.main(flags(**options, micro_batch_size=fits))
    straight, logged = weights(), losses()
    capsys.readouterr()
    tried = no_room_for(monkeypatch, rows)
    summary = train.main(flags(**options))
    assert tried == expected[:-1] + [fits] * (4 * batch // fits)
    assert difference(weights(), straight) == 0.0 and losses() == logged
    assert (summary["steps"], summary["tokens_seen"], summary["skipped_steps"]) == (4, 4 * batch * 16, 0)
    assert [row["tokens"] for row in read_rows()] == [batch * 16 * n for n in range(1, 5)]
    found = re.findall(r"out of memory: on with (\d+) micro-batches", capsys.readouterr().out)
    assert [batch // int(n) for n in found] == expected[1:]


def test_gradients_of_a_pass_that_ran_out_half_way_do_not_count_TRN_14(monkeypatch):
    # from the second step on there is room for 2 rows only, and that shows on the way back at layer 1
    options = {"max_iters": 3, "warmup": 0, "n_layer": 3, "bias": False}
    train.main(flags(**options, micro_batch_size=2))
    straight, logged = weights(), losses()
    forward, tried = gpt.Block.forward, []

    def full(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def patched(self, x, *args):
        out = forward(self, x, *args)
        if self.training and self.attn.layer == 1:
            tried.append(len(x))
            if len(x) > 2 and len(tried) > 1:
                out.register_hook(full)
        return out

    monkeypatch.setattr(gpt.Block, "forward", patched)
    train.main(flags(**options))
    assert tried == [8, 8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert losses() == pytest.approx(logged, abs=1e-5) and difference(weights(), straight) < 1e-5


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_one_row_that_does_not_fit_ends_in_one_line_TRN_14(refused, monkeypatch, error):
    tried = no_room_for(monkeypatch, 0, error=error)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    message = refused(*flags(), leaves=("run",))
    assert tried == [8, 4, 2, 1]
    assert "out of memory with batch_size=8" in message and "block_size=16" in message
    assert "dtype=auto" in message and "--recompute=True" in message
    assert "micro_batch_size first" not in message  # that is what was tried


def test_a_size_that_was_asked_for_is_not_changed_TRN_14(refused, monkeypatch):
    tried = no_room_for(monkeypatch, 2)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    message = refused(*flags(micro_batch_size=4), leaves=("run",))
    assert tried == [4] and "micro_batch_size=4" in message and "lower micro_batch_size first" in message


def test_recompute_is_a_flag_and_changes_no_number_TRN_14(monkeypatch):
    found, calls, checkpoint = [], [], gpt.checkpoint
    monkeypatch.setattr(
        gpt, "checkpoint", lambda *args, **options: (calls.append(0), checkpoint(*args, **options))[1]
    )
    for recompute in (False, True):
        train.main(flags(recompute=recompute, dropout=0.2, max_iters=3))
        found.append(weights())
        assert len(calls) == (3 * 2 if recompute else 0)  # steps x layers
    assert difference(*found) == 0.0


# --- torch.compile


def broken_at_call(error: Exception):
    """torch.compile on Windows, or on a Python that it does not know yet."""

    def compile(*args, **options):
        raise error

    return compile


def broken_at_first_use(error: Exception):
    """torch.compile without a C compiler, or on a GPU that is too old."""

    def compile(network, *args, **options):
        def call(*args, **options):
            raise error

        return call

    return compile


ERRORS = {
    "python": RuntimeError("torch.compile is not supported on Python 3.15+"),
    "compiler": RuntimeError("\nNo working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1 for more\n"),
    "GPU": AssertionError("Found NVIDIA GeForce GTX 1080 which is too old to be supported by triton"),
    "silent": NotImplementedError(),
}
FIRST_LINES = {
    "python": "torch.compile is not supported on Python 3.15+",
    "compiler": "No working C++ compiler found",
    "GPU": "Found NVIDIA GeForce GTX 1080 which is too old to be supported by triton",
    "silent": "NotImplementedError",
}
every_break = pytest.mark.parametrize("broken", [broken_at_call, broken_at_first_use])
every_cause = pytest.mark.parametrize("cause", ERRORS)


@every_break
@every_cause
def test_a_compile_that_fails_is_left_out_with_one_warning_PLT_1_PLT_2(monkeypatch, capsys, broken, cause):
    train.main(flags(dropout=0.2))
    plain, logged = weights(), losses()
    capsys.readouterr()
    monkeypatch.setattr(train, "compile_pays", lambda device: True)  # as on a GPU
    monkeypatch.setattr(torch, "compile", broken(ERRORS[cause]))
    summary = train.main(flags(dropout=0.2))
    printed = capsys.readouterr().out
    warned = [line for line in printed.splitlines() if "torch.compile failed" in line]
    assert warned == [f"torch.compile failed, going on without it: {FIRST_LINES[cause]}"]
    assert difference(weights(), plain) == 0.0 and losses() == logged and summary["steps"] == 4


@every_break
@every_cause
def test_a_compile_that_was_asked_for_and_fails_is_an_error_PLT_1_PLT_2(refused, monkeypatch, broken, cause):
    monkeypatch.setattr(torch, "compile", broken(ERRORS[cause]))
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    error = refused(*flags(compile=True), leaves=("run",))
    assert f"--compile=True failed: {FIRST_LINES[cause]}; leave it out" in error
    assert not Path("run/checkpoints").exists()


def test_compile_can_be_turned_off_where_it_is_the_default_PLT_1(monkeypatch):
    monkeypatch.setattr(train, "compile_pays", lambda device: True)
    monkeypatch.setattr(torch, "compile", broken_at_call(AssertionError("compiled")))
    assert train.main(flags(compile=False, max_iters=1))["steps"] == 1


def test_an_error_of_the_data_is_not_blamed_on_compile_PLT_1(refused, monkeypatch):
    def damaged(*args):
        raise ValueError("train.bin: damaged")

    monkeypatch.setattr(train, "get_batch", damaged)
    monkeypatch.setattr(train, "tqdm", quiet_bar)
    monkeypatch.setattr(torch, "compile", lambda network: network)
    assert refused(*flags(compile=True), leaves=("run",)) == "train.py: error: train.bin: damaged\n"


def test_memory_that_runs_out_under_compile_is_not_blamed_on_it_PLT_1_TRN_14(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda network: lambda *args, **options: network(*args, **options))
    numbers = {"loss": 1.0, "bits_per_byte": 1.0, "perplexity": 1.0}
    monkeypatch.setattr(train, "evaluate", lambda *args: numbers)
    tried = no_room_for(monkeypatch, 4)
    train.main(flags(compile=True))
    assert tried == [8] + [4] * 8 and "torch.compile failed" not in capsys.readouterr().out


def test_a_compiled_run_has_the_same_losses_and_clean_names_CKP_2_PLT_1(monkeypatch, capsys):
    options = {"attention": "gqa", "position": "rope", "dropout": 0.1, "eval_interval": 2, "save_interval": 2}
    train.main(flags(**options, out_dir="plain"))
    expected, calls = [losses("plain"), read_rows("plain", "val/loss")], []

    def backend(graph, example_inputs):
        calls.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    capsys.readouterr()
    train.main(flags(**options, compile=True))
    printed = capsys.readouterr().out
    assert calls and "compile on" in printed and "torch.compile failed" not in printed
    assert losses() == pytest.approx(expected[0], abs=1e-6)
    found = [row["val/loss"] for row in read_rows(key="val/loss")]
    assert found == pytest.approx([row["val/loss"] for row in expected[1]], abs=1e-6)
    assert difference(weights("run"), weights("plain")) < 1e-5  # the names are compared too
    for place in list_checkpoints(Path("run")):
        assert load_checkpoint(place).model.config.attention == "gqa"
    assert len(list_checkpoints(Path("run"))) == 2


def test_a_compiler_that_fails_inside_pytorch_is_left_out_as_well_PLT_2(monkeypatch, capsys):
    def backend(graph, example_inputs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(train, "compile_pays", lambda device: True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    summary = train.main(flags(max_iters=2))
    printed = capsys.readouterr().out
    assert summary["steps"] == 2 and printed.count("torch.compile failed, going on without it: ") == 1
    assert np.isfinite(losses()).all()
