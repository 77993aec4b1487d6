// The threads of this process's kernels: a caller and helpers that run one function together.
//
// Between two calls a helper spins for a moment, because a step makes its calls in quick succession, and then sleeps,
// because other processes of the cluster need the cores.
//
// A team that uses all cores gives each member one of its own. Otherwise the system may wake a helper on the caller's
// core, and both wait for each other: served SmolLM2 was a tenth slower, with EAGLE-3 a sixth.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "simd.h"

namespace specray {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// `meanwhile` does a little work and returns true, or false if there is none left.
template <class Condition, class Meanwhile>
inline void wait_until(Condition is_met, Meanwhile meanwhile) {
  constexpr int SPINS_BEFORE_YIELD = 4000;
  for (int spins = 0; !is_met(); ++spins) {
    if (meanwhile()) continue;
    if (spins < SPINS_BEFORE_YIELD)
      pause_cpu();
    else
      std::this_thread::yield();
  }
}

// One member's way through the phases of a run, which are the same for all members.
//
// A phase is over when all its items are done. Each member begins with a range of its own, so that it reads weights in
// long runs, and then takes what is left of others. A member whose core is busy with another process, or that wakes up
// late, delays the others by at most the item that it is working on.
class Member {
 public:
  // `counters` holds zeros: for each phase the number of items done, then of items taken from each member's range, APART
  // from each other.
  Member(std::atomic<int>* counters, int num_phases, int team_size, int number)
      : counters_(counters), num_phases_(num_phases), team_size_(team_size), number_(number) {}

  int number() const { return number_; }

  // Says that a later phase reads `count` items of `size` bytes each. While this member waits for others, it prefetches
  // its range of them.
  void will_read(const void* items, int count, int64_t size) {
    constexpr int64_t MOST = 256 << 10;  // bytes, a part of the L2 cache
    const int first = first_of(count, number_), end = first_of(count, number_ + 1);
    fetched_ = static_cast<const char*>(items) + first * size;
    fetch_end_ = fetched_ + std::min(MOST, (end - first) * size);
  }

  // Counters of a phase.
  static int stride(int team_size) { return (1 + team_size) * APART; }

  // Calls `work(item)` for the items that this member takes of `count`; returns when all of them are done.
  template <class Work>
  void share(int count, const Work& work) {
    if (team_size_ == 1) {
      for (int item = 0; item < count; ++item) work(item);
      return;
    }
    if (num_phases_-- == 0) std::abort();  // the caller of run_on_team counted wrong
    std::atomic<int>*done = counters_, *taken = counters_ + APART;
    counters_ += stride(team_size_);
    int mine = 0;
    for (int turn = 0; turn < team_size_; ++turn) {
      const int owner = (number_ + turn) % team_size_, first = first_of(count, owner), end = first_of(count, owner + 1);
      std::atomic<int>& next = taken[owner * APART];
      if (first + next.load(std::memory_order_relaxed) >= end) continue;  // without a write, so its owner keeps the cache line
      const auto take = [&] { return first + next.fetch_add(1, std::memory_order_relaxed); };
      for (int item = take(); item < end; item = take(), ++mine) work(item);
    }
    if (mine) done->fetch_add(mine, std::memory_order_acq_rel);
    wait_until([&] { return done->load(std::memory_order_acquire) == count; }, [&] { return fetch(); });
  }

 private:
  static constexpr int APART = LINE / sizeof(int);  // counters that different members write lie in different cache lines

  // Prefetches four cache lines of what is read later; false if none are left.
  bool fetch() {
    if (fetched_ >= fetch_end_) return false;
    for (int i = 0; i < 4; ++i, fetched_ += LINE) __builtin_prefetch(fetched_, TO_READ, LARGER_CACHES);
    return true;
  }

  int first_of(int count, int owner) const { return int((int64_t(count) * owner + team_size_ - 1) / team_size_); }

  std::atomic<int>* counters_;
  int num_phases_;
  const int team_size_, number_;
  const char *fetched_ = nullptr, *fetch_end_ = nullptr;  // what is still to be prefetched
};

class Team {
 public:
  static constexpr std::chrono::microseconds SPIN{60};

  explicit Team(int size) : size_(size), owner_(getpid()) {
    const bool is_known = sched_getaffinity(0, sizeof(cores_), &cores_) == 0;
    has_cores_ = size > 1 && is_known && CPU_COUNT(&cores_) == size;
    for (int member = 1; member < size; ++member) std::thread([this, member] { serve(member); }).detach();
  }

  int size() const { return size_; }
  bool is_usable() const { return getpid() == owner_; }  // threads do not survive a fork

  // Helpers begin with `work`, in which each member shares up to `num_phases` phases. Nothing else may start before `join`.
  void start(std::function<void(Member&)> work, int num_phases) {
    work_ = std::move(work);
    num_phases_ = num_phases;
    counters_ = std::vector<std::atomic<int>>(size_ > 1 ? num_phases * Member::stride(size_) : 0);
    if (size_ == 1) return;
    num_running_.store(size_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, size_);
  }

  // The caller takes part in what was started, as member 0; returns when all members have returned.
  void join() {
    if (has_cores_) take_core(0);
    take_part(0);
    wait_until([&] { return num_running_.load(std::memory_order_acquire) == 0; }, [] { return false; });
    // Back to all cores: processes that the caller starts inherit them.
    if (has_cores_) sched_setaffinity(0, sizeof(cores_), &cores_);
    work_ = nullptr;
  }

 private:
  // Keeps the calling thread on the member's core.
  void take_core(int member) const {
    int core = 0;
    for (int before = member; !CPU_ISSET(core, &cores_) || before-- > 0;) ++core;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    sched_setaffinity(0, sizeof(own), &own);
  }

  void take_part(int number) {
    Member member(counters_.data(), num_phases_, size_, number);
    work_(member);
  }

  void serve(int member) {
    if (has_cores_) take_core(member);
    uint32_t seen = 0;
    while (true) {
      await(seen);
      seen += 1;
      take_part(member);
      num_running_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  void await(uint32_t seen) {
    const auto start = std::chrono::steady_clock::now();
    for (int spins = 1; round_.load(std::memory_order_acquire) == seen; ++spins) {
      pause_cpu();
      if (spins % 64 == 0 && std::chrono::steady_clock::now() - start > SPIN) {
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        while (round_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, int(seen));
        num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
      }
    }
  }

  void futex(int operation, int value) { syscall(SYS_futex, &round_, operation, value, nullptr, nullptr, 0); }

  const int size_;
  const pid_t owner_;
  cpu_set_t cores_;  // that the creator of the team may use
  bool has_cores_ = false;
  std::vector<std::atomic<int>> counters_;
  std::function<void(Member&)> work_;
  int num_phases_ = 0;
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  alignas(64) std::atomic<int> num_running_{0};
};

// The teams of this process, and the runs that were started and not joined, oldest first: the first one runs.
//
// A caller may do other work between start and join, such as Python between two passes; the helpers compute meanwhile.
// One run at a time uses the cores. Who needs a run's results, or a team, first joins the runs before, whoever started
// them.
class Teams {
 public:
  static Teams& get() {
    static Teams* teams = new Teams;  // threads use it at exit
    return *teams;
  }

  // Starts `work(member)` on `num_threads` threads, at least one, after the runs before; each member shares up to
  // `num_phases` phases. Returns the run's number.
  int64_t start(int num_threads, int num_phases, std::function<void(Member&)> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    return start_locked(num_threads, num_phases, std::move(work));
  }

  // Returns when this run and those before it are done. The next one begins.
  void join(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    join_locked(number);
  }

  template <class Work>
  void run(int num_threads, int num_phases, const Work& work) {
    if (num_threads <= 1) {
      Member member(nullptr, num_phases, 1, 0);
      work(member);
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    join_locked(start_locked(num_threads, num_phases, [&](Member& member) { work(member); }));
  }

 private:
  struct Run {
    int64_t number;
    Team* team;
    int num_phases;
    std::function<void(Member&)> work;

    void begin() { team->start(std::move(work), num_phases); }
  };

  int64_t start_locked(int num_threads, int num_phases, std::function<void(Member&)> work) {
    open_.push_back({++num_started_, team_of(std::max(1, num_threads)), num_phases, std::move(work)});
    if (open_.size() == 1) open_.front().begin();
    return num_started_;
  }

  void join_locked(int64_t number) {
    while (!open_.empty() && open_.front().number <= number) {
      Team* team = open_.front().team;
      if (team->is_usable()) team->join();
      open_.pop_front();
      if (!open_.empty() && open_.front().team->is_usable()) open_.front().begin();
    }
  }

  Team* team_of(int size) {
    for (auto& known : teams_)
      if (known->size() == size && known->is_usable()) return known.get();
    teams_.push_back(std::make_unique<Team>(size));
    return teams_.back().get();
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Team>> teams_;
  std::deque<Run> open_;
  int64_t num_started_ = 0;
};

// Runs `work(member)` on `num_threads` threads, at least one; each shares up to `num_phases` phases.
template <class Work>
void run_on_team(int num_threads, int num_phases, const Work& work) {
  Teams::get().run(num_threads, num_phases, work);
}

}  // namespace specray
