"""Files and batches of requests over HTTP.

`storage` keeps files and the records of batches. `run` takes a batch from its input file to its
end: `lines` reads and checks the input and keeps the results, `runner` answers. `routes` is what
the router attaches, `uploads` receives files.
"""
