// Vectors of floats and the integer and bfloat16 dot products of this CPU, behind one set of names.
//
// A kernel works on blocks of LANES output channels, held in N native vectors. Each lane is one sum, added up in the
// order of the loop, so results depend on neither the vector width nor the number of rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define SPECRAY_AVX512 1
#elif defined(__AVX2__)
#define SPECRAY_WORDS 1
#endif

namespace specray {

#if defined(SPECRAY_AVX512)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
#if defined(SPECRAY_AVX512)
constexpr int LANES = 32;  // two vectors, so that an activation is loaded once for both
#else
constexpr int LANES = 16;
#endif
constexpr int N = LANES / WIDTH;

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(4 * WIDTH)));

#if defined(SPECRAY_WORDS)
constexpr bool MULTIPLIES_WORDS = true;
#else
constexpr bool MULTIPLIES_WORDS = false;
#endif

constexpr int LINE = 64;  // bytes of a cache line

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};
struct scaled_int8 {  // a number of 8 bits, to be multiplied with a scale
  int8_t value;
};

// A float of 8 bits with so many of them behind its exponent, as in torch: e4m3 has one NaN and no infinity.
template <int MANTISSA>
struct float8 {
  static constexpr int BIAS = MANTISSA == 3 ? 7 : 15;
  static constexpr uint8_t LARGEST = MANTISSA == 3 ? 0x7E : 0x7B;  // bits of the largest number
  uint8_t bits;
};
using float8_e4m3 = float8<3>;
using float8_e5m2 = float8<2>;

template <class V, class T>
inline V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <class T, class V>
inline void store(T* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

// The same bits as another type.
template <class To, class From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Where prefetched data goes: into the larger caches. With prefetches into the nearest one only, a Xeon with AMX reads half
// as fast (38 instead of 89 tokens/s of one request in bfloat16), and a step of a Zen 4 takes longer: 18 % with int8
// weights, 4 % in bfloat16, and 10 % with 9 rows of it.
constexpr int TO_READ = 0, LARGER_CACHES = 2;

// Brings weights closer while others are read, so that arithmetic and memory work at the same time.
class Fetch {
 public:
  // What is read soon after `weights`.
  static Fetch ahead(const void* weights) { return Fetch(static_cast<const char*>(weights) + AHEAD, LINE); }

  // One of several reads of a block of weights: from `share` on, `step` bytes for each cache line read.
  static Fetch of_share(const void* share, int step) { return Fetch(static_cast<const char*>(share), step); }

  // To be called when `bytes` more of the weights are read.
  void advance(int bytes) {
    for (; bytes > 0; bytes -= LINE) {
      __builtin_prefetch(next_, TO_READ, LARGER_CACHES);
      next_ += step_ * (bytes < LINE ? bytes : LINE) / LINE;
    }
  }

 private:
#if defined(__AMX_TILE__)
  static constexpr int AHEAD = 8192;
#else
  static constexpr int AHEAD = 6144;  // on a Zen 4 a step takes 1 to 2 % longer with 5 or 7 KB
#endif

  Fetch(const char* next, int step) : next_(next), step_(step) {}

  const char* next_;
  int step_;
};

inline Floats splat(float value) { return Floats{} + value; }
inline Ints splat(int32_t value) { return Ints{} + value; }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Ints to_ints(Floats v) { return __builtin_convertvector(v, Ints); }

// The larger lanes; NaN where one is NaN.
inline Floats largest(Floats a, Floats b) { return a > b || a != a ? a : b; }

// The sum of a vector's lanes, as a tree: the same order for every caller.
inline float sum(Floats v) {
#if defined(SPECRAY_AVX512)
  return _mm512_reduce_add_ps(__m512(v));
#endif
  float lanes[WIDTH];
  store(lanes, v);
  for (int half = WIDTH / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline int32_t sum(Ints v) {
#if defined(SPECRAY_AVX512)
  return _mm512_reduce_add_epi32(__m512i(v));
#endif
  int32_t total = 0;
  for (int i = 0; i < WIDTH; ++i) total += v[i];
  return total;
}

inline float dot(const float* a, const float* b, int size) {
  Floats products{};
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) products += load<Floats>(a + i) * load<Floats>(b + i);
  float total = sum(products);
  for (; i < size; ++i) total += a[i] * b[i];
  return total;
}

// The sums of WIDTH vectors, four at a time: vectors i, i + WIDTH / 4, … give what `sums_of_quarters` takes at i. Each is
// added up in the same order.
[[gnu::always_inline]] inline Floats quarter_sums(const Floats* v) {
#if defined(SPECRAY_AVX512)
  __m512 halves[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = __m512(v[i]), b = __m512(v[i + 2]);
    halves[i] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xEE);
  }
  return Floats(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88) + _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
#elif defined(__AVX2__)
  __m256 halves[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 a = __m256(v[2 * i]), b = __m256(v[2 * i + 1]);
    halves[i] = _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
  }
  return Floats(_mm256_unpacklo_ps(halves[0], halves[1]) + _mm256_unpackhi_ps(halves[0], halves[1]));
#else
  Floats sums{};
  for (int i = 0; i < 4; ++i) sums[i] = sum(v[i]);
  return sums;
#endif
}

[[gnu::always_inline]] inline Floats sums_of_quarters(const Floats* quarters) {
#if defined(SPECRAY_AVX512)
  __m512 pairs[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = __m512(quarters[i]), b = __m512(quarters[i + 2]);
    pairs[i] = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  }
  const __m512d a = _mm512_castps_pd(pairs[0]), b = _mm512_castps_pd(pairs[1]);
  const __m512 sums = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return Floats(_mm512_permutexvar_ps(order, sums));
#elif defined(__AVX2__)
  const __m256d a = _mm256_castps_pd(__m256(quarters[0])), b = _mm256_castps_pd(__m256(quarters[1]));
  const __m256 sums = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)) + _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
  return Floats(_mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)));
#else
  Floats sums{};
  for (int i = 0; i < WIDTH; ++i) sums[i] = quarters[i % (WIDTH / 4)][i / (WIDTH / 4)];
  return sums;
#endif
}

// The largest lane; NaN if one is NaN.
inline float largest_of(Floats v) {
#if defined(SPECRAY_AVX512)
  return _mm512_cmp_ps_mask(__m512(v), __m512(v), _CMP_UNORD_Q) ? NAN : _mm512_reduce_max_ps(__m512(v));
#endif
  float lanes[WIDTH];
  store(lanes, v);
  for (int half = WIDTH / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      lanes[i] = lanes[i] > lanes[i + half] || lanes[i] != lanes[i] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// ---- conversions -------------------------------------------------------------------------------------------------

inline float to_float(float value) { return value; }

inline float to_float(scaled_int8 value) { return value.value; }

inline float to_float(bfloat16 value) {
  return bits_of<float>(uint32_t(value.bits) << 16);
}

inline float to_float(float16 value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  uint32_t sign = uint32_t(value.bits & 0x8000) << 16, exponent = (value.bits >> 10) & 31, mantissa = value.bits & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7F800000 | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    bits = sign | bits_of<uint32_t>(float(mantissa) * 0x1p-24f);
  }
  return bits_of<float>(bits);
#endif
}

inline void from_float(float value, float* to) { *to = value; }

// Round to nearest, ties to even, as torch does; a NaN stays one.
inline void from_float(float value, bfloat16* to) {
  const uint32_t bits = bits_of<uint32_t>(value);
  to->bits = value != value ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float value, float16* to) {
#if defined(__F16C__)
  to->bits = uint16_t(_cvtss_sh(value, 0));
#else
  to->bits = bits_of<uint16_t>(_Float16(value));
#endif
}

// Round to nearest, ties to even; what is larger than the largest number becomes that one, and a NaN stays one.
template <int MANTISSA>
inline void from_float(float value, float8<MANTISSA>* to) {
  using T = float8<MANTISSA>;
  constexpr int SHIFT = 23 - MANTISSA, EXPONENTS = 127 - T::BIAS;
  constexpr uint32_t NORMAL = uint32_t(EXPONENTS + 1) << 23;  // bits of the smallest normal number
  constexpr uint32_t STEPS = uint32_t(EXPONENTS + 24 - MANTISSA) << 23;  // bits of 2^n whose steps are the smallest number
  constexpr uint32_t MOST = (uint32_t(T::LARGEST) << SHIFT) + (uint32_t(EXPONENTS) << 23);
  const uint32_t bits = bits_of<uint32_t>(value), size = std::min(bits & 0x7FFFFFFF, MOST);
  const uint32_t rounded = ((size + (1u << (SHIFT - 1)) - 1 + ((size >> SHIFT) & 1)) >> SHIFT) - (EXPONENTS << MANTISSA);
  const uint32_t small = bits_of<uint32_t>(bits_of<float>(size) + bits_of<float>(STEPS)) - STEPS;
  to->bits = uint8_t(value != value ? 0x7F : (size < NORMAL ? small : rounded) | (bits >> 24 & 0x80));
}

inline Floats load_floats(const float* from) { return load<Floats>(from); }

inline Floats load_floats(const bfloat16* from) {
#if defined(SPECRAY_AVX512)
  return Floats(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16)));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
  return bits_of<Floats>(__builtin_convertvector(load<Halves>(from), Words) << 16);
#endif
}

inline Floats load_floats(const float16* from) {
#if defined(SPECRAY_AVX512)
  return Floats(_mm512_cvtph_ps(load<__m256i>(from)));
#elif defined(__F16C__)
  return Floats(_mm256_cvtph_ps(load<__m128i>(from)));
#else
  Floats v;
  for (int i = 0; i < WIDTH; ++i) v[i] = to_float(from[i]);
  return v;
#endif
}

inline Floats load_floats(const scaled_int8* from) {
#if defined(SPECRAY_AVX512)
  return Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from))));
#else
  typedef int8_t Small __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(__builtin_convertvector(load<Small>(from), Ints), Floats);
#endif
}

// Bytes as wider numbers. GCC 12 takes them apart if it converts vectors itself.
inline Ints load_ints(const uint8_t* from) {
#if defined(SPECRAY_AVX512)
  return Ints(_mm512_cvtepu8_epi32(load<__m128i>(from)));
#elif defined(SPECRAY_WORDS)
  return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  typedef uint8_t Small __attribute__((vector_size(WIDTH)));
  return __builtin_convertvector(load<Small>(from), Ints);
#endif
}

template <class Byte>
inline Halves load_halves(const Byte* from) {
  constexpr bool IS_SIGNED = std::is_signed_v<Byte>;
#if defined(SPECRAY_AVX512)
  const __m256i bytes = load<__m256i>(from);
  return Halves(IS_SIGNED ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#elif defined(SPECRAY_WORDS)
  const __m128i bytes = load<__m128i>(from);
  return Halves(IS_SIGNED ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes));
#else
  typedef Byte Small __attribute__((vector_size(2 * WIDTH)));
  return __builtin_convertvector(load<Small>(from), Halves);
#endif
}

template <int MANTISSA>
inline Floats load_floats(const float8<MANTISSA>* from) {
  using T = float8<MANTISSA>;
  const Words bits = Words(load_ints(reinterpret_cast<const uint8_t*>(from))), size = bits & 0x7F;
  const Words normal = (size << (23 - MANTISSA)) + (uint32_t(127 - T::BIAS) << 23);
  const Floats small = to_floats(Ints(size)) * bits_of<float>(uint32_t(128 - T::BIAS - MANTISSA) << 23);
  Words value = size < (1u << MANTISSA) ? bits_of<Words>(small) : normal;
  value = size > T::LARGEST ? 0x7FC00000 : value;
  return bits_of<Floats>(value | (bits & 0x80) << 24);
}

template <int MANTISSA>
inline float to_float(float8<MANTISSA> value) {
  float8<MANTISSA> row[WIDTH] = {value};
  return load_floats(row)[0];
}

// ---- dot products of integers ------------------------------------------------------------------------------------

// Sums of products of one row with a group: `add` adds, in every lane, four products of weights u8 and activations i8.
// `start` is what the sums start from.
//
// SMALL weights are at most 15, so without VNNI 16 products fit into 16 bits and are widened once a group. AVX2 has no
// such way for larger ones: it multiplies them with activations of 16 bits (SPECRAY_WORDS).
#if defined(SPECRAY_AVX512)
typedef __m512i Bytes;

template <bool SMALL>
struct Dot {
  __m512i sums[N];
  inline void begin(int32_t start) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sums[n] = _mm512_set1_epi32(start);
  }
  inline void add(const Bytes* weights, int32_t four) {
    const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sums[n] = _mm512_dpbusd_epi32(sums[n], weights[n], x);
  }
  inline Ints result(int n) const { return Ints(sums[n]); }
};
#elif defined(SPECRAY_WORDS)
// Sums of products, in assembly: otherwise GCC 12 keeps sums in memory, or all products before it adds them up. Four rows
// took 19 % longer then with weights of 8 bits, and 26 % longer with 4 (Zen 3).

// Adds, in every lane of 16 bits, two products of a u8 and an i8.
inline void add_bytes(__m256i& sums, __m256i weights, __m256i x) {
  __m256i products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(weights), "x"(x));
}

typedef __m256i Bytes;

template <bool SMALL>
struct Dot {
  static_assert(SMALL);
  __m256i sums[N];
  int32_t start;
  inline void begin(int32_t value) {
    start = value;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_si256();
  }
  inline void add(const Bytes* weights, int32_t four) {
    const __m256i x = _mm256_set1_epi32(four);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) add_bytes(sums[n], weights[n], x);
  }
  inline Ints result(int n) const { return Ints(_mm256_madd_epi16(sums[n], _mm256_set1_epi16(1))) + start; }
};
#else
struct Bytes {
  uint8_t bytes[4 * WIDTH];
};

template <bool SMALL>
struct Dot {
  Ints sums[N];
  inline void begin(int32_t start) {
    for (Ints& part : sums) part = splat(start);
  }
  inline void add(const Bytes* weights, int32_t four) {
    int8_t x[4];
    std::memcpy(x, &four, 4);
    for (int n = 0; n < N; ++n)
      for (int lane = 0; lane < WIDTH; ++lane)
        for (int i = 0; i < 4; ++i) sums[n][lane] += int32_t(weights[n].bytes[4 * lane + i]) * x[i];
  }
  inline Ints result(int n) const { return sums[n]; }
};
#endif

// Adds, in every lane of 32 bits, two products of numbers of 16 bits. Those of `a` are not negative.
inline void add_words(Ints& sums, Ints a, Ints b) {
#if defined(SPECRAY_AVX512)
  sums = Ints(_mm512_dpwssd_epi32(__m512i(sums), __m512i(a), __m512i(b)));
#elif defined(SPECRAY_WORDS)
  Ints products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(a), "x"(b));
#else
  sums += (a & 0xFFFF) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// ---- functions ---------------------------------------------------------------------------------------------------

// exp(x) to about 2 units in the last place; 0 below -87, and exp(88) above 88. NaN stays NaN.
[[gnu::always_inline]] inline Floats exp_of(Floats x) {
  const Floats low = splat(-87.0f);
  const Ints is_low = x < low;
  const Floats high = splat(88.0f);
  x = x < low ? low : x > high ? high : x;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats rounded = x * 1.44269504f + magic;
  const Floats n = rounded - magic;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints scale = (to_ints(n) + 127) << 23;
  const Floats result = p * bits_of<Floats>(scale);
  return is_low ? Floats{} : result;
}

inline float exp_of(float x) { return exp_of(splat(x))[0]; }

// tanh(x) to about 2 units in the last place. NaN stays NaN.
inline Floats tanh_of(Floats x) {
  const Floats size = x < Floats{} ? -x : x, squared = x * x;
  // Near 0 the quotient of exponentials has few digits; this polynomial is that of Cephes' tanhf.
  Floats p = splat(-5.70498872745e-3f);
  p = p * squared + 2.06390887954e-2f;
  p = p * squared - 5.37397155531e-2f;
  p = p * squared + 1.33314422036e-1f;
  p = p * squared - 3.33332819422e-1f;
  const Floats small = p * squared * x + x;
  const Floats e = exp_of(size * -2.0f), large = (1.0f - e) / (1.0f + e);
  return size < 0.625f ? small : x < Floats{} ? -large : large;
}

// Scores that saturate towards -cap and cap. One function for all kernels, so that no two of them round in other ways.
[[gnu::noinline]] inline Floats capped(Floats scores, float cap) { return tanh_of(scores / cap) * cap; }

// log(x) of positive normal numbers, to about 2 units in the last place.
inline Floats log_of(Floats x) {
  const Words bits = bits_of<Words>(x) - 0x3F3504F3u;  // the mantissa of sqrt(1/2), so that m is around 1
  const Floats exponent = to_floats(Ints(bits) >> 23);
  const Floats m = bits_of<Floats>((bits & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f, squared = m * m;
  Floats p = splat(7.0376836292e-2f);
  p = p * m + -1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m + -1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m + -1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m + -2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Floats rest = p * m * squared + exponent * -2.12194440e-4f - squared * 0.5f;
  return (m + rest) + exponent * 0.693359375f;
}

}  // namespace specray
