"""What a harness talks to: HTTP in its own dialect on one side, token ids on the other.

A request passes `access.py` (whose key is it), a dialect of `dialects/` (what does it ask),
`render.py` (text to tokens), the engine pool, the store (record), and the same way back (answer).
`service.py` is that path; `app.py` is the Ray Serve deployment around it and `deploy.py` starts it.
"""
