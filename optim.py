"""How weights are updated: the learning rate of each step, and which optimizer gets which parameter."""

import math
from typing import Literal

import torch

from model import GPT


def schedule(
    step: int, *, n_steps: int, warmup: int, kind: Literal["cosine", "linear"], floor: float,
    decay_share: float = 1.0
) -> float:
    """The learning rate of `step` (from 0) as a share of its peak.

    Warm-up: a straight line that reaches 1 with its last step; the first step already learns. Then "cosine"
    falls to `floor` at `n_steps` (Loshchilov & Hutter 2017, arXiv:1608.03983), or "linear" stays at 1 and
    falls in a straight line to `floor` over the last `decay_share` of the steps after warm-up (Hägele et al.
    2024, arXiv:2405.18392). From `n_steps` on it is `floor`, also where the warm-up is as long as the run.
    """
    if step < warmup:
        return (step + 1) / warmup
    if step >= n_steps:
        return floor
    if kind == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (n_steps - warmup)))
    left = (n_steps - step) / max(1.0, decay_share * (n_steps - warmup))
    return floor + (1 - floor) * min(1.0, left)


def has_fused_adamw(device: torch.device) -> bool:
    """Whether a device has the one-kernel AdamW. PyTorch has no public list and tells at a step: take one."""
    p = torch.zeros(1, device=device, requires_grad=True)
    p.grad = torch.zeros_like(p)
    try:
        torch.optim.AdamW([p], fused=True).step()
    except RuntimeError:
        return False
    return True


def make_optimizers(
    network: GPT,
    kind: Literal["adamw", "muon"],
    *,
    learning_rate: float,
    muon_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> list[torch.optim.Optimizer]:
    """The optimizers of a network; each parameter is in exactly one group of one of them, a tied table once.

    "adamw": AdamW for all (Loshchilov & Hutter 2019), weight decay on matrices only. "muon": Muon for the
    matrices inside the blocks (Jordan et al. 2024), which makes each update orthogonal; AdamW for the
    embeddings, the output layer, norms and biases. The peak learning rate of a group is kept in it as
    "peak_lr".
    """
    matrices = [p for p in network.transformer["h"].parameters() if p.dim() == 2] if kind == "muon" else []
    held = {id(p) for p in matrices}
    others = [p for p in network.parameters() if id(p) not in held]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = has_fused_adamw(others[0].device) or None  # none lets PyTorch choose among the other ways
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)
    ]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
