# The race over nanoGPT's whole time: what loss the same seconds buy.
base = "shakespeare_laptop.py"

n_layer = 4
n_head = 4
block_size = 128
max_iters = 1100
muon_lr = 0.03
muon_momentum = 0.95
lr_decay = 1.0
