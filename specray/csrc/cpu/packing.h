// Weight matrices packed into the blocks of matrix.h, once, when a model is loaded.
#pragma once

#include "matrix.h"

namespace specray {

// One block of a dense matrix from its rows, float32 [count, ins]; channels from `count` on are zero.
inline void pack_dense(const Matrix& matrix, const float* rows, int count, uint8_t* to) {
  const int kind = matrix.kind, ins = matrix.ins;
  std::memset(to, 0, block_bytes(matrix));
  for (int lane = 0; lane < count; ++lane) {
    for (int i = 0; i < ins; ++i) {
      const float value = rows[int64_t(lane) * ins + i];
      const int64_t plain = int64_t(i) * LANES + lane, paired = (int64_t(i / 2) * LANES + lane) * 2 + i % 2;
      if (kind == FLOAT32) reinterpret_cast<float*>(to)[plain] = value;
      if (kind == FLOAT16) from_float(value, reinterpret_cast<float16*>(to) + plain);
      if (kind == BFLOAT16) from_float(value, reinterpret_cast<bfloat16*>(to) + paired);
    }
  }
}

// One block of a quantised matrix: integers u8 [count, padded ins], scales and lows float32 [count, padded ins / size].
inline void pack_quantised(
    const Matrix& matrix, const uint8_t* ints, const float* scales, const float* lows, int count, uint8_t* to) {
  const int ins = matrix.ins;
  std::memset(to, 0, block_bytes(matrix));
  with_format(matrix.kind, [&](auto format) {
    typedef decltype(format) Format;
    const int num_groups = padded(ins) / Format::SIZE;
    auto* to_scales = reinterpret_cast<typename Format::Scale*>(to);
    auto* to_lows = reinterpret_cast<typename Format::Scale*>(to + Format::scale_bytes(ins));
    uint8_t* body = to + Format::scale_bytes(ins) * (Format::HAS_LOW ? 2 : 1);
    for (int group = 0; group < num_groups; ++group, body += Format::INT_BYTES) {
      for (int lane = 0; lane < count; ++lane) {
        const int64_t from = int64_t(lane) * num_groups + group;
        from_float(scales[from], to_scales + group * LANES + lane);
        if (Format::HAS_LOW) from_float(lows[from], to_lows + group * LANES + lane);
        for (int i = 0; i < Format::SIZE; ++i) {
          const uint8_t value = ints[int64_t(lane) * padded(ins) + group * Format::SIZE + i];
          if (Format::BITS == 8) {
            constexpr int TOGETHER = MULTIPLIES_WORDS ? 2 : 4;
            body[(i / TOGETHER * LANES + lane) * TOGETHER + i % TOGETHER] = value;
          } else {
            const int j = i % (Format::SIZE / 2);
            body[(j / 4 * LANES + lane) * 4 + j % 4] |= i < Format::SIZE / 2 ? value & 15 : uint8_t(value << 4);
          }
        }
      }
    }
  });
}

// One block of a coded matrix: codes [count, bytes of an output], scales [count, groups] of the matrix's type, zeros
// u8 [count, groups].
inline void pack_coded(
    const Matrix& matrix, const uint8_t* codes, const uint8_t* scales, const uint8_t* zeros, int count, uint8_t* to) {
  const int groups = num_groups(matrix), size = scale_size(matrix.scale_type);
  const int bytes = has_four_bits(matrix.kind) ? (matrix.ins + 1) / 2 : matrix.ins;
  uint8_t *to_zeros = to + first_zero(matrix), *body = to + first_weight(matrix);
  std::memset(to, 0, block_bytes(matrix));
  for (int lane = 0; lane < count; ++lane) {
    for (int group = 0; group < groups; ++group) {
      const int64_t from = int64_t(lane) * groups + group;
      std::memcpy(to + (int64_t(group) * LANES + lane) * size, scales + from * size, size);
      if (has_zeros(matrix.kind)) to_zeros[group * LANES + lane] = zeros[from];
    }
    const uint8_t* from = codes + int64_t(lane) * bytes;
    for (int i = 0; i < matrix.ins; ++i) {
      if (has_four_bits(matrix.kind)) {  // eight inputs in 32 bits: the first ones of four pairs, then the second ones
        const int pair = i % 8 / 2, code = from[i / 2] >> (i % 2 * 4) & 15;
        body[(int64_t(i / 8) * LANES + lane) * 4 + i % 2 * 2 + pair / 2] |= uint8_t(code << (pair % 2 * 4));
      } else {
        body[(int64_t(i / 2) * LANES + lane) * 2 + i % 2] = from[i];
      }
    }
  }
}

}  // namespace specray
