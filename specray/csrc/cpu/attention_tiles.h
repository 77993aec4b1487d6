// Attention over keys and values in bfloat16 on the tile registers of Intel's AMX, for up to 16 query heads at a time.
//
// Scores are products of 16 keys, the rows of a register, with all query heads, its columns. A softmax is then
// arithmetic on vectors of query heads, without sums inside a vector. Its weights are turned, to be rows of the second
// product. Registers with 4 columns hold the heads of one query without waste; the number changes no result.
//
// Queries, times the scale of scores, and weights are rounded to bfloat16; sums are float32. Multiplications with
// additions are written as one instruction, so that no choice of the compiler's makes two results of one token.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "attention_heads.h"
#include "kv_pool.h"
#include "queries.h"
#include "tiles.h"

namespace specray {

#if defined(SPECRAY_TILES)

// Turns a square of 16 x 16 pairs of bfloat16: rows, `stride` pairs apart, become columns.
inline void turn(const int32_t* from, int64_t from_stride, int32_t* to, int64_t to_stride) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * from_stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    constexpr int EVEN = 0x88, ODD = 0xDD;
    const __m512i even = _mm512_shuffle_i32x4(a[i], a[i + 4], EVEN), odd = _mm512_shuffle_i32x4(a[i], a[i + 4], ODD);
    const __m512i even2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], EVEN);
    const __m512i odd2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], ODD);
    _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(even, even2, EVEN));
    _mm512_storeu_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(odd, odd2, EVEN));
    _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(even, even2, ODD));
    _mm512_storeu_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(odd, odd2, ODD));
  }
}

// exp(x) of numbers up to 0, to about 2 units in the last place; 0 below -87, where results would be denormal numbers,
// which take a hundred times as long. NaN stays NaN.
inline __m512 weights_of(__m512 x) {
  const __m512 log2_e = _mm512_set1_ps(1.44269504f), least = _mm512_set1_ps(-87.0f);
  const __mmask16 is_large = _mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ);
  x = _mm512_max_ps(least, x);  // in this order, NaN stays
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, log2_e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_fmsub_ps(x, log2_e, whole);
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(is_large, p, whole);
}

// Attention of one member of a team, tile by tile.
//
// Up to PARTS blocks are computed together: first all scores, then all weights, then all weighted values. Loading a
// register waits for writes to the same memory, and with several blocks most of these are done by then.
class TiledAttention {
 public:
  static bool is_for(const Pool& pool) { return pool.type == Pool::BFLOAT16 && pool.dim % 32 == 0 && has_tiles(); }

  // Of a tile; prompts then fill four groups with each block of keys. `fold` query heads share a KV head.
  static int most_queries(int fold) { return std::max(1, PARTS * (MOST / fold)); }

  TiledAttention(const LayerAttention& layer, const Requests& requests)
      : layer_(layer), pool_(layer.pool), requests_(requests), dim_(pool_.dim), num_heads_(layer.num_heads),
        fold_(layer.fold()), buffers_(buffers_of_thread(dim_)), groups_(buffers_.groups) {}
  ~TiledAttention() { end_tiles(); }

  // `keys` are those of the tile's queries; q and out are [queries, heads, dim] of the request.
  void attend(
      const QueryTile& tile, const Keys* keys, int kv_head, const float* q, int64_t q_stride, float* out,
      const Ahead::Slots& next) {
    const int num_rows = tile.count() * fold_, most = fold_ < MOST ? MOST / fold_ * fold_ : MOST;
    const int columns = std::min(num_rows, most) <= 4 ? 4 : MOST;
    groups_.resize((num_rows + most - 1) / most);
    begin_tiles(columns, std::min(num_rows, most), std::min(fold_, most));
    if (columns == 4)
      attend_in_groups<4>(tile, keys, kv_head, most, q, q_stride, next);
    else
      attend_in_groups<MOST>(tile, keys, kv_head, most, q, q_stride, next);
    for (const Group& group : groups_) {
      for (int i = 0; i < group.count; ++i) {
        const int row = group.first + i;
        float* to = out + (int64_t(tile.begin + row / fold_) * num_heads_ + kv_head * fold_ + row % fold_) * dim_;
        const float inverse = 1.0f / group.total[i];
        for (int d = 0; d < dim_; ++d) to[d] = group.sums[i * dim_ + d] * inverse;
        reorder(to, dim_);
      }
    }
  }

 private:
  static constexpr int MOST = 16;  // query heads of a group
  static constexpr int PARTS = 4;  // blocks of a group, or groups of a block, that are computed together
  static constexpr int ROWS = 16;  // keys of a register

  // Query heads that are computed together: rows `first` and so on of [queries, heads of one KV head].
  struct Group {
    int first, count;
    std::vector<int32_t> queries;  // [dim / 2, columns]: pairs of numbers
    std::vector<float> sums;       // [count, dim]: of the weighted values
    std::vector<float> tree;       // [keys of the tree, columns]: their scores
    alignas(64) float most[MOST], total[MOST];
    alignas(64) int32_t num_keys[MOST], first_key[MOST];
  };

  // A block of keys for a group.
  struct Part {
    alignas(64) float scores[KEYS * MOST];           // [KEYS, columns]
    alignas(64) float shrink[MOST];                  // the factor for what was added up before
    alignas(64) bfloat16 weights[2 * MOST * KEYS];  // [columns, KEYS]; a register may begin at the last row
  };

  // Kept from layer to layer and from step to step.
  struct Buffers {
    int dim = 0;
    std::unique_ptr<bfloat16[]> keys, values;  // of a block; values in pairs of keys
    std::unique_ptr<bfloat16[]> own_values;    // the same where not all queries see the same ones
    std::vector<int32_t> rounded;              // queries, before they are turned
    std::vector<Group> groups;
    std::vector<Part> parts;
  };

  // 16 keys for a register: the first one, and the bytes from one to the next.
  struct KeyRows {
    const bfloat16* first;
    int64_t stride;
  };

  static Buffers& buffers_of_thread(int dim) {
    static thread_local Buffers buffers;
    if (dim > buffers.dim) {
      for (auto* part : {&buffers.keys, &buffers.values, &buffers.own_values}) part->reset(new bfloat16[KEYS * dim]);
      buffers.dim = dim;
    }
    return buffers;
  }

  // Registers 0 and 1 are scores, 2 queries, 3 keys or values, 4 weighted values and 5 weights of a group, 6 and 7
  // those of one query.
  static void begin_tiles(int columns, int rows, int rows_of_query) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = uint16_t(tile < 3 ? 4 * columns : 64);
      shapes.rows[tile] = uint8_t(tile < 4 ? ROWS : tile < 6 ? rows : rows_of_query);
    }
    shapes.load();
  }

  template <int COLUMNS>
  void attend_in_groups(
      const QueryTile& tile, const Keys* keys, int kv_head, int most, const float* q, int64_t q_stride,
      const Ahead::Slots& next) {
    const int64_t* slots = requests_.slots_of(tile.request);
    int num_keys = 0, num_shared = 0, first = requests_.kv_lens[tile.request];
    int seen_from = 0, seen_to = first;  // keys that all queries see
    bool has_tree = false;
    for (int i = 0; i < tile.count(); ++i) {
      num_keys = std::max(num_keys, keys[i].count());
      num_shared = std::max(num_shared, keys[i].shared);
      first = std::min(first, keys[i].first(layer_.window));
      seen_from = std::max(seen_from, keys[i].first(layer_.window));
      seen_to = std::min(seen_to, keys[i].shared);
      has_tree |= !keys[i].others.empty();
    }
    const int first_block = first / KEYS * KEYS, num_groups = int(groups_.size());
    for (int which : {0, 1})
      bring_closer(slots + first_block, std::max(0, std::min(KEYS, num_shared - first_block)), rows_of(which, kv_head));
    for (int i = 0; i < num_groups; ++i) {
      Group& group = groups_[i];
      group.first = i * most;
      group.count = std::min(most, tile.count() * fold_ - group.first);
      begin<COLUMNS>(group, tile, keys, kv_head, q, q_stride);
    }
    if (has_tree) score_tree<COLUMNS>(tile, kv_head);
    // The first head reads ahead for the others.
    const int second = kv_head ? num_shared : std::min(num_shared, first_block + KEYS);
    Ahead ahead(pool_, int(sizeof(bfloat16)) * dim_, {slots + second, num_shared - second}, next);
    const int together = std::max(1, PARTS / num_groups);  // blocks
    buffers_.parts.resize(together * num_groups);
    for (int from = first_block; from < num_keys; from += together * KEYS) {
      const int end = std::min(from + together * KEYS, num_keys);
      Part* parts = buffers_.parts.data();
      for (int block = from; block < end; block += KEYS, parts += num_groups)
        score_block<COLUMNS>(slots + block, std::clamp(num_shared - block, 0, KEYS), kv_head, parts);
      for (int i = 0; i < num_groups; ++i) {
        Part* part = buffers_.parts.data() + i;
        for (int block = from; block < end; block += KEYS, part += num_groups) {
          if (has_tree) place_scores<COLUMNS>(groups_[i], keys, block, part->scores);
          weigh<COLUMNS>(groups_[i], block, *part);
        }
      }
      parts = buffers_.parts.data();
      for (int block = from; block < end; block += KEYS, parts += num_groups) {
        const int loaded = std::clamp(num_shared - block, 0, KEYS);
        const bool is_finite = load_values(slots + block, loaded, kv_head, ahead);
        // A weight of 0 does not hide a value that is not a number.
        const bool all_see = seen_from <= block && block + loaded <= seen_to;
        add_block(keys, block, num_keys, is_finite || all_see, slots, kv_head, parts);
      }
    }
  }

  // The scores of a block for all groups; `loaded` of its keys are shared by the queries.
  template <int COLUMNS>
  void score_block(const int64_t* slots, int loaded, int kv_head, Part* parts) {
    KeyRows keys[KEYS / ROWS];
    for (int i = 0; i < KEYS / ROWS; ++i)
      keys[i] = load_keys(slots + i * ROWS, std::clamp(loaded - i * ROWS, 0, ROWS), kv_head, i);
    for (size_t i = 0; i < groups_.size(); ++i)
      for (int pair = 0; pair * 2 * ROWS < loaded; ++pair)
        score<COLUMNS>(groups_[i], keys + 2 * pair, parts[i].scores + pair * 2 * ROWS * COLUMNS);
  }

  // Adds the values of a block, which are loaded, to all groups.
  void add_block(
      const Keys* keys, int block, int num_keys, bool is_finite, const int64_t* slots, int kv_head, const Part* parts) {
    bool is_copied = false;
    for (size_t n = 0; n < groups_.size(); ++n) {
      Group& group = groups_[n];
      for (int i = 0; i < group.count;) {
        const int query = (group.first + i) / fold_, end = std::min(group.count, (query + 1) * fold_ - group.first);
        const auto has_own = [&](const Keys& of_query) { return has_own_keys(of_query, block) || !is_finite; };
        if (has_own(keys[query])) {
          if (!is_copied) std::copy_n(buffers_.values.get(), KEYS * dim_, buffers_.own_values.get());
          is_copied = true;
          load_own_values(keys[query], block, is_finite ? keys[query].shared : block, num_keys, slots, kv_head);
          add_values(group, parts[n], buffers_.own_values.get(), i, end);
          i = end;
          continue;
        }
        int last = end;
        while (last < group.count && !has_own(keys[(group.first + last) / fold_])) ++last;
        add_values(group, parts[n], buffers_.values.get(), i, last);
        i = last;
      }
    }
  }

  // Puts the scores of each query's own keys in their places of the block.
  template <int COLUMNS>
  void place_scores(const Group& group, const Keys* keys, int block, float* scores) const {
    for (int i = 0, end; i < group.count; i = end) {
      const int query = (group.first + i) / fold_;
      const Keys& own = keys[query];
      end = std::min(group.count, (query + 1) * fold_ - group.first);
      for (int key = std::max(block, own.shared); key < std::min(block + KEYS, own.count()); ++key) {
        const float* from = group.tree.data() + (own.others[key - own.shared] - own.shared) * COLUMNS;
        for (int column = i; column < end; ++column) scores[(key - block) * COLUMNS + column] = from[column];
      }
    }
  }

  static bool has_own_keys(const Keys& keys, int block) {
    return !keys.others.empty() && keys.shared < block + KEYS && keys.count() > block;
  }

  template <int COLUMNS>
  void begin(Group& group, const QueryTile& tile, const Keys* keys, int kv_head, const float* q, int64_t q_stride) {
    const __m512 scale = _mm512_set1_ps(layer_.scale);
    const int pairs = dim_ / 2;
    std::vector<int32_t>& rounded = buffers_.rounded;
    rounded.resize(MOST * pairs);
    group.queries.resize(pairs * COLUMNS);
    group.sums.assign(group.count * dim_, 0.0f);
    for (int i = 0; i < COLUMNS; ++i) {
      const int row = group.first + std::min(i, group.count - 1);
      const float* from = q + (tile.begin + row / fold_) * q_stride + (kv_head * fold_ + row % fold_) * dim_;
      for (int d = 0; d < dim_; d += WIDTH)
        store(rounded.data() + i * pairs + d / 2, _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(from + d), scale)));
      group.num_keys[i] = keys[row / fold_].count();
      group.first_key[i] = keys[row / fold_].first(layer_.window);
      // A sink is as a key that comes first and has a value of zeros.
      group.most[i] = layer_.sinks ? layer_.sinks[kv_head * fold_ + row % fold_] : -INFINITY;
      group.total[i] = layer_.sinks ? 1.0f : 0.0f;
    }
    if constexpr (COLUMNS == MOST) {
      for (int pair = 0; pair < pairs; pair += 16)
        turn(rounded.data() + pair, pairs, group.queries.data() + pair * COLUMNS, COLUMNS);
    } else {
      for (int pair = 0; pair < pairs; ++pair)
        for (int i = 0; i < COLUMNS; ++i) group.queries[pair * COLUMNS + i] = rounded[i * pairs + pair];
    }
  }

  // Scores of 32 keys: [32, columns].
  template <int COLUMNS>
  void score(const Group& group, const KeyRows* keys, float* scores) const {
    constexpr int STRIDE = 4 * COLUMNS;
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < dim_; d += 32) {
      _tile_loadd(2, group.queries.data() + d / 2 * COLUMNS, STRIDE);
      _tile_loadd(3, keys[0].first + d, keys[0].stride);
      _tile_dpbf16ps(0, 3, 2);
      _tile_loadd(3, keys[1].first + d, keys[1].stride);
      _tile_dpbf16ps(1, 3, 2);
    }
    _tile_stored(0, scores, STRIDE);
    _tile_stored(1, scores + ROWS * COLUMNS, STRIDE);
  }

  // Scores of all keys of the request's tree, which different queries see at different places.
  template <int COLUMNS>
  void score_tree(const QueryTile& tile, int kv_head) {
    const int count = requests_.tree_sizes[2 * tile.request + 1];
    const int64_t* slots = requests_.slots_of(tile.request) + requests_.kv_lens[tile.request] - count;
    for (Group& group : groups_) group.tree.resize((count + 31) / 32 * 32 * COLUMNS);
    for (int first = 0; first < count; first += 2 * ROWS) {
      KeyRows keys[2];
      for (int i : {0, 1})
        keys[i] = load_keys(slots + first + i * ROWS, std::clamp(count - first - i * ROWS, 0, ROWS), kv_head, i);
      for (Group& group : groups_) score<COLUMNS>(group, keys, group.tree.data() + first * COLUMNS);
    }
  }

  // One head's rows of keys (0) or values (1), and from one slot's to the next.
  const bfloat16* rows_of(int which, int kv_head) const { return pool_row<bfloat16>(pool_, 0, which, kv_head); }
  int64_t slot_size() const { return pool_.slot_bytes / int64_t(sizeof(bfloat16)); }

  // Up to 16 keys: where they lie if they fill a register and follow each other, otherwise a copy in place `number` of
  // the buffer.
  KeyRows load_keys(const int64_t* slots, int count, int kv_head, int number) const {
    const bfloat16* rows = rows_of(0, kv_head);
    const int64_t size = slot_size(), dim = dim_;
    if (count == ROWS && follow_each_other(slots)) return {rows + slots[0] * size, size * int64_t(sizeof(bfloat16))};
    bfloat16* to = buffers_.keys.get() + number * ROWS * dim;
    for (int key = 0; key < count; ++key)
      for (int64_t d = 0; d < dim; d += 32)
        store(to + key * dim + d, _mm512_loadu_si512(rows + slots[key] * size + d));
    return {to, dim * int64_t(sizeof(bfloat16))};
  }

  static bool follow_each_other(const int64_t* slots) {
    bool is_so = true;
    for (int i = 1; i < ROWS; ++i) is_so &= slots[i] == slots[0] + i;
    return is_so;
  }

  void bring_closer(const int64_t* slots, int count, const bfloat16* rows) const {
    const int64_t size = slot_size(), dim = dim_;
    for (int key = 0; key < count; ++key)
      for (int64_t d = 0; d < dim; d += 32) __builtin_prefetch(rows + slots[key] * size + d);
  }

  // The values of a block in pairs of two keys; whether all are finite.
  bool load_values(const int64_t* slots, int count, int kv_head, Ahead& ahead) const {
    const bfloat16* rows = rows_of(1, kv_head);
    const int64_t size = slot_size();
    bfloat16* to = buffers_.values.get();
    __m512i most{};
    for (int key = 0; key < KEYS; key += 2) {
      const bfloat16 *even = key < count ? rows + slots[key] * size : nullptr;
      const bfloat16 *odd = key + 1 < count ? rows + slots[key + 1] * size : nullptr;
      store_pairs(even, odd, to + key * dim_, most);
      ahead.fetch();
      ahead.fetch();
    }
    return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(0x7F80)) == 0;
  }

  // One query's values of keys `from` to `end`; of those that it does not see, zeros.
  void load_own_values(const Keys& keys, int block, int from, int end, const int64_t* slots, int kv_head) {
    __m512i most{};
    for (int key = std::max(0, from - block) / 2 * 2; key < std::min(KEYS, end - block); key += 2) {
      const auto value = [&](int k) -> const bfloat16* {
        if (k >= keys.count() || k < keys.first(layer_.window)) return nullptr;
        return pool_row<bfloat16>(pool_, slots[k < keys.shared ? k : keys.others[k - keys.shared]], 1, kv_head);
      };
      store_pairs(value(block + key), value(block + key + 1), buffers_.own_values.get() + key * dim_, most);
    }
  }

  // Two rows of values as pairs, in the order that the instruction leaves them in; a row that is null is zeros. `most`
  // keeps the largest bits without a sign.
  void store_pairs(const bfloat16* even, const bfloat16* odd, bfloat16* to, __m512i& most) const {
    const __m512i size = _mm512_set1_epi16(0x7FFF);
    for (int d = 0; d < dim_; d += 32, to += 64) {
      const __m512i a = even ? _mm512_loadu_si512(even + d) : __m512i{};
      const __m512i b = odd ? _mm512_loadu_si512(odd + d) : __m512i{};
      most = _mm512_max_epu16(most, _mm512_max_epu16(_mm512_and_si512(a, size), _mm512_and_si512(b, size)));
      store(to, _mm512_unpacklo_epi16(a, b));
      store(to + 32, _mm512_unpackhi_epi16(a, b));
    }
  }

  // Of the lanes of a vector that belong to one column, in every lane: with 4 columns, keys 4 n + 0, 1, 2, 3.
  template <int COLUMNS, class Combine>
  static __m512 over_lanes(__m512 v, const Combine& combine) {
    if constexpr (COLUMNS == 4) {
      v = combine(v, _mm512_shuffle_f32x4(v, v, 0xB1));
      v = combine(v, _mm512_shuffle_f32x4(v, v, 0x4E));
    }
    return v;
  }

  template <int COLUMNS>
  static __m512i by_column(const int32_t* values) {
    if constexpr (COLUMNS == 4) return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
    return _mm512_load_si512(values);
  }

  template <int COLUMNS>
  static __m512 by_column(const float* values) {
    if constexpr (COLUMNS == 4) return _mm512_broadcast_f32x4(_mm_load_ps(values));
    return _mm512_load_ps(values);
  }

  template <int COLUMNS>
  static void store_columns(float* to, __m512 v) {
    if constexpr (COLUMNS == 4)
      _mm_store_ps(to, _mm512_castps512_ps128(v));
    else
      _mm512_store_ps(to, v);
  }

  // The weights of a block's keys from their scores.
  template <int COLUMNS>
  void weigh(Group& group, int block, Part& part) const {
    float* scores = part.scores;
    constexpr int STEP = WIDTH / COLUMNS, VECTORS = KEYS / STEP;  // keys of a vector
    const __m512 none = _mm512_set1_ps(-INFINITY);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i ends = by_column<COLUMNS>(group.num_keys), firsts = by_column<COLUMNS>(group.first_key);
    __m512i key = _mm512_add_epi32(_mm512_set1_epi32(block), COLUMNS == 4 ? _mm512_srli_epi32(lanes, 2) : __m512i{});
    __m512 best = none;
    for (int i = 0; i < VECTORS; ++i) {
      const __mmask16 is_seen = _mm512_cmplt_epi32_mask(key, ends) & _mm512_cmpge_epi32_mask(key, firsts);
      __m512 v = _mm512_load_ps(scores + i * WIDTH);
      if (layer_.softcap != 0.0f) [[unlikely]] v = __m512(capped(Floats(v), layer_.softcap));
      v = _mm512_mask_blend_ps(is_seen, none, v);
      _mm512_store_ps(scores + i * WIDTH, v);
      best = __m512(largest(Floats(best), Floats(v)));
      key = _mm512_add_epi32(key, _mm512_set1_epi32(STEP));
    }
    best = over_lanes<COLUMNS>(best, [](__m512 a, __m512 b) { return __m512(largest(Floats(a), Floats(b))); });
    const __m512 before = by_column<COLUMNS>(group.most), most = __m512(largest(Floats(before), Floats(best)));
    // Of a query that has seen no key yet, all weights are 0.
    const __m512 base = _mm512_mask_blend_ps(_mm512_cmpeq_ps_mask(most, none), most, __m512{});
    const __m512 shrink = _mm512_maskz_mov_ps(
        _mm512_cmp_ps_mask(before, none, _CMP_NEQ_UQ), weights_of(_mm512_sub_ps(before, base)));
    __m512 sums[4 / STEP] = {};  // of keys 4 n, 4 n + 1, and so on
    for (int i = 0; i < VECTORS; i += 4 / STEP) {
#pragma GCC unroll 4
      for (int n = 0; n < 4 / STEP; ++n) {
        const __m512 p = weights_of(_mm512_sub_ps(_mm512_load_ps(scores + (i + n) * WIDTH), base));
        _mm512_store_ps(scores + (i + n) * WIDTH, p);
        sums[n] = _mm512_add_ps(sums[n], p);
      }
    }
    const auto add = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
    __m512 sum = sums[0];
    if constexpr (COLUMNS == 16) sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
    sum = over_lanes<COLUMNS>(sum, add);
    store_columns<COLUMNS>(group.total, _mm512_fmadd_ps(by_column<COLUMNS>(group.total), shrink, sum));
    store_columns<COLUMNS>(group.most, most);
    store_columns<COLUMNS>(part.shrink, shrink);
    store_weights<COLUMNS>(scores, part.weights);
  }

  // Weights [KEYS, columns] as rows of bfloat16, [columns, KEYS].
  template <int COLUMNS>
  static void store_weights(const float* weights, bfloat16* to) {
    alignas(64) static constexpr uint16_t PAIRS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    alignas(64) static constexpr uint16_t EIGHTS[32] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                        2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    const __m512i order = _mm512_load_si512(COLUMNS == 4 ? EIGHTS : PAIRS);
    alignas(64) int32_t pairs[KEYS / 2][MOST];  // of two keys, by query head
    for (int i = 0; i < KEYS * COLUMNS / WIDTH; i += 2) {
      const __m512 low = _mm512_load_ps(weights + i * WIDTH), high = _mm512_load_ps(weights + (i + 1) * WIDTH);
      const __m512i v = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      if constexpr (COLUMNS == 4) {
        store(to + i * 4, _mm512_castsi512_si128(v));
        store(to + KEYS + i * 4, _mm512_extracti32x4_epi32(v, 1));
        store(to + 2 * KEYS + i * 4, _mm512_extracti32x4_epi32(v, 2));
        store(to + 3 * KEYS + i * 4, _mm512_extracti32x4_epi32(v, 3));
      } else {
        _mm512_store_si512(pairs[i / 2], v);
      }
    }
    if constexpr (COLUMNS == 4) return;
    int32_t* rows = reinterpret_cast<int32_t*>(to);
    for (int half = 0; half < KEYS / 32; ++half) turn(pairs[half * 16], MOST, rows + half * 16, KEYS / 2);
  }

  // Adds a block's values, times their weights, to rows `begin` to `end` of a group: of one query, or of any. The two
  // branches differ in their registers, whose numbers must be literals.
  void add_values(Group& group, const Part& part, const bfloat16* values, int begin, int end) const {
    alignas(64) float sums[MOST * WIDTH];
    const bool is_one = end - begin <= fold_;
    for (int d = 0; d < dim_; d += WIDTH) {
      if (is_one) {
        _tile_zero(6);
        for (int key = 0; key < KEYS; key += 32) {
          _tile_loadd(7, part.weights + begin * KEYS + key, KEYS * 2);
          _tile_loadd(3, values + key * dim_ + 2 * d, dim_ * 4);
          _tile_dpbf16ps(6, 7, 3);
        }
        _tile_stored(6, sums, WIDTH * 4);
      } else {
        _tile_zero(4);
        for (int key = 0; key < KEYS; key += 32) {
          _tile_loadd(5, part.weights + begin * KEYS + key, KEYS * 2);
          _tile_loadd(3, values + key * dim_ + 2 * d, dim_ * 4);
          _tile_dpbf16ps(4, 5, 3);
        }
        _tile_stored(4, sums, WIDTH * 4);
      }
      for (int i = begin; i < end; ++i) {
        float* to = group.sums.data() + i * dim_ + d;
        const __m512 before = load<__m512>(to), shrink = _mm512_set1_ps(part.shrink[i]);
        store(to, _mm512_fmadd_ps(before, shrink, _mm512_load_ps(sums + (i - begin) * WIDTH)));
      }
    }
  }

  const LayerAttention& layer_;
  const Pool& pool_;
  const Requests& requests_;
  const int dim_, num_heads_, fold_;
  Buffers& buffers_;
  std::vector<Group>& groups_;
};

#endif

}  // namespace specray
