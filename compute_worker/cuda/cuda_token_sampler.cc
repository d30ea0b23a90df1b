#include "compute_worker/cuda/cuda_token_sampler.h"

#include <algorithm>

#include "kernels/cuda/rows/row_ops.h"
#include "kernels/thread_pool.h"

namespace dovetail::compute {

using kernels::cuda::CudaSampler;
using kernels::cuda::CudaStream;
using kernels::cuda::WireType;

namespace {

constexpr size_t kRowStep = 8;  // the head's product takes a multiple of so many rows, or fewer

size_t RowScratchBytes(int64_t vocab) { return (kernels::SamplingScratchBytes(vocab) + 63) / 64 * 64; }

}  // namespace

absl::StatusOr<std::unique_ptr<CudaTokenSampler>> CudaTokenSampler::Create(const CudaModel& model,
                                                                           kernels::cuda::CudaStream& stream,
                                                                           kernels::cuda::CudaProduct& product,
                                                                           int most_rows, int micro_batches) {
  const int rows = std::min(kRowsAtOnce, most_rows);
  const model::ModelConfig& config = model.model().config();
  std::unique_ptr<CudaTokenSampler> sampler(new CudaTokenSampler(model, stream, product, rows));
  const int64_t room = rows + kRowStep;
  DT_ASSIGN_OR_RETURN(sampler->normed_, model.device().Allocate(room * config.hidden_size * sizeof(uint16_t)));
  DT_ASSIGN_OR_RETURN(sampler->device_logits_, model.device().Allocate(room * config.vocab_size * sizeof(float)));
  sampler->draws_.resize(static_cast<size_t>(micro_batches) + 1);
  const auto vocab = static_cast<int32_t>(config.vocab_size);
  DT_ASSIGN_OR_RETURN(const std::shared_ptr<kernels::Buffer> work,
                      CudaSampler::CreateWork(model.device(), rows, vocab));
  for (Draws& draws : sampler->draws_) {
    DT_ASSIGN_OR_RETURN(draws.sampler, CudaSampler::Create(model.device(), rows, vocab, work));
    DT_ASSIGN_OR_RETURN(draws.done, model.device().CreateEvent());
  }
  return sampler;
}

absl::Status CudaTokenSampler::Reserve(size_t) { return absl::OkStatus(); }

bool CudaTokenSampler::IsForHost(const proto::StepPlan& plan, const LogitsRow& row) const {
  return row.scored_token >= 0 || row.return_logits || plan.entries[row.entry].sampling.logprobs > 0 ||
         plan.entries[row.entry].sampling.follows_grammar;
}

absl::StatusOr<float*> CudaTokenSampler::HiddenStates(const float* residual, int64_t first, int64_t count) {
  const int64_t hidden = model_.config().hidden_size;
  const size_t bytes = static_cast<size_t>(count * hidden) * sizeof(float);
  if (device_states_ == nullptr) {
    const size_t most = rows_at_once_ * static_cast<size_t>(hidden) * sizeof(float);
    DT_ASSIGN_OR_RETURN(hidden_states_, on_device_.device().AllocatePinned(most));
    DT_ASSIGN_OR_RETURN(device_states_, on_device_.device().Allocate(most));
  }
  kernels::cuda::RmsNormLaunch norm;
  norm.x = const_cast<float*>(residual + first * hidden);
  norm.weight = on_device_.final_norm();
  norm.out = device_states_->data();
  norm.x_step = norm.out_step = hidden;
  norm.x_type = norm.out_type = WireType::kF32;
  norm.eps = model_.final_norm.eps;
  norm.rows = static_cast<int32_t>(count);
  norm.size = static_cast<int32_t>(hidden);
  DT_RETURN_IF_ERROR(kernels::cuda::RmsNorm(cuda_stream_, norm));
  DT_RETURN_IF_ERROR(cuda_stream_.Copy(hidden_states_->data(), device_states_->data(), bytes));
  DT_RETURN_IF_ERROR(cuda_stream_.SynchronizeStatus());
  return reinterpret_cast<float*>(hidden_states_->data());
}

// Rows that follow each other go together: in decode that is all of them.
absl::Status CudaTokenSampler::NormRows(const float* residual, size_t first, size_t count) {
  const int64_t hidden = model_.config().hidden_size;
  for (size_t begin = 0; begin < count;) {
    size_t end = begin + 1;
    while (end < count && rows_[first + end].row == rows_[first + end - 1].row + 1) ++end;
    kernels::cuda::RmsNormLaunch norm;
    norm.x = const_cast<float*>(residual + rows_[first + begin].row * hidden);
    norm.weight = on_device_.final_norm();
    norm.out = normed_->data() + begin * hidden * sizeof(uint16_t);
    norm.x_step = norm.out_step = hidden;
    norm.x_type = WireType::kF32;
    norm.out_type = on_device_.type();
    norm.eps = model_.final_norm.eps;
    norm.rows = static_cast<int32_t>(end - begin);
    norm.size = static_cast<int32_t>(hidden);
    DT_RETURN_IF_ERROR(kernels::cuda::RmsNorm(cuda_stream_, norm));
    begin = end;
  }
  return absl::OkStatus();
}

// Rows for the host are drawn, too, greedily, and that is forgotten: one launch serves them all.
absl::Status CudaTokenSampler::Draw(const proto::StepPlan& plan, size_t first, size_t count,
                                    const proto::StepResult& result) {
  params_.assign(count, kernels::SamplingParams{.temperature = 0});
  drawn_.assign(count, {});
  for (size_t i = 0; i < count; ++i) {
    const LogitsRow& row = rows_[first + i];
    if (!for_host_[i]) params_[i] = ParamsOf(plan.entries[row.entry], row);
    drawn_[i] = {&params_[i], result.entries[row.entry].position};
  }
  return draws_.back().sampler->Enqueue(cuda_stream_, reinterpret_cast<const float*>(device_logits_->data()), vocab_,
                                        drawn_);
}

absl::Status CudaTokenSampler::Fetch(size_t count) {
  const size_t row_bytes = vocab_ * sizeof(float);
  if (logits_ == nullptr || logits_->size_bytes() < count * row_bytes) {
    logits_.reset();
    DT_ASSIGN_OR_RETURN(logits_, on_device_.device().AllocatePinned(count * row_bytes));
    sampling_scratch_.reset();
    DT_ASSIGN_OR_RETURN(sampling_scratch_, on_device_.device().AllocatePinned(count * RowScratchBytes(vocab_)));
  }
  for (size_t i = 0; i < count; ++i) {
    if (!for_host_[i]) continue;
    DT_RETURN_IF_ERROR(
        cuda_stream_.Copy(logits_->data() + i * row_bytes, device_logits_->data() + i * row_bytes, row_bytes));
  }
  return absl::OkStatus();
}

kernels::cuda::GemmCall CudaTokenSampler::HeadCall(size_t count) const {
  kernels::cuda::GemmCall call{};
  call.x = normed_->data();
  call.y = device_logits_->data();
  const bool as_it_is = count <= kRowStep && !product_.in_order();
  call.m = static_cast<int64_t>(as_it_is ? count : (count + kRowStep - 1) / kRowStep * kRowStep);
  call.n = call.y_stride = vocab_;
  call.k = call.x_stride = model_.config().hidden_size;
  call.type = on_device_.type() == WireType::kBF16 ? kernels::cuda::GemmType::kBF16 : kernels::cuda::GemmType::kF16;
  call.y_is_f32 = 1;
  return call;
}

absl::Status CudaTokenSampler::ChooseHead(size_t count) {
  if (count > rows_at_once_) return absl::OkStatus();
  kernels::cuda::GemmCall call = HeadCall(count);
  call.only_choose = 1;
  return product_.Run(cuda_stream_, on_device_.head(), call);
}

// False: some row is for the host.
absl::StatusOr<bool> CudaTokenSampler::UploadDraws(const proto::StepPlan& plan, Draws& draws) {
  proto::StepResult result;
  result.entries.resize(plan.entries.size());
  CollectRows(plan);
  if (rows_.empty() || rows_.size() > rows_at_once_) return false;
  for (const proto::StepEntry& entry : plan.entries)
    if (entry.pool_rows > 0) return false;
  for (const LogitsRow& row : rows_)
    if (IsForHost(plan, row) || plan.entries[row.entry].sampling.needs_history()) return false;
  FillSamplingInputs(plan, result);
  params_.resize(rows_.size());
  drawn_.resize(rows_.size());
  for (size_t i = 0; i < rows_.size(); ++i) {
    const proto::StepEntry& entry = plan.entries[rows_[i].entry];
    params_[i] = ParamsOf(entry, rows_[i]);
    drawn_[i] = {&params_[i], entry.ctx_len + static_cast<Position>(entry.tokens.size())};
  }
  const absl::Status uploaded = draws.sampler->Upload(cuda_stream_, drawn_);
  if (absl::IsInvalidArgument(uploaded)) return false;  // the host says which row is wrong
  DT_RETURN_IF_ERROR(uploaded);
  draws.rows.swap(rows_);
  return true;
}

absl::StatusOr<bool> CudaTokenSampler::Begin(const proto::StepPlan& plan, const float* residual, MicroBatchId id,
                                             kernels::cuda::StepWork& work) {
  Draws& draws = draws_[id.value()];
  draws.begun = false;
  DT_ASSIGN_OR_RETURN(const bool alone, UploadDraws(plan, draws));
  if (!alone) return false;
  const size_t count = draws.rows.size();
  uint64_t rows = 0;  // which of the step's
  for (const LogitsRow& row : draws.rows) rows = (rows ^ static_cast<uint64_t>(row.row + 1)) * 0x9e3779b97f4a7c15ull;
  const DrawRecord record{this, &draws, residual, count, rows, draws.sampler->Launches()};
  DT_RETURN_IF_ERROR(work.Add(
      cuda_stream_, record, [](CudaStream& stream, const DrawRecord& r) { return r.sampler->StartDraws(stream, r); }));
  return true;
}

absl::Status CudaTokenSampler::StartDraws(CudaStream& stream, const DrawRecord& record) {
  rows_.swap(record.draws->rows);
  const absl::Status normed = NormRows(record.residual, 0, record.count);
  rows_.swap(record.draws->rows);
  DT_RETURN_IF_ERROR(normed);
  DT_RETURN_IF_ERROR(product_.Run(stream, on_device_.head(), HeadCall(record.count)));
  return record.draws->sampler->Draw(stream, reinterpret_cast<const float*>(device_logits_->data()), vocab_);
}

absl::Status CudaTokenSampler::Launched(MicroBatchId id) {
  Draws& draws = draws_[id.value()];
  draws.begun = true;
  return cuda_stream_.Record(draws.done);
}

bool CudaTokenSampler::Done(MicroBatchId id) const {
  const absl::StatusOr<bool> done = draws_[id.value()].done.Done();
  return !done.ok() || *done;  // what is wrong is for Finish to say
}

absl::Status CudaTokenSampler::Finish(const proto::StepPlan& plan, MicroBatchId id, proto::StepResult& result) {
  Draws& draws = draws_[id.value()];
  draws.begun = false;
  DT_RETURN_IF_ERROR(draws.done.Synchronize());
  result.entries.resize(plan.entries.size());
  for (size_t e = 0; e < plan.entries.size(); ++e) {
    result.entries[e].sequence = plan.entries[e].sequence;
    result.entries[e].position = plan.entries[e].ctx_len + static_cast<Position>(plan.entries[e].tokens.size());
  }
  for (size_t i = 0; i < draws.rows.size(); ++i) {
    const int entry = draws.rows[i].entry;
    Store(draws.sampler->Result(i), plan.entries[entry].sampling.logprobs >= 0, result.entries[entry]);
  }
  return absl::OkStatus();
}

absl::Status CudaTokenSampler::ComputeLogits(const proto::StepPlan& plan, const float* residual, size_t first,
                                             size_t count, const proto::StepResult& result) {
  DT_RETURN_IF_ERROR(NormRows(residual, first, count));
  DT_RETURN_IF_ERROR(product_.Run(cuda_stream_, on_device_.head(), HeadCall(count)));
  for_host_.assign(count, false);
  for (size_t i = 0; i < count; ++i) for_host_[i] = IsForHost(plan, rows_[first + i]);
  const absl::Status drawn = Draw(plan, first, count, result);
  // Whose parameters are wrong is for the host to say, row by row.
  if (absl::IsInvalidArgument(drawn)) {
    for_host_.assign(count, true);
  } else if (!drawn.ok()) {
    return drawn;
  }
  if (std::find(for_host_.begin(), for_host_.end(), true) != for_host_.end()) DT_RETURN_IF_ERROR(Fetch(count));
  return cuda_stream_.SynchronizeStatus();
}

void CudaTokenSampler::HandleRows(const proto::StepPlan& plan, size_t first, size_t count, proto::StepResult& result) {
  const size_t scratch_bytes = RowScratchBytes(vocab_);
  context_.pool->Run(static_cast<int>(count), [&](int i) {
    LogitsRow& row = rows_[first + i];
    proto::EntryResult& entry = result.entries[row.entry];
    if (for_host_[i]) {
      HandleRow(plan, row, reinterpret_cast<float*>(logits_->data()) + i * vocab_,
                {sampling_scratch_->data() + i * scratch_bytes, scratch_bytes}, entry);
    } else if (row.sample && entry.status == proto::StepStatus::kOk) {
      Store(draws_.back().sampler->Result(i), plan.entries[row.entry].sampling.logprobs >= 0, entry);
    }
  });
}

}  // namespace dovetail::compute
