"""What a run shows a person: the live console, the report at the end, and evaluations.

`console` draws the running run, `curves` the picture of its metrics, `transcripts` three sample
rollouts, `summary` the table before/after and the closing lines; `why` explains what became of a
token. `evaluations` is the record of an evaluation, `evaluation_tables` shows it, `statistics` says
what its numbers are worth. Everything here reads plain data and the files of a run directory;
nothing decides anything.
"""
