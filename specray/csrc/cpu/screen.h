// The largest logits without reading all of the output matrix, which is a fifth of a small model's weights.
//
// All logits are computed from a copy of the matrix in 8 bits. Its error is bounded, so it shows which blocks of the
// matrix can hold a row's largest logit; these are computed again from the matrix itself. Their largest is the largest
// of all, with the bits that the whole product would have given.
//
// A copy for AMX, with one scale for each channel and two numbers of 8 bits for each activation, left fewer blocks to
// compute, but the step took 0.5 ms longer with one row, 0.2 with 8, and 0.2 less with 16.
//
// By the Cauchy-Schwarz inequality, with w and x as the matrix's product reads them and w', x' as the copy's does,
// |w x - w' x'| <= |w - w'| |x| + |w'| |x - x'|. Rounding in the two sums adds at most (ins + 64) 2^-23 |w| |x|.
#pragma once

#include <cmath>
#include <vector>

#include "products.h"

namespace specray {

struct Screen {
  static constexpr int MOST_ROWS = 16;  // with more, arithmetic takes longer than reading the matrix

  bool is_for(int count) const { return matrix.data && count <= MOST_ROWS; }

  Matrix matrix;        // of kind Q8_ROUGH; data null: there is no copy
  const float* errors;  // [outs]: |w - w'| of each channel; infinite for padding
  const float* norms;   // [outs]: the larger of |w| and |w'|
};

// The rows of one run, and the blocks whose products must be computed exactly. All members of a team call `run`.
class ScreenedProduct {
 public:
  ScreenedProduct(const Matrix& matrix, const Screen& screen, int count)
      : matrix_(matrix), screen_(screen), count_(count), num_blocks_(matrix.outs / LANES),
        exact_(form_of(matrix), count, matrix.ins), coarse_(form_of(screen.matrix), count, matrix.ins),
        row_norms_(count), slacks_(count), upper_(int64_t(count) * num_blocks_), lower_(upper_.size()) {}

  static constexpr int NUM_PHASES = 3;

  void set(int row, const float* x) {
    exact_.set(row, x);
    const int ins = matrix_.ins;
    std::vector<float> read(ins), rounding(ins);
    exact_.read(row, read.data());
    coarse_.set(row, read.data());
    coarse_.read(row, rounding.data());
    for (int i = 0; i < ins; ++i) rounding[i] -= read[i];
    row_norms_[row] = norm_of(read);
    const float sum_error = float(ins + 64) * 0x1p-23f;  // twice what sums of so many products can lose
    slacks_[row] = norm_of(rounding) * 1.001f + row_norms_[row] * sum_error;
  }

  // `write` gets all blocks of the copy's product, then `write_exact` those of the matrix's own.
  template <class Write, class WriteExact>
  void run(Member& member, const Write& write, const WriteExact& write_exact) {
    multiply(screen_.matrix, coarse_, count_, member, [&](int r, int channel, const float* values) {
      Floats high = splat(-INFINITY), low = high;
      for (int n = 0; n < N; ++n) {
        const Floats value = load<Floats>(values + n * WIDTH);
        const Floats error = load<Floats>(screen_.errors + channel + n * WIDTH) * row_norms_[r] +
                             load<Floats>(screen_.norms + channel + n * WIDTH) * slacks_[r];
        high = largest(high, value + error);
        low = largest(low, value - error);
      }
      upper_[int64_t(r) * num_blocks_ + channel / LANES] = largest_of(high);
      lower_[int64_t(r) * num_blocks_ + channel / LANES] = largest_of(low);
      write(r, channel, values);
    });
    member.share(1, [&](int) { find_blocks(); });
    multiply_blocks(matrix_, exact_, count_, blocks_, member, write_exact);
  }

 private:
  // Squares of smaller numbers than 1e-18 may be lost, so as much is added.
  static float norm_of(const std::vector<float>& x) {
    const int size = int(x.size());
    return std::sqrt(dot(x.data(), x.data(), size)) + 1e-18f * std::sqrt(float(size));
  }

  // A block whose bound is not a number is computed exactly.
  void find_blocks() {
    std::vector<uint8_t> is_wanted(num_blocks_);
    for (int r = 0; r < count_; ++r) {
      const float *upper = upper_.data() + int64_t(r) * num_blocks_, *lower = lower_.data() + int64_t(r) * num_blocks_;
      float bound = -INFINITY;  // the row's largest logit is at bound this
      for (int block = 0; block < num_blocks_; ++block)
        bound = lower[block] > bound || lower[block] != lower[block] ? lower[block] : bound;
      for (int block = 0; block < num_blocks_; ++block) is_wanted[block] |= !(upper[block] < bound);
    }
    for (int block = 0; block < num_blocks_; ++block)
      if (is_wanted[block]) blocks_.push_back(block);
  }

  const Matrix& matrix_;
  const Screen& screen_;
  const int count_, num_blocks_;
  Rows exact_, coarse_;
  std::vector<float> row_norms_, slacks_;  // by row: |x|; what |w'| or |w| is multiplied with in the bound
  std::vector<float> upper_, lower_;  // [count, blocks]: bounds of each block's largest logit
  std::vector<int> blocks_;  // to be computed exactly
};

}  // namespace specray
