// What a step committed.
#pragma once

#include <cstdint>

namespace specray {

// The outcome of R requests; see StepOutput.
struct Outcome {
  const int64_t* rows;  // [R, width]
  int64_t width;

  int64_t num_kept(int64_t r) const { return rows[r * width]; }
  int64_t num_emitted(int64_t r) const { return rows[r * width + 1]; }
  const int64_t* tokens(int64_t r) const { return rows + r * width + 2; }
  const int64_t* nodes(int64_t r) const { return rows + r * width + 1 + width / 2; }
};

}  // namespace specray
