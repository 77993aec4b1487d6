// The most probable tokens of a row of logits.
#pragma once

#include <algorithm>

#include "simd.h"

namespace specray {

// The k largest logits, best first and the lower index first among equals, and their indexes.
inline void largest_logits(const float* logits, int size, int k, float* values, int64_t* indexes) {
  constexpr int CHUNK = 4 * WIDTH;
  int found = 0;
  float worst = -INFINITY;  // of the k best so far
  const auto add = [&](int index) {
    const float value = logits[index];
    if (found == k && !(value > worst)) return;
    int place = found < k ? found++ : k - 1;
    for (; place > 0 && !(values[place - 1] >= value); --place) {
      values[place] = values[place - 1];
      indexes[place] = indexes[place - 1];
    }
    values[place] = value;
    indexes[place] = index;
    if (found == k) worst = values[k - 1];
  };
  int i = 0;
  for (; i + CHUNK <= size; i += CHUNK) {
    Floats most = load<Floats>(logits + i);
    for (int part = WIDTH; part < CHUNK; part += WIDTH) most = largest(most, load<Floats>(logits + i + part));
    if (found == k && sum(most > worst) == 0) continue;
    for (int index = i; index < i + CHUNK; ++index) add(index);
  }
  for (; i < size; ++i) add(i);
}

// See specray_top_probs.
inline void top_probs(const float* logits, int size, int k, float* probs, int64_t* indexes) {
  largest_logits(logits, size, k, probs, indexes);
  const float most = probs[0];
  Floats sums{};
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) sums += exp_of(load<Floats>(logits + i) - most);
  float total = sum(sums);
  for (; i < size; ++i) total += exp_of(logits[i] - most);
  for (int place = 0; place < k; ++place) probs[place] = exp_of(probs[place] - most) / total;
}

}  // namespace specray
