#include "linear_attention/packed_state.h"

#include <cstring>

namespace dovetail::linear_attention {

using Layout = kernels::LinearStateLayout;

namespace {

constexpr int kTokens = Layout::kTokens;

// What crosses of a block: `bytes` of each of the rows [first, last) of a section.
struct RowRange {
  Layout::Section section;
  int first = 0, last = 0;
  size_t bytes = 0;
};

// In the order of the wire; the count of ranges is returned.
int RangesOf(const proto::LinearSpec& spec, int tokens, RowRange* out) {
  RowRange* at = out;
  const size_t inputs = spec.channels() * SizeOf(spec.wire);
  if (tokens == kTokens) {
    *at++ = {Layout::kState, 0, spec.key_dim, spec.value_dim * SizeOf(spec.state)};
    if (spec.conv_width > 0) *at++ = {Layout::kHistory, kTokens - spec.conv_history(), kTokens, inputs};
    return static_cast<int>(at - out);
  }
  *at++ = {Layout::kKeys, 0, tokens, spec.key_dim * sizeof(float)};
  *at++ = {Layout::kValues, 0, tokens, spec.value_dim * sizeof(float)};
  *at++ = spec.vector_decay ? RowRange{Layout::kDecays, 0, tokens, spec.key_dim * sizeof(float)}
                            : RowRange{Layout::kDecays, 0, 1, tokens * sizeof(float)};
  if (spec.conv_width > 0) *at++ = {Layout::kHistory, 0, tokens, inputs};
  return static_cast<int>(at - out);
}

constexpr int kMostRanges = 4;

}  // namespace

kernels::LinearStateShape ShapeOf(const proto::LinearSpec& spec) {
  kernels::LinearStateShape shape;
  shape.key_dim = spec.key_dim;
  shape.value_dim = spec.value_dim;
  shape.decay = spec.vector_decay ? kernels::DecayForm::kVector : kernels::DecayForm::kScalar;
  shape.update = spec.delta ? kernels::StateUpdate::kDelta : kernels::StateUpdate::kAdd;
  shape.state = spec.state;
  shape.history_channels = spec.conv_width > 0 ? spec.channels() : 0;
  shape.history = spec.wire;
  return shape;
}

struct PackedState::Rows {
  std::byte* at[Layout::kSections][Layout::kMaxRows];

  Rows(const Layout& layout, std::byte* const* pieces, size_t piece_bytes) {
    std::byte** out[Layout::kSections];
    for (int s = 0; s < Layout::kSections; ++s) out[s] = at[s];
    layout.RowsUpTo(Layout::kHistory, pieces, piece_bytes, out);
  }
};

PackedState::PackedState(const proto::LinearSpec& spec, size_t piece_bytes)
    : spec_(spec), layout_(ShapeOf(spec)), piece_bytes_(piece_bytes) {}

size_t PackedState::bytes(int tokens) const {
  return static_cast<size_t>(tokens == kTokens ? spec_.state_bytes() : tokens * spec_.token_bytes());
}

std::byte* PackedState::Pack(int tokens, std::byte* const* pieces, std::byte* out) const {
  const Rows rows(layout_, pieces, piece_bytes_);
  RowRange ranges[kMostRanges];
  const int count = RangesOf(spec_, tokens, ranges);
  for (int r = 0; r < count; ++r)
    for (int row = ranges[r].first; row < ranges[r].last; ++row, out += ranges[r].bytes)
      std::memcpy(out, rows.at[ranges[r].section][row], ranges[r].bytes);
  return out;
}

// Rows are padded with zeros, as kernels write them; but not that of scalar decays, which holds one of each token.
const std::byte* PackedState::Unpack(int tokens, const std::byte* in, std::byte* const* pieces) const {
  const Rows rows(layout_, pieces, piece_bytes_);
  RowRange ranges[kMostRanges];
  const int count = RangesOf(spec_, tokens, ranges);
  for (int r = 0; r < count; ++r) {
    const RowRange& range = ranges[r];
    const size_t padding = layout_.row_bytes(range.section) - range.bytes;
    const bool padded = range.section != Layout::kDecays || spec_.vector_decay;
    for (int row = range.first; row < range.last; ++row, in += range.bytes) {
      std::byte* const to = rows.at[range.section][row];
      std::memcpy(to, in, range.bytes);
      if (padded) std::memset(to + range.bytes, 0, padding);
    }
  }
  return in;
}

}  // namespace dovetail::linear_attention
