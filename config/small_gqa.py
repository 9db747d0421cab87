# small.py with grouped-query attention: 4 query heads on 2 KV heads.
base = "small.py"
attention = "gqa"
