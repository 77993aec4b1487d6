// Training: the target's probabilities as labels, and the loss of a draft head's logits against them.
//
// A row passes through the nearest caches a few times. torch's operations pass whole tensors through memory instead.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "products.h"

namespace specray {

// Numbers of one row, padded to whole vectors.
class PaddedRow {
 public:
  PaddedRow(int64_t size, float fill) : size_(size), fill_(fill), values_((size + WIDTH - 1) / WIDTH * WIDTH) {}

  void read(const void* from, int type, int64_t row) {
    read_row(from, type, row * size_, int(size_), values_.data());
    std::fill(values_.begin() + size_, values_.end(), fill_);
  }
  void write(void* to, int type, int64_t row) const { write_values(values_.data(), int(size_), to, type, row * size_); }
  float operator[](int64_t i) const { return values_[i]; }
  int64_t padded_size() const { return int64_t(values_.size()); }
  Floats at(int64_t i) const { return load<Floats>(values_.data() + i); }
  void set(int64_t i, Floats v) { store(values_.data() + i, v); }

  float most() const {
    Floats found = at(0);
    for (int64_t i = WIDTH; i < padded_size(); i += WIDTH) found = largest(found, at(i));
    return largest_of(found);
  }

  // Replaces logits by exp(logit - most) and returns their sum.
  float exponentiate(float most) {
    Floats total{};
    for (int64_t i = 0; i < padded_size(); i += WIDTH) {
      const Floats v = exp_of(at(i) - most);
      set(i, v);
      total += v;
    }
    return sum(total);
  }

 private:
  const int64_t size_;
  const float fill_;
  std::vector<float> values_;
};

constexpr float UNLIKELY = -1e30f;  // logits that pad a row; unlike -inf, their product with 0 is a number

// Replaces rows of logits by their softmax, and finds the first of each row's largest.
class LabelRows {
 public:
  explicit LabelRows(int64_t size) : size_(size), row_(size, UNLIKELY) {}

  int64_t softmax(void* logits, int type, int64_t row) {
    row_.read(logits, type, row);
    const float most = row_.most();
    int64_t best = 0;
    while (best + 1 < size_ && row_[best] != most) ++best;
    const float share = 1.0f / row_.exponentiate(most);
    for (int64_t i = 0; i < row_.padded_size(); i += WIDTH) row_.set(i, row_.at(i) * share);
    row_.write(logits, type, row);
    return best;
  }

 private:
  const int64_t size_;
  PaddedRow row_;
};

// Replaces rows of logits by the gradient of their loss, which is returned. See `specray.train.loss`.
class LossRows {
 public:
  LossRows(int64_t size, float total_variation)
      : drafted_(size, UNLIKELY), wanted_(size, 0.0f), total_variation_(total_variation) {}

  float compare(void* logits, const void* labels, int type, int64_t row, int64_t label, int64_t best, uint8_t* agrees) {
    const float share = total_variation_, rest = 1.0f - share;
    drafted_.read(logits, type, row);
    wanted_.read(labels, type, label);
    const float most = drafted_.most();
    *agrees = drafted_[best] >= most;
    Floats products{};
    for (int64_t i = 0; i < drafted_.padded_size(); i += WIDTH) products += wanted_.at(i) * drafted_.at(i);
    const float total = drafted_.exponentiate(most), inverse = 1.0f / total;
    Floats overlaps{}, lacking_sums{};
    for (int64_t i = 0; i < drafted_.padded_size(); i += WIDTH) {
      const Floats p = drafted_.at(i) * inverse, w = wanted_.at(i);
      overlaps += p < w ? p : w;
      lacking_sums += p < w ? p : Floats{};  // those that a higher logit brings nearer
    }
    const float lacking = sum(lacking_sums);
    for (int64_t i = 0; i < drafted_.padded_size(); i += WIDTH) {
      const Floats p = drafted_.at(i) * inverse, w = wanted_.at(i);
      const Floats crossed = p - w, distance = p * lacking - (p < w ? p : Floats{});
      drafted_.set(i, crossed * rest + distance * share);
    }
    drafted_.write(logits, type, row);
    return rest * (std::log(total) + most - sum(products)) + share * (1.0f - sum(overlaps));
  }

 private:
  PaddedRow drafted_, wanted_;
  const float total_variation_;
};

}  // namespace specray
