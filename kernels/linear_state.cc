#include "kernels/linear_state.h"

#include <algorithm>

#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/linear_state_kernels.h"

namespace dovetail::kernels {
namespace {

using Layout = LinearStateLayout;

constexpr int64_t kRunsPerThread = 8, kMaxRunItems = 16;

int Padded(int n) { return (n + 15) / 16 * 16; }
size_t RoundUp(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The rows of one block of one head, without its history; or of the state alone.
struct BlockRows {
  std::byte* rows[Layout::kHistory][Layout::kMaxRows];

  void Fill(const Layout& layout, std::byte* const* pieces, size_t piece_bytes) {
    std::byte** out[Layout::kHistory];
    for (int s = 0; s < Layout::kHistory; ++s) out[s] = rows[s];
    layout.RowsUpTo(Layout::kRankValues, pieces, piece_bytes, out);
  }
  void FillState(const Layout& layout, std::byte* const* pieces, size_t piece_bytes) {
    layout.Rows(Layout::kState, pieces, piece_bytes, rows[Layout::kState]);
  }
};

// An item's blocks by number.
std::byte* const* PiecesOf(const LinearStateItem& item, int64_t block) {
  const int64_t i = block - item.first_block;
  if (i < 0 || i >= item.blocks) return nullptr;
  std::byte* const* pieces = item.pieces + i * item.pieces_per_block;
  return pieces[0] != nullptr ? pieces : nullptr;
}

int64_t BlockOf(int64_t position) { return position / Layout::kTokens; }

bool NeedsScratch(const LinearStateItem& item) {
  for (int64_t block = BlockOf(item.first_position); block <= BlockOf(item.first_position + item.rows - 1); ++block)
    if (PiecesOf(item, block) == nullptr) return true;
  return false;
}

// `pieces`: that a block needs of the item's size.
absl::Status CheckItem(const LinearStateShape& shape, int pieces, const LinearStateItem& item, size_t index) {
  const auto error = [&](const auto&... what) { return InvalidArgument("linear_state: item ", index, ": ", what...); };
  if (item.rows < 1 || item.first_position < 0 || item.first_position + item.rows > kMaxPositions)
    return error(item.rows, " rows at position ", item.first_position);
  if (item.q == nullptr || item.k == nullptr || item.v == nullptr || item.o == nullptr || item.pieces == nullptr)
    return error("q, k, v, o or pieces is null");
  if (shape.decay == DecayForm::kVector && item.log_decay == nullptr) return error("log_decay is null");
  if (shape.update == StateUpdate::kDelta && item.beta == nullptr) return error("beta is null");
  if (shape.update == StateUpdate::kRankOne && (item.b == nullptr || item.c == nullptr)) return error("b or c is null");
  if (pieces == 0 || item.pieces_per_block < pieces)
    return error(item.pieces_per_block, " pieces of ", item.piece_bytes, " bytes a block; the layout needs ", pieces);
  const int64_t first = BlockOf(item.first_position), last = BlockOf(item.first_position + item.rows - 1);
  if (first > 0 && PiecesOf(item, first - 1) == nullptr) return error("the state before block ", first, " is missing");
  if (item.first_position % Layout::kTokens != 0 && PiecesOf(item, first) == nullptr)
    return error("block ", first, " is missing; its first tokens are in it");
  if (PiecesOf(item, last) == nullptr) return error("block ", last, " is missing; the last token goes there");
  return absl::OkStatus();
}

LinearTile TileOf(const LinearStateShape& shape, const BlockRows& block, const BlockRows* before) {
  LinearTile tile;
  tile.key_dim = shape.key_dim;
  tile.value_dim = shape.value_dim;
  tile.vector_decay = shape.decay == DecayForm::kVector;
  tile.delta = shape.update == StateUpdate::kDelta;
  tile.rank_one = shape.update == StateUpdate::kRankOne;
  tile.state_bf16 = shape.state == DType::kBF16;
  tile.state = before != nullptr ? before->rows[Layout::kState] : nullptr;
  tile.keys = block.rows[Layout::kKeys];
  tile.values = block.rows[Layout::kValues];
  tile.decays = block.rows[Layout::kDecays];
  tile.rank_keys = block.rows[Layout::kRankKeys];
  tile.rank_values = block.rows[Layout::kRankValues];
  return tile;
}

void PointAt(const LinearStateItem& item, int row, LinearTile& tile) {
  const auto at = [row](auto* base, int64_t step) { return base != nullptr ? base + row * step : nullptr; };
  tile.q = at(item.q, tile.q_step = item.q_step);
  tile.k = at(item.k, tile.k_step = item.k_step);
  tile.v = at(item.v, tile.v_step = item.v_step);
  tile.o = at(item.o, tile.o_step = item.o_step);
  tile.beta = at(item.beta, tile.beta_step = item.beta_step);
  tile.b = at(item.b, tile.b_step = item.b_step);
  tile.c = at(item.c, tile.c_step = item.c_step);
  tile.decay_step = item.log_decay != nullptr ? item.decay_step : 0;
  tile.log_decay = item.log_decay != nullptr ? item.log_decay + row * item.decay_step : &item.constant_log_decay;
}

// The rows that an item begins with.
struct ItemRows {
  BlockRows memory[2];
  BlockRows* block = &memory[0];   // of its first token
  BlockRows* before = &memory[1];  // the state of the block before
  bool has_block = false, has_before = false;
  const LinearStateItem* item = nullptr;

  void Fill(const Layout& layout, const LinearStateItem& of) {
    item = &of;
    const int64_t number = BlockOf(of.first_position);
    std::byte* const* pieces = PiecesOf(of, number);
    has_block = pieces != nullptr;
    if (has_block) block->Fill(layout, pieces, of.piece_bytes);
    has_before = number > 0;
    if (has_before) before->FillState(layout, PiecesOf(of, number - 1), of.piece_bytes);
  }
};

// An item of few tokens, all in one block, is bound by the memory it reads: decays, S, and the tokens of its block. The
// stream of each item goes on where that of the one before it stands, so that memory is read while tokens are summed.
class DecodeFetch {
 public:
  static constexpr int kMaxTokens = 2;

  static bool Fits(const LinearStateItem& item) {
    return item.rows <= kMaxTokens && BlockOf(item.first_position) == BlockOf(item.first_position + item.rows - 1);
  }

  // `next`: the rows of what comes then, or null. Good until the next call.
  LinearStream* StreamOf(const Layout& layout, const ItemRows& item, const ItemRows* next) {
    const int fetched = item.item == next_ ? FetchedOfNext() : 0;
    stream_ = {};
    const int tokens = static_cast<int>(item.item->first_position % Layout::kTokens);
    const int state_rows = layout.rows(Layout::kState);
    if (item.has_before) Add(layout, Layout::kState, *item.before, state_rows);
    if (item.has_block)
      for (const Layout::Section section : {Layout::kKeys, Layout::kRankKeys, Layout::kValues, Layout::kRankValues})
        Add(layout, section, *item.block, std::min(tokens, layout.rows(section)));
    if (item.has_before) Begin(fetched);
    next_ = next != nullptr ? next->item : nullptr;
    next_state_ = LinearStream::kMaxParts;
    if (next == nullptr) return &stream_;
    const int next_tokens = static_cast<int>(next->item->first_position % Layout::kTokens) + 1;
    if (next->has_block)
      Add(layout, Layout::kDecays, *next->block, std::min(layout.rows(Layout::kDecays), next_tokens));
    if (!next->has_before) return &stream_;
    next_state_ = stream_.count;
    Add(layout, Layout::kState, *next->before, std::min(LinearStream::kMostAhead, state_rows));
    return &stream_;
  }

 private:
  void Add(const Layout& layout, Layout::Section section, const BlockRows& block, int rows) {
    const int bytes = static_cast<int>(layout.row_bytes(section));
    if (rows > 0) stream_.parts[stream_.count++] = {block.rows[section], rows, bytes};
  }
  // Past the rows of S that have been fetched; of a first item the first ones are fetched now.
  void Begin(int fetched) {
    const LinearFetch& state = stream_.parts[0];
    for (; fetched < std::min(LinearStream::kAhead, state.count); ++fetched)
      for (int line = 0; line < state.bytes; line += 64) __builtin_prefetch(state.rows[fetched] + line, 0, 2);
    stream_.part = fetched < state.count ? 0 : 1;
    stream_.row = fetched < state.count ? fetched : 0;
  }
  int FetchedOfNext() const {
    if (stream_.part < next_state_ || next_state_ >= stream_.count) return 0;
    return stream_.part > next_state_ ? stream_.parts[next_state_].count : stream_.row;
  }

  LinearStream stream_;
  int next_state_ = LinearStream::kMaxParts;  // the part that is the next item's S
  const LinearStateItem* next_ = nullptr;
};

// Block by block; what has no block of its own goes through two blocks of scratch, by turns. `rows` are the item's;
// `next` those of what this thread will run then, or null.
void RunItem(const LinearStateKernels& kernels, const LinearStateShape& shape, const Layout& layout, ItemRows& rows,
             const ItemRows* next, DecodeFetch& fetch, std::byte* scratch) {
  const LinearStateItem& item = *rows.item;
  BlockRows *block = rows.block, *before = rows.before;
  const int64_t first_block = BlockOf(item.first_position);
  int64_t number = first_block;
  for (int row = 0; row < item.rows; ++number) {
    const int first = static_cast<int>((item.first_position + row) % Layout::kTokens);
    const int count = std::min(Layout::kTokens - first, item.rows - row);
    const bool filled = number == first_block && rows.has_block;
    std::byte* const* pieces = PiecesOf(item, number);
    if (!filled && pieces != nullptr) {
      block->Fill(layout, pieces, item.piece_bytes);
    } else if (!filled) {
      std::byte* whole = scratch + (number % 2) * layout.bytes();
      block->Fill(layout, &whole, layout.bytes());
    }
    LinearTile tile = TileOf(shape, *block, number > 0 ? before : nullptr);
    if (DecodeFetch::Fits(item)) tile.stream = fetch.StreamOf(layout, rows, next);
    for (int done = 0; done < count; done += kLinearTileRows) {
      tile.first = first + done;
      tile.rows = std::min(kLinearTileRows, count - done);
      PointAt(item, row + done, tile);
      kernels.append(tile);
    }
    row += count;
    if (first + count == Layout::kTokens) kernels.advance(tile, block->rows[Layout::kState]);
    std::swap(block, before);
  }
}

}  // namespace

absl::Status LinearStateShape::Validate() const {
  if (key_dim < 1 || key_dim > kLinearMaxDim || value_dim < 1 || value_dim > kLinearMaxDim)
    return InvalidArgument("linear_state: a state of ", key_dim, " x ", value_dim, "; each may be 1..", kLinearMaxDim);
  if (history_channels < 0 || history_channels > 8 * kLinearMaxDim)
    return InvalidArgument("linear_state: a history of ", history_channels, " channels; 0..", 8 * kLinearMaxDim);
  if (update == StateUpdate::kRankOne && decay != DecayForm::kVector)
    return InvalidArgument("linear_state: a rank-one update needs a vector decay");
  if (state != DType::kF32 && state != DType::kBF16)
    return InvalidArgument("linear_state: a state is kept in float32 or bfloat16, not ", std::string(Name(state)));
  return absl::OkStatus();
}

LinearStateLayout::LinearStateLayout(const LinearStateShape& shape) {
  const size_t key_row = RoundUp(4 * Padded(shape.key_dim)), value_row = RoundUp(4 * Padded(shape.value_dim));
  const size_t token_row = 4 * kTokens;
  const bool vector = shape.decay == DecayForm::kVector;
  sections_[kState] = {shape.key_dim, RoundUp(SizeOf(shape.state) * Padded(shape.value_dim))};
  sections_[kKeys] = {kTokens, key_row};
  sections_[kValues] = {kTokens, value_row};
  sections_[kDecays] = vector ? Extent{kTokens, key_row} : Extent{1, token_row};
  if (shape.update == StateUpdate::kRankOne) {
    sections_[kRankKeys] = {kTokens, key_row};
    sections_[kRankValues] = {kTokens, value_row};
  }
  if (shape.history_channels > 0)
    sections_[kHistory] = {kTokens, RoundUp(SizeOf(shape.history) * shape.history_channels)};
}

size_t LinearStateLayout::bytes() const {
  size_t bytes = 0;
  for (const Extent& section : sections_) bytes += section.rows * section.row_bytes;
  return bytes;
}

int LinearStateLayout::pieces(size_t piece_bytes) const {
  int pieces = 1;
  size_t used = 0;
  for (const Extent& section : sections_) {
    if (section.row_bytes > piece_bytes) return 0;
    for (int row = 0; row < section.rows; ++row) {
      if (used + section.row_bytes > piece_bytes) {
        ++pieces;
        used = 0;
      }
      used += section.row_bytes;
    }
  }
  return pieces;
}

void LinearStateLayout::RowsUpTo(Section last, std::byte* const* pieces, size_t piece_bytes,
                                 std::byte** const* out) const {
  std::byte* at = *pieces;
  size_t left = piece_bytes;  // of the piece
  for (int s = 0; s <= last; ++s) {
    const size_t row_bytes = sections_[s].row_bytes;
    for (int row = 0; row < sections_[s].rows;) {
      if (left < row_bytes) {
        at = *++pieces;
        left = piece_bytes;
      }
      const size_t wanted = (sections_[s].rows - row) * row_bytes;
      const int rows = wanted <= left ? sections_[s].rows - row : static_cast<int>(left / row_bytes);
      for (int i = 0; i < rows; ++i) out[s][row + i] = at + i * row_bytes;
      row += rows;
      at += rows * row_bytes;
      left -= rows * row_bytes;
    }
  }
}

void LinearStateLayout::Rows(Section wanted, std::byte* const* pieces, size_t piece_bytes, std::byte** out) const {
  std::byte* others[kMaxRows];
  std::byte** all[kSections];
  for (int s = 0; s < kSections; ++s) all[s] = s == wanted ? out : others;
  RowsUpTo(wanted, pieces, piece_bytes, all);
}

size_t LinearStateScratchBytes(const LinearStateShape& shape, std::span<const LinearStateItem> items) {
  const size_t per_item = 2 * LinearStateLayout(shape).bytes();
  return per_item * std::count_if(items.begin(), items.end(), NeedsScratch);
}

absl::Status LinearState(const OpContext& context, const LinearStateShape& shape,
                         std::span<const LinearStateItem> items, std::span<std::byte> scratch) {
  DT_RETURN_IF_ERROR(shape.Validate());
  const Layout layout(shape);
  int pieces = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i == 0 || items[i].piece_bytes != items[i - 1].piece_bytes) pieces = layout.pieces(items[i].piece_bytes);
    DT_RETURN_IF_ERROR(CheckItem(shape, pieces, items[i], i));
  }
  if (const size_t needed = LinearStateScratchBytes(shape, items); needed > scratch.size())
    return ResourceExhausted("linear_state: ", scratch.size(), " bytes of scratch, ", needed, " are needed");
  const LinearStateKernels& kernels = SelectLinearState(context.table->isa);
  const size_t per_item = 2 * layout.bytes();
  const int64_t row_work = int64_t{shape.key_dim} * shape.value_dim;
  int64_t most_rows = 0;
  for (const LinearStateItem& item : items) most_rows = std::max<int64_t>(most_rows, item.rows);
  const bool any_scratch = std::any_of(items.begin(), items.end(), NeedsScratch);
  const auto run = [&](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    size_t before = 0;  // items with scratch before this run
    if (any_scratch) before = std::count_if(items.begin(), items.begin() + begin, NeedsScratch);
    ItemRows rows[2];  // of this item and of the next, by turns
    rows[begin % 2].Fill(layout, items[begin]);
    DecodeFetch fetch;
    for (int64_t i = begin; i < end; ++i) {
      ItemRows* next = i + 1 < end ? &rows[(i + 1) % 2] : nullptr;
      if (next != nullptr) next->Fill(layout, items[i + 1]);
      RunItem(kernels, shape, layout, rows[i % 2], next, fetch, scratch.data() + before * per_item);
      if (any_scratch && NeedsScratch(items[i])) ++before;
    }
  };
  // Runs of several items, so that one can fetch for the next; enough of them that no thread waits long for another.
  const auto count = static_cast<int64_t>(items.size());
  const int64_t run_items = std::clamp<int64_t>(count / (kRunsPerThread * context.pool->threads()), 1, kMaxRunItems);
  const int64_t element_work = row_work * most_rows * run_items;
  ForRows(context, (count + run_items - 1) / run_items, element_work,
          [&](int64_t begin, int64_t end) { run(begin * run_items, std::min(end * run_items, count)); });
  return absl::OkStatus();
}

const LinearStateKernels& SelectLinearState(Isa isa) {
  return isa >= Isa::kAvx512 ? LinearStateAvx512() : LinearStateAvx2();
}

}  // namespace dovetail::kernels
