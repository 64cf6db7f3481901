"""vLLM actors: tokens in; tokens, log-probabilities and policy version out.

`actor.py` is one vLLM engine in a Ray actor: `admission.py` and `meter.py` say how many calls it
takes at a time, `partial.py` keeps what an update interrupts. `pool.py` routes calls over several
engines, `courier.py` carries them in groups. `transfer.py`, `worker_extension.py` and `weights.py`
bring new weights into a running engine and compare what arrived.
"""
