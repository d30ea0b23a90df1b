#include "compute_worker/cuda/kept_rows.h"

#include <algorithm>

#include "kernels/cuda/experts/expert_ops.h"
#include "kernels/cuda/experts/expert_product.h"
#include "model/formats/dequantize.h"

namespace dovetail::compute {

using kernels::cuda::kQuantTileRows;
using kernels::cuda::QuantKind;
using kernels::cuda::QuantTile;

std::optional<QuantKind> KeptKindOf(const model::TensorSource& source, bool random) {
  if (source.stored_name.empty() || source.add != 0 || source.cols % 8 != 0) return std::nullopt;
  if (random) return QuantKind::kU4Offset;
  if (source.layout == model::TensorLayout::kE4M3) return QuantKind::kE4M3;
  return kernels::cuda::QuantKindOf(model::RowFormatOf(source.type));
}

void PackRows(std::span<const SourceRow> rows, QuantTile out) {
  const model::TensorSource& first = *rows[0].source;
  const std::byte* at[kQuantTileRows];
  if (first.layout == model::TensorLayout::kE4M3) {
    float scales[kQuantTileRows];
    for (size_t i = 0; i < rows.size(); ++i) at[i] = rows[i].source->E4M3Row(rows[i].row, scales[i]).data();
    return kernels::cuda::PackE4M3Tile(first.cols, {at, rows.size()}, {scales, rows.size()}, out);
  }
  std::vector<std::byte> bytes(rows.size() * first.row_bytes);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::byte* const row = bytes.data() + i * first.row_bytes;
    rows[i].source->CopyRow(rows[i].row, row);
    at[i] = row;
  }
  kernels::cuda::PackQuantTile(model::RowFormatOf(first.type), first.cols, {at, rows.size()}, out);
}

ExpertStack::ExpertStack(std::span<const model::TensorSource> sources, int each, bool random)
    : sources_(sources), each_(each) {
  const model::TensorSource& first = sources[0];
  bool alike = true;
  for (const model::TensorSource& source : sources) {
    rows_ += source.rows;
    any_in_few_bits_ = any_in_few_bits_ || KeptKindOf(source, random).has_value();
    alike = alike && source.rows == first.rows && source.cols == first.cols && source.type == first.type &&
            source.layout == first.layout && KeptKindOf(source, random) == KeptKindOf(first, random);
  }
  cols_ = first.cols;
  n_ = first.rows * each;
  if (alike && kernels::cuda::FitsExpertCodes(n_, cols_)) kind_ = KeptKindOf(first, random);
}

uint64_t ExpertStack::bytes() const {
  return is_kept() ? kernels::cuda::QuantBytesOf(*kind_, rows_, cols_).total()
                   : static_cast<uint64_t>(rows_) * cols_ * 2;
}

size_t ExpertStack::scratch_bytes() const {
  return is_kept() ? kernels::cuda::ExpertProduct::ScratchBytes(rows_ / n_, n_, cols_) : 0;
}

kernels::cuda::CudaWeights::KeptRows ExpertStack::kept_rows() const {
  return {*kind_, rows_, each_ == 2 ? static_cast<int32_t>(n_) : 0};
}

void ExpertStack::PackTile(int64_t tile, QuantTile out) const {
  const int64_t of_expert = n_ / kQuantTileRows, expert = tile / of_expert, within = tile % of_expert;
  const int64_t each_rows = kQuantTileRows / each_;
  SourceRow rows[kQuantTileRows];
  for (int64_t i = 0; i < kQuantTileRows; ++i) {
    const int64_t part = i / each_rows, row = within * each_rows + i % each_rows;
    rows[i] = {&sources_[static_cast<size_t>(expert * each_ + part)], row};
  }
  PackRows(rows, out);
}

std::optional<ExpertStackName> ExpertStackOf(const std::string& canonical, const model::ModelConfig& config) {
  constexpr std::string_view kExperts = ".experts.", kWeight = ".weight";
  const size_t at = canonical.find(kExperts), part = canonical.find('.', at + kExperts.size());
  const bool numbered = at != std::string::npos && canonical[at + kExperts.size()] >= '0' &&
                        canonical[at + kExperts.size()] <= '9' && part != std::string::npos;
  if (!numbered || !canonical.ends_with(kWeight)) return std::nullopt;
  const bool down = canonical.compare(part, 6, ".down_") == 0;
  const bool gated = config.activation != model::Activation::kRelu2;
  return ExpertStackName{canonical.substr(0, at) + (down ? ".down" : ".gate_up"), !down && gated ? 2 : 1};
}

}  // namespace dovetail::compute
