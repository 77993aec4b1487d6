"""A drafter in its own process, as a `DraftSource`: handshake, wire format, shared memory and both endpoints."""
