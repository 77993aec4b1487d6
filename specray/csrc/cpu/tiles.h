// Products of bfloat16 on the tile registers of Intel's AMX, sixteen rows at a time.
//
// A sum takes the inputs in order, two at a time, in every row and column alike. Denormal numbers count as zero.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(SPECRAY_AVX512)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specray {

#if defined(__AMX_BF16__) && defined(SPECRAY_AVX512)

constexpr int TILE_ROWS = 16;

// Whether the operating system lets this process use the registers; a process has to ask once.
inline bool has_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool is_granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return is_granted;
}

// Makes this thread's eight registers tiles of 16 rows of 64 bytes.
inline void begin_tiles() {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static const Config config;
  _tile_loadconfig(&config);
}

inline void end_tiles() { _tile_release(); }

// out [16, LANES] = rows x [16, wide] times a block of weights; `wide` is a multiple of 32.
inline void tile_products(const bfloat16* weights, const bfloat16* x, int wide, float* out) {
  static_assert(LANES == 32, "two tiles of 16 columns");
  _tile_zero(0);
  _tile_zero(1);
  for (int i = 0; i < wide; i += 32, weights += 32 * LANES) {
    for (int line = 0; line < 32; ++line) fetch(weights + 32 * line, 8192);
    _tile_loadd(2, x + i, wide * 2);
    _tile_loadd(3, weights, LANES * 4);
    _tile_dpbf16ps(0, 2, 3);
    _tile_loadd(4, weights + LANES, LANES * 4);
    _tile_dpbf16ps(1, 2, 4);
  }
  _tile_stored(0, out, LANES * 4);
  _tile_stored(1, out + 16, LANES * 4);
}

#else

constexpr int TILE_ROWS = 0;

inline bool has_tiles() { return false; }
inline void begin_tiles() {}
inline void end_tiles() {}
inline void tile_products(const bfloat16*, const bfloat16*, int, float*) {}

#endif

}  // namespace specray
