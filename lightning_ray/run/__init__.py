"""The training run: collect, update, sync, checkpoint, validate, and again.

`cycle.py` is the pure state machine, `driver.py` does what it says with `stack.py` (store, engines,
gateway, controller) and the trainer; `data.py` orders the tasks, `checkpoint.py` keeps what a run
resumes from, `cluster.py` connects to Ray, `command.py` is the command line of a job.
"""
