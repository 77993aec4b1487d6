// Products of bfloat16 on the tile registers of Intel's AMX, up to 32 rows at a time.
//
// A sum takes the inputs in order, two at a time, in every row and column alike. Denormal numbers count as zero.
//
// Integers stay on VNNI. With tiles, a group of 32 inputs took 36 ns for 6 rows and 57 for 16, against 25 and 66: every
// group has its own scales, so its sums leave the tiles again.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(SPECRAY_AVX512)
#define SPECRAY_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specray {

// Cache lines of weights that are prefetched while 32 rows of others are multiplied, a quarter of them at a time. They go
// between loads of registers: a load waits for prefetches before it. Fetch asks for a line once for each line read, so
// several tiles would ask for the same ones again: 256 rows took 6 to 14 % longer with it.
struct LinesAhead {
  const bfloat16* next;
  int count;

  void fetch(int quarter) const {
    for (int line = count * quarter / 4; line < count * (quarter + 1) / 4; ++line)
      __builtin_prefetch(next + line * (LINE / int(sizeof(bfloat16))), TO_READ, LARGER_CACHES);
  }
  void advance() { next += count * (LINE / int(sizeof(bfloat16))); }
};

#if defined(SPECRAY_TILES)

constexpr int TILE_ROWS = 32;  // of two registers

// Whether the operating system lets this process use the registers; a process has to ask once.
inline bool has_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool is_granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return is_granted;
}

// Rows of one register where `count` rows are multiplied together.
inline int rows_of_tile(int count) { return count > 16 ? (count + 1) / 2 : count; }

// The shapes of a thread's registers.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void load() const {
    asm volatile("" : : "r"(this) : "memory");  // GCC 12 believes that only the first 8 bytes are read
    _tile_loadconfig(this);
  }
};

// Shapes this thread's registers for products with `count` rows: 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights.
inline void begin_tiles(int count) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = uint8_t(tile < 6 ? rows_of_tile(count) : 16);
  }
  shapes.load();
}

inline void end_tiles() { _tile_release(); }

// out [count, LANES] = x [count, wide] times a block of weights; `wide` is a multiple of 32. The registers have the shape
// for `count` rows. With two registers of rows, x and out have one row more if `count` is odd.
inline void tile_products(
    const bfloat16* weights, const bfloat16* x, int count, int wide, LinesAhead ahead, float* out) {
  static_assert(LANES == 32, "two tiles of 16 columns");
  const int second = count > 16 ? rows_of_tile(count) : 0;  // the first row of the second register
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < wide; i += 32, weights += 32 * LANES, ahead.advance()) {
    ahead.fetch(0);
    _tile_loadd(4, x + i, wide * 2);
    ahead.fetch(1);
    _tile_loadd(6, weights, LANES * 4);
    ahead.fetch(2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + LANES, LANES * 4);
    ahead.fetch(3);
    _tile_dpbf16ps(1, 4, 7);
    if (second == 0) continue;
    _tile_loadd(5, x + int64_t(second) * wide + i, wide * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, LANES * 4);
  _tile_stored(1, out + 16, LANES * 4);
  if (second == 0) return;
  _tile_stored(2, out + second * LANES, LANES * 4);
  _tile_stored(3, out + second * LANES + 16, LANES * 4);
}

#else

constexpr int TILE_ROWS = 0;

inline bool has_tiles() { return false; }
inline void begin_tiles(int) {}
inline void end_tiles() {}
inline void tile_products(const bfloat16*, const bfloat16*, int, int, LinesAhead, float*) {}

#endif

}  // namespace specray
