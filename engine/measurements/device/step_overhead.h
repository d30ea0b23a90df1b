#pragma once
#include "base/status.h"
#include "kernels/device.h"
#include "plan/device_profile.h"

namespace dovetail::engine {

// What steps take beyond products and attention, from small models without weights in an EmbeddedCluster on `device`.
// `profile` has the products and the attention that are subtracted. `threads` are those of the device. Blocks for
// about ten seconds; writes a config.json to the folder for temporary files.
// Errors: those of EmbeddedCluster; kResourceExhausted without a temporary folder.
// Threads: one measurement of a device at a time.
absl::StatusOr<plan::StepOverhead> MeasureStepOverhead(kernels::Device& device, int threads,
                                                       const plan::DeviceProfile& profile);

// What the steps of seven small models were measured to take, in seconds; a step has one token of each sequence.
struct OverheadSamples {
  struct Model {
    double alone = 0, batch = 0;  // one sequence; `sequences` of them
  };
  Model few, many;            // layers, of a narrow model, whose products are read from caches and count as calls
  Model few_wide, many_wide;  // products subtracted
  Model large_vocabulary;     // as `few`; the product for what its vocabulary has more is subtracted
  // One sequence; all layers linear, otherwise as `few` and `many`; what a profile says of their states is subtracted.
  double few_linear = 0, many_linear = 0;
  int few_layers = 0, many_layers = 0, few_wide_layers = 0, many_wide_layers = 0;
  double narrow_values = 0, wide_values = 0;  // of a layer and token: what its products read and write
  int sequences = 2;
  double more_vocabulary = 0;  // entries of the large vocabulary less those of the small one
};
// Solves for the parts, none below 0.
// Threads: pure.
plan::StepOverhead FitOverhead(const OverheadSamples& samples);

}  // namespace dovetail::engine
