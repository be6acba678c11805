"""Child processes: commands, Python functions and batch workers, all of which end with this one.

- `command.CommandProcess` runs a program with its output in a log.
- `child.PythonProcess` runs a Python function in a fork of multiprocessing's fork server.
- `worker.WorkerProcess` answers calls in batches through such a function.
- `restarts.keep_running` starts what has ended again, by a `RestartPolicy`.
"""
