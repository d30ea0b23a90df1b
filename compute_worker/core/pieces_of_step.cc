// K and V of earlier tokens that come in pieces: the prompt of a step that asks for more of them than one answer
// brings. Each piece is put away when it comes, so that neither side holds more than kGatherPiecesAhead of them.
#include <algorithm>
#include <utility>

#include "compute_worker/core/compute_worker_core.h"
#include "proto/gather_frames.h"

namespace dovetail::compute {

// The op's k and v are on their way.
void ComputeWorkerCore::AskForRows(MicroBatch& batch, int op, std::vector<Action>& actions) const {
  const uint16_t group = table_.op_group[op].value();
  for (WorkerPart& part : batch.parts)
    for (; part.pieces_asked < std::min(part.layouts[group].pieces, proto::kGatherPiecesAhead); ++part.pieces_asked)
      actions.push_back(AskRows{batch.plan.micro_batch, op, part.pieces_asked, part.node, part.epoch});
}

bool ComputeWorkerCore::AwaitsPieces(const MicroBatch& batch, int op) const {
  const uint16_t group = table_.op_group[op].value();
  return std::any_of(batch.parts.begin(), batch.parts.end(),
                     [&](const WorkerPart& part) { return part.pieces_kept < part.layouts[group].pieces; });
}

// The answer follows the last piece, but a device may have that first: it copies pieces.
void ComputeWorkerCore::On(EarlierRowsArrived event, std::vector<Action>& actions) {
  MicroBatch* const batch = Running(event.micro_batch, event.step);
  const bool at_op = batch != nullptr && !batch->aborted && event.op < table_.op_count() &&
                     batch->stage < program_.size() && program_[batch->stage].index == event.op &&
                     program_[batch->stage].kind == StageKind::kAttendPrompts;
  if (at_op) {
    const LayerGroup group = table_.op_group[event.op];
    for (size_t p = 0; p < batch->parts.size(); ++p) {
      WorkerPart& part = batch->parts[p];
      const proto::StepLayout& layout = part.layouts[group.value()];
      if (part.node != event.from || part.epoch != event.epoch || part.pieces_kept != event.piece ||
          event.piece >= part.pieces_asked ||
          layout.PieceAt(event.piece, table_.softmax(group)).bytes != static_cast<int64_t>(event.rows.size()))
        continue;
      ++part.pieces_kept;
      actions.push_back(
          KeepEarlierRows{event.micro_batch, event.op, static_cast<int>(p), event.piece, std::move(event.rows)});
      if (part.pieces_asked < layout.pieces)
        actions.push_back(AskRows{event.micro_batch, event.op, part.pieces_asked++, part.node, part.epoch});
      return GoOnWithRanks(*batch, event.op, actions);
    }
  }
  ++counters_.dropped_frames;
}

}  // namespace dovetail::compute
