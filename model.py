r"""A decoder-only transformer whose attention heads can be compared: MHA, GQA or MQA by one field.

Legend of shapes, used in every comment below:

    B  rows in the batch           C    width of the model (n_embd)
    T  new tokens per row          H    query heads (n_head)
    S  tokens attended to:         Hkv  key/value heads (n_kv_head)
       the cached ones + T         G    query heads per KV head, H / Hkv
    V  vocabulary size             D    width of one head (head_dim), C / H

The three kinds of attention differ in one number, how many heads the keys and values have. For H = 4:

    mha, Hkv = 4           gqa, Hkv = 2           mqa, Hkv = 1
    q0  q1  q2  q3         q0  q1  q2  q3         q0  q1  q2  q3
    |   |   |   |           \  /    \  /           \   \  /   /
    kv0 kv1 kv2 kv3          kv0     kv1                kv0

Query head h reads KV head h // G. The queries stay as many as before, so the model still has H ways of
looking at the text; what shrinks is the memory that generation has to keep, and to read again for every new
token.

Sources: multi-head attention and the post-norm block, Vaswani et al. 2017 (arXiv:1706.03762); multi-query
attention, Shazeer 2019 (arXiv:1911.02150); grouped-query attention, Ainslie et al. 2023 (arXiv:2305.13245);
the pre-norm block, the names of the weights and their initialisation, GPT-2 (Radford et al. 2019).
"""

import math
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LARGE_VOCAB = 8192  # from here on the logits are the largest thing in memory when training
LOSS_PIECE = 512  # positions whose logits are there at once
ROPE_BASE = 10_000.0  # longest wavelength of the rotary positions, as in RoFormer


@dataclass
class GPTConfig:
    """The shape of the network. Contradictions are refused here, before any weight is made (ValueError)."""

    vocab_size: int | None = None  # rows of the token table; none takes the tokenizer's size, more is padding
    block_size: int = 256  # context length in tokens
    n_layer: int = 4  # blocks
    n_head: int = 4  # query heads per block
    n_embd: int = 128  # width of the model; each head gets n_embd / n_head of it
    n_inner: int | None = None  # width inside the feed-forward; none takes 4 x n_embd
    attention: Literal["mha", "gqa", "mqa"] = "mha"  # how many KV heads: n_head, n_kv_head, or one
    n_kv_head: int | None = None  # for gqa, divides n_head; none takes the smallest divisor >= sqrt(n_head)
    norm: Literal["post", "pre"] = "post"  # norm(x + f(x)) as in 2017, or x + f(norm(x)) as in GPT-2
    position: Literal["learned", "rope"] = "learned"  # a vector per position, or rotated queries and keys
    qk_norm: bool = False  # scale queries and keys to unit RMS before they are compared
    bias: bool = True  # biases in the linear layers and the norms
    dropout: float = 0.0  # chance that a value is dropped in training
    tie_weights: bool = True  # the output layer shares the token embedding's table

    def __post_init__(self) -> None:
        for name in ("block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size}: must be at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        for name, known in (
            ("attention", ("mha", "gqa", "mqa")),
            ("norm", ("post", "pre")),
            ("position", ("learned", "rope")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} can't be shared by n_head={self.n_head} heads: it must divide evenly"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                f"position=rope turns pairs of numbers, but n_embd={self.n_embd} / n_head={self.n_head} "
                f"= {self.head_dim} is odd"
            )
        self.n_kv_head = self._resolve_n_kv_head()
        self.n_inner = 4 * self.n_embd if self.n_inner is None else self.n_inner
        if self.n_inner < 1:
            raise ValueError(f"n_inner={self.n_inner}: must be at least 1, or none for 4 x n_embd")

    def _resolve_n_kv_head(self) -> int:
        """`n_kv_head` as a number: H for mha, 1 for mqa, the given or default number of groups for gqa."""
        given, H = self.n_kv_head, self.n_head
        if self.attention != "gqa":
            implied = H if self.attention == "mha" else 1
            if given not in (None, implied):
                raise ValueError(
                    f"attention={self.attention} means n_kv_head={implied} here (n_head={H}), "
                    f"but n_kv_head={given} was given: drop it, or use attention=gqa"
                )
            return implied
        if (
            given is None
        ):  # the geometric middle between mqa's 1 and mha's H: 4 of 12, or 8 of 64 as in Ainslie 2023
            return next(n for n in range(math.isqrt(H - 1) + 1, H + 1) if H % n == 0)
        if given < 1 or H % given:
            divisors = ", ".join(str(n) for n in range(1, H + 1) if H % n == 0)
            raise ValueError(
                f"n_kv_head={given} can't group n_head={H} query heads: it must be one of {divisors}"
            )
        return given

    @property
    def head_dim(self) -> int:
        """D, the width of one head."""
        return self.n_embd // self.n_head


class KVCache:
    """Keys and values of the tokens seen so far, so that each new token costs one step and not a whole pass.

    The caller makes it, passes it to `GPT.forward`, and drops it; the model keeps nothing. It holds the Hkv
    heads un-expanded, is allocated once, and never grows: `max_len` is the prompt plus the new tokens.
    No gradient passes through it.

    `k`, `v`: (n_layer, B, Hkv, max_len, D), in `dtype`. With int8, `scales` has a step size for k and for v,
    per head and token, (2, n_layer, B, Hkv, max_len, 1) in fp16. `length`: slots filled, in every row.
    `pad`: for rows of unequal length, how many of a row's first slots hold padding, (B,); its first token
    has position 0.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pad: Tensor | None = None,
    ) -> None:
        shape = (config.n_layer, batch_size, config.n_kv_head, max_len, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.scales: Tensor | None = None
        if dtype == torch.int8:
            self.scales = torch.zeros(2, *shape[:-1], 1, dtype=torch.float16, device=device)
        self.length = 0
        self.pad = pad
        self._row: Tensor | None = None  # see `row`

    @property
    def max_len(self) -> int:
        """Slots per row."""
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors themselves; `kv_cache_bytes` is the formula."""
        return self.k.nbytes + self.v.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def check_room(self, n_new: int) -> None:
        """Refuse `n_new` tokens that don't fit (ValueError)."""
        if self.length + n_new > self.max_len:
            raise ValueError(
                f"the KV cache holds {self.max_len} tokens and {self.length} are in it: room for "
                f"{self.max_len - self.length}, but {n_new} more were given; make it with a larger max_len"
            )

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store new k and v of a layer, (B, Hkv, T, D), behind the cached ones."""
        new = slice(self.length, self.length + k.shape[2])
        for i, (store, x) in enumerate(((self.k, k), (self.v, v))):
            x = x.detach()  # a graph through the cache would never be freed
            if self.scales is not None:
                step = (x.float().abs().amax(dim=-1, keepdim=True) / 127).clamp(1e-6, 65504).half()
                self.scales[i, layer, :, :, new] = step
                x = (x.float() / step.float()).round().clamp(-127, 127)
            store[layer, :, :, new] = x

    def read(self, layer: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer up to slot `end`, (B, Hkv, end, D) each, as `dtype`."""
        k, v = (store[layer, :, :, :end].to(dtype) for store in (self.k, self.v))
        if self.scales is not None:
            k_scale, v_scale = self.scales[:, layer, :, :, :end].to(dtype)
            k, v = k * k_scale, v * v_scale
        return k, v

    def row(self, layer: int, row: int, end: int) -> tuple[Tensor, Tensor]:
        """The same for one row in fp32, (1, Hkv, end, D), in a buffer that the next call uses again."""
        if self._row is None:
            self._row = torch.empty(2, 1, *self.k.shape[2:], device=self.k.device)
        for i, store in enumerate((self.k, self.v)):
            self._row[i, 0, :, :end] = store[layer, row, :, :end]
            if self.scales is not None:
                self._row[i, 0, :, :end] *= self.scales[i, layer, row, :, :end]
        return self._row[0, :, :, :end], self._row[1, :, :, :end]

    def repeat(self, n: int) -> "KVCache":
        """A cache with each row n times: one prefill then serves n samples of the same prompt."""
        twin = copy(self)
        twin.k, twin.v = (t.repeat_interleave(n, dim=1) for t in (self.k, self.v))
        twin.scales = None if self.scales is None else self.scales.repeat_interleave(n, dim=2)
        twin.pad = None if self.pad is None else self.pad.repeat_interleave(n)
        return twin

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only; a row that has ended then costs nothing more."""
        self.k, self.v = self.k[:, rows], self.v[:, rows]
        self.scales = None if self.scales is None else self.scales[:, :, rows]
        self.pad = None if self.pad is None else self.pad[rows]


def attention_mask(T: int, cache: KVCache | None, device: torch.device) -> Tensor | None:
    """Which of S tokens each of T new ones may see: bool (1 or B, 1, T, S), or None where no mask is needed.

    None stands for two of the three cases: nothing cached yet (`attend` is causal by itself) and one new
    token (it may see everything). Several new tokens on a filled cache need the mask spelled out, since
    SDPA's `is_causal` lines the diagonal up with the first key: the first new token would see one cached key
    instead of all.
    """
    start, pad = (cache.length, cache.pad) if cache is not None else (0, None)
    if pad is None and (start == 0 or T == 1):
        return None
    query, key = torch.arange(start, start + T, device=device), torch.arange(start + T, device=device)
    mask = (key <= query[:, None])[None, None]
    if (
        pad is not None
    ):  # a row's padding is hidden; a padding query still sees itself, or its softmax would be NaN
        mask = mask & (key >= pad[:, None])[:, None, None] | (key == query[:, None])
    return mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """softmax(q kT / sqrt(D)) v for every head: q (B, H, T, D), k and v (B, Hkv, S, D) -> (B, H, T, D)."""
    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    if T == S and mask is None:  # a whole sequence at once: training, and the prompt of a generation
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=Hkv != H)
    # New tokens against a cache. The G query heads of a group read the same keys, so to attention they are
    # just G more queries of one KV head: fold them into the query axis, and each key is read from memory
    # once per group instead of once per query head. Repeating the keys, or SDPA's enable_gqa, would throw
    # the saving away.
    G = H // Hkv
    if mask is not None:
        mask = mask.repeat(1, 1, G, 1)  # (.., T, S) -> (.., G*T, S)
    y = F.scaled_dot_product_attention(q.reshape(B, Hkv, G * T, D), k, v, attn_mask=mask, dropout_p=dropout)
    return y.reshape(B, H, T, D)


def attend_to_cache(q: Tensor, cache: KVCache, layer: int, mask: Tensor | None) -> Tensor:
    """`attend` of new queries (B, H, T, D) to what a layer has cached, their own keys and values included.

    On a CPU a cache in 8 or 16 bits is read row by row: one row, made fp32, fits into the processor's own
    cache, and its fp32 kernels are quick there. PyTorch's 16-bit kernel takes three times as long where a KV
    head has a single query (MHA decoding: 6.0 against 1.9 ms for 8 rows x 1,024 tokens x 12 heads); with a
    group's queries to share each key it is the quicker one (GQA, 3 queries: 1.0 against 1.6 ms).
    """
    B, H, T = q.shape[:3]
    Hkv, end = cache.k.shape[2], cache.length + T
    one_query = cache.k.itemsize == 2 and Hkv == H * T
    row_by_row = q.device.type == "cpu" and end > T and (one_query or cache.k.dtype == torch.int8)
    if not row_by_row or torch.compiler.is_compiling():  # a compiled loop would be one for each batch size
        return attend(q, *cache.read(layer, end, q.dtype), mask)
    y = torch.empty_like(q)
    for row in range(B):
        k, v = cache.row(layer, row, end)
        one = mask if mask is None or len(mask) == 1 else mask[row : row + 1]
        y[row : row + 1] = attend(q[row : row + 1].float(), k, v, one)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): turn pairs of numbers of x (B, T, heads, D) by angles that grow with
    the position, so that a query and a key compare by their distance. cos, sin: (T or B x T, 1, D / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)  # the tables are fp32


class Attention(nn.Module):
    """Causal self-attention of H query heads on Hkv KV heads: MHA, GQA or MQA by `config.attention`."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        C, H, Hkv, D = config.n_embd, config.n_head, config.n_kv_head, config.head_dim
        self.c_attn = nn.Linear(
            C, (H + 2 * Hkv) * D, bias=config.bias
        )  # queries, keys and values in one product
        self.c_proj = nn.Linear(C, C, bias=config.bias)  # mixes what the heads found
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """x: (B, T, C) -> (B, T, C). The cache, if any, gets the new keys and values."""
        B, T, C = x.shape
        H, Hkv, D = self.config.n_head, self.config.n_kv_head, self.config.head_dim
        # 1. project, 2. split the width into heads: no arithmetic, head 0 is the first D numbers, head 1 the
        # next
        q, k, v = self.c_attn(x).split((H * D, Hkv * D, Hkv * D), dim=2)
        q, k, v = q.view(B, T, H, D), k.view(B, T, Hkv, D), v.view(B, T, Hkv, D)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if (
            self.config.qk_norm
        ):  # keeps the logits of attention bounded (Dehghani et al. 2023, arXiv:2302.05442)
            q, k = F.rms_norm(q, (D,)), F.rms_norm(k, (D,))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
        # 3. every head attends on its own; 4. the outputs go side by side again; 5. one matrix mixes them
        if cache is None:
            y = attend(q, k, v, mask, self.config.dropout if self.training else 0.0)
        else:
            cache.append(self.layer, k, v)
            y = attend_to_cache(q, cache, self.layer, mask)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class FeedForward(nn.Module):
    """Each token by itself: C -> n_inner (4C if not said otherwise), GELU, back to C."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention, then feed-forward, each added to its input and normalised."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.norm = config.norm
        self.attn = Attention(config, layer)
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = FeedForward(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """x: (B, T, C) -> (B, T, C)."""
        if self.norm == "post":
            x = self.ln_1(x + self.attn(x, rope, mask, cache))
            return self.ln_2(x + self.mlp(x))
        x = x + self.attn(self.ln_1(x), rope, mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token ids in, a score for each possible next token out.

    `generator` draws the initial weights, so that they depend on its seed alone. Errors: ValueError for a
    config without a vocabulary size.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set: take it from the tokenizer")
        self.config = config
        self.recompute = False  # True: a block's activations are computed again in backward, not kept
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            }
        )
        if config.position == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        else:
            cos, sin = rope_tables(config)
            self.register_buffer("rope_cos", cos, persistent=False)
            self.register_buffer("rope_sin", sin, persistent=False)
        if config.norm == "pre":  # post-norm blocks end in a norm already
            self.transformer["ln_f"] = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        self._init_weights(generator)

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the weights, and of a cache unless it is told otherwise."""
        return self.transformer["wte"].weight.dtype

    @torch.no_grad()
    def _init_weights(self, generator: torch.Generator | None) -> None:
        """GPT-2's: N(0, 0.02), and narrower where 2 * n_layer results add up in the residual stream."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                p.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                p.zero_()

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        logits_for: Literal["all", "last", "none"] = "all",
    ) -> tuple[Tensor | None, Tensor | None]:
        """Ids (B, T) to `(logits, loss)`.

        `logits`: (B, T, V) for "all", (B, 1, V) for "last" (decoding needs no others), None for "none".
        `loss`: mean cross-entropy in nats per token (fp32 scalar) where `targets` (B, T) are given, else
        None. With a cache, `idx` continues what the cache holds, and the cache is advanced by T. Errors:
        ValueError where the ids go past `block_size` or past the cache's end.
        """
        T, start = idx.shape[1], 0
        if cache is not None:
            cache.check_room(T)
            start = cache.length
        if start + T > self.config.block_size:
            raise ValueError(
                f"{start} cached + {T} new tokens are more than the context, "
                f"block_size={self.config.block_size}"
            )
        position = torch.arange(start, start + T, device=idx.device)  # (T,)
        if cache is not None and cache.pad is not None:
            position = (position - cache.pad[:, None]).clamp(min=0)  # (B, T)
        x, rope = self.transformer["wte"](idx), None
        if self.config.position == "learned":
            x = x + self.transformer["wpe"](position)
        else:
            rope = (self.rope_cos[position].unsqueeze(-2), self.rope_sin[position].unsqueeze(-2))
        x = self.transformer["drop"](x)
        mask = attention_mask(T, cache, idx.device)
        for block in self.transformer["h"]:
            if self.recompute and self.training and cache is None:  # a cache must be written once only
                x = checkpoint(block, x, rope, mask, cache, use_reentrant=False)
            else:
                x = block(x, rope, mask, cache)
        if cache is not None:
            cache.length += T
        if self.config.norm == "pre":
            x = self.transformer["ln_f"](x)

        logits, loss = None, None
        if logits_for != "none":
            logits = self.lm_head(x if logits_for == "all" else x[:, -1:])
        if targets is not None:
            if logits_for == "all" or not isinstance(self.lm_head, nn.Linear):  # an int8 layer isn't one
                scores = logits if logits_for == "all" else self.lm_head(x)
                loss = F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())
            else:
                loss = next_token_loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten())
        return logits, loss


def next_token_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `targets` (N,) under the logits x @ weight.T, x (N, C), weight (V, C): a scalar.

    The logits of a large vocabulary are never all there at once: they would be the largest tensor of
    training. PyTorch's `linear_cross_entropy` works in pieces and finds the gradient on the way, but in
    float32 only; under autocast each piece is computed again for its gradient.
    """
    if len(weight) < LARGE_VOCAB:
        return F.cross_entropy(F.linear(x, weight).float(), targets)
    plain = not torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32
    if plain and not torch.compiler.is_compiling():
        # its own choice of piece is a few positions for a large vocabulary, and 20 times slower on a CPU
        pieces = nn.LinearCrossEntropyOptions(batch_chunk_size=LOSS_PIECE)
        return F.linear_cross_entropy(x, weight, targets, options=pieces)

    def piece_loss(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")

    total = torch.zeros((), device=x.device)
    for piece in zip(x.split(LOSS_PIECE), targets.split(LOSS_PIECE), strict=True):
        total = total + checkpoint(piece_loss, *piece, use_reentrant=False)
    return total / len(targets)


def as_mha(config: GPTConfig) -> GPTConfig:
    """The same shape with a KV head for every query head, to compare with."""
    return replace(config, attention="mha", n_kv_head=None)


def match_parameters(config: GPTConfig) -> GPTConfig:
    """The same shape with a feed-forward so much wider that it has as many weights as with MHA.

    Wider by D (H - Hkv): so many keys and as many values are missing, each with C weights, and each unit of
    the feed-forward has C weights in and C out. Biases differ by as many numbers per layer, which is nothing.
    """
    return replace(config, n_inner=config.n_inner + config.head_dim * (config.n_head - config.n_kv_head))


def rope_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, (block_size, D / 2) each, fp32."""
    wavelength = ROPE_BASE ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angle = torch.arange(config.block_size).float()[:, None] / wavelength
    return angle.cos(), angle.sin()


# What a model costs, as formulas. Tests hold them against the tensors of a real model.


def estimate_n_params(config: GPTConfig) -> dict[str, int]:
    """Parameters: "total" and "attention", "feed_forward", "embedding", "norm"; a tied table counts once.

    With H heads of width D = C / H and Hkv = H, the weights of attention are 4 C^2 per layer whatever H is.
    """
    C, L, b = config.n_embd, config.n_layer, int(config.bias)
    qkv = (config.n_head + 2 * config.n_kv_head) * config.head_dim
    n_norm = 2 * L + (config.norm == "pre")
    parts = {
        "attention": L * (C * qkv + C * C + b * (qkv + C)),
        "feed_forward": L * (2 * C * config.n_inner + b * (config.n_inner + C)),
        "embedding": C
        * (
            config.vocab_size * (1 if config.tie_weights else 2)
            + (config.block_size if config.position == "learned" else 0)
        ),
        "norm": n_norm * C * (1 + b),
    }
    return {"total": sum(parts.values()), **parts}


def kv_cache_bytes(
    config: GPTConfig, n_tokens: int, dtype: torch.dtype = torch.float32, batch_size: int = 1
) -> int:
    """Bytes of keys and values of `n_tokens` tokens in each of `batch_size` rows: 2 L B Hkv S D numbers.

    int8 has a step size of two bytes on top, per head and token.
    """
    per_head = config.head_dim * dtype.itemsize + (2 if dtype == torch.int8 else 0)
    return 2 * config.n_layer * batch_size * config.n_kv_head * n_tokens * per_head


def matmul_params(config: GPTConfig) -> int:
    """Weights that every token is multiplied with: attention, feed-forward and the output layer."""
    C, qkv = config.n_embd, (config.n_head + 2 * config.n_kv_head) * config.head_dim
    return config.n_layer * (C * qkv + C * C + 2 * C * config.n_inner) + C * config.vocab_size


def estimate_decode_flops_per_token(config: GPTConfig, context: int) -> int:
    """FLOPs to decode one token with `context` in sight: a multiply and an add per weight, and per number of
    each key and value. The number of KV heads changes the bytes that are read, hardly the arithmetic."""
    return 2 * matmul_params(config) + 4 * config.n_layer * config.n_embd * context


def estimate_train_flops_per_token(config: GPTConfig) -> int:
    """FLOPs to train on one token: forward, and twice that for backward; full attention as in PaLM's appendix
    (Chowdhery et al. 2022, arXiv:2204.02311), though a causal kernel does half of it."""
    return 3 * estimate_decode_flops_per_token(config, config.block_size)


def estimate_decode_bytes_per_token(
    config: GPTConfig,
    context: int,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> int:
    """Bytes read to decode one token in each of `batch_size` rows: every weight once, and each row's cache.

    Over the memory bandwidth, this is the time that a step cannot beat.
    """
    weights = matmul_params(config) * dtype.itemsize
    return weights + kv_cache_bytes(config, context, cache_dtype or dtype, batch_size)
