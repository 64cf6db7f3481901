"""lightning_ray: reinforcement learning for real agents, on Ray.

The agent harness that you deploy runs unchanged; it only gets another base URL and another key. The
folders are the architecture; a module imports from its own line or one above it:

    config, records, views, placement, metrics, line    the settings, the nouns, the bundles
    store/, engine/, samples/           durable rollouts; vLLM actors; calls to training rows
    gateway/, rollouts/, trainer/       what harnesses talk to; who runs them; who learns
    run/, report/, simulate/            the training cycle, what the user sees of it, its schedules
    tasks/                              ready-made task families (only jobs import from here)

`client` talks to the operator API of a run, `canary` has the strings that nobody may see, and
`cpu_platform` is verl's platform without a GPU.
"""

__version__ = "0.1.0"
