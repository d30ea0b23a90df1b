#pragma once
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/prompt_sizes.h"
#include "kernels/cuda/staged_upload.h"

namespace dovetail::kernels::cuda {

// Causal attention of prompts, or of parts of them, over their own rows by cuDNN, over q, k and v as rows: for those
// there is no need to go through KV blocks. What a part's rows see of earlier tokens is joined exactly, by their
// log-sum-exps; only what cuDNN stores has been rounded to 16 bits before. Thread-compatible; must not outlive its
// device.
class CudaPrompts {
 public:
  static constexpr int kLeastRows = 48;  // below, the paged kernel is as good

  struct Shape {
    int32_t q_heads = 0, kv_heads = 0, key_dim = 0, value_dim = 0;
    WireType type = WireType::kBF16;
    float scale = 0;
  };
  // Where a prompt's rows begin, in elements from Run's pointers; 32 bits hold them.
  struct Item {
    int32_t tokens = 0;
    int64_t q_at = 0, k_at = 0, v_at = 0, o_at = 0;
    // What the rows see of earlier tokens comes as partials, one a row, from this one on; negative: there is nothing.
    int32_t first_node = -1;
  };
  // The prompts of a step, for all its ops.
  class Batch {
   public:
    explicit Batch(CudaDevice& device) : upload_(device) {}
    bool empty() const { return batch_ == 0; }
    bool joins() const { return joins_ && batch_ > 0; }
    bool has_own_plan() const { return even_; }

   private:
    friend class CudaPrompts;
    StagedUpload upload_;
    int32_t batch_ = 0, most_tokens_ = 0;
    bool even_ = false;             // all as long as their plan says, one right behind the other
    Item first_;
    bool joins_ = false;            // some prompt has earlier tokens
    std::unique_ptr<Buffer> sums_;  // then: log-sum-exps
    size_t step_ = 0;  // elements from array to array
  };

  // kFailedPrecondition says what is missing.
  static absl::StatusOr<std::unique_ptr<CudaPrompts>> Create(CudaDevice& device);
  ~CudaPrompts();
  CudaPrompts(const CudaPrompts&) = delete;
  CudaPrompts& operator=(const CudaPrompts&) = delete;
  const std::string& version() const { return version_; }  // as in cuDNN 9.13.0

  // Makes the plan of these prompts, which may allocate and take some tens of milliseconds the first time, and enqueues
  // the upload of their offsets. Lengths share plans, but for prompts as long as each other, one right behind another,
  // that have come often (PromptSizes) or are as long as a plan: cuDNN is faster with those. Which plan it is may show
  // in the last bits of o. False: cuDNN does not attend them. No items: an empty batch.
  absl::StatusOr<bool> Prepare(CudaStream& stream, const Shape& shape, std::span<const Item> items, Batch& batch);
  // Enqueues one layer. Of prompts with earlier tokens: what their rows see among themselves, which Join completes.
  absl::Status Run(CudaStream& stream, const Shape& shape, const Batch& batch, const void* q, const void* k,
                   const void* v, void* o);
  // Joins the partials of the earlier tokens (CudaAttentionItem::one_node) to what Run has stored in o.
  absl::Status Join(CudaStream& stream, const Shape& shape, const Batch& batch, const float* partial_o,
                    const float* partial_ml, void* o);

 private:
  using Kind = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>;

  CudaPrompts(CudaDevice& device, void* handle, std::string version)
      : device_(device), handle_(handle), version_(std::move(version)) {}
  // Of even prompts: a plan of their own, the one that they would share.
  bool IsWorthwhile(const PromptCall& own, const PromptCall& shared);

  CudaDevice& device_;
  void* const handle_;
  const std::string version_;
  std::set<Kind> refused_;
  PromptSizes sizes_;
};

}  // namespace dovetail::kernels::cuda
