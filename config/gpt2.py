# GPT-2 small, 124 M parameters, on 10 billion tokens of educational web text from the hub.
# For GPUs; not timed here. The table is padded to a multiple of 64: 50,304 rows for GPT-2's 50,257 ids.
dataset = "hub:HuggingFaceFW/fineweb-edu:sample-10BT"
tokenizer = "gpt2"
val_fraction = 0.001

vocab_size = 50304
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
norm = "pre"

batch_size = 512
micro_batch_size = 16
max_iters = 19000
learning_rate = 6e-4
lr_floor = 0.1
warmup = 0.04
weight_decay = 0.1
beta2 = 0.95

eval_interval = 500
final_eval_windows = 1000
save_interval = 1000
