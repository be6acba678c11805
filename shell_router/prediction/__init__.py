"""Learned predictions: the chance of a right answer, and output lengths (Chimera, 3.3 and 3.4).

`service` is the router's side and loads nothing heavy. The other modules belong to training and to
`process`, which answers.
"""
