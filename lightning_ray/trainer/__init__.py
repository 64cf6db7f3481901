"""Training on verl's engine workers: advantages, loss, weights and checkpoints."""

# Before anything else of verl, much of which asks for the platform when it is imported.
from lightning_ray import cpu_platform as cpu_platform
