// The largest logit of each row, found block by block while a product makes the logits, so that nobody has to keep them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace specray {

class LargestLogits {
 public:
  // Of `count` rows; logits from `num_columns` on are padding.
  LargestLogits(int count, int num_columns, int team_size)
      : count_(count), num_columns_(num_columns), team_size_(team_size), stride_(count + APART),
        found_(int64_t(stride_) * team_size) {}

  // Looks at LANES logits of a row. Each member of a team has a record of its own.
  void add(int member, int row, int channel, const float* logits) {
    Best& best = found_[int64_t(member) * stride_ + row];
    const int columns = std::min(LANES, num_columns_ - channel);
    if (columns == LANES) {
      Floats most = load<Floats>(logits);
      for (int n = 1; n < N; ++n) most = largest(most, load<Floats>(logits + n * WIDTH));
      if (sum(Ints(most < best.logit)) == -WIDTH) return;
    }
    for (int i = 0; i < columns; ++i) best.add({logits[i], channel + i});
  }

  // The tokens of all rows, the first one among equals; -1 where a logit, or the largest one, is not finite.
  void write(int64_t* tokens) const {
    for (int row = 0; row < count_; ++row) {
      Best best;
      for (int member = 0; member < team_size_; ++member) best.add(found_[int64_t(member) * stride_ + row]);
      tokens[row] = std::isfinite(best.logit) ? best.token : -1;
    }
  }

 private:
  static constexpr int APART = 8;  // records between those of two members: a cache line

  struct Best {
    float logit = -INFINITY;
    int token = 0;

    // A logit that is not a number stays.
    void add(const Best& other) {
      const bool is_larger = other.logit > logit || (other.logit == logit && other.token < token);
      if (is_larger || other.logit != other.logit) *this = other;
    }
  };

  const int count_, num_columns_, team_size_, stride_;
  std::vector<Best> found_;
};

}  // namespace specray
