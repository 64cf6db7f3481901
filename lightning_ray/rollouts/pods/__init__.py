"""Rollouts as Kubernetes Jobs: one Job per attempt, and one per grading."""
