"""Host side of the engine: requests, blocks, scheduling, text. No torch here."""
