// Weight matrices in the layout of the kernels.
//
// A matrix [outs, ins] is stored in blocks of LANES output channels, inputs inside.
//
// Quantised weights are w = scale * (u - zero) + low with unsigned integers u, for groups of 32 or 16 inputs. This holds
// GGUF's types as they are stored. Activations are rounded to 8 bits in groups of 32; products of a group are summed
// exactly, as integers. Where weights have 8 bits, activations are sums of two such numbers, except for Q8_ROUGH: one
// alone would lose more than the weights do. With AVX2 they are numbers of 16 bits there.
//
// Coded weights are those of quantised checkpoints as they are stored, w = scale * (code - zero), for groups of inputs.
// They become float32 in registers, where they are multiplied like weights of float32: nothing is rounded. In a model of
// 16 bits, integers are multiplied with activations that are rounded to 16 bits in groups of 32, and products are summed
// exactly. There, floats of 8 bits are scaled after the sum of a group.
#pragma once

#include "rows.h"

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
  E4M3 = 12,      // coded: floats of 8 bits
  E2M1 = 13,      // floats of 4 bits
  INT8 = 14,      // zero is 128
  INT4 = 15,      // zero is 8
  INT8_ZEROS = 16,  // the same with a zero of each group
  INT4_ZEROS = 17,
};

constexpr int32_t E8M0 = 3;  // type of scales, beside FLOAT32, BFLOAT16 and FLOAT16: bytes s that stand for 2^(s - 127)

struct Matrix {
  int32_t kind;
  int32_t outs;  // a multiple of LANES, padding included
  int32_t ins;
  int32_t zero;  // of quantised weights; 0 if they have lows
  int32_t group;       // inputs that share a scale of coded weights, a multiple of 16 unless there is one group
  int32_t scale_type;  // of coded weights
  int32_t is_16_bit;  // whether coded weights are those of a model of 16 bits
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
constexpr bool MULTIPLIES_PAIRS = true;  // of bfloat16 numbers, so activations are rounded as pairs of inputs
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif

inline bool is_coded(int kind) { return kind >= E4M3; }
inline bool is_quantised(int kind) { return kind >= Q4 && !is_coded(kind); }
inline bool has_zeros(int kind) { return kind == INT8_ZEROS || kind == INT4_ZEROS; }
inline bool has_four_bits(int kind) { return kind == E2M1 || kind == INT4 || kind == INT4_ZEROS; }

// The form of activations that a matrix reads.
inline Form form_of(const Matrix& matrix) {
  const int kind = matrix.kind;
  if (is_quantised(kind) && kind < Q8) return Form::BYTES;
  if (is_quantised(kind)) return MULTIPLIES_WORDS ? Form::WORDS : kind == Q8_ROUGH ? Form::BYTES : Form::FINE_BYTES;
  if (kind == BFLOAT16) return MULTIPLIES_PAIRS ? Form::PAIRS : Form::ROUNDED;
  if (!matrix.is_16_bit) return Form::FLOATS;
  return kind == E4M3 ? Form::SCALED_UP : Form::WORDS;
}

inline int num_groups(const Matrix& matrix) { return (matrix.ins + matrix.group - 1) / matrix.group; }
inline int64_t whole_lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }
inline int scale_size(int type) { return type == FLOAT32 ? 4 : type == E8M0 ? 1 : 2; }

// Where a block of coded weights has its zeros, if it has any: behind the scales of its groups.
inline int64_t first_zero(const Matrix& matrix) {
  return int64_t(num_groups(matrix)) * LANES * scale_size(matrix.scale_type);
}

// Where a block's weights begin, after their scales and lows or zeros.
inline int64_t first_weight(const Matrix& matrix) {
  int64_t bytes = 0;
  if (is_quantised(matrix.kind))
    with_format(matrix.kind, [&](auto format) { bytes = format.scale_bytes(matrix.ins) * (format.HAS_LOW ? 2 : 1); });
  if (is_coded(matrix.kind))
    bytes = whole_lines(first_zero(matrix) + (has_zeros(matrix.kind) ? int64_t(num_groups(matrix)) * LANES : 0));
  return bytes;
}

// Weights of bfloat16 are stored as pairs of inputs: one load brings two inputs of a lane.
inline int64_t block_bytes(const Matrix& matrix) {
  const int kind = matrix.kind, ins = matrix.ins;
  int64_t bytes = int64_t(ins) * LANES * (kind == FLOAT32 ? 4 : 2);
  if (kind == BFLOAT16) bytes = int64_t(padded(ins)) * LANES * 2;
  if (is_quantised(kind)) with_format(kind, [&](auto format) { bytes = format.bytes(ins); });
  if (is_coded(kind)) bytes = first_weight(matrix) + int64_t(padded(ins)) * LANES / (has_four_bits(kind) ? 2 : 1);
  return bytes;
}

}  // namespace specray
