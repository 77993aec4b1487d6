// Rows of activations, prepared once for all products that read them: as floats, as bfloat16, or rounded to 8 bits in
// groups of 32.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace specray {

constexpr int GROUP = 32;  // activations that share a scale

inline int padded(int ins) { return (ins + GROUP - 1) / GROUP * GROUP; }

enum class Form { FLOATS, ROUNDED, PAIRS, BYTES };  // ROUNDED: floats with the precision of bfloat16

class Rows {
 public:
  Rows(Form form, int count, int ins) : form_(form), ins_(ins), wide_(padded(ins)) {
    if (form == Form::BYTES) {
      bytes_.resize(int64_t(count) * wide_);
      scales_.resize(int64_t(count) * wide_ / GROUP);
      for (int size : {16, GROUP}) {
        totals_[size / GROUP].resize(int64_t(count) * wide_ / size);
        masses_[size / GROUP].resize(int64_t(count) * wide_ / size);
      }
    } else if (form == Form::PAIRS) {
      pairs_.resize(int64_t(count + 31) * wide_);  // tiles of 32 rows may begin at the last one
    } else {
      floats_.resize(int64_t(count) * ins);
    }
  }

  void set(int row, const float* x) {
    if (form_ == Form::BYTES) return quantise(row, x);
    if (form_ == Form::PAIRS) {
      bfloat16* to = pairs_.data() + int64_t(row) * wide_;
      for (int i = 0; i < ins_; ++i) from_float(x[i], to + i);
      return;
    }
    float* to = floats_.data() + int64_t(row) * ins_;
    std::copy(x, x + ins_, to);
    if (form_ == Form::ROUNDED) {
      for (int i = 0; i < ins_; ++i) {
        bfloat16 rounded;
        from_float(x[i], &rounded);
        to[i] = to_float(rounded);
      }
    }
  }

  const float* floats(int row) const { return floats_.data() + int64_t(row) * ins_; }
  const bfloat16* pairs(int row) const { return pairs_.data() + int64_t(row) * wide_; }
  const int8_t* bytes(int row) const { return bytes_.data() + int64_t(row) * wide_; }
  const float* scales(int row) const { return scales_.data() + int64_t(row) * wide_ / GROUP; }
  // Sums of `size` (16 or 32) bytes each, and what these stand for.
  const int32_t* totals(int row, int size) const { return totals_[size / GROUP].data() + int64_t(row) * wide_ / size; }
  const float* masses(int row, int size) const { return masses_[size / GROUP].data() + int64_t(row) * wide_ / size; }

 private:
  void quantise(int row, const float* x) {
    int8_t* to = bytes_.data() + int64_t(row) * wide_;
    float* scales = scales_.data() + int64_t(row) * wide_ / GROUP;
    for (int first = 0; first < wide_; first += GROUP, to += GROUP, ++scales) {
      float last[GROUP] = {};
      const float* from = x + first;
      if (first + GROUP > ins_) {
        std::copy(from, x + ins_, last);
        from = last;
      }
      Floats most{};
      for (int i = 0; i < GROUP; i += WIDTH) {
        const Floats v = load<Floats>(from + i);
        most = largest(most, v < 0.0f ? -v : v);
      }
      const float size = largest_of(most);
      const bool is_finite = size <= 3.0e38f;
      *scales = is_finite ? size / 127.0f : NAN;
      const Floats inverse = splat(size > 1e-35f && is_finite ? 127.0f / size : 0.0f);
      int32_t whole = 0;
      const int64_t group = (int64_t(row) * wide_ + first) / GROUP;
      for (int half = 0; half < 2; ++half) {
        typedef int8_t Small __attribute__((vector_size(WIDTH)));
        Ints sum_of_half{};
        for (int i = half * 16; i < half * 16 + 16; i += WIDTH) {
          const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
          const Floats rounded = (load<Floats>(from + i) * inverse + magic) - magic;
          const Ints v = is_finite ? to_ints(rounded) : Ints{};
          store(to + i, __builtin_convertvector(v, Small));
          sum_of_half += v;
        }
        const int32_t total = sum(sum_of_half);
        totals_[0][2 * group + half] = total;
        masses_[0][2 * group + half] = *scales * float(total);
        whole += total;
      }
      totals_[1][group] = whole;
      masses_[1][group] = *scales * float(whole);
    }
  }

  const Form form_;
  const int ins_, wide_;
  std::vector<float> floats_, scales_, masses_[2];  // masses and totals of 16 and of 32 bytes
  std::vector<bfloat16> pairs_;
  std::vector<int8_t> bytes_;
  std::vector<int32_t> totals_[2];
};

}  // namespace specray
