#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "plan/device_profile.h"
#include "plan/model_work.h"
#include "proto/step_plan.h"

// How long a step takes on devices whose profiles are known: a roofline with measured rates.
// Threads: pure.

namespace dovetail::plan {

// Seconds, by what they are spent on.
struct StepParts {
  double weights_s = 0;     // reading them: what the products of one row would take
  double arithmetic_s = 0;  // what more rows add to that
  double prompts_s = 0;     // attention over prompts, on the compute worker
  double attention_s = 0;   // decodes: reading K, V and states, on the attention worker that has most to do
  double link_s = 0;        // what crosses between the two
  double overhead_s = 0;    // the rest

  void Add(const StepParts& other);
  double Sum() const;
};

enum class Bound : uint8_t { kWeights, kArithmetic, kPrompts, kKvReads, kLink, kOverhead };
const char* NameOf(Bound bound);
Bound LargestOf(const StepParts& parts);

struct StepCost {
  struct Worker {
    WorkerId worker;
    double seconds = 0;
  };
  StepParts parts;
  double compute_s = 0;           // the compute worker is busy for so long
  std::vector<Worker> attention;  // and each attention worker
  double link_s = 0;
  // As results of steps report it, for the scheduler's planners.
  proto::PromptWork work;
  double linear_s = 0;  // of prompts_s
};

// Where attention runs, if not on the compute workers' own device.
struct OtherDevice {
  DeviceProfile profile;
  LinkRates link;
};

class StepModel {
 public:
  // kNotFound names the device and the rate that its profile lacks for this model.
  static absl::StatusOr<StepModel> Create(const ModelWork& work, const DeviceProfile& compute,
                                          const std::optional<OtherDevice>& attention);

  // Model: products by their rows; prompts of kLeastPlannedPrompt and more tokens attend on the compute worker, which
  //        has the tokens before them, but those of a rank of a prefill group, which asks the attention workers about
  //        tokens before its own; decodes read what they see once; each attention op crosses the link twice.
  StepCost CostOf(const proto::StepPlan& plan) const;

  // Bytes of all weights, as the compute workers' device keeps them.
  double weight_bytes() const { return weight_bytes_; }
  bool split() const { return attention_.has_value(); }
  bool computes_on_gpu() const { return compute_.on_gpu(); }

 private:
  struct Group {  // of attention ops
    bool linear = false;
    int ops = 0;
    double decode_rate = 0;       // bytes/s; of linear ones seconds for a value
    double prompt_rate = 0;       // FLOP/s; seconds for a value
    double asked_rate = 0;        // FLOP/s on the attention worker
    double values_of_a_head = 0;  // linear
    double token_bytes = 0;       // of a KV head: K and V of a token
    double answer_bytes = 0;      // over the link, of a query head and row: q and o
    double append_bytes = 0;      // over the link, of a KV head and row: k and v
  };

  StepModel(const ModelWork& work, const DeviceProfile& compute, const std::optional<OtherDevice>& attention)
      : work_(work), compute_(compute), attention_(attention) {}
  absl::Status Init();
  absl::Status AddGroup(LayerGroup id);
  double ProductSeconds(double rows, double drawn) const;
  void AddDecode(const proto::StepEntry& entry, StepCost& cost, std::vector<double>& link_bytes) const;
  void AddPrompt(const proto::StepPlan& plan, const proto::StepEntry& entry, StepCost& cost,
                 std::vector<double>& link_bytes) const;
  static size_t PlaceOf(WorkerId worker, StepCost& cost, std::vector<double>& link_bytes);

  ModelWork work_;
  DeviceProfile compute_;
  std::optional<OtherDevice> attention_;
  std::vector<Group> groups_;
  double weight_bytes_ = 0;
  double layer_values_ = 0;  // of all layers' products, for a row
  int linear_layers_ = 0;
  double cached_ = 0;  // share of the weights that is read from caches
};

}  // namespace dovetail::plan
