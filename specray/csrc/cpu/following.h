// A step of plain decoding after another one whose tokens the host does not know yet.
#pragma once

#include <algorithm>

#include "layers.h"
#include "steps.h"

namespace specray {

// The step in which each of the R requests of `before`, in `slots`, reads the token after those. `numbers` keeps what the
// step points to: [R] positions, [R] KV slots to write, [R, slots_width] those to read, and [2 R] more. `slots_width` is one
// more than before.
inline Step step_after(const Step& before, const RequestBuffer& buffer, const int64_t* slots, int64_t* numbers) {
  const int64_t count = before.requests.count, width = before.requests.slots_width + 1;
  int64_t *positions = numbers, *written = positions + count, *kv_slots = written + count;
  int32_t* query_lens = reinterpret_cast<int32_t*>(kv_slots + count * width);
  int32_t *kv_lens = query_lens + count, *tree_sizes = kv_lens + count;
  gather_kv_slots(buffer, count, slots, nullptr, width, kv_slots);
  for (int64_t r = 0; r < count; ++r) {
    positions[r] = before.requests.kv_lens[r];
    written[r] = kv_slots[r * width + positions[r]];
    kv_lens[r] = int32_t(positions[r]) + 1;
  }
  std::fill_n(query_lens, count, 1);
  std::fill_n(tree_sizes, 2 * count, 0);
  Step step = before;
  step.count = count;
  step.positions = positions;
  step.written = written;
  step.requests = {int32_t(count), int32_t(width), 0, 0, query_lens, kv_lens, tree_sizes, kv_slots, nullptr};
  step.read_lens = nullptr;
  return step;
}

}  // namespace specray
