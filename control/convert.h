#pragma once
#include "base/status.h"
#include "control/messages.h"
#include "proto/control/dovetail_control.pb.h"

// Converts plain values to generated messages and back. FromProto checks everything before use: kInvalidArgument names
// the field and the limit.
// Threads: pure.

namespace dovetail::control {

namespace pb = dovetail::control::v1;

void ToProto(const proto::AttentionTable& table, pb::AttentionTable& out);
void ToProto(const ModelSummary& model, pb::Model& out);
void ToProto(const JoinRequest& request, pb::JoinRequest& out);
void ToProto(const JoinReply& reply, pb::JoinReply& out);
void ToProto(const Heartbeat& heartbeat, pb::Heartbeat& out);
void ToProto(const LinkFailed& failed, pb::LinkFailed& out);
void ToProto(const Ready& ready, pb::Ready& out);
void ToProto(const Applied& applied, pb::Applied& out);
void ToProto(const Configuration& configuration, pb::Configuration& out);
void ToProto(const Peers& peers, pb::Peers& out);

absl::StatusOr<proto::AttentionTable> FromProto(const pb::AttentionTable& in);
absl::StatusOr<ModelSummary> FromProto(const pb::Model& in);
absl::StatusOr<JoinRequest> FromProto(const pb::JoinRequest& in);
absl::StatusOr<JoinReply> FromProto(const pb::JoinReply& in);
absl::StatusOr<Heartbeat> FromProto(const pb::Heartbeat& in);
absl::StatusOr<LinkFailed> FromProto(const pb::LinkFailed& in);
Ready FromProto(const pb::Ready& in);  // what is too much is found by the scheduler, which knows the worker
absl::StatusOr<Applied> FromProto(const pb::Applied& in);
absl::StatusOr<Configuration> FromProto(const pb::Configuration& in);
absl::StatusOr<Peers> FromProto(const pb::Peers& in);

}  // namespace dovetail::control
