"""The device that a rank computes on."""

import torch

from specray.config import EngineConfig
from specray.errors import ConfigError


def choose_device(config: EngineConfig, rank: int) -> torch.device:
    """`device: auto` is a GPU if this process sees one. Rank r takes the r-th GPU that it sees; Ray shows it one.

    That GPU becomes the process's current one, because kernels that are not torch's are launched there.
    ConfigError for `device: cuda` without a GPU.
    """
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if config.device == "cpu" or (config.device == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        raise ConfigError(
            "device=cuda, but torch finds no GPU here; check nvidia-smi and that torch was built for CUDA, or set "
            "device to auto or cpu"
        )
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
