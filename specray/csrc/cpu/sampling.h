// The target's token after a row of logits, and the walk of a draft tree by these tokens.
//
// The rules are those of specray/ops/sampling.py and specray/spec_decode/verifier.py.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "noise.h"

namespace specray {

// Sampling options of a row. Rows with a temperature below GREEDY_BELOW take the largest logit.
struct Options {
  float temperature, top_p, min_p;
  int64_t top_k;  // 0: off
};

constexpr float GREEDY_BELOW = 1e-5f;

// The first index of the largest value, or of the first NaN.
inline int64_t argmax(const float* values, int size) {
  constexpr int CHUNK = 4 * WIDTH;
  int64_t best = 0;
  for (int i = 0; i < size; i += CHUNK) {
    if (i + CHUNK <= size) {
      Floats most = load<Floats>(values + i);
      for (int part = WIDTH; part < CHUNK; part += WIDTH) most = largest(most, load<Floats>(values + i + part));
      if (sum(Ints(most <= values[best])) == -WIDTH) continue;
    }
    for (int index = i; index < std::min(i + CHUNK, size); ++index) {
      if (values[index] != values[index]) return index;
      if (values[index] > values[best]) best = index;
    }
  }
  return best;
}

// Samples from rows of one size; keeps its buffers from row to row.
class Sampler {
 public:
  explicit Sampler(int vocab_size) : size_(vocab_size) {}

  // The token after `logits`, with noise of `key`, two words.
  int64_t operator()(const float* logits, const Options& options, const int32_t* key) {
    const int64_t greedy = argmax(logits, size_);
    if (!(options.temperature >= GREEDY_BELOW) || !std::isfinite(logits[greedy])) return greedy;
    const float most = logits[greedy] / options.temperature;
    const bool is_limited = options.top_k > 0 || options.top_p < 1.0f;
    float lowest = options.min_p > 0.0f ? most + std::log(options.min_p) : -INFINITY;
    if (is_limited) lowest = std::max(lowest, lowest_in_nucleus(logits, options, most));
    return noisiest(logits, options.temperature, lowest, key);
  }

 private:
  // The lowest logit over temperature that top-k, and top-p over what top-k keeps, let pass.
  float lowest_in_nucleus(const float* logits, const Options& options, float most) {
    const float temperature = options.temperature;
    Floats sums{};
    int i = 0;
    for (; i + WIDTH <= size_; i += WIDTH) sums += exp_of(load<Floats>(logits + i) / temperature - most);
    float total = sum(sums);
    for (; i < size_; ++i) total += exp_of(logits[i] / temperature - most);
    const int limit = int(options.top_k > 0 ? std::min<int64_t>(options.top_k, size_) : size_);
    // Almost every nucleus lies in a few of the most probable tokens, so only as many as it takes are sorted.
    for (float range = 4.0f;; range *= 2) {
      const bool is_all = range > 200.0f;
      collect(logits, temperature, is_all ? -INFINITY : most - range);
      const int found = std::min(int(kept_.size()), limit);
      if (options.top_k > 0 && found < limit && !is_all) continue;
      std::sort(kept_.begin(), kept_.end(), std::greater<float>());
      masses_.resize(found);
      float mass = 0.0f;
      for (int place = 0; place < found; ++place) masses_[place] = mass += exp_of(kept_[place] - most);
      if (options.top_k == 0 && !(mass >= options.top_p * total) && !is_all) continue;
      const float wanted = options.top_p * (options.top_k > 0 ? mass : total);
      int count = 1;
      while (count < found && (masses_[count - 1] < wanted || options.top_p >= 1.0f)) ++count;
      return kept_[count - 1];
    }
  }

  void collect(const float* logits, float temperature, float from) {
    kept_.clear();
    int i = 0;
    for (; i + WIDTH <= size_; i += WIDTH) {
      const Floats scaled = load<Floats>(logits + i) / temperature;
      if (sum(Ints(scaled >= from)) == 0) continue;
      for (int lane = 0; lane < WIDTH; ++lane)
        if (scaled[lane] >= from) kept_.push_back(scaled[lane]);
    }
    for (; i < size_; ++i)
      if (logits[i] / temperature >= from) kept_.push_back(logits[i] / temperature);
  }

  // The token with the largest sum of logit over temperature and noise, among those of at least `lowest`.
  int64_t noisiest(const float* logits, float temperature, float lowest, const int32_t* key) const {
    float best = -INFINITY;
    int64_t token = 0;
    for (int first = 0; first < size_; first += WIDTH) {
      const int count = std::min(WIDTH, size_ - first);
      Floats scaled = splat(-INFINITY);
      if (count == WIDTH) {
        scaled = load<Floats>(logits + first) / temperature;
      } else {
        for (int i = 0; i < count; ++i) scaled[i] = logits[first + i] / temperature;
      }
      const Ints is_kept = scaled >= lowest;
      if (sum(is_kept) == 0) continue;
      Words ids;
      for (int i = 0; i < WIDTH; ++i) ids[i] = uint32_t(first + i);
      const Floats noisy = is_kept ? scaled + gumbel(ids, key) : splat(-INFINITY);
      if (sum(Ints(noisy > best)) == 0) continue;
      for (int i = 0; i < count; ++i) {
        if (!(noisy[i] > best)) continue;
        best = noisy[i];
        token = first + i;
      }
    }
    return token;
  }

  const int size_;
  std::vector<float> kept_, masses_;
};

// Sets the logits of tokens whose bit is not set to minus infinity. Most words of a grammar's mask are all or nothing.
inline void forbid(float* logits, int size, const uint32_t* bits) {
  for (int first = 0; first < size; first += 32, ++bits) {
    const int count = std::min(32, size - first);
    if (*bits == ~0u) continue;
    if (*bits == 0) {
      std::fill_n(logits + first, count, -INFINITY);
      continue;
    }
    for (int i = 0; i < count; ++i)
      if (!(*bits >> i & 1)) logits[first + i] = -INFINITY;
  }
}

// Draft trees of B requests of at most N nodes, and the logits at their nodes, request by request.
struct DraftTrees {
  int32_t num_trees, width, max_depth, vocab_size;
  const int64_t *tokens, *parents;  // [B, N]
  const int64_t* num_nodes;         // [B]
  const float* logits;              // [sum of num_nodes, V]; null: `choices` are known
  const int64_t* choices;           // [sum of num_nodes]: the token after each node, -1 where logits are not finite
  // [B]; seeds and what follows are null if all requests are greedy
  const int64_t* lengths;  // known tokens, the root included: positions of the first tokens to sample
  const int64_t* seeds;
  const float *temperature, *top_p, *min_p;
  const int64_t* top_k;
};

inline Options options_of(const DraftTrees& trees, int tree) {
  if (!trees.seeds) return {0.0f, 1.0f, 0.0f, 0};
  return {trees.temperature[tree], trees.top_p[tree], trees.min_p[tree], trees.top_k[tree]};
}

// Samples the target's tokens from a tree's root on, as far as they are nodes: tokens and nodes [max_depth + 1]. `root` is
// the root's row in `logits`. Returns the number of tokens; 0 if the logits are not finite.
inline int64_t walk(const DraftTrees& trees, int tree, int64_t root, Sampler& sample, int64_t* tokens, int64_t* nodes) {
  const int64_t *tree_tokens = trees.tokens + int64_t(tree) * trees.width;
  const int64_t *parents = trees.parents + int64_t(tree) * trees.width;
  const Options options = options_of(trees, tree);
  std::fill_n(tokens, trees.max_depth + 1, 0);
  std::fill_n(nodes, trees.max_depth + 1, 0);
  int64_t node = 0;
  for (int depth = 0;; ++depth) {
    int64_t token = -1;
    if (trees.logits) {
      const float* logits = trees.logits + (root + node) * trees.vocab_size;
      int32_t key[2] = {};
      if (trees.seeds) noise_key(trees.seeds[tree], trees.lengths[tree] + depth, key);
      token = sample(logits, options, key);
      if (!std::isfinite(logits[token])) return 0;
    } else {
      token = trees.choices[root + node];
      if (token < 0) return 0;
    }
    tokens[depth] = token;
    nodes[depth] = node;
    if (depth == trees.max_depth) return depth + 1;
    int64_t child = node + 1;  // of equal siblings, the first counts
    while (child < trees.num_nodes[tree] && !(parents[child] == node && tree_tokens[child] == token)) ++child;
    if (child == trees.num_nodes[tree]) return depth + 1;
    node = child;
  }
}

// The same to the tree's row of outcome [num_trees, 2 + 2 * (max_depth + 1)]: the number of tokens twice, the tokens, and
// the nodes from the root on.
inline void walk_to(const DraftTrees& trees, int tree, Sampler& sample, int64_t* outcome) {
  const int64_t levels = trees.max_depth + 1, root = std::accumulate(trees.num_nodes, trees.num_nodes + tree, int64_t{0});
  int64_t* row = outcome + tree * (2 + 2 * levels);
  row[0] = row[1] = walk(trees, tree, root, sample, row + 2, row + 2 + levels);
}

}  // namespace specray
