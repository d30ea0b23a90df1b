#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "attention_worker/attention_backend.h"
#include "base/span_sink.h"
#include "base/status.h"
#include "control/worker_main.h"
#include "exchange/cuda/gpu_exchange.h"
#include "exchange/cuda/shared_gpu.h"
#include "kernels/device.h"

namespace dovetail::attention {

// An attention worker of a cluster. Knows no model: what it must know of one comes with the configuration, and its KV
// blocks are allocated then, as many as fit into `kv_bytes` and `kv_room`.
struct AttentionWorkerMainOptions {
  uint64_t kv_bytes = 0;
  // [bytes] Asked once the compute worker of its pair has its buffers: what the device has for KV. Empty: kv_bytes.
  std::function<absl::StatusOr<uint64_t>()> kv_room;
  std::string trace_file;               // written when an incarnation ends; empty: none
  int snapshot_percent = 50;            // see AttentionWorkerOptions
  exchange::GpuExchangeMeans exchange;  // of layers, from GPU to GPU
  KvStorage storage = KvStorage::kAsSent;
  Digests digests = Digests::kNone;
  SpanSink* spans = nullptr;  // of traces; outlives the node
  // With the compute worker of its pair, on a GPU; outlives the node.
  exchange::SharedGpu* shared_gpu = nullptr;
};

// For WorkerMain. `device` outlives the node.
// Threads: thread-safe; the node that it returns has the rule of control::WorkerNode.
std::unique_ptr<control::WorkerNode> MakeAttentionWorker(const AttentionWorkerMainOptions& options,
                                                         kernels::Device& device, transport::Connector& connector,
                                                         const control::JoinReply& membership);

}  // namespace dovetail::attention
