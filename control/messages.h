#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/host_process.h"
#include "base/ids.h"
#include "base/kv_storage.h"
#include "base/status.h"
#include "proto/attention_spec.h"

// What the control plane says. The generated types stay in control/ and the shells (control/convert.h).
// Threads: plain values and pure functions.

namespace dovetail::control {

inline constexpr size_t kMaxNameBytes = 128;
inline constexpr size_t kMaxVersionBytes = 128;
inline constexpr size_t kMaxAddressBytes = 64 << 10;
inline constexpr size_t kMaxLaneBytes = 256;
inline constexpr size_t kMaxArithmeticBytes = 256;
inline constexpr size_t kMaxHostBytes = 256;
inline constexpr size_t kMaxExchangeBytes = 512;
inline constexpr int kMaxPeers = 1024;
inline constexpr int kMaxModelFiles = 16;
inline constexpr uint64_t kMaxModelFileBytes = uint64_t{96} << 20;  // all together
inline constexpr size_t kFileChunkBytes = size_t{1} << 20;
inline constexpr int kMaxMessageBytes = 16 << 20;  // of one gRPC message
inline constexpr const char* kBuildVersion = "0.1.0";

enum class Role : uint8_t { kScheduler = 0, kAttentionWorker = 1, kComputeWorker = 2 };
const char* NameOf(Role role);  // "scheduler", "attention", "compute"

// A file of a model that servers need: tokenizer, chat template. `name` is a base name.
struct TextFile {
  std::string name;
  std::string bytes;
};

struct FileSummary {
  std::string name;
  uint64_t size = 0;
  std::string sha256;  // 32 bytes
  bool operator==(const FileSummary&) const = default;
};

// A position embedding that depends on the sequence's length (model/rope.h).
struct LengthRope {
  int kind = 0;  // model::RopeKind
  int64_t max_positions = 0, original_max_positions = 0;
  bool operator==(const LengthRope&) const = default;
};

// A model as attention workers and servers know it; no weights, no layers.
struct ModelSummary {
  std::string name;
  uint64_t digest = 0;
  proto::AttentionTable attention;
  int vocab_size = 0;
  int64_t max_positions = 0;
  std::optional<TokenId> bos;
  std::vector<TokenId> stop_ids;
  std::optional<float> temperature, top_p, min_p, repetition_penalty;
  std::optional<int> top_k;
  std::vector<LengthRope> length_ropes;
  std::vector<FileSummary> files;
  uint64_t weight_bytes = 0;
  int64_t hidden_size = 0;  // of a token's hidden state; 0: not said
  KvStorage kv_storage = KvStorage::kAsSent;
  bool deterministic = false;  // layers run on GPUs with --deterministic
};

struct Capabilities {
  uint64_t kv_bytes = 0;
  int cores = 0;
  uint64_t memory_bytes_per_s = 0;  // read by one core of a CPU, or by a GPU
  std::string device;
  // Of a compute worker: the same weights give another the same bits only where this is equal. Empty: not said.
  std::string arithmetic;
};

// Bytes a second that all cores, or the GPU, read together.
inline double ReadRate(const Capabilities& has) {
  const int readers = has.device.starts_with("cuda") ? 1 : std::max(1, has.cores);
  return static_cast<double>(has.memory_bytes_per_s) * readers;
}

struct JoinRequest {
  Role role = Role::kAttentionWorker;
  std::string name;
  NodeId node;
  Epoch epoch;
  std::string build_version;
  uint32_t frame_version = 0;
  std::string data_plane_version;
  std::string data_plane_address;
  Capabilities capabilities;
  std::optional<ModelSummary> model;  // of a compute worker
  uint64_t process = 0;               // random, of all incarnations of one worker process; 0: unknown
  HostProcess runs_as;                // no host: not known
};

struct JoinReply {
  WorkerId worker;
  Epoch epoch;
  uint32_t lease_ms = 0;
  uint32_t heartbeat_ms = 0;
  bool wants_model_files = false;
  uint64_t cluster = 0;
  HostProcess scheduler;  // no host: not known
};

struct Link {
  NodeId node;
  std::string lanes;
  uint64_t message_bytes = 0, tensor_bytes = 0;  // payloads sent to the node
  std::string exchange;  // how layers cross to an attention worker: "device", "host: " and why; empty: not said
  bool operator==(const Link&) const = default;
};

struct Heartbeat {
  uint64_t sequence_number = 0;
  uint64_t kv_blocks_total = 0, kv_blocks_in_use = 0, kv_blocks_cached = 0;
  uint64_t steps = 0;
  std::vector<Link> links;
  uint32_t busy_ms = 0;         // the longest turn of its loop since the last heartbeat: it was not heard meanwhile
  uint64_t damaged_blocks = 0;  // KV blocks that were not what was written, since it joined
  int64_t certificate_end = 0;  // of its certificate, in seconds since 1970; 0: it has none
};

struct LinkFailed {
  enum class Kind : uint8_t {
    kBroken = 0,  // for good
    kSilent = 1,  // nothing comes from there
    kLate = 2,    // its part of a step is overdue
  };
  NodeId node;
  Epoch epoch;
  std::string why;
  Kind kind = Kind::kBroken;
};

// A worker has what it needs for the model.
struct Ready {
  uint64_t kv_blocks = 0;      // of an attention worker
  uint64_t kv_bytes = 0;       // memory of these; at most what it joined with
  bool leaves_states = false;  // of a compute worker: linear layers of prompts run there (proto::StatesLeft)
};

// The peers of this version, except `unconnected`, are connected. Said again as more of them are.
struct Applied {
  uint64_t peers_version = 0;
  std::vector<NodeId> unconnected;
};

struct Configuration {
  proto::AttentionTable attention;
  uint64_t model_digest = 0;
  int micro_batches = 1;
  int max_step_tokens = 0;
  KvStorage kv_storage = KvStorage::kAsSent;  // in which compute workers attend prompts
  bool deterministic = false;                 // as the model's
};

struct Peer {
  NodeId node;
  Epoch epoch;
  WorkerId worker;
  Role role = Role::kScheduler;
  std::string address;
  bool operator==(const Peer&) const = default;
};

struct Peers {
  uint64_t version = 0;
  std::vector<Peer> peers;
};

}  // namespace dovetail::control
