// The tensors of a step around its forward passes: what the model reads, what it committed, trees that wait.
//
// specray/spec_decode/torch_step_ops.py does the same with torch's operations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "outcome.h"

namespace specray {

// A request table; see RequestBuffer.
struct RequestBuffer {
  int32_t* cells;
  int64_t row_size, kv_column, length_column;

  int32_t* row(int64_t slot) const { return cells + slot * row_size; }
};

// Rows of R requests, each with a tree of up to `width` nodes.
struct StepRows {
  int64_t count, width;
  const int64_t *slots, *starts, *counts;  // [R]; counts: known tokens to compute, the root included
  const int64_t *tokens, *parents;         // [R, width]
  const int64_t* num_nodes;                // [R]
};

// The KV slots of `width` positions from `starts` [R] on (null: from 0), [R, width].
inline void gather_kv_slots(
    const RequestBuffer& buffer, int64_t count, const int64_t* slots, const int64_t* starts, int64_t width, int64_t* kv_slots) {
  for (int64_t r = 0; r < count; ++r) {
    const int32_t* from = buffer.row(slots[r]) + buffer.kv_column + (starts ? starts[r] : 0);
    for (int64_t i = 0; i < width; ++i) *kv_slots++ = from[i];
  }
}

// Flattens rows and trees to T tokens. `step` becomes their ids, positions and KV slots to write, each [T], the places
// of the roots [R], and the KV slots of the first `kv_width` positions [R, kv_width]. `ancestors` [R, width, width] is
// null where no tree has a draft.
inline void build_step(
    const RequestBuffer& buffer, const StepRows& rows, int64_t total, int64_t kv_width, int64_t* step, uint8_t* ancestors) {
  int64_t *ids = step, *positions = ids + total, *written = positions + total, *roots = written + total;
  gather_kv_slots(buffer, rows.count, rows.slots, nullptr, kv_width, roots + rows.count);
  std::vector<int64_t> depths(rows.width);
  int64_t place = 0;
  for (int64_t r = 0; r < rows.count; ++r) {
    const int32_t* row = buffer.row(rows.slots[r]);
    const int64_t *tokens = rows.tokens + r * rows.width, *parents = rows.parents + r * rows.width;
    const int64_t root = rows.starts[r] + rows.counts[r] - 1;  // its position
    for (int64_t position = rows.starts[r]; position <= root; ++position, ++place) {
      ids[place] = row[position];
      positions[place] = position;
      written[place] = row[buffer.kv_column + position];
    }
    roots[r] = place - 1;
    for (int64_t node = 0; node < rows.width; ++node) {
      const bool has_parent = node > 0 && node < rows.num_nodes[r];
      depths[node] = has_parent ? depths[parents[node]] + 1 : 0;
      if (ancestors) {
        uint8_t* seen = ancestors + (r * rows.width + node) * rows.width;
        if (has_parent)
          std::memcpy(seen, ancestors + (r * rows.width + parents[node]) * rows.width, rows.width);
        else
          std::memset(seen, 0, rows.width);
        seen[node] = 1;
      }
      if (!has_parent) continue;
      ids[place] = tokens[node];
      positions[place] = root + depths[node];
      written[place] = row[buffer.kv_column + root + node];
      ++place;
    }
  }
}

// The cells `column` + position of each slot, [T].
inline void gather_cells(
    const RequestBuffer& buffer, int64_t count, const int64_t* slots, const int64_t* positions, int64_t column, int64_t* found) {
  for (int64_t i = 0; i < count; ++i) found[i] = buffer.row(slots[i])[column + positions[i]];
}

// Appends the emitted tokens to each of `slots`.
inline void append_tokens(const RequestBuffer& buffer, int64_t count, const int64_t* slots, const Outcome& outcome) {
  for (int64_t r = 0; r < count; ++r) {
    int32_t* row = buffer.row(slots[r]);
    int32_t& length = row[buffer.length_column];
    std::copy_n(outcome.tokens(r), outcome.num_emitted(r), row + length);
    length += int32_t(outcome.num_emitted(r));
  }
}

// Of positions `starts` to `ends` [R] of each request: the next tokens, positions and KV slots [T]. `last` [R] are the
// places of the requests' last positions.
inline void build_extend(
    const RequestBuffer& buffer, int64_t count, const int64_t* slots, const int64_t* starts, const int64_t* ends, int64_t* ids,
    int64_t* positions, int64_t* written, int64_t* last) {
  int64_t place = 0;
  for (int64_t r = 0; r < count; ++r) {
    const int32_t* row = buffer.row(slots[r]);
    for (int64_t position = starts[r]; position < ends[r]; ++position, ++place) {
      ids[place] = row[position + 1];
      positions[place] = position;
      written[place] = row[buffer.kv_column + position];
    }
    last[r] = place - 1;
  }
}

// Trees that wait for their requests' next step, by slot: [slots, width].
struct PendingTrees {
  int64_t *tokens, *parents;
  int64_t* num_nodes;  // [slots]; NONE: no tree waits
  float* scores;       // null: not known
  int64_t width;
};

constexpr int64_t NONE = -1;

// Keeps `count` trees [count, width]; `scores` null: theirs are 1.
inline void put_trees(
    const PendingTrees& pending, int64_t count, const int64_t* slots, const int64_t* tokens, const int64_t* parents,
    const int64_t* num_nodes, const float* scores, int64_t width) {
  for (int64_t r = 0; r < count; ++r) {
    const int64_t to = slots[r] * pending.width;
    std::copy_n(tokens + r * width, width, pending.tokens + to);
    std::copy_n(parents + r * width, width, pending.parents + to);
    pending.num_nodes[slots[r]] = num_nodes[r];
    if (!pending.scores) continue;
    if (scores)
      std::copy_n(scores + r * width, width, pending.scores + to);
    else
      std::fill_n(pending.scores + to, pending.width, 1.0f);
  }
}

// Takes the trees of `slots`, cut to `most` [count] nodes, and to scores of `least` [count] if that is not null:
// tokens and parents [count, width]. `numbers` [4, count] are the numbers of nodes; the same, or 0 if the drafter's
// logits were not finite; whether a tree is a chain; and the numbers before nodes were cut for their scores.
inline void take_trees(
    const PendingTrees& pending, int64_t count, const int64_t* slots, const int64_t* roots, const int64_t* most,
    const float* least, int64_t vocab_size, int64_t* tokens, int64_t* parents, int64_t* numbers) {
  const int64_t width = pending.width;
  int64_t *num_nodes = numbers, *found = numbers + count, *is_chain = found + count, *within = is_chain + count;
  for (int64_t r = 0; r < count; ++r, tokens += width, parents += width) {
    const int64_t from = slots[r] * width, *own = pending.tokens + from, *own_parents = pending.parents + from;
    const int64_t waiting = std::exchange(pending.num_nodes[slots[r]], NONE);
    bool is_usable = waiting > 0 && own[0] == roots[r];
    for (int64_t node = 0; is_usable && node < waiting; ++node) {
      const bool is_token = own[node] >= 0 && own[node] < vocab_size;
      is_usable = is_token && (node == 0 || (own_parents[node] >= 0 && own_parents[node] < node));
    }
    within[r] = is_usable ? std::min(waiting, most[r]) : 1;
    int64_t kept = within[r];
    if (least) {
      kept = 0;
      for (int64_t node = 0; node < within[r]; ++node) kept += pending.scores[from + node] >= least[r];
      kept = std::max<int64_t>(kept, 1);
    }
    is_chain[r] = 1;
    for (int64_t node = 0; node < width; ++node) {
      const bool is_node = node > 0 && node < kept;
      tokens[node] = node == 0 ? roots[r] : is_node ? own[node] : NONE;
      parents[node] = is_node ? own_parents[node] : NONE;
      if (is_node && parents[node] != node - 1) is_chain[r] = 0;
    }
    num_nodes[r] = kept;
    found[r] = waiting == 0 ? 0 : kept;
  }
}

}  // namespace specray
