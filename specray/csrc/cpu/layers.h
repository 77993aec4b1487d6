// A stack of decoder layers in one call: pre-norm attention and a gated feed-forward, each added to the residual stream.
//
// All members of the team run the same phases, with a barrier between them. Rows or channels are divided among them; no
// sum is. The residual stream is float32 whatever the type of the weights.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "matrix.h"

namespace specray {

struct Layer {
  const float* input_norm;  // [hidden]; null: the first input is used as it is
  const float* q_norm;      // [dim], or null
  const float* k_norm;
  const float* ffn_norm;
  Matrix qkv, out, gate_up, down;  // blocks of gate_up alternate between gate and up
};

struct Sizes {
  int32_t hidden, ffn, num_heads, num_kv_heads, dim;
  float eps;
};

struct Step {
  int64_t count;             // rows T
  const int64_t* positions;  // [T]
  const int64_t* written;    // [T]: KV slots of the rows
  const float* cos;          // [positions, dim]
  const float* sin;          // the same, signed for the half-split form
  Requests requests;
  Pool pool;            // of the first layer
  int64_t layer_bytes;  // from one layer's pool to the next
};

inline void norm(const float* x, const float* weight, int size, float eps, float* y) {
  Floats squares{};
  int i = 0;
  for (; i + WIDTH <= size; i += WIDTH) squares += load<Floats>(x + i) * load<Floats>(x + i);
  float total = sum(squares);
  for (; i < size; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / float(size) + eps);
  for (i = 0; i < size; ++i) y[i] = x[i] * factor * weight[i];
}

// Rotates one head in place; pairs are (x[i], x[i + dim / 2]).
inline void rotate(float* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] + b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// Buffers of activations for matrices of different kinds, kept from layer to layer.
class Prepared {
 public:
  explicit Prepared(int count) : count_(count) {}

  Rows& rows(const Matrix& matrix) {
    const Form form = form_of(matrix.kind);
    auto& rows = known_[{form, matrix.ins}];
    if (!rows) rows = std::make_unique<Rows>(form, count_, matrix.ins);
    return *rows;
  }

 private:
  int count_;
  std::map<std::pair<Form, int>, std::unique_ptr<Rows>> known_;
};

// Runs `layers` on the residual stream `hidden` [T, hidden], in place. `first_input` [T, qkv.ins] is what the first layer
// reads if it has no input norm. taps[i], where not null, receives the stream that enters layer i; taps[num_layers] the
// one that leaves the last.
inline void run_layers(
    const Layer* layers, int num_layers, const Sizes& sizes, const Step& step, const float* first_input, float* hidden,
    float* const* taps, int num_threads) {
  const int count = int(step.count), size = sizes.hidden, dim = sizes.dim;
  const int q_width = sizes.num_heads * dim, kv_width = sizes.num_kv_heads * dim, width = q_width + 2 * kv_width;
  std::vector<float> qkv(int64_t(count) * width), seen(int64_t(count) * q_width), inner(int64_t(count) * sizes.ffn);
  std::vector<std::atomic<int>> next(num_layers);
  for (auto& counter : next) counter = 0;
  Prepared to_qkv(count), to_out(count), to_up(count), to_down(count);
  struct Inputs {
    Rows &qkv, &out, &up, &down;
  };
  std::vector<Inputs> inputs;
  for (int i = 0; i < num_layers; ++i) {
    const Layer& layer = layers[i];
    inputs.push_back(
        {to_qkv.rows(layer.qkv), to_out.rows(layer.out), to_up.rows(layer.gate_up), to_down.rows(layer.down)});
  }
  run_on_team(num_threads, [&](Team& team, int member) {
    std::vector<float> row(size);
    for (int i = 0; i < num_layers; ++i) {
      const Layer& layer = layers[i];
      Pool pool = step.pool;
      pool.data = static_cast<char*>(step.pool.data) + i * step.layer_bytes;
      const auto my_rows = [&](auto work) {
        for (int r = member; r < count; r += team.size()) work(r);
        team.barrier();
      };
      my_rows([&](int r) {
        float* x = hidden + int64_t(r) * size;
        if (taps && taps[i]) std::copy(x, x + size, taps[i] + int64_t(r) * size);
        if (layer.input_norm) {
          norm(x, layer.input_norm, size, sizes.eps, row.data());
          inputs[i].qkv.set(r, row.data());
        } else {
          inputs[i].qkv.set(r, first_input + int64_t(r) * layer.qkv.ins);
        }
      });
      multiply(layer.qkv, inputs[i].qkv, count, team, member, [&](int r, int channel, const float* values) {
        const int columns = std::min(LANES, width - channel);
        std::copy(values, values + columns, qkv.data() + int64_t(r) * width + channel);
      });
      team.barrier();
      my_rows([&](int r) {
        float* q = qkv.data() + int64_t(r) * width;
        const float *cos = step.cos + step.positions[r] * dim, *sin = step.sin + step.positions[r] * dim;
        for (int head = 0; head < sizes.num_heads + sizes.num_kv_heads; ++head) {
          const float* weight = head < sizes.num_heads ? layer.q_norm : layer.k_norm;
          if (weight) norm(q + head * dim, weight, dim, sizes.eps, q + head * dim);
          rotate(q + head * dim, cos, sin, dim);
        }
        write_kv(pool, step.written[r], q + q_width, q + q_width + kv_width);
      });
      attend_any(pool, step.requests, sizes.num_heads, qkv.data(), width, seen.data(), next[i]);
      team.barrier();
      my_rows([&](int r) { inputs[i].out.set(r, seen.data() + int64_t(r) * q_width); });
      const auto add_to_hidden = [&](int r, int channel, const float* values) {
        float* to = hidden + int64_t(r) * size + channel;
        for (int c = 0; c < std::min(LANES, size - channel); ++c) to[c] += values[c];
      };
      multiply(layer.out, inputs[i].out, count, team, member, add_to_hidden);
      team.barrier();
      my_rows([&](int r) {
        norm(hidden + int64_t(r) * size, layer.ffn_norm, size, sizes.eps, row.data());
        inputs[i].up.set(r, row.data());
      });
      multiply_gated(layer.gate_up, inputs[i].up, count, team, member, [&](int r, int channel, const float* values) {
        const int columns = std::min(LANES, sizes.ffn - channel);
        std::copy(values, values + columns, inner.data() + int64_t(r) * sizes.ffn + channel);
      });
      team.barrier();
      my_rows([&](int r) { inputs[i].down.set(r, inner.data() + int64_t(r) * sizes.ffn); });
      multiply(layer.down, inputs[i].down, count, team, member, add_to_hidden);
      team.barrier();
    }
  });
  if (taps && taps[num_layers]) std::copy(hidden, hidden + int64_t(count) * size, taps[num_layers]);
}

}  // namespace specray
