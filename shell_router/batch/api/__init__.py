"""Files and batches of requests over HTTP.

`storage` keeps files and what is known of batches. A `run` takes a batch from its input file to its
end: `lines` reads and checks it and keeps the results, a `runner` answers. `routes` is what the
router attaches.
"""
