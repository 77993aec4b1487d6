"""A request's noise inside Triton kernels: the function of `specray.ops.noise`, without a tensor of noise.

The integer hashes are the same words as torch's. The two logarithms may differ from torch's in the last bits, which
changes no text: on a GPU with these kernels every token is chosen by them.
"""

import triton
import triton.language as tl

from specray.ops.gpu.shared_kernels import place_of


@triton.jit
def _splitmix(words):
    """The finaliser of SplitMix64 (Steele et al. 2014) on uint64."""
    words = words + 0x9E3779B97F4A7C15
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)


@triton.jit
def noise_words(seed, positions):
    """The two int32 words of `noise_keys`, from int64 values."""
    words = _splitmix(_splitmix(seed.to(tl.uint64, bitcast=True)) ^ positions.to(tl.uint64, bitcast=True))
    low = (words & 0xFFFFFFFF).to(tl.uint32)
    return (words >> 32).to(tl.uint32).to(tl.int32, bitcast=True), low.to(tl.int32, bitcast=True)


@triton.jit
def _mixed(bits, key):
    """Two rounds of a 32-bit integer hash on uint32, with `key` between them."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) + key
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def uniform_of(ids, first, second):
    """float32 in (0, 1) of token ids int32 under the two words of a key."""
    first, second = first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True)
    hashes = _mixed((ids.to(tl.uint32, bitcast=True) + 1) * 0x9E3779B9, 0x2545F491)
    bits = _mixed(hashes + first, second) & 0x7FFFFFFF
    uniform = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * (2.0**-31)
    return tl.minimum(uniform, 1.0 - 2.0**-24)


@triton.jit
def gumbel_of(ids, first, second):
    """Standard Gumbel noise, float32."""
    uniform = uniform_of(ids, first, second)
    rest = 1.0 - uniform
    # -log(1 - u); what rounding 1 - u lost is added again, so that small u, which give large noise, are exact.
    exponential = -(tl.log(rest) + ((1.0 - rest) - uniform) / rest)
    return -tl.log(exponential)


@triton.jit
def position_keys(
    keys,  # int32 [T, 2]
    trees,  # int64 [T]: the nodes' trees, -1 behind all nodes
    seeds,  # int64 [B]
    lengths,  # int64 [B]: positions of the tokens after the roots
    num_nodes,  # int64 [B]
    parents,  # int64 [B, WIDTH], rows `parents_stride` apart
    max_depth,
    seeds_stride,
    parents_stride,
    num_tokens,  # T, at most B * WIDTH
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The keys of the tokens after a tree's nodes, at their depths; deeper nodes take `max_depth`."""
    tree, node = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    count = tl.load(num_nodes + tree)
    is_node = node < count
    ancestor = tl.load(parents + tree * parents_stride + node, mask=is_node, other=-1)
    depth = tl.zeros([PADDED], tl.int64)
    for _ in range(max_depth):
        depth += (ancestor >= 0).to(tl.int64)
        ancestor = tl.load(parents + tree * parents_stride + ancestor, mask=ancestor >= 0, other=-1)
    first, second = noise_words(tl.load(seeds + tree * seeds_stride), tl.load(lengths + tree) + depth)
    place = place_of(num_nodes, tree, node, count, WIDTH)
    is_place = (node < WIDTH) & (place < num_tokens)
    tl.store(keys + place * 2, first, mask=is_place)
    tl.store(keys + place * 2 + 1, second, mask=is_place)
    tl.store(trees + place, tl.where(is_node, tree, -1), mask=is_place)
