#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "base/segment_tree.h"
#include "proto/attention_spec.h"

namespace dovetail::compute {

// A step whose earlier tokens are put in before they are read.
struct GatherStep {
  Position begin = 0;  // a multiple of 64, at most `from`: where what is held begins if nothing is held yet
  Position from = 0;   // tokens [from, ctx_len) are put in whatever is held
  Position ctx_len = 0;
  int q_len = 0;
  bool more = false;     // another part of the prompt will follow
  Position room_to = 0;  // room for tokens up to here, too, which others compute meanwhile, if all ops fit (HasRoomTo)
};

// Which blocks hold K and V of prompts that the compute worker attends itself. A cache: what does not fit or was
// dropped is attended on attention workers, where everything is. A block is 64 tokens x one KV head x one attention op;
// the last part of a prompt, and whatever does not fit for all ops, uses its blocks anew from op to op.
// Threads: thread-compatible; touches no byte of KV.
class PromptScratch {
 public:
  // 64 tokens of a prompt.
  struct Segment {
    std::vector<uint32_t> blocks;  // [op][KV head], or [KV head] of the op at hand
    bool of_one_op = false;
  };
  // What is here of a prompt whose step is running.
  struct Part {
    Position begin = 0;  // a multiple of 64: tokens from here on are attended here
    Position end = 0;    // tokens of steps that went well
    // Of ops with a window, what a step at this position sees is here, and maybe nothing before it: earlier steps,
    // which come where a prefill group is repeated, find nothing here.
    Position seen_from = 0;
    bool in_step = false;
    uint64_t used = 0;  // when, to choose which goes first
    std::vector<Segment> segments;

    // Whether tokens before `to` have blocks, for all ops.
    bool HasRoomTo(Position to) const {
      return !segments.empty() && !segments.back().of_one_op &&
             begin + static_cast<Position>(segments.size()) * kSegmentTokens >= to;
    }
  };

  PromptScratch(const proto::AttentionTable& table, uint32_t capacity_blocks);

  // A step is about to give the sequence q_len tokens at ctx_len. Null: attend them where the others are. Otherwise
  // valid until End. `more`: another part of the prompt will follow.
  const Part* Begin(SequenceId sequence, Position ctx_len, int q_len, bool more);
  // Likewise, where tokens before ctx_len that are not here will be put in before they are read: those from
  // FirstMissing on. What begins after step.from is dropped.
  const Part* BeginGathering(SequenceId sequence, const GatherStep& step);
  // The first token before `from` that is neither held nor before what is held, for a step at ctx_len; `from`: there is
  // none.
  Position FirstMissing(SequenceId sequence, Position from, Position ctx_len) const;
  void End(SequenceId sequence, bool went_well, Position end);
  // What others computed has been put in: all tokens before `end` are here, and of ops with a window what a step at
  // `seen_from` or later sees. No more than Part::HasRoomTo. Nothing, if the prompt is not here or has as much already.
  void Extend(SequenceId sequence, Position end, Position seen_from);
  void Drop(SequenceId sequence);
  // Null: nothing is here. Valid until the next call that is not const.
  const Part* Find(SequenceId sequence) const;

  uint32_t BlockOf(const Segment& segment, int op, int head) const {
    return segment.blocks[(segment.of_one_op ? 0 : first_block_[op]) + head];
  }
  uint32_t capacity() const { return capacity_; }
  uint32_t free_blocks() const { return static_cast<uint32_t>(free_.size()); }

 private:
  void Resize(Part& part, size_t segments);
  bool GrowForStep(SequenceId sequence, Part& part, Position end, bool more);
  bool MayMakeRoom(SequenceId but_not, const Part& part, size_t segments) const;
  const Part* Use(Part& part);
  bool Grow(SequenceId sequence, Part& part, size_t segments, bool of_one_op);
  bool MakeRoom(SequenceId but_not, size_t blocks);

  const uint32_t capacity_;
  std::vector<uint32_t> first_block_;  // by op
  uint32_t blocks_of_all_ops_ = 0, blocks_of_one_op_ = 0;
  std::vector<uint32_t> free_;
  std::map<SequenceId, Part> parts_;
  uint64_t uses_ = 0;
};

}  // namespace dovetail::compute
