// Work shared among threads, and memory of each.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

// torch's own OpenMP, whatever its file is called; without it everything is done by one thread
extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" __attribute__((weak)) int omp_get_thread_num();
extern "C" __attribute__((weak)) int omp_get_num_threads();

namespace normkit {

constexpr int64_t GRAIN = 32768;  // values that are worth a thread, as in torch

template <class F> struct Work {
  const F* body;
  int64_t count;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr thrown = nullptr;  // the first: one that left a thread would end the process
};

template <class F> void part_of(void* given) {
  auto& work = *static_cast<Work<F>*>(given);
  const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
  const int64_t begin = work.count * me / all, end = work.count * (me + 1) / all;
  try {
    if (begin < end) (*work.body)(begin, end);
  } catch (...) {
    if (!work.failed.test_and_set()) work.thrown = std::current_exception();
  }
}

// body(begin, end) for parts of ``count`` items with ``values`` values each
template <class F> void share(int threads, int64_t count, int64_t values, const F& body) {
  const int64_t most = std::min<int64_t>({threads, count, 1 + count * values / GRAIN});
  if (most < 2 || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) {
    body(0, count);
    return;
  }
  Work<F> work{&body, count};
  GOMP_parallel(part_of<F>, &work, unsigned(most), 0);
  if (work.thrown) std::rethrow_exception(work.thrown);
}

struct Scratch {  // of a thread, kept
  std::vector<char> memory;
  template <class A> A* take(int64_t count) {
    const size_t bytes = (count * sizeof(A) + 63) / 64 * 64 + 64;
    if (memory.size() < bytes) memory.resize(bytes);
    auto address = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;
    return reinterpret_cast<A*>(address);
  }
};
inline thread_local Scratch lanes_of_thread, parts_of_call;

}  // namespace normkit
