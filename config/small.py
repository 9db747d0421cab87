# A GPT that learns Python on a laptop, no GPU, in minutes.
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

batch_size = 32
max_iters = 1500
learning_rate = 3e-3
