#include "kernels/cuda/prompts/cuda_prompts.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace dovetail::kernels::cuda {
namespace {

// Lengths share plans for powers of two and one and a half of them. Until the one for its prompts is made, a step runs
// a large one, powers of four from here on, of which there are so few that they are made ahead.
constexpr int32_t kLargeBatch = 8, kLargeTokens = 2048;

int32_t AtLeast(int64_t count, int32_t size) {
  while (size < count) size *= 4;
  return size;
}

int32_t RoundedTokens(int32_t tokens) {
  int32_t size = 64;
  while (size < tokens) size += size % 3 == 0 ? size / 3 : size / 2;
  return size;
}

// Whether every prompt has as many rows as the first, right behind the one before: cuDNN has a faster kernel for those.
bool AreEven(const CudaPrompts::Shape& shape, std::span<const CudaPrompts::Item> items) {
  const CudaPrompts::Item& first = items.front();
  const int64_t tokens = first.tokens;
  for (size_t i = 0; i < items.size(); ++i) {
    const CudaPrompts::Item& item = items[i];
    const int64_t rows = static_cast<int64_t>(i) * tokens;
    if (item.tokens != tokens || item.q_at != first.q_at + rows * shape.q_heads * shape.key_dim ||
        item.k_at != first.k_at + rows * shape.kv_heads * shape.key_dim ||
        item.v_at != first.v_at + rows * shape.kv_heads * shape.value_dim ||
        item.o_at != first.o_at + rows * shape.q_heads * shape.value_dim)
      return false;
  }
  return true;
}

PromptSize SizeOf(const CudaPrompts::Shape& shape) {
  PromptSize size;
  size.q_heads = shape.q_heads;
  size.kv_heads = shape.kv_heads;
  size.key_dim = shape.key_dim;
  size.value_dim = shape.value_dim;
  size.type = shape.type;
  size.scale = shape.scale;
  return size;
}

PromptSize LargeSizeOf(PromptSize size, int64_t items, int32_t most_tokens) {
  size.batch = AtLeast(items, kLargeBatch);
  size.most_tokens = AtLeast(most_tokens, kLargeTokens);
  return size;
}

PromptSize RoundedSizeOf(PromptSize size, int64_t items, int32_t most_tokens) {
  size.batch = static_cast<int32_t>(std::bit_ceil(static_cast<uint64_t>(items)));
  size.most_tokens = RoundedTokens(most_tokens);
  return size;
}

PromptSize OwnSizeOf(PromptSize size, std::span<const CudaPrompts::Item> items) {
  size.batch = static_cast<int32_t>(items.size());
  size.most_tokens = items.front().tokens;
  size.even = true;
  return size;
}

bool FitsOffsets(const CudaPrompts::Shape& shape, const CudaPrompts::Item& item) {
  const int64_t most = int64_t{item.tokens} * shape.q_heads * shape.key_dim;
  return std::max({item.q_at, item.k_at, item.v_at, item.o_at}) + most <= std::numeric_limits<int32_t>::max();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaPrompts>> CudaPrompts::Create(CudaDevice& device) {
  void* handle = nullptr;
  char text[1024] = {};
  const int error = device.library()->dnn_open(device.index(), &handle, text, sizeof(text));
  if (error == kDnnNotFound) return FailedPrecondition(device.name(), ": ", text);
  DT_RETURN_IF_ERROR(device.library().Check(error, device.name() + ": opening cuDNN"));
  return std::unique_ptr<CudaPrompts>(new CudaPrompts(device, handle, text));
}

CudaPrompts::~CudaPrompts() { device_.library()->dnn_close(handle_); }

void CudaPrompts::Expect(CudaDevice& device, const Shape& shape) {
  PromptPlanner& planner = device.prompt_planner();
  PromptSize size = SizeOf(shape);
  for (const auto& [items, tokens] : {std::pair{1, 1}, {1, kLargeTokens + 1}, {kLargeBatch + 1, 1}}) {
    for (const bool with_sums : {false, true}) {
      size.with_sums = with_sums;
      planner.Ask(LargeSizeOf(size, items, tokens));
    }
  }
}

absl::StatusOr<bool> CudaPrompts::Prepare(CudaStream& stream, const Shape& shape, std::span<const Item> items,
                                          Batch& batch) {
  batch.plan_ = nullptr;
  batch.size_ = {};
  if (items.empty()) return true;
  int32_t most_tokens = 0;
  bool joins = false;
  for (const Item& item : items) {
    if (!FitsOffsets(shape, item)) return false;
    most_tokens = std::max(most_tokens, item.tokens);
    joins = joins || item.first_node >= 0;
  }
  PromptSize size = SizeOf(shape);
  size.with_sums = joins;
  PromptPlanner::Plan plan = FindPlan(shape, items, most_tokens, size);
  if (plan == nullptr) return false;

  DT_RETURN_IF_ERROR(stream.UseDevice());
  const size_t sums = sizeof(float) * size.batch * size.q_heads * size.most_tokens;
  if (joins && (batch.sums_ == nullptr || batch.sums_->size_bytes() < sums)) {
    DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // what still runs reads the old ones
    DT_ASSIGN_OR_RETURN(batch.sums_, device_.Allocate(sums));
  }
  batch.size_ = size;
  batch.items_ = static_cast<int32_t>(items.size());
  batch.most_tokens_ = most_tokens;
  batch.first_ = items.front();
  DT_RETURN_IF_ERROR(UploadOffsets(stream, shape, items, batch));
  batch.plan_ = std::move(plan);
  return true;
}

PromptPlanner::Plan CudaPrompts::FindPlan(const Shape& shape, std::span<const Item> items, int32_t most_tokens,
                                          PromptSize& size) {
  if (AreEven(shape, items)) {
    const PromptSize own = OwnSizeOf(size, items);
    PromptPlanner::Answer answer = planner_.Find(own);
    if (answer.state == PromptPlanner::State::kReady) return size = own, std::move(answer.plan);
    if (answer.state == PromptPlanner::State::kUnknown && sizes_.Note(own)) planner_.Ask(own);
  }
  const auto count = static_cast<int64_t>(items.size());
  const PromptSize rounded = RoundedSizeOf(size, count, most_tokens);
  PromptPlanner::Answer answer = planner_.Find(rounded);
  if (answer.state == PromptPlanner::State::kReady) return size = rounded, std::move(answer.plan);
  size = LargeSizeOf(size, count, most_tokens);
  PromptPlanner::Plan large = planner_.Await(
      size, [this](const PromptSize& missing) { return MakePromptPlan(device_.library(), handle_, missing); });
  if (large != nullptr) planner_.Ask(rounded);
  return large;
}

absl::Status CudaPrompts::UploadOffsets(CudaStream& stream, const Shape& shape, std::span<const Item> items,
                                        Batch& batch) {
  const int32_t count = batch.size_.batch;
  batch.step_ = static_cast<size_t>((count + 1 + 63) / 64 * 64);
  DT_ASSIGN_OR_RETURN(std::byte* const host, batch.upload_.Begin(stream, 6 * batch.step_ * sizeof(int32_t)));
  auto* tokens = reinterpret_cast<int32_t*>(host);
  int32_t* const at[] = {tokens + batch.step_, tokens + 2 * batch.step_, tokens + 3 * batch.step_,
                         tokens + 4 * batch.step_};
  const Item& last = items.back();
  for (int32_t i = 0; i <= count; ++i) {
    const bool there = static_cast<size_t>(i) < items.size();
    const Item& item = there ? items[i] : last;
    const int64_t beyond = there ? 0 : last.tokens;
    if (i < count) tokens[i] = there ? item.tokens : 0;
    tokens[5 * batch.step_ + i] = there ? item.first_node : -1;
    at[0][i] = static_cast<int32_t>(item.q_at + beyond * shape.q_heads * shape.key_dim);
    at[1][i] = static_cast<int32_t>(item.k_at + beyond * shape.kv_heads * shape.key_dim);
    at[2][i] = static_cast<int32_t>(item.v_at + beyond * shape.kv_heads * shape.value_dim);
    at[3][i] = static_cast<int32_t>(item.o_at + beyond * shape.q_heads * shape.value_dim);
  }
  return batch.upload_.Send(stream);
}

absl::Status CudaPrompts::Run(CudaStream& stream, const Shape&, const Batch& batch, const void* q, const void* k,
                              const void* v, void* o) {
  if (batch.empty()) return absl::OkStatus();
  const auto* tokens = reinterpret_cast<const int32_t*>(batch.upload_.device());
  PromptCall call = CallOf(batch.size_);
  call.q = q, call.k = k, call.v = v, call.o = o;
  call.tokens = tokens;
  call.sums = batch.joins() ? reinterpret_cast<float*>(batch.sums_->data()) : nullptr;
  call.q_at = tokens + batch.step_;
  call.k_at = tokens + 2 * batch.step_;
  call.v_at = tokens + 3 * batch.step_;
  call.o_at = tokens + 4 * batch.step_;
  if (batch.size_.even) {
    constexpr int64_t kElement = 2;
    call.q = static_cast<const std::byte*>(q) + batch.first_.q_at * kElement;
    call.k = static_cast<const std::byte*>(k) + batch.first_.k_at * kElement;
    call.v = static_cast<const std::byte*>(v) + batch.first_.v_at * kElement;
    call.o = static_cast<std::byte*>(o) + batch.first_.o_at * kElement;
  }
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const int error = device_.library()->dnn_prompts(handle_, batch.plan_.get(), &call, stream.handle());
  if (error == kDnnRefused) return Internal(device_.name(), ": cuDNN failed to attend prompts that it had planned");
  return device_.library().Check(error, device_.name() + ": attending prompts");
}

absl::Status CudaPrompts::Join(CudaStream& stream, const Shape& shape, const Batch& batch, const float* partial_o,
                               const float* partial_ml, void* o) {
  if (!batch.joins()) return absl::OkStatus();
  if (partial_o == nullptr || partial_ml == nullptr || o == nullptr)
    return InvalidArgument("parts of prompts on a GPU: partials or o are null");
  const auto* tokens = reinterpret_cast<const int32_t*>(batch.upload_.device());
  JoinPromptsLaunch join;
  join.partial_o = partial_o;
  join.partial_ml = partial_ml;
  join.sums = reinterpret_cast<const float*>(batch.sums_->data());
  join.tokens = tokens;
  join.o_at = tokens + 4 * batch.step_;
  join.node = tokens + 5 * batch.step_;
  join.o = o;
  join.o_type = shape.type;
  join.batch = batch.items_;
  join.most_tokens = batch.most_tokens_;
  join.sums_tokens = batch.size_.most_tokens;
  join.heads = shape.q_heads;
  join.value_dim = shape.value_dim;
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return device_.library().Check(device_.library()->join_prompts(&join, stream.handle()),
                                 device_.name() + ": joining parts of prompts");
}

}  // namespace dovetail::kernels::cuda
