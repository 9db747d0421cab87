"""Weights in eight bits: half the bytes to read for each decoded token, at a small cost in loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import GPT

FEW_ROWS = 4  # up to here PyTorch's int8 kernel reads less and takes less time; beyond, it is the slower one


class Int8Linear(nn.Module):
    """`nn.Linear` with int8 weights and one step size per output, rounded to nearest.

    The activations keep their format. Few rows go through PyTorch's int8 kernel, which reads the weights as
    they are; many rows (a prompt) go through the ordinary product with the weights turned back, since there
    arithmetic is what takes the time.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        w = linear.weight.detach().float()
        scale = (w.abs().amax(dim=1) / 127).clamp(min=1e-7).to(linear.weight.dtype)
        steps = (w / scale.float()[:, None]).round().clamp(-127, 127)  # of the scale as it is kept, rounded
        self.register_buffer("weight", steps.to(torch.int8))  # (out, in)
        self.register_buffer("scale", scale)  # (out,)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """x: (.., in) -> (.., out)."""
        rows = x.reshape(-1, x.shape[-1])
        small = len(rows) <= FEW_ROWS and x.dtype != torch.float32 and x.device.type == "cpu"
        if not small or rows.shape[1] % 16:  # the kernel takes 16 at a time, and reads past the end of others
            return F.linear(x, self.weight.to(x.dtype) * self.scale[:, None], self.bias)
        y = torch._weight_int8pack_mm(rows, self.weight, self.scale).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def quantize_weights(model: GPT) -> GPT:
    """Turn every linear layer of a model into int8, in place, and return it; for inference only.

    The embedding stays as it is, so a tied table is there twice: as it was, and in int8 for the output layer.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model
