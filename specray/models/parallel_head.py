"""P-EAGLE heads (arXiv:2602.01469): EAGLE-3 heads that predict several positions in one forward.

A position whose token and hidden states are not known yet reads a mask instead: the embedding of `ptd_token_id` and a
learned state. The layout is that of vLLM's parallel drafting (vllm-project/vllm#32887).
"""

from specray.models.eagle3 import Eagle3Head
from specray.models.eagle_files import HeadConfig, TensorNames
from specray.models.llama_shape import LlamaShape
from specray.models.loading import Loader
from specray.models.target_matrices import TargetMatrices


class ParallelHead(Eagle3Head):
    """An EAGLE-3 head with a mask."""

    has_mask = True

    def __init__(
        self, config: HeadConfig, shape: LlamaShape, loader: Loader, names: TensorNames, shared: TargetMatrices
    ) -> None:
        super().__init__(config, shape, loader, names, shared)
        assert config.ptd_token_id is not None, "load_eagle3_head checks it"
        self.mask_token_id = config.ptd_token_id
        columns = len(self.aux_hidden_state_layers) * shared.shape.hidden_size
        self.mask_state = self.fuse(loader.tensor(names.of_plain("mask_hidden"), (1, columns)))  # [1, H]
        if self.network is not None and not self.network.fuses:
            self.network = None
        if self.network is not None:
            self.network.use_mask(self.mask_token_id, self.mask_state[0].float())
