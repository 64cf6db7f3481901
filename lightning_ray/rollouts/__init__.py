"""Who runs the harnesses: the lifecycle of rollouts, their processes, recipes and grading."""
