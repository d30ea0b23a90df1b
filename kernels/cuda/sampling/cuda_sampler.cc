#include "kernels/cuda/sampling/cuda_sampler.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace dovetail::kernels::cuda {
namespace {

size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

bool HasPenalties(const SamplingParams& p) {
  return !p.seen.empty() && (p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0);
}

absl::Status CheckParams(const SamplingParams& p) {
  if (!(p.temperature >= 0 && p.temperature <= 100))
    return InvalidArgument("temperature: ", p.temperature, " is outside 0..100");
  if (!(p.top_p > 0 && p.top_p <= 1)) return InvalidArgument("top_p: ", p.top_p, " is outside (0, 1]");
  if (!(p.min_p >= 0 && p.min_p <= 1)) return InvalidArgument("min_p: ", p.min_p, " is outside [0, 1]");
  if (!(p.repetition_penalty > 0) || !std::isfinite(p.repetition_penalty)) {
    return InvalidArgument("repetition_penalty: ", p.repetition_penalty, " must be a positive number");
  }
  if (!std::isfinite(p.presence_penalty) || !std::isfinite(p.frequency_penalty)) {
    return InvalidArgument("presence_penalty or frequency_penalty is not finite");
  }
  if (p.logprobs > 0) return Unimplemented("logprobs: ", p.logprobs, " most likely tokens are listed on the host only");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Buffer>> CudaSampler::CreateWork(CudaDevice& device, int32_t max_rows, int32_t vocab) {
  if (max_rows < 1 || vocab < 1) return InvalidArgument("sampler: ", max_rows, " rows of ", vocab, " logits");
  DT_ASSIGN_OR_RETURN(std::unique_ptr<Buffer> work,
                      device.Allocate(static_cast<size_t>(max_rows) * vocab * sizeof(float)));
  return std::shared_ptr<Buffer>(std::move(work));
}

absl::StatusOr<std::unique_ptr<CudaSampler>> CudaSampler::Create(CudaDevice& device, int32_t max_rows, int32_t vocab,
                                                                 std::shared_ptr<Buffer> work) {
  if (max_rows < 1 || vocab < 1) return InvalidArgument("sampler: ", max_rows, " rows of ", vocab, " logits");
  auto sampler = std::unique_ptr<CudaSampler>(new CudaSampler(device, max_rows, vocab));
  sampler->work_ = std::move(work);
  if (sampler->work_ == nullptr) {
    DT_ASSIGN_OR_RETURN(sampler->work_, CreateWork(device, max_rows, vocab));
  }
  DT_ASSIGN_OR_RETURN(sampler->out_, device.Allocate(max_rows * sizeof(SampleOutput)));
  DT_ASSIGN_OR_RETURN(sampler->host_out_, device.AllocatePinned(max_rows * sizeof(SampleOutput)));
  return sampler;
}

absl::Status CudaSampler::AddRow(size_t index, const Row& row) {
  const SamplingParams& p = *row.params;
  const auto in_row = [&](const absl::Status& status) {
    return Annotate(status, absl::StrCat("sampling row ", index));
  };
  if (const absl::Status status = CheckParams(p); !status.ok()) return in_row(status);
  const auto check = [&](const char* field, int32_t token) {
    if (token >= 0 && token < vocab_) return absl::OkStatus();
    return in_row(InvalidArgument(field, ": token id ", token, " is outside 0..", vocab_ - 1));
  };
  SampleParams out;
  out.inverse_temperature = p.greedy() ? 0.0f : 1.0f / p.temperature;
  out.top_k = p.top_k > 0 ? p.top_k : 0;
  out.top_p = p.top_p;
  out.min_p = p.min_p;
  out.repetition_penalty = p.repetition_penalty;
  out.presence_penalty = p.presence_penalty;
  out.frequency_penalty = p.frequency_penalty;
  out.seed_low = static_cast<uint32_t>(p.seed);
  out.seed_high = static_cast<uint32_t>(p.seed >> 32);
  out.position = static_cast<int32_t>(row.position);
  out.logprob = p.logprobs >= 0 ? 1 : 0;
  out.first_allowed = static_cast<int32_t>(allowed_.size());
  for (const int32_t token : p.allowed) {
    DT_RETURN_IF_ERROR(check("allowed_token_ids", token));
    allowed_.push_back(token);
  }
  out.allowed = static_cast<int32_t>(p.allowed.size());
  out.first_bias = static_cast<int32_t>(biases_.size());
  for (const int32_t token : p.banned) {
    DT_RETURN_IF_ERROR(check("banned token ids", token));
    biases_.push_back({token, -std::numeric_limits<float>::infinity()});
  }
  for (const TokenBias& bias : p.logit_bias) {
    DT_RETURN_IF_ERROR(check("logit_bias", bias.token));
    if (std::isnan(bias.bias) || bias.bias == std::numeric_limits<float>::infinity()) {
      return in_row(
          InvalidArgument("logit_bias: ", bias.bias, " for token id ", bias.token, " is not a finite number"));
    }
    biases_.push_back({bias.token, bias.bias});
  }
  out.biases = static_cast<int32_t>(biases_.size()) - out.first_bias;
  out.first_seen = static_cast<int32_t>(seen_.size());
  if (HasPenalties(p)) {
    for (const TokenCount& seen : p.seen) {
      DT_RETURN_IF_ERROR(check("penalties", seen.token));
      seen_.push_back({seen.token, seen.generated});
    }
  }
  out.seen = static_cast<int32_t>(seen_.size()) - out.first_seen;
  params_.push_back(out);
  return absl::OkStatus();
}

absl::Status CudaSampler::Send(CudaStream& stream) {
  const size_t seen_at = RoundUp(params_.size() * sizeof(SampleParams));
  const size_t biases_at = seen_at + RoundUp(seen_.size() * sizeof(SampleSeen));
  const size_t allowed_at = biases_at + RoundUp(biases_.size() * sizeof(SampleBias));
  const size_t bytes = allowed_at + RoundUp(allowed_.size() * sizeof(int32_t));
  if (lists_ == nullptr || lists_->size_bytes() < bytes) {
    DT_RETURN_IF_ERROR(stream.SynchronizeStatus());
    DT_ASSIGN_OR_RETURN(lists_, device_.Allocate(2 * bytes));
    DT_ASSIGN_OR_RETURN(host_lists_, device_.AllocatePinned(2 * bytes));
  }
  std::byte* host = host_lists_->data();
  std::memcpy(host, params_.data(), params_.size() * sizeof(SampleParams));
  if (!seen_.empty()) std::memcpy(host + seen_at, seen_.data(), seen_.size() * sizeof(SampleSeen));
  if (!biases_.empty()) std::memcpy(host + biases_at, biases_.data(), biases_.size() * sizeof(SampleBias));
  if (!allowed_.empty()) std::memcpy(host + allowed_at, allowed_.data(), allowed_.size() * sizeof(int32_t));
  std::byte* there = lists_->data();
  launch_.params = reinterpret_cast<const SampleParams*>(there);
  launch_.seen = reinterpret_cast<const SampleSeen*>(there + seen_at);
  launch_.biases = reinterpret_cast<const SampleBias*>(there + biases_at);
  launch_.allowed = reinterpret_cast<const int32_t*>(there + allowed_at);
  return stream.Upload(there, host, bytes, nullptr);
}

absl::Status CudaSampler::Upload(CudaStream& stream, std::span<const Row> rows) {
  if (rows.size() > static_cast<size_t>(max_rows_)) {
    return InvalidArgument("sampling: ", rows.size(), " rows; the sampler was made for ", max_rows_);
  }
  params_.clear();
  seen_.clear();
  biases_.clear();
  allowed_.clear();
  for (size_t i = 0; i < rows.size(); ++i) DT_RETURN_IF_ERROR(AddRow(i, rows[i]));
  return rows.empty() ? absl::OkStatus() : Send(stream);
}

absl::Status CudaSampler::Draw(CudaStream& stream, const float* logits, int64_t step) {
  if (params_.empty()) return absl::OkStatus();
  SampleLaunch launch = launch_;
  launch.logits = logits;
  launch.work = reinterpret_cast<float*>(work_->data());
  launch.step = step;
  launch.work_step = vocab_;
  launch.rows = static_cast<int32_t>(params_.size());
  launch.vocab = vocab_;
  launch.out = reinterpret_cast<SampleOutput*>(out_->data());
  launch.host_out = reinterpret_cast<SampleOutput*>(host_out_->data());
  return Sample(stream, launch);
}

std::array<uint64_t, 4> CudaSampler::Launches() const {
  const auto at = [](const void* p) { return reinterpret_cast<uint64_t>(p); };
  return {params_.size() ^ at(out_->data()) << 16, at(launch_.params), at(launch_.seen) ^ at(launch_.biases) << 16,
          at(launch_.allowed)};
}

absl::Status CudaSampler::Enqueue(CudaStream& stream, const float* logits, int64_t step, std::span<const Row> rows) {
  DT_RETURN_IF_ERROR(Upload(stream, rows));
  return Draw(stream, logits, step);
}

absl::StatusOr<SampleResult> CudaSampler::Result(size_t row) const {
  if (row >= params_.size()) return InvalidArgument("sampling: row ", row, " of ", params_.size());
  const SampleOutput out = reinterpret_cast<const SampleOutput*>(host_out_->data())[row];
  if (out.error == 1) {
    return Internal("sampling: a logit is not a number; the model's arithmetic overflowed or its weights are damaged");
  }
  if (out.error != 0) return InvalidArgument("allowed_token_ids, banned ids and logit_bias leave no token to choose");
  SampleResult result;
  result.token = out.token;
  if (params_[row].logprob != 0) result.chosen = {.token = out.token, .logprob = out.logprob, .rank = out.rank};
  return result;
}

}  // namespace dovetail::kernels::cuda
