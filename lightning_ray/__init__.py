"""lightning_ray: reinforcement learning for real agents, on Ray.

The agent harness that you deploy runs unchanged; it only gets another base URL and another key. The
folders are the architecture, and imports go one way only, from a lower line to a higher one:

    config, records, placement, metrics      the nouns, the settings, the bundles
    store, engine/, samples/                 durable rollouts; vLLM actors; calls to training rows
    gateway/, rollouts/, trainer/            what harnesses talk to; who runs them; who learns
    run, report/                             the training cycle and what the user sees of it
    tasks/                                   ready-made task families (only jobs import from here)
"""

__version__ = "0.1.0"
