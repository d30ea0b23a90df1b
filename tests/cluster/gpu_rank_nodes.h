#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <ostream>
#include <vector>

#include "compute_worker/cuda/cuda_model.h"
#include "tests/cluster/rank_cluster.h"
#include "tests/cluster/tiny_model.h"

// Ranks of a prefill group on GPUs that die at frames that they send to others: the survivors repeat the group, the
// logits stay within the budget of those on a CPU, and nothing is held at the end. What ranks give each other goes from
// GPU to GPU by addresses, or as between processes: by names of memory, which the emulated GPU opens within a process,
// or through pinned memory, with frames that come late and twice. On one GPU there are two devices of it.

namespace dovetail::test {

struct GpuRanksCase {
  const char* name = "";
  const char* architecture = "llama";
  int window = 0;  // of gemma3
  bool rows_on_device = true;
  bool room = true;  // in each rank's scratch for its own tokens
  int ranks = 3;
  int heads = 4, kv_heads = 2;
  int offering = 0;  // RankClusterOptions

  friend std::ostream& operator<<(std::ostream& out, const GpuRanksCase& how) { return out << how.name; }
};

// Threads: thread-compatible.
class GpuRankNodes : public ::testing::TestWithParam<GpuRanksCase> {
 protected:
  // `crossed`: the bytes that count the exchange.
  GpuRankNodes(proto::PrefixExchange exchange, uint64_t scheduler::SchedulerStats::*crossed)
      : exchange_(exchange), crossed_(crossed) {}
  void SetUp() override;

  RankClusterOptions Options(uint64_t seed) const;
  void ExpectLogitsOfACpu(const Stream& ours, const Stream& of_cpu);

  // Each rank dies at every second frame that it sends to others.
  void ExpectThatTheOthersRepeatTheGroup();
  void ExpectNamesWhereTheyCanBeOpened() const;
  // A prompt whose groups begin inside of a segment of 64 tokens, behind a part that one worker took.
  void ExpectLogitsBehindPartOfASegment();
  // Prompts that begin alike: the later ones begin in the middle.
  void ExpectLogitsOfSeveralPromptsAndCachedPrefixes();

 private:
  const proto::PrefixExchange exchange_;
  uint64_t scheduler::SchedulerStats::*const crossed_;
  std::vector<std::unique_ptr<kernels::cuda::CudaDevice>> gpus_;
  std::unique_ptr<NodeModel> model_;
  std::vector<std::unique_ptr<model::LoadedModel>> loaded_;
  std::vector<std::unique_ptr<compute::CudaModel>> weights_;
  double worst_ = 0;
  int names_ = 0;  // of memory, in all clusters
};

}  // namespace dovetail::test
