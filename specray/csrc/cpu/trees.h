// Draft trees that grow on a draft model's outputs: level by level on its own, or all levels on those of one pass. One
// call makes all of it.
//
// The rules are those of specray/spec_decode/tree_growth.py and eagle_tree.py: EAGLE-2's dynamic tree (Li et al.,
// arXiv:2406.16858). Both grow the same trees, up to the precision of the output matrix; here, levels that would add no
// node are left out.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "layers.h"
#include "noise.h"
#include "selection.h"

namespace specray {

// A draft model. What its layers read is x = [embedding, state], normed and projected as far as there are norms and a
// projection; without `reads_states` it is the embedding. If the first layer has no input norm, x is its input, and the
// residual stream starts from the projection or else from the state.
struct DraftNetwork {
  Matrix fuse;  // from a step's hidden states, side by side, to the first state; data null: they are the states
  const float* fuse_norms;  // [num_norms, fuse.ins / num_norms]: of the parts of the hidden states
  int32_t num_norms;
  const void* embedding;  // [vocab, hidden]
  int32_t embedding_type;
  int32_t vocab_size;      // rows of `embedding`; ids past it read the last one
  const float* token_norm;  // [hidden], or null
  const float* state_norm;
  Matrix project;  // of x; data null: none
  int32_t reads_states, state_first, residual_is_normed;
  int32_t num_layers;
  const Layer* layers;
  Sizes sizes;
  const float *cos, *sin;
  const float* norm;  // of the output, before the output matrix; null: none
  int32_t state_is_normed;   // the next state is the normed output
  int32_t output_is_normed;  // the outputs that growth starts from have been through `norm`
  int32_t num_columns;      // of the output matrix
  Matrix output;
  const void* output_rows;  // [num_columns, hidden]: the output matrix, more precisely than `output`; null: it is precise
  int32_t rows_type;
  const int64_t* target_ids;  // of its columns; null: the same ids
  const float* mask_state;  // [hidden]; null: levels follow from each other, otherwise all from one pass, see Drafting
  int64_t mask_token;
};

// What the layers or the projection read of a token and the state before it, `x`, and where its residual stream starts.
inline void read_input(const DraftNetwork& network, int64_t id, const float* state, float* x, float* stream) {
  const int size = network.sizes.hidden;
  float* embedding = x + (network.reads_states && network.state_first ? size : 0);
  read_row(network.embedding, network.embedding_type, std::min<int64_t>(id, network.vocab_size - 1) * size, size, embedding);
  if (network.token_norm) norm(embedding, network.token_norm, size, network.sizes.eps, embedding);
  if (!network.reads_states) return void(std::copy_n(x, size, stream));
  float* normed = x + (network.state_first ? 0 : size);
  std::copy_n(state, size, normed);
  if (network.state_norm) norm(state, network.state_norm, size, network.sizes.eps, normed);
  std::copy_n(network.residual_is_normed ? normed : state, size, stream);
}

// The products [count, columns] of a matrix with `rows`.
inline void multiply_into(
    float* to, int columns, const Matrix& matrix, const Rows& rows, int count, Member& member) {
  multiply(matrix, rows, count, member, [&](int r, int channel, const float* values) {
    std::copy(values, values + std::min(LANES, columns - channel), to + int64_t(r) * columns + channel);
  });
}

// The trees of B requests to grow, and where they go.
struct Growth {
  int32_t num_trees, topk, num_levels, num_drafts;
  const float* output;       // [B, hidden]: the model's, from which the roots' children are predicted; with masks
                             // [B, num_levels, hidden], from which those of all levels are
  const int64_t* roots;      // [B]
  const int64_t* positions;  // [B], of the roots' children
  int64_t last_position;     // nodes past it count as there
  const int64_t* kv_slots;   // [B, slots_width]: of the prefixes
  const int32_t* kv_lens;    // [B]
  const int64_t* scratch;    // [B, scratch_width]: KV slots of the nodes
  int32_t slots_width, scratch_width;
  const LayerAttention* attention;  // [layers]
  const int64_t* seeds;      // [B]; null, with the next two: no request is sampled
  const int64_t* ends;       // [B]: positions of the roots
  const float* temperature;  // [B]; 0: this request is not sampled
  int64_t *tokens, *parents;  // [B, 1 + num_drafts]
  float* scores;              // [B, 1 + num_drafts]: probability of the path from the root
  int64_t* num_nodes;         // [B]
};

// A pass of the draft model over `count` rows, without its requests.
inline Step draft_pass(
    const DraftNetwork& network, const Growth& growth, int64_t count, const int64_t* positions, const int64_t* written) {
  Step step{};
  step.count = count;
  step.positions = positions;
  step.written = written;
  step.cos = network.cos;
  step.sin = network.sin;
  step.attention = growth.attention;
  return step;
}

// The candidates of one tree, in the order they are made. The candidate with index c is a child of entry c / topk of
// `expanded`; entry 0 is the root (-1), another entry is the index of the candidate.
class Candidates {
 public:
  Candidates(int topk, int width, int num_levels)
      : frontier(width), parents(width), topk_(topk), width_(width), columns_(width * (num_levels - 1)), expanded_{-1},
        sees_(int64_t(width) * columns_) {}

  // Indexes of the candidates that the next level expands, and the places of their parents in the level before.
  std::vector<int> frontier, parents;

  int64_t token(int place) const { return tokens_[frontier[place]]; }
  // [width, columns]: which earlier nodes, and itself, each node of the level sees.
  const uint8_t* sees() const { return sees_.data(); }

  // Adds a level from the most probable tokens below its nodes, best first: [topk] for the root, [width, topk] for others,
  // [topk] if they are the `same` below all nodes.
  void add_level(int level, const float* probs, const int64_t* ids, const int64_t* target_ids, bool same = false) {
    const int start = int(scores_.size()), count = level ? width_ : 1;
    for (int i = 0; i < count; ++i) {
      if (level) expanded_.push_back(frontier[i]);
      const int first = same ? 0 : i * topk_;
      for (int child = first; child < first + topk_; ++child) {
        scores_.push_back(level ? scores_[frontier[i]] * probs[child] : probs[child]);
        tokens_.push_back(target_ids ? target_ids[ids[child]] : ids[child]);
      }
    }
    const std::vector<int> best = best_of(start, width_);
    std::vector<uint8_t> before = sees_;
    for (int i = 0; i < width_; ++i) {
      frontier[i] = best[i];
      parents[i] = (best[i] - start) / topk_;
      if (!columns_) continue;
      uint8_t* row = sees_.data() + int64_t(i) * columns_;
      if (level) std::copy_n(before.data() + int64_t(parents[i]) * columns_, columns_, row);
      if (level * width_ + i < columns_) row[level * width_ + i] = 1;
    }
  }

  // Whether nodes below the level added last can be among the best `count`: a child never scores more than its parent, and
  // ties go to earlier candidates.
  bool can_improve(int count) const {
    if (!is_finite()) return false;  // the tree will have no nodes
    if (int(scores_.size()) < count) return true;
    std::vector<float> scores = scores_;
    std::nth_element(scores.begin(), scores.begin() + count - 1, scores.end(), std::greater<float>());
    return scores_[frontier[0]] > scores[count - 1];
  }

  // The `count` candidates with the highest scores, the highest first; see CandidatePool.tree.
  void write_tree(int64_t root, int count, int64_t* tokens, int64_t* tree_parents, float* scores,
                  int64_t* num_nodes) const {
    const std::vector<int> best = best_of(0, count);
    std::vector<int> numbers(scores_.size() + 1);  // candidate + 1 -> node; the root's is 0
    tokens[0] = root;
    tree_parents[0] = -1;
    scores[0] = 1;
    for (int i = 0; i < count; ++i) numbers[best[i] + 1] = i + 1;
    for (int i = 0; i < count; ++i) {
      tokens[i + 1] = tokens_[best[i]];
      scores[i + 1] = scores_[best[i]];
      tree_parents[i + 1] = numbers[expanded_[best[i] / topk_] + 1];
    }
    *num_nodes = is_finite() ? 1 + count : 0;
  }

 private:
  bool is_finite() const {
    return std::all_of(scores_.begin(), scores_.end(), [](float score) { return std::isfinite(score); });
  }

  // Indexes of the highest scores from `start` on; ties go to the lower index.
  std::vector<int> best_of(int start, int count) const {
    std::vector<int> order(scores_.size() - start);
    std::iota(order.begin(), order.end(), start);
    const auto key = [&](int index) { return scores_[index] == scores_[index] ? scores_[index] : INFINITY; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
    order.resize(count);
    return order;
  }

  const int topk_, width_, columns_;
  std::vector<float> scores_;
  std::vector<int64_t> tokens_;
  std::vector<int> expanded_;
  std::vector<uint8_t> sees_;
};

// Nodes of a level that are expanded. A node's child scores no more than the node and all before it in their level, so for
// the last of `num_drafts` it must be one of the first num_drafts - 1.
inline int level_width(const Growth& growth) { return std::min(growth.topk, std::max(1, growth.num_drafts - 1)); }

// The most probable tokens below rows of outputs [`most`, hidden], under noise where a request is sampled.
class Children {
 public:
  Children(const DraftNetwork& network, const Growth& growth, int most)
      : network_(network), growth_(growth), outputs_(form_of(network.output), most, network.output.ins),
        logits_(int64_t(most) * network.num_columns), probs_(int64_t(most) * growth.topk), ids_(probs_.size()) {}

  void set(int r, const float* output) { outputs_.set(r, output); }

  // All members of a team call this.
  void compute_logits(int count, Member& member) {
    multiply(network_.output, outputs_, count, member, [&](int r, int channel, const float* values) {
      const int columns = std::min(LANES, network_.num_columns - channel);
      if (columns > 0) std::copy(values, values + columns, logits_.data() + int64_t(r) * network_.num_columns + channel);
    });
  }

  // Of row r, whose `output` was set, for the nodes below `level` of a tree.
  void choose(int r, const float* output, int tree, int level) {
    float* logits = logits_.data() + int64_t(r) * network_.num_columns;
    const bool is_sampled = growth_.seeds && growth_.temperature[tree] > 0;
    std::vector<float> before;  // the noise
    if (is_sampled) {
      if (network_.output_rows) before.assign(logits, logits + network_.num_columns);
      int32_t key[2];
      noise_key(growth_.seeds[tree], growth_.ends[tree] + 1 + level, key);
      add_noise(logits, network_.num_columns, network_.target_ids, growth_.temperature[tree], key);
    }
    if (network_.output_rows) {
      const float temperature = is_sampled ? growth_.temperature[tree] : 1.0f;
      correct_largest(output, logits, is_sampled ? before.data() : logits, temperature);
    }
    const int64_t first = int64_t(r) * growth_.topk;
    top_probs(logits, network_.num_columns, growth_.topk, probs_.data() + first, ids_.data() + first);
  }

  const float* probs(int r) const { return probs_.data() + int64_t(r) * growth_.topk; }
  const int64_t* ids(int r) const { return ids_.data() + int64_t(r) * growth_.topk; }

 private:
  // Computes the largest of a row's logits again, from the precise output matrix. `before` are the logits before noise
  // and temperature.
  void correct_largest(const float* output, float* logits, const float* before, float temperature) const {
    constexpr int CANDIDATES = 4;  // for each child
    const int count = std::min(CANDIDATES * growth_.topk, network_.num_columns), size = network_.sizes.hidden;
    std::vector<float> values(count), row(size);
    std::vector<int64_t> ids(count);
    largest_logits(logits, network_.num_columns, count, values.data(), ids.data());
    for (const int64_t id : ids) {
      read_row(network_.output_rows, network_.rows_type, id * size, size, row.data());
      logits[id] += (dot(output, row.data(), size) - before[id]) / temperature;
    }
  }

  const DraftNetwork& network_;
  const Growth& growth_;
  Rows outputs_;
  std::vector<float> logits_, probs_;
  std::vector<int64_t> ids_;
};

// Writes a tree to where `growth` says.
inline void write_tree(const Growth& growth, int tree, const Candidates& candidates) {
  const int64_t first = int64_t(tree) * (1 + growth.num_drafts);
  candidates.write_tree(growth.roots[tree], growth.num_drafts, growth.tokens + first, growth.parents + first,
                        growth.scores + first, growth.num_nodes + tree);
}

// Trees of one shape from the outputs of masks: the tokens below a node are the same for all nodes of its level. All
// members of a team call `grow`.
class MaskedGrowth {
 public:
  MaskedGrowth(const DraftNetwork& network, const Growth& growth)
      : network_(network), growth_(growth), count_(growth.num_trees * growth.num_levels),
        children_(network, growth, count_), outputs_(int64_t(count_) * network.sizes.hidden) {}

  static constexpr int NUM_PHASES = 4;

  void grow(Member& member) {
    const int size = network_.sizes.hidden, num_levels = growth_.num_levels;
    member.share(count_, [&](int r) {
      float* output = outputs_.data() + int64_t(r) * size;
      std::copy_n(growth_.output + int64_t(r) * size, size, output);
      if (network_.norm && !network_.output_is_normed) norm(output, network_.norm, size, network_.sizes.eps, output);
      children_.set(r, output);
    });
    children_.compute_logits(count_, member);
    member.share(count_, [&](int r) {
      children_.choose(r, outputs_.data() + int64_t(r) * size, r / num_levels, r % num_levels);
    });
    member.share(growth_.num_trees, [&](int tree) {
      Candidates candidates(growth_.topk, level_width(growth_), num_levels);
      for (int level = 0; level < num_levels; ++level) {
        const int r = tree * num_levels + level;
        candidates.add_level(level, children_.probs(r), children_.ids(r), network_.target_ids, true);
      }
      write_tree(growth_, tree, candidates);
    });
  }

 private:
  const DraftNetwork& network_;
  const Growth& growth_;
  const int count_;
  Children children_;
  std::vector<float> outputs_;
};

// Trees of one shape as they grow level by level, with the buffers of a level. All members of a team call `grow`.
class TreeGrowth {
 public:
  TreeGrowth(const DraftNetwork& network, const Growth& growth)
      : network_(network), growth_(growth), width_(level_width(growth)), count_(growth.num_trees * width_),
        size_(network.sizes.hidden),
        x_width_(network.reads_states ? 2 * size_ : size_), columns_(width_ * (growth.num_levels - 1)),
        stack_(network.layers, network.num_layers, network.sizes, count_),
        to_project_(form_of(network.project), network.project.data ? count_ : 0, network.project.ins),
        children_(network, growth, count_),
        trees_(growth.num_trees, Candidates(growth.topk, width_, growth.num_levels)), stream_(int64_t(count_) * size_),
        states_(int64_t(count_) * size_), next_states_(int64_t(count_) * size_), first_input_(int64_t(count_) * x_width_),
        positions_(count_), written_(count_), query_lens_(growth.num_trees, width_), kv_lens_(growth.num_trees),
        tree_sizes_(2 * growth.num_trees), mask_(int64_t(count_) * columns_),
        slots_width_(growth.slots_width + columns_), slots_(int64_t(growth.num_trees) * slots_width_),
        is_grown_(growth.num_levels) {}

  // Phases of growing.
  static int num_phases(const DraftNetwork& network, const Growth& growth) {
    return 2 + growth.num_levels * (7 + Stack::num_phases(network.num_layers));
  }

  void grow(Member& member) {
    const Growth& growth = growth_;
    member.share(growth.num_trees, [&](int tree) { begin(tree); });
    for (int level = 0; level < growth.num_levels; ++level) {
      const int width = level ? width_ : 1, count = growth.num_trees * width;
      if (level) run_layers(level, member);
      will_read(network_.output, member);
      member.share(count, [&](int r) { finish(level, r); });
      will_read(network_.project.data ? network_.project : network_.layers[0].qkv, member);
      children_.compute_logits(count, member);
      member.share(count, [&](int r) { children_.choose(r, stream_.data() + int64_t(r) * size_, r / width, level); });
      member.share(growth.num_trees, [&](int tree) {
        const int r = tree * width;
        trees_[tree].add_level(level, children_.probs(r), children_.ids(r), network_.target_ids);
      });
      member.share(1, [&](int) {
        std::swap(states_, next_states_);
        is_grown_[level] = std::none_of(trees_.begin(), trees_.end(), [&](const Candidates& tree) {
          return tree.can_improve(growth.num_drafts);
        });
      });
      if (is_grown_[level]) break;
    }
    member.share(growth.num_trees, [&](int tree) { write_tree(growth, tree, trees_[tree]); });
  }

 private:
  // The KV slots that a tree's nodes read: the prefix, then the scratch slots.
  void begin(int tree) {
    int64_t* slots = slots_.data() + int64_t(tree) * slots_width_;
    const int64_t* visible = growth_.kv_slots + int64_t(tree) * growth_.slots_width;
    const int64_t* scratch = growth_.scratch + int64_t(tree) * growth_.scratch_width;
    std::copy_n(visible, growth_.kv_lens[tree], slots);
    std::copy_n(scratch, columns_, slots + growth_.kv_lens[tree]);
  }

  void run_layers(int level, Member& member) {
    const bool is_projected = network_.project.data != nullptr;
    member.share(growth_.num_trees, [&](int tree) {
      kv_lens_[tree] = growth_.kv_lens[tree] + level * width_;
      tree_sizes_[2 * tree] = width_;
      tree_sizes_[2 * tree + 1] = level * width_;
      std::copy_n(trees_[tree].sees(), int64_t(width_) * columns_, mask_.data() + int64_t(tree) * width_ * columns_);
      for (int i = 0; i < width_; ++i) {
        const int row = tree * width_ + i;
        positions_[row] = std::min(growth_.positions[tree] + level - 1, growth_.last_position);
        written_[row] = growth_.scratch[int64_t(tree) * growth_.scratch_width + (level - 1) * width_ + i];
        read_input(level, tree, i);
        if (is_projected) to_project_.set(row, first_input_.data() + int64_t(row) * x_width_);
      }
    });
    if (is_projected) multiply_into(stream_.data(), size_, network_.project, to_project_, count_, member);
    Step step = draft_pass(network_, growth_, count_, positions_.data(), written_.data());
    step.requests.count = growth_.num_trees;
    step.requests.slots_width = slots_width_;
    step.requests.mask_rows = width_;
    step.requests.mask_columns = columns_;
    step.requests.query_lens = query_lens_.data();
    step.requests.kv_lens = kv_lens_.data();
    step.requests.tree_sizes = tree_sizes_.data();
    step.requests.kv_slots = slots_.data();
    step.requests.tree_mask = mask_.data();
    const float* first_input = is_projected ? stream_.data() : first_input_.data();
    stack_.run(step, first_input, stream_.data(), Capture{}, member);
  }

  // Node i of a tree's level: what the layers or the projection read, and the residual stream.
  void read_input(int level, int tree, int i) {
    const int row = tree * width_ + i;
    const int parent = level > 1 ? tree * width_ + trees_[tree].parents[i] : tree;
    specray::read_input(network_, trees_[tree].token(i), states_.data() + int64_t(parent) * size_,
                        first_input_.data() + int64_t(row) * x_width_, stream_.data() + int64_t(row) * size_);
  }

  // A row's next state, and what the output matrix reads.
  void finish(int level, int r) {
    float *output = stream_.data() + int64_t(r) * size_, *next = next_states_.data() + int64_t(r) * size_;
    if (!level) std::copy_n(growth_.output + int64_t(r) * size_, size_, output);
    std::copy_n(output, size_, next);
    if (network_.norm && (level || !network_.output_is_normed))
      norm(output, network_.norm, size_, network_.sizes.eps, output);
    if (network_.state_is_normed) std::copy_n(output, size_, next);
    children_.set(r, output);
  }

  const DraftNetwork& network_;
  const Growth& growth_;
  const int width_, count_, size_, x_width_, columns_;
  Stack stack_;
  Rows to_project_;
  Children children_;
  std::vector<Candidates> trees_;
  std::vector<float> stream_, states_, next_states_, first_input_;
  std::vector<int64_t> positions_, written_;
  std::vector<int32_t> query_lens_, kv_lens_, tree_sizes_;
  std::vector<uint8_t> mask_;
  const int slots_width_;
  std::vector<int64_t> slots_;
  std::vector<uint8_t> is_grown_;  // by level: further ones would not change the trees
};

}  // namespace specray
