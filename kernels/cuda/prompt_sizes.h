#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dovetail::kernels::cuda {

// Which sizes of prompts come so often that a plan for exactly them is worth making. Making one takes some 40 ms, and
// with it the attention of a prompt takes a seventh less, 0.2 ms (1,000 tokens) or 0.5 ms (2,000) in 32 layers: a size
// has its own once it has lost about that much. Most lengths never do and share plans; prompts of a template do, and
// parts of prompts beside a steady number of decoding sequences. Forgets the size that came least recently.
// Thread-compatible.
class PromptSizes {
 public:
  static constexpr size_t kMost = 24;  // sizes remembered; a plan of each fits into kMostDnnPlans
  static constexpr int kOften = 100;   // times it comes before it has a plan of its own
  // Query heads, KV heads, key and value dimensions, type, prompts, tokens of each, with log-sum-exps.
  using Size = std::array<int32_t, 8>;

  // `size` came. True from the kOften-th time on.
  bool Note(const Size& size);
  // It cannot have a plan of its own: Note says false for as long as it is remembered.
  void Refuse(const Size& size);
  bool IsRefused(const Size& size) const;

 private:
  static constexpr int kRefused = -1;
  int& TimesOf(const Size& size);  // which becomes the last

  std::vector<std::pair<Size, int>> seen_;  // and how often; the last came last
};

}  // namespace dovetail::kernels::cuda
