// Layers that keep a state for each request: short convolutions and the gated delta rule. specray/ops/states.py says what
// they compute. A row's arithmetic depends on neither the other rows nor on how rows are shared.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "matrix.h"
#include "simd.h"
#include "team.h"

namespace specray {

// See StateRows in specray/ops/states.py.
struct StateRows {
  int64_t count, total;         // requests R and their rows T
  const int64_t *slots, *lens;  // [R]
  const int64_t *num_known, *is_fresh;
  const int64_t* parents;  // [T]
  const int64_t* copies;   // [T]

  // The first row of each request, and T behind them.
  std::vector<int64_t> firsts() const {
    std::vector<int64_t> firsts(count + 1);
    for (int64_t r = 0; r < count; ++r) firsts[r + 1] = firsts[r] + lens[r];
    return firsts;
  }
};

// x * sigmoid(x), in place.
inline void silu(float* x, int size) {
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) {
    const Floats v = load<Floats>(x + i);
    store(x + i, v / (1.0f + exp_of(-v)));
  }
  for (; i < size; ++i) x[i] /= 1.0f + exp_of(-x[i]);
}

struct Convolution {
  int32_t size, width;  // channels, and inputs that a result depends on
  int32_t has_silu, type;
  const float *weights, *bias;  // [width, size], oldest input first; [size], or null
  void* pool;                   // [slots, width - 1, size]
};

// y [T, size] from x [T, size].
class ConvolutionStep {
 public:
  static constexpr int NUM_PHASES = 2;

  ConvolutionStep(const Convolution& conv, const StateRows& rows, const void* x, void* y)
      : conv_(conv), rows_(rows), x_(x), y_(y), firsts_(rows.firsts()), request_of_(rows.total) {
    for (int64_t r = 0; r < rows.count; ++r)
      std::fill(request_of_.begin() + firsts_[r], request_of_.begin() + firsts_[r + 1], r);
  }

  void run(Member& member) const {
    const int size = conv_.size, width = conv_.width;
    std::vector<float> inputs(int64_t(width) * size), sums(size);
    member.share(int(rows_.total), [&](int64_t row) {
      read_inputs(request_of_[row], row, width, inputs.data());
      if (conv_.bias)
        std::copy(conv_.bias, conv_.bias + size, sums.begin());
      else
        std::fill(sums.begin(), sums.end(), 0.0f);
      for (int i = 0; i < width; ++i) {
        const float *x = inputs.data() + int64_t(i) * size, *weights = conv_.weights + int64_t(i) * size;
        for (int c = 0; c < size; ++c) sums[c] += x[c] * weights[c];
      }
      if (conv_.has_silu) silu(sums.data(), size);
      write_values(sums.data(), size, y_, conv_.type, row * size);
    });
    member.share(int(rows_.count), [&](int64_t r) {
      const int64_t values = int64_t(width - 1) * size, end = firsts_[r] + rows_.num_known[r];
      const auto keep = [&](int64_t row, int64_t slot) {
        read_inputs(r, row, width - 1, inputs.data());
        write_values(inputs.data(), int(values), conv_.pool, conv_.type, slot * values);
      };
      for (int64_t row = firsts_[r]; row < end; ++row)
        if (rows_.copies[row] >= 0) keep(row, rows_.copies[row]);
      if (rows_.num_known[r]) keep(end - 1, rows_.slots[r]);  // last, because the others read it
    });
  }

 private:
  // The last `count` inputs on the path to a row, its own included, oldest first.
  void read_inputs(int64_t request, int64_t row, int count, float* to) const {
    const int size = conv_.size, before = conv_.width - 1;
    int64_t at = row;  // below 0: so many inputs before the request's first row of this step
    for (int i = count - 1; i >= 0; --i, at = at < 0 ? at - 1 : rows_.parents[at]) {
      float* input = to + int64_t(i) * size;
      if (at >= 0)
        read_row(x_, conv_.type, at * size, size, input);
      else if (rows_.is_fresh[request])
        std::fill(input, input + size, 0.0f);
      else
        read_row(conv_.pool, conv_.type, (rows_.slots[request] * before + before + at) * size, size, input);
    }
  }

  const Convolution conv_;
  const StateRows rows_;
  const void* x_;
  void* y_;
  const std::vector<int64_t> firsts_;
  std::vector<int64_t> request_of_;
};

struct DeltaNet {
  int32_t num_k_heads, num_v_heads, k_dim, v_dim, type;
  float beta_scale, eps;
  const float *rates, *dt_bias;  // [num_v_heads]
  const float* norm;             // [v_dim]
  float* pool;                   // [slots, num_v_heads, k_dim, v_dim]
};

// COUNT vectors of columns of one step of the delta rule: S' = decay * S + k ((v - decay * k S) * beta), out = q S'.
template <class V, int COUNT>
[[gnu::always_inline]] inline void delta_columns(
    const float* from, float* to, int k_dim, int v_dim, const float* q, const float* k, const float* v, float decay,
    float beta, float* out) {
  constexpr int STEP = sizeof(V) / sizeof(float);
  V seen[COUNT]{}, change[COUNT], result[COUNT]{};
  for (int i = 0; i < k_dim; ++i)
    for (int c = 0; c < COUNT; ++c) seen[c] += load<V>(from + int64_t(i) * v_dim + c * STEP) * k[i];
  for (int c = 0; c < COUNT; ++c) change[c] = (load<V>(v + c * STEP) - seen[c] * decay) * beta;
  for (int i = 0; i < k_dim; ++i)
    for (int c = 0; c < COUNT; ++c) {
      const V next = load<V>(from + int64_t(i) * v_dim + c * STEP) * decay + change[c] * k[i];
      store(to + int64_t(i) * v_dim + c * STEP, next);
      result[c] += next * q[i];
    }
  for (int c = 0; c < COUNT; ++c) store(out + c * STEP, result[c]);
}

// Not inlined, so that every caller rounds alike.
[[gnu::noinline]] inline void delta_step(
    const float* from, float* to, int k_dim, int v_dim, const float* q, const float* k, const float* v, float decay,
    float beta, float* out) {
  int j = 0;
  for (; j + 4 * WIDTH <= v_dim; j += 4 * WIDTH)
    delta_columns<Floats, 4>(from + j, to + j, k_dim, v_dim, q, k, v + j, decay, beta, out + j);
  for (; j + WIDTH <= v_dim; j += WIDTH)
    delta_columns<Floats, 1>(from + j, to + j, k_dim, v_dim, q, k, v + j, decay, beta, out + j);
  for (; j < v_dim; ++j)
    delta_columns<float, 1>(from + j, to + j, k_dim, v_dim, q, k, v + j, decay, beta, out + j);
}

// out [T, num_v_heads * v_dim], gated and normed, from the rows' queries, keys and values qkv [T, channels], their
// a and b [T, num_v_heads], and their gates z of the shape of `out`.
class DeltaStep {
 public:
  static constexpr int NUM_PHASES = 2;

  DeltaStep(
      const DeltaNet& net, const StateRows& rows, const void* qkv, const void* a, const void* b, const void* z, void* out)
      : net_(net), rows_(rows), qkv_(qkv), a_(a), b_(b), z_(z), out_(out), firsts_(rows.firsts()),
        channels_(2 * net.num_k_heads * net.k_dim + net.num_v_heads * net.v_dim), vectors_(rows.total * channels_),
        decay_(rows.total * net.num_v_heads), beta_(rows.total * net.num_v_heads) {
    for (int64_t r = 0; r < rows.count; ++r) most_drafts_ = std::max(most_drafts_, rows.lens[r] - rows.num_known[r]);
  }

  void run(Member& member) {
    std::vector<float> numbers(2 * net_.num_v_heads);
    member.share(int(rows_.total), [&](int64_t row) { prepare(row, numbers.data()); });
    const int64_t size = int64_t(net_.k_dim) * net_.v_dim;
    std::vector<float> drafts(most_drafts_ * size), seen(2 * net_.v_dim);
    const std::vector<float> zeros(size);
    member.share(int(rows_.count) * net_.num_v_heads, [&](int64_t item) {
      run_head(item / net_.num_v_heads, int(item % net_.num_v_heads), zeros.data(), drafts.data(), seen.data());
    });
  }

 private:
  // Norms a row's queries and keys, and computes its decays and rates of change.
  void prepare(int64_t row, float* numbers) {
    float* vectors = vectors_.data() + row * channels_;
    read_row(qkv_, net_.type, row * channels_, int(channels_), vectors);
    const float scale = 1.0f / std::sqrt(float(net_.k_dim));
    for (int head = 0; head < 2 * net_.num_k_heads; ++head) {
      float* x = vectors + int64_t(head) * net_.k_dim;
      const float factor = 1.0f / std::sqrt(dot(x, x, net_.k_dim) + 1e-6f) * (head < net_.num_k_heads ? scale : 1.0f);
      for (int i = 0; i < net_.k_dim; ++i) x[i] *= factor;
    }
    const int heads = net_.num_v_heads;
    float *a = numbers, *b = numbers + heads;
    read_row(a_, net_.type, row * heads, heads, a);
    read_row(b_, net_.type, row * heads, heads, b);
    for (int head = 0; head < heads; ++head) {
      const float x = a[head] + net_.dt_bias[head];
      const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
      decay_[row * heads + head] = std::exp(net_.rates[head] * softplus);
      beta_[row * heads + head] = net_.beta_scale / (1.0f + std::exp(-b[head]));
    }
  }

  // One head of one request, row after row. `drafts` receives the states behind the drafts.
  void run_head(int64_t request, int head, const float* zeros, float* drafts, float* seen) {
    const int k_dim = net_.k_dim, v_dim = net_.v_dim, heads = net_.num_v_heads;
    const int64_t size = int64_t(k_dim) * v_dim, first = firsts_[request], known = rows_.num_known[request];
    float* state = net_.pool + (rows_.slots[request] * heads + head) * size;
    const float* start = rows_.is_fresh[request] ? zeros : state;
    const int64_t key_head = head / (heads / net_.num_k_heads);
    for (int64_t i = 0; i < rows_.lens[request]; ++i) {
      const int64_t row = first + i, parent = rows_.parents[row] < 0 ? -1 : rows_.parents[row] - first;
      const float* from = parent < 0 ? start : parent < known ? state : drafts + (parent - known) * size;
      float* to = i < known ? state : drafts + (i - known) * size;
      const float *q = vectors_.data() + row * channels_ + key_head * k_dim, *k = q + net_.num_k_heads * k_dim;
      const float* v = vectors_.data() + row * channels_ + 2 * net_.num_k_heads * k_dim + head * v_dim;
      const int64_t place = row * heads + head;
      delta_step(from, to, k_dim, v_dim, q, k, v, decay_[place], beta_[place], seen);
      if (i < known && rows_.copies[row] >= 0)
        std::copy(state, state + size, net_.pool + (rows_.copies[row] * heads + head) * size);
      finish(seen, seen + v_dim, place * v_dim);
    }
  }

  // Norms a head's result, multiplies it with its gate and writes it.
  void finish(float* x, float* gate, int64_t place) {
    const int size = net_.v_dim;
    read_row(z_, net_.type, place, size, gate);
    silu(gate, size);
    const float factor = 1.0f / std::sqrt(dot(x, x, size) / float(size) + net_.eps);
    for (int i = 0; i < size; ++i) x[i] = x[i] * factor * net_.norm[i] * gate[i];
    write_values(x, size, out_, net_.type, place);
  }

  const DeltaNet net_;
  const StateRows rows_;
  const void *qkv_, *a_, *b_, *z_;
  void* out_;
  const std::vector<int64_t> firsts_;
  const int64_t channels_;
  int64_t most_drafts_ = 0;
  std::vector<float> vectors_, decay_, beta_;
};

}  // namespace specray
