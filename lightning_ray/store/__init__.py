"""The durable truth about rollouts, calls and rewards: SQLite, an append log and Arrow segments.

`rollouts.py` holds the `RolloutStore` (plain, synchronous, one owner), `database.py` and `log.py`
the SQLite file and the call log below it, `actor.py` the Ray actor that owns one store and groups
commits.
"""
