"""Detecting dead and frozen processes and connections. `docs/liveness.md` lists every heartbeat and deadline."""
