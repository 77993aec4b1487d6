// Rows of activations, prepared once for all products that read them: as floats, as bfloat16, or rounded to 8 or 16 bits
// in groups of 32. FINE_BYTES are sums of two numbers of 8 bits: what the first one rounds away is rounded once more.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace specray {

constexpr int GROUP = 32;  // activations that share a scale

inline int padded(int ins) { return (ins + GROUP - 1) / GROUP * GROUP; }

constexpr float FINE_STEPS = 254.0f;  // steps of the second number in one of the first

// ROUNDED: floats with bfloat16's precision. SCALED_UP: floats times `Rows::SCALE_UP`.
enum class Form { FLOATS, ROUNDED, SCALED_UP, PAIRS, BYTES, FINE_BYTES, WORDS };

class Rows {
 public:
  // Times weights of e4m3 before their scale, which are 2^120 times too small, this gives normal numbers. Activations of
  // 2^68 become infinite.
  static constexpr float SCALE_UP = 0x1p60f;

  Rows(Form form, int count, int ins) : form_(form), ins_(ins), wide_(padded(ins)) {
    if (has_groups()) {
      scales_.resize(int64_t(count) * wide_ / GROUP);
      for (int size : {16, GROUP}) masses_[size / GROUP].resize(int64_t(count) * wide_ / size);
      if (form == Form::WORDS) words_.resize(int64_t(count) * wide_);
      for (int part = 0; part < numbers(); ++part) {
        if (form != Form::WORDS) parts_[part].bytes.resize(int64_t(count) * wide_);
        for (int size : {16, GROUP}) parts_[part].totals[size / GROUP].resize(int64_t(count) * wide_ / size);
      }
    } else if (form == Form::PAIRS) {
      pairs_.resize(int64_t(count + 31) * wide_);  // tiles of 32 rows may begin at the last one
    } else {
      floats_.resize(int64_t(count) * wide_);  // zero after `ins`
    }
  }

  void set(int row, const float* x) { set_part(row, 0, ins_, x); }

  // Activations `first`, a multiple of GROUP, and so on of a row. `count` is a multiple of GROUP or ends the row.
  void set_part(int row, int first, int count, const float* x) {
    if (has_groups()) {
      for (int i = 0; i < count; i += GROUP) quantise(row, first + i, x + i);
      return;
    }
    if (form_ == Form::PAIRS) {
      bfloat16* to = pairs_.data() + int64_t(row) * wide_ + first;
      for (int i = 0; i < count; ++i) from_float(x[i], to + i);
      return;
    }
    float* to = floats_.data() + int64_t(row) * wide_ + first;
    for (int i = 0; i < count; ++i) to[i] = form_ == Form::SCALED_UP ? x[i] * SCALE_UP : x[i];
    if (form_ == Form::ROUNDED) {
      for (int i = 0; i < count; ++i) {
        bfloat16 rounded;
        from_float(x[i], &rounded);
        to[i] = to_float(rounded);
      }
    }
  }

  // The numbers that a row stands for.
  void read(int row, float* to) const {
    for (int i = 0; i < ins_; ++i) {
      if (form_ == Form::PAIRS) {
        to[i] = to_float(pairs(row)[i]);
      } else if (form_ == Form::WORDS) {
        to[i] = words(row)[i] * scales(row)[i / GROUP];
      } else if (has_groups()) {
        to[i] = bytes(row, 0)[i];
        if (form_ == Form::FINE_BYTES) to[i] += bytes(row, 1)[i] / FINE_STEPS;
        to[i] *= scales(row)[i / GROUP];
      } else {
        to[i] = form_ == Form::SCALED_UP ? floats(row)[i] / SCALE_UP : floats(row)[i];
      }
    }
  }

  const float* floats(int row) const { return floats_.data() + int64_t(row) * wide_; }
  const bfloat16* pairs(int row) const { return pairs_.data() + int64_t(row) * wide_; }
  // The first (0) or second (1) of the two numbers of each activation.
  const int8_t* bytes(int row, int part) const { return parts_[part].bytes.data() + int64_t(row) * wide_; }
  const int16_t* words(int row) const { return words_.data() + int64_t(row) * wide_; }
  const float* scales(int row) const { return scales_.data() + int64_t(row) * wide_ / GROUP; }
  // Sums of `size` (16 or 32) bytes or words each, and of what the activations stand for.
  const int32_t* totals(int row, int size, int part) const {
    return parts_[part].totals[size / GROUP].data() + int64_t(row) * wide_ / size;
  }
  const float* masses(int row, int size) const { return masses_[size / GROUP].data() + int64_t(row) * wide_ / size; }

 private:
  bool has_groups() const { return form_ == Form::BYTES || form_ == Form::FINE_BYTES || form_ == Form::WORDS; }
  int numbers() const { return form_ == Form::FINE_BYTES ? 2 : 1; }  // of each activation

  // Rounds a group that begins at `first`.
  void quantise(int row, int first, const float* from) {
    const int64_t group = (int64_t(row) * wide_ + first) / GROUP;
    float last[GROUP] = {};
    if (first + GROUP > ins_) {
      std::copy(from, from + ins_ - first, last);
      from = last;
    }
    Floats most{};
    for (int i = 0; i < GROUP; i += WIDTH) {
      const Floats v = load<Floats>(from + i);
      most = largest(most, v < 0.0f ? -v : v);
    }
    const float size = largest_of(most);
    const bool is_finite = size <= 3.0e38f;
    const float steps = form_ == Form::WORDS ? 32767.0f : 127.0f;
    const float scale = is_finite ? size / steps : NAN;
    const float first_steps = form_ == Form::WORDS ? 1.0f : steps;  // 32767 steps of tiny numbers would be infinite
    const float inverse = size > 1e-35f && is_finite ? first_steps / size : 0.0f;
    Floats left[GROUP / WIDTH];  // what is still to be represented, in steps of the scale
    for (int i = 0; i < GROUP / WIDTH; ++i) left[i] = load<Floats>(from + i * WIDTH) * inverse * (steps / first_steps);
    float masses[2] = {};
    for (int part = 0; part < numbers(); ++part) {
      Part& to = parts_[part];
      for (int half = 0; half < 2; ++half) {
        const int64_t place = group * GROUP + half * 16;
        Floats* sixteen = left + half * (16 / WIDTH);
        const int32_t total = form_ == Form::WORDS ? round_half(sixteen, is_finite, words_.data() + place)
                                                   : round_half(sixteen, is_finite, to.bytes.data() + place);
        to.totals[0][2 * group + half] = total;
        masses[half] += part ? float(total) / FINE_STEPS : float(total);
      }
      to.totals[1][group] = to.totals[0][2 * group] + to.totals[0][2 * group + 1];
    }
    scales_[group] = scale;
    for (int half = 0; half < 2; ++half) masses_[0][2 * group + half] = scale * masses[half];
    masses_[1][group] = scale * (masses[0] + masses[1]);
  }

  // Rounds 16 numbers, leaves what is left of them in finer steps, and returns the sum of the rounded ones.
  template <class T>
  static inline int32_t round_half(Floats* numbers, bool is_finite, T* to) {
    typedef T Small __attribute__((vector_size(sizeof(T) * WIDTH)));
    Ints total{};
    for (int i = 0; i < 16 / WIDTH; ++i) {
      const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
      const Floats rounded = (numbers[i] + magic) - magic;
      const Ints v = is_finite ? to_ints(rounded) : Ints{};
      store(to + i * WIDTH, __builtin_convertvector(v, Small));
      numbers[i] = (numbers[i] - rounded) * FINE_STEPS;
      total += v;
    }
    return sum(total);
  }

  struct Part {
    std::vector<int8_t> bytes;
    std::vector<int32_t> totals[2];  // of 16 and of 32 bytes or words
  };

  const Form form_;
  const int ins_, wide_;
  std::vector<float> floats_, scales_, masses_[2];  // masses of 16 and of 32 activations
  std::vector<bfloat16> pairs_;
  std::vector<int16_t> words_;
  Part parts_[2];
};

}  // namespace specray
