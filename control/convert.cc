#include "control/convert.h"

#include <cmath>
#include <limits>
#include <utility>

#include "base/dtype.h"
#include "base/ids.h"
#include "control/table_limits.h"
#include "proto/step_plan.h"

namespace dovetail::control {
namespace {

absl::Status CheckText(const char* field, const std::string& text, size_t most, bool may_be_empty = false) {
  if (text.empty() && !may_be_empty) return InvalidArgument(field, ": is empty");
  if (text.size() > most) return InvalidArgument(field, ": has ", text.size(), " bytes, more than ", most);
  return absl::OkStatus();
}

// Names appear on operators' terminals and in log lines.
absl::Status CheckName(const char* field, const std::string& text, size_t most) {
  DT_RETURN_IF_ERROR(CheckText(field, text, most));
  for (const char c : text)
    if (c < 0x20 || c > 0x7e) return InvalidArgument(field, ": holds a character that is not printable ASCII");
  return absl::OkStatus();
}

absl::Status CheckRange(const char* field, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return InvalidArgument(field, ": ", value, " is outside ", least, "..", most);
}

absl::Status CheckFinite(const char* field, float value) {
  return std::isfinite(value) ? absl::OkStatus() : InvalidArgument(field, ": is not finite");
}

void ToProto(const HostProcess& process, pb::HostProcess& out) {
  out.set_host(process.host);
  out.set_pid(process.pid);
  out.set_started(process.started);
}

absl::StatusOr<HostProcess> FromProto(const char* field, const pb::HostProcess& in) {
  DT_RETURN_IF_ERROR(CheckName(field, in.host(), kMaxHostBytes));
  return HostProcess{in.host(), in.pid(), in.started()};
}

pb::Role RoleToProto(Role role) {
  if (role == Role::kAttentionWorker) return pb::ROLE_ATTENTION_WORKER;
  return role == Role::kComputeWorker ? pb::ROLE_COMPUTE_WORKER : pb::ROLE_UNSPECIFIED;
}

absl::StatusOr<Role> RoleFromProto(pb::Role role, bool scheduler_allowed) {
  if (role == pb::ROLE_ATTENTION_WORKER) return Role::kAttentionWorker;
  if (role == pb::ROLE_COMPUTE_WORKER) return Role::kComputeWorker;
  if (role == pb::ROLE_UNSPECIFIED && scheduler_allowed) return Role::kScheduler;
  return InvalidArgument("role: ", static_cast<int>(role), " is no role that a worker can have");
}

}  // namespace

const char* NameOf(Role role) {
  if (role == Role::kAttentionWorker) return "attention";
  return role == Role::kComputeWorker ? "compute" : "scheduler";
}

namespace {

void ToProto(const proto::LinearSpec& spec, pb::LinearState& out) {
  out.set_delta(spec.delta);
  out.set_vector_decay(spec.vector_decay);
  out.set_token_decay(spec.token_decay);
  out.set_token_rate(spec.token_rate);
  out.set_normalise(spec.normalise);
  out.set_query_scale(spec.query_scale);
  out.set_conv_width(spec.conv_width);
  out.set_state_dtype(static_cast<uint32_t>(spec.state));
  out.set_blocks_per_head(spec.blocks_per_head);
  out.set_conv_linear(spec.conv_linear);
}

absl::StatusOr<proto::LinearSpec> LinearFromProto(const pb::SoftmaxSpec& from) {
  const pb::LinearState& linear = from.linear();
  DT_RETURN_IF_ERROR(
      CheckRange("attention.linear.state_dtype", linear.state_dtype(), 0, static_cast<uint64_t>(DType::kBF16)));
  DT_RETURN_IF_ERROR(
      CheckRange("attention.linear.conv_width", linear.conv_width(), 0, proto::LinearSpec::kMaxConvWidth));
  DT_RETURN_IF_ERROR(CheckRange("attention.linear.blocks_per_head", linear.blocks_per_head(), 1, 1 << 16));
  DT_RETURN_IF_ERROR(CheckFinite("attention.linear.query_scale", linear.query_scale()));
  proto::LinearSpec spec;
  spec.heads = static_cast<int>(from.kv_heads());
  spec.key_dim = static_cast<int>(from.key_dim());
  spec.value_dim = static_cast<int>(from.value_dim());
  spec.wire = static_cast<DType>(from.kv_dtype());
  spec.delta = linear.delta();
  spec.vector_decay = linear.vector_decay();
  spec.token_decay = linear.token_decay();
  spec.token_rate = linear.token_rate();
  spec.normalise = linear.normalise();
  spec.query_scale = linear.query_scale();
  spec.conv_width = static_cast<int>(linear.conv_width());
  spec.state = static_cast<DType>(linear.state_dtype());
  spec.blocks_per_head = static_cast<int>(linear.blocks_per_head());
  spec.conv_linear = linear.conv_linear();
  return spec;
}

}  // namespace

absl::Status CheckTableBytes(const proto::AttentionTable& table) {
  uint64_t floats = 0;
  for (const proto::LinearConstants& constants : table.constants)
    floats += constants.log_decay.size() + constants.conv.size() + constants.conv_bias.size() + constants.skip.size();
  if (floats * sizeof(float) <= kMaxTableBytes) return absl::OkStatus();
  return InvalidArgument("attention.constants: the convolutions and decays of the model's linear layers have ",
                         floats * sizeof(float), " bytes; at most ", kMaxTableBytes, " go to attention workers");
}

void ToProto(const proto::AttentionTable& table, pb::AttentionTable& out) {
  out.Clear();
  for (int group = 0; group < table.group_count(); ++group) {
    const proto::SoftmaxSpec& spec = table.softmax(LayerGroup(static_cast<uint16_t>(group)));
    pb::SoftmaxSpec& to = *out.add_groups();
    to.set_query_heads(spec.query_heads);
    to.set_kv_heads(spec.kv_heads);
    to.set_key_dim(spec.key_dim);
    to.set_value_dim(spec.value_dim);
    to.set_scale(spec.scale);
    to.set_window(spec.window);
    to.set_kv_dtype(static_cast<uint32_t>(spec.kv));
    if (const proto::LinearSpec* linear = table.linear(LayerGroup(static_cast<uint16_t>(group))))
      ToProto(*linear, *to.mutable_linear());
  }
  for (const proto::LinearConstants& constants : table.constants) {
    pb::LinearConstants& to = *out.add_constants();
    to.mutable_log_decay()->Assign(constants.log_decay.begin(), constants.log_decay.end());
    to.mutable_conv()->Assign(constants.conv.begin(), constants.conv.end());
    to.mutable_conv_bias()->Assign(constants.conv_bias.begin(), constants.conv_bias.end());
    to.mutable_skip()->Assign(constants.skip.begin(), constants.skip.end());
    to.mutable_sinks()->Assign(constants.sinks.begin(), constants.sinks.end());
  }
  for (const LayerGroup group : table.op_group) out.add_op_group(group.value());
}

absl::StatusOr<proto::AttentionTable> FromProto(const pb::AttentionTable& in) {
  DT_RETURN_IF_ERROR(CheckRange("attention.groups", in.groups_size(), 1, proto::kMaxLayerGroups));
  DT_RETURN_IF_ERROR(CheckRange("attention.op_group", in.op_group_size(), 1, proto::kMaxAttentionOps));
  std::vector<proto::AttentionSpec> specs;
  for (const pb::SoftmaxSpec& from : in.groups()) {
    DT_RETURN_IF_ERROR(CheckRange("attention.query_heads", from.query_heads(), 1, proto::kMaxHeads));
    DT_RETURN_IF_ERROR(CheckRange("attention.kv_heads", from.kv_heads(), 1, proto::kMaxHeads));
    DT_RETURN_IF_ERROR(CheckRange("attention.key_dim", from.key_dim(), 1, proto::kMaxHeadDim));
    DT_RETURN_IF_ERROR(CheckRange("attention.value_dim", from.value_dim(), 1, proto::kMaxHeadDim));
    DT_RETURN_IF_ERROR(CheckRange("attention.window", from.window(), 0, std::numeric_limits<int32_t>::max()));
    DT_RETURN_IF_ERROR(CheckRange("attention.kv_dtype", from.kv_dtype(), 0, static_cast<uint64_t>(DType::kBF16)));
    DT_RETURN_IF_ERROR(CheckFinite("attention.scale", from.scale()));
    if (from.has_linear()) {
      DT_ASSIGN_OR_RETURN(const proto::LinearSpec linear, LinearFromProto(from));
      specs.push_back(linear);
      continue;
    }
    proto::SoftmaxSpec spec;
    spec.query_heads = static_cast<int>(from.query_heads());
    spec.kv_heads = static_cast<int>(from.kv_heads());
    spec.key_dim = static_cast<int>(from.key_dim());
    spec.value_dim = static_cast<int>(from.value_dim());
    spec.scale = from.scale();
    spec.window = static_cast<int>(from.window());
    spec.kv = static_cast<DType>(from.kv_dtype());
    specs.push_back(spec);
  }
  std::vector<proto::AttentionSpec> ops;
  for (const uint32_t group : in.op_group()) {
    if (group >= specs.size()) return InvalidArgument("attention.op_group: there is no group ", group);
    ops.push_back(specs[group]);
  }
  std::vector<proto::LinearConstants> constants;
  for (const pb::LinearConstants& from : in.constants())
    constants.push_back({{from.log_decay().begin(), from.log_decay().end()},
                         {from.conv().begin(), from.conv().end()},
                         {from.conv_bias().begin(), from.conv_bias().end()},
                         {from.skip().begin(), from.skip().end()},
                         {from.sinks().begin(), from.sinks().end()}});
  DT_ASSIGN_OR_RETURN(proto::AttentionTable table, proto::AttentionTable::Build(ops, std::move(constants)));
  DT_RETURN_IF_ERROR(CheckTableBytes(table));
  // Both ends number groups by first appearance; a table that does not would name other groups in its placements.
  for (int op = 0; op < table.op_count(); ++op)
    if (table.op_group[op].value() != in.op_group(op))
      return InvalidArgument("attention.op_group: op ", op, " is in group ", in.op_group(op), ", but belongs to group ",
                             table.op_group[op].value());
  return table;
}

void ToProto(const ModelSummary& model, pb::Model& out) {
  out.Clear();
  out.set_name(model.name);
  out.set_digest(model.digest);
  ToProto(model.attention, *out.mutable_attention());
  out.set_vocab_size(model.vocab_size);
  out.set_max_positions(model.max_positions);
  if (model.bos) out.set_bos(*model.bos);
  for (const TokenId id : model.stop_ids) out.add_stop_ids(id);
  if (model.temperature) out.set_temperature(*model.temperature);
  if (model.top_p) out.set_top_p(*model.top_p);
  if (model.min_p) out.set_min_p(*model.min_p);
  if (model.repetition_penalty) out.set_repetition_penalty(*model.repetition_penalty);
  if (model.top_k) out.set_top_k(*model.top_k);
  for (const LengthRope& rope : model.length_ropes) {
    pb::LengthRope& to = *out.add_length_ropes();
    to.set_kind(rope.kind);
    to.set_max_positions(rope.max_positions);
    to.set_original_max_positions(rope.original_max_positions);
  }
  for (const FileSummary& file : model.files) {
    pb::ModelFile& to = *out.add_files();
    to.set_name(file.name);
    to.set_size(file.size);
    to.set_sha256(file.sha256);
  }
  out.set_weight_bytes(model.weight_bytes);
  out.set_hidden_size(static_cast<uint32_t>(model.hidden_size));
  out.set_kv_storage(static_cast<uint32_t>(model.kv_storage));
  out.set_deterministic(model.deterministic);
}

absl::StatusOr<ModelSummary> FromProto(const pb::Model& in) {
  ModelSummary model;
  DT_RETURN_IF_ERROR(CheckName("model.name", in.name(), 4 * kMaxNameBytes));
  model.name = in.name();
  model.digest = in.digest();
  DT_ASSIGN_OR_RETURN(model.attention, FromProto(in.attention()));
  DT_RETURN_IF_ERROR(CheckRange("model.vocab_size", in.vocab_size(), 1, 1 << 24));
  model.vocab_size = static_cast<int>(in.vocab_size());
  DT_RETURN_IF_ERROR(CheckRange("model.max_positions", in.max_positions(), 1, uint64_t{1} << 26));
  model.max_positions = static_cast<int64_t>(in.max_positions());
  const auto is_token = [&](int64_t id) { return id >= 0 && id < model.vocab_size; };
  if (in.has_bos()) {
    if (!is_token(in.bos())) return InvalidArgument("model.bos: ", in.bos(), " is outside the vocabulary");
    model.bos = in.bos();
  }
  DT_RETURN_IF_ERROR(CheckRange("model.stop_ids", in.stop_ids_size(), 0, 1024));
  for (const TokenId id : in.stop_ids()) {
    if (!is_token(id)) return InvalidArgument("model.stop_ids: ", id, " is outside the vocabulary");
    model.stop_ids.push_back(id);
  }
  for (const float value : {in.temperature(), in.top_p(), in.min_p(), in.repetition_penalty()})
    DT_RETURN_IF_ERROR(CheckFinite("model's sampling defaults", value));
  if (in.has_temperature()) model.temperature = in.temperature();
  if (in.has_top_p()) model.top_p = in.top_p();
  if (in.has_min_p()) model.min_p = in.min_p();
  if (in.has_repetition_penalty()) model.repetition_penalty = in.repetition_penalty();
  DT_RETURN_IF_ERROR(CheckRange("model.top_k", in.top_k(), 0, 1 << 24));
  if (in.has_top_k()) model.top_k = static_cast<int>(in.top_k());
  DT_RETURN_IF_ERROR(CheckRange("model.length_ropes", in.length_ropes_size(), 0, 64));
  for (const pb::LengthRope& rope : in.length_ropes()) {
    DT_RETURN_IF_ERROR(CheckRange("model.length_ropes.kind", rope.kind(), 0, 255));
    DT_RETURN_IF_ERROR(CheckRange("model.length_ropes.max_positions", rope.max_positions(), 0, uint64_t{1} << 32));
    DT_RETURN_IF_ERROR(
        CheckRange("model.length_ropes.original_max_positions", rope.original_max_positions(), 0, uint64_t{1} << 32));
    model.length_ropes.push_back({static_cast<int>(rope.kind()), static_cast<int64_t>(rope.max_positions()),
                                  static_cast<int64_t>(rope.original_max_positions())});
  }
  DT_RETURN_IF_ERROR(CheckRange("model.files", in.files_size(), 0, kMaxModelFiles));
  uint64_t total = 0;
  for (const pb::ModelFile& file : in.files()) {
    DT_RETURN_IF_ERROR(CheckName("model.files.name", file.name(), kMaxNameBytes));
    if (file.name().find('/') != std::string::npos) return InvalidArgument("model.files.name: holds a slash");
    if (file.sha256().size() != 32)
      return InvalidArgument("model.files.sha256: has ", file.sha256().size(), " bytes, not 32");
    DT_RETURN_IF_ERROR(CheckRange("model.files.size", file.size(), 0, kMaxModelFileBytes));
    total += file.size();
    model.files.push_back({file.name(), file.size(), file.sha256()});
  }
  DT_RETURN_IF_ERROR(CheckRange("model.files: bytes of all", total, 0, kMaxModelFileBytes));
  model.weight_bytes = in.weight_bytes();
  DT_RETURN_IF_ERROR(CheckRange("model.hidden_size", in.hidden_size(), 0, proto::kMaxHiddenSize));
  model.hidden_size = static_cast<int64_t>(in.hidden_size());
  DT_RETURN_IF_ERROR(CheckRange("model.kv_storage", in.kv_storage(), 0, static_cast<uint64_t>(KvStorage::kInt8)));
  model.kv_storage = static_cast<KvStorage>(in.kv_storage());
  model.deterministic = in.deterministic();
  return model;
}

void ToProto(const JoinRequest& request, pb::JoinRequest& out) {
  out.Clear();
  out.set_role(RoleToProto(request.role));
  out.set_name(request.name);
  out.set_node(request.node.value());
  out.set_epoch(request.epoch.value());
  out.set_build_version(request.build_version);
  out.set_frame_version(request.frame_version);
  out.set_data_plane_version(request.data_plane_version);
  out.set_data_plane_address(request.data_plane_address);
  pb::Capabilities& capabilities = *out.mutable_capabilities();
  capabilities.set_kv_bytes(request.capabilities.kv_bytes);
  capabilities.set_cores(request.capabilities.cores);
  capabilities.set_memory_bytes_per_s(request.capabilities.memory_bytes_per_s);
  capabilities.set_device(request.capabilities.device);
  capabilities.set_arithmetic(request.capabilities.arithmetic);
  if (request.model) ToProto(*request.model, *out.mutable_model());
  out.set_process(request.process);
  if (!request.runs_as.host.empty()) ToProto(request.runs_as, *out.mutable_runs_as());
}

absl::StatusOr<JoinRequest> FromProto(const pb::JoinRequest& in) {
  JoinRequest request;
  DT_ASSIGN_OR_RETURN(request.role, RoleFromProto(in.role(), /*scheduler_allowed=*/false));
  DT_RETURN_IF_ERROR(CheckName("name", in.name(), kMaxNameBytes));
  request.name = in.name();
  DT_RETURN_IF_ERROR(CheckRange("node", in.node(), 1, std::numeric_limits<uint32_t>::max()));
  request.node = NodeId(in.node());
  DT_RETURN_IF_ERROR(CheckRange("epoch", in.epoch(), 1, std::numeric_limits<uint32_t>::max()));
  request.epoch = Epoch(in.epoch());
  DT_RETURN_IF_ERROR(CheckName("build_version", in.build_version(), kMaxVersionBytes));
  request.build_version = in.build_version();
  request.frame_version = in.frame_version();
  DT_RETURN_IF_ERROR(CheckName("data_plane_version", in.data_plane_version(), kMaxVersionBytes));
  request.data_plane_version = in.data_plane_version();
  DT_RETURN_IF_ERROR(CheckText("data_plane_address", in.data_plane_address(), kMaxAddressBytes));
  request.data_plane_address = in.data_plane_address();
  const pb::Capabilities& capabilities = in.capabilities();
  DT_RETURN_IF_ERROR(CheckRange("capabilities.cores", capabilities.cores(), 1, 1 << 16));
  request.capabilities.cores = static_cast<int>(capabilities.cores());
  DT_RETURN_IF_ERROR(CheckRange("capabilities.kv_bytes", capabilities.kv_bytes(), 0, uint64_t{1} << 50));
  request.capabilities.kv_bytes = capabilities.kv_bytes();
  DT_RETURN_IF_ERROR(
      CheckRange("capabilities.memory_bytes_per_s", capabilities.memory_bytes_per_s(), 0, uint64_t{1} << 50));
  request.capabilities.memory_bytes_per_s = capabilities.memory_bytes_per_s();
  DT_RETURN_IF_ERROR(CheckName("capabilities.device", capabilities.device(), kMaxNameBytes));
  request.capabilities.device = capabilities.device();
  if (!capabilities.arithmetic().empty())
    DT_RETURN_IF_ERROR(CheckName("capabilities.arithmetic", capabilities.arithmetic(), kMaxArithmeticBytes));
  request.capabilities.arithmetic = capabilities.arithmetic();
  request.process = in.process();
  if (in.has_runs_as()) {
    DT_ASSIGN_OR_RETURN(request.runs_as, FromProto("runs_as.host", in.runs_as()));
  }
  if (request.role == Role::kComputeWorker) {
    if (!in.has_model()) return InvalidArgument("model: a compute worker must bring one");
    DT_ASSIGN_OR_RETURN(request.model, FromProto(in.model()));
  } else if (request.capabilities.kv_bytes == 0) {
    return InvalidArgument(
        "capabilities.kv_bytes: an attention worker needs memory for KV; start it with --kv-capacity");
  }
  return request;
}

void ToProto(const JoinReply& reply, pb::JoinReply& out) {
  out.Clear();
  out.set_worker(reply.worker.value());
  out.set_epoch(reply.epoch.value());
  out.set_lease_ms(reply.lease_ms);
  out.set_heartbeat_ms(reply.heartbeat_ms);
  out.set_wants_model_files(reply.wants_model_files);
  out.set_cluster(reply.cluster);
  if (!reply.scheduler.host.empty()) ToProto(reply.scheduler, *out.mutable_scheduler());
}

absl::StatusOr<JoinReply> FromProto(const pb::JoinReply& in) {
  DT_RETURN_IF_ERROR(CheckRange("lease_ms", in.lease_ms(), 1, 3'600'000));
  DT_RETURN_IF_ERROR(CheckRange("heartbeat_ms", in.heartbeat_ms(), 1, in.lease_ms()));
  HostProcess scheduler;
  if (in.has_scheduler()) {
    DT_ASSIGN_OR_RETURN(scheduler, FromProto("scheduler.host", in.scheduler()));
  }
  return JoinReply{WorkerId(in.worker()),  Epoch(in.epoch()), in.lease_ms(),       in.heartbeat_ms(),
                   in.wants_model_files(), in.cluster(),      std::move(scheduler)};
}

void ToProto(const Heartbeat& heartbeat, pb::Heartbeat& out) {
  out.Clear();
  out.set_sequence_number(heartbeat.sequence_number);
  out.set_kv_blocks_total(heartbeat.kv_blocks_total);
  out.set_kv_blocks_in_use(heartbeat.kv_blocks_in_use);
  out.set_kv_blocks_cached(heartbeat.kv_blocks_cached);
  out.set_steps(heartbeat.steps);
  out.set_busy_ms(heartbeat.busy_ms);
  out.set_damaged_blocks(heartbeat.damaged_blocks);
  out.set_certificate_end(heartbeat.certificate_end);
  for (const Link& link : heartbeat.links) {
    pb::Link& to = *out.add_links();
    to.set_node(link.node.value());
    to.set_lanes(link.lanes);
    to.set_message_bytes(link.message_bytes);
    to.set_tensor_bytes(link.tensor_bytes);
    to.set_exchange(link.exchange.substr(0, kMaxExchangeBytes));
  }
}

absl::StatusOr<Heartbeat> FromProto(const pb::Heartbeat& in) {
  Heartbeat heartbeat{in.sequence_number(),  in.kv_blocks_total(), in.kv_blocks_in_use(),
                      in.kv_blocks_cached(), in.steps(),           {},
                      in.busy_ms(),          in.damaged_blocks(),  in.certificate_end()};
  DT_RETURN_IF_ERROR(CheckRange("links", in.links_size(), 0, kMaxPeers));
  for (const pb::Link& link : in.links()) {
    DT_RETURN_IF_ERROR(CheckName("links.lanes", link.lanes(), kMaxLaneBytes));
    if (!link.exchange().empty()) DT_RETURN_IF_ERROR(CheckName("links.exchange", link.exchange(), kMaxExchangeBytes));
    heartbeat.links.push_back(
        {NodeId(link.node()), link.lanes(), link.message_bytes(), link.tensor_bytes(), link.exchange()});
  }
  return heartbeat;
}

void ToProto(const LinkFailed& failed, pb::LinkFailed& out) {
  out.set_node(failed.node.value());
  out.set_epoch(failed.epoch.value());
  out.set_why(failed.why.substr(0, kMaxLaneBytes));
  out.set_kind(static_cast<pb::LinkFailed::Kind>(failed.kind));
}

absl::StatusOr<LinkFailed> FromProto(const pb::LinkFailed& in) {
  DT_RETURN_IF_ERROR(CheckText("link_failed.why", in.why(), kMaxLaneBytes, /*may_be_empty=*/true));
  DT_RETURN_IF_ERROR(CheckRange("link_failed.kind", static_cast<uint64_t>(in.kind()), 0, 2));
  return LinkFailed{NodeId(in.node()), Epoch(in.epoch()), in.why(), static_cast<LinkFailed::Kind>(in.kind())};
}

void ToProto(const Ready& ready, pb::Ready& out) {
  out.set_kv_blocks(ready.kv_blocks);
  out.set_kv_bytes(ready.kv_bytes);
  out.set_leaves_states(ready.leaves_states);
}

Ready FromProto(const pb::Ready& in) { return {in.kv_blocks(), in.kv_bytes(), in.leaves_states()}; }

void ToProto(const Applied& applied, pb::Applied& out) {
  out.Clear();
  out.set_peers_version(applied.peers_version);
  for (const NodeId node : applied.unconnected) out.add_unconnected(node.value());
}

absl::StatusOr<Applied> FromProto(const pb::Applied& in) {
  DT_RETURN_IF_ERROR(CheckRange("applied.unconnected", in.unconnected_size(), 0, kMaxPeers));
  Applied applied{in.peers_version(), {}};
  for (const uint32_t node : in.unconnected()) applied.unconnected.push_back(NodeId(node));
  return applied;
}

void ToProto(const Configuration& configuration, pb::Configuration& out) {
  out.Clear();
  ToProto(configuration.attention, *out.mutable_attention());
  out.set_model_digest(configuration.model_digest);
  out.set_micro_batches(configuration.micro_batches);
  out.set_max_step_tokens(configuration.max_step_tokens);
  out.set_kv_storage(static_cast<uint32_t>(configuration.kv_storage));
  out.set_deterministic(configuration.deterministic);
}

absl::StatusOr<Configuration> FromProto(const pb::Configuration& in) {
  Configuration configuration;
  DT_ASSIGN_OR_RETURN(configuration.attention, FromProto(in.attention()));
  configuration.model_digest = in.model_digest();
  DT_RETURN_IF_ERROR(CheckRange("micro_batches", in.micro_batches(), 1, 16));
  configuration.micro_batches = static_cast<int>(in.micro_batches());
  DT_RETURN_IF_ERROR(CheckRange("max_step_tokens", in.max_step_tokens(), 1, proto::kMaxStepTokens));
  configuration.max_step_tokens = static_cast<int>(in.max_step_tokens());
  DT_RETURN_IF_ERROR(
      CheckRange("configuration.kv_storage", in.kv_storage(), 0, static_cast<uint64_t>(KvStorage::kInt8)));
  configuration.kv_storage = static_cast<KvStorage>(in.kv_storage());
  configuration.deterministic = in.deterministic();
  return configuration;
}

void ToProto(const Peers& peers, pb::Peers& out) {
  out.Clear();
  out.set_version(peers.version);
  for (const Peer& peer : peers.peers) {
    pb::Peer& to = *out.add_peers();
    to.set_node(peer.node.value());
    to.set_epoch(peer.epoch.value());
    to.set_worker(peer.worker.value());
    to.set_role(RoleToProto(peer.role));
    to.set_data_plane_address(peer.address);
  }
}

absl::StatusOr<Peers> FromProto(const pb::Peers& in) {
  Peers peers;
  peers.version = in.version();
  DT_RETURN_IF_ERROR(CheckRange("peers", in.peers_size(), 0, kMaxPeers));
  for (const pb::Peer& from : in.peers()) {
    DT_ASSIGN_OR_RETURN(const Role role, RoleFromProto(from.role(), /*scheduler_allowed=*/true));
    DT_RETURN_IF_ERROR(CheckText("peers.data_plane_address", from.data_plane_address(), kMaxAddressBytes));
    peers.peers.push_back(
        {NodeId(from.node()), Epoch(from.epoch()), WorkerId(from.worker()), role, from.data_plane_address()});
  }
  return peers;
}

}  // namespace dovetail::control
