#include "kernels/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

namespace dovetail::kernels {
namespace {

TEST(ThreadPool, RunsEveryTaskExactlyOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool({.threads = threads});
    for (const int tasks : {0, 1, 2, 7, 1000}) {
      std::vector<int> runs(tasks);
      pool.Run(tasks, [&](int task) { ++runs[task]; });
      EXPECT_EQ(runs, std::vector<int>(tasks, 1)) << threads << " threads";
    }
  }
}

TEST(ThreadPool, ShowsTheCallerWhatTheTasksWrote) {
  ThreadPool pool({.threads = 3});
  std::vector<int64_t> parts(16);  // plain memory: TSan says whether Run orders it
  for (int round = 0; round < 5000; ++round) {
    pool.Run(16, [&](int task) { parts[task] += task + round; });
  }
  const int64_t rounds = 5000 * int64_t{4999} / 2;
  for (int task = 0; task < 16; ++task) EXPECT_EQ(parts[task], rounds + 5000 * int64_t{task});
}

TEST(ThreadPool, LetsSeveralThreadsWorkOnOneJob) {
  ThreadPool pool({.threads = 2});
  std::atomic<int> inside{0};
  // Each task waits for the other: one thread alone would never end.
  pool.Run(2, [&](int) {
    inside.fetch_add(1);
    while (inside.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(inside.load(), 2);
}

TEST(ThreadPool, WakesThreadsThatWentToSleep) {
  ThreadPool pool({.threads = 2, .spin_us = 0});
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> inside{0};
    pool.Run(2, [&](int) {
      inside.fetch_add(1);
      while (inside.load() < 2) std::this_thread::yield();
    });
  }
}

TEST(ThreadPool, RunsACallFromInsideATaskOnThatThread) {
  ThreadPool pool({.threads = 3});
  std::atomic<int> inner{0};
  std::atomic<int> elsewhere{0};
  pool.Run(8, [&](int) {
    const std::thread::id self = std::this_thread::get_id();
    pool.Run(10, [&](int) {
      inner.fetch_add(1);
      if (std::this_thread::get_id() != self) elsewhere.fetch_add(1);
    });
  });
  EXPECT_EQ(inner.load(), 80);
  EXPECT_EQ(elsewhere.load(), 0);
}

TEST(ThreadPool, ServesCallersThatComeAtTheSameTime) {
  ThreadPool pool({.threads = 2});
  std::vector<int64_t> sums(4);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int round = 0; round < 500; ++round) {
        std::vector<int> values(20);
        pool.Run(20, [&](int task) { values[task] = task; });
        sums[c] += std::accumulate(values.begin(), values.end(), 0);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sums, std::vector<int64_t>(4, 500 * 190));
}

}  // namespace
}  // namespace dovetail::kernels
