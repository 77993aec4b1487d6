"""The choice of a token from a row of logits with Triton: filters, noise and the largest score, without a sort.

The rules are those of `specray.ops.sampling`. Rows may be the nodes of trees, which share options. A row's arithmetic
runs over fixed blocks of the vocabulary in order, so its bits do not depend on the other rows.

Scores are compared as integers of the same order. Then NaN is the largest value, as in torch's argmax, and filters can
be found by bisection, which ends at the exact logit.
"""

import triton
import triton.language as tl

from specray.ops.gpu.noise_kernels import gumbel_of

GREEDY_BELOW: tl.constexpr = tl.constexpr(1e-5)  # see `specray.ops.sampling_state`
LOWEST: tl.constexpr = tl.constexpr(-(2**31))  # below every logit


@triton.jit
def _ordered(values):
    """int32 in the order of float32 `values`; NaN is the largest, and both zeros are equal."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(values == 0.0, 0, bits)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, 0x7FFFFFFF, bits)


@triton.jit
def _value_of(ordered):
    bits = ordered.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load(logits, mask, column, size, HAS_MASK: tl.constexpr):
    """Logits of one row, as float32; minus infinity past its end, and where its mask forbids the token."""
    is_column = column < size
    values = tl.load(logits + column, mask=is_column, other=float("-inf")).to(tl.float32)
    if HAS_MASK:
        words = tl.load(mask + column // 32, mask=is_column, other=0)
        values = tl.where((words >> (column % 32)) & 1 != 0, values, float("-inf"))
    return values


@triton.jit
def _tree_of(trees, row, HAS_TREES: tl.constexpr):
    """The tree of a row of logits, whose options it has, -1 for padding; without HAS_TREES each row is one."""
    tree = row
    if HAS_TREES:
        tree = tl.load(trees + row)
    return tree


@triton.jit
def add_noise(
    out,  # float32 [rows, vocab_size]
    logits,  # [rows, vocab_size], of any type of floats
    keys,  # int32 [trees, 2]
    temperature,  # float32 [trees], `options_stride` apart
    column_ids,  # int64 [vocab_size]: token ids of the columns; unused without HAS_IDS
    vocab_size,
    node_width,  # rows of a tree
    options_stride,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits over temperature, with noise, where requests are sampled; the same logits elsewhere."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tree, is_column = row // node_width, column < vocab_size
    values = tl.load(logits + row * vocab_size + column, mask=is_column, other=0.0).to(tl.float32)
    heat = tl.load(temperature + tree * options_stride)
    if heat >= GREEDY_BELOW:
        token = column
        if HAS_IDS:
            token = tl.load(column_ids + column, mask=is_column, other=0).to(tl.int32)
        noise = gumbel_of(token, tl.load(keys + tree * 2), tl.load(keys + tree * 2 + 1))
        values = tl.div_rn(values, tl.zeros([BLOCK], tl.float32) + heat) + noise
    tl.store(out + row * vocab_size + column, values, mask=is_column)


@triton.jit
def choose_in_blocks(
    best,  # int32 [rows, blocks]: the largest score, as `_ordered`
    best_ids,  # int32 [rows, blocks]: its first column
    logits,  # [rows, vocab_size], of any type of floats
    mask,  # int32 [rows, mask_width], a bit for each token; unused without HAS_MASK
    trees,  # int64 [rows]: see `_tree_of`
    keys,  # int32 [rows, 2]; unused without SAMPLES, like the next
    temperature,  # float32 [trees], `options_stride` apart
    lowest,  # float32 [rows]: scaled logits below it are filtered out; unused without FILTERS
    column_ids,  # int64 [vocab_size]: token ids of the columns; unused without HAS_IDS
    first_id,  # token id of the first column; unused with HAS_IDS
    vocab_size,
    mask_width,
    options_stride,
    SAMPLES: tl.constexpr,
    FILTERS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_TREES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With FILTERS, only of rows where some tokens are filtered out; the others keep what was found without."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_chosen = True
    if FILTERS:
        is_chosen = tl.load(lowest + row) > float("-inf")
    if is_chosen:
        column = block * BLOCK + tl.arange(0, BLOCK)
        scores = _load(logits + row * vocab_size, mask + row * mask_width, column, vocab_size, HAS_MASK)
        if SAMPLES:
            tree = _tree_of(trees, row, HAS_TREES)
            heat = tl.load(temperature + tree * options_stride, mask=tree >= 0, other=0.0)
            if heat >= GREEDY_BELOW:
                scaled = tl.div_rn(scores, tl.zeros([BLOCK], tl.float32) + heat)
                token = first_id + column
                if HAS_IDS:
                    token = tl.load(column_ids + column, mask=column < vocab_size, other=0).to(tl.int32)
                noise = gumbel_of(token, tl.load(keys + row * 2), tl.load(keys + row * 2 + 1))
                scores = scaled + noise
                if FILTERS:
                    scores = tl.where(scaled < tl.load(lowest + row), float("-inf"), scores)
        ordered = tl.where(column < vocab_size, _ordered(scores), LOWEST)
        result = row * tl.num_programs(1) + block
        tl.store(best + result, tl.max(ordered, 0))
        tl.store(best_ids + result, block * BLOCK + tl.argmax(ordered, 0, tie_break_left=True))


@triton.jit
def choose_among_blocks(
    tokens,  # int64 [rows]
    is_finite,  # int8 [rows]: whether the token's logit is
    scores,  # int32 [rows]: the token's score, as `_ordered`
    best,
    best_ids,
    logits,
    mask,
    column_ids,
    num_blocks,
    first_id,
    vocab_size,
    mask_width,
    HAS_MASK: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS_PADDED)
    ordered = tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=LOWEST)
    token = tl.load(best_ids + row * num_blocks + tl.argmax(ordered, 0, tie_break_left=True)).to(tl.int64)
    value = _load(logits + row * vocab_size, mask + row * mask_width, token, vocab_size, HAS_MASK)
    chosen = first_id + token
    if HAS_IDS:
        chosen = tl.load(column_ids + token)
    tl.store(tokens + row, chosen)
    tl.store(scores + row, tl.max(ordered, 0))
    tl.store(is_finite + row, (tl.abs(value) < float("inf")).to(tl.int8))


@triton.jit
def _weights(values, most, heat):
    """Probabilities, up to a factor: 1 for the logit `most`."""
    return tl.exp((values - most) / heat)


@triton.jit
def _above(logits, mask, pivots, most, heat, size, HAS_MASK: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """(number, sum of weights) of the tokens above each of `pivots`, int32 and float32 [PIVOTS]."""
    counts = tl.zeros([BLOCK, PIVOTS], tl.int32)
    masses = tl.zeros([BLOCK, PIVOTS], tl.float32)
    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = _load(logits, mask, column, size, HAS_MASK)
        ordered = tl.where(column < size, _ordered(values), LOWEST)
        is_above = ordered[:, None] > pivots[None, :]
        counts += is_above.to(tl.int32)
        masses += tl.where(is_above, _weights(values, most, heat)[:, None], 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _pivots(low, high, PIVOTS: tl.constexpr):
    """int64 [PIVOTS], evenly between the bounds."""
    return low + (high - low) * (tl.arange(0, PIVOTS) + 1).to(tl.int64) // (PIVOTS + 1)


@triton.jit
def _narrowed(low, high, pivots, is_enough):
    """The bounds of the smallest value that is enough, given whether each of the ascending `pivots` is."""
    high = tl.minimum(high, tl.min(tl.where(is_enough, pivots, high), 0))
    return tl.maximum(low, tl.max(tl.where(is_enough, low, pivots), 0)), high


@triton.jit
def _last_kept(
    logits,
    mask,
    top,
    most,
    found,
    passes,
    heat,
    top_k,
    top_p,
    size,
    HAS_MASK: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest logit that top-k, and top-p over what it keeps, let pass, as `_ordered`; `top` is the largest one.

    A logit passes while fewer than k tokens, and less than the share p, are above it. LOWEST if `found` passes, and if
    it `passes` what else there is.
    """
    is_second = tl.arange(0, PIVOTS) > 0
    pivots = tl.where(is_second, found, LOWEST).to(tl.int64)
    numbers, masses = _above(logits, mask, pivots, most, heat, size, HAS_MASK, PIVOTS, BLOCK)
    total, above_found = tl.max(masses, 0), tl.min(masses, 0)
    low, kept = tl.full([], LOWEST, tl.int64), tl.full([], LOWEST, tl.int64)
    count = tl.full([], size, tl.int64)
    if top_k > 0:
        count = tl.minimum(top_k, count)
        passes = passes & (tl.min(numbers, 0) < count)
        kept = tl.where(passes & (top_p >= 1.0), low, top.to(tl.int64))
        while kept - low > 1:
            pivots = _pivots(low, kept, PIVOTS)
            number, _ = _above(logits, mask, pivots, most, heat, size, HAS_MASK, PIVOTS, BLOCK)
            low, kept = _narrowed(low, kept, pivots, number < count)
    if top_p < 1.0:
        if top_k > 0:  # only as many of the tokens that are tied with the last one as there is room for
            pivots = _pivots(kept, kept, PIVOTS)
            numbers, masses = _above(logits, mask, pivots, most, heat, size, HAS_MASK, PIVOTS, BLOCK)
            room = (count - tl.max(numbers, 0)).to(tl.float32)
            total = tl.max(masses, 0) + room * _weights(_value_of(kept), most, heat)
        passes = passes & (above_found < top_p * total)
        high = tl.where(passes, LOWEST, top.to(tl.int64))
        low = tl.maximum(kept - 1, LOWEST)
        while high - low > 1:
            pivots = _pivots(low, high, PIVOTS)
            _, masses = _above(logits, mask, pivots, most, heat, size, HAS_MASK, PIVOTS, BLOCK)
            low, high = _narrowed(low, high, pivots, masses < top_p * total)
        kept = high
    return tl.where(passes, LOWEST, kept), passes


@triton.jit
def find_lowest(
    lowest,  # float32 [rows]
    best,  # of `choose_in_blocks` without filters, like the next
    best_ids,
    logits,
    mask,
    trees,
    temperature,  # float32 [trees], `options_stride` apart, like top_p and min_p
    top_k,  # int64 [trees], contiguous
    top_p,
    min_p,
    vocab_size,
    mask_width,
    options_stride,
    num_blocks,
    HAS_MASK: tl.constexpr,
    HAS_TREES: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    """The smallest scaled logit that passes top-k, top-p over what top-k keeps, and min-p.

    Minus infinity: the token that has the largest score of all passes, so that it does not matter which others do.
    """
    row = tl.program_id(0).to(tl.int64)
    tree = _tree_of(trees, row, HAS_TREES)
    heat = tl.load(temperature + tree * options_stride, mask=tree >= 0, other=0.0)
    tree = tl.maximum(tree, 0)
    share, number = tl.load(top_p + tree * options_stride), tl.load(top_k + tree)
    floor = tl.load(min_p + tree * options_stride)
    logits += row * vocab_size
    mask += row * mask_width
    result = tl.full([], float("-inf"), tl.float32)
    if (heat >= GREEDY_BELOW) & ((number > 0) | (share < 1.0) | (floor > 0.0)):
        tops = tl.full([BLOCK], LOWEST, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tops = tl.maximum(tops, _ordered(_load(logits, mask, column, vocab_size, HAS_MASK)))
        top = tl.max(tops, 0)
        most = _value_of(top)
        scaled = tl.div_rn(most, heat)
        # A row that is not finite is not filtered: it fails, or takes its first infinity.
        if tl.abs(scaled) < float("inf"):
            block = tl.arange(0, BLOCKS_PADDED)
            ordered = tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=LOWEST)
            token = tl.load(best_ids + row * num_blocks + tl.argmax(ordered, 0, tie_break_left=True))
            found = _load(logits, mask, token, vocab_size, HAS_MASK)
            least = scaled + tl.where(floor > 0.0, tl.log(tl.where(floor > 0.0, floor, 1.0)), float("-inf"))
            passes = tl.div_rn(found, heat) >= least
            kept, passes = _last_kept(
                logits,
                mask,
                top,
                most,
                _ordered(found),
                passes,
                heat,
                number,
                share,
                vocab_size,
                HAS_MASK,
                PIVOTS,
                BLOCK,
            )
            if kept > LOWEST:
                result = tl.div_rn(_value_of(kept), heat)
            if (floor > 0.0) & ~passes:
                result = tl.maximum(result, least)
    tl.store(lowest + row, result)
