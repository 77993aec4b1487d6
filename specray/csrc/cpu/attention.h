// Attention of ragged requests over a paged KV pool, for prompt chunks, decoding and draft trees alike.
//
// A query attends to a list of keys, numbered from 0: the committed tokens by position, then a node's own ancestors and
// itself. Keys are taken in blocks of 64 from key 0, and every sum runs in that order. A token's result therefore has
// the same bits alone, in any batch, in any draft tree and in any chunk of its prompt.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_heads.h"
#include "team.h"

namespace specray {

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

// Queries `begin` to `end` of one request, which share its keys.
struct QueryTile {
  int request, begin, end;
  int64_t first;  // the request's first query among all
};

// A step's queries in tiles, and what each query sees: the same in all layers.
struct Queries {
  std::vector<QueryTile> tiles;
  std::vector<Keys> keys;  // of all queries

  explicit Queries(const Requests& requests) {
    constexpr int MOST = 8;  // of a tile
    int64_t first = 0;
    for (int request = 0; request < requests.count; ++request) {
      const int count = requests.query_lens[request], least = requests.count == 1 ? 2 : 1;  // something for each member
      const int parts = std::max(least, (count + MOST - 1) / MOST), size = std::max(1, (count + parts - 1) / parts);
      for (int begin = 0; begin < count; begin += size)
        tiles.push_back({request, begin, std::min(begin + size, count), first});
      for (int query = 0; query < count; ++query) keys.push_back(keys_of(requests, request, query));
      first += count;
    }
  }
};

// A tile for one KV head. `keys` are those of its queries; q and out are [queries, heads, dim] of the request.
template <class T, bool PAIRS>
void attend_tile(
    const Pool& pool, const Requests& requests, const QueryTile& tile, const Keys* keys, int kv_head, int num_heads,
    const float* q, int64_t q_stride, float* out, const Ahead::Slots& next) {
  const int dim = pool.dim, fold = num_heads / pool.num_heads, num_queries = tile.end - tile.begin;
  const float scale = 1.0f / std::sqrt(float(dim));
  std::vector<Running> runs;
  runs.reserve(num_queries * fold);
  std::vector<bfloat16> rounded(PAIRS ? num_queries * fold * dim : 0);
  int most = 0, most_shared = 0, first = requests.kv_lens[tile.request];
  for (int i = 0; i < num_queries; ++i) {
    most = std::max(most, keys[i].count());
    most_shared = std::max(most_shared, keys[i].shared);
    first = std::min(first, keys[i].first);
    for (int head = kv_head * fold; head < (kv_head + 1) * fold; ++head) {
      float* to = out + (int64_t(tile.begin + i) * num_heads + head) * dim;
      std::fill(to, to + dim, 0.0f);
      const float* from = q + (tile.begin + i) * q_stride + head * dim;
      bfloat16* pairs = rounded.data() + runs.size() * dim;
      for (int d = 0; PAIRS && d < dim; ++d) from_float(from[d], pairs + d);
      runs.emplace_back(from, pairs, to);
    }
  }
  const int64_t* slots = requests.kv_slots + int64_t(tile.request) * requests.slots_width;
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
    for (int i = 0; i < num_queries; ++i) {
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
      add_block<T, PAIRS>(runs.data() + i * fold, fold, dim, ahead, use_k, use_v, skipped, count, scale);
    }
  }
  for (Running& run : runs) {
    const float inverse = 1.0f / run.total;
    for (int d = 0; d < dim; ++d) run.out[d] *= inverse;
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) PairHeads<1>::reorder(run.out, dim);
#endif
  }
}

// Attention of all queries, shared by the team in tiles for one KV head.
template <class T, bool PAIRS>
void attend_in_tiles(
    const Pool& pool, const Requests& requests, const Queries& queries, int num_heads, const float* q, int64_t q_stride,
    float* out, Member& member) {
  const std::vector<QueryTile>& tiles = queries.tiles;
  member.share(int(tiles.size()) * pool.num_heads, [&](int index) {
    const int number = index / pool.num_heads, head = index % pool.num_heads;
    const QueryTile& tile = tiles[number];
    Ahead::Slots next{};
    if (number + 1 < int(tiles.size()) && tiles[number + 1].request != tile.request) {
      constexpr int MOST = 8 * KEYS;  // that fit into the cache; each head brings a share of them closer
      const int request = tiles[number + 1].request, count = std::min(MOST, requests.kv_lens[request]);
      const int from = count * head / pool.num_heads, to = count * (head + 1) / pool.num_heads;
      next = {requests.kv_slots + int64_t(request) * requests.slots_width + from, to - from};
    }
    attend_tile<T, PAIRS>(
        pool, requests, tile, queries.keys.data() + tile.first + tile.begin, head, num_heads, q + tile.first * q_stride,
        q_stride, out + tile.first * num_heads * pool.dim, next);
  });
}

// Chooses once for all tiles whether products are of pairs.
template <class T>
void attend(
    const Pool& pool, const Requests& requests, const Queries& queries, int num_heads, const float* q, int64_t q_stride,
    float* out, Member& member) {
#if defined(__AVX512BF16__)
  if constexpr (CAN_USE_PAIRS<T>)
    if (PairHeads<1>::is_for(pool.dim))
      return attend_in_tiles<T, true>(pool, requests, queries, num_heads, q, q_stride, out, member);
#endif
  attend_in_tiles<T, false>(pool, requests, queries, num_heads, q, q_stride, out, member);
}

inline void attend_any(
    const Pool& pool, const Requests& requests, const Queries& queries, int num_heads, const float* q, int64_t q_stride,
    float* out, Member& member) {
  switch (pool.type) {
    case 0: return attend<float>(pool, requests, queries, num_heads, q, q_stride, out, member);
    case 1: return attend<bfloat16>(pool, requests, queries, num_heads, q, q_stride, out, member);
    case Pool::INT8: return attend<scaled_int8>(pool, requests, queries, num_heads, q, q_stride, out, member);
    default: return attend<float16>(pool, requests, queries, num_heads, q, q_stride, out, member);
  }
}

}  // namespace specray
