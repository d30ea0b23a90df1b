#include "tests/seam/seam_monitor.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace dovetail::test {

void SeamMonitor::Broken(int obligation, StepKey key, const std::string& what) {
  violations_.push_back(absl::StrCat("obligation ", obligation, ": step ", key.step.value(), " of micro-batch ",
                                     key.micro_batch.value(), ": ", what));
}

SeamMonitor::Step& SeamMonitor::Of(StepKey key) {
  Step& step = current_[key.micro_batch];
  if (step.number == key.step) return step;
  if (step.failed && step.way == Way::kBetweenGpus && !step.waits_ended)
    Broken(9, {key.micro_batch, step.number}, "it failed, and the next step began before its waits were ended");
  step = Step{.number = key.step};
  return step;
}

SeamMonitor::Part& SeamMonitor::PartOf(StepKey key, NodeId node, const char* what) {
  Step& step = Of(key);
  if (!step.parts.contains(node)) Broken(2, key, absl::StrCat(what, " came before its begin"));
  return step.parts[node];
}

uint64_t SeamMonitor::Hash(const Lent& lent) {
  uint64_t hash = 14695981039346656037ull;
  for (size_t i = 0; i < lent.size; ++i) hash = (hash ^ static_cast<uint64_t>(lent.at[i])) * 1099511628211ull;
  return hash;
}

void SeamMonitor::SendsBegin(StepKey key, NodeId to, bool in_frames) {
  Step& step = Of(key);
  if (step.parts.contains(to)) Broken(2, key, "a part was begun twice");
  for (const auto& [node, part] : step.parts)
    if (part.in_frames != in_frames) Broken(1, key, "its parts cross in two ways");
  if (step.dense_prepared) Broken(2, key, "the backend was prepared before every part was begun");
  step.parts[to].in_frames = in_frames;
}

void SeamMonitor::PreparesDense(StepKey key, const exchange::Seam& seam) {
  Step& step = Of(key);
  const Way way = WayOf(seam);
  if (on_cpu_ && way != Way::kHosts) Broken(3, key, "a CPU's backend was given a way between GPUs");
  if (step.dense_prepared && way != step.way) Broken(1, key, "its way was chosen twice");
  step.way = way;
  step.dense_prepared = true;
  for (const auto& [node, part] : step.parts)
    if (part.in_frames != (way != Way::kBetweenGpus))
      Broken(1, key, "its begin says another way than its backend was given");
  if (const auto* between = std::get_if<exchange::BetweenGpus>(&seam);
      between != nullptr && between->peers.size() != step.parts.size())
    Broken(1, key, absl::StrCat(between->peers.size(), " peers of ", step.parts.size(), " parts"));
}

void SeamMonitor::Packs(StepKey key, int op) {
  Step& step = Of(key);
  if (!step.dense_prepared) Broken(3, key, absl::StrCat("op ", op, " was packed by a backend that was not prepared"));
  if (step.way == Way::kBetweenGpus) Broken(7, key, absl::StrCat("op ", op, " was packed"));
}

void SeamMonitor::SendsPayload(StepKey key, int op, NodeId to, Payload payload) {
  Step& step = Of(key);
  Part& part = PartOf(key, to, "a payload");
  if (step.way == Way::kBetweenGpus) return Broken(7, key, absl::StrCat("a payload of op ", op, " went in a frame"));
  Lent lent{payload.data(), payload.size(), 0};
  if (step.way == Way::kHosts) lent.hash = Hash(lent);
  part.lent[op].push_back(lent);
}

void SeamMonitor::SendsQuery(StepKey key, int op, NodeId to, Payload payload) {
  SendsPayload(key, op, to, payload);
  Part& part = Of(key).parts[to];
  if (op <= part.asked_op || op <= part.sent_op) Broken(4, key, absl::StrCat("q of op ", op, " came late or again"));
  part.asked_op = op;
  part.asked.insert(op);
}

void SeamMonitor::SendsKeyValue(StepKey key, int op, NodeId to, Payload payload) {
  SendsPayload(key, op, to, payload);
  Part& part = Of(key).parts[to];
  if (op <= part.sent_op || op < part.asked_op)
    Broken(4, key, absl::StrCat("k and v of op ", op, " came late or again"));
  part.sent_op = op;
}

void SeamMonitor::TakesAnswer(StepKey key, NodeId from, int op) { PartOf(key, from, "an answer").taken.insert(op); }

void SeamMonitor::RunsOutput(StepKey key, int op) {
  Step& step = Of(key);
  if (!step.dense_prepared) Broken(3, key, "a backend ran that was not prepared");
  for (const auto& [node, part] : step.parts)
    if (part.asked.contains(op) && !part.taken.contains(op))
      Broken(6, key, absl::StrCat("o of op ", op, " was read before node ", node.value(), " answered"));
}

void SeamMonitor::Draws(StepKey key) {
  Step& step = Of(key);
  if (!step.dense_prepared) Broken(3, key, "a backend drew that was not prepared");
  step.drawn = true;
}

void SeamMonitor::Ends(StepKey key, bool ok) {
  Step& step = Of(key);
  step.failed = !ok;
  if (!ok) return;
  ++steps_[static_cast<int>(step.way)];
  if (!step.drawn) Broken(8, key, "it ended well, and its work was not launched");
  for (const auto& [node, part] : step.parts) {
    if (step.way == Way::kBetweenGpus && !part.launched)
      Broken(8, key, absl::StrCat("node ", node.value(), " did not launch its work"));
    for (const int op : part.asked)
      if (!part.answered.contains(op)) Broken(6, key, absl::StrCat("op ", op, " was never answered"));
  }
}

void SeamMonitor::EndsWaits(StepKey key) { Of(key).waits_ended = true; }

void SeamMonitor::PreparesAttention(StepKey key, NodeId worker, const exchange::Seam& seam) {
  Part& part = PartOf(key, worker, "the attention backend");
  const Step& step = Of(key);
  const Way way = WayOf(seam);
  if (on_cpu_ && way != Way::kHosts) Broken(3, key, "a CPU's backend was given a way between GPUs");
  if (way != step.way) Broken(1, key, absl::StrCat("node ", worker.value(), " has it cross in another way"));
  part.prepared = true;
}

void SeamMonitor::Attends(StepKey key, NodeId worker, int op) {
  Part& part = PartOf(key, worker, "q");
  if (!part.prepared) Broken(3, key, absl::StrCat("node ", worker.value(), " attended without PrepareStep"));
  if (op <= part.attended_op || op <= part.appended_op)
    Broken(4, key, absl::StrCat("op ", op, " was attended late or again"));
  part.attended_op = op;
}

void SeamMonitor::Appends(StepKey key, NodeId worker, int op) {
  Part& part = PartOf(key, worker, "k and v");
  if (!part.prepared) Broken(3, key, absl::StrCat("node ", worker.value(), " appended without PrepareStep"));
  const bool asked = Of(key).way == Way::kBetweenGpus || part.asked.contains(op);
  if (op <= part.appended_op || (asked && part.attended_op != op))
    Broken(4, key, absl::StrCat("op ", op, " was appended late, again or before its q"));
  if (part.launched) Broken(8, key, absl::StrCat("op ", op, " came after the launch"));
  part.appended_op = op;
}

void SeamMonitor::Launches(StepKey key, NodeId worker) {
  Part& part = PartOf(key, worker, "a launch");
  if (Of(key).way != Way::kBetweenGpus || part.launched)
    Broken(8, key, absl::StrCat("node ", worker.value(), " launched what it had not to"));
  part.launched = true;
}

void SeamMonitor::SendsAnswer(StepKey key, NodeId worker, int op) {
  Part& part = PartOf(key, worker, "an answer");
  if (Of(key).way == Way::kBetweenGpus) Broken(7, key, absl::StrCat("the answer of op ", op, " went in a frame"));
  if (!part.answered.insert(op).second) Broken(6, key, absl::StrCat("op ", op, " was answered twice"));
  for (const Lent& lent : part.lent[op])
    if (Of(key).way == Way::kHosts && Hash(lent) != lent.hash)
      Broken(5, key, absl::StrCat("a payload of op ", op, " changed before it was answered"));
  part.lent.erase(op);
}

}  // namespace dovetail::test
