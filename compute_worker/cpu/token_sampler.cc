#include "compute_worker/cpu/token_sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/exact_sums.h"
#include "base/log.h"
#include "compute_worker/cpu/row_mask.h"
#include "kernels/gemm.h"
#include "kernels/rms_norm.h"
#include "kernels/sampling.h"
#include "kernels/thread_pool.h"

namespace dovetail::compute {

using proto::EntryResult;
using proto::StepEntry;
using proto::StepStatus;

namespace {

proto::TokenLogprob ToWire(const kernels::TokenLogprob& l) { return {l.token, l.logprob, l.rank}; }

proto::PositionLogprobs ToWire(const kernels::SampleResult& sampled) {
  proto::PositionLogprobs out;
  out.chosen = ToWire(sampled.chosen);
  for (const kernels::TokenLogprob& l : sampled.top) out.top.push_back(ToWire(l));
  return out;
}

absl::Status GrowTo(kernels::Device& device, std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size_bytes() >= bytes) return absl::OkStatus();
  buffer.reset();
  DT_ASSIGN_OR_RETURN(buffer, device.Allocate(bytes));
  return absl::OkStatus();
}

float* Floats(kernels::Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

}  // namespace

TokenSampler::TokenSampler(const model::LoadedModel& model, kernels::Device& device, kernels::Stream& stream,
                           int rows_at_once)
    : model_(model),
      device_(device),
      stream_(stream),
      context_(kernels::ContextOf(stream)),
      vocab_(model.head.weights.rows()),
      rows_at_once_(static_cast<size_t>(rows_at_once)),
      grammars_(model.grammars.get()) {}

void TokenSampler::CollectRows(const proto::StepPlan& plan) {
  rows_.clear();
  int64_t begin = 0;
  for (size_t e = 0; e < plan.entries.size(); ++e) {
    const StepEntry& entry = plan.entries[e];
    const int64_t q_len = static_cast<int64_t>(entry.tokens.size());
    for (int64_t i = 0; i < q_len; ++i) {
      LogitsRow row;
      row.entry = static_cast<int>(e);
      row.row = begin + i;
      row.sample = entry.sample && i == q_len - 1;
      row.return_logits = i >= q_len - entry.logits_rows;
      if (entry.prompt_logprobs >= 0) row.scored_token = i + 1 < q_len ? entry.tokens[i + 1] : entry.next_prompt_token;
      if (row.sample || row.return_logits || row.scored_token >= 0) rows_.push_back(std::move(row));
    }
    begin += q_len;
  }
}

std::vector<SequenceId> TokenSampler::PendingGrammars(const proto::StepPlan& plan) {
  std::vector<SequenceId> pending;
  for (const StepEntry& entry : plan.entries) {
    if (!entry.sample || !entry.sampling.follows_grammar) continue;
    const proto::Grammar& grammar = entry.given.lists->grammar;
    if (!grammars_.Prepare(entry.sequence, grammar.source, grammar.ends)) pending.push_back(entry.sequence);
  }
  return pending;
}

bool TokenSampler::FillMask(const StepEntry& entry, LogitsRow& row) {
  const proto::Grammar& grammar = entry.given.lists->grammar;
  const auto mask = grammars_.Mask(entry.sequence, grammar.source, grammar.ends, history_.Output(entry.sequence));
  if (!mask.ok()) {
    LogWarning("structured output: ", mask.status().message());
    return false;
  }
  row.mask.assign(mask->begin(), mask->end());
  return true;
}

// Everything that needs the history cache happens here, on one thread; what follows is spread over the pool.
void TokenSampler::FillSamplingInputs(const proto::StepPlan& plan, proto::StepResult& result) {
  for (size_t e = 0; e < plan.entries.size(); ++e) {
    const StepEntry& entry = plan.entries[e];
    if (!entry.sampling.needs_history()) continue;
    if (const absl::Status status = history_.Update(entry); !status.ok())
      result.entries[e].status = StepStatus::kWorkerFailed;
  }
  for (LogitsRow& row : rows_) {
    const StepEntry& entry = plan.entries[row.entry];
    if (!row.sample || result.entries[row.entry].status != StepStatus::kOk) continue;
    if (entry.sampling.has_penalties()) {
      const auto counts = history_.Counts(entry.sequence);
      row.counts.assign(counts.begin(), counts.end());
    }
    const proto::SamplingLists* const lists = entry.given.lists.get();
    if (lists == nullptr) continue;
    for (const auto& [token, bias] : lists->logit_bias) row.bias.push_back({token, bias});
    row.banned = lists->banned_token_ids;
    if (entry.sampling.follows_grammar && !FillMask(entry, row)) {
      result.entries[row.entry].status = StepStatus::kWorkerFailed;
      continue;
    }
    if (entry.ban_early) row.banned.insert(row.banned.end(), lists->banned_early.begin(), lists->banned_early.end());
  }
}

absl::Status TokenSampler::ComputeLogits(const proto::StepPlan&, const float* residual, size_t first, size_t count,
                                         const proto::StepResult&) {
  const int64_t hidden = model_.config().hidden_size;
  float* gathered = Floats(*gathered_);
  for (size_t i = 0; i < count; ++i)
    std::memcpy(gathered + i * hidden, residual + rows_[first + i].row * hidden, hidden * sizeof(float));
  kernels::RmsNormArgs norm;
  norm.x = gathered;
  norm.weight = model_.final_norm.weight.data();
  norm.eps = model_.final_norm.eps;
  norm.rows = static_cast<int64_t>(count);
  norm.size = static_cast<int>(hidden);
  norm.out = gathered;
  DT_RETURN_IF_ERROR(kernels::RmsNorm(context_, norm));
  const kernels::GemmOutput outputs[] = {
      {&model_.head.weights, Floats(*logits_), vocab_, model_.head.bias_or_null(), false, model_.head.activations}};
  return kernels::Gemm(
      {gathered, hidden, static_cast<int64_t>(count), outputs, {gemm_scratch_->data(), gemm_scratch_->size_bytes()}},
      stream_);
}

absl::StatusOr<float*> TokenSampler::HiddenStates(const float* residual, int64_t first, int64_t count) {
  const int64_t hidden = model_.config().hidden_size;
  DT_RETURN_IF_ERROR(GrowTo(device_, hidden_states_, rows_at_once_ * hidden * sizeof(float)));
  kernels::RmsNormArgs norm;
  norm.x = const_cast<float*>(residual) + first * hidden;
  norm.weight = model_.final_norm.weight.data();
  norm.eps = model_.final_norm.eps;
  norm.rows = count;
  norm.size = static_cast<int>(hidden);
  norm.out = Floats(*hidden_states_);
  DT_RETURN_IF_ERROR(kernels::RmsNorm(context_, norm));
  return Floats(*hidden_states_);
}

absl::Status TokenSampler::Pool(const proto::StepPlan& plan, const float* residual, proto::StepResult& result) {
  const auto hidden = static_cast<size_t>(model_.config().hidden_size);
  const float scale = model_.config().logits_scale;
  int64_t begin = 0;
  for (size_t e = 0; e < plan.entries.size(); ++e) {
    const StepEntry& entry = plan.entries[e];
    ExactSums sums;
    bool finite = true;
    for (int64_t row = 0; row < entry.pool_rows;) {
      const int64_t count = std::min<int64_t>(entry.pool_rows - row, static_cast<int64_t>(rows_at_once_));
      DT_ASSIGN_OR_RETURN(float* const states, HiddenStates(residual, begin + entry.pool_first + row, count));
      if (scale != 1)
        for (size_t i = 0; i < static_cast<size_t>(count) * hidden; ++i) states[i] /= scale;
      for (int64_t i = 0; i < count; ++i) finite &= sums.Add({states + i * hidden, hidden});
      row += count;
    }
    if (!finite) result.entries[e].status = StepStatus::kBadLogits;
    result.entries[e].pooled = sums.TakeWords();
    begin += static_cast<int64_t>(entry.tokens.size());
  }
  return absl::OkStatus();
}

kernels::SamplingParams TokenSampler::ParamsOf(const StepEntry& entry, const LogitsRow& row) const {
  const proto::SamplingParams& wanted = entry.sampling;
  kernels::SamplingParams params;
  params.temperature = wanted.temperature;
  params.top_k = wanted.top_k;
  params.top_p = wanted.top_p;
  params.min_p = wanted.min_p;
  params.repetition_penalty = wanted.repetition_penalty;
  params.presence_penalty = wanted.presence_penalty;
  params.frequency_penalty = wanted.frequency_penalty;
  params.seed = wanted.seed;
  params.logit_bias = row.bias;
  if (entry.given.lists != nullptr) params.allowed = entry.given.lists->allowed_token_ids;
  params.banned = row.banned;
  params.seen = row.counts;
  params.logprobs = wanted.logprobs;
  return params;
}

// The row's logits are masked where they lie, unless they are to be returned as they came.
void TokenSampler::SampleInto(const StepEntry& entry, const LogitsRow& row, std::span<float> logits,
                              std::span<std::byte> scratch, EntryResult& result) const {
  const kernels::SamplingParams params = ParamsOf(entry, row);
  std::vector<float> kept;
  if (!row.mask.empty()) {
    if (row.return_logits) {
      kept.assign(logits.begin(), logits.end());
      logits = kept;
    }
    MaskRow(row.mask, logits);
  }
  Store(kernels::SampleRow(*context_.table, logits, params, result.position, scratch), params.logprobs >= 0, result);
  if (!row.mask.empty())
    std::erase_if(result.logprobs.top, [](const proto::TokenLogprob& l) { return std::isinf(l.logprob); });
}

void TokenSampler::Store(const absl::StatusOr<kernels::SampleResult>& sampled, bool logprobs, EntryResult& result) {
  if (!sampled.ok()) {
    result.status = StepStatus::kBadLogits;
    return;
  }
  result.token = sampled->token;
  if (!logprobs) return;
  result.has_logprobs = true;
  result.logprobs = ToWire(*sampled);
}

void TokenSampler::HandleRow(const proto::StepPlan& plan, LogitsRow& row, float* logits, std::span<std::byte> scratch,
                             EntryResult& result) const {
  const StepEntry& entry = plan.entries[row.entry];
  const std::span<float> all(logits, vocab_);
  if (row.scored_token >= 0) {
    const auto scored = kernels::RowLogprobs(*context_.table, all, row.scored_token, entry.prompt_logprobs, scratch);
    if (scored.ok())
      row.prompt_logprobs = ToWire(*scored);
    else
      row.failed = true;
  }
  if (row.sample && result.status == StepStatus::kOk) SampleInto(entry, row, all, scratch, result);
}

absl::Status TokenSampler::Reserve(size_t most) {
  const size_t scratch_bytes = (kernels::SamplingScratchBytes(vocab_) + 63) / 64 * 64;
  const int64_t hidden = model_.config().hidden_size;
  DT_RETURN_IF_ERROR(GrowTo(device_, gathered_, most * hidden * sizeof(float)));
  DT_RETURN_IF_ERROR(GrowTo(device_, logits_, most * vocab_ * sizeof(float)));
  DT_RETURN_IF_ERROR(GrowTo(device_, gemm_scratch_, kernels::GemmScratchBytes(most, hidden)));
  return GrowTo(device_, sampling_scratch_, most * scratch_bytes);
}

// Rows of one entry touch one result: the sampled row is its last, and the others leave only row.prompt_logprobs.
void TokenSampler::HandleRows(const proto::StepPlan& plan, size_t first, size_t count, proto::StepResult& result) {
  const size_t scratch_bytes = (kernels::SamplingScratchBytes(vocab_) + 63) / 64 * 64;
  context_.pool->Run(static_cast<int>(count), [&](int i) {
    LogitsRow& row = rows_[first + i];
    HandleRow(plan, row, Floats(*logits_) + i * vocab_, {sampling_scratch_->data() + i * scratch_bytes, scratch_bytes},
              result.entries[row.entry]);
  });
}

absl::Status TokenSampler::Run(const proto::StepPlan& plan, const float* residual, proto::StepResult& result) {
  result.entries.resize(plan.entries.size());
  for (size_t e = 0; e < plan.entries.size(); ++e) {
    result.entries[e].sequence = plan.entries[e].sequence;
    result.entries[e].position = plan.entries[e].ctx_len + static_cast<Position>(plan.entries[e].tokens.size());
  }
  DT_RETURN_IF_ERROR(Pool(plan, residual, result));
  CollectRows(plan);
  FillSamplingInputs(plan, result);
  DT_RETURN_IF_ERROR(Reserve(std::min(rows_.size(), rows_at_once_)));
  for (size_t first = 0; first < rows_.size(); first += rows_at_once_) {
    const size_t count = std::min(rows_at_once_, rows_.size() - first);
    DT_RETURN_IF_ERROR(ComputeLogits(plan, residual, first, count, result));
    HandleRows(plan, first, count, result);
    for (size_t i = 0; i < count; ++i) {
      LogitsRow& row = rows_[first + i];
      EntryResult& entry = result.entries[row.entry];
      if (row.failed) entry.status = StepStatus::kBadLogits;
      if (row.scored_token >= 0) entry.prompt_logprobs.push_back(std::move(row.prompt_logprobs));
      if (!row.return_logits) continue;
      const float* logits = Floats(*logits_) + i * vocab_;
      entry.logits.insert(entry.logits.end(), logits, logits + vocab_);
    }
  }
  return absl::OkStatus();
}

}  // namespace dovetail::compute
