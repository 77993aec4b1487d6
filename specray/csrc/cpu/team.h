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
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace specray {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  static constexpr std::chrono::microseconds SPIN{60};
  static constexpr int SPINS_BEFORE_YIELD = 4000;

  explicit Team(int size) : size_(size), owner_(getpid()) {
    const bool is_known = sched_getaffinity(0, sizeof(cores_), &cores_) == 0;
    has_cores_ = size > 1 && is_known && CPU_COUNT(&cores_) == size;
    for (int member = 1; member < size; ++member) std::thread([this, member] { serve(member); }).detach();
  }

  int size() const { return size_; }
  bool is_usable() const { return getpid() == owner_; }  // threads do not survive a fork

  // Runs `work(member)` on every member; returns when all have returned.
  void run(const std::function<void(int)>& work) {
    if (size_ == 1) return work(0);
    if (has_cores_) take_core(0);
    work_ = &work;
    num_running_.store(size_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, size_);
    work(0);
    wait_until([&] { return num_running_.load(std::memory_order_acquire) == 0; });
    // Back to all cores: processes that the caller starts inherit them.
    if (has_cores_) sched_setaffinity(0, sizeof(cores_), &cores_);
  }

  // Waits until every member of the running work has come here.
  void barrier() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      num_arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      wait_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

 private:
  template <class Condition>
  static void wait_until(Condition is_met) {
    for (int spins = 0; !is_met(); ++spins) {
      if (spins < SPINS_BEFORE_YIELD)
        pause_cpu();
      else
        std::this_thread::yield();
    }
  }

  // Keeps the calling thread on the member's core.
  void take_core(int member) const {
    int core = 0;
    for (int before = member; !CPU_ISSET(core, &cores_) || before-- > 0;) ++core;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    sched_setaffinity(0, sizeof(own), &own);
  }

  void serve(int member) {
    if (has_cores_) take_core(member);
    uint32_t seen = 0;
    while (true) {
      await(seen);
      seen += 1;
      (*work_)(member);
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
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  alignas(64) std::atomic<int> num_running_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// Runs `work(team, member)` on `num_threads` threads, at least one. One call at a time uses the team; another waits.
template <class Work>
void run_on_team(int num_threads, const Work& work) {
  num_threads = std::max(1, num_threads);
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Team>>* teams = new std::vector<std::unique_ptr<Team>>;  // threads use it at exit
  std::lock_guard<std::mutex> lock(mutex);
  Team* team = nullptr;
  for (auto& known : *teams)
    if (known->size() == num_threads && known->is_usable()) team = known.get();
  if (!team) {
    teams->push_back(std::make_unique<Team>(num_threads));
    team = teams->back().get();
  }
  team->run([&](int member) { work(*team, member); });
}

}  // namespace specray
