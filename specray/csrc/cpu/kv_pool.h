// The paged KV pool of one rank: where keys and values lie, how they are written and moved, and how they are read ahead.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "outcome.h"
#include "simd.h"

namespace specray {

struct Pool {
  static constexpr int32_t BFLOAT16 = 1, INT8 = 3, E4M3 = 4, E5M2 = 5;

  void* data;  // of one layer: [slots, 2, heads, dim]; in INT8 a head's row is followed by its float32 scale
  int64_t slot_bytes;  // from one slot to the next
  int32_t type;        // FLOAT32, BFLOAT16, FLOAT16, INT8, E4M3 or E5M2
  int32_t num_heads;
  int32_t dim;
};

// How the queries of one layer attend.
struct LayerAttention {
  Pool pool;
  int32_t num_heads;   // of queries
  int32_t window;      // a query sees keys less than this far before its own; 0: all
  float scale;         // of scores
  float softcap;       // scores become softcap * tanh(score / softcap); 0: they stay
  const float* sinks;  // [num_heads]: logits that only join the sums of the softmax; null: none

  int fold() const { return num_heads / pool.num_heads; }  // query heads that share a KV head
};

// Elements of a head's row, its scale included.
template <class T>
inline int row_size(int dim) {
  return std::is_same_v<T, scaled_int8> ? dim + int(sizeof(float)) : dim;
}

// The scale of a head's row.
inline float row_scale(const scaled_int8* row, int dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof(scale));
  return scale;
}

// One head's key (0) or value (1) of a slot.
template <class T>
inline const T* pool_row(const Pool& pool, int64_t slot, int which, int head) {
  const char* data = static_cast<const char*>(pool.data) + slot * pool.slot_bytes;
  return reinterpret_cast<const T*>(data) + (which * pool.num_heads + head) * row_size<T>(pool.dim);
}

// Slots that are read soon. They lie in many places, and waiting for one after the other takes longer than the
// arithmetic, so each call brings one of them closer: the keys and values of all heads, which lie side by side.
struct Ahead {
  struct Slots {
    const int64_t* slots;
    int count;
  };

  Ahead(const Pool& pool, int row_bytes, const Slots& first, const Slots& second)
      : data_(static_cast<const char*>(pool.data)), slot_bytes_(pool.slot_bytes),
        read_bytes_(int64_t(2) * pool.num_heads * row_bytes), left_(first), then_(second) {}

  [[gnu::always_inline]] void fetch() {  // a call would move all sums out of registers and back
    if (left_.count == 0) left_ = std::exchange(then_, Slots{});
    if (left_.count == 0) return;
    const char* slot = data_ + *left_.slots++ * slot_bytes_;
    --left_.count;
    for (int64_t b = 0; b < read_bytes_; b += LINE) __builtin_prefetch(slot + b, TO_READ, LARGER_CACHES);
  }

 private:
  const char* data_;
  const int64_t slot_bytes_, read_bytes_;
  Slots left_, then_;
};

// Writes a row [heads, dim] of keys or values of one token.
template <class T>
inline void write_row(const Pool& pool, int64_t slot, int which, const float* from) {
  T* to = const_cast<T*>(pool_row<T>(pool, slot, which, 0));
  for (int i = 0; i < pool.num_heads * pool.dim; ++i) from_float(from[i], to + i);
}

// The same, each head rounded to 127 steps on each side of zero. What is not finite has a scale that is not a number.
inline void write_int8(const Pool& pool, int64_t slot, int which, const float* from) {
  for (int head = 0; head < pool.num_heads; ++head, from += pool.dim) {
    scaled_int8* to = const_cast<scaled_int8*>(pool_row<scaled_int8>(pool, slot, which, head));
    float most = 0.0f;
    bool is_finite = true;
    for (int i = 0; i < pool.dim; ++i) {
      most = std::max(most, std::fabs(from[i]));
      is_finite &= std::fabs(from[i]) <= 3.0e38f;
    }
    const float scale = is_finite ? most / 127.0f : NAN, inverse = is_finite && most > 1e-35f ? 127.0f / most : 0.0f;
    for (int i = 0; i < pool.dim; ++i) to[i].value = is_finite ? int8_t(std::nearbyintf(from[i] * inverse)) : int8_t(0);
    std::memcpy(to + pool.dim, &scale, sizeof(scale));
  }
}

// Moves the keys and values of accepted paths behind their prefixes, in all layers. Of B requests, `kv_slots` [B, width]
// are the slots of the tree's nodes. Node n at depth d moves to the slot of node d. As n >= d, no slot is overwritten
// before it was read.
inline void move_kv(
    void* pool, int num_layers, int64_t layer_bytes, int64_t slot_bytes, int count, const int64_t* kv_slots, int width,
    const Outcome& outcome) {
  for (int layer = 0; layer < num_layers; ++layer) {
    char* data = static_cast<char*>(pool) + layer * layer_bytes;
    for (int r = 0; r < count; ++r) {
      const int64_t *slots = kv_slots + int64_t(r) * width, *path = outcome.nodes(r);
      for (int d = 1; d < outcome.num_kept(r); ++d) {
        const int64_t from = slots[path[d]], to = slots[d];
        if (from != to) std::memcpy(data + to * slot_bytes, data + from * slot_bytes, slot_bytes);
      }
    }
  }
}

inline void write_kv(const Pool& pool, int64_t slot, const float* k, const float* v) {
  for (int which = 0; which < 2; ++which) {
    const float* from = which ? v : k;
    if (pool.type == 0) write_row<float>(pool, slot, which, from);
    if (pool.type == 1) write_row<bfloat16>(pool, slot, which, from);
    if (pool.type == 2) write_row<float16>(pool, slot, which, from);
    if (pool.type == Pool::INT8) write_int8(pool, slot, which, from);
    if (pool.type == Pool::E4M3) write_row<float8_e4m3>(pool, slot, which, from);
    if (pool.type == Pool::E5M2) write_row<float8_e5m2>(pool, slot, which, from);
  }
}

}  // namespace specray
