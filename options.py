"""Every option of a training run, with its default and the values it may take."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from config import Parsed
from model import GPTConfig


@dataclass
class TrainConfig:
    """One training run."""

    model: GPTConfig = field(default_factory=GPTConfig)

    # data
    dataset: str = "python"  # python (its standard library), a text file or folder, or hub:owner/name
    text_column: str = "text"  # the column that holds the text, where the data has columns
    tokenizer: Literal["char", "bpe", "gpt2"] = "bpe"  # one id per character, trained byte pairs, or GPT-2's
    bpe_size: int = 1024  # ids of the bpe tokenizer; 256 means bytes
    val_fraction: float = 0.1  # share of the text that is only evaluated on

    # steps
    batch_size: int = 32  # sequences per step, over all micro-batches
    micro_batch_size: int | None = None  # sequences per forward pass; none takes batch_size
    max_iters: int = 1000  # steps
    seed: int = 0  # of the initial weights, the order of the data and dropout; each has its own generator

    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # for the matrices of the blocks; the rest has adamw
    learning_rate: float = 1e-3  # adamw's peak
    muon_lr: float = 0.02  # muon's peak
    muon_momentum: float = 0.95  # muon's memory of the gradient; shorter runs want less
    schedule: Literal["cosine", "linear"] = "cosine"  # how it falls from the peak; linear stays there first
    warmup: float = 0.05  # share of the steps in which it rises
    lr_floor: float = 0.1  # where it ends, as a share of the peak
    lr_decay: float = 0.5  # share of the steps after warm-up in which linear falls
    weight_decay: float = 0.1  # for matrices; norms and biases have none
    beta1: float = 0.9  # adamw's memory of the gradient
    beta2: float = 0.99  # adamw's memory of its square
    grad_clip: float = 1.0  # largest norm of the gradient; 0 is off
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient of NaN or inf: stop, or leave it out
    recompute: bool = False  # less memory: compute a block's activations again in backward

    # looking and keeping
    eval_interval: int = 250  # steps between evaluations; 0 evaluates at the end only
    eval_windows: int | None = 100  # windows of the validation split per evaluation; none is all of it
    final_eval_windows: int | None = None  # the same after the last step, unless there is a patience
    eval_only: bool = False  # evaluate the newest checkpoint in out_dir on all of the split, and leave
    eval_weights: Literal["plain", "int8"] = "plain"  # of eval_only: what 8-bit weights cost in loss
    patience: int | None = None  # stop after so many evaluations without a better one, and keep the best
    log_interval: int = 10  # steps between rows in metrics.jsonl
    save_interval: int = 0  # steps between checkpoints; 0 leaves it to the minutes
    save_minutes: float = 10.0  # minutes between checkpoints; 0 leaves it to the steps
    keep_checkpoints: int = 2  # newest checkpoints to keep; older ones are deleted
    keep_best: bool = True  # save and keep the checkpoint with the best validation loss too
    resume: str | None = None  # a run's folder to go on with; auto: out_dir's, if there is one
    max_minutes: float | None = None  # save and leave before so many minutes have passed; none is no limit
    out_dir: str | None = None  # none takes out/<preset>, and what the flags change of the model
    measure_decode: bool = False  # measure how fast the trained model generates, over batch and context

    # wandb, beside metrics.jsonl
    wandb: Literal["auto", "online", "offline", "off"] = "off"  # auto and online go offline if they have to
    wandb_project: str = "headcount"  # where wandb puts the run
    wandb_group: str | None = None  # runs that belong together, such as one study
    wandb_run_name: str | None = None  # none is made of attention and seed: gqa-s0

    # machine
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes cuda, then mps, then cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of products; the weights are float32
    compile: bool | None = None  # torch.compile; none does on cuda, and goes on without if it fails
    sdpa: Literal["auto", "math"] = "auto"  # math: the plain attention kernel, to rule out a fast one

    def __post_init__(self) -> None:
        def check(names: str, fits: Any, must: str) -> None:
            for name in names.split():
                if (value := getattr(self, name)) is not None and not fits(value):
                    raise ValueError(f"{name}={value}: must be {must}")

        check("batch_size max_iters log_interval", lambda x: x >= 1, "at least 1")
        check("bpe_size", lambda x: x >= 256, "at least 256, the number of bytes")
        check("keep_checkpoints", lambda x: x >= 1, "at least 1")
        check("max_minutes", lambda x: x > 0, "above 0, or none")
        optional = "micro_batch_size eval_windows final_eval_windows patience"
        check(optional, lambda x: x >= 1, "at least 1, or none")
        not_negative = "seed eval_interval save_interval save_minutes weight_decay grad_clip"
        check(not_negative, lambda x: x >= 0, "0 or more")
        check("learning_rate muon_lr", lambda x: x > 0, "above 0")
        check("beta1 beta2 muon_momentum warmup", lambda x: 0 <= x < 1, "at least 0 and below 1")
        check("lr_floor lr_decay", lambda x: 0 <= x <= 1, "between 0 and 1")
        check("val_fraction", lambda x: 0 < x < 1, "between 0 and 1")
        if self.batch_size % (micro := self.micro_batch_size or 1):
            divisors = (n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0)
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={micro}: "
                f"use micro_batch_size={min(divisors, key=lambda n: abs(n - micro))}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step learns from."""
        return self.batch_size * self.model.block_size


def default_out_dir(parsed: Parsed[TrainConfig]) -> Path:
    """out/<preset>, plus each flag that makes it another model or other data: out/small-mqa."""
    name = parsed.presets[-1].stem if parsed.presets else "default"
    words = ("attention", "norm", "position", "tokenizer")
    others = ("text_column", "bpe_size", "val_fraction", "optimizer", "seed")
    for key, value in parsed.explicit.items():
        if key == "dataset":
            name += f"-{Path(str(value).rpartition(':')[2]).stem or 'data'}"
        elif key in words or key in asdict(parsed.config.model) or key in others:
            name += f"-{value}" if key in words else f"-{key}_{value}"
    return Path("out", name.replace("/", "-"))


# what makes two runs the same one; the rest may be given anew when a run is resumed
IDENTITY = {f.name for f in fields(GPTConfig)} - {"dropout"}
IDENTITY |= {"tokenizer", "val_fraction", "seed", "optimizer", "batch_size"}


def check_same_run(now: dict[str, Any], stored: Any, place: Path) -> None:
    """Refuse options that would make a resumed run another one (ValueError that names the first)."""
    if not isinstance(stored, dict):
        raise ValueError(f"{place}: its config.json does not say how it was trained, so it can't be resumed")
    for key in sorted(IDENTITY):
        if key in stored and now.get(key) not in (stored[key], None):
            raise ValueError(
                f"--{key}={now[key]}: the run in {place} has {key}={stored[key]}; leave it out to go on with "
                "that run, or start another without --resume"
            )
