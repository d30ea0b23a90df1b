#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "kernels/cuda/prompts/prompt_planner.h"
#include "kernels/cuda/prompts/prompt_sizes.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/staged_upload.h"

namespace dovetail::kernels::cuda {

// Causal attention of prompts, or of parts of them, over their own rows by cuDNN, over q, k and v as rows: for those
// there is no need to go through KV blocks. What a part's rows see of earlier tokens is joined exactly, by their
// log-sum-exps; only what cuDNN stores has been rounded to 16 bits before. Its plans are the device's
// (CudaDevice::prompt_planner), made in a thread beside. Thread-compatible; must not outlive its device.
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
    bool empty() const { return plan_ == nullptr; }
    bool joins() const { return size_.with_sums && !empty(); }
    bool has_own_plan() const { return size_.even; }
    const PromptSize& plan_size() const { return size_; }

   private:
    friend class CudaPrompts;
    StagedUpload upload_;
    PromptPlanner::Plan plan_;  // held while what runs may need it; null: empty
    PromptSize size_;           // of the plan; even: all as long as it says, one right behind the other
    int32_t items_ = 0, most_tokens_ = 0;
    Item first_;
    std::unique_ptr<Buffer> sums_;  // log-sum-exps, where some prompt has earlier tokens
    size_t step_ = 0;               // elements from array to array
  };

  // kFailedPrecondition says what is missing.
  static absl::StatusOr<std::unique_ptr<CudaPrompts>> Create(CudaDevice& device);
  ~CudaPrompts();
  CudaPrompts(const CudaPrompts&) = delete;
  CudaPrompts& operator=(const CudaPrompts&) = delete;
  const std::string& version() const { return version_; }  // as in cuDNN 9.13.0

  // Prompts of this shape will come: has the plans made, in the background, that almost any of them can run, 2.6 s of
  // work for the first shape of a process, 1.6 of them for the first plan. Does not wait; any thread.
  static void Expect(CudaDevice& device, const Shape& shape);

  // Finds a plan for these prompts and enqueues the upload of their offsets. A large plan does for any; better ones are
  // made in the background and run from when they are there: one that lengths share, and for prompts as long as each
  // other, one right behind another, that come again (PromptSizes), one of their own, with which cuDNN is fastest.
  // Which plan it is may show in the last bits of o. Waits for a large plan only, 40 ms, or as long as Expect says
  // where nobody expected the shape. False: cuDNN does not attend them. No items: an empty batch.
  absl::StatusOr<bool> Prepare(CudaStream& stream, const Shape& shape, std::span<const Item> items, Batch& batch);
  // Enqueues one layer. Of prompts with earlier tokens: what their rows see among themselves, which Join completes.
  absl::Status Run(CudaStream& stream, const Shape& shape, const Batch& batch, const void* q, const void* k,
                   const void* v, void* o);
  // Joins the partials of the earlier tokens (CudaAttentionItem::one_node) to what Run has stored in o.
  absl::Status Join(CudaStream& stream, const Shape& shape, const Batch& batch, const float* partial_o,
                    const float* partial_ml, void* o);

 private:
  CudaPrompts(CudaDevice& device, void* handle, std::string version)
      : device_(device), planner_(device.prompt_planner()), handle_(handle), version_(std::move(version)) {}
  // The best plan that there is; `size`, of which batch, tokens and even are not set yet, becomes the plan's. Asks for
  // a better one. Null: cuDNN does not attend these.
  PromptPlanner::Plan FindPlan(const Shape& shape, std::span<const Item> items, int32_t most_tokens, PromptSize& size);
  absl::Status UploadOffsets(CudaStream& stream, const Shape& shape, std::span<const Item> items, Batch& batch);

  CudaDevice& device_;
  PromptPlanner& planner_;  // the device's
  void* const handle_;
  const std::string version_;
  PromptSizes sizes_;
};

}  // namespace dovetail::kernels::cuda
