#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "kernels/cuda/prompts/prompt_planner.h"

namespace dovetail::kernels::cuda {

// Which sizes of prompts come again, so that a plan for exactly them is worth making. Making one takes 40 ms of a
// thread that no step waits for, and holds up one step by 1.4 ms; with it the attention of a prompt takes a seventh
// less, 0.2 ms (1,000 tokens) or 0.5 ms (2,000) in 32 layers. Most lengths never come again and share plans; prompts of
// a template do, and parts of prompts beside a steady number of decoding sequences. Forgets the size that came least
// recently. Thread-compatible.
class PromptSizes {
 public:
  static constexpr size_t kMost = 48;  // sizes remembered; a plan of each fits into PromptPlanner::kMostPlans
  static constexpr int kOften = 2;     // times it comes before it has a plan of its own

  // `size` came. True from the kOften-th time on.
  bool Note(const PromptSize& size);

 private:
  std::vector<std::pair<PromptSize, int>> seen_;  // and how often; the last came last
};

}  // namespace dovetail::kernels::cuda
