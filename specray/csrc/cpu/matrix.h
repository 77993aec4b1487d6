// Weight matrices in the layout of the kernels, and their products with rows of activations.
//
// A matrix [outs, ins] is stored in blocks of LANES output channels, inputs inside. Every sum runs over the inputs in
// order, in one lane, so an output depends neither on the other rows of a step nor on the threads.
//
// Quantised weights are w = scale * (u - zero) + low with unsigned integers u, for groups of 32 or 16 inputs. This holds
// GGUF's types as they are stored. Activations are rounded to 8 bits in groups of 32; products of a group are summed
// exactly, as integers. Where weights have 8 bits, activations are sums of two such numbers, except for Q8_ROUGH: one
// alone would lose more than the weights do.
#pragma once

#include "rows.h"
#include "team.h"
#include "tiles.h"

namespace specray {

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
  Q8_ROUGH = 11,  // stored like Q8; activations are single numbers of 8 bits
};

struct Matrix {
  int32_t kind;
  int32_t outs;  // a multiple of LANES, padding included
  int32_t ins;
  int32_t zero;  // of quantised weights; 0 if they have lows
  const uint8_t* data;
  const float* bias;  // [outs], or null
};

// A block begins at a cache line. It has the scales of all its groups, then their lows, then their integers.
template <int BITS_, bool HAS_LOW_, int SIZE_, class Scale_, bool IS_ROUGH = BITS_ == 4>
struct Quantised {
  static constexpr int BITS = BITS_, SIZE = SIZE_;
  static constexpr bool HAS_LOW = HAS_LOW_;
  static constexpr int NUMBERS = IS_ROUGH ? 1 : 2;  // of each activation
  typedef Scale_ Scale;
  static constexpr int INT_BYTES = LANES * SIZE * BITS / 8;  // of a group

  static int64_t scale_bytes(int ins) { return LINE * ((padded(ins) / SIZE * LANES * int64_t(sizeof(Scale)) + LINE - 1) / LINE); }
  static int64_t bytes(int ins) { return scale_bytes(ins) * (HAS_LOW ? 2 : 1) + padded(ins) / SIZE * int64_t(INT_BYTES); }
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
    case Q8_ROUGH: return work(Quantised<8, false, 32, float16, true>());
  }
}

// ---- rows of tensors of type FLOAT32, BFLOAT16 or FLOAT16 --------------------------------------------------------

inline void read_row(const void* from, int type, int64_t first, int count, float* to) {
  if (type == FLOAT32) std::memcpy(to, static_cast<const float*>(from) + first, 4 * int64_t(count));
  for (int i = 0; i < count; ++i) {
    if (type == BFLOAT16) to[i] = to_float(static_cast<const bfloat16*>(from)[first + i]);
    if (type == FLOAT16) to[i] = to_float(static_cast<const float16*>(from)[first + i]);
  }
}

inline void write_values(const float* from, int count, void* to, int type, int64_t first) {
  if (type == FLOAT32) std::memcpy(static_cast<float*>(to) + first, from, 4 * int64_t(count));
  for (int i = 0; i < count; ++i) {
    if (type == BFLOAT16) from_float(from[i], static_cast<bfloat16*>(to) + first + i);
    if (type == FLOAT16) from_float(from[i], static_cast<float16*>(to) + first + i);
  }
}

// ---- blocks ------------------------------------------------------------------------------------------------------

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;  // bfloat16 weights are stored, and activations rounded, as pairs of inputs
#else
constexpr bool HAS_PAIRS = false;
#endif

inline bool is_quantised(int kind) { return kind >= Q4; }

// The form of activations that a matrix reads.
inline Form form_of(int kind) {
  if (is_quantised(kind)) return kind >= Q8 && kind != Q8_ROUGH ? Form::FINE_BYTES : Form::BYTES;
  if (kind == BFLOAT16) return HAS_PAIRS ? Form::PAIRS : Form::ROUNDED;
  return Form::FLOATS;
}

inline int64_t block_bytes(int kind, int ins) {
  int64_t bytes = int64_t(ins) * LANES * (kind == FLOAT32 ? 4 : 2);
  if (kind == BFLOAT16 && HAS_PAIRS) bytes = int64_t(padded(ins)) * LANES * 2;
  if (is_quantised(kind)) with_format(kind, [&](auto format) { bytes = format.bytes(ins); });
  return bytes;
}

// Where a block's weights begin, after their scales and lows.
inline int64_t first_weight(int kind, int ins) {
  int64_t bytes = 0;
  if (is_quantised(kind))
    with_format(kind, [&](auto format) { bytes = format.scale_bytes(ins) * (format.HAS_LOW ? 2 : 1); });
  return bytes;
}

// ---- products ----------------------------------------------------------------------------------------------------

#if defined(SPECRAY_AVX512)
constexpr int MAX_TILE = 8;  // rows whose sums fit into registers, more or less
constexpr int MAX_PAIRS = 14;  // the same for products of bfloat16 pairs, which need few other registers
#else
constexpr int MAX_TILE = 4;
constexpr int MAX_PAIRS = 4;
#endif

typedef float Tile[TILE_ROWS > MAX_PAIRS ? TILE_ROWS : MAX_PAIRS][LANES];

// R rows from `first` with one block of a dense matrix.
template <int R, class Weight>
inline void dense_tile(const Weight* weights, const Rows& rows, int first, int ins, Fetch fetch, Tile& out) {
  const float* x[R];
  for (int r = 0; r < R; ++r) x[r] = rows.floats(first + r);
  Floats sums[R][N] = {};
  for (int i = 0; i < ins; ++i, weights += LANES) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats w = load_floats(weights + n * WIDTH);
      fetch.advance(WIDTH * sizeof(Weight));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[r][n] += w * x[r][i];
    }
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
#endif

template <int R, class Format>
inline void quantised_tile(
    const uint8_t* block, const Rows& rows, int first, int ins, int zero, Fetch fetch, Tile& out) {
  constexpr bool SMALL = Format::BITS == 4;
  constexpr int QUADS = Format::SIZE / 4, VECTOR = 4 * LANES;
  constexpr int CENTRE = BYTES_ARE_CENTRED && !SMALL ? 128 : 0;
  const int offset = CENTRE - (Format::HAS_LOW ? 0 : zero);
  const typename Format::Scale* scales = reinterpret_cast<const typename Format::Scale*>(block);
  const int64_t to_lows = Format::scale_bytes(ins) / sizeof(typename Format::Scale);
  const uint8_t* ints = block + Format::scale_bytes(ins) * (Format::HAS_LOW ? 2 : 1);
  constexpr int ALL = Format::NUMBERS * R;  // the rows' second numbers, if any, follow
  const int8_t* x[ALL];
  const int32_t* totals[ALL];
  const float *masses[R], *x_scales[R];
  for (int r = 0; r < ALL; ++r) {
    x[r] = rows.bytes(first + r % R, r / R);
    totals[r] = rows.totals(first + r % R, Format::SIZE, r / R);
  }
  for (int r = 0; r < R; ++r) {
    masses[r] = rows.masses(first + r, Format::SIZE);
    x_scales[r] = rows.scales(first + r);
  }
  Floats sums[R][N] = {};
  const int num_groups = padded(ins) / Format::SIZE;
  for (int group = 0; group < num_groups; ++group, scales += LANES) {
    Dot<SMALL> dots[ALL];
#pragma GCC unroll 8
    for (int r = 0; r < ALL; ++r) dots[r].begin(Format::HAS_LOW && !CENTRE ? 0 : offset * totals[r][group]);
#pragma GCC unroll 8
    for (int quad = 0; quad < (SMALL ? QUADS / 2 : QUADS); ++quad, ints += VECTOR) {
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
        const int8_t* four = x[r] + group * Format::SIZE + 4 * quad;
        dots[r].add(low, load<int32_t>(four));
        if (SMALL) dots[r].add(high, load<int32_t>(four + Format::SIZE / 2));
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const Floats scale = load_floats(scales + n * WIDTH);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float x_scale = x_scales[r][group * Format::SIZE / GROUP];
        Floats dot = to_floats(dots[r].result(n));
        if (ALL > R) dot += to_floats(dots[ALL - R + r].result(n)) * (1.0f / FINE_STEPS);
        sums[r][n] += dot * (scale * x_scale);
        if (Format::HAS_LOW) sums[r][n] += load_floats(scales + to_lows + n * WIDTH) * masses[r][group];
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out[r] + n * WIDTH, sums[r][n]);
}

// Calls `work` with the number of rows, from R up to MOST, as a constant.
template <int MOST, int R = 1, class Work>
inline void with_rows(int count, const Work& work) {
  if constexpr (R < MOST) {
    if (count != R) return with_rows<MOST, R + 1>(count, work);
  }
  work(std::integral_constant<int, R>());
}

template <int R>
inline void tile(const Matrix& matrix, const uint8_t* block, const Rows& rows, int first, Fetch fetch, Tile& out) {
  const int ins = matrix.ins;
  if (matrix.kind == FLOAT32) return dense_tile<R>(reinterpret_cast<const float*>(block), rows, first, ins, fetch, out);
  if (matrix.kind == FLOAT16) return dense_tile<R>(reinterpret_cast<const float16*>(block), rows, first, ins, fetch, out);
  if (matrix.kind == BFLOAT16) return dense_tile<R>(reinterpret_cast<const bfloat16*>(block), rows, first, ins, fetch, out);
  with_format(matrix.kind, [&](auto format) {
    quantised_tile<R, decltype(format)>(block, rows, first, ins, matrix.zero, fetch, out);
  });
}

inline void tile_of(
    int count, const Matrix& matrix, const uint8_t* block, const Rows& rows, int first, Fetch fetch, Tile& out) {
#if defined(__AVX512BF16__)
  if (matrix.kind == BFLOAT16) {
    return with_rows<MAX_PAIRS>(count, [&](auto num_rows) {
      pairs_tile<num_rows.value>(reinterpret_cast<const bfloat16*>(block), rows, first, matrix.ins, fetch, out);
    });
  }
#endif
  with_rows<MAX_TILE>(count, [&](auto num_rows) { tile<num_rows.value>(matrix, block, rows, first, fetch, out); });
}

// The products of a matrix with `count` rows, block by block and a tile of rows at a time.
class Products {
 public:
  // Blocks are read `together` at a time.
  Products(const Matrix& matrix, const Rows& rows, int count, int together = 1)
      : matrix_(matrix), rows_(rows), bytes_(block_bytes(matrix.kind, matrix.ins)), together_(together),
        uses_tiles_(matrix.kind == BFLOAT16 && has_tiles()) {
    const Form form = form_of(matrix.kind);
    const int most = uses_tiles_                ? TILE_ROWS
                     : form == Form::PAIRS      ? MAX_PAIRS
                     : form == Form::FINE_BYTES ? MAX_TILE / 2
                                                : MAX_TILE;
    const int tiles = std::max(1, (count + most - 1) / most);
    size_ = std::max(1, (count + tiles - 1) / tiles);  // tiles of about one size
    num_tiles_ = tiles;
    if (uses_tiles_) begin_tiles(size_);
  }
  ~Products() {
    if (uses_tiles_) end_tiles();
  }

  int tile_size() const { return size_; }

  // `count` rows from `first` with `block`, the bias included.
  void operator()(int block, int first, int count, Tile& out) const {
    const uint8_t* data = matrix_.data + block * bytes_;
    if (uses_tiles_) {
      const auto* weights = reinterpret_cast<const bfloat16*>(data);
      const int number = first / size_, wide = padded(matrix_.ins);
      tile_products(weights, rows_.pairs(first), size_, wide, lines_ahead(weights, number, wide), &out[0][0]);
    } else {
      tile_of(count, matrix_, data, rows_, first, fetch(data, first / size_), out);
    }
    if (!matrix_.bias) return;
    for (int r = 0; r < count; ++r)
      for (int i = 0; i < LANES; ++i) out[r][i] += matrix_.bias[block * LANES + i];
  }

 private:
  // Where several tiles read a block, each brings its share of the next one closer.
  Fetch fetch(const uint8_t* block, int number) const {
    if (num_tiles_ == 1) return Fetch::ahead(block + first_weight(matrix_.kind, matrix_.ins));
    const int64_t share = (bytes_ + num_tiles_ - 1) / num_tiles_;
    const int64_t lines = std::max<int64_t>(1, (bytes_ - first_weight(matrix_.kind, matrix_.ins)) / LINE);
    return Fetch::of_share(block + together_ * bytes_ + number * share, int((share + lines - 1) / lines));
  }

  // The same on tile registers.
  LinesAhead lines_ahead(const bfloat16* weights, int number, int wide) const {
    constexpr int ROWS = 32, SOON = 4 * ROWS;  // rows of weights
    if (num_tiles_ == 1) return {weights + SOON * LANES, ROWS};
    const int count = (ROWS + num_tiles_ - 1) / num_tiles_;
    const int64_t share = int64_t(number) * count * (wide / ROWS) * LINE / int(sizeof(bfloat16));
    return {weights + together_ * bytes_ / int(sizeof(bfloat16)) + share, count};
  }

  const Matrix& matrix_;
  const Rows& rows_;
  const int64_t bytes_;
  const int together_;
  const bool uses_tiles_;
  int size_, num_tiles_;
};

// The products of `num_blocks` blocks of a matrix, `block_at(0)` and so on, with `count` rows, shared by the team:
// `write(row, channel, values of LANES channels)`.
template <class At, class Write>
inline void multiply_at(
    const Matrix& matrix, const Rows& rows, int count, int num_blocks, const At& block_at, Member& member,
    const Write& write) {
  const Products products(matrix, rows, count);
  alignas(LINE) Tile out;
  member.share(num_blocks, [&](int i) {
    const int block = block_at(i);
    for (int first = 0; first < count; first += products.tile_size()) {
      const int size = std::min(products.tile_size(), count - first);
      products(block, first, size, out);
      for (int r = 0; r < size; ++r) write(first + r, block * LANES, out[r]);
    }
  });
}

// Says that a later phase reads this matrix.
inline void will_read(const Matrix& matrix, Member& member) {
  member.will_read(matrix.data, matrix.outs / LANES, block_bytes(matrix.kind, matrix.ins));
}

// The same for all blocks.
template <class Write>
inline void multiply(const Matrix& matrix, const Rows& rows, int count, Member& member, const Write& write) {
  multiply_at(matrix, rows, count, matrix.outs / LANES, [](int i) { return i; }, member, write);
}

// The same for these blocks.
template <class Write>
inline void multiply_blocks(
    const Matrix& matrix, const Rows& rows, int count, const std::vector<int>& blocks, Member& member,
    const Write& write) {
  multiply_at(matrix, rows, count, int(blocks.size()), [&](int i) { return blocks[i]; }, member, write);
}

// The same for a matrix whose blocks alternate between gate and up: `write(row, channel, silu(gate) * up)`.
template <class Write>
inline void multiply_gated(const Matrix& matrix, const Rows& rows, int count, Member& member, const Write& write) {
  const Products products(matrix, rows, count, 2);
  alignas(LINE) Tile gate, up;
  member.share(matrix.outs / LANES / 2, [&](int pair) {
    for (int first = 0; first < count; first += products.tile_size()) {
      const int size = std::min(products.tile_size(), count - first);
      products(2 * pair, first, size, gate);
      products(2 * pair + 1, first, size, up);
      for (int r = 0; r < size; ++r) {
        for (int n = 0; n < N; ++n) {
          const Floats g = load<Floats>(gate[r] + n * WIDTH), u = load<Floats>(up[r] + n * WIDTH);
          store(up[r] + n * WIDTH, g / (1.0f + exp_of(-g)) * u);
        }
        write(first + r, pair * LANES, up[r]);
      }
    }
  });
}

}  // namespace specray
