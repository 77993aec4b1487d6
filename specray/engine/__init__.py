"""The host side of the engine: requests, KV blocks, scheduling and detokenization. Does not import torch."""
