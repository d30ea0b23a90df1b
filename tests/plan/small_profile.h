#pragma once
#include "plan/device_profile.h"

namespace dovetail::plan {

// Round numbers, to predict with by hand: 1 ns a weight, 1 GB/s of K and V, 1 GFLOP/s of prompts.
inline DeviceProfile SmallProfile() {
  DeviceProfile profile;
  profile.name = "small";
  profile.dated = "2026-11-26";
  profile.device = "CPU of a test";
  profile.source = "a test";
  profile.memory_gb = 1;
  profile.reads = {{1, 2e9}};
  profile.products = {{"bf16", 2, {{1, 1e-9}, {101, 11e-9}}}};
  profile.attention = {{DType::kBF16, 64, 1, 1e9, 1e9}, {DType::kF32, 64, 1, 2e9, 1e9}};
  profile.states = {{64, true, false, 1e-9, 1e-10}};
  profile.links = {{"shm", 1e-5, 1e9}};
  profile.steps = {1e-3, 1e-4, 1e-5, 1e-6, 1e-9, 1e-9};
  return profile;
}

}  // namespace dovetail::plan
