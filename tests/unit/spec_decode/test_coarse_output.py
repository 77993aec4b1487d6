"""A draft head's output matrix in 4 bits: the most probable tokens have the probabilities of its precise rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.ops.cpu.library import kernels
from specray.ops.cpu.packed_network import CoarseOutput
from specray.ops.cpu.trees import GrownTrees, TreeLimits, TreeNetwork, TreeOptions, TreeRequests
from specray.ops.noise import gumbel, noise_keys
from specray.sampling_params import SamplingParams
from specray.spec_decode.fused_growth import FusedDrafts
from tests.support.engine import make_llm
from tests.support.methods import eagle

CANDIDATES = 4  # for each child


def expected(
    network: TreeNetwork, requests: TreeRequests, limits: TreeLimits, options: TreeOptions, row: int
) -> torch.Tensor:
    """float32 [num_columns]: logits of a root's children, under noise if the request is sampled."""
    output, norm = network._output, network._norm
    assert isinstance(output, CoarseOutput)
    assert norm is not None
    state = torch.nn.functional.rms_norm(requests.output[row].float(), norm.shape, norm, network._layers.sizes.eps)
    logits = output.matrix(state[None])[0]
    added, temperature = torch.zeros_like(logits), 1.0
    if options.noise is not None:
        seeds, ends, temperatures = options.noise
        temperature = float(temperatures[row])
        if temperature:
            assert network._target_ids is not None
            keys = noise_keys(seeds[row : row + 1], ends[row : row + 1] + 1)
            added = gumbel(keys, 0, network._target_ids)[0]
        temperature = temperature or 1.0
    best = (logits / temperature + added).topk(CANDIDATES * limits.topk).indices
    logits[best] = output.rows[best].float() @ state
    return logits / temperature + added


@pytest.mark.skipif(kernels() is None, reason="torch reads the whole matrix")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_largest_logits_are_computed_again(
    temperature: float, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple[TreeNetwork, TreeRequests, TreeLimits, TreeOptions], GrownTrees]] = []
    grow = TreeNetwork.grow

    def recorded(
        network: TreeNetwork, attention: Any, requests: TreeRequests, limits: TreeLimits, options: TreeOptions
    ) -> GrownTrees:
        trees = grow(network, attention, requests, limits, options)
        calls.append(((network, requests, limits, options), trees))
        return trees

    monkeypatch.setattr(TreeNetwork, "grow", recorded)
    # So that the outputs that the trees grow from can be seen, which they cannot where two plans are in flight either.
    monkeypatch.setattr(FusedDrafts, "extend_and_grow", lambda *_: None)
    speculative = eagle(3, shape=(1, 4, 4), draft_vocab_size=40)(toy, tmp_path)
    params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    speculative = speculative.model_copy(update={"draft_model_quantization": "int8"})
    with make_llm(toy, speculative=speculative, disable_overlap_schedule=True) as llm:
        llm.generate([[5, 9, 11], [7, 8]], [params, params])
        assert len(calls) >= 10
        for call, (tokens, _, scores, _) in calls:
            network = call[0]
            assert network._target_ids is not None
            for row in range(len(tokens)):
                probs, best = expected(*call, row).softmax(-1).topk(tokens.shape[1] - 1)
                torch.testing.assert_close(scores[row, 1:], probs, rtol=1e-2, atol=1e-4)
                assert tokens[row, 1:].tolist() == network._target_ids[best].tolist()
