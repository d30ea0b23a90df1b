#include "compute_worker/cuda/cuda_divided_rows.h"

#include <algorithm>

#include "compute_worker/cuda/cuda_hybrid.h"
#include "compute_worker/cuda/wire_element.h"
#include "kernels/cuda/exchange/cuda_exchange.h"

namespace dovetail::compute {

using exchange::GpuExchange;
using kernels::cuda::ExchangeCopy;
using kernels::cuda::ExchangeFan;
using kernels::cuda::ExchangeJoin;
using kernels::cuda::ExchangePartial;
using kernels::cuda::StepWork;

namespace {

// Thread blocks for the largest of the copies.
int SplitsOf(const std::vector<DividedRows::Copy>& copies) {
  int64_t most = 0;
  for (const DividedRows::Copy& copy : copies) most = std::max(most, copy.rows * copy.row_bytes);
  return kernels::cuda::ExchangeSplits(most);
}

uint64_t Mixed(uint64_t word, uint64_t value) { return (word ^ value) * 0x9e3779b97f4a7c15ull; }

// One worker's answer is o of all rows, as it lies.
bool IsWhole(const DividedRows::Group& rows, int64_t row_count) {
  if (rows.arriving.size() != 1 || !rows.joins.empty()) return false;
  const DividedRows::Copy& copy = rows.arriving[0];
  return copy.rows == row_count && copy.row_bytes == copy.tensor_step && copy.row_bytes == copy.payload_step;
}

}  // namespace

absl::Status CudaDividedRows::Plan(const ComputeWorkerCore& core, MicroBatchId id,
                                   const std::vector<GpuExchange*>& peers) {
  if (const absl::Status divided = DivideRows(core, id, rows_); !divided.ok())
    return Internal("a step cannot stay on GPUs: ", std::string(divided.message()));
  peers_ = peers;
  groups_.assign(rows_.groups.size(), {});
  int64_t row_count = 0;
  for (const proto::StepEntry& entry : core.PlanOf(id).entries) row_count += static_cast<int64_t>(entry.tokens.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].leaving_splits = SplitsOf(rows_.groups[g].leaving);
    groups_[g].arriving_splits = SplitsOf(rows_.groups[g].arriving);
    for (const DividedRows::Join& join : rows_.groups[g].joins) groups_[g].partial_count += join.partials.size();
    if (IsWhole(rows_.groups[g], row_count))
      groups_[g].answer = peers_[static_cast<size_t>(rows_.groups[g].parts[0])]->own_slot(id);
  }
  return absl::OkStatus();
}

void CudaDividedRows::AddTo(kernels::cuda::UploadLayout& layout) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].fan_at = layout.Add<ExchangeFan>(1);
    groups_[g].leaving_at = layout.Add<ExchangeCopy>(rows_.groups[g].leaving.size());
    groups_[g].arriving_at = layout.Add<ExchangeCopy>(rows_.groups[g].arriving.size());
    groups_[g].joins_at = layout.Add<ExchangeJoin>(rows_.groups[g].joins.size());
    groups_[g].partials_at = layout.Add<ExchangePartial>(groups_[g].partial_count);
  }
}

ExchangeCopy CudaDividedRows::CopyOf(const DividedRows::Copy& copy, const proto::SoftmaxSpec& spec,
                                     const CudaBatch& batch) const {
  using Of = DividedRows::Tensor;
  const GpuExchange& peer = *peers_[static_cast<size_t>(copy.part)];
  ExchangeCopy out;
  out.rows = static_cast<int32_t>(copy.rows);
  out.row_bytes = static_cast<int32_t>(copy.row_bytes);
  if (copy.tensor == Of::kOutput) {
    out.from = peer.own_slot(batch.id) + copy.payload_at;
    out.from_step = copy.payload_step;
    out.to = batch.lane->attended->data() + copy.tensor_at;
    out.to_step = copy.tensor_step;
    return out;
  }
  const std::byte* tensor = batch.query->data();
  if (copy.tensor != Of::kQuery) tensor = batch.key_value->data();
  if (copy.tensor == Of::kValue) tensor += batch.rows * int64_t{spec.kv_heads} * spec.key_dim * kElement;
  if (copy.tensor == Of::kGates) tensor += CudaHybrid::GatesAt(spec, batch.rows);
  const size_t payload = copy.tensor == Of::kQuery ? 0 : peer.key_value_at();
  out.from = tensor + copy.tensor_at;
  out.from_step = copy.tensor_step;
  out.to = peer.peer_slot(batch.id) + payload + copy.payload_at;
  out.to_step = copy.payload_step;
  return out;
}

void CudaDividedRows::Fill(std::byte* host, const std::byte* device, const CudaBatch& batch,
                           const proto::AttentionTable& table) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    const DividedRows::Group& rows = rows_.groups[g];
    const proto::SoftmaxSpec& spec = table.softmax(LayerGroup(static_cast<uint16_t>(g)));
    std::vector<GpuExchange*> peers;
    for (const int part : rows.parts) peers.push_back(peers_[static_cast<size_t>(part)]);
    const std::vector<int> no_rows(peers.size());  // what goes to them is said by the copies
    exchange::FillFan(peers, batch.id, no_rows, *reinterpret_cast<ExchangeFan*>(host + group.fan_at));
    const auto fill = [&](const std::vector<DividedRows::Copy>& copies, size_t at) {
      auto* out = reinterpret_cast<ExchangeCopy*>(host + at);
      for (const DividedRows::Copy& copy : copies) *out++ = CopyOf(copy, spec, batch);
      return reinterpret_cast<const ExchangeCopy*>(device + at);
    };
    group.fan = reinterpret_cast<const ExchangeFan*>(device + group.fan_at);
    group.leaving = fill(rows.leaving, group.leaving_at);
    group.arriving = fill(rows.arriving, group.arriving_at);
    FillJoins(rows, batch, host, device, group);
  }
}

void CudaDividedRows::FillJoins(const DividedRows::Group& rows, const CudaBatch& batch, std::byte* host,
                                const std::byte* device, Group& group) const {
  auto* join = reinterpret_cast<ExchangeJoin*>(host + group.joins_at);
  auto* partial = reinterpret_cast<ExchangePartial*>(host + group.partials_at);
  int32_t first = 0;
  for (const DividedRows::Join& from : rows.joins) {
    const auto count = static_cast<int32_t>(from.partials.size());
    *join++ = {batch.lane->attended->data() + from.o_at, from.rows, from.heads, from.first_head, first, count};
    first += count;
    for (const DividedRows::Partial& of : from.partials) {
      const std::byte* const answer = peers_[static_cast<size_t>(of.part)]->own_slot(batch.id);
      *partial++ = {reinterpret_cast<const float*>(answer + of.o_at), reinterpret_cast<const float*>(answer + of.ml_at),
                    of.first_row, of.rows};
    }
  }
  group.joins = reinterpret_cast<const ExchangeJoin*>(device + group.joins_at);
  group.partials = reinterpret_cast<const ExchangePartial*>(device + group.partials_at);
}

std::array<uint64_t, 3> CudaDividedRows::Words() const {
  uint64_t counts = 1, places = 1;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const DividedRows::Group& rows = rows_.groups[g];
    for (const size_t value :
         {rows.leaving.size(), rows.arriving.size(), rows.joins.size(), static_cast<size_t>(rows.joined_rows_and_heads),
          static_cast<size_t>(group.leaving_splits), static_cast<size_t>(group.arriving_splits)})
      counts = Mixed(counts, value);
    counts = Mixed(counts, StepWork::Word(group.answer));
    for (const size_t at : {group.fan_at, group.leaving_at, group.arriving_at, group.joins_at, group.partials_at})
      places = Mixed(places, at);
  }
  return {counts, places, StepWork::Word(groups_[0].fan)};
}

absl::Status CudaDividedRows::Leave(int op, LayerGroup of, CudaBatch& batch) const {
  const Group& group = groups_[of.value()];
  const auto count = static_cast<int32_t>(rows_.groups[of.value()].leaving.size());
  return kernels::cuda::ExchangeCopies(
      batch.stream(), {group.fan, group.leaving, count, group.leaving_splits, static_cast<uint32_t>(op)});
}

absl::StatusOr<const void*> CudaDividedRows::Arrive(int op, const proto::AttentionTable& table, const float* sinks,
                                                    CudaBatch& batch) const {
  const LayerGroup of = table.op_group[op];
  const Group& group = groups_[of.value()];
  const DividedRows::Group& rows = rows_.groups[of.value()];
  DT_RETURN_IF_ERROR(kernels::cuda::ExchangeAwaitAll(batch.stream(), {group.fan, static_cast<uint32_t>(op)}));
  if (group.answer != nullptr) return group.answer;
  if (!rows.arriving.empty()) {
    const auto count = static_cast<int32_t>(rows.arriving.size());
    DT_RETURN_IF_ERROR(
        kernels::cuda::ExchangeCopies(batch.stream(), {nullptr, group.arriving, count, group.arriving_splits, 0}));
  }
  if (!rows.joins.empty()) {
    const proto::SoftmaxSpec& spec = table.softmax(of);
    kernels::cuda::ExchangeJoinsLaunch join;
    join.joins = group.joins;
    join.partials = group.partials;
    join.sinks = sinks;
    join.o_row_step = int64_t{spec.query_heads} * spec.value_dim;
    join.o_type = spec.kv == DType::kBF16 ? kernels::cuda::WireType::kBF16 : kernels::cuda::WireType::kF16;
    join.count = static_cast<int32_t>(rows.joins.size());
    join.units = static_cast<int32_t>(rows.joined_rows_and_heads);
    join.value_dim = spec.value_dim;
    DT_RETURN_IF_ERROR(kernels::cuda::ExchangeJoins(batch.stream(), join));
  }
  return batch.lane->attended->data();
}

}  // namespace dovetail::compute
