# Character-level Shakespeare with nanoGPT's GPU shape: 6 layers, 6 heads, 384 wide, 10.7 M parameters.
# For a GPU; not timed here. Name the text: python train.py config/shakespeare_char.py --dataset=PATH
dataset = "tinyshakespeare.txt"
tokenizer = "char"

n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
norm = "pre"
bias = False
dropout = 0.2

batch_size = 64
max_iters = 5000
learning_rate = 1e-3
lr_floor = 0.1
warmup = 0.02
weight_decay = 0.1
beta2 = 0.99
