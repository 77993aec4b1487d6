// A draft model's part of a step: draft extend over the tokens that the step committed, then trees below them.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "steps.h"
#include "trees.h"

namespace specray {

// A model that reads states, on a step's committed tokens `ids` [T] and `states` [T, hidden] of `type`. All members of a
// team call `run`.
class Extension {
 public:
  Extension(const DraftNetwork& network, const Step& step, const int64_t* ids, const void* states, int32_t type)
      : network_(network), step_(step), ids_(ids), states_(states), type_(type), size_(network.sizes.hidden),
        is_projected_(network.project.data != nullptr),
        stack_(network.layers, network.num_layers, network.sizes, int(step.count)),
        to_project_(form_of(network.project), is_projected_ ? int(step.count) : 0, network.project.ins),
        x_(step.count * 2 * size_), streams_(step.count * size_) {}

  // Phases of a run.
  static int num_phases(const DraftNetwork& network) { return Stack::num_phases(network.num_layers) + 2; }

  void run(Member& member) {
    const int count = int(step_.count);
    std::vector<float> state(size_);
    member.share(count, [&](int r) {
      float* x = x_.data() + int64_t(r) * 2 * size_;
      read_row(states_, type_, int64_t(r) * size_, size_, state.data());
      read_input(network_, ids_[r], state.data(), x, streams_.data() + int64_t(r) * size_);
      if (is_projected_) to_project_.set(r, x);
    });
    if (is_projected_) multiply_into(streams_.data(), size_, network_.project, to_project_, count, member);
    stack_.run(step_, is_projected_ ? streams_.data() : x_.data(), streams_.data(), Capture{}, member);
  }

  // What leaves the last layer at a row that is read, [hidden].
  const float* output(int64_t r) const { return streams_.data() + r * size_; }

 private:
  const DraftNetwork& network_;
  const Step step_;
  const int64_t* ids_;
  const void* states_;
  const int32_t type_;
  const int size_;
  const bool is_projected_;
  Stack stack_;
  Rows to_project_;
  std::vector<float> x_, streams_;
};

// The first states [rows, hidden], float32: at `places`, in this order, those of as many hidden states [.., fuse.ins] of
// `type`; elsewhere that of a mask.
class Fusion {
 public:
  static constexpr int NUM_PHASES = 2;

  Fusion(const DraftNetwork& network, int64_t rows, std::vector<int64_t> places)
      : network_(network), places_(std::move(places)), count_(int(places_.size())),
        rows_(form_of(network.fuse), count_, network.fuse.ins), states_(rows * network.sizes.hidden) {
    if (!network.mask_state) return;
    for (int64_t r = 0; r < rows; ++r)
      std::copy_n(network.mask_state, network.sizes.hidden, states_.data() + r * network.sizes.hidden);
  }

  void run(const void* hidden_states, int32_t type, Member& member) {
    const int width = network_.fuse.ins, parts = network_.num_norms;
    std::vector<float> row(width);
    member.share(count_, [&](int r) {
      read_row(hidden_states, type, int64_t(r) * width, width, row.data());
      for (int part = 0; part < parts; ++part) {
        const int first = part * (width / parts);
        norm(row.data() + first, network_.fuse_norms + first, width / parts, network_.sizes.eps, row.data() + first);
      }
      rows_.set(r, row.data());
    });
    const int size = network_.sizes.hidden;
    multiply(network_.fuse, rows_, count_, member, [&](int r, int channel, const float* values) {
      std::copy(values, values + std::min(LANES, size - channel), states_.data() + places_[r] * size + channel);
    });
  }

  const float* states() const { return states_.data(); }

 private:
  const DraftNetwork& network_;
  const std::vector<int64_t> places_;
  const int count_;
  Rows rows_;
  std::vector<float> states_;
};

// Draft extend: to what leaves the last layer, where that is read, `output` [T, hidden] of the states' type.
inline void extend(
    const DraftNetwork& network, const Step& step, const int64_t* ids, const void* states, void* output, int32_t type,
    int num_threads) {
  const int size = network.sizes.hidden;
  Extension extension(network, step, ids, states, type);
  run_on_team(num_threads, Extension::num_phases(network) + 1, [&](Member& member) {
    extension.run(member);
    member.share(int(step.count), [&](int r) { write_values(extension.output(r), size, output, type, int64_t(r) * size); });
  });
}

// What a step committed: positions `starts` to `ends` of each request. All earlier ones have KV in the model's pool.
struct Committed {
  int64_t count;                         // requests R
  const int64_t *slots, *starts, *ends;  // [R]
  const void* hidden_states;             // [T, fuse.ins] of `type`, or states [T, hidden]
  int32_t type;
};

// Draft extend, and the trees of the first `growth.num_trees` requests. `growth` lacks what follows from the requests:
// output, roots, positions, and the prefixes' KV slots. A child of the root, at `end` + 1, counts as `end`. What the
// arguments point to is read when all members of a team call `run`.
//
// A network with masks reads `num_levels` - 1 of them behind the tokens of each request that gets a tree. A mask attends
// to all rows before it and predicts a level of the tree. Its KV lies in a scratch slot and is discarded.
class Drafting {
 public:
  Drafting(const DraftNetwork& network, const RequestBuffer& buffer, const Committed& committed, const Growth& growth)
      : committed_(committed), growth_(growth), size_(network.sizes.hidden),
        num_outputs_(network.mask_state ? growth.num_levels : 1), query_lens_(committed.count),
        kv_lens_(committed.count), tree_sizes_(2 * committed.count), read_lens_(committed.count),
        last_(committed.count), roots_(growth.num_trees), output_(int64_t(growth.num_trees) * num_outputs_ * size_) {
    const int64_t count = committed.count, num_masks = num_outputs_ - 1;
    const int64_t width = *std::max_element(committed.ends, committed.ends + count) + num_masks;
    std::vector<int64_t> known;  // the rows of committed tokens
    kv_slots_.resize(count * width);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t end = committed.ends[r], first = int64_t(ids_.size()), length = end - committed.starts[r];
      resize_rows(first + length);
      build_extend(
          buffer, 1, committed.slots + r, committed.starts + r, committed.ends + r, ids_.data() + first,
          positions_.data() + first, written_.data() + first, last_.data() + r);
      last_[r] += first;
      for (int64_t place = first; place <= last_[r]; ++place) known.push_back(place);
      int64_t* kv_slots = kv_slots_.data() + r * width;
      gather_kv_slots(buffer, 1, committed.slots + r, nullptr, end, kv_slots);
      kv_lens_[r] = int32_t(end);
      if (r < growth.num_trees) {
        const int64_t* scratch = growth.scratch + r * growth.scratch_width;
        std::copy_n(scratch, num_masks, kv_slots + end);
        kv_lens_[r] += int32_t(num_masks);
        resize_rows(ids_.size() + num_masks);
        for (int64_t mask = 0; mask < num_masks; ++mask) {
          const int64_t place = last_[r] + 1 + mask;
          ids_[place] = network.mask_token;
          positions_[place] = std::min(end + mask, growth.last_position);
          written_[place] = scratch[mask];
        }
      }
      query_lens_[r] = int32_t(int64_t(ids_.size()) - first);
    }
    gather_cells(buffer, growth.num_trees, committed.slots, committed.ends, 0, roots_.data());
    std::fill_n(read_lens_.begin(), growth.num_trees, num_outputs_);
    const int64_t total = int64_t(ids_.size());

    Step step = draft_pass(network, growth, total, positions_.data(), written_.data());
    step.requests.count = int32_t(count);
    step.requests.slots_width = int32_t(width);
    step.requests.query_lens = query_lens_.data();
    step.requests.kv_lens = kv_lens_.data();
    step.requests.tree_sizes = tree_sizes_.data();
    step.requests.kv_slots = kv_slots_.data();
    step.read_lens = read_lens_.data();

    growth_.output = output_.data();
    growth_.roots = roots_.data();
    growth_.positions = committed.ends;
    growth_.kv_slots = kv_slots_.data();
    growth_.kv_lens = kv_lens_.data();
    growth_.slots_width = int32_t(width);

    if (network.fuse.data) fusion_.emplace(network, total, std::move(known));
    const void* states = fusion_ ? fusion_->states() : committed.hidden_states;
    extension_.emplace(network, step, ids_.data(), states, fusion_ ? int32_t(FLOAT32) : committed.type);
    if (network.mask_state)
      masked_trees_.emplace(network, growth_);
    else
      trees_.emplace(network, growth_);
  }
  Drafting(const Drafting&) = delete;  // its parts point to each other

  // Phases of a run.
  static int num_phases(const DraftNetwork& network, const Growth& growth) {
    const int of_trees = network.mask_state ? MaskedGrowth::NUM_PHASES : TreeGrowth::num_phases(network, growth);
    return Fusion::NUM_PHASES + Extension::num_phases(network) + 1 + of_trees;
  }

  void run(Member& member) {
    if (fusion_) fusion_->run(committed_.hidden_states, committed_.type, member);
    extension_->run(member);
    member.share(growth_.num_trees, [&](int tree) {
      const int64_t size = int64_t(num_outputs_) * size_;
      std::copy_n(extension_->output(last_[tree]), size, output_.data() + tree * size);
    });
    if (trees_) trees_->grow(member);
    if (masked_trees_) masked_trees_->grow(member);
  }

 private:
  void resize_rows(int64_t count) {
    for (std::vector<int64_t>* column : {&ids_, &positions_, &written_}) column->resize(count);
  }

  const Committed committed_;
  Growth growth_;
  const int size_, num_outputs_;  // the latter of each tree
  std::vector<int32_t> query_lens_, kv_lens_, tree_sizes_, read_lens_;
  std::vector<int64_t> ids_, positions_, written_, last_, kv_slots_, roots_;
  std::vector<float> output_;
  std::optional<Fusion> fusion_;
  std::optional<Extension> extension_;
  std::optional<TreeGrowth> trees_;
  std::optional<MaskedGrowth> masked_trees_;
};

inline void draft(
    const DraftNetwork& network, const RequestBuffer& buffer, const Committed& committed, const Growth& growth, int num_threads) {
  Drafting drafting(network, buffer, committed, growth);
  run_on_team(num_threads, Drafting::num_phases(network, growth), [&](Member& member) { drafting.run(member); });
}

}  // namespace specray
