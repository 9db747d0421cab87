"""Deep stacks train with the defaults: neither norm diverges at 12 and 24 layers, by either optimizer."""

import math

import pytest
from tiny_run import flags, read_rows

import train

pytestmark = pytest.mark.usefixtures("work")
STEPS = 60


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("n_layer", [12, 24])
def test_twelve_and_twentyfour_layers_train(n_layer, norm, optimizer):
    shape = {"n_layer": n_layer, "n_embd": 32, "n_head": 2, "norm": norm, "position": "rope", "qk_norm": True}
    summary = train.main(flags(**shape, optimizer=optimizer, max_iters=STEPS, eval_interval=20))
    rows = read_rows()
    losses, norms = ([row[key] for row in rows] for key in ("train/loss", "train/grad_norm"))
    assert all(map(math.isfinite, losses + norms)) and len(losses) == STEPS
    uniform = math.log(15)  # the start: every character alike
    assert losses[0] == pytest.approx(uniform, abs=0.2)
    assert summary["val_loss"] < 0.9 * uniform  # it has learned,
    assert max(losses[10:]) < losses[0] + 0.1  # and at no time forgot it all
