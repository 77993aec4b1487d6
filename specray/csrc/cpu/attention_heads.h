// Query heads that share a KV head, over blocks of keys: scores, a running softmax, and the weighted sum of values.
//
// A block has KEYS keys, from key 0 of the query on, and every sum runs in the order of the keys.
#pragma once

#include <cmath>
#include <type_traits>

#include "kv_pool.h"
#include "queries.h"

namespace specray {

// One query head: its softmax over blocks, as it goes.
struct Running {
  const float* q;
  const bfloat16* q_pairs;  // rounded, where products are of pairs
  float* out;  // [dim], the weighted sum of values; where products are of pairs, in the order of their accumulators
  float most = -INFINITY;
  float total = 0.0f;

  Running(const float* q, const bfloat16* q_pairs, float* out) : q(q), q_pairs(q_pairs), out(out) {}

  // As if a key with this score and a value of zeros came first.
  void begin_with(float sink) {
    most = sink;
    total = 1.0f;
  }
};

#if defined(__AVX512BF16__)
// The instruction for products of two pairs of bfloat16 numbers needs neither keys nor values converted, and does twice
// the work of one for floats. Queries and the softmax's weights are rounded to bfloat16; sums are float32.
template <class T>
constexpr bool CAN_USE_PAIRS = std::is_same_v<T, bfloat16>;

// Products with pairs of values leave sums in the order of the instruction that made the pairs; this puts them into the
// order of the values.
inline void reorder(float* out, int dim) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int d = 0; d < dim; d += 2 * WIDTH) {
    const __m512 low = load<__m512>(out + d), high = load<__m512>(out + d + WIDTH);
    store(out + d, _mm512_permutex2var_ps(low, first, high));
    store(out + d + WIDTH, _mm512_permutex2var_ps(low, second, high));
  }
}

template <int H>
class PairHeads {
 public:
  static bool is_for(int dim) { return dim % STRIPE == 0; }

  PairHeads(Running* runs, int dim, Ahead& ahead) : runs_(runs), dim_(dim), ahead_(ahead) {}

  // The dot products of each head's query with WIDTH keys.
  void multiply_keys(const bfloat16* const* k, Floats* dots) const {
    constexpr int STEP = WIDTH / 4;
    Floats quarters[H][STEP];  // of four keys each
#pragma GCC unroll 4
    for (int i = 0; i < STEP; ++i) {
      __m512 sums[H][4];
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) sums[h][n] = _mm512_setzero_ps();
      }
      ahead_.fetch();
      ahead_.fetch();
      for (int d = 0; d < dim_; d += STRIPE) {
        __m512bh keys[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) keys[n] = load<__m512bh>(k[i + n * STEP] + d);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          const __m512bh part = load<__m512bh>(runs_[h].q_pairs + d);
#pragma GCC unroll 4
          for (int n = 0; n < 4; ++n) sums[h][n] = _mm512_dpbf16_ps(sums[h][n], part, keys[n]);
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const Floats four[4] = {Floats(sums[h][0]), Floats(sums[h][1]), Floats(sums[h][2]), Floats(sums[h][3])};
        quarters[h][i] = quarter_sums(four);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) dots[h] = sums_of_quarters(quarters[h]);
  }

  // out = shrink * out + the weighted values. Keys 2 i and 2 i + 1 are a pair.
  void add_values(
      const bfloat16* const* v, const float (*weights)[KEYS], int skipped, int count, const float* shrink) const {
    alignas(64) bfloat16 rounded[H][KEYS];
    for (int h = 0; h < H; ++h)
      for (int key = 0; key < count; key += WIDTH)
        store(rounded[h] + key, _mm512_cvtneps_pbh(load<__m512>(weights[h] + key)));
    int d = 0;
    for (; d + 2 * STRIPE <= dim_; d += 2 * STRIPE) add_stripes<2>(v, rounded, d, skipped, count, shrink);
    if (d < dim_) add_stripes<1>(v, rounded, d, skipped, count, shrink);
  }

 private:
  static constexpr int STRIPE = 2 * WIDTH;  // numbers of a vector

  template <int S>
  void add_stripes(
      const bfloat16* const* v, const bfloat16 (*weights)[KEYS], int d, int skipped, int count,
      const float* shrink) const {
    alignas(64) static constexpr bfloat16 zeros[2 * STRIPE] = {};
    __m512 sums[H][S][2];
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n)
          sums[h][s][n] = __m512(load<Floats>(runs_[h].out + d + s * STRIPE + n * WIDTH) * shrink[h]);
      }
    }
    for (int key = skipped / 2 * 2; key < count; key += 2) {
      const bfloat16* even = key < skipped ? zeros : v[key] + d;
      const bfloat16* odd = key + 1 < count ? v[key + 1] + d : zeros;
      ahead_.fetch();
      __m512bh pairs[S][2];
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
        const __m512i a = load<__m512i>(even + s * STRIPE), b = load<__m512i>(odd + s * STRIPE);
        pairs[s][0] = __m512bh(_mm512_unpacklo_epi16(a, b));
        pairs[s][1] = __m512bh(_mm512_unpackhi_epi16(a, b));
      }
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const __m512bh both = __m512bh(_mm512_set1_epi32(load<int32_t>(weights[h] + key)));
#pragma GCC unroll 2
        for (int s = 0; s < S; ++s) {
#pragma GCC unroll 2
          for (int n = 0; n < 2; ++n) sums[h][s][n] = _mm512_dpbf16_ps(sums[h][s][n], pairs[s][n], both);
        }
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n) store(runs_[h].out + d + s * STRIPE + n * WIDTH, sums[h][s][n]);
      }
    }
  }

  Running* runs_;
  const int dim_;
  Ahead& ahead_;
};
#else
template <class T>
constexpr bool CAN_USE_PAIRS = false;
#endif

// Heads of one query that share a KV head and are computed together, so that keys and values are converted once for all.
// How many there are changes no result. PAIRS: PairHeads multiplies.
template <class T, int H, bool PAIRS>
class Heads {
 public:
  Heads(Running* runs, int dim, Ahead& ahead) : runs_(runs), dim_(dim), ahead_(ahead) {}

  // Adds a block of `count` keys, of which the first `skipped` are outside the window. k and v have KEYS rows; what
  // those from `count` on hold does not matter. For `scale` and `softcap` see LayerAttention.
  void add(const T* const* k, const T* const* v, int skipped, int count, float scale, float softcap) {
    alignas(64) float weights[H][KEYS];
    Ints places;
    for (int i = 0; i < WIDTH; ++i) places[i] = i;
    Floats best[H];
    for (int h = 0; h < H; ++h) best[h] = splat(-INFINITY);
    for (int key = 0; key < count; key += WIDTH) {
      const Ints is_seen = (places + key >= skipped) & (places + key < count);
      Floats dots[H];
      multiply(k + key, dots);
      Floats scales = splat(scale);
      if constexpr (std::is_same_v<T, scaled_int8>)
        for (int i = 0; i < WIDTH; ++i) scales[i] *= row_scale(k[key + i], dim_);
      for (int h = 0; h < H; ++h) {
        Floats scores = dots[h] * scales;
        if (softcap != 0.0f) [[unlikely]] scores = capped(scores, softcap);
        scores = is_seen ? scores : splat(-INFINITY);
        store(weights[h] + key, scores);
        best[h] = largest(best[h], scores);
      }
    }
    float shrink[H];
    weigh(weights, best, count, shrink);
    if constexpr (std::is_same_v<T, scaled_int8>) {
      for (int key = skipped; key < count; ++key) {
        const float of_value = row_scale(v[key], dim_);
        for (int h = 0; h < H; ++h) weights[h][key] *= of_value;
      }
    }
    add_all_values(v, weights, skipped, count, shrink);
  }

 private:
  // The weights of a block's keys from their scores, whose largest are in the lanes of `best`; `shrink` is the factor for
  // what was added up before.
  void weigh(float (*weights)[KEYS], const Floats* best, int count, float* shrink) {
    static_assert(H <= WIDTH);
    Floats before = splat(-INFINITY), most = before;  // by head
    for (int h = 0; h < H; ++h) {
      before[h] = runs_[h].most;
      most[h] = runs_[h].most = largest_of(largest(splat(runs_[h].most), best[h]));
    }
    const Floats factors = before == -INFINITY ? Floats{} : exp_of(before - most);
    for (int h = 0; h < H; ++h) {
      Floats sums{};
      for (int key = 0; key < count; key += WIDTH) {
        const Floats p = exp_of(load<Floats>(weights[h] + key) - most[h]);
        store(weights[h] + key, p);
        sums += p;
      }
      shrink[h] = factors[h];
      runs_[h].total = runs_[h].total * shrink[h] + sum(sums);
    }
  }

  void multiply(const T* const* k, Floats* dots) const {
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) return PairHeads<H>(runs_, dim_, ahead_).multiply_keys(k, dots);
#endif
    multiply_keys(k, dots);
  }

  void add_all_values(
      const T* const* v, const float (*weights)[KEYS], int skipped, int count, const float* shrink) const {
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) return PairHeads<H>(runs_, dim_, ahead_).add_values(v, weights, skipped, count, shrink);
#endif
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
template <class T, bool PAIRS, class... Block>
inline void add_block(Running* runs, int count, int dim, Ahead& ahead, const Block&... block) {
  constexpr int MOST = 4;
  for (; count >= MOST; count -= MOST, runs += MOST) Heads<T, MOST, PAIRS>(runs, dim, ahead).add(block...);
  if (count == 3) Heads<T, 3, PAIRS>(runs, dim, ahead).add(block...);
  if (count == 2) Heads<T, 2, PAIRS>(runs, dim, ahead).add(block...);
  if (count == 1) Heads<T, 1, PAIRS>(runs, dim, ahead).add(block...);
}

}  // namespace specray
