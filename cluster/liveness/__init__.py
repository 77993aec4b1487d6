"""Which processes still run: heartbeats, the watchdog of an engine, and how an actor ended."""
