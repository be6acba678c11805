"""Learned predictions: the chance of a right answer per model, and how much will be written
(Chimera, 3.3 and 3.4).

`service` is the router's side and loads nothing heavy; all other modules belong to training and to
`process`, which answers.
"""
