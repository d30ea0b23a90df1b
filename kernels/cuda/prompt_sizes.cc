#include "kernels/cuda/prompt_sizes.h"

#include <algorithm>

namespace dovetail::kernels::cuda {

int& PromptSizes::TimesOf(const Size& size) {
  auto it = std::find_if(seen_.begin(), seen_.end(), [&](const auto& seen) { return seen.first == size; });
  if (it == seen_.end()) {
    if (seen_.size() == kMost) seen_.erase(seen_.begin());
    seen_.emplace_back(size, 0);
    it = seen_.end() - 1;
  }
  std::rotate(it, it + 1, seen_.end());
  return seen_.back().second;
}

bool PromptSizes::Note(const Size& size) {
  int& times = TimesOf(size);
  if (times != kRefused && times < kOften) ++times;
  return times == kOften;
}

void PromptSizes::Refuse(const Size& size) { TimesOf(size) = kRefused; }

bool PromptSizes::IsRefused(const Size& size) const {
  return std::find(seen_.begin(), seen_.end(), std::pair{size, kRefused}) != seen_.end();
}

}  // namespace dovetail::kernels::cuda
