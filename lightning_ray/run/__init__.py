"""The training run: collect, update, sync, checkpoint, validate, and again.

`cycle.py` is the pure state machine, `driver.py` does what it says with `stack.py` (store, engines,
gateway, controller) and the trainer. `data.py` orders the tasks, `groups.py` says which groups an
update takes and `collection.py` has them run, `sync.py` brings the weights to the engines,
`checkpoint.py` and `storage.py` keep what a run resumes from, `ending.py` what it leaves behind.
`command.py` is the command line of a job, `cluster.py` connects to Ray, `waiting.py` and
`telling.py` are for people who wait; `evaluation.py` is pass@k of finished models.
"""
