// The C interface of the CPU kernels; `specray.ops.cpu` calls it. Pointers are to contiguous tensors.
//
// Types of activations are FLOAT32, BFLOAT16 and FLOAT16 of `Kind`.

#include "draft.h"
#include "following.h"
#include "layers.h"
#include "layouts.h"
#include "loss.h"
#include "packing.h"
#include "sampling.h"
#include "selection.h"
#include "states.h"
#include "steps.h"
#include "trees.h"

using namespace specray;

extern "C" {

// What the kernels were compiled for.
const char* specray_target() {
#if defined(SPECRAY_TILES)
  return has_tiles() ? "AMX and AVX-512 with VNNI" : "AVX-512 with VNNI and BF16";
#elif defined(__AVX512BF16__)
  return "AVX-512 with VNNI and BF16";
#elif defined(__AVX512VNNI__)
  return "AVX-512 with VNNI";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "plain C++";
#endif
}

int32_t specray_lanes() { return LANES; }

// See layouts.h.
const char* specray_layouts() {
  static const std::string text = layouts();
  return text.c_str();
}

int64_t specray_block_bytes(const Matrix* matrix) { return block_bytes(*matrix); }

// Packs rows float32 [count, ins] into blocks `block`, `block + step`, … of a dense matrix.
void specray_pack_dense(const Matrix* matrix, const float* rows, int64_t count, uint8_t* data, int64_t block, int64_t step) {
  for (int64_t first = 0; first < count; first += LANES, block += step) {
    const int lanes = int(std::min<int64_t>(LANES, count - first));
    pack_dense(*matrix, rows + first * matrix->ins, lanes, data + block * block_bytes(*matrix));
  }
}

// The same for a quantised matrix; see pack_quantised.
void specray_pack_quantised(
    const Matrix* matrix, const uint8_t* ints, const float* scales, const float* lows, int64_t count, uint8_t* data,
    int64_t block, int64_t step) {
  const int64_t wide = padded(matrix->ins);
  const int64_t groups = wide / (matrix->kind == Q8_FINE || matrix->kind == Q8_FINE_LOW ? 16 : 32);
  for (int64_t first = 0; first < count; first += LANES, block += step) {
    const int lanes = int(std::min<int64_t>(LANES, count - first));
    pack_quantised(
        *matrix, ints + first * wide, scales + first * groups, lows ? lows + first * groups : nullptr, lanes,
        data + block * block_bytes(*matrix));
  }
}

// The same for a coded matrix; see pack_coded.
void specray_pack_coded(
    const Matrix* matrix, const uint8_t* codes, const uint8_t* scales, const uint8_t* zeros, int64_t count,
    uint8_t* data, int64_t block, int64_t step) {
  const int64_t wide = has_four_bits(matrix->kind) ? (matrix->ins + 1) / 2 : matrix->ins, groups = num_groups(*matrix);
  for (int64_t first = 0; first < count; first += LANES, block += step) {
    const int lanes = int(std::min<int64_t>(LANES, count - first));
    pack_coded(
        *matrix, codes + first * wide, scales + first * groups * scale_size(matrix->scale_type),
        zeros ? zeros + first * groups : nullptr, lanes, data + block * block_bytes(*matrix));
  }
}

// y [count, columns] = x [count, ins] W^T + b, for the first `columns` outputs.
void specray_linear(
    const Matrix* matrix, const void* x, int32_t x_type, int64_t count, void* y, int32_t y_type, int32_t columns,
    int32_t num_threads) {
  Rows rows(form_of(*matrix), int(count), matrix->ins);
  run_on_team(num_threads, 2, [&](Member& member) {
    std::vector<float> row(matrix->ins);
    member.share(int(count), [&](int r) {
      read_row(x, x_type, int64_t(r) * matrix->ins, matrix->ins, row.data());
      rows.set(r, row.data());
    });
    multiply(*matrix, rows, int(count), member, [&](int r, int channel, const float* values) {
      write_values(values, std::min(LANES, columns - channel), y, y_type, int64_t(r) * columns + channel);
    });
  });
}

// The same in float32 and without a bias, where only each row's largest must be right: see screen.h.
void specray_largest(
    const Matrix* matrix, const Screen* screen, const void* x, int32_t x_type, int64_t count, float* y, int32_t columns,
    int32_t num_threads) {
  if (!screen->is_for(int(count))) return specray_linear(matrix, x, x_type, count, y, FLOAT32, columns, num_threads);
  ScreenedProduct product(*matrix, *screen, int(count));
  run_on_team(num_threads, 1 + ScreenedProduct::NUM_PHASES, [&](Member& member) {
    std::vector<float> row(matrix->ins);
    member.share(int(count), [&](int r) {
      read_row(x, x_type, int64_t(r) * matrix->ins, matrix->ins, row.data());
      product.set(r, row.data());
    });
    const auto write = [&](int r, int channel, const float* values) {
      std::copy(values, values + std::min(LANES, columns - channel), y + int64_t(r) * columns + channel);
    };
    product.run(member, write, write);
  });
}

// y [count, columns] = silu(x W_gate^T) * (x W_up^T), from a matrix whose blocks alternate between gate and up.
void specray_gated(
    const Matrix* matrix, const void* x, int32_t x_type, int64_t count, void* y, int32_t y_type, int32_t columns,
    int32_t num_threads) {
  Rows rows(form_of(*matrix), int(count), matrix->ins);
  run_on_team(num_threads, 2, [&](Member& member) {
    std::vector<float> row(matrix->ins);
    member.share(int(count), [&](int r) {
      read_row(x, x_type, int64_t(r) * matrix->ins, matrix->ins, row.data());
      rows.set(r, row.data());
    });
    multiply_gated(*matrix, rows, int(count), member, [&](int r, int channel, const float* values) {
      write_values(values, std::min(LANES, columns - channel), y, y_type, int64_t(r) * columns + channel);
    });
  });
}

// Writes kv [count, 2, kv_heads, dim], unless it is null, to slots `written`, then out [count, heads, dim] = attention of
// q over the pool. q, kv and out are of `type`; the pool may be in 8 bits.
void specray_attention(
    const LayerAttention* layer, const Requests* requests, const int64_t* written, int64_t count,
    const void* q, const void* kv, void* out, int32_t type, int32_t num_threads) {
  const Pool& pool = layer->pool;
  const int64_t width = int64_t(layer->num_heads) * pool.dim, kv_width = int64_t(pool.num_heads) * pool.dim;
  std::vector<float> queries(count * width), seen(count * width);
  const Queries of_requests(*requests, most_queries(*layer), nullptr);
  run_on_team(num_threads, 3, [&](Member& member) {
    std::vector<float> row(2 * kv_width);
    member.share(int(count), [&](int64_t r) {
      read_row(q, type, r * width, int(width), queries.data() + r * width);
      if (!kv) return;
      read_row(kv, type, r * 2 * kv_width, int(2 * kv_width), row.data());
      write_kv(pool, written[r], row.data(), row.data() + kv_width);
    });
    attend_any(*layer, *requests, of_requests, queries.data(), width, seen.data(), member);
    member.share(int(count), [&](int64_t r) {
      write_values(seen.data() + r * width, int(width), out, type, r * width);
    });
  });
}

// Runs layers on the residual stream `hidden` [T, hidden]; see Stack::run.
void specray_layers(
    const Layer* layers, int32_t num_layers, const Sizes* sizes, const Step* step, const float* first_input,
    float* hidden, const Capture* capture, int32_t num_threads) {
  Stack stack(layers, num_layers, *sizes, int(step->count));
  run_on_team(num_threads, Stack::num_phases(num_layers), [&](Member& member) {
    stack.run(*step, first_input, hidden, *capture, member);
  });
}

// Starts a whole forward pass, after the runs before: their results may be among what it reads. Returns the run's number.
// What the arguments point to must live, and not change otherwise, until specray_join returns; any other call that needs
// threads joins it too.
int64_t specray_start_forward(
    const EmbedAndHead* model, const Layer* layers, int32_t num_layers, const Sizes* sizes, const Step* step,
    const Pass* pass, const Capture* capture, int32_t num_threads) {
  const auto forward =
      std::make_shared<ForwardPass>(*model, layers, num_layers, *sizes, *step, *pass, *capture, num_threads);
  const int num_phases = ForwardPass::num_phases(num_layers);
  return Teams::get().start(num_threads, num_phases, [forward](Member& member) { forward->run(member); });
}

// The caller helps with this run and those before it; returns when they are done.
void specray_join(int64_t run) { Teams::get().join(run); }

// y [count, size] = RMS norm of x, with `num_weights` weights [num_weights, size] in turn; x and y are of `type`.
void specray_norm(
    const void* x, const float* weights, int32_t num_weights, int64_t count, int32_t size, float eps, void* y,
    int32_t type) {
  std::vector<float> row(size);
  for (int64_t r = 0; r < count; ++r) {
    read_row(x, type, r * size, size, row.data());
    norm(row.data(), weights + r % num_weights * size, size, eps, row.data());
    write_values(row.data(), size, y, type, r * size);
  }
}

// y [T, size] = a convolution along each row's path of x [T, size]; the windows of `conv` move behind the known rows.
void specray_convolve(
    const Convolution* conv, const StateRows* rows, const void* x, void* y, int32_t num_threads) {
  const ConvolutionStep step(*conv, *rows, x, y);
  run_on_team(num_threads, ConvolutionStep::NUM_PHASES, [&](Member& member) { step.run(member); });
}

// The gated delta rule along each row's path; see DeltaStep.
void specray_gated_delta(
    const DeltaNet* net, const StateRows* rows, const void* qkv, const void* a, const void* b, const void* z, void* out,
    int32_t num_threads) {
  DeltaStep step(*net, *rows, qkv, a, b, z, out);
  run_on_team(num_threads, DeltaStep::NUM_PHASES, [&](Member& member) { step.run(member); });
}

// The k largest logits of each row [count, size], best first and the lower index first among equals: their softmax
// probabilities and indexes [count, k]. A row with a NaN has NaN probabilities.
void specray_top_probs(
    const float* logits, int64_t count, int64_t size, int32_t k, float* probs, int64_t* indexes) {
  for (int64_t r = 0; r < count; ++r) top_probs(logits + r * size, int(size), k, probs + r * k, indexes + r * k);
}

// Training: logits [count, size] of `type` become their softmax; best [count] is the place of each row's largest.
void specray_soft_labels(void* logits, int32_t type, int64_t count, int64_t size, int64_t* best, int32_t num_threads) {
  run_on_team(num_threads, 1, [&](Member& member) {
    LabelRows rows(size);
    member.share(int(count), [&](int64_t r) { best[r] = rows.softmax(logits, type, r); });
  });
}

// Training: logits [count, size] become the gradients of their losses [count] against rows `label_of` of labels [m, size],
// whose largest are at best [m]. agrees [count]: whether the largest logit is at the same place.
void specray_soft_loss(
    void* logits, const void* labels, int32_t type, int64_t count, int64_t size, const int64_t* label_of,
    const int64_t* best, float total_variation, float* losses, uint8_t* agrees, int32_t num_threads) {
  run_on_team(num_threads, 1, [&](Member& member) {
    LossRows rows(size, total_variation);
    member.share(int(count), [&](int64_t r) {
      const int64_t label = label_of[r];
      losses[r] = rows.compare(logits, labels, type, r, label, best[label], agrees + r);
    });
  });
}

// See move_kv in kv_pool.h.
void specray_move_kv(
    void* pool, int32_t num_layers, int64_t layer_bytes, int64_t slot_bytes, int32_t count, const int64_t* kv_slots,
    int32_t width, const int64_t* outcome, int64_t outcome_width) {
  move_kv(pool, num_layers, layer_bytes, slot_bytes, count, kv_slots, width, {outcome, outcome_width});
}

// A draft model over committed tokens; see draft.h.
void specray_extend(
    const DraftNetwork* network, const Step* step, const int64_t* ids, const void* states, void* output, int32_t type,
    int32_t num_threads) {
  extend(*network, *step, ids, states, output, type, num_threads);
}

// The same, and the trees below; see draft.h.
void specray_draft(
    const DraftNetwork* network, const RequestBuffer* buffer, const Committed* committed, const Growth* growth,
    int32_t num_threads) {
  draft(*network, *buffer, *committed, *growth, num_threads);
}

// Grows draft trees; see trees.h.
void specray_grow(const DraftNetwork* network, const Growth* growth, int32_t num_threads) {
  TreeGrowth trees(*network, *growth);
  run_on_team(num_threads, TreeGrowth::num_phases(*network, *growth), [&](Member& member) { trees.grow(member); });
}

// Adds noise to a row of logits after temperature; see noise.h. Tests compare it with torch's.
void specray_add_noise(float* logits, int32_t size, const int64_t* ids, float temperature, const int32_t* key) {
  add_noise(logits, size, ids, temperature, key);
}

// The next token of each row of logits [count, size]; keys [count, 2] and what follows are null if all rows are greedy.
void specray_sample(
    const float* logits, int64_t count, int32_t size, const int32_t* keys, const float* temperature, const float* top_p,
    const float* min_p, const int64_t* top_k, int64_t* tokens, int32_t num_threads) {
  run_on_team(num_threads, 1, [&](Member& member) {
    Sampler sample(size);
    member.share(int(count), [&](int64_t r) {
      const Options options = keys ? Options{temperature[r], top_p[r], min_p[r], top_k[r]} : Options{0.0f, 1.0f, 0.0f, 0};
      tokens[r] = sample(logits + r * size, options, keys ? keys + 2 * r : nullptr);
    });
  });
}

// Walks draft trees; see walk_to in sampling.h.
void specray_walk(const DraftTrees* trees, int64_t* outcome, int32_t num_threads) {
  run_on_team(num_threads, 1, [&](Member& member) {
    Sampler sample(trees->vocab_size);
    member.share(trees->num_trees, [&](int tree) { walk_to(*trees, tree, sample, outcome); });
  });
}

// Sets logits [.., size] of tokens that are not allowed to minus infinity, in `count` of the rows; bits [count, words].
void specray_forbid(
    float* logits, int32_t size, const int64_t* rows, const uint32_t* bits, int32_t words, int64_t count,
    int32_t num_threads) {
  run_on_team(num_threads, 1, [&](Member& member) {
    member.share(int(count), [&](int64_t r) { forbid(logits + rows[r] * size, size, bits + r * words); });
  });
}

// The tensors of a step around its forward passes; see steps.h.

void specray_build_step(
    const RequestBuffer* buffer, const StepRows* rows, int64_t total, int64_t kv_width, int64_t* step, uint8_t* ancestors) {
  build_step(*buffer, *rows, total, kv_width, step, ancestors);
}

// See step_after in following.h.
void specray_step_after(const Step* before, const RequestBuffer* buffer, const int64_t* slots, int64_t* numbers, Step* step) {
  *step = step_after(*before, *buffer, slots, numbers);
}

void specray_gather_cells(
    const RequestBuffer* buffer, int64_t count, const int64_t* slots, const int64_t* positions, int64_t column, int64_t* found) {
  gather_cells(*buffer, count, slots, positions, column, found);
}

void specray_gather_kv_slots(
    const RequestBuffer* buffer, int64_t count, const int64_t* slots, const int64_t* starts, int64_t width, int64_t* kv_slots) {
  gather_kv_slots(*buffer, count, slots, starts, width, kv_slots);
}

void specray_append_tokens(
    const RequestBuffer* buffer, int64_t count, const int64_t* slots, const int64_t* outcome, int64_t width) {
  append_tokens(*buffer, count, slots, {outcome, width});
}

void specray_build_extend(
    const RequestBuffer* buffer, int64_t count, const int64_t* slots, const int64_t* starts, const int64_t* ends, int64_t* ids,
    int64_t* positions, int64_t* written, int64_t* last) {
  build_extend(*buffer, count, slots, starts, ends, ids, positions, written, last);
}

void specray_put_trees(
    const PendingTrees* pending, int64_t count, const int64_t* slots, const int64_t* tokens, const int64_t* parents,
    const int64_t* num_nodes, const float* scores, int64_t width) {
  put_trees(*pending, count, slots, tokens, parents, num_nodes, scores, width);
}

void specray_take_trees(
    const PendingTrees* pending, int64_t count, const int64_t* slots, const int64_t* roots, const int64_t* most,
    const float* least, int64_t vocab_size, int64_t* tokens, int64_t* parents, int64_t* numbers) {
  take_trees(*pending, count, slots, roots, most, least, vocab_size, tokens, parents, numbers);
}

}  // extern "C"
