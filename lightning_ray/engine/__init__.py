"""vLLM actors: tokens in; tokens, log-probabilities and policy version out.

`actor.py` is one vLLM engine in a Ray actor, `pool.py` routes calls over several of them,
`weights.py` and `worker_extension.py` bring new weights into a running engine.
"""
