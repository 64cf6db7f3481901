"""Attempts in containers of podman on one machine, in place of Jobs of a cluster."""
