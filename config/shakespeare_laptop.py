# The race: character-level Shakespeare to nanoGPT's laptop loss, in a tenth of its time, on two cores.
# Two layers are enough for it, and half the work of four.
# On two CPU cores: 7 to 8 s, 1.92 nats on the whole validation split.
# Name the text: python train.py config/shakespeare_laptop.py --dataset=PATH
dataset = "tinyshakespeare.txt"
tokenizer = "char"

n_layer = 2
n_head = 2
n_embd = 128
block_size = 64
norm = "pre"
position = "rope"
qk_norm = True
bias = False
tie_weights = False

batch_size = 12
max_iters = 240
optimizer = "muon"
learning_rate = 1e-2
muon_lr = 0.05
muon_momentum = 0.8
schedule = "linear"
lr_floor = 0.0
lr_decay = 0.7
warmup = 0.0
grad_clip = 0.0
eval_interval = 0
