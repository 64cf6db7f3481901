"""What a schedule of training is worth: runs in virtual time (`python -m lightning_ray simulate`).

`world.py` is the clockwork (engines, rollouts, events), `schedules.py` drives it through the state
machines of a real run, `workload.py` says what rollouts do (a recorded run, or a stated
distribution), `command.py` is the command line and the table.
"""
