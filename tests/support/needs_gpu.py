"""The mark of tests/gpu: they run where there is an NVIDIA GPU and Triton's kernels are compiled (`make test-gpu`)."""

import os

import pytest
import torch

IS_HERE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not IS_HERE, reason="needs an NVIDIA GPU: make test-gpu on one")]
