"""The device that a rank computes on."""

import torch

from specray.config import EngineConfig


def choose_device(config: EngineConfig, rank: int) -> torch.device:
    """`device: auto` is a GPU if this process sees one. Rank r takes the r-th GPU that it sees; Ray shows it one."""
    wants_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if not wants_gpu:
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())
