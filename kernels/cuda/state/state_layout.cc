#include "kernels/cuda/state/state_layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace dovetail::kernels::cuda {
namespace {

int32_t RoundUp(size_t bytes) { return static_cast<int32_t>((bytes + 63) / 64 * 64); }
int32_t Padded(int n) { return (n + 15) / 16 * 16; }

// Fills pieces from the beginning; a part's rows begin behind the last of the part before.
class Packer {
 public:
  explicit Packer(size_t piece_bytes) : piece_bytes_(piece_bytes) {}

  StateSection Add(int rows, size_t row_bytes) {
    StateSection section;
    section.rows = rows;
    section.row_bytes = RoundUp(row_bytes);
    const size_t bytes = section.row_bytes;
    if (bytes == 0 || bytes > piece_bytes_) {
      fits_ = fits_ && rows == 0;
      return section;
    }
    section.piece = piece_;
    section.offset = static_cast<int32_t>(used_);
    section.piece_rows = static_cast<int32_t>(piece_bytes_ / bytes);
    section.first_rows = std::min(rows, static_cast<int32_t>((piece_bytes_ - used_) / bytes));
    const int beyond = rows - section.first_rows;
    if (beyond == 0) {
      used_ += rows * bytes;
      return section;
    }
    const int pieces = (beyond + section.piece_rows - 1) / section.piece_rows;
    piece_ += pieces;
    used_ = (beyond - (pieces - 1) * section.piece_rows) * bytes;
    return section;
  }
  int pieces() const { return fits_ ? piece_ + 1 : 0; }

 private:
  const size_t piece_bytes_;
  size_t used_ = 0;
  int piece_ = 0;
  bool fits_ = true;
};

std::byte* RowOf(const StateSection& section, std::byte* const* pieces, int row) {
  if (row < section.first_rows) return pieces[section.piece] + section.offset + size_t(row) * section.row_bytes;
  row -= section.first_rows;
  return pieces[section.piece + 1 + row / section.piece_rows] + size_t(row % section.piece_rows) * section.row_bytes;
}

float FromBits(const std::byte* at) {
  BF16 x;
  std::memcpy(&x.bits, at, 2);
  return ToFloat(x);
}
void ToBits(float x, std::byte* at) {
  const BF16 rounded = ToBF16(x);
  std::memcpy(at, &rounded.bits, 2);
}
float* FloatsOf(std::byte* row) { return reinterpret_cast<float*>(row); }

// e^g as kernels see it.
float DecayOf(float log) { return log <= kLowestLogDecay ? 0.0f : std::exp(log); }
float LogOf(float decay) { return decay > 0 ? std::max(std::log(decay), kLowestLogDecay) : kLowestLogDecay; }

// The rows of both forms of one block.
struct Rows {
  LinearStateLayout cpu_layout;
  StateLayout gpu_layout;
  std::byte* cpu[LinearStateLayout::kSections][LinearStateLayout::kMaxRows];

  Rows(const LinearStateShape& shape, std::byte* const* cpu_pieces, size_t piece_bytes)
      : cpu_layout(shape), gpu_layout(LayOutState(shape, piece_bytes)) {
    std::byte** out[LinearStateLayout::kSections];
    for (int s = 0; s < LinearStateLayout::kSections; ++s) out[s] = cpu[s];
    cpu_layout.RowsUpTo(LinearStateLayout::kHistory, cpu_pieces, piece_bytes, out);
  }
};

}  // namespace

StateLayout LayOutState(const LinearStateShape& shape, size_t piece_bytes) {
  StateLayout layout;
  layout.value_stride = Padded(shape.value_dim);
  layout.key_stride = Padded(shape.key_dim);
  Packer packer(piece_bytes);
  layout.state = packer.Add(shape.key_dim, SizeOf(shape.state) * layout.value_stride);
  layout.keys = packer.Add(kStateTokens, 2 * layout.key_stride);
  layout.values = packer.Add(kStateTokens, 2 * layout.value_stride);
  layout.decays = shape.decay == DecayForm::kVector ? packer.Add(kStateTokens, 2 * layout.key_stride)
                                                    : packer.Add(1, sizeof(float) * kStateTokens);
  if (shape.history_channels > 0)
    layout.history = packer.Add(kStateTokens, SizeOf(shape.history) * shape.history_channels);
  if (StateHasMidway(shape.key_dim, shape.value_dim))
    layout.midway = packer.Add(1, sizeof(uint32_t) * shape.value_dim / kStateSlice);
  layout.pieces = packer.pieces();
  return layout;
}

void StateToCpu(const LinearStateShape& shape, int tokens, std::byte* const* from, std::byte* const* to,
                size_t piece_bytes) {
  const Rows rows(shape, to, piece_bytes);
  const StateLayout& layout = rows.gpu_layout;
  if (tokens == kStateTokens)
    for (int i = 0; i < shape.key_dim; ++i)
      std::memcpy(rows.cpu[LinearStateLayout::kState][i], RowOf(layout.state, from, i),
                  SizeOf(shape.state) * layout.value_stride);
  const bool vector = shape.decay == DecayForm::kVector;
  for (int t = 0; t < tokens; ++t) {
    const auto widen = [&](const StateSection& section, LinearStateLayout::Section to_section, int count) {
      const std::byte* row = RowOf(section, from, t);
      for (int i = 0; i < count; ++i) FloatsOf(rows.cpu[to_section][t])[i] = FromBits(row + 2 * i);
    };
    widen(layout.keys, LinearStateLayout::kKeys, layout.key_stride);
    widen(layout.values, LinearStateLayout::kValues, layout.value_stride);
    if (vector) {
      widen(layout.decays, LinearStateLayout::kDecays, layout.key_stride);
      float* row = FloatsOf(rows.cpu[LinearStateLayout::kDecays][t]);
      for (int i = 0; i < layout.key_stride; ++i) row[i] = DecayOf(row[i]);
    } else {
      FloatsOf(rows.cpu[LinearStateLayout::kDecays][0])[t] = DecayOf(FloatsOf(RowOf(layout.decays, from, 0))[t]);
    }
    if (layout.history.rows > 0)
      std::memcpy(rows.cpu[LinearStateLayout::kHistory][t], RowOf(layout.history, from, t),
                  SizeOf(shape.history) * shape.history_channels);
  }
}

void StateFromCpu(const LinearStateShape& shape, int tokens, std::byte* const* from, std::byte* const* to,
                  size_t piece_bytes) {
  const Rows rows(shape, from, piece_bytes);
  const StateLayout& layout = rows.gpu_layout;
  if (layout.midway.rows > 0) std::memset(RowOf(layout.midway, to, 0), 0, layout.midway.row_bytes);
  if (tokens == kStateTokens)
    for (int i = 0; i < shape.key_dim; ++i)
      std::memcpy(RowOf(layout.state, to, i), rows.cpu[LinearStateLayout::kState][i],
                  SizeOf(shape.state) * layout.value_stride);
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < layout.key_stride; ++i)
      ToBits(FloatsOf(rows.cpu[LinearStateLayout::kKeys][t])[i], RowOf(layout.keys, to, t) + 2 * i);
    for (int i = 0; i < layout.value_stride; ++i)
      ToBits(FloatsOf(rows.cpu[LinearStateLayout::kValues][t])[i], RowOf(layout.values, to, t) + 2 * i);
    if (shape.decay == DecayForm::kVector) {
      for (int i = 0; i < layout.key_stride; ++i)
        ToBits(LogOf(FloatsOf(rows.cpu[LinearStateLayout::kDecays][t])[i]), RowOf(layout.decays, to, t) + 2 * i);
    } else {
      FloatsOf(RowOf(layout.decays, to, 0))[t] = LogOf(FloatsOf(rows.cpu[LinearStateLayout::kDecays][0])[t]);
    }
    if (layout.history.rows > 0)
      std::memcpy(RowOf(layout.history, to, t), rows.cpu[LinearStateLayout::kHistory][t],
                  SizeOf(shape.history) * shape.history_channels);
  }
}

}  // namespace dovetail::kernels::cuda
