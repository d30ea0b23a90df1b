#include "proto/token_layout.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace dovetail::proto {
namespace {

absl::Status CheckRanks(int ranks) {
  if (ranks < 1 || ranks > kMaxLayoutRanks)
    return InvalidArgument("layout: ", ranks, " ranks; between 1 and ", kMaxLayoutRanks);
  return absl::OkStatus();
}

absl::StatusOr<int> FindAxis(const TensorShape& shape, std::string_view name) {
  const int axis = shape.AxisOf(name);
  if (axis < 0) return InvalidArgument("layout: ", shape.DebugString(), " has no axis ", std::string(name));
  return axis;
}

std::string DebugString(const AxisRange& range) { return absl::StrCat(range.begin, "..", range.end); }

absl::Status CheckRange(const AxisRange& range, int rank, const Axis& axis, int64_t granularity) {
  const auto where = [&] { return absl::StrCat("layout: rank ", rank, " holds ", axis.name, " ", DebugString(range)); };
  if (range.begin < 0 || range.end < range.begin || range.end > axis.size)
    return InvalidArgument(where(), ", which is no range of 0..", axis.size);
  if (range.empty()) return absl::OkStatus();
  if (range.begin % granularity != 0 || (range.end % granularity != 0 && range.end != axis.size))
    return InvalidArgument(where(), "; ranges begin and end on multiples of ", granularity, ", or with the axis");
  return absl::OkStatus();
}

// Ranges that are not empty are equal or disjoint, and cover the axis.
absl::Status CheckCover(std::span<const AxisRange> ranges, const Axis& axis) {
  std::vector<int> order;
  for (int rank = 0; rank < static_cast<int>(ranges.size()); ++rank)
    if (!ranges[rank].empty()) order.push_back(rank);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return std::pair(ranges[a].begin, ranges[a].end) < std::pair(ranges[b].begin, ranges[b].end);
  });
  int64_t end = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const AxisRange& range = ranges[order[i]];
    if (i > 0 && range == ranges[order[i - 1]]) continue;
    if (range.begin < end)
      return InvalidArgument("layout: ranks ", order[i - 1], " and ", order[i], " hold ", axis.name, " ",
                             DebugString(ranges[order[i - 1]]), " and ", DebugString(range),
                             "; ranges of two ranks are equal or do not overlap");
    if (range.begin > end)
      return InvalidArgument("layout: no rank holds ", axis.name, " ", DebugString({end, range.begin}));
    end = range.end;
  }
  if (end < axis.size) return InvalidArgument("layout: no rank holds ", axis.name, " ", DebugString({end, axis.size}));
  return absl::OkStatus();
}

// A part of the tensor, or of a part: a range of every axis.
using Box = absl::InlinedVector<AxisRange, 4>;

Box BoxOf(const Layout& layout, int rank) {
  Box box;
  for (const Axis& axis : layout.shape().axes) box.push_back({0, axis.size});
  box[std::max(layout.axis(), 0)] = layout.range(rank);
  return box;
}

bool IsEmpty(const Box& box) {
  return std::any_of(box.begin(), box.end(), [](const AxisRange& range) { return range.empty(); });
}

Box Intersection(const Box& a, const Box& b) {
  Box both = a;
  for (size_t i = 0; i < both.size(); ++i) both[i] = {std::max(a[i].begin, b[i].begin), std::min(a[i].end, b[i].end)};
  return both;
}

// Where `box` lies in the dense memory of `part`. They differ along one axis at most: a part is a range of one axis,
// and what another part has of it either is cut along another axis, or is a range of that same axis.
Region RegionOf(const Box& box, const Box& part, int64_t element_bytes) {
  Region region{0, 1, element_bytes, 0};
  int axis = static_cast<int>(part.size()) - 1;
  for (; axis >= 0 && box[axis] == part[axis]; --axis) region.run_bytes *= part[axis].size();
  if (axis < 0) return region;
  region.offset = (box[axis].begin - part[axis].begin) * region.run_bytes;
  const int64_t step = part[axis].size() * region.run_bytes;
  region.run_bytes *= box[axis].size();
  while (--axis >= 0) {
    DT_CHECK(box[axis] == part[axis]);
    region.runs *= part[axis].size();
  }
  if (region.runs > 1) region.step = step;
  return region;
}

class Fnv {
 public:
  void Add(int64_t value) {
    for (int i = 0; i < 8; ++i) hash_ = (hash_ ^ ((static_cast<uint64_t>(value) >> (8 * i)) & 0xff)) * 0x100000001b3;
  }
  void Add(std::string_view text) {
    Add(static_cast<int64_t>(text.size()));
    for (const char c : text) Add(c);
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325;
};

uint64_t FingerprintOf(const Layout& from, const Layout& to) {
  Fnv fnv;
  fnv.Add(from.shape().element_bytes);
  for (const Axis& axis : from.shape().axes) {
    fnv.Add(axis.name);
    fnv.Add(axis.size);
  }
  for (const Layout* layout : {&from, &to}) {
    fnv.Add(layout->axis());
    for (int rank = 0; rank < layout->ranks(); ++rank) {
      fnv.Add(layout->range(rank).begin);
      fnv.Add(layout->range(rank).end);
    }
  }
  return fnv.value();
}

std::vector<size_t> BeginsOf(std::span<const Transfer> transfers, int ranks, int Transfer::*rank) {
  std::vector<size_t> begins(ranks + 1, 0);
  for (const Transfer& transfer : transfers) ++begins[transfer.*rank + 1];
  for (int r = 0; r < ranks; ++r) begins[r + 1] += begins[r];
  return begins;
}

int64_t Sum(std::span<const Transfer> transfers) {
  int64_t bytes = 0;
  for (const Transfer& transfer : transfers) bytes += transfer.bytes();
  return bytes;
}

}  // namespace

int TensorShape::AxisOf(std::string_view name) const {
  for (size_t i = 0; i < axes.size(); ++i)
    if (axes[i].name == name) return static_cast<int>(i);
  return -1;
}

int64_t TensorShape::Bytes() const {
  int64_t bytes = element_bytes;
  for (const Axis& axis : axes) bytes *= axis.size;
  return bytes;
}

absl::Status TensorShape::Validate() const {
  if (axes.empty() || axes.size() > kMaxTensorAxes)
    return InvalidArgument("tensor: ", axes.size(), " axes; between 1 and ", kMaxTensorAxes);
  if (element_bytes < 1) return InvalidArgument("tensor: elements of ", element_bytes, " bytes; at least 1");
  int64_t left = kMaxTensorBytes / element_bytes;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].name.empty()) return InvalidArgument("tensor: axis ", i, " has no name");
    if (AxisOf(axes[i].name) != static_cast<int>(i))
      return InvalidArgument("tensor: two axes are called ", axes[i].name);
    if (axes[i].size < 1) return InvalidArgument("tensor: axis ", axes[i].name, " has size ", axes[i].size);
    if (left < axes[i].size)
      return InvalidArgument("tensor: ", DebugString(), " is larger than ", kMaxTensorBytes, " bytes");
    left /= axes[i].size;
  }
  return absl::OkStatus();
}

std::string TensorShape::DebugString() const {
  std::string text = "[";
  for (const Axis& axis : axes) absl::StrAppend(&text, text.size() > 1 ? ", " : "", axis.name, " ", axis.size);
  return absl::StrCat(text, "] of ", element_bytes, " bytes");
}

// Cuts that mean the same are equal: where all that hold something hold all of it, the axis says nothing.
Layout::Layout(const TensorShape& shape, int axis, std::vector<AxisRange> ranges)
    : shape_(shape), axis_(axis), ranges_(std::move(ranges)) {
  const AxisRange whole{0, shape_.axes[axis].size};
  for (AxisRange& range : ranges_)
    if (range.empty()) range = {};
  if (!std::all_of(ranges_.begin(), ranges_.end(), [&](const AxisRange& r) { return r.empty() || r == whole; })) return;
  axis_ = -1;
  for (AxisRange& range : ranges_)
    if (!range.empty()) range = {0, shape_.axes[0].size};
}

absl::StatusOr<Layout> Layout::Replicated(const TensorShape& shape, int ranks) {
  DT_RETURN_IF_ERROR(shape.Validate());
  DT_RETURN_IF_ERROR(CheckRanks(ranks));
  return Layout(shape, 0, std::vector<AxisRange>(ranks, AxisRange{0, shape.axes[0].size}));
}

absl::StatusOr<Layout> Layout::Even(const TensorShape& shape, std::string_view axis_name, int ranks,
                                    const EvenCut& cut) {
  DT_RETURN_IF_ERROR(shape.Validate());
  DT_RETURN_IF_ERROR(CheckRanks(ranks));
  DT_ASSIGN_OR_RETURN(const int axis, FindAxis(shape, axis_name));
  if (cut.granularity < 1) return InvalidArgument("layout: granularity ", cut.granularity, "; at least 1");
  const int64_t size = shape.axes[axis].size;
  const int64_t granularity = std::min(cut.granularity, size);
  const int64_t pieces = (size + granularity - 1) / granularity;
  if (pieces < ranks && cut.few == FewPieces::kRefuse)
    return InvalidArgument("layout: ", shape.axes[axis].name, " of ", size, " has ", pieces, " pieces of ", granularity,
                           ", fewer than ", ranks, " ranks: take at most ", pieces,
                           " ranks, or let some hold nothing or the same");
  std::vector<AxisRange> ranges;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    AxisRange piece;
    if (pieces >= ranks)
      piece = {rank * (pieces / ranks) + rank * (pieces % ranks) / ranks,
               (rank + 1) * (pieces / ranks) + (rank + 1) * (pieces % ranks) / ranks};
    else if (cut.few == FewPieces::kReplicate)
      piece = {rank * pieces / ranks, rank * pieces / ranks + 1};
    else
      piece = {std::min(rank, pieces), std::min(rank + 1, pieces)};
    ranges.push_back({piece.begin * granularity, std::min(piece.end * granularity, size)});
  }
  return Layout(shape, axis, std::move(ranges));
}

absl::StatusOr<Layout> Layout::Of(const TensorShape& shape, std::string_view axis_name,
                                  std::span<const AxisRange> ranges, int64_t granularity) {
  DT_RETURN_IF_ERROR(shape.Validate());
  DT_RETURN_IF_ERROR(CheckRanks(static_cast<int>(std::min<size_t>(ranges.size(), kMaxLayoutRanks + 1))));
  DT_ASSIGN_OR_RETURN(const int axis, FindAxis(shape, axis_name));
  if (granularity < 1) return InvalidArgument("layout: granularity ", granularity, "; at least 1");
  for (size_t rank = 0; rank < ranges.size(); ++rank)
    DT_RETURN_IF_ERROR(CheckRange(ranges[rank], static_cast<int>(rank), shape.axes[axis], granularity));
  DT_RETURN_IF_ERROR(CheckCover(ranges, shape.axes[axis]));
  return Layout(shape, axis, {ranges.begin(), ranges.end()});
}

TensorShape Layout::PartShape(int rank) const {
  TensorShape part = shape_;
  part.axes[std::max(axis_, 0)].size = ranges_[rank].size();
  return part;
}

int64_t Layout::PartBytes(int rank) const { return ranges_[rank].empty() ? 0 : PartShape(rank).Bytes(); }

std::string Layout::DebugString() const {
  std::string text;
  for (int rank = 0; rank < ranks(); ++rank)
    absl::StrAppend(&text, rank > 0 ? ", " : "",
                    ranges_[rank].empty() ? "-"
                    : axis_ < 0           ? "all"
                                          : proto::DebugString(ranges_[rank]));
  return absl::StrCat(axis_ < 0 ? "whole" : shape_.axes[axis_].name, ": ", text);
}

absl::StatusOr<HeadLayouts> CutHeads(const TensorShape& query, const TensorShape& key_value, std::string_view axis,
                                     int ranks) {
  DT_RETURN_IF_ERROR(query.Validate());
  DT_RETURN_IF_ERROR(key_value.Validate());
  DT_ASSIGN_OR_RETURN(const int query_axis, FindAxis(query, axis));
  DT_ASSIGN_OR_RETURN(const int kv_axis, FindAxis(key_value, axis));
  const int64_t query_heads = query.axes[query_axis].size, kv_heads = key_value.axes[kv_axis].size;
  if (query_heads % kv_heads != 0)
    return InvalidArgument("heads: ", query_heads, " query heads are no multiple of ", kv_heads, " KV heads");
  const int64_t group = query_heads / kv_heads;
  DT_ASSIGN_OR_RETURN(Layout kv, Layout::Even(key_value, axis, ranks, {1, FewPieces::kReplicate}));
  std::vector<AxisRange> ranges;
  for (int rank = 0; rank < ranks; ++rank) {
    // Of one KV head, which replica this is and how many there are; of several, the only one.
    const AxisRange heads = kv.axis() < 0 ? AxisRange{0, kv_heads} : kv.range(rank);
    int64_t replica = 0, replicas = 0;
    for (int other = 0; other < ranks; ++other) {
      if (kv.range(other) != kv.range(rank)) continue;
      replica += other < rank;
      ++replicas;
    }
    if (replicas > group * heads.size())
      return InvalidArgument("heads: ", ranks, " ranks for ", query_heads, " query heads of ", kv_heads,
                             " KV heads leave rank ", rank, " without one: take at most ", query_heads,
                             " ranks, a multiple of ", kv_heads);
    const int64_t first = heads.begin * group, count = heads.size() * group;
    ranges.push_back({first + replica * count / replicas, first + (replica + 1) * count / replicas});
  }
  DT_ASSIGN_OR_RETURN(Layout q, Layout::Of(query, axis, ranges));
  return HeadLayouts{std::move(q), std::move(kv)};
}

absl::StatusOr<Switch> Switch::Between(const Layout& from, const Layout& to) {
  if (from.shape() != to.shape())
    return InvalidArgument("switch: from ", from.shape().DebugString(), " to ", to.shape().DebugString(),
                           ": both are of one tensor");
  if (from.ranks() != to.ranks())
    return InvalidArgument("switch: from ", from.ranks(), " ranks to ", to.ranks(),
                           ": number all of them, and let some hold nothing");
  Switch result(from, to);
  result.Plan();
  return result;
}

void Switch::Plan() {
  identity_ = from_ == to_;
  fingerprint_ = FingerprintOf(from_, to_);
  const int64_t element = from_.shape().element_bytes;
  kept_.resize(ranks());
  std::map<int64_t, std::vector<int>> holders;  // of each range, by its begin
  for (int rank = 0; rank < ranks(); ++rank)
    if (!from_.range(rank).empty()) holders[from_.range(rank).begin].push_back(rank);
  for (int destination = 0; destination < ranks() && !identity_; ++destination) {
    if (to_.range(destination).empty()) continue;
    const Box wanted = BoxOf(to_, destination);
    for (const auto& [begin, replicas] : holders) {
      const bool here = std::find(replicas.begin(), replicas.end(), destination) != replicas.end();
      const int source = here ? destination : replicas[destination % replicas.size()];
      const Box part = BoxOf(from_, source);
      const Box box = Intersection(part, wanted);
      if (IsEmpty(box)) continue;
      const Transfer transfer{source, destination, RegionOf(box, part, element), RegionOf(box, wanted, element)};
      if (here)
        kept_[destination] = transfer;
      else
        received_.push_back(transfer);
    }
  }
  const auto by = [](int Transfer::*first, int Transfer::*second) {
    return [=](const Transfer& a, const Transfer& b) {
      return std::pair(a.*first, a.*second) < std::pair(b.*first, b.*second);
    };
  };
  std::sort(received_.begin(), received_.end(), by(&Transfer::destination, &Transfer::source));
  sent_ = received_;
  std::sort(sent_.begin(), sent_.end(), by(&Transfer::source, &Transfer::destination));
  sent_begin_ = BeginsOf(sent_, ranks(), &Transfer::source);
  received_begin_ = BeginsOf(received_, ranks(), &Transfer::destination);
}

std::span<const Transfer> Switch::SentBy(int rank) const {
  return std::span(sent_).subspan(sent_begin_[rank], sent_begin_[rank + 1] - sent_begin_[rank]);
}

std::span<const Transfer> Switch::ReceivedBy(int rank) const {
  return std::span(received_).subspan(received_begin_[rank], received_begin_[rank + 1] - received_begin_[rank]);
}

const Transfer* Switch::KeptBy(int rank) const { return kept_[rank].from.runs == 0 ? nullptr : &kept_[rank]; }

int64_t Switch::bytes_sent(int rank) const { return Sum(SentBy(rank)); }
int64_t Switch::bytes_received(int rank) const { return Sum(ReceivedBy(rank)); }
int64_t Switch::bytes_kept(int rank) const { return identity_ ? from_.PartBytes(rank) : kept_[rank].bytes(); }
int64_t Switch::bytes() const { return Sum(sent_); }

}  // namespace dovetail::proto
