"""How the tiny model family is trained: problems, tokenizer, networks, the two lessons, and what
they learned.
"""
