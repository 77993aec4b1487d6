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
#include "attention_tiles.h"
#include "queries.h"
#include "team.h"

namespace specray {

// A tile for one KV head. `keys` are those of its queries; q and out are [queries, heads, dim] of the request.
template <class T, bool PAIRS>
void attend_tile(
    const LayerAttention& layer, const Requests& requests, const QueryTile& tile, const Keys* keys, int kv_head,
    const float* q, int64_t q_stride, float* out, const Ahead::Slots& next) {
  const Pool& pool = layer.pool;
  const int dim = pool.dim, num_heads = layer.num_heads, fold = layer.fold(), num_queries = tile.count();
  std::vector<Running> runs;
  runs.reserve(num_queries * fold);
  std::vector<bfloat16> rounded(PAIRS ? num_queries * fold * dim : 0);
  int most = 0, most_shared = 0, first = requests.kv_lens[tile.request];
  for (int i = 0; i < num_queries; ++i) {
    most = std::max(most, keys[i].count());
    most_shared = std::max(most_shared, keys[i].shared);
    first = std::min(first, keys[i].first(layer.window));
    for (int head = kv_head * fold; head < (kv_head + 1) * fold; ++head) {
      float* to = out + (int64_t(tile.begin + i) * num_heads + head) * dim;
      std::fill(to, to + dim, 0.0f);
      const float* from = q + (tile.begin + i) * q_stride + head * dim;
      bfloat16* pairs = rounded.data() + runs.size() * dim;
      for (int d = 0; PAIRS && d < dim; ++d) from_float(from[d], pairs + d);
      runs.emplace_back(from, pairs, to);
      if (layer.sinks) runs.back().begin_with(layer.sinks[head]);
    }
  }
  const int64_t* slots = requests.slots_of(tile.request);
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
      const int count = std::min(KEYS, keys[i].count() - block), skipped = std::max(0, keys[i].first(layer.window) - block);
      if (count <= skipped) continue;
      const T *own[KEYS], *own_values[KEYS];
      const T* const* use_k = k;
      const T* const* use_v = v;
      const int shared = std::max(0, std::min(count, keys[i].shared - block));
      if (shared < count) {
        std::copy(k, k + KEYS, own);
        std::copy(v, v + KEYS, own_values);
        for (int key = shared; key < count; ++key) {
          const int64_t slot = slots[keys[i].others[block + key - keys[i].shared]];
          own[key] = pool_row<T>(pool, slot, 0, kv_head);
          own_values[key] = pool_row<T>(pool, slot, 1, kv_head);
        }
        use_k = own;
        use_v = own_values;
      }
      add_block<T, PAIRS>(runs.data() + i * fold, fold, dim, ahead, use_k, use_v, skipped, count, layer.scale, layer.softcap);
    }
  }
  for (Running& run : runs) {
    const float inverse = 1.0f / run.total;
    for (int d = 0; d < dim; ++d) run.out[d] *= inverse;
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) reorder(run.out, dim);
#endif
  }
}

// Queries that a tile has at most.
inline int most_queries(const LayerAttention& layer) {
#if defined(SPECRAY_TILES)
  if (TiledAttention::is_for(layer.pool)) return TiledAttention::most_queries(layer.fold());
#endif
  return 8;
}

// Calls `attend(tile, its keys, KV head, slots that are read next)` for all tiles and KV heads, shared by the team.
template <class Attend>
void share_tiles(
    const LayerAttention& layer, const Requests& requests, const Queries& queries, Member& member,
    const Attend& attend) {
  const int num_heads = layer.pool.num_heads;
  const std::vector<QueryTile>& tiles = queries.tiles;
  member.share(int(tiles.size()) * num_heads, [&](int index) {
    const int number = index / num_heads, head = index % num_heads;
    const QueryTile& tile = tiles[number];
    Ahead::Slots next{};
    if (number + 1 < int(tiles.size()) && tiles[number + 1].request != tile.request) {
      constexpr int MOST = 8 * KEYS;  // that fit into the cache; each head brings a share of them closer
      const int request = tiles[number + 1].request, first = queries.keys_of_tile(tiles[number + 1])->first(layer.window);
      const int count = std::min(MOST, requests.kv_lens[request] - first);
      const int from = first + count * head / num_heads, to = first + count * (head + 1) / num_heads;
      next = {requests.slots_of(request) + from, to - from};
    }
    attend(tile, queries.keys_of_tile(tile), head, next);
  });
}

// Attention of all queries. What multiplies is chosen once for all of them.
template <class T>
void attend(
    const LayerAttention& layer, const Requests& requests, const Queries& queries, const float* q, int64_t q_stride,
    float* out, Member& member) {
  const auto q_of = [&](const QueryTile& tile) { return q + tile.first * q_stride; };
  const auto out_of = [&](const QueryTile& tile) { return out + tile.first * layer.num_heads * layer.pool.dim; };
#if defined(SPECRAY_TILES)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (TiledAttention::is_for(layer.pool)) {
      TiledAttention tiled(layer, requests);
      return share_tiles(
          layer, requests, queries, member,
          [&](const QueryTile& tile, const Keys* keys, int head, const Ahead::Slots& next) {
            tiled.attend(tile, keys, head, q_of(tile), q_stride, out_of(tile), next);
          });
    }
  }
#endif
  const auto in_vectors = [&](auto pairs) {
    share_tiles(
        layer, requests, queries, member,
        [&](const QueryTile& tile, const Keys* keys, int head, const Ahead::Slots& next) {
          attend_tile<T, pairs.value>(layer, requests, tile, keys, head, q_of(tile), q_stride, out_of(tile), next);
        });
  };
#if defined(__AVX512BF16__)
  if constexpr (CAN_USE_PAIRS<T>)
    if (PairHeads<1>::is_for(layer.pool.dim)) return in_vectors(std::true_type());
#endif
  in_vectors(std::false_type());
}

inline void attend_any(
    const LayerAttention& layer, const Requests& requests, const Queries& queries, const float* q, int64_t q_stride,
    float* out, Member& member) {
  switch (layer.pool.type) {
    case 0: return attend<float>(layer, requests, queries, q, q_stride, out, member);
    case 1: return attend<bfloat16>(layer, requests, queries, q, q_stride, out, member);
    case Pool::INT8: return attend<scaled_int8>(layer, requests, queries, q, q_stride, out, member);
    case Pool::E4M3: return attend<float8_e4m3>(layer, requests, queries, q, q_stride, out, member);
    case Pool::E5M2: return attend<float8_e5m2>(layer, requests, queries, q, q_stride, out, member);
    default: return attend<float16>(layer, requests, queries, q, q_stride, out, member);
  }
}

}  // namespace specray
