#pragma once
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/cluster/scenario.h"
#include "tests/cluster/test_engine.h"

namespace dovetail::test {

struct Outcome {
  std::string difference;  // from each request alone; empty: none
  uint64_t tokens = 0, preemptions = 0, prefix_hits = 0, prefill_groups = 0, gathered_bytes = 0, state_bytes = 0,
           chain_bytes = 0, direct_bytes = 0, ring_bytes = 0, switch_bytes = 0, pass_q_bytes = 0;
};

// Runs scenarios over the embedded cluster and compares every choice of every request, to the bit, with the same
// request alone: on one attention worker, one thread, its prompt in one chunk, without a prefix cache, a request of its
// own for each choice.
class ScenarioRunner {
 public:
  ScenarioRunner();

  // The models there are: the last one only where the test data is.
  const std::vector<TinyModelKind>& models() const { return models_; }

  Outcome Run(const Scenario& scenario);
  // The same requests over an engine that is built as the scenario says; also what it leaves behind.
  Outcome Run(const Scenario& scenario, engine::Engine& engine);
  // Bytes of KV that an attention worker of the scenario has.
  uint64_t KvBytesOfWorker(const Scenario& scenario);
  const std::filesystem::path& file(TinyModelKind kind) const { return files_.at(kind); }
  // Of one prompt scratch, in the units that ComputeWorkerTuning takes.
  static compute::ComputeWorkerTuning TuningOf(const Scenario& scenario);

  // The simplest scenario to be found that still differs; each candidate gets `attempts` runs, since threads race.
  Scenario Shrink(Scenario failing, int attempts);

 private:
  struct Choice {
    std::vector<TokenId> tokens;
    std::vector<std::vector<float>> logits;
    std::vector<proto::PositionLogprobs> logprobs, prompt_logprobs;
    std::vector<float> prompt_logits, pooled;
  };
  using Alone = std::tuple<TinyModelKind, bool, DType, KvStorage>;

  TestModel& Model(TinyModelKind kind, bool strongest_isa, int threads);
  engine::Engine& AloneEngine(const Alone& which);
  Choice RunAlone(const Alone& which, const RequestSpec& spec, int choice);
  std::string Compare(const Scenario& scenario, size_t index, const cli::CollectingSink& sink);
  static std::string CompareChoice(const Choice& alone, const cli::CollectingSink& sink, int choice, bool cancelled);

  std::vector<TinyModelKind> models_;
  std::map<TinyModelKind, std::filesystem::path> files_;
  std::map<std::tuple<TinyModelKind, bool, int>, std::unique_ptr<TestModel>> loaded_;
  std::map<Alone, std::unique_ptr<engine::EmbeddedCluster>> alone_;  // after loaded_: they refer to it
};

}  // namespace dovetail::test
