"""Files and batches of requests: what is kept of them on disk, and how a batch is run to its end.

`folder` keeps files and what is known of batches. A `run` takes one batch from its input file to its end: `lines`
reads and checks, a `runner` answers, `results` keeps the answers. `runs` owns the runs of one router.
"""
