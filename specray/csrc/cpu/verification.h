// Verification of draft trees as a part of the pass that computes their logits.
#pragma once

#include <vector>

#include "kv_pool.h"
#include "sampling.h"
#include "steps.h"
#include "team.h"

namespace specray {

// What is verified, and where the outcome goes. All of a request's known tokens are computed in the pass, so that the root
// of its tree is the last token in the table.
struct Verification {
  DraftTrees trees;  // `logits`, `choices` and `lengths` are not used
  RequestBuffer buffer;
  const int64_t* slots;  // [B], of the table
  char* pool;            // the model's KV
  int64_t num_layers, layer_bytes, slot_bytes;
  int64_t* outcome;  // [B, 2 + 2 * (max_depth + 1)], see Outcome

  int64_t outcome_width() const { return 2 + 2 * (int64_t(trees.max_depth) + 1); }
};

// Walks the trees, and keeps the accepted paths: KV and tokens. All members of a team call `run`.
class Verifier {
 public:
  static constexpr int NUM_PHASES = 2;

  explicit Verifier(const Verification& verification) : verification_(verification), lengths_(verification.trees.num_trees) {}

  // Of the logits at all nodes, or of `choices`, the tokens after all nodes.
  void run(const float* logits, const int64_t* choices, Member& member) {
    DraftTrees trees = verification_.trees;
    trees.logits = logits;
    trees.choices = choices;
    trees.lengths = lengths_.data();
    Sampler sample(trees.vocab_size);
    member.share(trees.num_trees, [&](int tree) {
      lengths_[tree] = length(tree);
      walk_to(trees, tree, sample, verification_.outcome);
    });
    member.share(1, [&](int) { commit(); });
  }

 private:
  int32_t length(int tree) const {
    const RequestBuffer& buffer = verification_.buffer;
    return buffer.row(verification_.slots[tree])[buffer.length_column];
  }

  void commit() const {
    const Verification& v = verification_;
    const int count = v.trees.num_trees, width = v.trees.width;
    const Outcome outcome{v.outcome, v.outcome_width()};
    if (v.trees.max_depth) {
      std::vector<int64_t> roots(count), kv_slots(int64_t(count) * width);
      for (int tree = 0; tree < count; ++tree) roots[tree] = length(tree) - 1;
      gather_kv_slots(v.buffer, count, v.slots, roots.data(), width, kv_slots.data());
      move_kv(v.pool, int(v.num_layers), v.layer_bytes, v.slot_bytes, count, kv_slots.data(), width, outcome);
    }
    append_tokens(v.buffer, count, v.slots, outcome);
  }

  const Verification verification_;
  std::vector<int64_t> lengths_;
};

}  // namespace specray
