// The products of a matrix with rows of activations, shared by a team. They depend neither on the number of rows nor on
// that of threads.
#pragma once

#include "block_products.h"
#include "team.h"

namespace specray {

// The products of a matrix with `count` rows, block by block and a tile of rows at a time.
class Products {
 public:
  // Blocks are read `together` at a time.
  Products(const Matrix& matrix, const Rows& rows, int count, int together = 1)
      : matrix_(matrix), rows_(rows), bytes_(block_bytes(matrix)), together_(together),
        uses_tiles_(matrix.kind == BFLOAT16 && has_tiles()) {
    const int most = uses_tiles_ ? TILE_ROWS : most_rows(matrix);
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
    if (num_tiles_ == 1) return Fetch::ahead(block + first_weight(matrix_));
    const int64_t share = (bytes_ + num_tiles_ - 1) / num_tiles_;
    const int64_t lines = std::max<int64_t>(1, (bytes_ - first_weight(matrix_)) / LINE);
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
  member.will_read(matrix.data, matrix.outs / LANES, block_bytes(matrix));
}

// The same for all blocks.
template <class Write>
inline void multiply(const Matrix& matrix, const Rows& rows, int count, Member& member, const Write& write) {
  multiply_at(matrix, rows, count, matrix.outs / LANES, [](int i) { return i; }, member, write);
}

// The same without the first blocks.
template <class Write>
inline void multiply_from(
    const Matrix& matrix, int first, const Rows& rows, int count, Member& member, const Write& write) {
  multiply_at(matrix, rows, count, matrix.outs / LANES - first, [=](int i) { return first + i; }, member, write);
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
