// The layout of the structs that Python mirrors, so that it can compare them with its own when it loads the library.
#pragma once

#include <cstddef>
#include <sstream>
#include <string>

#include "draft.h"
#include "layers.h"
#include "sampling.h"
#include "screen.h"
#include "states.h"
#include "steps.h"
#include "trees.h"
#include "verification.h"

namespace specray {

// A line for a struct: its name and size, then the name, offset and size of each field.
template <class... Fields>
std::string layout(const char* name, size_t size, std::string names, const void* start, const Fields&... fields) {
  for (char& letter : names)
    if (letter == ',') letter = ' ';
  std::istringstream left(names);
  std::ostringstream line;
  line << name << ' ' << size;
  std::string field;
  const auto add = [&](const void* address, size_t bytes) {
    left >> field;
    line << ' ' << field << ' ' << static_cast<const char*>(address) - static_cast<const char*>(start) << ' ' << bytes;
  };
  (add(&fields, sizeof(fields)), ...);
  line << '\n';
  return line.str();
}

// In a class that inherits them, the names of fields are expressions.
#define LAYOUT(Struct, ...)                                                                          \
  struct Struct##Fields : Struct {                                                                   \
    std::string text() const { return layout(#Struct, sizeof(Struct), #__VA_ARGS__, this, __VA_ARGS__); } \
  };                                                                                                 \
  text += Struct##Fields{}.text()

// In the order of specray/ops/cpu/structs.py.
inline std::string layouts() {
  std::string text;
  LAYOUT(Matrix, kind, outs, ins, zero, group, scale_type, is_16_bit, data, bias);
  LAYOUT(Pool, data, slot_bytes, type, num_heads, dim);
  LAYOUT(LayerAttention, pool, num_heads, window, scale, softcap, sinks);
  LAYOUT(Requests, count, slots_width, mask_rows, mask_columns, query_lens, kv_lens, tree_sizes, kv_slots, tree_mask);
  LAYOUT(Layer, input_norm, q_norm, k_norm, ffn_norm, qkv, out, gate_up, down);
  LAYOUT(Sizes, hidden, ffn, num_heads, num_kv_heads, dim, eps);
  LAYOUT(Step, count, positions, written, cos, sin, requests, attention, read_lens);
  LAYOUT(Capture, copies, type, stride);
  LAYOUT(Screen, matrix, errors, norms);
  LAYOUT(EmbedAndHead, embedding, embedding_type, num_columns, norm, output, screen);
  LAYOUT(RequestBuffer, cells, row_size, kv_column, length_column);
  LAYOUT(DraftTrees, num_trees, width, max_depth, vocab_size, tokens, parents, num_nodes, logits, choices, lengths,
      seeds, temperature, top_p, min_p, top_k);
  LAYOUT(Verification, trees, buffer, slots, pool, num_layers, layer_bytes, slot_bytes, outcome);
  LAYOUT(Pass, ids, places, num_places, hidden, final, logits, largest, verification);
  LAYOUT(DraftNetwork, fuse, fuse_norms, num_norms, embedding, embedding_type, vocab_size, token_norm, state_norm,
      project, reads_states, state_first, residual_is_normed, num_layers, layers, sizes, cos, sin, norm,
      state_is_normed, output_is_normed, num_columns, output, output_rows, rows_type, target_ids, mask_state,
      mask_token);
  LAYOUT(Growth, num_trees, topk, num_levels, num_drafts, output, roots, positions, last_position, kv_slots, kv_lens,
      scratch, slots_width, scratch_width, attention, seeds, ends, temperature, tokens, parents, scores, num_nodes);
  LAYOUT(Committed, count, slots, starts, ends, hidden_states, type);
  LAYOUT(StepRows, count, width, slots, starts, counts, tokens, parents, num_nodes);
  LAYOUT(PendingTrees, tokens, parents, num_nodes, scores, width);
  LAYOUT(StateRows, count, total, slots, lens, num_known, is_fresh, parents, copies);
  LAYOUT(Convolution, size, width, has_silu, type, weights, bias, pool);
  LAYOUT(DeltaNet, num_k_heads, num_v_heads, k_dim, v_dim, type, beta_scale, eps, rates, dt_bias, norm, pool);
  return text;
}

#undef LAYOUT

}  // namespace specray
