// A step with drafts that begins before the host knows what the one before it committed.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <vector>

#include "draft.h"

namespace specray {

// What the step takes from the one before, whose pass verifies, and which has one row for each node of its trees.
struct DraftedStep {
  Verification before;
  const void* hidden_states;  // [rows of the step before, columns] of `type`; see Committed
  int32_t type;
  int32_t columns;
  const DraftNetwork* network;
  Growth growth;         // without the requests and where the trees go
  const int64_t* most;   // [B]: nodes of each tree that are verified
  const float* least;    // [B]: score that a verified node needs; null: any
  int64_t *tokens, *parents;  // [B, W]: receive this step's trees; W is 1 + growth.num_drafts
  int64_t* numbers;           // [4, B], see take_trees
  float* report;              // [3 + W, B]: `numbers` but the first, then the scores of the drafter's nodes
  double* draft_seconds;      // receives the time until the pass
};

// Draft extend over what the step before committed, the trees, and the forward pass over these with its verification.
class DraftedPass {
 public:
  // `step` has what is the same in all steps of the model. `pass` and `taps` have space for all nodes of the trees; ids,
  // places and counts of rows are not used.
  DraftedPass(
      const DraftedStep& drafted, const EmbedAndHead& model, const Layer* layers, int num_layers, const Sizes& sizes,
      const Step& step, const Pass& pass, const Taps& taps, int num_threads)
      : drafted_(drafted), model_(model), layers_(layers), num_layers_(num_layers), sizes_(sizes), step_(step), pass_(pass),
        verification_(*pass.verification), taps_(taps), num_threads_(num_threads) {
    pass_.verification = &verification_;
  }
  DraftedPass(const DraftedPass&) = delete;  // its parts point to each other

  static int num_phases(const DraftedStep& drafted, int num_layers) {
    return 2 + Drafting::num_phases(*drafted.network, drafted.growth) + ForwardPass::num_phases(num_layers);
  }

  void run(Member& member) {
    member.share(1, [&](int) { begin(); });
    if (!has_begun_.load(std::memory_order_acquire)) return;  // cancelled
    drafting_->run(member);
    member.share(1, [&](int) { make_pass(); });
    if (!has_pass_.load(std::memory_order_acquire)) return;
    forward_->run(member);
  }

 private:
  // Finds what the step before committed, whose tokens are in the table already. A request whose logits were not finite has
  // ended; so that it has a row, it counts as one that kept its root, and its next token is whatever the table has there.
  void begin() {
    start_ = std::chrono::steady_clock::now();
    const Verification& before = drafted_.before;
    const Outcome outcome{before.outcome, before.outcome_width()};
    const int count = before.trees.num_trees;
    const int64_t row_bytes = drafted_.columns * (drafted_.type == FLOAT32 ? 4 : 2);
    const char* rows = static_cast<const char*>(drafted_.hidden_states);
    starts_.resize(count);
    ends_.resize(count);
    is_broken_.resize(count);
    for (int r = 0; r < count; ++r) {
      const int64_t length = before.arena.row(before.slots[r])[before.arena.length_column];
      const int64_t kept = std::max<int64_t>(outcome.num_kept(r), 1);
      is_broken_[r] = outcome.num_kept(r) == 0;
      starts_[r] = length - outcome.num_emitted(r) - 1;
      ends_[r] = starts_[r] + kept;
      for (int64_t i = 0; i < kept; ++i) {
        const char* row = rows + (i ? outcome.nodes(r)[i] : 0) * row_bytes;
        hidden_states_.insert(hidden_states_.end(), row, row + row_bytes);
      }
      rows += before.trees.num_nodes[r] * row_bytes;
    }
    const int64_t size = int64_t(count) * (1 + drafted_.growth.num_drafts);
    grown_tokens_.resize(size);
    grown_parents_.resize(size);
    grown_scores_.resize(size);
    num_grown_.resize(count);
    Growth growth = drafted_.growth;
    growth.num_trees = count;
    growth.tokens = grown_tokens_.data();
    growth.parents = grown_parents_.data();
    growth.scores = grown_scores_.data();
    growth.num_nodes = num_grown_.data();
    if (growth.seeds) growth.ends = ends_.data();
    const Committed committed{count, before.slots, starts_.data(), ends_.data(), hidden_states_.data(), drafted_.type};
    drafting_ = std::make_unique<Drafting>(*drafted_.network, before.arena, committed, growth);
    has_begun_.store(true, std::memory_order_release);
  }

  // Takes the trees, and makes the pass over their nodes.
  void make_pass() {
    take_grown_trees();
    const Verification& before = drafted_.before;
    const int count = before.trees.num_trees, width = 1 + drafted_.growth.num_drafts;
    const int64_t* num_nodes = drafted_.numbers;
    int64_t kv_width = 0;
    for (int r = 0; r < count; ++r) {
      query_lens_.push_back(int32_t(num_nodes[r]));
      kv_lens_.push_back(int32_t(ends_[r] + num_nodes[r]));
      tree_sizes_.insert(tree_sizes_.end(), 2, num_nodes[r] > 1 ? int32_t(num_nodes[r]) : 0);
      kv_width = std::max<int64_t>(kv_width, kv_lens_[r]);
    }
    const int64_t total = std::accumulate(num_nodes, num_nodes + count, int64_t{0});
    const std::vector<int64_t> ones(count, 1);
    numbers_.resize(3 * total + count + count * kv_width);
    ancestors_.resize(int64_t(count) * width * width);
    const StepRows rows{count, width, before.slots, ends_.data(), ones.data(), drafted_.tokens, drafted_.parents, num_nodes};
    build_step(before.arena, rows, total, kv_width, numbers_.data(), ancestors_.data());
    step_.count = total;
    step_.positions = numbers_.data() + total;
    step_.written = numbers_.data() + 2 * total;
    const int64_t* kv_slots = numbers_.data() + 3 * total + count;
    step_.requests = {count, int32_t(kv_width), width, width, step_.requests.window, query_lens_.data(), kv_lens_.data(),
                      tree_sizes_.data(), kv_slots, ancestors_.data()};
    step_.read_lens = nullptr;
    pass_.ids = numbers_.data();
    pass_.places = nullptr;
    pass_.num_places = int32_t(total);
    forward_ = std::make_unique<ForwardPass>(model_, layers_, num_layers_, sizes_, step_, pass_, taps_, num_threads_);
    *drafted_.draft_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    has_pass_.store(true, std::memory_order_release);
  }

  void take_grown_trees() {
    const Verification& before = drafted_.before;
    const int count = before.trees.num_trees, width = 1 + drafted_.growth.num_drafts;
    const PendingTrees grown{
        grown_tokens_.data(), grown_parents_.data(), num_grown_.data(), grown_scores_.data(), width};
    std::vector<int64_t> places(count), roots(count);
    std::iota(places.begin(), places.end(), 0);
    gather_cells(before.arena, count, before.slots, ends_.data(), 0, roots.data());
    take_trees(
        grown, count, places.data(), roots.data(), drafted_.most, drafted_.least, model_.num_columns, drafted_.tokens,
        drafted_.parents, drafted_.numbers);
    // The drafter is not to blame for a request whose own logits are not finite: it ends without this tree.
    for (int r = 0; r < count; ++r)
      if (is_broken_[r]) drafted_.numbers[count + r] = drafted_.numbers[r];
    constexpr int NUM_COUNTS = 3;  // rows of the report before the scores
    for (int i = 0; i < NUM_COUNTS * count; ++i) drafted_.report[i] = float(drafted_.numbers[count + i]);
    for (int r = 0; r < count; ++r)
      for (int node = 0; node < width; ++node)
        drafted_.report[(NUM_COUNTS + node) * count + r] = grown_scores_[int64_t(r) * width + node];
  }

  const DraftedStep drafted_;
  const EmbedAndHead model_;
  const Layer* layers_;
  const int num_layers_;
  const Sizes sizes_;
  Step step_;
  Pass pass_;
  const Verification verification_;
  const Taps taps_;
  const int num_threads_;
  std::chrono::steady_clock::time_point start_;
  std::vector<int64_t> starts_, ends_, grown_tokens_, grown_parents_, num_grown_, numbers_;
  std::vector<int32_t> query_lens_, kv_lens_, tree_sizes_;
  std::vector<float> grown_scores_;
  std::vector<uint8_t> ancestors_, is_broken_;
  std::vector<char> hidden_states_;
  std::unique_ptr<Drafting> drafting_;
  std::unique_ptr<ForwardPass> forward_;
  std::atomic<bool> has_begun_{false}, has_pass_{false};
};

}  // namespace specray
