// Runs the body of a GPU kernel on the CPU: a fiber for each thread of a threadgroup, in an order that a seed decides.
// It finds reads and writes beyond an array, threadgroup memory that is read before it is written (it is NaN at first),
// simd operations and barriers that not all threads reach, and, as results that depend on the seed, missing barriers.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace shim {

enum State { READY, IN_SIMD, AT_BARRIER, DONE };

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  State state = READY;
  int line = 0;
  float value = 0;
};

struct SharedArray {
  int line;
  std::vector<float> numbers;
};

// The threadgroup that runs. There is one at a time.
struct Threadgroup {
  std::vector<Thread> threads;
  std::vector<SharedArray> shared;
  ucontext_t scheduler;
  int current = 0, x = 0, y = 0;
  std::string error;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
};

inline Threadgroup group;

inline Thread& self() { return group.threads[group.current]; }

inline void stop(State state, int line) {
  self().state = state;
  self().line = line;
  swapcontext(&self().context, &group.scheduler);
}

// Notes the first error, and never returns to the thread.
inline void fail(const std::string& what) {
  if (group.error.empty()) {
    group.error = what + ", threadgroup " + std::to_string(group.x) + "," + std::to_string(group.y) + ", thread " +
                  std::to_string(group.current);
  }
  stop(DONE, 0);
}

inline float simd_sum(float value, int line) {
  self().value = value;
  stop(IN_SIMD, line);
  return self().value;
}

template <class T>
struct Array {  // an argument, which knows its bounds
  T* data;
  int64_t size;
  const char* name;
  T& operator[](int64_t at) const {
    if (at < 0 || at >= size) fail(std::string(name) + "[" + std::to_string(at) + "] of " + std::to_string(size));
    return data[at];
  }
};

inline Array<float> threadgroup_array(int64_t size, int line, const char* name) {
  for (auto& array : group.shared)
    if (array.line == line) return {array.numbers.data(), size, name};
  group.shared.push_back({line, std::vector<float>(size, std::numeric_limits<float>::quiet_NaN())});
  return {group.shared.back().numbers.data(), size, name};
}

inline void entry() {
  group.body(group.arguments);
  stop(DONE, 0);
}

// Lets the 32 threads of a simdgroup run to where they stop, and does their simd operation.
inline void step(int simdgroup, std::mt19937& random) {
  std::vector<int> lanes(32);
  std::iota(lanes.begin(), lanes.end(), 32 * simdgroup);
  std::shuffle(lanes.begin(), lanes.end(), random);
  for (int lane : lanes) {
    group.current = lane;
    swapcontext(&group.scheduler, &group.threads[lane].context);
    if (!group.error.empty()) return;
  }
  auto* first = &group.threads[32 * simdgroup];
  float sum = 0;
  for (int lane = 0; lane < 32; lane++) {
    if (first[lane].state != first->state || first[lane].line != first->line) return fail("threads of a simdgroup part");
    sum += first[lane].value;
  }
  if (first->state != IN_SIMD) return;
  for (int lane = 0; lane < 32; lane++) {
    first[lane].value = sum;
    first[lane].state = READY;
  }
}

inline void run_threadgroup(int threads, std::mt19937& random) {
  group.shared.clear();
  group.shared.reserve(64);
  group.threads.resize(threads);
  for (auto& thread : group.threads) {
    thread.state = READY;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
  }
  while (group.error.empty()) {
    std::vector<int> ready;
    for (int s = 0; s < threads / 32; s++)
      if (group.threads[32 * s].state == READY) ready.push_back(s);
    if (!ready.empty()) {
      step(ready[random() % ready.size()], random);
      continue;
    }
    auto& first = group.threads[0];
    if (first.state == DONE && std::all_of(group.threads.begin(), group.threads.end(), [](auto& t) { return t.state == DONE; })) return;
    for (auto& thread : group.threads) {
      if (thread.state != AT_BARRIER || thread.line != first.line) {
        group.error = "not all threads reach a barrier";
        return;
      }
      thread.state = READY;
    }
  }
}

// Runs `body` for a grid of threadgroups. Returns what went wrong, or nothing.
inline std::string run(int groups_x, int groups_y, int threads, unsigned seed, void (*body)(void*), void* arguments) {
  std::mt19937 random(seed);
  group.error.clear();
  group.body = body;
  group.arguments = arguments;
  for (group.y = 0; group.y < groups_y; group.y++)
    for (group.x = 0; group.x < groups_x; group.x++) {
      run_threadgroup(threads, random);
      if (!group.error.empty()) return group.error;
    }
  return "";
}

struct bfloat16 {
  uint16_t bits;
  explicit bfloat16(float number) {
    uint32_t word;
    std::memcpy(&word, &number, 4);
    bits = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float number;
    std::memcpy(&number, &word, 4);
    return number;
  }
};

}  // namespace shim

#define SIMD_SUM(x) shim::simd_sum(x, __LINE__)
#define BARRIER() shim::stop(shim::AT_BARRIER, __LINE__)
#define EXP(x) std::exp(x)
#define LOG(x) std::log(x)
#define MAX(a, b) std::max(a, b)
#define MIN(a, b) std::min(a, b)
