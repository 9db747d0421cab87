# small.py with multi-query attention: 4 query heads on 1 KV head.
base = "small.py"
attention = "mqa"
