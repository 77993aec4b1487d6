// Gumbel noise as a pure function of a position's key and a token id; see specray/ops/noise.py.
#pragma once

#include "simd.h"

namespace specray {

// Two rounds of a 32-bit integer hash with `key` between them.
inline Words mixed(Words bits, uint32_t key) {
  bits ^= bits >> 16;
  bits *= 0x7FEB352Du;
  bits ^= bits >> 15;
  bits += key;
  bits *= 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

// The key of a request's noise at a position, two words: SplitMix64's finaliser (Steele et al. 2014), twice.
inline void noise_key(int64_t seed, int64_t position, int32_t* key) {
  const auto split = [](uint64_t word) {
    word += 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
  };
  const uint64_t word = split(split(uint64_t(seed)) ^ uint64_t(position));
  key[0] = int32_t(word >> 32);
  key[1] = int32_t(word);
}

// Noise of WIDTH token ids under the two words of a key.
inline Floats gumbel(Words ids, const int32_t* key) {
  const Words hashes = mixed((ids + 1) * 0x9E3779B9u, 0x2545F491u);
  const Words bits = mixed(hashes + uint32_t(key[0]), uint32_t(key[1])) & 0x7FFFFFFFu;
  Floats u = (to_floats(Ints(bits)) + 0.5f) * 0x1p-31f;
  const Floats most = splat(1.0f - 0x1p-24f);
  u = u < most ? u : most;
  const Floats w = 1.0f - u;  // rounded; what rounding lost is added again, so that small u are exact
  const Floats exponential = -(log_of(w) + ((1.0f - w) - u) / w);
  return -log_of(exponential);
}

// logits = logits / temperature + noise. Column c is token ids[c], or c if `ids` is null.
inline void add_noise(float* logits, int size, const int64_t* ids, float temperature, const int32_t* key) {
  for (int first = 0; first < size; first += WIDTH) {
    Words columns{};
    const int count = size - first < WIDTH ? size - first : WIDTH;
    for (int i = 0; i < count; ++i) columns[i] = uint32_t(ids ? ids[first + i] : first + i);
    const Floats noise = gumbel(columns, key);
    if (count == WIDTH) {
      store(logits + first, load<Floats>(logits + first) / temperature + noise);
    } else {
      for (int i = 0; i < count; ++i) logits[first + i] = logits[first + i] / temperature + noise[i];
    }
  }
}

}  // namespace specray
