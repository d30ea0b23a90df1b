#include "kernels/cuda/prompts/prompt_sizes.h"

#include <algorithm>

namespace dovetail::kernels::cuda {

bool PromptSizes::Note(const PromptSize& size) {
  auto it = std::find_if(seen_.begin(), seen_.end(), [&](const auto& seen) { return seen.first == size; });
  if (it == seen_.end()) {
    if (seen_.size() == kMost) seen_.erase(seen_.begin());
    seen_.emplace_back(size, 0);
    it = seen_.end() - 1;
  }
  std::rotate(it, it + 1, seen_.end());
  int& times = seen_.back().second;
  times = std::min(times + 1, kOften);
  return times == kOften;
}

}  // namespace dovetail::kernels::cuda
