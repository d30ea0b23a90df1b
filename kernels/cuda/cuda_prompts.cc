#include "kernels/cuda/cuda_prompts.h"

#include <algorithm>
#include <limits>

namespace dovetail::kernels::cuda {
namespace {

// Plans are made for few sizes: powers of two, and one and a half of them.
int32_t RoundedTokens(int32_t tokens) {
  int32_t size = 64;
  while (size < tokens) size += size % 3 == 0 ? size / 3 : size / 2;
  return size;
}

int32_t RoundedBatch(size_t items) {
  int32_t size = 1;
  while (static_cast<size_t>(size) < items) size *= 2;
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

PromptCall CallOf(const CudaPrompts::Shape& shape) {
  PromptCall call{};
  call.q_heads = shape.q_heads;
  call.kv_heads = shape.kv_heads;
  call.key_dim = shape.key_dim;
  call.value_dim = shape.value_dim;
  call.type = shape.type;
  call.scale = shape.scale;
  return call;
}

PromptCall OwnPlanOf(PromptCall call, std::span<const CudaPrompts::Item> items) {
  call.batch = static_cast<int32_t>(items.size());
  call.most_tokens = items.front().tokens;
  call.even = 1;
  return call;
}

PromptSizes::Size SizeOf(const PromptCall& call) {
  return {call.q_heads, call.kv_heads, call.key_dim, call.value_dim, static_cast<int32_t>(call.type), call.batch,
          call.most_tokens, call.with_sums};
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

absl::StatusOr<bool> CudaPrompts::Prepare(CudaStream& stream, const Shape& shape, std::span<const Item> items,
                                          Batch& batch) {
  batch.batch_ = 0;
  batch.joins_ = std::any_of(items.begin(), items.end(), [](const Item& item) { return item.first_node >= 0; });
  if (items.empty()) return true;
  const Kind kind{shape.q_heads, shape.kv_heads, shape.key_dim, shape.value_dim, static_cast<int32_t>(shape.type)};
  if (refused_.contains(kind)) return false;
  PromptCall call = CallOf(shape);
  call.batch = RoundedBatch(items.size());
  for (const Item& item : items) {
    call.most_tokens = std::max(call.most_tokens, RoundedTokens(item.tokens));
    for (const int64_t at : {item.q_at, item.k_at, item.v_at, item.o_at})
      if (at + int64_t{item.tokens} * shape.q_heads * shape.key_dim > std::numeric_limits<int32_t>::max()) return false;
  }
  call.with_sums = batch.joins_ ? 1 : 0;
  batch.first_ = items.front();
  DT_RETURN_IF_ERROR(stream.UseDevice());
  int error = kDnnRefused;
  if (const PromptCall own = OwnPlanOf(call, items); AreEven(shape, items) && IsWorthwhile(own, call)) {
    error = device_.library()->dnn_prompts(handle_, &own, stream.handle());
    if (error == 0) call = own;
    if (error == kDnnRefused) sizes_.Refuse(SizeOf(own));
  }
  if (error == kDnnRefused) error = device_.library()->dnn_prompts(handle_, &call, stream.handle());
  batch.even_ = call.even != 0;
  if (error == kDnnRefused) {
    refused_.insert(kind);
    return false;
  }
  DT_RETURN_IF_ERROR(device_.library().Check(error, device_.name() + ": planning prompts"));

  const size_t sums = sizeof(float) * call.batch * call.q_heads * call.most_tokens;
  if (batch.joins_ && (batch.sums_ == nullptr || batch.sums_->size_bytes() < sums)) {
    DT_RETURN_IF_ERROR(stream.SynchronizeStatus());  // what still runs reads the old ones
    DT_ASSIGN_OR_RETURN(batch.sums_, device_.Allocate(sums));
  }
  batch.step_ = static_cast<size_t>((call.batch + 1 + 63) / 64 * 64);
  DT_ASSIGN_OR_RETURN(std::byte* const host, batch.upload_.Begin(stream, 6 * batch.step_ * sizeof(int32_t)));
  auto* tokens = reinterpret_cast<int32_t*>(host);
  int32_t* const at[] = {tokens + batch.step_, tokens + 2 * batch.step_, tokens + 3 * batch.step_,
                         tokens + 4 * batch.step_};
  const Item& last = items.back();
  for (int32_t i = 0; i <= call.batch; ++i) {
    const bool there = static_cast<size_t>(i) < items.size();
    const Item& item = there ? items[i] : last;
    const int64_t beyond = there ? 0 : last.tokens;
    if (i < call.batch) tokens[i] = there ? item.tokens : 0;
    tokens[5 * batch.step_ + i] = there ? item.first_node : -1;
    at[0][i] = static_cast<int32_t>(item.q_at + beyond * shape.q_heads * shape.key_dim);
    at[1][i] = static_cast<int32_t>(item.k_at + beyond * shape.kv_heads * shape.key_dim);
    at[2][i] = static_cast<int32_t>(item.v_at + beyond * shape.kv_heads * shape.value_dim);
    at[3][i] = static_cast<int32_t>(item.o_at + beyond * shape.q_heads * shape.value_dim);
  }
  DT_RETURN_IF_ERROR(batch.upload_.Send(stream));
  batch.batch_ = call.batch;
  batch.most_tokens_ = call.most_tokens;
  return true;
}

bool CudaPrompts::IsWorthwhile(const PromptCall& own, const PromptCall& shared) {
  const PromptSizes::Size size = SizeOf(own);
  if (own.batch == shared.batch && own.most_tokens == shared.most_tokens) return !sizes_.IsRefused(size);
  return sizes_.Note(size);
}

absl::Status CudaPrompts::Run(CudaStream& stream, const Shape& shape, const Batch& batch, const void* q, const void* k,
                              const void* v, void* o) {
  if (batch.empty()) return absl::OkStatus();
  const auto* tokens = reinterpret_cast<const int32_t*>(batch.upload_.device());
  PromptCall call = CallOf(shape);
  call.batch = batch.batch_;
  call.most_tokens = batch.most_tokens_;
  call.q = q, call.k = k, call.v = v, call.o = o;
  call.tokens = tokens;
  call.with_sums = batch.joins_ ? 1 : 0;
  call.sums = batch.joins_ ? reinterpret_cast<float*>(batch.sums_->data()) : nullptr;
  call.q_at = tokens + batch.step_;
  call.k_at = tokens + 2 * batch.step_;
  call.v_at = tokens + 3 * batch.step_;
  call.o_at = tokens + 4 * batch.step_;
  if (batch.even_) {
    constexpr int64_t kElement = 2;
    call.even = 1;
    call.q = static_cast<const std::byte*>(q) + batch.first_.q_at * kElement;
    call.k = static_cast<const std::byte*>(k) + batch.first_.k_at * kElement;
    call.v = static_cast<const std::byte*>(v) + batch.first_.v_at * kElement;
    call.o = static_cast<std::byte*>(o) + batch.first_.o_at * kElement;
  }
  DT_RETURN_IF_ERROR(stream.UseDevice());
  const int error = device_.library()->dnn_prompts(handle_, &call, stream.handle());
  if (error == kDnnRefused) return Internal(device_.name(), ": cuDNN failed to attend prompts that it had planned");
  return device_.library().Check(error, device_.name() + ": attending prompts");
}

absl::Status CudaPrompts::Join(CudaStream& stream, const Shape& shape, const Batch& batch, const float* partial_o,
                               const float* partial_ml, void* o) {
  if (batch.empty() || !batch.joins_) return absl::OkStatus();
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
  join.batch = batch.batch_;
  join.most_tokens = batch.most_tokens_;
  join.heads = shape.q_heads;
  join.value_dim = shape.value_dim;
  DT_RETURN_IF_ERROR(stream.UseDevice());
  return device_.library().Check(device_.library()->join_prompts(&join, stream.handle()),
                                 device_.name() + ": joining parts of prompts");
}

}  // namespace dovetail::kernels::cuda
