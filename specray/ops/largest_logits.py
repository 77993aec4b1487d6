"""What a forward pass gives in place of logits where only their largest is read."""

Without the kernels the largest one is found in two levels, because torch's argmax does not vectorise on a CPU.
"""

import math
from typing import NamedTuple

from torch import Tensor


class LargestLogits(NamedTuple):
    """The token of the largest logit of each of n rows, in place of the logits, for steps that need no more."""

    token_ids: Tensor  # int64 [n]; -1 where logits are not finite
