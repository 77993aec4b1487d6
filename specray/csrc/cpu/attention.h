// Attention of ragged requests over a paged KV pool, for prompt chunks, decoding and draft trees alike.
//
// A query attends to a list of keys, numbered from 0: the committed tokens by position, then a node's own ancestors and
// itself. Keys are taken in blocks of 64 from key 0, and every sum runs in that order. A token's result therefore has
// the same bits alone, in any batch, in any draft tree and in any chunk of its prompt.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "simd.h"
#include "team.h"

namespace specray {

constexpr int KEYS = 64;  // of a block

struct Pool {
  static constexpr int32_t INT8 = 3;

  void* data;  // of one layer: [slots, 2, heads, dim]; in INT8 a head's row is followed by its float32 scale
  int32_t type;  // FLOAT32, BFLOAT16, FLOAT16 or INT8
  int32_t num_heads;
  int32_t dim;
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

// The requests of a step. Request r has `query_lens[r]` consecutive queries.
struct Requests {
  int32_t count;
  int32_t slots_width, mask_rows, mask_columns;
  int32_t window;  // a query sees keys less than this far before its own; 0: all
  const int32_t* query_lens;
  const int32_t* kv_lens;     // the queries' own keys included
  const int32_t* tree_sizes;  // [count, 2]: the last n queries are nodes over the last m keys
  const int64_t* kv_slots;    // [count, slots_width]
  const uint8_t* tree_mask;   // [count, mask_rows, mask_columns]: node i sees key j of the tree
};

// The keys of one query: `shared` committed ones, then the slots of `others`.
struct Keys {
  int shared;
  int first;  // keys before it are outside the window
  std::vector<int64_t> others;

  int count() const { return shared + int(others.size()); }
};

inline Keys keys_of(const Requests& requests, int request, int query) {
  const int num_queries = requests.query_lens[request], kv_len = requests.kv_lens[request];
  const int nodes = requests.tree_sizes[2 * request], tree_keys = requests.tree_sizes[2 * request + 1];
  const int node = query - (num_queries - nodes);
  Keys keys{kv_len - num_queries + query + 1, 0, {}};
  if (node >= 0 && nodes > 0) {
    keys.shared = kv_len - tree_keys;
    const uint8_t* sees = requests.tree_mask + (int64_t(request) * requests.mask_rows + node) * requests.mask_columns;
    const int64_t* slots = requests.kv_slots + int64_t(request) * requests.slots_width + keys.shared;
    for (int key = 0; key < tree_keys; ++key)
      if (sees[key]) keys.others.push_back(slots[key]);
  }
  if (requests.window > 0) keys.first = std::max(0, keys.count() - requests.window);
  return keys;
}

// One head's key (0) or value (1) of a slot.
template <class T>
inline const T* pool_row(const Pool& pool, int64_t slot, int which, int head) {
  return static_cast<const T*>(pool.data) + ((slot * 2 + which) * pool.num_heads + head) * row_size<T>(pool.dim);
}

// Slots that are read soon. They lie in many places, and waiting for one after the other takes longer than the
// arithmetic, so each call brings one of them closer: the keys and values of all heads, which lie side by side.
struct Ahead {
  struct Slots {
    const int64_t* slots;
    int count;
  };

  Ahead(const Pool& pool, int row_bytes, const Slots& first, const Slots& second)
      : data_(static_cast<const char*>(pool.data)), slot_bytes_(int64_t(2) * pool.num_heads * row_bytes),
        left_(first), then_(second) {}

  void fetch() {
    constexpr int TO_READ = 0, LARGER_CACHE = 2;
    if (left_.count == 0) left_ = std::exchange(then_, Slots{});
    if (left_.count == 0) return;
    const char* slot = data_ + *left_.slots++ * slot_bytes_;
    --left_.count;
    for (int64_t b = 0; b < slot_bytes_; b += LINE) __builtin_prefetch(slot + b, TO_READ, LARGER_CACHE);
  }

 private:
  const char* data_;
  const int64_t slot_bytes_;
  Slots left_, then_;
};

// One query head: its softmax over blocks, as it goes.
struct Running {
  const float* q;
  float* out;  // [dim], the weighted sum of values
  float most = -INFINITY;
  float total = 0.0f;

  Running(const float* q, float* out) : q(q), out(out) {}

  // The weights of a block's keys from their scores, whose largest are in the lanes of `best`. Returns the factor for
  // what was added up before.
  float weigh(float* scores, Floats best, int count) {
    const float before = most;
    most = largest_of(largest(splat(before), best));
    const float shrink = before == -INFINITY ? 0.0f : exp_of(before - most);
    Floats sums{};
    for (int key = 0; key < count; key += WIDTH) {
      const Floats p = exp_of(load<Floats>(scores + key) - most);
      store(scores + key, p);
      sums += p;
    }
    total = total * shrink + sum(sums);
    return shrink;
  }
};

// Heads of one query that share a KV head and are computed together, so that keys and values are converted once for all.
// How many there are changes no result.
template <class T, int H>
class Heads {
 public:
  Heads(Running* runs, int dim, Ahead& ahead) : runs_(runs), dim_(dim), ahead_(ahead) {}

  // Adds a block of `count` keys, of which the first `skipped` are outside the window. k and v have KEYS rows; what
  // those from `count` on hold does not matter.
  void add(const T* const* k, const T* const* v, int skipped, int count, float scale) {
    alignas(64) float weights[H][KEYS];
    Ints places;
    for (int i = 0; i < WIDTH; ++i) places[i] = i;
    Floats best[H];
    for (int h = 0; h < H; ++h) best[h] = splat(-INFINITY);
    for (int key = 0; key < count; key += WIDTH) {
      const Ints is_seen = (places + key >= skipped) & (places + key < count);
      Floats dots[H];
      multiply_keys(k + key, dots);
      Floats scales = splat(scale);
      if constexpr (std::is_same_v<T, scaled_int8>)
        for (int i = 0; i < WIDTH; ++i) scales[i] *= row_scale(k[key + i], dim_);
      for (int h = 0; h < H; ++h) {
        const Floats scores = is_seen ? dots[h] * scales : splat(-INFINITY);
        store(weights[h] + key, scores);
        best[h] = largest(best[h], scores);
      }
    }
    float shrink[H];
    for (int h = 0; h < H; ++h) shrink[h] = runs_[h].weigh(weights[h], best[h], count);
    if constexpr (std::is_same_v<T, scaled_int8>) {
      for (int key = skipped; key < count; ++key) {
        const float of_value = row_scale(v[key], dim_);
        for (int h = 0; h < H; ++h) weights[h][key] *= of_value;
      }
    }
    int d = 0;
    constexpr int STRIPE = 2;  // native vectors of the output at a time
    for (; d + STRIPE * WIDTH <= dim_; d += STRIPE * WIDTH) add_values<STRIPE>(v, weights, d, skipped, count, shrink);
    for (; d + WIDTH <= dim_; d += WIDTH) add_values<1>(v, weights, d, skipped, count, shrink);
    for (; d < dim_; ++d) {
      for (int h = 0; h < H; ++h) {
        float part = runs_[h].out[d] * shrink[h];
        for (int key = skipped; key < count; ++key) part = std::fma(to_float(v[key][d]), weights[h][key], part);
        runs_[h].out[d] = part;
      }
    }
  }

 private:
  // The dot products of each head's query with WIDTH keys.
  void multiply_keys(const T* const* k, Floats* dots) const {
    static_assert(WIDTH % 4 == 0);
    constexpr int STEP = WIDTH / 4;
    Floats quarters[H][STEP];  // of four keys each
#pragma GCC unroll 4
    for (int i = 0; i < STEP; ++i) {
      Floats sums[H][4] = {};
      ahead_.fetch();
      for (int d = 0; d + WIDTH <= dim_; d += WIDTH) {
        Floats keys[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) keys[n] = load_floats(k[i + n * STEP] + d);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          const Floats part = load<Floats>(runs_[h].q + d);
#pragma GCC unroll 4
          for (int n = 0; n < 4; ++n) sums[h][n] += part * keys[n];
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) quarters[h][i] = quarter_sums(sums[h]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) dots[h] = sums_of_quarters(quarters[h]);
    for (int d = dim_ / WIDTH * WIDTH; d < dim_; ++d)
      for (int h = 0; h < H; ++h)
        for (int key = 0; key < WIDTH; ++key) dots[h][key] = std::fma(runs_[h].q[d], to_float(k[key][d]), dots[h][key]);
  }

  // out[d ...] = shrink * out[d ...] + the weighted values; keys with even and with odd numbers are summed apart.
  template <int STRIPE>
  void add_values(
      const T* const* v, const float (*weights)[KEYS], int d, int skipped, int count, const float* shrink) const {
    Floats parts[2][H][STRIPE];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
      for (int s = 0; s < STRIPE; ++s) {
        parts[0][h][s] = load<Floats>(runs_[h].out + d + s * WIDTH) * shrink[h];
        parts[1][h][s] = Floats{};
      }
    }
    const auto add_key = [&](int key, Floats(*sums)[STRIPE]) {
      Floats values[STRIPE];
#pragma GCC unroll 2
      for (int s = 0; s < STRIPE; ++s) values[s] = load_floats(v[key] + d + s * WIDTH);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
        for (int s = 0; s < STRIPE; ++s) sums[h][s] += values[s] * weights[h][key];
      }
    };
    int key = skipped;
    if (key % 2) add_key(key++, parts[1]);
    for (; key + 2 <= count; key += 2) {
      ahead_.fetch();
      add_key(key, parts[0]);
      add_key(key + 1, parts[1]);
    }
    if (key < count) add_key(key, parts[0]);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
      for (int s = 0; s < STRIPE; ++s) store(runs_[h].out + d + s * WIDTH, parts[0][h][s] + parts[1][h][s]);
    }
  }

  Running* runs_;
  const int dim_;
  Ahead& ahead_;
};

// Adds a block to `count` heads.
template <class T, class... Block>
inline void add_block(Running* runs, int count, int dim, Ahead& ahead, const Block&... block) {
  constexpr int MOST = 4;
  for (; count >= MOST; count -= MOST, runs += MOST) Heads<T, MOST>(runs, dim, ahead).add(block...);
  if (count == 3) Heads<T, 3>(runs, dim, ahead).add(block...);
  if (count == 2) Heads<T, 2>(runs, dim, ahead).add(block...);
  if (count == 1) Heads<T, 1>(runs, dim, ahead).add(block...);
}

// Queries `begin` to `end` of one request for one KV head. q and out are [queries, heads, dim] of the request.
template <class T>
void attend_tile(
    const Pool& pool, const Requests& requests, int request, int kv_head, int begin, int end, int num_heads,
    const float* q, int64_t q_stride, float* out, const Ahead::Slots& next) {
  const int dim = pool.dim, fold = num_heads / pool.num_heads;
  const float scale = 1.0f / std::sqrt(float(dim));
  std::vector<Keys> keys;
  std::vector<Running> runs;
  int most = 0, first = requests.kv_lens[request];
  for (int query = begin; query < end; ++query) {
    keys.push_back(keys_of(requests, request, query));
    most = std::max(most, keys.back().count());
    first = std::min(first, keys.back().first);
    for (int head = kv_head * fold; head < (kv_head + 1) * fold; ++head) {
      float* to = out + (int64_t(query) * num_heads + head) * dim;
      std::fill(to, to + dim, 0.0f);
      runs.emplace_back(q + query * q_stride + head * dim, to);
    }
  }
  const int64_t* slots = requests.kv_slots + int64_t(request) * requests.slots_width;
  const int most_shared = std::max_element(keys.begin(), keys.end(), [](auto& a, auto& b) {
                            return a.shared < b.shared;
                          })->shared;
  // The first head reads ahead for the others.
  const int second = kv_head ? most_shared : std::min(most_shared, first / KEYS * KEYS + KEYS);
  Ahead ahead(pool, int(sizeof(T)) * row_size<T>(dim), {slots + second, most_shared - second}, next);
  for (int block = first / KEYS * KEYS; block < most; block += KEYS) {
    const T *k[KEYS], *v[KEYS];
    const int loaded = std::max(0, std::min(KEYS, most_shared - block));
    std::fill(k + loaded, k + KEYS, pool_row<T>(pool, 0, 0, kv_head));
    std::fill(v + loaded, v + KEYS, pool_row<T>(pool, 0, 1, kv_head));
    for (int key = 0; key < loaded; ++key) {
      k[key] = pool_row<T>(pool, slots[block + key], 0, kv_head);
      v[key] = pool_row<T>(pool, slots[block + key], 1, kv_head);
    }
    for (int i = 0; i < end - begin; ++i) {
      const int count = std::min(KEYS, keys[i].count() - block), skipped = std::max(0, keys[i].first - block);
      if (count <= skipped) continue;
      const T *own[KEYS], *own_values[KEYS];
      const T* const* use_k = k;
      const T* const* use_v = v;
      const int shared = std::max(0, std::min(count, keys[i].shared - block));
      if (shared < count) {
        std::copy(k, k + KEYS, own);
        std::copy(v, v + KEYS, own_values);
        for (int key = shared; key < count; ++key) {
          const int64_t slot = keys[i].others[block + key - keys[i].shared];
          own[key] = pool_row<T>(pool, slot, 0, kv_head);
          own_values[key] = pool_row<T>(pool, slot, 1, kv_head);
        }
        use_k = own;
        use_v = own_values;
      }
      add_block<T>(runs.data() + i * fold, fold, dim, ahead, use_k, use_v, skipped, count, scale);
    }
  }
  for (Running& run : runs) {
    const float inverse = 1.0f / run.total;
    for (int d = 0; d < dim; ++d) run.out[d] *= inverse;
  }
}

// Attention of all queries, shared by the team in tiles of queries of one request and one KV head.
template <class T>
void attend(
    const Pool& pool, const Requests& requests, int num_heads, const float* q, int64_t q_stride, float* out,
    Member& member) {
  constexpr int TILE = 8;  // queries of a request that share its keys
  struct Item {
    int request, begin;
    int64_t first;  // the request's first query
  };
  std::vector<Item> items;
  int64_t first = 0;
  const int tile = requests.count == 1 && requests.query_lens[0] <= TILE ? TILE / 2 : TILE;  // something for each member
  for (int request = 0; request < requests.count; ++request) {
    for (int begin = 0; begin < requests.query_lens[request]; begin += tile) items.push_back({request, begin, first});
    first += requests.query_lens[request];
  }
  const int num_items = int(items.size()) * pool.num_heads;
  member.share(num_items, [&](int index) {
    const Item& item = items[index / pool.num_heads];
    Ahead::Slots next{};
    const int after = index / pool.num_heads + 1, head = index % pool.num_heads;
    if (after < int(items.size()) && items[after].request != item.request) {
      constexpr int MOST = 8 * KEYS;  // that fit into the cache; each head brings a share of them closer
      const int request = items[after].request, count = std::min(MOST, requests.kv_lens[request]);
      const int from = count * head / pool.num_heads, to = count * (head + 1) / pool.num_heads;
      next = {requests.kv_slots + int64_t(request) * requests.slots_width + from, to - from};
    }
    attend_tile<T>(
        pool, requests, item.request, index % pool.num_heads, item.begin,
        std::min(item.begin + tile, requests.query_lens[item.request]), num_heads, q + item.first * q_stride, q_stride,
        out + item.first * num_heads * pool.dim, next);
  });
}

inline void attend_any(
    const Pool& pool, const Requests& requests, int num_heads, const float* q, int64_t q_stride, float* out,
    Member& member) {
  switch (pool.type) {
    case 0: return attend<float>(pool, requests, num_heads, q, q_stride, out, member);
    case 1: return attend<bfloat16>(pool, requests, num_heads, q, q_stride, out, member);
    case Pool::INT8: return attend<scaled_int8>(pool, requests, num_heads, q, q_stride, out, member);
    default: return attend<float16>(pool, requests, num_heads, q, q_stride, out, member);
  }
}

// Writes a row [heads, dim] of keys or values of one token.
template <class T>
inline void write_row(const Pool& pool, int64_t slot, int which, const float* from) {
  T* to = static_cast<T*>(pool.data) + (slot * 2 + which) * pool.num_heads * pool.dim;
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
// are the slots of the tree's nodes and `nodes` [B, depth] the path from the root, of which the first `num_kept` count.
// Node n at depth d moves to the slot of node d. As n >= d, no slot is overwritten before it was read.
inline void move_kv(
    void* pool, int num_layers, int64_t layer_bytes, int64_t slot_bytes, int count, const int64_t* kv_slots, int width,
    const int64_t* nodes, int depth, const int64_t* num_kept) {
  for (int layer = 0; layer < num_layers; ++layer) {
    char* data = static_cast<char*>(pool) + layer * layer_bytes;
    for (int r = 0; r < count; ++r) {
      const int64_t *slots = kv_slots + int64_t(r) * width, *path = nodes + int64_t(r) * depth;
      for (int d = 1; d < num_kept[r]; ++d) {
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
  }
}

}  // namespace specray
