"""A drafter in a process of its own, behind `DraftSource`: handshake, wire format, shared memory, both ends."""
