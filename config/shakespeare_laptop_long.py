# The race over the whole time of nanoGPT's recipe. On two CPU cores: 90 s, 1.59 nats on the whole val split.
base = "shakespeare_laptop.py"

n_layer = 4
n_head = 4
block_size = 128
max_iters = 800
muon_lr = 0.03
muon_momentum = 0.95
lr_decay = 1.0
