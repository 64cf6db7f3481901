"""What a run shows a person: the live console, and the report at the end.

`console` draws the running run, `curves` the picture of its metrics, `transcripts` three sample
rollouts, `summary` the table before/after and the closing lines. Everything here reads plain data
and the files of a run directory; nothing decides anything.
"""
