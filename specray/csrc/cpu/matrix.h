// Weight matrices in the layout of the kernels, and their products with rows of activations.
//
// A matrix [outs, ins] is stored in blocks of LANES output channels, inputs inside. Every sum runs over the inputs in
// order, in one lane, so an output depends neither on the other rows of a step nor on the threads.
//
// Quantised weights are w = scale * (u - zero) + low with unsigned integers u, for groups of 32 or 16 inputs. This holds
// GGUF's types as they are stored. Activations are rounded to 8 bits in groups of 32; products of a group are summed
// exactly, as integers.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"
#include "team.h"

namespace specray {

constexpr int GROUP = 32;  // activations that share a scale

enum Kind : int32_t {
  FLOAT32 = 0,
  BFLOAT16 = 1,
  FLOAT16 = 2,
  Q4 = 3,        // 4 bits, groups of 32, float16 scales
  Q4_LOW = 4,    // the same with a lowest value of each group
  Q4_LOW_F = 5,  // the same with float32 scales
  Q8 = 6,        // 8 bits, groups of 32, float16 scales
  Q8_LOW = 7,
  Q8_LOW_F = 8,
  Q8_FINE = 9,  // 8 bits, groups of 16, float32 scales
  Q8_FINE_LOW = 10,
};

struct Matrix {
  int32_t kind;
  int32_t outs;  // a multiple of LANES, padding included
  int32_t ins;
  int32_t zero;  // of quantised weights
  const uint8_t* data;
  const float* bias;  // [outs], or null
};

template <int BITS_, bool HAS_LOW_, int SIZE_, class Scale_>
struct Quantised {
  static constexpr int BITS = BITS_, SIZE = SIZE_;
  static constexpr bool HAS_LOW = HAS_LOW_;
  typedef Scale_ Scale;
  static constexpr int INT_BYTES = LANES * SIZE * BITS / 8;
  static constexpr int SCALE_BYTES = LANES * sizeof(Scale) * (HAS_LOW ? 2 : 1);
  static constexpr int BYTES = SCALE_BYTES + INT_BYTES;  // of a group of a block: scales, lows, integers
};

// Calls `work(Format())` with the format of a quantised kind.
template <class Work>
inline void with_format(int kind, const Work& work) {
  switch (kind) {
    case Q4: return work(Quantised<4, false, 32, float16>());
    case Q4_LOW: return work(Quantised<4, true, 32, float16>());
    case Q4_LOW_F: return work(Quantised<4, true, 32, float>());
    case Q8: return work(Quantised<8, false, 32, float16>());
    case Q8_LOW: return work(Quantised<8, true, 32, float16>());
    case Q8_LOW_F: return work(Quantised<8, true, 32, float>());
    case Q8_FINE: return work(Quantised<8, false, 16, float>());
    case Q8_FINE_LOW: return work(Quantised<8, true, 16, float>());
  }
}

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;  // bfloat16 weights are stored, and activations rounded, as pairs of inputs
#else
constexpr bool HAS_PAIRS = false;
#endif

inline bool is_quantised(int kind) { return kind >= Q4; }
inline int padded(int ins) { return (ins + GROUP - 1) / GROUP * GROUP; }

inline int64_t block_bytes(int kind, int ins) {
  int64_t bytes = 0;
  if (kind == FLOAT32) bytes = int64_t(ins) * LANES * 4;
  if (kind == FLOAT16) bytes = int64_t(ins) * LANES * 2;
  if (kind == BFLOAT16) bytes = int64_t(HAS_PAIRS ? ins + ins % 2 : ins) * LANES * 2;
  if (is_quantised(kind))
    with_format(kind, [&](auto format) { bytes = int64_t(padded(ins)) / format.SIZE * format.BYTES; });
  return bytes;
}

// ---- activations -------------------------------------------------------------------------------------------------

// Rows of activations, prepared once for all products that read them.
class Rows {
 public:
  Rows(int kind, int count, int ins) : kind_(kind), ins_(ins) {
    const int64_t wide = padded(ins);
    if (is_quantised(kind)) {
      bytes_.resize(count * wide);
      scales_.resize(count * wide / GROUP);
      sums_.resize(count * wide / 16);
    } else if (kind == BFLOAT16 && HAS_PAIRS) {
      pairs_.resize(count * (ins + ins % 2));
    } else {
      floats_.resize(int64_t(count) * ins);
    }
  }

  void set(int row, const float* x) {
    if (is_quantised(kind_)) return quantise(row, x);
    if (kind_ == BFLOAT16 && HAS_PAIRS) {
      bfloat16* to = const_cast<bfloat16*>(pairs(row));
      for (int i = 0; i < ins_; ++i) from_float(x[i], to + i);
      if (ins_ % 2) to[ins_] = bfloat16{0};
      return;
    }
    float* to = const_cast<float*>(floats(row));
    if (kind_ == BFLOAT16) {  // the same rounding on every CPU
      for (int i = 0; i < ins_; ++i) {
        bfloat16 rounded;
        from_float(x[i], &rounded);
        to[i] = to_float(rounded);
      }
    } else {
      std::copy(x, x + ins_, to);
    }
  }

  const float* floats(int row) const { return floats_.data() + int64_t(row) * ins_; }
  const bfloat16* pairs(int row) const { return pairs_.data() + int64_t(row) * (ins_ + ins_ % 2); }
  const int8_t* bytes(int row) const { return bytes_.data() + int64_t(row) * padded(ins_); }
  const float* scales(int row) const { return scales_.data() + int64_t(row) * padded(ins_) / GROUP; }
  const int32_t* sums(int row) const { return sums_.data() + int64_t(row) * padded(ins_) / 16; }

 private:
  void quantise(int row, const float* x) {
    int8_t* to = const_cast<int8_t*>(bytes(row));
    for (int group = 0; group < padded(ins_) / GROUP; ++group) {
      const int first = group * GROUP, count = std::min(GROUP, ins_ - first);
      float largest = 0.0f;
      bool is_finite = true;
      for (int i = 0; i < count; ++i) {
        const float size = std::fabs(x[first + i]);
        is_finite &= size <= 3.0e38f;
        largest = size > largest ? size : largest;
      }
      const float scale = is_finite ? largest / 127.0f : NAN, inverse = largest > 0.0f && is_finite ? 127.0f / largest : 0;
      const_cast<float*>(scales(row))[group] = scale;
      for (int half = 0; half < 2; ++half) {
        int32_t sum = 0;
        for (int i = half * 16; i < half * 16 + 16; ++i) {
          const int32_t value = i < count && is_finite ? int32_t(std::nearbyint(x[first + i] * inverse)) : 0;
          to[first + i] = int8_t(std::min(127, std::max(-127, value)));
          sum += to[first + i];
        }
        const_cast<int32_t*>(sums(row))[2 * group + half] = sum;
      }
    }
  }

  int kind_, ins_;
  std::vector<float> floats_, scales_;
  std::vector<bfloat16> pairs_;
  std::vector<int8_t> bytes_;
  std::vector<int32_t> sums_;
};

// ---- products ----------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int MAX_TILE = 8;
#else
constexpr int MAX_TILE = 4;
#endif

typedef float Tile[MAX_TILE][LANES];

// `count` rows from `first` with one block of a dense matrix.
template <int R, class Weight>
inline void dense_tile(const Weight* weights, const Rows& rows, int first, int ins, Tile& out) {
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows.floats(first + r);
  Floats sums[R][N] = {};
  for (int i = 0; i < ins; ++i, weights += LANES) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats w = load_floats(weights + n * WIDTH);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][n] += w * x[r][i];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}

#if defined(__AVX512BF16__)
template <int R>
inline void pairs_tile(const bfloat16* weights, const Rows& rows, int first, int ins, Tile& out) {
  const bfloat16* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows.pairs(first + r);
  __m512 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  for (int i = 0; i < ins; i += 2, weights += 2 * LANES) {
    const __m512bh w = (__m512bh)_mm512_loadu_si512(weights);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      sums[r] = _mm512_dpbf16_ps(sums[r], w, (__m512bh)_mm512_set1_epi32(load<int32_t>(x[r] + i)));
  }
  for (int r = 0; r < R; ++r) store(out[r], sums[r]);
}
#endif

template <class Scale>
inline Floats load_scales(const uint8_t* from, int n) {
  return load_floats(reinterpret_cast<const Scale*>(from) + n * WIDTH);
}

template <int R, class Format>
inline void quantised_tile(const uint8_t* block, const Rows& rows, int first, int ins, int zero, Tile& out) {
  constexpr bool SMALL = Format::BITS == 4;
  constexpr int QUADS = Format::SIZE / 4, VECTOR = 4 * LANES;
  const int offset = zero - (BYTES_ARE_CENTRED && !SMALL ? 128 : 0);
  Floats sums[R][N] = {};
  const int num_groups = padded(ins) / Format::SIZE;
  for (int group = 0; group < num_groups; ++group, block += Format::BYTES) {
    const uint8_t* ints = block + Format::SCALE_BYTES;
    Dot<SMALL> dots[R];
    if (SMALL) {
#pragma GCC unroll 4
      for (int quad = 0; quad < QUADS / 2; ++quad, ints += VECTOR) {
        Bytes low[N], high[N];
        typedef uint8_t Raw __attribute__((vector_size(4 * WIDTH)));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const Raw both = load<Raw>(ints + n * 4 * WIDTH);
          low[n] = bits_of<Bytes>(both & 15);
          high[n] = bits_of<Bytes>(both >> 4);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const int8_t* x = rows.bytes(first + r) + group * Format::SIZE + 4 * quad;
          dots[r].add(low, load<int32_t>(x));
          dots[r].add(high, load<int32_t>(x + Format::SIZE / 2));
        }
      }
    } else {
#pragma GCC unroll 8
      for (int quad = 0; quad < QUADS; ++quad, ints += VECTOR) {
        Bytes w[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) w[n] = load<Bytes>(ints + n * 4 * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          dots[r].add(w, load<int32_t>(rows.bytes(first + r) + group * Format::SIZE + 4 * quad));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const int32_t* parts = rows.sums(first + r) + group * Format::SIZE / 16;
      const int32_t total = Format::SIZE == 32 ? parts[0] + parts[1] : parts[0];
      const float x_scale = rows.scales(first + r)[group * Format::SIZE / GROUP];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Floats exact = to_floats(dots[r].result(n) - offset * total);
        sums[r][n] += exact * (load_scales<typename Format::Scale>(block, n) * x_scale);
        if (Format::HAS_LOW)
          sums[r][n] += load_scales<typename Format::Scale>(block + Format::SCALE_BYTES / 2, n) *
                        (x_scale * float(total));
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}

template <int R>
inline void tile(const Matrix& matrix, int block, const Rows& rows, int first, Tile& out) {
  const uint8_t* data = matrix.data + block * block_bytes(matrix.kind, matrix.ins);
  if (matrix.kind == FLOAT32) return dense_tile<R>(reinterpret_cast<const float*>(data), rows, first, matrix.ins, out);
  if (matrix.kind == FLOAT16)
    return dense_tile<R>(reinterpret_cast<const float16*>(data), rows, first, matrix.ins, out);
  if (matrix.kind == BFLOAT16) {
    const bfloat16* weights = reinterpret_cast<const bfloat16*>(data);
#if defined(__AVX512BF16__)
    return pairs_tile<R>(weights, rows, first, matrix.ins, out);
#else
    return dense_tile<R>(weights, rows, first, matrix.ins, out);
#endif
  }
  with_format(matrix.kind, [&](auto format) {
    quantised_tile<R, decltype(format)>(data, rows, first, matrix.ins, matrix.zero, out);
  });
}

inline void tile_of(int count, const Matrix& matrix, int block, const Rows& rows, int first, Tile& out) {
  switch (count) {
    case 1: return tile<1>(matrix, block, rows, first, out);
    case 2: return tile<2>(matrix, block, rows, first, out);
    case 3: return tile<3>(matrix, block, rows, first, out);
    case 4: return tile<4>(matrix, block, rows, first, out);
#if defined(__AVX512F__)
    case 5: return tile<5>(matrix, block, rows, first, out);
    case 6: return tile<6>(matrix, block, rows, first, out);
    case 7: return tile<7>(matrix, block, rows, first, out);
    default: return tile<8>(matrix, block, rows, first, out);
#endif
  }
}

// This member's part of `matrix`'s product with `count` rows: `write(row, channel, values of LANES channels)`.
template <class Write>
inline void multiply(const Matrix& matrix, const Rows& rows, int count, const Team& team, int member, const Write& write) {
  const int blocks = matrix.outs / LANES;
  const int begin = int(int64_t(blocks) * member / team.size()), end = int(int64_t(blocks) * (member + 1) / team.size());
  for (int block = begin; block < end; ++block) {
    for (int first = 0; first < count; first += MAX_TILE) {
      Tile out;
      const int size = std::min(MAX_TILE, count - first);
      tile_of(size, matrix, block, rows, first, out);
      for (int r = 0; r < size; ++r) {
        if (matrix.bias)
          for (int i = 0; i < LANES; ++i) out[r][i] += matrix.bias[block * LANES + i];
        write(first + r, block * LANES, out[r]);
      }
    }
  }
}

// The same for a matrix whose blocks alternate between gate and up: `write(row, channel, silu(gate) * up)`.
template <class Write>
inline void multiply_gated(
    const Matrix& matrix, const Rows& rows, int count, const Team& team, int member, const Write& write) {
  const int pairs = matrix.outs / LANES / 2;
  const int begin = int(int64_t(pairs) * member / team.size()), end = int(int64_t(pairs) * (member + 1) / team.size());
  for (int pair = begin; pair < end; ++pair) {
    for (int first = 0; first < count; first += MAX_TILE) {
      Tile gate, up;
      const int size = std::min(MAX_TILE, count - first);
      tile_of(size, matrix, 2 * pair, rows, first, gate);
      tile_of(size, matrix, 2 * pair + 1, rows, first, up);
      for (int r = 0; r < size; ++r) {
        for (int n = 0; n < N; ++n) {
          const Floats g = load<Floats>(gate[r] + n * WIDTH), u = load<Floats>(up[r] + n * WIDTH);
          store(up[r] + n * WIDTH, g / (1.0f + exp_of(-g)) * u);
        }
        write(first + r, pair * LANES, up[r]);
      }
    }
  }
}

// ---- packing -----------------------------------------------------------------------------------------------------

// One block of a dense matrix from its rows, float32 [count, ins]; channels from `count` on are zero.
inline void pack_dense(int kind, const float* rows, int count, int ins, uint8_t* to) {
  std::memset(to, 0, block_bytes(kind, ins));
  for (int lane = 0; lane < count; ++lane) {
    for (int i = 0; i < ins; ++i) {
      const float value = rows[int64_t(lane) * ins + i];
      const int64_t plain = int64_t(i) * LANES + lane, paired = (int64_t(i / 2) * LANES + lane) * 2 + i % 2;
      if (kind == FLOAT32) reinterpret_cast<float*>(to)[plain] = value;
      if (kind == FLOAT16) from_float(value, reinterpret_cast<float16*>(to) + plain);
      if (kind == BFLOAT16) from_float(value, reinterpret_cast<bfloat16*>(to) + (HAS_PAIRS ? paired : plain));
    }
  }
}

// One block of a quantised matrix: integers u8 [count, padded ins], scales and lows float32 [count, padded ins / size].
inline void pack_quantised(
    int kind, const uint8_t* ints, const float* scales, const float* lows, int count, int ins, uint8_t* to) {
  std::memset(to, 0, block_bytes(kind, ins));
  with_format(kind, [&](auto format) {
    typedef decltype(format) Format;
    const int num_groups = padded(ins) / Format::SIZE;
    for (int group = 0; group < num_groups; ++group, to += Format::BYTES) {
      for (int lane = 0; lane < count; ++lane) {
        auto* heads = reinterpret_cast<typename Format::Scale*>(to);
        from_float(scales[int64_t(lane) * num_groups + group], heads + lane);
        if (Format::HAS_LOW) from_float(lows[int64_t(lane) * num_groups + group], heads + LANES + lane);
        for (int i = 0; i < Format::SIZE; ++i) {
          const uint8_t value = ints[int64_t(lane) * padded(ins) + group * Format::SIZE + i];
          uint8_t* body = to + Format::SCALE_BYTES;
          if (Format::BITS == 8) {
            body[(i / 4 * LANES + lane) * 4 + i % 4] = value;
          } else {
            const int j = i % (Format::SIZE / 2);
            body[(j / 4 * LANES + lane) * 4 + j % 4] |= i < Format::SIZE / 2 ? value & 15 : uint8_t(value << 4);
          }
        }
      }
    }
  });
}

}  // namespace specray
