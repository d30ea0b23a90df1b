#include "compute_worker/core/prompt_scratch.h"

#include <algorithm>

namespace dovetail::compute {
namespace {

size_t SegmentsTo(Position begin, Position end) {
  return static_cast<size_t>((end - begin + kSegmentTokens - 1) / kSegmentTokens);
}

}  // namespace

PromptScratch::PromptScratch(const proto::AttentionTable& table, uint32_t capacity_blocks)
    : capacity_(capacity_blocks) {
  for (const LayerGroup group : table.op_group) {
    const uint32_t heads = table.linear(group) != nullptr ? 0 : static_cast<uint32_t>(table.softmax(group).kv_heads);
    first_block_.push_back(blocks_of_all_ops_);
    blocks_of_all_ops_ += heads;
    blocks_of_one_op_ = std::max(blocks_of_one_op_, heads);
  }
  for (uint32_t block = capacity_blocks; block-- > 0;) free_.push_back(block);
}

void PromptScratch::Resize(Part& part, size_t segments) {
  for (; part.segments.size() > segments; part.segments.pop_back())
    free_.insert(free_.end(), part.segments.back().blocks.begin(), part.segments.back().blocks.end());
}

void PromptScratch::Drop(SequenceId sequence) {
  const auto it = parts_.find(sequence);
  if (it == parts_.end()) return;
  Resize(it->second, 0);
  parts_.erase(it);
}

// Drops what was used longest ago, but nothing that a step is using.
bool PromptScratch::MakeRoom(SequenceId but_not, size_t blocks) {
  while (free_.size() < blocks) {
    auto oldest = parts_.end();
    for (auto it = parts_.begin(); it != parts_.end(); ++it)
      if (it->first != but_not && !it->second.in_step &&
          (oldest == parts_.end() || it->second.used < oldest->second.used))
        oldest = it;
    if (oldest == parts_.end()) return false;
    Resize(oldest->second, 0);
    parts_.erase(oldest);
  }
  return true;
}

// For all ops, without taking anything away.
bool PromptScratch::MayMakeRoom(SequenceId but_not, const Part& part, size_t segments) const {
  size_t room = free_.size();
  for (const auto& [sequence, other] : parts_)
    if (sequence != but_not && !other.in_step)
      for (const Segment& segment : other.segments) room += segment.blocks.size();
  return segments <= part.segments.size() || blocks_of_all_ops_ * (segments - part.segments.size()) <= room;
}

bool PromptScratch::Grow(SequenceId sequence, Part& part, size_t segments, bool of_one_op) {
  if (segments <= part.segments.size()) return true;
  const size_t each = of_one_op ? blocks_of_one_op_ : blocks_of_all_ops_;
  if (!MakeRoom(sequence, each * (segments - part.segments.size()))) return false;
  while (part.segments.size() < segments) {
    Segment& segment = part.segments.emplace_back();
    segment.of_one_op = of_one_op;
    segment.blocks.assign(free_.end() - static_cast<std::ptrdiff_t>(each), free_.end());
    free_.resize(free_.size() - each);
  }
  return true;
}

bool PromptScratch::GrowForStep(SequenceId sequence, Part& part, Position end, bool more) {
  return Grow(sequence, part, SegmentsTo(part.begin, end), !more) ||
         Grow(sequence, part, SegmentsTo(part.begin, end), /*of_one_op=*/true);
}

const PromptScratch::Part* PromptScratch::Use(Part& part) {
  part.in_step = true;
  part.used = ++uses_;
  return &part;
}

Position PromptScratch::FirstMissing(SequenceId sequence, Position from, Position ctx_len) const {
  const auto known = parts_.find(sequence);
  if (known == parts_.end() || from < known->second.begin || ctx_len < known->second.seen_from) return 0;
  return std::min(known->second.end, from);
}

const PromptScratch::Part* PromptScratch::BeginGathering(SequenceId sequence, const GatherStep& step) {
  if (capacity_ == 0) return nullptr;
  const auto known = parts_.find(sequence);
  if (known != parts_.end() && (step.from < known->second.begin || step.ctx_len < known->second.seen_from))
    Drop(sequence);
  const auto [part, fresh] = parts_.try_emplace(sequence);
  if (fresh) part->second.begin = part->second.end = step.begin;
  if (FirstMissing(sequence, step.from, step.ctx_len) < step.ctx_len) part->second.seen_from = step.ctx_len;
  part->second.end = std::min(part->second.end, step.from);
  Resize(part->second, SegmentsTo(part->second.begin, part->second.end));
  const size_t with_others = SegmentsTo(part->second.begin, std::max(step.room_to, step.ctx_len + step.q_len));
  if (step.more && step.room_to > 0 && MayMakeRoom(sequence, part->second, with_others) &&
      Grow(sequence, part->second, with_others, /*of_one_op=*/false))
    return Use(part->second);
  if (GrowForStep(sequence, part->second, step.ctx_len + step.q_len, step.more)) return Use(part->second);
  Drop(sequence);
  return nullptr;
}

const PromptScratch::Part* PromptScratch::Begin(SequenceId sequence, Position ctx_len, int q_len, bool more) {
  if (capacity_ == 0) return nullptr;
  const auto known = parts_.find(sequence);
  if (known != parts_.end() &&
      (ctx_len < std::max(known->second.begin, known->second.seen_from) || ctx_len > known->second.end))
    Drop(sequence);
  const bool fresh = !parts_.contains(sequence);
  const bool aligned = ctx_len % kSegmentTokens == 0;
  if (fresh && !aligned) return nullptr;  // the open segment is elsewhere
  Part& part = parts_[sequence];
  if (fresh) part.begin = ctx_len;
  part.end = ctx_len;  // what followed is written anew
  const Position end = ctx_len + q_len;
  Resize(part, SegmentsTo(part.begin, ctx_len));
  bool fits = GrowForStep(sequence, part, end, more);
  if (!fits && aligned) {  // the earlier parts go: they are attended where they live
    Resize(part, 0);
    part.begin = part.end = ctx_len;
    fits = Grow(sequence, part, SegmentsTo(ctx_len, end), /*of_one_op=*/true);
  }
  if (!fits) {
    Drop(sequence);
    return nullptr;
  }
  return Use(part);
}

void PromptScratch::End(SequenceId sequence, bool went_well, Position end) {
  const auto it = parts_.find(sequence);
  if (it == parts_.end()) return;
  Part& part = it->second;
  part.in_step = false;
  const auto one_op = std::find_if(part.segments.begin(), part.segments.end(),
                                   [](const Segment& segment) { return segment.of_one_op; });
  if (one_op != part.segments.end()) return Drop(sequence);
  if (went_well) part.end = end;
}

void PromptScratch::Extend(SequenceId sequence, Position end, Position seen_from) {
  const auto it = parts_.find(sequence);
  if (it == parts_.end() || it->second.end >= end) return;
  it->second.end = end;
  it->second.seen_from = std::max(it->second.seen_from, seen_from);
}

const PromptScratch::Part* PromptScratch::Find(SequenceId sequence) const {
  const auto it = parts_.find(sequence);
  return it == parts_.end() ? nullptr : &it->second;
}

}  // namespace dovetail::compute
