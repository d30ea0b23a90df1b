#include "attention_worker/attention_worker_node.h"

#include <utility>
#include <variant>

#include "base/log.h"

namespace dovetail::attention {

using proto::FrameType;
using proto::MakeHeader;

absl::StatusOr<std::unique_ptr<AttentionWorkerNode>> AttentionWorkerNode::Create(const proto::AttentionTable& table,
                                                                                 const AttentionWorkerOptions& options,
                                                                                 kernels::Device& device,
                                                                                 transport::Port& port) {
  if (options.micro_batches < 1 || options.micro_batches > 16)
    return InvalidArgument("micro_batches: ", options.micro_batches, " is outside 1..16");
  if (options.kv_blocks < 1) return InvalidArgument("kv_blocks: the KV cache has no block");
  std::unique_ptr<AttentionWorkerNode> node(new AttentionWorkerNode(table, options, port));
  DT_ASSIGN_OR_RETURN(node->executor_,
                      AttentionExecutor::Create(device, node->core_, options.kv_blocks, options.micro_batches));
  node->actions_.reserve(16);
  return node;
}

void AttentionWorkerNode::OnFrame(const transport::Delivery& delivery) {
  if (!proto::Validate(delivery.header).ok()) return;
  actions_.clear();
  core_.Handle(delivery.from, delivery.header, delivery.payload, actions_);
  for (Action& action : actions_) {
    const absl::Status status = Perform(action);
    if (status.ok()) continue;
    LogError("attention worker ", options_.worker.value(), ": ", std::string(status.message()));
    RefuseStep(delivery, status);
    return;
  }
}

void AttentionWorkerNode::RefuseStep(const transport::Delivery& delivery, const absl::Status& status) {
  std::vector<std::byte> message;
  proto::Encode(proto::StepRefused{absl::IsResourceExhausted(status), std::string(status.message())}, message);
  const auto header = MakeHeader(FrameType::kStepRefused, options_.epoch, StepId(delivery.header.step),
                                 MicroBatchId(delivery.header.micro_batch), delivery.header.op, message.size());
  if (const absl::Status sent = port_.SendMessage(delivery.from, header, std::move(message)); !sent.ok())
    LogError("attention worker ", options_.worker.value(), ": cannot refuse a step: ", std::string(sent.message()));
}

absl::Status AttentionWorkerNode::Perform(Action& action) {
  struct Visitor {
    AttentionWorkerNode& node;

    absl::Status operator()(SendFrame& send) {
      const auto header =
          MakeHeader(send.type, node.options_.epoch, send.step, send.micro_batch, 0, send.message.size());
      return node.port_.SendMessage(send.to, header, std::move(send.message));
    }
    absl::Status operator()(CopyBlocks& copy) {
      node.executor_->Copy(copy.copies);
      return absl::OkStatus();
    }
    absl::Status operator()(PrepareStep& prepare) { return node.executor_->PrepareStep(prepare.micro_batch); }
    absl::Status operator()(AttendComplete& attend) {
      return node.executor_->AttendComplete(attend.micro_batch, attend.op, attend.query);
    }
    absl::Status operator()(AppendAndFinish& finish) {
      DT_ASSIGN_OR_RETURN(const auto partial,
                          node.executor_->AppendAndFinish(finish.micro_batch, finish.op, finish.key_value));
      const auto header = MakeHeader(FrameType::kPartial, node.options_.epoch, finish.step, finish.micro_batch,
                                     finish.op, partial.size());
      return node.port_.SendTensor(finish.reply_to, header, partial);
    }
  };
  return std::visit(Visitor{*this}, action);
}

}  // namespace dovetail::attention
