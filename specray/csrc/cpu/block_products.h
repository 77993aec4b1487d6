// The products of a few rows of activations with one block of a matrix: the innermost loops.
//
// Every sum runs over the inputs in order, in one lane, so an output does not depend on the other rows.
#pragma once

#include <type_traits>

#include "matrix.h"
#include "tiles.h"

namespace specray {

// Rows whose sums fit into registers, more or less.
#if defined(SPECRAY_AVX512)
constexpr int MAX_QUANTISED = 8, MAX_FLOATS = 8, MAX_CODED = 8, MAX_PAIRS = MULTIPLIES_PAIRS ? 14 : 8;
constexpr int MAX_SCALED_UP = 8, MOST_SUMS = 24;
#else
constexpr int MAX_QUANTISED = 4, MAX_FLOATS = 6, MAX_CODED = 4, MAX_PAIRS = 6;
constexpr int MAX_SCALED_UP = 6, MOST_SUMS = 12;
#endif

// The same for quantised weights and activations of `numbers` numbers of 8 bits each.
constexpr int most_quantised(int numbers) { return MULTIPLIES_WORDS ? MAX_QUANTISED : MAX_QUANTISED / numbers; }

// Rows that `tile_of` multiplies at a time.
inline int most_rows(const Matrix& matrix) {
  if (matrix.kind == BFLOAT16) return MAX_PAIRS;
  if (form_of(matrix) == Form::SCALED_UP) return MAX_SCALED_UP;
  if (is_coded(matrix.kind)) return MAX_CODED;
  if (!is_quantised(matrix.kind)) return MAX_FLOATS;
  return most_quantised(form_of(matrix) == Form::FINE_BYTES ? 2 : 1);
}

typedef float Tile[TILE_ROWS > MAX_PAIRS ? TILE_ROWS : MAX_PAIRS][LANES];

// R rows from `first` with one block of a dense matrix.
template <int R, class Weight>
inline void dense_tile(const Weight* weights, const Rows& rows, int first, int ins, Fetch fetch, Tile& out) {
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows.floats(first + r);
  Floats sums[R][N] = {};
  for (int i = 0; i < ins; ++i, weights += LANES) {
    Floats w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) w[n] = load_floats(weights + n * WIDTH);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] += w[n] * x[r][i];
    }
    fetch.advance(LANES * sizeof(Weight));
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}

#if defined(__AVX512BF16__)
template <int R>
inline void pairs_tile(const bfloat16* weights, const Rows& rows, int first, int ins, Fetch fetch, Tile& out) {
  const bfloat16* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows.pairs(first + r);
  __m512 sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = _mm512_setzero_ps();
  for (int i = 0; i < ins; i += 2, weights += 2 * LANES) {
    __m512bh w[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      w[n] = (__m512bh)_mm512_loadu_si512(weights + 2 * WIDTH * n);
      fetch.advance(4 * WIDTH);
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x[r] + i));
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], w[n], pair);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}
#else
// Each half of a pair becomes a float by itself.
template <int R>
inline void pairs_tile(const bfloat16* weights, const Rows& rows, int first, int ins, Fetch fetch, Tile& out) {
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows.floats(first + r);
  Floats sums[R][N] = {};
  for (int i = 0; i < ins; i += 2, weights += 2 * LANES) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Floats w[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Words both = load<Words>(weights + 2 * WIDTH * n);
        w[n] = bits_of<Floats>(half == 0 ? both << 16 : both & 0xFFFF0000u);
      }
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[r][n] += w[n] * x[r][i + half];
      }
    }
    fetch.advance(4 * LANES);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}
#endif

// The products of R rows with a group of quantised weights, summed as integers. This one is for activations of 8 bits.
template <int R, class Format>
class ByteDots {
 public:
  ByteDots(const Rows& rows, int first) {
    for (int r = 0; r < ALL; ++r) {
      x_[r] = rows.bytes(first + r % R, r / R);
      totals_[r] = rows.totals(first + r % R, Format::SIZE, r / R);
    }
  }

  // Reads a group from `ints`. `offset` is added to each weight.
  inline void multiply(int group, int offset, const uint8_t* ints, Fetch& fetch) {
#pragma GCC unroll 8
    for (int r = 0; r < ALL; ++r) dots_[r].begin(offset * totals_[r][group]);
#pragma GCC unroll 8
    for (int quad = 0; quad < (SMALL ? QUADS / 2 : QUADS); ++quad, ints += 4 * LANES) {
      Bytes low[N], high[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        typedef uint8_t Raw __attribute__((vector_size(4 * WIDTH)));
        const Raw raw = load<Raw>(ints + n * 4 * WIDTH);
        fetch.advance(4 * WIDTH);
        low[n] = bits_of<Bytes>(SMALL ? raw & 15 : raw);
        if (SMALL) high[n] = bits_of<Bytes>(raw >> 4);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ALL; ++r) {
        const int8_t* four = x_[r] + group * Format::SIZE + 4 * quad;
        dots_[r].add(low, load<int32_t>(four));
        if (SMALL) dots_[r].add(high, load<int32_t>(four + Format::SIZE / 2));
      }
    }
  }

  inline Floats result(int r, int n) const {
    Floats dot = to_floats(dots_[r].result(n));
    if (ALL > R) dot += to_floats(dots_[ALL - R + r].result(n)) * (1.0f / FINE_STEPS);
    return dot;
  }

 private:
  static constexpr bool SMALL = Format::BITS == 4;
  static constexpr int QUADS = Format::SIZE / 4, ALL = Format::NUMBERS * R;  // the rows' second numbers, if any, follow

  const int8_t* x_[ALL];
  const int32_t* totals_[ALL];
  Dot<SMALL> dots_[ALL];
};

#if defined(SPECRAY_WORDS)
// The same for weights of 8 bits and activations of 16. Two products fit into 32 bits, and so do the sums of a group.
template <int R, class Format>
class WordDots {
 public:
  WordDots(const Rows& rows, int first) {
    for (int r = 0; r < R; ++r) {
      x_[r] = rows.words(first + r);
      totals_[r] = rows.totals(first + r, Format::SIZE, 0);
    }
  }

  inline void multiply(int group, int offset, const uint8_t* ints, Fetch& fetch) {
    Ints dots[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) dots[r][n] = splat(offset * totals_[r][group]);
#pragma GCC unroll 1
    for (int i = 0; i < Format::SIZE; i += 4) {
      fetch.advance(LINE);
#pragma GCC unroll 2
      for (int second = 0; second < 4; second += 2, ints += 2 * LANES) {
        Ints w[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) w[n] = Ints(_mm256_cvtepu8_epi16(load<__m128i>(ints + 2 * WIDTH * n)));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Ints two = splat(load<int32_t>(x_[r] + group * Format::SIZE + i + second));
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) add_words(dots[r][n], w[n], two);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) dots_[r][n] = dots[r][n];
  }

  inline Floats result(int r, int n) const { return to_floats(dots_[r][n]); }

 private:
  const int16_t* x_[R];
  const int32_t* totals_[R];
  Ints dots_[R][N];
};

template <int R, class Format>
using Dots = std::conditional_t<Format::BITS == 8, WordDots<R, Format>, ByteDots<R, Format>>;
#else
template <int R, class Format>
using Dots = ByteDots<R, Format>;
#endif

template <int R, class Format>
inline void quantised_tile(
    const uint8_t* block, const Rows& rows, int first, int ins, int zero, Fetch fetch, Tile& out) {
  const typename Format::Scale* scales = reinterpret_cast<const typename Format::Scale*>(block);
  const int64_t to_lows = Format::scale_bytes(ins) / sizeof(typename Format::Scale);
  const uint8_t* ints = block + Format::scale_bytes(ins) * (Format::HAS_LOW ? 2 : 1);
  const float *masses[R], *x_scales[R];
  for (int r = 0; r < R; ++r) {
    masses[r] = rows.masses(first + r, Format::SIZE);
    x_scales[r] = rows.scales(first + r);
  }
  Floats sums[R][N] = {};
  const int num_groups = padded(ins) / Format::SIZE;
  Dots<R, Format> dots(rows, first);
  for (int group = 0; group < num_groups; ++group, scales += LANES, ints += Format::INT_BYTES) {
    dots.multiply(group, Format::HAS_LOW ? 0 : -zero, ints, fetch);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats scale = load_floats(scales + n * WIDTH);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sums[r][n] += dots.result(r, n) * (scale * x_scales[r][group * Format::SIZE / GROUP]);
        if (Format::HAS_LOW) sums[r][n] += load_floats(scales + to_lows + n * WIDTH) * masses[r][group];
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}

// ---- coded weights ------------------------------------------------------------------------------------------------

typedef uint8_t Nibbles __attribute__((vector_size(4 * WIDTH)));

// The numbers e2m1 that codes below 16 stand for, doubled and plus 12.
inline Nibbles e2m1_integers(Nibbles codes) {
  alignas(16) static constexpr uint8_t VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(SPECRAY_AVX512)
  return Nibbles(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(VALUES)), __m512i(codes)));
#elif defined(SPECRAY_WORDS)
  return Nibbles(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(VALUES)), __m256i(codes)));
#else
  Nibbles found;
  for (int i = 0; i < 4 * WIDTH; ++i) found[i] = VALUES[codes[i]];
  return found;
#endif
}

// How the codes of WIDTH channels become numbers: a weight is scale * FACTOR * (number - zero); see `Kind`. A channel has
// 32 bits of eight inputs, or 16 bits of two.
template <int KIND>
struct Decoder {
  static constexpr bool IS_INTEGER = KIND != E4M3, IS_SMALL = KIND == E2M1 || KIND == INT4;
  static constexpr int PAIRS = IS_SMALL ? 4 : 1;  // of inputs
  static constexpr int BYTES = IS_SMALL ? 4 * WIDTH : 2 * WIDTH;
  static constexpr float FACTOR = KIND == E4M3 ? 0x1p120f : KIND == E2M1 ? 0.5f : 1.0f;  // floats' exponents are larger
  static constexpr int ZERO = KIND == INT8 ? 128 : KIND == INT4 ? 8 : KIND == E2M1 ? 12 : 0;

  explicit Decoder(const uint8_t* codes) {
    typedef std::conditional_t<IS_INTEGER, uint8_t, int8_t> Byte;
    codes_ = IS_SMALL ? load<Halves>(codes) : load_halves(reinterpret_cast<const Byte*>(codes));
  }

  // Numbers of 16 bits of a pair of inputs.
  inline Halves pair(int number) const {
    if constexpr (KIND == E2M1) {
      const Nibbles bytes = bits_of<Nibbles>(codes_), four = number % 2 ? bytes >> 4 : bytes & 15;
      const Halves both = bits_of<Halves>(e2m1_integers(four));
      return number / 2 ? both >> 8 : both & 255;
    }
    if constexpr (IS_SMALL) return number == 3 ? codes_ >> 12 : codes_ >> 4 * number & 15;
    if constexpr (!IS_INTEGER) return codes_ << 4 & 0x87F0;  // sign, exponent and first bits of a float
    return codes_;
  }

  // The first or second input of a pair as a float.
  static inline Floats number(Halves pair, bool is_second) {
    const Words both = bits_of<Words>(pair);
    if constexpr (!IS_INTEGER) return bits_of<Floats>(is_second ? both & 0xFFFF0000u : both << 16);
    // The last bit of floats from 2^23 on is worth 1.
    return bits_of<Floats>((is_second ? both >> 16 : both & 0xFFFFu) | 0x4B000000u) - 0x1p23f;
  }

 private:
  Halves codes_;
};

// Of a group of LANES channels.
template <int KIND>
struct CodedGroup {
  Floats scale[N];
  Ints zero[N];

  CodedGroup(const Matrix& matrix, const uint8_t* block, int group) {
    for (int n = 0; n < N; ++n) {
      const int64_t place = int64_t(group) * LANES + n * WIDTH;
      scale[n] = scales(matrix.scale_type, block, place) * Decoder<KIND>::FACTOR;
      zero[n] = splat(int32_t(Decoder<KIND>::ZERO));
      if (has_zeros(matrix.kind)) zero[n] = load_ints(block + first_zero(matrix) + place);
    }
  }

 private:
  static inline Floats scales(int type, const uint8_t* block, int64_t place) {
    if (type == FLOAT32) return load_floats(reinterpret_cast<const float*>(block) + place);
    if (type == BFLOAT16) return load_floats(reinterpret_cast<const bfloat16*>(block) + place);
    if (type == FLOAT16) return load_floats(reinterpret_cast<const float16*>(block) + place);
    const Ints exponents = load_ints(block + place), smallest = splat(0x00400000);  // 2^-127 is no normal number
    return bits_of<Floats>(exponents == 0 ? smallest : exponents << 23);
  }
};

// R rows from `first` with one block of coded weights. Their sums have the bits of `dense_tile`'s with the same weights.
template <int R, int KIND>
inline void coded_tile(const Matrix& matrix, const uint8_t* block, const Rows& rows, int first, Fetch fetch, Tile& out) {
  typedef Decoder<KIND> Decode;
  constexpr int STEP = N * Decode::BYTES, STEPS = STEP < LINE ? LINE / STEP : 1, INPUTS = 2 * Decode::PAIRS;
  const uint8_t* codes = block + first_weight(matrix);
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows.floats(first + r);
  Floats sums[R][N] = {};
  for (int begin = 0, number = 0; begin < matrix.ins; begin += matrix.group, ++number) {
    const CodedGroup<KIND> group(matrix, block, number);
    Floats zero[N];
    for (int n = 0; n < N; ++n) zero[n] = to_floats(group.zero[n]);
    const int end = std::min(matrix.ins, begin + matrix.group);
    for (int i = begin; i < end; i += STEPS * INPUTS) {
#pragma GCC unroll 2
      for (int step = 0; step < STEPS; ++step, codes += STEP) {
#pragma GCC unroll 8
        for (int input = 0; input < INPUTS; ++input) {
          Floats w[N];
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) {
            w[n] = Decode::number(Decode(codes + n * Decode::BYTES).pair(input / 2), input % 2);
            w[n] = (Decode::IS_INTEGER ? w[n] - zero[n] : w[n]) * group.scale[n];
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[r][n] += w[n] * x[r][i + step * INPUTS + input];
          }
        }
      }
      fetch.advance(STEPS * STEP);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}

// The products of R rows, rounded to 16 bits, with GROUP inputs of coded integers, added to `dots`.
template <int R, int KIND>
[[gnu::always_inline]] inline void add_group(
    const int16_t* const (&x)[R], int first, const uint8_t*& codes, Fetch& fetch, Ints (&dots)[R][N]) {
  typedef Decoder<KIND> Decode;
  constexpr int STEP = N * Decode::BYTES, INPUTS = 2 * Decode::PAIRS;
  Ints sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = dots[r][n];
#pragma GCC unroll 16
  for (int i = 0; i < GROUP; i += INPUTS, codes += STEP) {
    fetch.advance(STEP);
#pragma GCC unroll 4
    for (int pair = 0; pair < Decode::PAIRS; ++pair) {
      Ints w[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) w[n] = bits_of<Ints>(Decode(codes + n * Decode::BYTES).pair(pair));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Ints two = splat(load<int32_t>(x[r] + first + i + 2 * pair));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) add_words(sums[r][n], w[n], two);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) dots[r][n] = sums[r][n];
}

// `coded_tile` with rows that are rounded to 16 bits. Groups of weights have a multiple of GROUP inputs, or are one group.
template <int R, int KIND>
inline void rounded_tile(
    const Matrix& matrix, const uint8_t* block, const Rows& rows, int first, Fetch fetch, Tile& out) {
  const uint8_t* codes = block + first_weight(matrix);
  const int16_t* x[R];
  const int32_t* totals[R];
  const float* x_scales[R];
  for (int r = 0; r < R; ++r) {
    x[r] = rows.words(first + r);
    totals[r] = rows.totals(first + r, GROUP, 0);
    x_scales[r] = rows.scales(first + r);
  }
  Floats sums[R][N] = {};
  for (int begin = 0, number = 0; begin < matrix.ins; begin += matrix.group, ++number) {
    const CodedGroup<KIND> group(matrix, block, number);
    const int end = std::min(matrix.ins, begin + matrix.group);
    for (int i = begin; i < end; i += GROUP) {
      Ints dots[R][N];
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) dots[r][n] = group.zero[n] * -totals[r][i / GROUP];
      add_group<R, KIND>(x, i, codes, fetch, dots);
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sums[r][n] += to_floats(dots[r][n]) * (group.scale[n] * x_scales[r][i / GROUP]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}

// The products of R rows with the inputs from `begin` to `end`, added to the sums of their pairs' inputs FIRST (0 or 1) to
// LAST.
template <int R, int FIRST, int LAST>
[[gnu::always_inline]] inline void add_floats(
    const float* const (&x)[R], int begin, int end, const uint8_t* codes, Fetch& fetch, Floats (&sums)[2][R][N]) {
  typedef Decoder<E4M3> Decode;
  constexpr int STEP = N * Decode::BYTES, PAIRS = 2;
  Floats parts[2][R][N];
  for (int input = FIRST; input <= LAST; ++input)
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) parts[input][r][n] = sums[input][r][n];
#pragma GCC unroll 1
  for (int i = begin; i < end; i += 2 * PAIRS) {
    if (FIRST == 0) fetch.advance(PAIRS * STEP);
#pragma GCC unroll 2
    for (int pair = 0; pair < PAIRS; ++pair, codes += STEP) {
      Halves both[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) both[n] = Decode(codes + n * Decode::BYTES).pair(0);
#pragma GCC unroll 2
      for (int input = FIRST; input <= LAST; ++input) {
        Floats w[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) w[n] = Decode::number(both[n], input == 1);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) parts[input][r][n] += w[n] * x[r][i + 2 * pair + input];
        }
      }
    }
  }
  for (int input = FIRST; input <= LAST; ++input)
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sums[input][r][n] = parts[input][r][n];
}

// `coded_tile` for e4m3 where a group is scaled once it is summed. First and second inputs of pairs have sums of their own:
// with one row, additions to a single sum would wait for each other.
template <int R>
inline void summed_tile(const Matrix& matrix, const uint8_t* block, const Rows& rows, int first, Fetch fetch, Tile& out) {
  constexpr int PART = 128;  // inputs whose weights stay in the nearest cache
  constexpr int STEP = N * Decoder<E4M3>::BYTES;
  const uint8_t* codes = block + first_weight(matrix);
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows.floats(first + r);
  Floats totals[R][N] = {};
  for (int begin = 0, number = 0; begin < matrix.ins; begin += matrix.group, ++number) {
    const CodedGroup<E4M3> group(matrix, block, number);
    const int group_end = std::min(matrix.ins, begin + matrix.group);
    Floats sums[2][R][N] = {};
    for (int i = begin; i < group_end; i += PART) {
      const int end = std::min(group_end, i + PART);
      const uint8_t* part = codes + int64_t(i / 2) * STEP;
      if constexpr (2 * R * N <= MOST_SUMS) {
        add_floats<R, 0, 1>(x, i, end, part, fetch, sums);
      } else {
        add_floats<R, 0, 0>(x, i, end, part, fetch, sums);
        add_floats<R, 1, 1>(x, i, end, part, fetch, sums);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n)
        totals[r][n] += (sums[0][r][n] + sums[1][r][n]) * (group.scale[n] * (1.0f / Rows::SCALE_UP));
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, totals[r][n]);
}

// Calls `work` with a coded kind as a constant, of which one stands for those with and without zeros.
template <class Work>
inline void with_code(int kind, const Work& work) {
  switch (kind) {
    case E4M3: return work(std::integral_constant<int, E4M3>());
    case E2M1: return work(std::integral_constant<int, E2M1>());
    case INT8:
    case INT8_ZEROS: return work(std::integral_constant<int, INT8>());
    case INT4:
    case INT4_ZEROS: return work(std::integral_constant<int, INT4>());
  }
}

// Calls `work` with the number of rows, from R up to MOST, as a constant.
template <int MOST, int R = 1, class Work>
inline void with_rows(int count, const Work& work) {
  if constexpr (R < MOST) {
    if (count != R) return with_rows<MOST, R + 1>(count, work);
  }
  work(std::integral_constant<int, R>());
}

// `count` rows from `first` with a block.
inline void tile_of(
    int count, const Matrix& matrix, const uint8_t* block, const Rows& rows, int first, Fetch fetch, Tile& out) {
  const int ins = matrix.ins;
  if (is_quantised(matrix.kind)) {
    return with_format(matrix.kind, [&](auto format) {
      with_rows<most_quantised(format.NUMBERS)>(count, [&](auto num_rows) {
        quantised_tile<num_rows.value, decltype(format)>(block, rows, first, ins, matrix.zero, fetch, out);
      });
    });
  }
  if (form_of(matrix) == Form::SCALED_UP) {
    return with_rows<MAX_SCALED_UP>(count, [&](auto num_rows) {
      summed_tile<num_rows.value>(matrix, block, rows, first, fetch, out);
    });
  }
  if (is_coded(matrix.kind)) {
    return with_code(matrix.kind, [&](auto kind) {
      with_rows<MAX_CODED>(count, [&](auto num_rows) {
        constexpr int R = num_rows.value, KIND = kind.value;
        if constexpr (KIND != E4M3)
          if (matrix.is_16_bit) return rounded_tile<R, KIND>(matrix, block, rows, first, fetch, out);
        coded_tile<R, KIND>(matrix, block, rows, first, fetch, out);
      });
    });
  }
  if (matrix.kind == BFLOAT16) {
    return with_rows<MAX_PAIRS>(count, [&](auto num_rows) {
      pairs_tile<num_rows.value>(reinterpret_cast<const bfloat16*>(block), rows, first, ins, fetch, out);
    });
  }
  with_rows<MAX_FLOATS>(count, [&](auto num_rows) {
    constexpr int R = num_rows.value;
    if (matrix.kind == FLOAT32) return dense_tile<R>(reinterpret_cast<const float*>(block), rows, first, ins, fetch, out);
    dense_tile<R>(reinterpret_cast<const float16*>(block), rows, first, ins, fetch, out);
  });
}

}  // namespace specray
