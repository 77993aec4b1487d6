// A stack of decoder layers: pre-norm attention and a gated feed-forward, each added to the residual stream.
//
// All members of the team go through the same phases. They share rows or channels; no sum is divided among them. The residual stream is float32 whatever the type of the weights.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention.h"
#include "largest.h"
#include "products.h"
#include "screen.h"
#include "verification.h"

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
  const LayerAttention* attention;  // [layers]
  // [requests]: of how many of a request's last rows anybody reads what leaves the last layer; null: of all. The other rows
  // only bring this layer their keys and values.
  const int32_t* read_lens;

  // The rows that are read, where not all are.
  std::vector<int64_t> rows_read() const {
    std::vector<int64_t> rows;
    int64_t end = 0;
    for (int request = 0; request < requests.count; ++request) {
      end += requests.query_lens[request];
      for (int64_t row = end - read_lens[request]; row < end; ++row) rows.push_back(row);
    }
    return rows;
  }
};

// Copies of the residual stream on its way.
struct Capture {
  // [layers + 2], where not null: receives what enters the layer; then what leaves the stack, and its norm, where all rows
  // are read.
  void* const* copies;
  int32_t type;
  int32_t stride;  // elements from one row of a copy to the next

  void copy(int layer, int64_t row, const float* x, int size) const {
    if (copies && copies[layer]) write_values(x, size, copies[layer], type, row * stride);
  }
};

inline void norm(const float* x, const float* weight, int size, float eps, float* y) {
  const float factor = 1.0f / std::sqrt(dot(x, x, size) / float(size) + eps);
  for (int i = 0; i < size; ++i) y[i] = x[i] * factor * weight[i];
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
    const Form form = form_of(matrix);
    auto& rows = known_[{form, matrix.ins}];
    if (!rows) rows = std::make_unique<Rows>(form, count_, matrix.ins);
    return *rows;
  }

 private:
  int count_;
  std::map<std::pair<Form, int>, std::unique_ptr<Rows>> known_;
};

// Layers of one shape with the buffers of `count` rows, which every run uses again.
class Stack {
 public:
  Stack(const Layer* layers, int num_layers, const Sizes& sizes, int count)
      : layers_(layers), num_layers_(num_layers), sizes_(sizes), q_width_(sizes.num_heads * sizes.dim),
        kv_width_(sizes.num_kv_heads * sizes.dim), width_(q_width_ + 2 * kv_width_), qkv_(int64_t(count) * width_),
        seen_(int64_t(count) * q_width_), inner_(BLOCKS_ARE_GROUPS ? 0 : int64_t(count) * sizes.ffn), to_qkv_(count),
        to_out_(count), to_up_(count), to_down_(count) {
    for (int i = 0; i < num_layers; ++i) {
      const Layer& layer = layers[i];
      inputs_.push_back(
          {to_qkv_.rows(layer.qkv), to_out_.rows(layer.out), to_up_.rows(layer.gate_up), to_down_.rows(layer.down)});
    }
  }

  int num_layers() const { return num_layers_; }

  // Phases of a run.
  static int num_phases(int num_layers) { return (BLOCKS_ARE_GROUPS ? 9 : 10) * num_layers + 1; }

  // Runs the layers on the residual stream `hidden` [T, hidden], in place. `first_input`
  // [T, qkv.ins] is what the first layer reads if it has no input norm. Rows that nobody reads stay as they enter the last
  // layer.
  void run(const Step& step, const float* first_input, float* hidden, const Capture& capture, Member& member) {
    const int size = sizes_.hidden, most = most_queries(*step.attention);
    std::vector<float> row(size);
    std::vector<int64_t> chosen;  // rows of the last layer, where not all
    if (step.read_lens) chosen = step.rows_read();
    int count = int(step.count);
    std::optional<Queries> queries;
    for (int i = 0; i < num_layers_; ++i) {
      const int32_t* read_lens = i + 1 == num_layers_ ? step.read_lens : nullptr;
      const bool has_queries = !read_lens || !chosen.empty();
      if (!queries || read_lens) queries.emplace(step.requests, most, read_lens);
      const Layer& layer = layers_[i];
      const Inputs& inputs = inputs_[i];
      const LayerAttention& attention = step.attention[i];
      member.share(count, [&](int r) {
        float* x = hidden + int64_t(r) * size;
        capture.copy(i, r, x, size);
        if (layer.input_norm) {
          norm(x, layer.input_norm, size, sizes_.eps, row.data());
          inputs.qkv.set(r, row.data());
        } else {
          inputs.qkv.set(r, first_input + int64_t(r) * layer.qkv.ins);
        }
      });
      if (has_queries) will_read(layer.out, member);
      multiply_from(
          layer.qkv, has_queries ? 0 : q_width_ / LANES, inputs.qkv, count, member,
          [&](int r, int channel, const float* values) {
            const int columns = std::min(LANES, width_ - channel);
            std::copy(values, values + columns, qkv_.data() + int64_t(r) * width_ + channel);
          });
      member.share(count, [&](int r) { finish_qkv(layer, step, attention.pool, r, has_queries); });
      if (!has_queries) return;
      attend_any(attention, step.requests, *queries, qkv_.data(), width_, seen_.data(), member);
      if (read_lens) count = int(chosen.size());
      const auto place_of = [&](int r) { return read_lens ? chosen[r] : int64_t(r); };
      member.share(count, [&](int r) { inputs.out.set(r, seen_.data() + place_of(r) * q_width_); });
      const auto add_to_hidden = [&](int r, int channel, const float* values) {
        float* to = hidden + place_of(r) * size + channel;
        for (int c = 0; c < std::min(LANES, size - channel); ++c) to[c] += values[c];
      };
      will_read(layer.gate_up, member);
      multiply(layer.out, inputs.out, count, member, add_to_hidden);
      member.share(count, [&](int r) {
        norm(hidden + place_of(r) * size, layer.ffn_norm, size, sizes_.eps, row.data());
        inputs.up.set(r, row.data());
      });
      will_read(layer.down, member);
      multiply_gated(layer.gate_up, inputs.up, count, member, [&](int r, int channel, const float* values) {
        const int columns = std::min(LANES, sizes_.ffn - channel);
        if (BLOCKS_ARE_GROUPS)
          inputs.down.set_part(r, channel, columns, values);
        else
          std::copy(values, values + columns, inner_.data() + int64_t(r) * sizes_.ffn + channel);
      });
      if (!BLOCKS_ARE_GROUPS)
        member.share(count, [&](int r) { inputs.down.set(r, inner_.data() + int64_t(r) * sizes_.ffn); });
      if (i + 1 < num_layers_) will_read(layers_[i + 1].qkv, member);
      multiply(layer.down, inputs.down, count, member, add_to_hidden);
    }
    if (!capture.copies || !capture.copies[num_layers_]) return;
    member.share(count, [&](int r) { capture.copy(num_layers_, r, hidden + int64_t(r) * size, size); });
  }

 private:
  // Whether a block of products is rounded as soon as it is there.
  static constexpr bool BLOCKS_ARE_GROUPS = LANES % GROUP == 0;

  struct Inputs {
    Rows &qkv, &out, &up, &down;
  };

  // Norms and rotates the heads of a row, and writes its keys and values to the pool.
  void finish_qkv(const Layer& layer, const Step& step, const Pool& pool, int r, bool has_queries) {
    const int dim = sizes_.dim;
    float* q = qkv_.data() + int64_t(r) * width_;
    const float *cos = step.cos + step.positions[r] * dim, *sin = step.sin + step.positions[r] * dim;
    for (int head = has_queries ? 0 : sizes_.num_heads; head < sizes_.num_heads + sizes_.num_kv_heads; ++head) {
      const float* weight = head < sizes_.num_heads ? layer.q_norm : layer.k_norm;
      if (weight) norm(q + head * dim, weight, dim, sizes_.eps, q + head * dim);
      rotate(q + head * dim, cos, sin, dim);
    }
    write_kv(pool, step.written[r], q + q_width_, q + q_width_ + kv_width_);
  }

  const Layer* layers_;
  const int num_layers_;
  const Sizes sizes_;
  const int q_width_, kv_width_, width_;
  std::vector<float> qkv_, seen_, inner_;
  Prepared to_qkv_, to_out_, to_up_, to_down_;
  std::vector<Inputs> inputs_;
};

// What a model has around its layers.
struct EmbedAndHead {
  const void* embedding;  // [vocab, hidden]
  int32_t embedding_type;
  int32_t num_columns;  // of the output matrix
  const float* norm;    // [hidden]
  Matrix output;
  Screen screen;  // of the output matrix
};

// Where a forward pass reads and writes. The rows `places` [num_places] of T (null: all) go through the output matrix.
struct Pass {
  const int64_t* ids;     // [T]; below 0, see LargestLogits, any token's row is read
  const int64_t* places;
  int32_t num_places;
  float* hidden;     // [T, hidden]: receives the residual stream that leaves the last layer, where that is read
  float* final;      // [T, hidden]: its norm
  float* logits;     // [num_places, num_columns]; null with `largest`
  int64_t* largest;  // [num_places]: receives the tokens of the largest logits, see LargestLogits; null with `logits`
  const Verification* verification;  // of trees whose nodes are the rows `places`; null: none
};

// A model's forward pass, with its buffers. It keeps what it is made of, but not what that points to.
class ForwardPass {
 public:
  ForwardPass(
      const EmbedAndHead& model, const Layer* layers, int num_layers, const Sizes& sizes, const Step& step,
      const Pass& pass, const Capture& capture, int num_threads)
      : model_(model), sizes_(sizes), step_(step), pass_(pass), capture_(capture),
        stack_(layers, num_layers, sizes, int(step.count)),
        is_screened_(pass.largest && model.screen.is_for(pass.num_places)),
        to_output_(form_of(model.output), is_screened_ ? 0 : pass.num_places, sizes.hidden),
        screened_(model_.output, model_.screen, is_screened_ ? pass.num_places : 0),
        found_(pass.largest ? pass.num_places : 0, model.num_columns, std::max(1, num_threads)) {
    if (pass.verification) verifier_.emplace(*pass.verification);
  }

  static int num_phases(int num_layers) {
    return Stack::num_phases(num_layers) + 4 + ScreenedProduct::NUM_PHASES + Verifier::NUM_PHASES;
  }

  void run(Member& member) {
    const int count = int(step_.count), size = sizes_.hidden;
    member.share(count, [&](int r) {
      const int64_t id = std::max<int64_t>(pass_.ids[r], 0);
      read_row(model_.embedding, model_.embedding_type, id * size, size, pass_.hidden + int64_t(r) * size);
    });
    stack_.run(step_, nullptr, pass_.hidden, capture_, member);
    will_read(is_screened_ ? model_.screen.matrix : model_.output, member);
    member.share(count, [&](int r) {
      float* normed = pass_.final + int64_t(r) * size;
      norm(pass_.hidden + int64_t(r) * size, model_.norm, size, sizes_.eps, normed);
      capture_.copy(stack_.num_layers() + 1, r, normed, size);
    });
    const auto final_row = [&](int r) { return pass_.final + (pass_.places ? pass_.places[r] : r) * size; };
    const auto keep = [&](int r, int channel, const float* values) { found_.add(member.number(), r, channel, values); };
    const auto write = [&](int r, int channel, const float* values) {
      const int columns = std::min(LANES, model_.num_columns - channel);
      if (columns > 0) std::copy(values, values + columns, pass_.logits + int64_t(r) * model_.num_columns + channel);
    };
    if (is_screened_) {
      member.share(pass_.num_places, [&](int r) { screened_.set(r, final_row(r)); });
      screened_.run(member, [](int, int, const float*) {}, keep);
    } else {
      member.share(pass_.num_places, [&](int r) { to_output_.set(r, final_row(r)); });
      if (pass_.largest)
        multiply(model_.output, to_output_, pass_.num_places, member, keep);
      else
        multiply(model_.output, to_output_, pass_.num_places, member, write);
    }
    if (pass_.largest) member.share(1, [&](int) { found_.write(pass_.largest); });
    if (verifier_) verifier_->run(pass_.logits, pass_.largest, member);
  }

 private:
  const EmbedAndHead model_;
  const Sizes sizes_;
  const Step step_;
  const Pass pass_;
  const Capture capture_;
  Stack stack_;
  const bool is_screened_;
  Rows to_output_;
  ScreenedProduct screened_;
  LargestLogits found_;
  std::optional<Verifier> verifier_;
};

}  // namespace specray
